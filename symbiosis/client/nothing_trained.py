"""Says that a wrapped model has nothing to train: before torch does, which knows no reason, when a loss without a gradient is made in training;
and as an error of the optimizer's step where torch says nothing. That is so if the input of the model requires a gradient, as it does under
gradient checkpointing: a program would compute for hours, and save what it began with.
"""

import logging
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import WrapError

WHY = (
    "the executor holds the model's weights, and none of its parameters here requires a gradient. Add an adapter: "
    'get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")), or peft_config=LoraConfig() of SFTTrainer; one that was saved: '
    "PeftModel.from_pretrained(model, FOLDER, is_trainable=True). Or let what this program holds for itself be trained: "
    "parameter.requires_grad_(True), before the optimizer is made"
)
logger = logging.getLogger("symbiosis")
_wrapped: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_known: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()  # that have something to change, or nothing of ours
_told: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def refuse_to_train_nothing(root: nn.Module) -> None:
    """From now on, refuse the steps of optimizers for this model that would change nothing, and say so at the first loss."""
    _watch()
    _wrapped.add(root)
    if _say_before_torch_does not in root._forward_hooks.values():
        root.register_forward_hook(_say_before_torch_does)


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
                raise WrapError(f"this step would train nothing: {WHY}")
    _known.add(optimizer)


def _say_before_torch_does(root: nn.Module, _: Any, output: Any) -> None:
    loss = getattr(output, "loss", None)
    if not root.training or not isinstance(loss, Tensor) or loss.requires_grad or not torch.is_grad_enabled():
        return
    if root not in _told and any(isinstance(parameter, RemoteWeight) for parameter in root.parameters()):
        _told.add(root)
        logger.warning("this loss has no gradient, and its backward() will fail: %s", WHY)
