"""The load of Punica's paper: how long prompts and answers are, and which adapter each request has."""

from typing import Any

import numpy as np


def lengths_like_sharegpt(count: int, longest: int) -> list[tuple[int, int]]:
    """Of prompts and answers: log-normal, with ShareGPT's means (161 and 338 tokens)."""
    generator = np.random.default_rng(1)

    def draw(mean: float) -> Any:
        return generator.lognormal(np.log(mean) - 0.5, 1.0, count).astype(int).clip(4, longest // 2)

    return list(zip(draw(161).tolist(), draw(338).tolist(), strict=True))


def popularity(kind: str, count: int) -> list[int]:
    """Which adapter each request has. Distinct: each its own. Uniform: √n alike. Skewed: by Zipf's law, 1.5. Identical: one."""
    generator = np.random.default_rng(2)
    if kind == "distinct":
        return list(range(count))
    if kind == "identical":
        return [0] * count
    several = max(1, round(count**0.5))
    weights = np.ones(several) if kind == "uniform" else np.arange(1, several + 1) ** -1.5
    return list(generator.choice(several, count, p=weights / weights.sum()).tolist())
