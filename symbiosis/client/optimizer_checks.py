"""Refuses the first step of an optimizer that would not do what its program means.

It would train nothing: the loss may have a gradient all the same, if the input of the model requires one, as it does under gradient checkpointing.
A program would compute for hours, and save what it began with. Or it would train what little of a model is the client's own as if that were
the whole, and the program would never hear that the rest, which the executor holds, stays as it is.
"""

import logging
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from symbiosis.client.weights.remote_weight import RemoteWeight, remote_weights
from symbiosis.errors import WrapError

WHY = (
    "the executor holds the model's weights, and none of its parameters here requires a gradient. Add an adapter: "
    'get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")), or peft_config=LoraConfig() of SFTTrainer; one that was saved: '
    "PeftModel.from_pretrained(model, FOLDER, is_trainable=True). Or let what this program holds for itself be trained: "
    "parameter.requires_grad_(True), before the optimizer is made"
)
logger = logging.getLogger("symbiosis")
_wrapped: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_loaded: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Parameter]]]" = weakref.WeakKeyDictionary()
_known: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()  # whose step was not refused
_told: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def refuse_to_train_nothing(root: nn.Module) -> None:
    """From now on, refuse the steps of optimizers for this model that would change nothing, and say so at the first loss that has no gradient:
    torch, which fails then, knows no reason."""
    _watch()
    _wrapped.add(root)
    if _say_before_torch_does not in root._forward_hooks.values():
        root.register_forward_hook(_say_before_torch_does)


def refuse_to_train_whole(root: nn.Module) -> None:
    """From now on, refuse the first step of an optimizer for this model, unless somebody has frozen some of what is trainable now."""
    _watch()
    _loaded[root] = [weakref.ref(parameter) for parameter in root.parameters() if parameter.requires_grad]


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _known:
        return
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _must_train(given)
    _must_not_train_whole(given)
    _known.add(optimizer)


def _must_train(given: Sequence[Tensor]) -> None:
    if any(parameter.requires_grad for parameter in given):
        return
    for root in list(_wrapped):
        own = list(root.parameters())
        is_meant = not given or not {*map(id, given)}.isdisjoint(map(id, own))
        if is_meant and not any(parameter.requires_grad for parameter in own):
            raise WrapError(f"this step would train nothing: {WHY}")


def _must_not_train_whole(given: Sequence[Tensor]) -> None:
    ids = {*map(id, given)}
    for root, references in list(_loaded.items()):
        own = [parameter for reference in references if (parameter := reference()) is not None]
        held = [weight.handle.layer.name for weight in remote_weights(root) if weight.handle.private is None]
        is_trained = any(id(parameter) in ids for parameter in own)
        if held and is_trained and all(parameter.requires_grad for parameter in own):
            raise WrapError(
                f"this program trains all weights of its {type(root).__name__}, and {len(held)} of them are held by the executor and cannot be "
                f"trained ({held[0]}, ...): train an adapter (peft_config=LoraConfig() of TRL, finetuning_type: lora of LLaMA-Factory, "
                "adapter: lora of axolotl), freeze what is not to be trained (requires_grad_(False)), or run it without symbiosis run"
            )


def _say_before_torch_does(root: nn.Module, _: Any, output: Any) -> None:
    loss = getattr(output, "loss", None)
    if not root.training or not isinstance(loss, Tensor) or loss.requires_grad or not torch.is_grad_enabled():
        return
    if root not in _told and any(isinstance(parameter, RemoteWeight) for parameter in root.parameters()):
        _told.add(root)
        logger.warning("this loss has no gradient, and its backward() will fail: %s", WHY)
