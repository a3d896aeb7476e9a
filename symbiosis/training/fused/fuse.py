"""`fuse` and `unfuse`: what of a PEFT program's forward pass is replaced, after a proof on the model itself."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.client.arguments import a_model
from symbiosis.client.layers.layer_plan import base_model
from symbiosis.errors import ConfigError
from symbiosis.offload.logit_check import AS_GOOD_AS, place_of, probe_tokens
from symbiosis.training.fused.forward_pass import ModelForward
from symbiosis.training.fused.fused_modules import attention_forward, gated_forward, norm_forward
from symbiosis.training.fused.lazy_head import HeadForward, is_frozen_product
from symbiosis.training.fused.lora_group import LoraForward, LoraGroup
from symbiosis.training.fused.module_forward import ModuleForward, has_own_forward, put, take_back

logger = logging.getLogger("symbiosis")
Model = TypeVar("Model", bound=nn.Module)


def fuse(model: Model) -> Model:
    """Let a model with adapters train with fewer products, launches and passes over memory. In place; Trainer, PEFT and TRL do what they did.

    LoRA of layers that share their input is computed together, in the dtype of the rows; the loss never needs whole logits, which are made when
    somebody reads them; RMS norms, gated feed-forwards and rotary positions have kernels of their own. Each part is compared with what it replaces, in one small
    step, and left out if it computes anything else. What a part does not know (dropout, DoRA, merged or several adapters, quantised layers,
    compiled code) its module computes as before. Parameters and their names stay. Call it after `get_peft_model`, before or after `wrap`.

    >>> import symbiosis, torch
    >>> from peft import LoraConfig, get_peft_model
    >>> with symbiosis.Executor("demo") as executor:
    ...     model = symbiosis.from_executor(executor.endpoint)
    ...     model = symbiosis.fuse(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")))
    ...     ids = torch.tensor([list(b"Once upon a time")])
    ...     model(input_ids=ids, labels=ids).loss.backward()
    """
    a_model(model, "fuse")
    unfuse(model)
    base = base_model(model)
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(f"fuse takes a causal language model of transformers, and {type(base).__name__} is none")
    with _evaluated(base):
        probe = _Probe(base)
        if not has_own_forward(base):
            put(ModelForward(base, _head(base), probe.groups))
        parts = {
            "adapters": _adapters(probe.groups),
            "loss": _loss(base),
            "norms": _of_modules(base, norm_forward),
            "feed-forwards": _of_modules(base, gated_forward),
            "rotary positions": _of_modules(base, attention_forward),
        }
        report = [f"{name} ({_take(forwards, probe)})" for name, forwards in parts.items() if forwards]
    logger.info("fused: %s", ", ".join(report) or "nothing")
    return model


def unfuse(model: Model) -> Model:
    """Let a model compute as it did before `fuse`, to the bit. In place.

    >>> import symbiosis
    >>> from peft import LoraConfig, get_peft_model
    >>> with symbiosis.Executor("demo") as executor:
    ...     model = get_peft_model(symbiosis.from_executor(executor.endpoint), LoraConfig(task_type="CAUSAL_LM"))
    ...     model = symbiosis.unfuse(symbiosis.fuse(model))
    """
    a_model(model, "unfuse")
    for module in model.modules():
        take_back(module)
    return model


class Step(NamedTuple):
    """What a step makes."""

    loss: Tensor
    gradients: tuple[Tensor | None, ...]


class _Probe:
    """A small step of a model as it is, and the groups of LoRA layers that it shows."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ConfigError("fuse: nothing in this model is trained: call get_peft_model(model, config) first")
        texts = probe_tokens(model)
        length = min(map(len, texts))
        self._ids = torch.tensor([text[:length] for text in texts], device=place_of(model)[0])
        self._labels = self._ids.clone()
        self._labels[0, :3] = -100
        calls: list[tuple[LoraLinear, Tensor]] = []
        layers = [m for m in model.modules() if type(m) is LoraLinear and not has_own_forward(m)]
        hooks = [layer.register_forward_pre_hook(partial(_note, calls)) for layer in layers]
        try:
            self._expected = self.step()
        finally:
            for hook in hooks:
                hook.remove()
        self.groups = _groups(calls)

    def step(self) -> Step:
        try:
            with torch.enable_grad():
                loss = self._model(input_ids=self._ids, labels=self._labels, use_cache=False).loss
        except TypeError as error:
            raise ConfigError(
                f"fuse takes a causal language model, whose loss follows from input_ids and labels: {error}"
            ) from error
        return Step(loss.detach(), torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def agrees(self) -> bool:
        """Whether a step has still the loss and the gradients that it had, apart from rounding."""
        found, expected = self.step(), self._expected
        if [each is None for each in found.gradients] != [each is None for each in expected.gradients]:
            return False
        near = AS_GOOD_AS[place_of(self._model)[1]]
        pairs = zip(found.gradients, expected.gradients, strict=True)
        off = _length([mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None])
        length = _length([each for each in expected.gradients if each is not None])
        return bool((found.loss - expected.loss).abs() <= near * expected.loss.abs()) and off <= near * length


def _length(tensors: list[Tensor]) -> float:
    return float(torch.stack([tensor.float().norm().cpu() for tensor in tensors]).norm())


def _note(calls: list[tuple[LoraLinear, Tensor]], layer: LoraLinear, inputs: tuple[Any, ...]) -> None:
    if len(inputs) == 1 and isinstance(inputs[0], Tensor):
        calls.append((layer, inputs[0]))


def _groups(calls: Sequence[tuple[LoraLinear, Tensor]]) -> list[LoraGroup]:
    """Return layers that were called one after another with the very same tensor, and whose adapters have one scale."""
    often = {id(layer) for place, (layer, _) in enumerate(calls) if any(layer is other for other, _ in calls[:place])}
    found: list[LoraGroup] = []
    for _, run in groupby(calls, lambda call: id(call[1])):
        by_scale: dict[Any, list[LoraLinear]] = {}
        for layer, _ in run:
            if id(layer) in often:
                by_scale[id(layer)] = [layer]
            else:
                by_scale.setdefault(tuple(sorted(layer.scaling.items())), []).append(layer)
        found += [LoraGroup(layers) for layers in by_scale.values()]
    return found


def _adapters(groups: list[LoraGroup]) -> list[ModuleForward]:
    by_layer = {id(layer): LoraForward(layer, group) for group in groups for layer in group.layers}
    return list(by_layer.values())


def _head(model: nn.Module) -> nn.Module | None:
    """Return the head of a model, if it is frozen."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if head is not None and is_frozen_product(head) and not has_own_forward(head) else None


def _loss(model: nn.Module) -> list[ModuleForward]:
    model_forward = vars(model).get("forward")
    return (
        [HeadForward(model_forward.head)]
        if isinstance(model_forward, ModelForward) and model_forward.head is not None
        else []
    )


def _of_modules(model: nn.Module, made: Any) -> list[ModuleForward]:
    free = (module for module in model.modules() if not has_own_forward(module))
    return [forward for module in free if (forward := made(module)) is not None]


def _take(forwards: list[ModuleForward], probe: _Probe) -> str:
    """Put forward passes into their modules, if a step stays what it was. Returns what became of them."""
    for forward in forwards:
        put(forward)
    why = ""
    try:
        if probe.agrees():
            return str(len(forwards))
        why = "a step has other results"
    except Exception as error:  # whatever a model makes of it
        why = f"{type(error).__name__}: {error}"
    for forward in forwards:
        take_back(forward.module)
    logger.warning("fuse leaves %d modules as they are: %s", len(forwards), why)
    return "left"


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Let a model draw nothing at random meanwhile."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
