"""What a model needs so that each of its rows is computed by itself: see `symbiosis/kernels/row_invariant.py`."""

from functools import partial
from typing import Any

from torch import nn

from symbiosis.client.layers.virt_layer import VirtConv1D, VirtLinear
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import ConfigError
from symbiosis.kernels.row_invariant import in_tiles
from symbiosis.offload.logit_check import place_of, text_config


def make_bitwise(model: Any) -> None:
    """Have a model compute each row by itself, within `row_invariant`. Raises `ConfigError` where that is not known to hold."""
    device, _ = place_of(model)
    if device.type != "cpu":
        raise ConfigError(
            f"bitwise is for a CPU so far, and the model is on {device}: its kernels for decoding, for prompts and for training have sums of their own"
        )
    must_be_invariant(model, "bitwise")
    if getattr(text_config(model), "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # a product for each expert
    for module in model.modules():
        if isinstance(module, VirtLinear | VirtConv1D):
            module.forward = partial(in_tiles, module.forward)  # type: ignore[method-assign]


def must_be_invariant(model: nn.Module, option: str) -> None:
    """Refuse executors that join the calls of several sessions."""
    for session in {weight.handle.session for weight in remote_weights(model)}:
        if not session.welcome.batch_invariant:
            raise ConfigError(
                f"{option} needs products that do not depend on others, and {session.endpoint} joins them: start it with --batch-invariant"
            )
