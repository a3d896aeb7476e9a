"""Finds a model's parameters, and decides which of them go to the executor.

The names in the executor's manifest decide, and never what happens to be an `nn.Linear`. That is what keeps an adapter's own layers on the
client.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.base.layer_names import modules_in_base, parameter_in_base
from symbiosis.base.layer_selection import choose, excludes, matches
from symbiosis.errors import WrapError
from symbiosis.kernels.of_bitsandbytes import packed_of
from symbiosis.protocol import Layer

OTHER_SHAPE = "its shape"


@dataclass
class ParameterSite:
    """The place of one parameter in the client's model. A module may be reached by several names."""

    owner: nn.Module
    name: str
    layer_name: str  # as the executor calls it
    own_name: str  # as this model does


@dataclass
class WrapReport:
    """The outcome of `wrap`: how many layers went to the executor, and which candidates stayed, each with the reason."""

    wrapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.wrapped) + len(self.kept)
        kept = ", ".join(f"{name}, {reason}" for name, reason in list(self.kept.items())[:8])
        more = f" and {len(self.kept) - 8} more" if len(self.kept) > 8 else ""
        return f"wrapped {len(self.wrapped)}/{total}" + (f" (kept: {kept}{more})" if kept else "")


def plan_wrap(
    model: nn.Module, manifest: Sequence[Layer], patterns: Sequence[str] | None
) -> tuple[list[tuple[list[ParameterSite], int]], WrapReport]:
    """Return the parameters that become remote, as the places of each tensor and the layer's number, and the report."""
    served = {layer.name: index for index, layer in enumerate(manifest) if layer.kind != "client"}
    by_tensor: dict[int, list[ParameterSite]] = {}
    for place in places_of(model, served):
        by_tensor.setdefault(id(place.owner._parameters[place.name]), []).append(place)
    chosen = _chosen(patterns, served, [place for places in by_tensor.values() for place in places], manifest)
    some_frozen = any(not parameter_of(p[0]).requires_grad for p in by_tensor.values() if p[0].layer_name in served)
    plan, report = [], WrapReport()
    for places in by_tensor.values():
        reason = _why_kept(places, served, chosen, manifest, some_frozen)
        name = _candidate(places, served).layer_name
        if reason is None:
            plan.append((places, served[name]))
            report.wrapped.append(name)
        elif reason:
            report.kept[name] = reason
    return plan, report


def _chosen(
    patterns: Sequence[str] | None, served: dict[str, int], places: Iterable[ParameterSite], manifest: Sequence[Layer]
) -> set[str]:
    """Return the served layers that `layers=` chooses, by the executor's names or by this model's."""
    names: dict[str, set[str]] = {name: {name} for name in served}
    mine = {layer.name for layer in manifest}  # what stays here may be excluded, too
    for place in places:
        mine |= {place.own_name, place.layer_name}
        if place.layer_name in served:
            names[place.layer_name].add(place.own_name)
    theirs = set().union(*names.values())
    for pattern in patterns or ():
        if excludes(pattern) and not matches(mine, [pattern[1:]]):
            raise WrapError(f"layers={pattern!r} excludes nothing: this model has no such layer; {_examples(served)}")
        if not excludes(pattern) and not matches(theirs, [pattern]):
            why = "the executor was not told to serve it" if matches(mine, [pattern]) else "there is no such layer"
            raise WrapError(f"layers={pattern!r} matches no served layer: {why}; {_examples(served)}")
    return choose(patterns or (), names, served)


def _examples(served: dict[str, int]) -> str:
    return f"names look like: {', '.join(list(served)[:4]) or '(none)'}"


def _why_kept(
    places: list[ParameterSite], served: dict[str, int], chosen: set[str], manifest: Sequence[Layer], some_frozen: bool
) -> str | None:
    """Return why a parameter stays with the client: None if it goes to the executor, "" if it was no candidate at all."""
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
    expected, packed = manifest[served[places[0].layer_name]].shape, packed_of(tensor)
    shape = tuple(tensor.shape) if packed is None else packed.shape
    return None if shape == expected else f"{OTHER_SHAPE} {shape} is not the executor's {expected}"


def _candidate(places: list[ParameterSite], served: dict[str, int]) -> ParameterSite:
    """Return the name under which a tensor is reported: a served layer, else a linear layer, to which an embedding may be tied."""
    return next((p for p in places if p.layer_name in served), next(filter(_is_linear, places), places[0]))


def _is_linear(place: ParameterSite) -> bool:
    return isinstance(place.owner, nn.Linear | Conv1D)


def _belongs_to_adapter(place: ParameterSite) -> bool:
    return any(part.startswith(("lora_", "modules_to_save", "prompt_encoder")) for part in place.layer_name.split("."))


def places_of(model: nn.Module, served: dict[str, int]) -> Iterator[ParameterSite]:
    """Return every parameter of the model, once for each of its names, under the name that it has in the base model."""
    root = base_model(model)
    theirs = executors_names(root, served)
    seen: set[tuple[int, str]] = set()
    for _, own, module in modules_in_base(root):
        for name, parameter in module._parameters.items():
            if parameter is None or name == "bias":
                continue
            whole = name == "weight" and (theirs(own) in served or isinstance(module, nn.Linear | Conv1D))
            mine = own if whole else parameter_in_base(own, module, name)
            if (id(module), name) in seen and theirs(mine) not in served:
                continue
            seen.add((id(module), name))
            yield ParameterSite(module, name, theirs(mine), mine)


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside whatever is around it, or the model itself if there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def executors_names(root: nn.Module, served: Collection[str]) -> Callable[[str], str]:
    """Return a function from a layer's name in this model to the executor's name. They differ if the two sides' classes call the base
    differently (`bert.encoder`, `encoder`). Of the ways to rename, the one that finds most layers is taken."""
    prefix = getattr(root, "base_model_prefix", "")
    names = {name for _, name, _ in modules_in_base(root)}
    ways = [
        partial(_renamed, mine, theirs)
        for mine in ("", *([f"{prefix}."] if prefix else []))
        for theirs in ("", *sorted({f"{name.partition('.')[0]}." for name in served}))
    ]
    return max(ways, key=lambda way: sum(way(name) in served for name in names))


def _renamed(mine: str, theirs: str, name: str) -> str:
    return theirs + name.removeprefix(mine)


def parameter_of(place: ParameterSite) -> nn.Parameter:
    parameter = place.owner._parameters[place.name]
    assert parameter is not None
    return parameter
