"""Checks that a model whose attention was replaced still has the logits that it had before: tokens to try, and how near is near."""

from typing import Any

import torch
from torch import Tensor, nn

PROBE = (21, 9), 10  # the lengths of two sequences, and how much of the first is computed at first
AS_GOOD_AS = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}  # of the largest logit


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the part of a model that reads and writes text."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype of what the model holds itself."""
    own = next(p for p in model.parameters() if p.device.type != "meta" and p.is_floating_point())
    return own.device, own.dtype


@torch.inference_mode()
def logits_alone(model: nn.Module, tokens: list[int]) -> Tensor:
    """Return the logits of all positions."""
    ids = torch.tensor([tokens], device=place_of(model)[0])
    return model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def probe_tokens(model: nn.Module) -> tuple[list[int], list[int]]:
    """Return two short texts to try a model with, always the same."""
    generator, (lengths, _) = torch.Generator().manual_seed(0), PROBE
    long, short = (torch.randint(text_config(model).vocab_size, (n,), generator=generator).tolist() for n in lengths)
    return long, short


def agree(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results agree, apart from rounding in other company."""
    return bool((logits - expected).abs().max() <= AS_GOOD_AS[dtype] * expected.abs().max())
