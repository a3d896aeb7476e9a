"""Refuses requests that cannot be served before they are queued, and says why."""

import math

import msgspec

from symbiosis.errors import ConfigError
from symbiosis.serving.model import Served
from symbiosis.serving.request import Request, Sampling

MOST_LOGPROBS = 100
MOST_COMPLETIONS = 128
LARGEST_PENALTY = 2.0


def check(request: Request, virtual: int, adapter_pages: int, served: Served) -> None:
    """Raise `ConfigError` if this server cannot do what is asked.

    Args:
        virtual: How many tokens the adapter puts in front.
        adapter_pages: How many pages of the pool the adapter needs.
    """
    _check_sampling(request.sampling, served.vocabulary)
    if not 1 <= request.completions <= MOST_COMPLETIONS:
        raise ConfigError(f"there may be 1 to {MOST_COMPLETIONS} completions of a request, not {request.completions}")
    if not virtual + len(request.prompt):
        raise ConfigError("the prompt is empty: give at least one token")
    _check_tokens(request.prompt, served.vocabulary, "the prompt")
    sampling, whole = request.sampling, virtual + len(request.prompt) + request.sampling.max_tokens
    if sampling.max_tokens < 1 and not request.prompt_logprobs:
        raise ConfigError(f"max_tokens must be at least 1, not {sampling.max_tokens}")
    if whole > served.longest:
        raise ConfigError(
            f"the prompt of {virtual + len(request.prompt)} tokens and max_tokens={sampling.max_tokens} are {whole} together, and the model "
            f"takes {served.longest}: shorten the prompt, or ask for fewer tokens"
        )
    pages = served.blocks.needed(whole) + adapter_pages
    if pages > served.arena.pool.total:
        raise ConfigError(
            f"a text of {whole} tokens takes {pages} pages of the server's memory, which has {served.arena.pool.total}: ask for fewer "
            "tokens, or give the server more memory"
        )


def _check_sampling(sampling: Sampling, vocabulary: int) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(sampling), Sampling)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"how to choose tokens: {error}") from None
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("top_k", 0, math.inf),
        ("max_tokens", 0, math.inf),
        ("min_tokens", 0, sampling.max_tokens),
        ("logprobs", 0, MOST_LOGPROBS),
        ("presence_penalty", -LARGEST_PENALTY, LARGEST_PENALTY),
        ("frequency_penalty", -LARGEST_PENALTY, LARGEST_PENALTY),
        ("repetition_penalty", 0.0, math.inf),
    ):
        value = getattr(sampling, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise ConfigError(f"{name} lies between {low:g} and {high:g}, and is {value}")
    if sampling.top_p == 0.0 or sampling.repetition_penalty == 0.0:
        raise ConfigError("top_p and repetition_penalty must be above 0")
    _check_tokens(sampling.stop_tokens, vocabulary, "stop_tokens")
    _check_tokens(tuple(sampling.logit_bias), vocabulary, "logit_bias")
    if not all(map(math.isfinite, sampling.logit_bias.values())):
        raise ConfigError("the values of logit_bias must be finite; -100 keeps a token from coming")


def _check_tokens(tokens: tuple[int, ...], vocabulary: int, what: str) -> None:
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        wrong = next(token for token in tokens if type(token) is not int or not 0 <= token < vocabulary)
        raise ConfigError(f"{what} has the token {wrong!r}, and the model's are numbered from 0 to {vocabulary - 1}")
