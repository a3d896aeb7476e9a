"""Adapters that are refused before PEFT makes them."""

from typing import Any

from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter_kinds import refuse_rewritten
from symbiosis.serving.lora.peft_layers import CANNOT, OPTIONS

PROMPTS = ("PROMPT_TUNING", "P_TUNING")  # embeddings in front of a sequence
PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")  # keys and values in front of those of a sequence
ELSEWHERE = {
    **CANNOT,
    "ADALORA": "it changes its ranks between steps, when its program says so",
}

RANKS = ("r", "init_r", "target_r", "num_virtual_tokens")  # of a configuration


def check_kind(config: Any) -> None:
    """Refuse what acts elsewhere than at layers or in front of a sequence, or changes the base."""
    kind = getattr(getattr(config, "peft_type", None), "value", None)
    if kind is None:
        raise AdapterError(f"create takes a configuration of PEFT such as LoraConfig(r=16), not {config!r}")
    if kind in ELSEWHERE:
        raise AdapterError(
            f"{kind} cannot be trained together with others: {ELSEWHERE[kind]}. Wrap the model, and train it in a program of its own"
        )
    if config.is_prompt_learning and kind not in PROMPTS + PREFIXES:
        raise AdapterError(
            f"{kind} acts elsewhere than at layers: wrap the model, and train it in a program of its own"
        )
    for option, reason in OPTIONS.items():
        if getattr(config, option, None):
            raise AdapterError(f"a LoRA with {option} cannot be trained together with others: {reason}")
    if kind == "LORA":
        refuse_rewritten({"init_lora_weights": config.init_lora_weights})


def check_rank(config: Any, most: int) -> None:
    """Refuse ranks beyond the limit."""
    ranks = {name: getattr(config, name, None) for name in RANKS}
    patterns = getattr(config, "rank_pattern", None) or {}
    for name, rank in {**ranks, **{f"rank_pattern of {each}": rank for each, rank in patterns.items()}}.items():
        if isinstance(rank, int) and rank > most:
            raise AdapterError(
                f"its {name} is {rank}, and this engine takes {most} at most: start it with a larger max_rank"
            )
