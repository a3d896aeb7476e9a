"""Says when a program takes an executor's weights for itself after it has loaded them: FSDP reads whatever it divides."""

import sys
import weakref
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.run.outcome import left_alone
from symbiosis.run.settings import from_environment

WHY = (
    "FSDP has divided its weights among processes, so they lie in these once more: with an executor there is nothing to divide, so use DDP "
    "(accelerate launch --multi_gpu)"
)
_shared: "weakref.WeakKeyDictionary[nn.Module, object]" = weakref.WeakKeyDictionary()


def watch(model: nn.Module, name: object) -> None:
    """Look at the weights of a model that shares when an optimizer takes its first step."""
    _shared[model] = name
    _watch_steps()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_say_what_is_divided)


def _say_what_is_divided(*_: Any) -> None:
    for model, name in list(_shared.items()):
        del _shared[model]
        if is_divided(model):
            left_alone(name, WHY, from_environment())


def is_divided(model: nn.Module) -> bool:
    """Whether FSDP holds what the executor held.

    >>> is_divided(nn.Linear(2, 2))
    False
    """
    if "torch.distributed.fsdp" not in sys.modules or next(remote_weights(model), None) is not None:
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
