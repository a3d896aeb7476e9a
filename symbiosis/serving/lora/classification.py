"""What adapters bring that were not trained on a causal model: the heads of those that classify, and the names of those without a head."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter_files import PREFIX, AdapterWeights

HEADS = ("score", "classifier")  # names of a classification head, in models of transformers


@dataclass(slots=True, frozen=True, eq=False)
class ClassificationHead:
    """A linear layer from the last hidden state to classes, in float32."""

    weight: Tensor  # [classes, width]
    bias: Tensor | None = None  # [classes]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def without_head(weights: AdapterWeights, width: int) -> tuple[AdapterWeights, ClassificationHead]:
    """Return what an adapter of PEFT's SEQ_CLS does within the model, and its classification head. Raises `AdapterError` if it has none.

    Args:
        width: Of the model's hidden states.
    """
    tensors, found = dict(weights.tensors), dict[str, Tensor]()
    for name in list(tensors):
        head, _, leaf = name.removeprefix(PREFIX).rpartition(".")
        if head in HEADS and leaf in ("weight", "bias"):
            if leaf in found:
                raise AdapterError(f"it has two classification heads, {' and '.join(HEADS)}: save it with one")
            found[leaf] = tensors.pop(name)
    weight, bias = found.get("weight"), found.get("bias")
    if weight is None:
        raise AdapterError(
            f"it lacks its classification head ({' or '.join(HEADS)}), which PEFT saves with task_type SEQ_CLS: save it as PEFT does, or with "
            "task_type CAUSAL_LM if it is to write texts"
        )
    if (
        weight.dim() != 2
        or weight.shape[1] != width
        or not len(weight)
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        sizes = " with a bias of ".join(" x ".join(map(str, each.shape)) for each in (weight, bias) if each is not None)
        raise AdapterError(
            f"its classification head is {sizes}, and this base's width is {width}: it is for another base"
        )
    config = {**weights.config, "modules_to_save": _without_heads(weights.config.get("modules_to_save"))}
    head_of = ClassificationHead(weight.float().clone(), None if bias is None else bias.float().clone())
    return replace(weights, config=config, tensors=tensors), head_of


def _without_heads(names: Any) -> list[str] | None:
    return [name for name in names or () if name not in HEADS] or None


def as_causal(weights: AdapterWeights, base: Any) -> AdapterWeights:
    """Return an adapter of PEFT's FEATURE_EXTRACTION, which was trained on the model without any head, by the names that its layers have in the
    causal model `base`."""
    prefix = f"{PREFIX}{getattr(base, 'base_model_prefix', '')}."
    names = [name for name in weights.tensors if name.startswith(PREFIX)]
    if any(name.startswith(prefix) for name in names):
        return weights
    renamed = {prefix + name.removeprefix(PREFIX) if name in names else name: t for name, t in weights.tensors.items()}
    return replace(weights, tensors=renamed)
