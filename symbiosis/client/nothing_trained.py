"""Refuses to train nothing: a step of an optimizer that has no parameter to change, where a wrapped model has none either.

Torch says so by itself, unless the input of the model requires a gradient, as it does under gradient checkpointing: then a program would
compute for hours, and save what it began with.
"""

import weakref
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from symbiosis.errors import WrapError

_wrapped: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_known: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()  # that have something to change, or nothing of ours


def refuse_to_train_nothing(root: nn.Module) -> None:
    """From now on, refuse the steps of optimizers for this model that would change nothing."""
    _watch()
    _wrapped.add(root)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_must_train)


def _must_train(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _known:
        return
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(parameter.requires_grad for parameter in given):
        for root in list(_wrapped):
            own = list(root.parameters())
            is_meant = not given or not {*map(id, given)}.isdisjoint(map(id, own))
            if is_meant and not any(parameter.requires_grad for parameter in own):
                raise WrapError(
                    "this step would train nothing: the executor holds the model's weights, and none of its parameters here requires a "
                    'gradient. Add an adapter: get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")), or peft_config=LoraConfig() of '
                    "SFTTrainer; one that was saved: PeftModel.from_pretrained(model, FOLDER, is_trainable=True). Or let what this program "
                    "holds for itself be trained: parameter.requires_grad_(True), before the optimizer is made"
                )
    _known.add(optimizer)
