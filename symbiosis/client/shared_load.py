"""`from_pretrained` without the weights that an executor holds.

transformers' own loader does all that it does. Each weight that it has made of the checkpoint is compared with the executor's, by digest, and
dropped if it is the same. Of a checkpoint that is known from an earlier start, such weights are not even read. So whatever a loader
decides is decided as ever: names, dtypes, what is missing and how it is initialised, what is tied, and what it reports.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading

from symbiosis.client import known_checkpoints
from symbiosis.client.checkpoint_reader import CheckpointReader, NotRead, opened
from symbiosis.client.known_checkpoints import Made
from symbiosis.client.layers.layer_plan import OTHER_SHAPE, parameter_of, plan_wrap
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import RemoteWeight, remote_weights
from symbiosis.client.wrap import attach
from symbiosis.client.wrap_warnings import PACKED
from symbiosis.errors import WrapError
from symbiosis.kernels.of_bitsandbytes import OF_4_BITS, packed_of
from symbiosis.protocol import Layer
from symbiosis.transport.fingerprint import digest
from symbiosis.transport.local.shared_weights import phase
from symbiosis.transport.tensors import CPU, DTYPE_NAME, TORCH_DTYPE

logger = logging.getLogger("symbiosis")
Kind = tuple[torch.dtype, tuple[int, ...]]

ENOUGH = 8  # weights that differ, before any was the same: it is another model, and the rest is not compared
_current: ContextVar["SharedLoad | None"] = ContextVar("current", default=None)


class SharedLoad:
    """One call of `from_pretrained` of `model_class`.

    Args:
        refuse: Is told why a model, or a part of it, does not come from the executor: before weights are loaded, if that is known by then.
            It may raise.
        as_dtype: Returns what to write in the program for a dtype.
        strict: Whether to refuse at the first weight that differs. Else the model shares those that are the same.
    """

    def __init__(
        self,
        model_class: type,
        session: Session,
        refuse: Callable[[str], None],
        as_dtype: Callable[[str], str] = "dtype=torch.{}".format,
        strict: bool = False,
    ) -> None:
        self._model_class, self._session, self._refuse, self._as_dtype = model_class, session, refuse, as_dtype
        self._strict = strict
        self._model: nn.Module | None = None  # while its checkpoint is loaded
        self._has_begun = False
        self._layers: dict[str, Layer] = {}  # that the executor may hold, by the names of the model's weights
        self._same: set[str] = set()  # of their names in the executor
        self._differ: list[str] = []
        self._reader: CheckpointReader | None = None
        self._lent = _Lent({}, ())
        self._promised: dict[str, Tensor] = {}  # of what is lent: by the names of weights that are not read
        self._place = CPU
        self.not_loaded = 0  # bytes

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Let go of the executor's weights while `from_pretrained` runs in the block."""
        _change_loader()
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def begins_with(self, model: nn.Module) -> bool:
        """Whether this is the model that was asked for, and not a part of it that comes on the way, nor an adapter that comes later."""
        return not self._has_begun and type(model) is self._model_class

    def is_of(self, model: nn.Module) -> bool:
        """Whether this model's weights may be the executor's."""
        return model is self._model

    def load(
        self, original: Callable[..., Any], model: Any, state_dict: Any, files: Any, load_config: Any, *rest: Any
    ) -> Any:
        """Do the work of the loader's `_load_pretrained_model`, and attach the executor's layers."""
        self._has_begun = True
        if why := _why_not(load_config) or self._why_other(model):
            self._refuse(why)
            return original(model, state_dict, files, load_config, *rest)
        if load_config.hf_quantizer is not None and _packs_4_bits(load_config.hf_quantizer):
            return self._load_packed(original, model, state_dict, files, load_config, *rest)
        self._model, self._place = model, _place(load_config)
        if self._place == CPU:
            self._lent = _Lent(self._session.commons(), self._session.manifest)
        on_cpu = replace(load_config, device_map=None)  # else it would reserve a GPU's memory for all weights
        try:
            if state_dict is None and all(file.endswith(".safetensors") for file in files):
                loaded = self._load_files(original, model, files, on_cpu, *rest)
            else:
                loaded = original(model, state_dict, files, on_cpu, *rest)
        finally:
            self._model = None
        if self._same:
            self._tell_of_packed()
            attach(model, self._session, device=self._place, only=self._same)
            _keep_as_they_are(model)
        elif self._differ:
            self._refuse(self._how_different())
        return loaded

    def _load_packed(self, original: Callable[..., Any], model: Any, *args: Any) -> Any:
        """Let bitsandbytes pack a model, or read what it has packed, and put the executor's layers in the place of those that are the same."""
        loaded = original(model, *args)
        held = {name: packed.nbytes for name, one in model.named_parameters() if (packed := packed_of(one)) is not None}
        try:
            attach(model, self._session)
        except WrapError as error:
            self._refuse(str(error))
            return loaded
        _keep_as_they_are(model)
        remote = dict(model.named_parameters())
        self.not_loaded = sum(nbytes for name, nbytes in held.items() if isinstance(remote[name], RemoteWeight))
        return loaded

    def _load_files(
        self, original: Callable[..., Any], model: Any, files: Sequence[str], load_config: Any, *rest: Any
    ) -> Any:
        """Load what must be read of safetensors files, and keep what is found out about them."""
        key = known_checkpoints.key_of(files, model, load_config)
        known = known_checkpoints.read(key)
        kinds = {name: _kind_of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        needless = {source for made in known if self._needs_no_source(kinds, made) for source in made.sources}
        with opened(files, needless.__contains__) as self._reader:
            self._reader.look_ahead(self._may_be_held)
            loaded = original(model, self._reader.tensors, files, load_config, *rest)
        sources = {source for made in known for source in made.sources}
        new = [made for made in self._reader.made() if not sources.issuperset(made.sources)]
        if (
            new and known_checkpoints.key_of(files, model, load_config) == key
        ):  # nobody has written other files meanwhile
            known_checkpoints.write(key, [*known, *new])
        return loaded

    def _needs_no_source(self, kinds: Mapping[str, Kind], made: Made) -> bool:
        """Whether the executor holds, or lends, all that is made of some tensors."""
        layers = {name: self._layers.get(name) for name in made.digests}
        if all(layer is not None and layer.digest == made.digests[name] for name, layer in layers.items()):
            return True
        if len(layers) > 1 or any(layers.values()):
            return False
        ((name, known),) = made.digests.items()
        lent = self._lent.take(known, made.phases.get(name, 0), kinds[name]) if name in kinds else None
        if lent is not None:
            self._promised[name] = lent
        return lent is not None

    def _may_be_held(self, source: Tensor) -> bool:
        """Whether there are weights of this size and dtype at the executor."""
        kind = _kind_of(source)
        return kind in self._lent.kinds or kind in {
            (TORCH_DTYPE[layer.dtype], layer.shape) for layer in self._layers.values()
        }

    def value_for(self, name: str, value: Tensor) -> Tensor:
        """Return what a weight becomes that the loader has made: one without memory, if the executor has it."""
        layer, found = self._layers.get(name), None
        if layer is None:
            return self._own_value(name, value)
        if isinstance(value, NotRead):
            self._same.add(layer.name)
            found = layer.digest
        elif self._same or len(self._differ) < ENOUGH:
            found = self._digest(value)
            if found == layer.digest and DTYPE_NAME.get(value.dtype) == layer.dtype:
                self._same.add(layer.name)
            else:
                self._differ.append(layer.name)
                if self._strict:
                    self._refuse(self._how_different())
        if self._reader is not None:
            self._reader.note(name, found)
        if layer.name not in self._same:
            return value.to(self._place)
        self.not_loaded += value.nbytes
        return torch.empty(layer.shape, dtype=value.dtype, device="meta")

    def _own_value(self, name: str, value: Tensor) -> Tensor:
        """Return what a weight of the client's own becomes: memory that the executor lends to all, if these values lie there."""
        if (promised := self._promised.pop(name, None)) is not None:
            self.not_loaded += promised.nbytes
            return promised
        found = lent = None
        if _kind_of(value) in self._lent.kinds:
            found = self._digest(value)
            lent = self._lent.take(found, phase(value), _kind_of(value))
        if self._reader is not None:
            self._reader.note(name, found, phase(value))
        if lent is None:
            return value.to(self._place)
        self.not_loaded += lent.nbytes
        return lent

    def _digest(self, value: Tensor) -> str:
        return digest(value) if self._reader is None else self._reader.digest(value)

    def _why_other(self, model: nn.Module) -> str | None:
        """Find what of this model the executor may hold, by names, sizes and dtypes. Return why it is nothing."""
        where, told = self._session.endpoint, self._session.welcome
        manifest = self._session.manifest
        plan, report = plan_wrap(model, manifest, None)
        if not plan:
            sizes = next((f"{one}: {why}" for one, why in report.kept.items() if why.startswith(OTHER_SHAPE)), None)
            what = f"has none of the layers of the {told.model_class}" if sizes is None else "has other sizes than that"
            return f"this {type(model).__name__} {what} at {where}" + (f" ({sizes})" if sizes else "")
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        dtypes = set()
        for places, index in plan:
            parameter, layer = parameter_of(places[0]), manifest[index]
            mine = names[id(parameter)]
            if type(parameter).__name__ == OF_4_BITS:
                self._layers |= dict.fromkeys(mine, layer)
            elif DTYPE_NAME.get(parameter.dtype) != layer.dtype:
                dtypes.add((DTYPE_NAME.get(parameter.dtype), layer.dtype))
            elif {*tied, *tied.values()}.isdisjoint(mine):
                self._layers |= dict.fromkeys(mine, layer)
        if self._layers or not dtypes:
            return None
        asked, held = dtypes.pop()
        return (
            f"{where} holds {held}, and this program asks for {asked}: load it with {self._as_dtype(held)}, or start the executor with "
            f"--dtype {asked}"
        )

    def _tell_of_packed(self) -> None:
        """Say that results are not those of the weights that the program asks for, if the executor has packed these."""
        kinds = {layer.packed for layer in self._session.manifest if layer.packed and layer.name in self._same}
        packed, where = " and ".join(sorted(kinds)), self._session.endpoint
        if packed and self._strict:
            self._refuse(
                f"{where} holds its weights packed as {packed}, and this program loads whole ones, so its results would be others: start the "
                "executor without --quantize"
            )
        elif packed:
            logger.warning(PACKED, where, packed)

    def _how_different(self) -> str:
        where, first = self._session.endpoint, self._differ[0]
        if not self._same:
            return f"its weights are not those at {where} ({first} differs): it is another checkpoint or revision"
        return f"a part of its weights is not those at {where} ({first} differs, for one)"


class _Lent:
    """The tensors that clients of this host hold for themselves, in memory that all of them map, and that each may change for itself. Each is
    taken once: equal tensors lie there once, but who changes one does not mean the other."""

    def __init__(self, tensors: Mapping[int, Tensor], manifest: Sequence[Layer]) -> None:
        self._left = {
            (manifest[number].digest, phase(tensor), _kind_of(tensor)): tensor for number, tensor in tensors.items()
        }
        self.kinds = {kind for _, _, kind in self._left}

    def take(self, digest: str, phase: int, kind: Kind) -> Tensor | None:
        """Return the tensor with these bytes that begins so far from a multiple of 64 bytes: a product of one row depends on that."""
        return self._left.pop((digest, phase, kind), None)


def _kind_of(tensor: Tensor) -> Kind:
    return tensor.dtype, tuple(tensor.shape)


def _why_not(load_config: Any) -> str | None:
    """Return why no weight of this call can be an executor's, whatever it is."""
    quantizer = load_config.hf_quantizer
    if quantizer is not None and not _unpacks_gguf(quantizer) and not _packs_4_bits(quantizer):
        method = quantizer.quantization_config.quant_method
        return f"it is quantised here ({getattr(method, 'value', method)}), and the executor holds what it was started with"
    if load_config.device_mesh is not None:
        return "its weights are divided among processes (tensor parallelism): with an executor, run each process with a whole model"
    devices = sorted(map(str, {*(load_config.device_map or {"": "cpu"}).values()}))
    if len(devices) > 1 or "disk" in devices:
        return f"device_map spreads it over {', '.join(devices)}: with an executor one device is enough, device_map={{'': 0}}"
    return None


def _unpacks_gguf(quantizer: Any) -> bool:
    """Whether a model is made of floats, though its file is of GGUF: where it is told to be, or there are no kernels for it."""
    config = quantizer.quantization_config
    return config.quant_method == "gguf" and (config.dequantize or not quantizer.supported)


def _packs_4_bits(quantizer: Any) -> bool:
    """Whether bitsandbytes holds the weights in 4 bits. (In 8, it quantises the rows, too.)"""
    return bool(getattr(quantizer.quantization_config, "load_in_4bit", False))


def _keep_as_they_are(model: nn.Module) -> None:
    """Let transformers initialise no remote weight."""
    for weight in remote_weights(model):
        weight._is_hf_initialized = True  # type: ignore[attr-defined]


def _place(load_config: Any) -> torch.device:
    return torch.device(next(iter((load_config.device_map or {"": "cpu"}).values())))


@cache
def _change_loader() -> None:
    """Let a `SharedLoad` that is under way see what transformers' loader does. Other calls are as they were."""
    load, put = PreTrainedModel._load_pretrained_model, core_model_loading.set_param_for_module

    @wraps(load)
    def load_pretrained_model(model: Any, *args: Any, **words: Any) -> Any:
        current = _current.get()
        if current is None or not current.begins_with(model):
            return load(model, *args, **words)
        return current.load(load, model, *args, **words)

    @wraps(put)
    def set_param_for_module(model: Any, name: str, value: Any, *rest: Any, **words: Any) -> None:
        current = _current.get()
        if current is not None and current.is_of(model):
            value = current.value_for(name, value)
        put(model, name, value, *rest, **words)

    PreTrainedModel._load_pretrained_model = staticmethod(load_pretrained_model)  # type: ignore[method-assign, assignment]
    core_model_loading.set_param_for_module = set_param_for_module  # type: ignore[assignment]
