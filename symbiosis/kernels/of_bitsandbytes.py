"""Parameters of bitsandbytes as packed weights: the same bytes. It is not imported here; its parameters are known by the names of their classes."""

from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.kernels.packed import PackedWeight, ScaledWeight, TableWeight

OF_4_BITS, OF_8_BITS = "Params4bit", "Int8Params"


def packed_of(parameter: Tensor) -> PackedWeight | None:
    """Return a parameter of bitsandbytes as what it holds; None for any other tensor, and for one that is not packed yet."""
    name = type(parameter).__name__
    if name == OF_4_BITS:
        return _four_bits(parameter, getattr(parameter, "quant_state", None))
    if name == OF_8_BITS and getattr(parameter, "SCB", None) is not None:
        return _eight_bits(parameter, parameter.SCB)  # type: ignore[attr-defined]
    return None


def dtype_of(parameter: Tensor, model: nn.Module) -> torch.dtype:
    """Return the dtype of the values that a parameter of a model stands for."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return state.dtype  # type: ignore[no-any-return]
    if parameter.is_floating_point():
        return parameter.dtype
    return next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float16)


def _four_bits(parameter: Tensor, state: Any) -> PackedWeight | None:
    if state is None:
        return None
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "bitsandbytes has laid this weight out anew for this processor: load the model again, and do not run it before"
        )
    nested = state.state2 if state.nested else None
    codes = parameter.detach().view(torch.uint8).view(-1, 1)  # which may be stored as another dtype
    return TableWeight(
        tuple(state.shape),
        state.quant_type,
        codes,
        state.code.float(),
        state.blocksize,
        state.absmax,
        None if nested is None else nested.absmax.float(),
        None if nested is None else nested.code.float(),
        256 if nested is None else nested.blocksize,
        0.0 if nested is None else state.offset.item(),
    )


def _eight_bits(parameter: Tensor, scb: Tensor) -> PackedWeight:
    codes = parameter.detach()
    return ScaledWeight(tuple(codes.shape), "int8", codes, (scb.float() * (1 / 127))[:, None], (1, codes.shape[-1]))
