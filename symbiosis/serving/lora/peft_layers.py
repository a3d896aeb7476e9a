"""Adapters of all other kinds: each runs its own PEFT layers on its rows, while the base's products are computed for all rows at once.

PEFT makes the layers on a copy of the model that shares all its weights. In the copy the base layers are taps. Asked for the product of the
very rows of a group, a tap hands out what was computed already; other rows it multiplies itself.
"""

import copy
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import AdapterError, SymbiosisError
from symbiosis.kernels.adapter_rows import Rows
from symbiosis.serving.lora.adapter_files import AdapterWeights
from symbiosis.serving.lora.adapter_kinds import Base, OwnTensor, is_named, refuse_rewritten
from symbiosis.text import shown

CANNOT = {
    "XLORA": "it weighs several adapters by what the whole model computes first",
    "POLY": "it needs the number of a task with every request",
    "MULTITASK_PROMPT_TUNING": "it needs the number of a task with every request",
    "CPT": "it needs to know which tokens of a prompt are examples",
    "ADAPTION_PROMPT": "it acts inside attention",
    "SHADOW": "it is a model of its own beside the base",
    "OSF": "it replaces the base's weights",
}
FACTORING = ("svd", "qr", "inverse", "pinverse", "matrix_exp", "logdet")  # besides torch.linalg's
MOST_FACTORING = 2e9  # multiplications; a second or so
LONGEST_S, TIMES_BASE = 1.0, 100  # that all layers may take for two rows, and so many times as long as the base's
SOON_S = 0.01  # what takes longer is tried again: the first time something may have been prepared
FIELDS = ("target_modules", "feedforward_modules", "modules_to_save", "target_parameters")  # that name layers
OPTIONS = {  # of LoRA
    "alora_invocation_tokens": "it acts from certain tokens of a prompt on only",
    "layer_replication": "it changes the model's layers",
    "arrow_config": "it chooses among other adapters for each token",
    "kasa_config": "it changes the base's weights",
}


class _OfThread(threading.local):
    """The rows of the group that this thread runs, and what the base made of them."""

    x: Tensor | None = None
    y: Tensor | None = None


_now = _OfThread()


class Tap:
    """The base layer within a PEFT layer."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given, made = _now.x, _now.y
        if given is not None and made is not None and _are_same(given, x) and not is_parametrized(self):  # type: ignore[arg-type]
            return made
        return super().forward(x, *args, **kwargs)  # type: ignore[misc, no-any-return]


_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def _tapped(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a layer of this kind that hands out products."""
    if kind not in _kinds:
        _kinds[kind] = type(kind.__name__, (Tap, kind), {"__module__": kind.__module__})
    return _kinds[kind]


def _are_same(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if not isinstance(b, Tensor) or a.data_ptr() != b.data_ptr():
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


@contextmanager
def handing_out(x: Tensor, y: Tensor) -> Iterator[None]:
    """In the block, the taps of this thread hand out `y` when they are asked for the product of `x`."""
    _now.x, _now.y = x, y
    try:
        yield
    finally:
        _now.x = _now.y = None


def run_layer(layer: nn.Module, x: Tensor, y: Tensor, rows: Rows) -> None:
    """Write into these rows of `y`, which the base made of `x`, what the layer makes of them. The last dimension but one is that of the
    rows; the `x` of an embedding has rows only."""
    with_width = x.is_floating_point()
    ours, made = (_take(x, rows, with_width), _take(y, rows, True))
    with handing_out(ours, made):
        result = layer(ours)
    if isinstance(rows, slice):
        if result is not made:
            made.copy_(result)
    elif y.dim() == 3:
        y[:, rows] = result.to(y.dtype)
    else:
        y[rows] = result.to(y.dtype)


def _take(x: Tensor, rows: Rows, with_width: bool) -> Tensor:
    return x[:, rows] if x.dim() == 2 + with_width else x[rows]


# ---------------------------------------------------------------- making them


class Skeleton:
    """A copy of a model that shares its weights, from which the copies for adapters are made. It has to be made before the model has
    sites."""

    def __init__(self, model: nn.Module) -> None:
        self._shared: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._shared[id(tensor)] = tensor
        self._model = self._copy(model)

    def copy(self, own_biases: bool) -> nn.Module:
        """Return a copy with aliases of the weights: to put another value in the place of one does not change the base."""
        shared = dict(self._shared)
        for name, parameter in self._model.named_parameters(remove_duplicate=True):
            if isinstance(parameter, RemoteWeight):
                continue
            values = parameter.detach().clone() if own_biases and name.endswith("bias") else parameter.detach()
            shared[id(parameter)] = nn.Parameter(values, requires_grad=False)
        return copy.deepcopy(self._model, shared)

    def names(self) -> set[str]:
        """Return the names of the base's modules."""
        return {name for name, _ in self._model.named_modules()}

    def addresses(self) -> set[int]:
        """Return where the base's tensors lie that are in this process."""
        return {t.data_ptr() for t in self._shared.values() if not isinstance(t, RemoteWeight)}

    def _copy(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model, dict(self._shared))


class Untouched:
    """The base's weights where an adapter may act, as they were before it was loaded. An adapter that changes them is undone and
    refused."""

    def __init__(self, base: Base, config: dict[str, Any]) -> None:
        names = [name for field in FIELDS for name in _listed(config.get(field))]
        modules = [module for path, module in base.modules.items() if not names or is_named(path, names)]
        tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
        self._own = [(t, t.detach().clone()) for t in tensors.values() if not isinstance(t, RemoteWeight)]
        self._remote = [p for p in base.model.parameters() if isinstance(p, RemoteWeight) and p.handle.private is None]

    def check(self) -> None:
        changed = [(now, before) for now, before in self._own if not _are_equal(now, before)]
        written = [weight for weight in self._remote if weight.handle.private is not None]
        for now, before in changed:
            now.detach().copy_(before)
        for weight in written:
            weight.handle.private = None
        if changed or written:
            raise AdapterError("PEFT changes the base's weights for it, which are everybody's: it cannot be served")


def _listed(named: Any) -> list[str]:
    return [named] if isinstance(named, str) else [str(name).removesuffix(".weight") for name in named or ()]


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, bit by bit."""
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def peft_layers(weights: AdapterWeights, base: Base, skeleton: Skeleton) -> dict[str, nn.Module]:
    """Return PEFT's layers of this adapter, by the names of the base's layers on which they act. Each has run once by then, and left the
    base as it was."""
    untouched = Untouched(base, weights.config)
    try:
        layers = _made(weights, base, skeleton)
        left = LONGEST_S
        for name, layer in layers.items():
            took = _try(name, layer, base)
            left -= took if took < SOON_S else min(took, _try(name, layer, base))
            if left < 0:
                raise AdapterError("its layers take too long: everybody else would wait for them in each step")
    finally:
        untouched.check()
    return layers


@torch.no_grad()
def _try(name: str, layer: nn.Module, base: Base) -> float:
    """Run a layer on rows like those of a step. Return the seconds of the processor that it took, beyond what goes with the base's own."""
    module = base.modules[name]
    if isinstance(module, nn.Embedding):
        x = torch.zeros(1, 2, dtype=torch.long)
    elif (width := _width(module)) is not None:
        x = torch.ones(1, 2, width, dtype=base.dtype)
    else:
        return 0.0
    x = x.to(next(layer.parameters()).device)
    try:
        # without the module's hooks, which are for the rows of the step that the engine computes meanwhile
        began = time.thread_time()
        y = module.forward(x).clone()
        made = time.thread_time()
        run_layer(layer, x, y, slice(0, 2))
        took = time.thread_time() - made - TIMES_BASE * (made - began)
    except SymbiosisError as error:
        raise AdapterError(f"it needs more of the base than its products: {error}") from None
    except Exception as error:  # whatever PEFT's layers raise
        raise AdapterError(
            f"PEFT cannot compute it at {name}: {type(error).__name__}: {shown(str(error), 300)}"
        ) from None
    if not torch.isfinite(y).all():
        raise AdapterError(f"at {name} it makes numbers that are infinite or not numbers: its values are too large")
    return max(0.0, took)


def _width(module: nn.Module) -> int | None:
    """Return the width of the rows that a layer takes."""
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, Conv1D):
        return int(module.nx)
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and weight.dim() == 1 else None


def own_tensors(layers: Iterable[nn.Module], base: Base) -> list[OwnTensor]:
    """Return what these layers hold that is not the base's, and leave it in the host's memory."""
    base_tensors = (*base.model.parameters(), *base.model.buffers())
    addresses = {t.data_ptr() for t in base_tensors if not isinstance(t, RemoteWeight)}
    found: dict[tuple[Any, ...], OwnTensor] = {}
    for held in (held for layer in layers for m in layer.modules() for held in (m._parameters, m._buffers)):
        for name, t in held.items():
            if t is None or isinstance(t, RemoteWeight) or not t.numel() or t.data_ptr() in addresses:
                continue
            key = t.data_ptr(), t.shape, t.stride(), t.dtype, isinstance(t, nn.Parameter)
            found.setdefault(key, OwnTensor([], t.detach().cpu())).places.append((held, name))
    for own in found.values():
        own.put(own.values)
    return list(found.values())


def _made(weights: AdapterWeights, base: Base, skeleton: Skeleton) -> dict[str, nn.Module]:
    _refuse(weights.config)
    model = skeleton.copy(own_biases=weights.config.get("bias", "none") not in ("none", None))
    shared = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    _own_modules(model, weights.config.get("modules_to_save"))
    try:
        adapted = _inject(model, weights)
    except AdapterError:
        raise
    except SymbiosisError as error:
        raise AdapterError(f"it needs more of the base than its products: {error}") from None
    layers = dict(outermost(adapted.base_model.model))
    ours = {id(tensor) for layer in layers.values() for tensor in (*layer.parameters(), *layer.buffers())}
    if any(id(parameter) not in shared | ours for parameter in adapted.parameters()) or not layers:
        raise AdapterError(f"{weights.config['peft_type']} acts elsewhere than at layers, and cannot be served")
    for layer in layers.values():
        tap(layer)
    return layers


def _refuse(config: dict[str, Any]) -> None:
    from peft import __version__
    from peft.config import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = config["peft_type"]
    if kind in CANNOT:
        raise AdapterError(f"{kind} cannot be served together with others: {CANNOT[kind]}")
    known = PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)
    if kind == "CARTRIDGE" or (known is not None and issubclass(known, PromptLearningConfig)):
        raise AdapterError(f"{kind} acts elsewhere than at layers, and cannot be served")
    if known is None:
        raise AdapterError(
            f"{shown(str(kind))} cannot be served: PEFT {__version__} has no such kind. If a later one has it: upgrade peft"
        )
    for option, reason in OPTIONS.items():
        if config.get(option):
            raise AdapterError(f"a LoRA with {option} cannot be served together with others: {reason}")
    if kind == "LORA":
        refuse_rewritten(config)


def _own_modules(model: nn.Module, names: list[str] | None) -> None:
    """Replace these modules by layers of the adapter's own, where the base's weights lie in the executor: PEFT would copy the base's,
    and there is nothing to copy."""
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or not isinstance(module.weight, RemoteWeight):
            continue
        if is_named(path, names or ()):
            own = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, own.to(module.weight.dtype).requires_grad_(False))


class FactoringLimit(TorchFunctionMode):
    """Within it, matrices may be factored, inverted and the like for so many multiplications in all. Some methods do so with every weight of the
    base, which takes minutes; others' adapters would have to wait."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self._left = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in FACTORING or (name.startswith("linalg_") and not name.endswith("norm")):
            matrix = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))  # or of a list
            self._left -= matrix.numel() * min(matrix.shape[-2:], default=1)
            if self._left < 0:
                raise AdapterError(
                    "its method factors the base's weights, which takes too long for a base of this size: save it as a LoRA"
                )
        return func(*args, **kwargs or {})


def _inject(model: nn.Module, weights: AdapterWeights) -> Any:
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), FactoringLimit(MOST_FACTORING):
            warnings.simplefilter("ignore")
            config = PeftConfig.from_peft_type(**{**weights.config, "inference_mode": True})
            adapted = get_peft_model(model, config)
            expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            tensors = _checked(weights.tensors, expected, model)
            set_peft_model_state_dict(adapted, tensors)
    except SymbiosisError:
        raise
    except Exception as error:  # whatever PEFT says to a configuration that it does not take
        raise AdapterError(f"PEFT does not take it: {type(error).__name__}: {shown(str(error), 300)}") from None
    return adapted.eval().requires_grad_(False)


def _checked(tensors: dict[str, Tensor], expected: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Check that all of the adapter's own modules are there, with the shapes that this base needs."""
    own = {name: tensor for name, tensor in tensors.items() if name in expected or ".base_layer." not in name}
    for name in tensors.keys() - own.keys():
        there = dict(model.named_parameters()).get(name.removeprefix("base_model.model."))
        if there is not None and there.shape != tensors[name].shape:
            raise AdapterError(f"{shown(name)} is of another shape than this base's: its vocabulary was changed")
    for name, tensor in own.items():
        if name not in expected:
            raise AdapterError(f"it has {shown(name)}, which is nothing of this base's: it is for another one")
        if expected[name].shape != tensor.shape:
            theirs, ours = (" x ".join(map(str, t.shape)) for t in (tensor, expected[name]))
            raise AdapterError(
                f"{shown(name)} is {theirs}, and this base needs {ours}: it is for a base of another size"
            )
    if missing := sorted(expected.keys() - own.keys()):
        raise AdapterError(f"it lacks {missing[0]}, and {len(missing)} such tensors: save it again")
    return own


def outermost(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield path, module
        else:
            waiting += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def tap(layer: nn.Module) -> None:
    """Make a layer's innermost base layer a tap."""
    inner: Any = layer
    while (deeper := getattr(inner, "base_layer", None) or getattr(inner, "original_module", None)) is not None:
        inner = deeper
    if inner is not layer and not isinstance(inner, Tap):
        inner.__class__ = _tapped(type(inner))
