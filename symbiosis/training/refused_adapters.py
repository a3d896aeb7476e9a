"""Adapters that are refused before PEFT makes them."""

from typing import Any

from symbiosis.errors import AdapterError

RANKS = ("r", "init_r", "target_r", "num_virtual_tokens")  # of a configuration


def check_rank(config: Any, most: int) -> None:
    """Refuse ranks beyond the limit."""
    ranks = {name: getattr(config, name, None) for name in RANKS}
    patterns = getattr(config, "rank_pattern", None) or {}
    for name, rank in {**ranks, **{f"rank_pattern of {each}": rank for each, rank in patterns.items()}}.items():
        if isinstance(rank, int) and rank > most:
            raise AdapterError(
                f"its {name} is {rank}, and this engine takes {most} at most: start it with a larger max_rank"
            )
