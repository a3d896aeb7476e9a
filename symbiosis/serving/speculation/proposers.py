"""Makes what drafts tokens for one engine, or says why there is none."""

from symbiosis.errors import ConfigError
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.speculation.draft_model import DraftModelProposer
from symbiosis.serving.speculation.ngram import NgramProposer
from symbiosis.serving.speculation.speculate_rule import SpeculateRule
from symbiosis.serving.speculation.speculation import Speculation

NOT_HERE = "speculate does not go with this model, so leave it out: "


def speculation(rule: SpeculateRule, served: ModelRunner, memory: int | float | None) -> Speculation:
    """Return the drafts of an engine. Raises `ConfigError` where a step computes one token of a text only.

    Args:
        memory: Of the engine. A draft model gets a share of it for keys and values of its own.
    """
    if not served.batches:
        raise ConfigError(f"{NOT_HERE}its sequences are computed one by one, by a cache that takes nothing back")
    if served.device.type == "cuda":
        raise ConfigError(f"{NOT_HERE}on a GPU a step is captured for one row of each text that decodes")
    proposer = NgramProposer() if rule.draft is None else DraftModelProposer(rule.draft, served, memory)
    return Speculation(proposer, rule.tokens)
