"""`wrap` and `unwrap`: turn a model's frozen layers into proxies, and back.

What is replaced is what the executor's manifest names, found by name and checked by shape, dtype and digest; never what
happens to be an `nn.Linear`. That is what keeps an adapter's own layers on the client. Everything is checked before
anything is changed.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.client.noise import Noise
from symbiosis.client.peft_methods import support_peft_methods
from symbiosis.client.private import Plain, Privacy, PrivateSession
from symbiosis.client.remote_view import Handle
from symbiosis.client.remote_weight import RemoteWeight
from symbiosis.client.session import CALL_S, Session, Stats
from symbiosis.client.verify import Proofs
from symbiosis.client.virt_layer import VirtConv1D, VirtLinear
from symbiosis.config import default_endpoints
from symbiosis.errors import Code, WrapError
from symbiosis.fingerprint import digest
from symbiosis.protocol import Layer, Priority
from symbiosis.transport.tensors import DTYPE_NAME, TORCH_DTYPE

logger = logging.getLogger("symbiosis")
Model = TypeVar("Model", bound=nn.Module)

PROXY: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: VirtLinear, Conv1D: VirtConv1D}
ORIGINAL = {proxy: original for original, proxy in PROXY.items()}
# Names that PEFT, torch and accelerate put between a layer and its parent.
DETOURS = frozenset(("base_layer", "original_module", "parametrizations", "original", "_orig_mod", "module"))
OTHER_SHAPE = "its shape"
# Of a configuration, what decides results; the rest is of shapes, training, generation and tokens.
DECIDES = ("*rope_*", "*norm*", "*_eps", "*epsilon*", "*_act", "*activation*", "*head*", "*_per_tok", "*window*", "*softcap*", "*scal*", "*multiplier*", "*rotary*", "*layer_types*")  # fmt: skip
DECODES = "_optimize_model_for_decode"  # the method that transformers' `generate` decodes within


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


def wrap(
    model: Model,
    endpoint: str | Sequence[str] | None = None,
    *,
    timeout: float = CALL_S,
    layers: Sequence[str] | str | None = None,
    priority: str | None = None,
    exact: bool = True,
    privacy: Privacy | str | None = None,
    verify: bool = False,
) -> Model:
    """Let an executor compute the frozen layers of `model`. In place; before or after `get_peft_model`.

    Args:
        endpoint: The executor's URL, or those of several that serve the same model: when the one in use is lost, ends or
            does not answer in time, the next one goes on. Else `$SYMBIOSIS_ENDPOINT`, else this host's default socket.
        timeout: Seconds that one call may take before it is sent again; default: `$SYMBIOSIS_CALL_TIMEOUT_S`, else 120.
        layers: Patterns of layer names (`"model.layers.*"`); default: every layer that the executor serves.
        priority: "decode", "prefill" or "train" for all calls; default: as it follows from each call.
        exact: Whether gradients are to be the unsplit model's, bit for bit. Without it the gradients of layers that share
            their input (q/k/v, gate/up) are one call instead of several, and are added in another order.
        privacy: What the executor's operator must not see: `symbiosis.Split(OTHER_ENDPOINT)` or `symbiosis.Pads(FILE)` hide
            everything but lengths and times, `symbiosis.Noise()` (or "noise") only obscures; default: nothing is hidden.
        verify: Whether every answer is tested by a secret projection, so that a wrong one is an error.

    >>> from transformers import AutoModelForCausalLM
    >>> import symbiosis
    >>> from symbiosis.executor.load import DEMO_MODEL
    >>> model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    >>> with symbiosis.Executor("demo") as executor:
    ...     model = symbiosis.wrap(model, executor.endpoint)
    ...     symbiosis.stats(model).calls
    0
    """
    if not isinstance(model, nn.Module):
        raise WrapError(
            f"wrap takes a model, not {model!r:.80}: load it with AutoModelForCausalLM.from_pretrained(...), or let "
            "symbiosis.from_executor(...) build it"
        )
    words: dict[str, Any] = {"priority": _priority(priority), "timeout": timeout, "exact": exact}
    session = _session(endpoint or default_endpoints(), privacy, verify, **words)
    try:
        report = attach(model, session, [layers] if isinstance(layers, str) else layers)
    except BaseException:
        session.close()
        raise
    logger.info("%s", report)
    return model


def attach(
    model: nn.Module, session: Session, patterns: Sequence[str] | None = None, device: torch.device | None = None
) -> Report:
    """Plan, check, then change `model` so that `session` computes its served layers.

    `device` is where a model without weights (on meta) will live; there is nothing to check then.
    """
    if next(remote_weights(model), None) is not None:
        raise WrapError("this model is wrapped already: symbiosis.unwrap(model) first")
    plan, report = plan_wrap(model, session.manifest, patterns)
    private = session if isinstance(session, PrivateSession) else None
    if private:
        plan = _without_the_private(model, plan, report, session.manifest)
    if not plan:
        raise WrapError(_nothing_matches(session, patterns, report), Code.WRONG_MODEL)
    if device is None:
        for places, index in plan:
            check_same(places[0], session.manifest[index])
        _warn_of_differences(model, session, report)
    if any(session.manifest[index].kind == "tensor" for _, index in plan):
        _gather_no_experts(model)
    support_peft_methods()
    biases = {layer.name: layer.digest for layer in session.manifest if layer.name.endswith(".bias") and not private}
    for places, index in plan:
        if private:
            private.learn(index, _parameter(places[0]).detach())
        replace(places, Handle(session, index, session.manifest[index]), biases, device)
    root = base_model(model)
    if say_what_is_left_out not in root._state_dict_hooks.values():
        root.register_state_dict_post_hook(say_what_is_left_out)
    _ignore_in_ddp(model)
    model._symbiosis_report = report  # type: ignore[assignment]
    return report


def _without_the_private(
    model: nn.Module, plan: list[tuple[list[Place], int]], report: Report, manifest: Sequence[Layer]
) -> list[tuple[list[Place], int]]:
    """Only layers whose rows can be masked: not embeddings and experts, nor the head, whose gradient shows the labels."""
    root = base_model(model)
    head = root.get_output_embeddings() if isinstance(root, PreTrainedModel) else None
    kept = []
    for places, index in plan:
        layer = manifest[index]
        if layer.kind in ("linear", "conv1d") and all(place.owner is not head for place in places):
            kept.append((places, index))
        else:
            report.wrapped.remove(layer.name)
            report.kept[layer.name] = "private"
    return kept


def _session(endpoint: str | Sequence[str], privacy: Privacy | str | None, verify: bool, **words: Any) -> Session:
    if privacy is None and not verify:
        return Session(endpoint, **words)
    if isinstance(privacy, str):
        if privacy != "noise":
            raise WrapError(
                f"privacy={privacy!r}: write symbiosis.Split(ENDPOINT), symbiosis.Pads(FILE) or symbiosis.Noise()"
            )
        privacy = Noise()
    if isinstance(privacy, type):
        raise WrapError(f"privacy={privacy.__name__} is the class: write {privacy.__name__}(...), with what it needs")
    return PrivateSession(endpoint, privacy or Plain(), Proofs() if verify else None, **words)


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
    some_frozen = any(not _parameter(p[0]).requires_grad for p in by_tensor.values() if p[0].layer_name in served)
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
    tensor = _parameter(places[0])
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


def check_same(place: Place, layer: Layer) -> None:
    """The client's tensor must be the executor's, bit for bit: else the client is built for another model."""
    tensor = _parameter(place)
    dtype = DTYPE_NAME.get(tensor.dtype)
    if dtype != layer.dtype:
        raise WrapError(
            f"{layer.name}: this model is {dtype}, the executor's is {layer.dtype}. Load the model with "
            f"dtype=torch.{layer.dtype} (cast it after wrap if you like), or start the executor with --dtype {dtype}",
            Code.WRONG_MODEL,
        )
    if tensor.device.type != "meta" and digest(tensor) != layer.digest:
        raise WrapError(
            f"{layer.name}: the weights differ from the executor's. This model is another checkpoint or revision, "
            "or something changed its weights (PiSSA, OLoRA and the like do at init: keep such layers with layers=)",
            Code.WRONG_MODEL,
        )


def _warn_of_differences(model: nn.Module, session: Session, report: Report) -> None:
    """What is no error, as it may be meant, but gives other results than the executor's model."""
    shapes = [f"{name}: {reason}" for name, reason in report.kept.items() if reason.startswith(OTHER_SHAPE)]
    if shapes:
        logger.warning(
            "%d of the layers that %s serves stay with this client: %s",
            len(shapes),
            session.endpoint,
            "; ".join(shapes[:4]),
        )
    config = getattr(base_model(model), "config", None)
    mine = _settings(json.loads(config.to_json_string(use_diff=False))) if isinstance(config, PreTrainedConfig) else {}
    theirs = _settings(json.loads(session.welcome.config))
    settings = [
        f"{key} is {mine[key]!r} here and {theirs[key]!r} there"
        for key in mine
        if theirs.get(key, mine[key]) != mine[key]
    ]
    if settings:
        logger.warning(
            "this model is configured otherwise than that of %s, so its results differ: %s",
            session.endpoint,
            "; ".join(settings),
        )


def _settings(config: dict[str, Any], path: str = "") -> dict[str, Any]:
    """What decides results, by its name; that of a part by the part's and its own."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _settings(value, f"{path}{name}.")
        elif any(fnmatchcase(path + name, pattern) for pattern in DECIDES):
            found[path + name] = value
    return found


def replace(places: list[Place], handle: Handle, biases: dict[str, str], device: torch.device | None = None) -> None:
    """Put a remote weight where the real one was. `biases`: digests of those that the executor has."""
    old = _parameter(places[0])
    parameter = nn.Parameter(RemoteWeight.whole(handle, old.dtype, device or old.device), requires_grad=False)
    for place in places:
        owner = place.owner
        owner._parameters[place.name] = parameter
        bias = owner._parameters.get("bias")
        if bias is not None and handle.layer.bias and biases.get(f"{handle.layer.name}.bias") == _digest_of(bias):
            handle.own_bias = (bias, bias._version)
        owner.__class__ = PROXY.get(type(owner), type(owner))
        owner.register_state_dict_post_hook(leave_out_remote)
        owner.register_load_state_dict_pre_hook(put_in_remote)


def _digest_of(bias: Tensor) -> str:
    return "" if bias.device.type == "meta" else digest(bias)


def leave_out_remote(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict holds what the client owns."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, RemoteWeight):
            state.pop(prefix + name, None)


def say_what_is_left_out(root: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """To whoever asks for the base model's: who saves an adapter asks for more, and keeps nothing of the base."""
    if not prefix and (left_out := sum(1 for _ in remote_weights(root))):
        logger.warning(
            "a state dict of a wrapped model holds what is the client's own, not the %d weights that the executor holds: to save "
            "a whole checkpoint, symbiosis.unwrap(model) first",
            left_out,
        )


def put_in_remote(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """... and loads as if it held the remote weights, too. Other values than the executor's are a write."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, RemoteWeight) and _is_served(state.get(prefix + name), parameter.handle):
            state[prefix + name] = parameter


def _is_served(given: Tensor | None, handle: Handle) -> bool:
    """Whether what is to be loaded, if anything, is what the executor has."""
    if given is None or isinstance(given, RemoteWeight) or given.device.type == "meta":
        return True
    return handle.private is None and _is_the_executors(given, handle.layer)


def _is_the_executors(value: Tensor, layer: Layer) -> bool:
    return tuple(value.shape) == layer.shape and digest(value.to(TORCH_DTYPE[layer.dtype])) == layer.digest


def unwrap(model: Model, weights: str | Path | dict[str, Tensor] | None = None) -> Model:
    """Give the model its own weights back: `weights` (a checkpoint directory or state dict), else read from the executor
    if it allows reads, else from the directory that the model was loaded from. Other weights than the executor's are refused.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo", allow_read=True) as executor:
    ...     model = symbiosis.unwrap(symbiosis.from_executor(executor.endpoint))
    ...     type(model.model.layers[0].mlp.up_proj).__name__
    'Linear'
    """
    found: dict[int, RemoteWeight] = {id(weight): weight for weight in remote_weights(model)}
    source = _source_of_weights(model, list(found.values()), weights)
    values = {key: source(weight) for key, weight in found.items()}
    sessions = {weight.handle.session for weight in found.values()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, RemoteWeight):
                module._parameters[name] = nn.Parameter(values[id(parameter)], requires_grad=False)
                module._state_dict_hooks.clear()
                module.__class__ = ORIGINAL.get(type(module), type(module))
    vars(base_model(model)).pop(DECODES, None)
    for session in sessions:
        session.close()
    return model


def _source_of_weights(model: nn.Module, remote: list[RemoteWeight], weights: Any) -> Any:
    if not remote:
        return None
    if weights is None and remote[0].handle.session.welcome.allow_read:
        return lambda weight: weight.value().clone()
    tensors = weights if isinstance(weights, dict) else _checkpoint(model, weights)
    where = "the given weights" if weights is not None else f"the weights in {_loaded_from(model)}"

    def take(weight: RemoteWeight) -> Tensor:
        layer = weight.handle.layer
        value = tensors.get(f"{layer.name}.weight", tensors.get(layer.name))
        if value is None or tuple(value.shape) != layer.shape:
            raise WrapError(f"{where} have no {layer.name} of shape {layer.shape}", Code.WRONG_MODEL)
        if not _is_the_executors(value, layer):
            raise WrapError(
                f"{layer.name}: {where} differ from those that this model was wrapped with: pass weights=DIRECTORY (or a state dict) "
                "of the executor's checkpoint and revision",
                Code.WRONG_MODEL,
            )
        return value.to(weight.device, weight.dtype)

    return take


def _checkpoint(model: nn.Module, directory: str | Path | None) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = Path(directory or _loaded_from(model) or "/nonexistent")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        raise WrapError(
            "unwrap needs the weights, which this client does not have: pass weights=DIRECTORY (or a state dict), "
            "or start the executor with --allow-read"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _loaded_from(model: nn.Module) -> str:
    """A directory or a hub id; empty if the model was built."""
    return getattr(base_model(model), "name_or_path", "")


def remote_weights(model: nn.Module) -> Iterator[RemoteWeight]:
    for module in model.modules():
        for parameter in module._parameters.values():
            if isinstance(parameter, RemoteWeight):
                yield parameter


def stats(model: nn.Module) -> Stats:
    """What this client has seen of its executor: calls, bytes, waits, batch sizes.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor:
    ...     symbiosis.stats(symbiosis.from_executor(executor.endpoint)).reconnects
    0
    """
    weight = next(remote_weights(model), None)
    if weight is None:
        raise WrapError("this model is not wrapped: symbiosis.wrap(model) first")
    session = weight.handle.session
    for line in session.lines:  # the executor counts for the GPU
        session.stats.batched_calls, session.stats.reconnects = line.batched, line.reconnects
    return session.all_stats() if isinstance(session, PrivateSession) else session.stats


def report(model: nn.Module) -> Report:
    """What `wrap` did to the model.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor:
    ...     print(symbiosis.report(symbiosis.from_executor(executor.endpoint)))
    wrapped 35/36 (kept: lm_head, not served)
    """
    for module in model.modules():
        if found := module.__dict__.get("_symbiosis_report"):
            return found
    raise WrapError("this model is not wrapped: symbiosis.wrap(model) first")


def _parameter(place: Place) -> nn.Parameter:
    parameter = place.owner._parameters[place.name]
    assert parameter is not None
    return parameter


def _priority(name: str | None) -> Priority | None:
    if name is None:
        return None
    try:
        return Priority[name.upper()]
    except KeyError:
        raise WrapError(f"priority is decode, prefill or train, not {name!r}") from None


def _nothing_matches(session: Session, patterns: Sequence[str] | None, report: Report) -> str:
    served = [layer.name for layer in session.manifest if layer.kind != "client"]
    examples = ", ".join(served[:3]) + (", ..." if len(served) > 3 else "")
    told = f"{session.endpoint} serves layers of a {session.welcome.model_class} ({examples})"
    kept = [f"{name}: {reason}" for name, reason in report.kept.items() if name in served]
    if not kept:
        return f"{told}, but none of this model's: wrap the model that the executor serves, or start one for this model"
    more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
    chosen = "" if patterns is None else f" (layers={list(patterns)})"
    return f"{told}, but all that this model has of them stay with it{chosen}: {'; '.join(kept[:3])}{more}"


def _gather_no_experts(model: nn.Module) -> None:
    """`batched_mm` copies each token's expert weights, which would read them; `grouped_mm` multiplies in place. On a GPU
    `generate` turns from the latter to the former for as long as it decodes: not here."""
    root = base_model(model)
    if hasattr(root, DECODES):
        setattr(root, DECODES, nullcontext)
    if getattr(root.config, "_experts_implementation", None) == "batched_mm":
        root.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        logger.warning("experts_implementation 'batched_mm' reads the experts' weights: set to 'grouped_mm'")


def _ignore_in_ddp(model: nn.Module) -> None:
    """Tell DistributedDataParallel, under every name PEFT may give them, which parameters are not there to broadcast."""
    root = base_model(model)
    names = [name for name, p in root.named_parameters(remove_duplicate=False) if isinstance(p, RemoteWeight)]
    ignored = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        for prefix in ("", "base_model.model.", "base_model.", "model."):
            ignored += [f"{prefix}{name}", f"{prefix}{path}.base_layer.{leaf}"]
    root._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
