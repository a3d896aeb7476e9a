"""Where a model's parameters sit, and which of them go to the executor.

Names decide, as the executor's manifest has them; never what happens to be an `nn.Linear`. That is what keeps an adapter's own
layers on the client.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.protocol import Layer

logger = logging.getLogger("symbiosis")
# Names that PEFT, torch and accelerate put between a layer and its parent.
DETOURS = frozenset(("base_layer", "original_module", "parametrizations", "original", "_orig_mod", "module"))
OTHER_SHAPE = "its shape"


@dataclass
class Place:
    """Where one parameter of the client's model sits: a module may be reached by several names."""

    owner: nn.Module
    name: str
    layer_name: str


@dataclass
class Report:
    """What `wrap` did: how many layers went to the executor, and which candidates stayed, each with the reason."""

    wrapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.wrapped) + len(self.kept)
        kept = ", ".join(f"{name}, {reason}" for name, reason in list(self.kept.items())[:8])
        more = f" and {len(self.kept) - 8} more" if len(self.kept) > 8 else ""
        return f"wrapped {len(self.wrapped)}/{total}" + (f" (kept: {kept}{more})" if kept else "")


def plan_wrap(
    model: nn.Module, manifest: Sequence[Layer], patterns: Sequence[str] | None
) -> tuple[list[tuple[list[Place], int]], Report]:
    """Which parameters become remote: places of one tensor, and the layer's number."""
    served = {layer.name: index for index, layer in enumerate(manifest) if layer.kind != "client"}
    chosen = {name for name in served if patterns is None or any(fnmatchcase(name, p) for p in patterns)}
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in served):
            logger.warning("layers=%r matches no served layer, such as %s", pattern, next(iter(served), "(none)"))
    by_tensor: dict[int, list[Place]] = {}
    for place in places_of(model, served):
        by_tensor.setdefault(id(place.owner._parameters[place.name]), []).append(place)
    some_frozen = any(not parameter_of(p[0]).requires_grad for p in by_tensor.values() if p[0].layer_name in served)
    plan, report = [], Report()
    for places in by_tensor.values():
        reason = _why_kept(places, served, chosen, manifest, some_frozen)
        name = _candidate(places, served).layer_name
        if reason is None:
            plan.append((places, served[name]))
            report.wrapped.append(name)
        elif reason:
            report.kept[name] = reason
    return plan, report


def _why_kept(
    places: list[Place], served: dict[str, int], chosen: set[str], manifest: Sequence[Layer], some_frozen: bool
) -> str | None:
    """None: goes to the executor. "": no candidate at all. Else the reason to stay."""
    candidates = [place for place in places if place.layer_name in served]
    if not candidates:
        candidate = _candidate(places, served)
        if not _is_linear(candidate) or _belongs_to_adapter(candidate):
            return ""
        return "tied" if any(place.owner is not candidate.owner for place in places) else "not served"
    if len(candidates) < len(places):
        return "tied"
    if not all(place.layer_name in chosen for place in candidates):
        return "not chosen"
    tensor = parameter_of(places[0])
    if tensor.requires_grad and some_frozen:
        return "trainable"
    expected = manifest[served[places[0].layer_name]].shape
    return (
        None
        if tuple(tensor.shape) == expected
        else f"{OTHER_SHAPE} {tuple(tensor.shape)} is not the executor's {expected}"
    )


def _candidate(places: list[Place], served: dict[str, int]) -> Place:
    """Under whose name a tensor is reported: what is served, else a linear layer, to which an embedding may be tied."""
    return next((p for p in places if p.layer_name in served), next(filter(_is_linear, places), places[0]))


def _is_linear(place: Place) -> bool:
    return isinstance(place.owner, nn.Linear | Conv1D)


def _belongs_to_adapter(place: Place) -> bool:
    return any(part.startswith(("lora_", "modules_to_save", "prompt_encoder")) for part in place.layer_name.split("."))


def places_of(model: nn.Module, served: dict[str, int]) -> Iterator[Place]:
    """Every parameter of the model (each name of it once), under the name it has in the base model."""
    root = base_model(model)
    prefix = _missing_prefix(root, served)
    seen: set[tuple[int, str]] = set()
    for path, module in root.named_modules(remove_duplicate=False):
        base = prefix + base_name(path)
        for name, parameter in module._parameters.items():
            if parameter is None or name == "bias":
                continue
            full = f"{base}.{name}" if base else name
            whole = name == "weight" and (base in served or isinstance(module, nn.Linear | Conv1D))
            layer = base if whole else base_name(full)
            if (id(module), name) in seen and layer not in served:
                continue
            seen.add((id(module), name))
            yield Place(module, name, layer)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside whatever is around it; the model itself if there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def base_name(path: str) -> str:
    """A module's path without what PEFT and others put in between."""
    return ".".join(part for part in path.split(".") if part not in DETOURS)


def _missing_prefix(root: nn.Module, served: dict[str, int]) -> str:
    """ "model." if the client has the bare model (`LlamaModel`) of what is served (`LlamaForCausalLM`)."""
    names = {base_name(path) for path, _ in root.named_modules()}
    prefix = getattr(root, "base_model_prefix", "")
    if prefix and not names & served.keys() and any(name.startswith(f"{prefix}.") for name in served):
        return f"{prefix}."
    return ""


def parameter_of(place: Place) -> nn.Parameter:
    parameter = place.owner._parameters[place.name]
    assert parameter is not None
    return parameter
