"""Refuses to train a part of a model as if it were the whole: a program that fine-tunes all weights of a model would train what little of it is its own,
and never hear that the rest, which the executor holds, stays as it is."""

import weakref
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import WrapError

_loaded: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Parameter]]]" = weakref.WeakKeyDictionary()
_known: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def refuse_to_train_whole(root: nn.Module) -> None:
    """From now on, refuse the first step of an optimizer for this model, unless somebody has frozen some of what is trainable now."""
    _watch()
    _loaded[root] = [weakref.ref(parameter) for parameter in root.parameters() if parameter.requires_grad]


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_must_not_train_whole)


def _must_not_train_whole(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _known:
        return
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for root, references in list(_loaded.items()):
        own = [parameter for reference in references if (parameter := reference()) is not None]
        held = [weight.handle.layer.name for weight in remote_weights(root) if weight.handle.private is None]
        is_trained = any(id(parameter) in given for parameter in own)
        if held and is_trained and all(parameter.requires_grad for parameter in own):
            raise WrapError(
                f"this program trains all weights of its {type(root).__name__}, and {len(held)} of them are held by the executor and cannot be "
                f"trained ({held[0]}, ...): train an adapter (peft_config=LoraConfig() of TRL, finetuning_type: lora of LLaMA-Factory, "
                "adapter: lora of axolotl), freeze what is not to be trained (requires_grad_(False)), or run it without symbiosis run"
            )
    _known.add(optimizer)
