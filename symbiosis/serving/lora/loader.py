"""Prepares an adapter's files for computing, or says why it cannot be computed."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from symbiosis.errors import AdapterError
from symbiosis.kernels.gpu.streams import wait_until_done
from symbiosis.serving.lora.adapter_cache import place, put_whole, shapes_of
from symbiosis.serving.lora.adapter_files import TENSORS, AdapterWeights, check_finite
from symbiosis.serving.lora.adapter_kinds import (
    Base,
    LoadedAdapter,
    NotFused,
    OwnTensor,
    Part,
    check_low_rank,
    fused_parts,
)
from symbiosis.serving.lora.classification import as_causal, without_head
from symbiosis.serving.lora.config_patterns import check_numbers, without_patterns
from symbiosis.serving.lora.held import held_dtype, hold, placed_whole
from symbiosis.serving.lora.peft_layers import Skeleton, own_tensors, peft_layers
from symbiosis.serving.lora.trained_lora import TrainedLora, trained_lora
from symbiosis.serving.lora.trial import misplaced
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.text import shown

PROMPTS = ("PROMPT_TUNING", "P_TUNING")
TASKS = None, "CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM"  # the last does what the first does


NOT_DIVIDED = (
    "{} is computed by PEFT's own layers, which need whole layers of the base, and this one is divided over ranks. These compute LoRA, rsLoRA, DoRA, "
    "VeRA, IA3, prompts and prefixes: serve others on one device"
)


class AdapterContents(NamedTuple):
    """What an adapter's files say, but for what PEFT's own layers compute."""

    name: str
    kind: str
    version: int
    parts: dict[str, Part]
    prompt: Tensor | None = None
    prefix: tuple[tuple[Tensor, Tensor], ...] = ()


def placed(
    served: ModelRunner,
    contents: AdapterContents,
    weights: AdapterWeights | None = None,
    layers: dict[str, nn.Module] | None = None,
    own: list[OwnTensor] | None = None,
) -> LoadedAdapter:
    """Prepare an adapter for the memory in which it is used.

    Args:
        weights: Its files, if it may be let go and read from them again.
        layers: What PEFT's own layers compute, and with which tensors.
    """
    name, kind, version, parts, prompt, prefix = contents
    own, arena = own or [], served.arena
    if own:
        pages = put_whole([each.values.nbytes for each in own], arena.page_bytes)[0]
    else:
        pages = place(shapes_of(parts), arena.page_elements)[0]
    if pages > arena.pool.total // 2:
        raise AdapterError(
            f"it takes {pages} pages of {arena.page_bytes} bytes, more than half of the server's memory for adapters, keys and values: "
            "give the server more memory"
        )
    virtual = len(prompt) if prompt is not None else len(prefix[0][0]) if prefix else 0
    ranks = [len(part.down) for part in parts.values() if part.down is not None]
    held = [t for part in parts.values() for t in part.tensors]
    held = held or list(
        weights.tensors.values() if weights is not None else [prompt] if prompt is not None else sum(prefix, ())
    )
    nbytes = max(sum(t.nbytes for t in held), sum(each.values.nbytes for each in own))
    packed = None if served.fetcher is None else served.fetcher.pack(parts, weights)
    if packed is not None:
        parts, pages = packed.layout.parts, packed.layout.count
    return LoadedAdapter(
        name=name, kind=kind, version=version, rank=max(ranks, default=0), bytes=nbytes, pages=pages,
        virtual=virtual, parts=parts, layers=layers or {}, own=own, packed=packed, prompt=prompt, prefix=prefix,
    )  # fmt: skip


def named(config: dict[str, Any]) -> str:
    """Say which kind of adapter this is.

    >>> named({"peft_type": "LORA", "modules_to_save": ["lm_head"]})
    'LORA with modules_to_save'
    """
    odd = [name for name in ("modules_to_save", "target_parameters") if config.get(name)]
    return f"{config['peft_type']}{f' with {odd[0]}' if odd else ''}"


@dataclass(slots=True)
class Loader:
    """Loads adapters for one base."""

    served: ModelRunner
    base: Base
    skeleton: Skeleton
    misplaced: dict[str, str]
    max_rank: int
    one_by_one: threading.Lock = field(default_factory=threading.Lock)
    trained: WeakKeyDictionary[Any, TrainedLora] = field(default_factory=WeakKeyDictionary)  # by PEFT's model

    @classmethod
    def of(cls, served: ModelRunner, max_rank: int) -> "Loader":
        """Return a loader for a model. It has to be made before the model has sites."""
        places = misplaced(served) if served.misplaced is None else served.misplaced
        return cls(served, Base.of(served.whole, served.dtype), Skeleton(served.whole), places, max_rank)

    def load(self, name: str, weights: AdapterWeights, version: int, is_known: bool = False) -> LoadedAdapter:
        """Prepare an adapter. One that `is_known` was prepared before from the same files, and its numbers are not looked at again. One that was
        published keeps the dtype in which it is trained, and lies in memory of its own."""
        check_numbers(weights.config, self.max_rank, sum(tensor.numel() for tensor in weights.tensors.values()))
        if not is_known:
            check_finite(weights.tensors.items(), "its training has diverged")
        weights = replace(weights, config=without_patterns(weights.config, self.base.modules))
        loaded = self._with_head(name, weights, version, is_known)
        wait_until_done(self.served.device)  # the engine has a stream of its own
        return loaded

    def _with_head(self, name: str, weights: AdapterWeights, version: int, is_known: bool) -> LoadedAdapter:
        """Prepare an adapter, and the head that a classifier has."""
        if self.served.divide_adapter is not None:
            return self._loaded(name, weights, version, is_known)
        task, head = weights.config.get("task_type"), None
        if task not in TASKS:
            raise AdapterError(
                f"its task_type is {str(task)[:60]}, of which nothing is served: here are {', '.join(map(str, TASKS[1:]))} and none"
            )
        if task == "FEATURE_EXTRACTION":
            weights = as_causal(weights, self.base.model)
        elif task == "SEQ_CLS":
            weights, head = without_head(weights, self.served.width)
        loaded = self._loaded(name, weights, version, is_known)
        if head is None:
            return loaded
        return replace(loaded, head=head, bytes=loaded.bytes + head.nbytes)

    def _loaded(self, name: str, weights: AdapterWeights, version: int, is_known: bool) -> LoadedAdapter:
        """Prepare what an adapter does within the model."""
        divides = self.served.divide_adapter
        if divides is not None:  # what is published is rounded there as what comes from files
            weights = replace(weights, trained=None)
        kind = weights.config["peft_type"]
        parts: dict[str, Part] = {}
        layers: dict[str, nn.Module] = {}
        prompt: Tensor | None = None
        prefix: tuple[tuple[Tensor, Tensor], ...] = ()
        if kind in PROMPTS:
            prompt = self._prompt(weights)
        elif kind == "PREFIX_TUNING":
            prefix = self._prefix(weights)
        else:
            try:
                dtype = held_dtype(weights.trained, self.base.dtype) if weights.trained else self.base.dtype
                base = replace(self.base, dtype=dtype)
                parts = fused_parts(weights, base, self.max_rank, lies_at_once=self.served.fetcher is None)
            except NotFused:
                if divides is not None:
                    raise AdapterError(NOT_DIVIDED.format(named(weights.config))) from None
                with self.one_by_one:  # each is watched for what it does to the base's weights
                    layers = peft_layers(weights, self.base, self.skeleton)
        if self.misplaced:
            self._check_places((*parts, *layers))
        if weights.trained and parts:
            return self._held(name, kind, parts, {}, dtype, version)
        if not is_known:
            scaled = [(layer, t) for layer, part in parts.items() for t in part.tensors]
            scaled += [("prompt_embeddings", t) for t in (*([] if prompt is None else [prompt]), *sum(prefix, ()))]
            check_finite(scaled, f"scaled, they are beyond what {self.base.dtype} holds")
        own = own_tensors(layers.values(), self.base) if layers else []
        contents = AdapterContents(name, kind, version, parts, prompt, prefix)
        if divides is not None:
            return divides(contents)  # type: ignore[no-any-return]
        return placed(self.served, contents, weights, layers, own)

    def read_trained(self, name: str, model: Any, adapter: str, version: int) -> LoadedAdapter | None:
        """Copy a LoRA from a trainer's parameters on this device. Return None if it is of another kind, or lies elsewhere."""
        if self.served.divide_adapter is not None:
            return None
        trained = self.trained.get(model)
        if trained is None or trained.adapter != adapter or not trained.is_current(model):
            trained = trained_lora(model, adapter)
            if trained is None:
                return None
            self._check_shapes(trained)
            self.trained[model] = trained
        if trained.device != self.served.device:
            return None
        dtype = held_dtype(trained.dtype, self.base.dtype)
        return self._held(name, "LORA", trained.parts(), trained.scales(), dtype, version)

    def _check_shapes(self, trained: TrainedLora) -> None:
        for name, layer in trained.layers.items():
            if (module := self.base.modules.get(name)) is None:
                kind = type(self.base.model).__name__
                raise AdapterError(f"it adapts {shown(name)}, which {kind} does not have: it is for another base")
            check_low_rank(name, module, layer.a, layer.b, self.max_rank)
        self._check_places(trained.layers)

    def _check_places(self, layers: Iterable[str]) -> None:
        for layer in layers:
            if (reason := self.misplaced.get(layer)) is not None:
                raise AdapterError(
                    f"it adapts {layer}, which {reason}: the server could not tell which rows are this adapter's. Train one without it"
                )

    def _held(
        self, name: str, kind: str, parts: dict[str, Part], scales: dict[str, float], dtype: torch.dtype, version: int
    ) -> LoadedAdapter:
        """Copy an adapter that is published to memory of its own on the device."""
        fetcher, device = self.served.fetcher, self.served.device
        ranks = [len(part.down) for part in parts.values() if part.down is not None]
        on_host = device.type == "cpu"
        nbytes = sum(t.numel() for part in parts.values() for t in part.tensors) * dtype.itemsize
        try:
            packed = None if fetcher is None else fetcher.hold(parts, scales, dtype)
            parts = hold(parts, scales, dtype, device) if packed is None else packed.layout.parts
        except torch.OutOfMemoryError:
            raise AdapterError(
                f"the device has no {nbytes} bytes for it: remove adapters, or give Engine(..., memory=) less"
            ) from None
        return LoadedAdapter(
            name=name, kind=kind, version=version, rank=max(ranks, default=0), bytes=nbytes if on_host else 0,
            parts=parts, packed=packed, held=placed_whole(parts) if packed is None else None,
        )  # fmt: skip

    def read_again(self, adapter: LoadedAdapter, folder: Path) -> LoadedAdapter:
        """Return an adapter of which only `without_numbers` was kept. Its files must be those from which it was loaded."""
        assert self.served.fetcher is not None
        return replace(adapter, packed=self.served.fetcher.read_again(adapter.packed, folder / TENSORS))

    def _prompt(self, weights: AdapterWeights) -> Tensor:
        prompt, width = _embeddings(weights), self.served.width
        if prompt.dim() != 2 or prompt.shape[1] != width:
            raise AdapterError(
                f"its virtual tokens have {prompt.shape[-1]} numbers, and this base's tokens {width}: it is for another base"
            )
        return prompt.to(self.base.dtype)

    def _prefix(self, weights: AdapterWeights) -> tuple[tuple[Tensor, Tensor], ...]:
        if not self.served.batches:
            raise AdapterError("prefix tuning needs a base whose attention goes over pages, and this one's does not")
        shapes, kv = self.served.whole_kv, _embeddings(weights).to(self.base.dtype)
        widths = [n for shape in shapes for n in (shape.key_elements, shape.value_elements)]
        if kv.dim() != 2 or kv.shape[1] != sum(widths) or len(set(widths)) > 1:
            raise AdapterError(
                f"its virtual tokens have {kv.shape[-1]} numbers, and this base's keys and values {sum(widths)}: it is for another base"
            )
        columns = kv.split(widths, dim=1)
        return tuple(zip(columns[::2], columns[1::2], strict=True))


def _embeddings(weights: AdapterWeights) -> Tensor:
    prompt = weights.tensors.get("prompt_embeddings")
    if prompt is None or not len(prompt):
        raise AdapterError("it has no prompt_embeddings: save it with PEFT's save_pretrained")
    return prompt
