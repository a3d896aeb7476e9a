"""Adapters that are refused before PEFT makes them."""

from collections.abc import Collection, Iterator
from typing import Any

from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter_kinds import refuse_rewritten
from symbiosis.serving.lora.config_patterns import without_patterns
from symbiosis.serving.lora.peft_layers import CANNOT, OPTIONS

PROMPTS = ("PROMPT_TUNING", "P_TUNING")  # embeddings in front of a sequence
PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")  # keys and values in front of those of a sequence
ELSEWHERE = {
    **CANNOT,
    "ADALORA": "it changes its ranks between steps, when its program says so",
}

LARGEST = 1e6  # of numbers that scale: beyond it values are soon infinite or not numbers, and attention may hide that
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
    if getattr(config, "megatron_config", None):
        raise AdapterError("its megatron_config has PEFT import a module by its name: leave it out")
    if kind == "LORA":
        refuse_rewritten({"init_lora_weights": config.init_lora_weights})
    for name, number in _numbers(config):
        if not abs(number) <= LARGEST:
            raise AdapterError(f"its {name} is {number}: numbers are from -{LARGEST:g} to {LARGEST:g}")


def check_patterns(config: Any, names: Collection[str]) -> None:
    """Refuse expressions that take long. They are tried in a process that can be stopped, before PEFT matches them with the names of layers here."""
    told = {name: list(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    without_patterns(told, names)


def _numbers(config: Any) -> Iterator[tuple[str, float]]:
    for name, told in vars(config).items():
        for value in told.values() if isinstance(told, dict) else [told]:
            if isinstance(value, float) or (isinstance(value, int) and "alpha" in name):
                yield name, value


def check_rank(config: Any, most: int) -> None:
    """Refuse ranks beyond the limit."""
    ranks = {name: getattr(config, name, None) for name in RANKS}
    patterns = getattr(config, "rank_pattern", None) or {}
    for name, rank in {**ranks, **{f"rank_pattern of {each}": rank for each, rank in patterns.items()}}.items():
        if isinstance(rank, int) and rank > most:
            raise AdapterError(
                f"its {name} is {rank}, and this engine takes {most} at most: start it with a larger max_rank"
            )
