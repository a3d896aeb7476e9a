"""The adapters that there are: named, in versions that never change, found in a folder when they are asked for."""

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symbiosis.errors import AdapterError, UnknownAdapter
from symbiosis.serving.adapter import Adapter
from symbiosis.serving.adapters.files import AdapterWeights, read_folder, state_of
from symbiosis.serving.adapters.kinds import Base, LoadedAdapter, NotFused, Part, fused_parts
from symbiosis.serving.adapters.layers import Skeleton, peft_layers
from symbiosis.serving.adapters.patterns import check_numbers, check_patterns
from symbiosis.serving.adapters.probe import misplaced
from symbiosis.serving.adapters.residency import place
from symbiosis.serving.model import Served
from symbiosis.text import shown

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._@+=-]{0,127})?")
SHOWN = 10  # names in a message
PROMPTS = ("PROMPT_TUNING", "P_TUNING")


class Found(NamedTuple):
    """An adapter, and what the folder that it came from was like."""

    adapter: LoadedAdapter
    state: tuple[int, ...] | None  # None: it was given, not found


@dataclass(slots=True)
class _Loader:
    """Makes adapters for one base."""

    served: Served
    base: Base
    skeleton: Skeleton
    misplaced: dict[str, str]
    max_rank: int

    def load(self, name: str, weights: AdapterWeights) -> LoadedAdapter:
        check_numbers(weights.config, self.max_rank)
        check_patterns(weights.config, self.base.modules)
        kind, version = weights.config["peft_type"], Adapter.next_version()
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
                parts = fused_parts(weights, self.base, self.max_rank)
            except NotFused:
                layers = peft_layers(weights, self.base, self.skeleton)
        self._check_places([*parts, *layers])
        self._check_room(parts)
        virtual = len(prompt) if prompt is not None else len(prefix[0][0]) if prefix else 0
        ranks = [len(part.down) for part in parts.values() if part.down is not None]
        held = [t for part in parts.values() for t in part.tensors] or list(weights.tensors.values())
        return LoadedAdapter(
            name=name, kind=kind, version=version, rank=max(ranks, default=0), bytes=sum(t.nbytes for t in held),
            virtual=virtual, parts=parts, layers=layers, prompt=prompt, prefix=prefix,
        )  # fmt: skip

    def _check_places(self, names: list[str]) -> None:
        for name in names:
            if (reason := self.misplaced.get(name)) is not None:
                raise AdapterError(
                    f"it adapts {name}, which {reason}: the server could not tell which rows are this adapter's. Train one without it"
                )

    def _check_room(self, parts: dict[str, Part]) -> None:
        shapes = [(len(t), t.shape[1]) for part in parts.values() for t in part.tensors]
        arena = self.served.arena
        needed, _ = place(shapes, arena.page_elements)
        if needed > arena.pool.total // 2:
            raise AdapterError(
                f"it takes {needed} pages of {arena.page_bytes} bytes, more than half of the server's memory for adapters, keys and values: "
                "give the server more memory"
            )

    def _prompt(self, weights: AdapterWeights) -> Tensor:
        prompt, width = _embeddings(weights), self.served.model.get_input_embeddings().embedding_dim  # type: ignore[operator]
        if prompt.dim() != 2 or prompt.shape[1] != width:
            raise AdapterError(
                f"its virtual tokens have {prompt.shape[-1]} numbers, and this base's tokens {width}: it is for another base"
            )
        return prompt.to(self.base.dtype)

    def _prefix(self, weights: AdapterWeights) -> tuple[tuple[Tensor, Tensor], ...]:
        if not self.served.batches:
            raise AdapterError("prefix tuning needs a base whose attention goes over pages, and this one's does not")
        shapes, kv = self.served.arena.layers, _embeddings(weights).to(self.base.dtype)
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


class Library:
    """Adapters for one served model. Its methods may be called by any thread.

    Args:
        served: The model.
        folder: Where further adapters are looked for, each in a folder of its name, when they are first asked for.
        max_rank: Adapters of a larger rank are refused.
    """

    def __init__(self, served: Served, folder: Path | None = None, max_rank: int = 256) -> None:
        base = Base.of(served.model, served.dtype)
        self._loader = _Loader(served, base, Skeleton(served.model), misplaced(served), max_rank)
        self._folder = folder
        self._found: dict[str, Found] = {}
        self._removed: dict[str, tuple[int, ...]] = {}  # by name, as they were in the folder
        self._lock = threading.RLock()
        self.on_replaced: Callable[[LoadedAdapter], None] = lambda old: None

    def add(self, name: str, source: Path | str | AdapterWeights) -> LoadedAdapter:
        """A new version of the adapter `name`; what runs with an older one keeps that."""
        check_name(name)
        with self._lock:
            return self._keep(name, self._load(name, source), None)

    def remove(self, name: str) -> None:
        """There is no adapter of this name any more, until it is added, or its folder changes."""
        with self._lock:
            adapter = self.get(name)
            del self._found[name]
            if self._folder is not None and (state := state_of(self._folder / name)) is not None:
                self._removed[name] = state
        self.on_replaced(adapter)

    def get(self, name: str) -> LoadedAdapter:
        """The version of now. One that lies in the folder is loaded when it is first asked for, and again when it has changed."""
        with self._lock:
            found = self._found.get(name)
            if found is not None and found.state is None:
                return found.adapter
            state = self._state(name)
            if state is None or state == self._removed.get(name):
                self._found.pop(name, None)
                raise UnknownAdapter(f"there is no adapter {shown(name, 200)!r}: there {self._there_are()}")
            if found is not None and found.state == state:
                return found.adapter
            assert self._folder is not None
            return self._keep(name, self._load(name, self._folder / name), state)

    def names(self) -> list[str]:
        """Of all that there are, loaded or not."""
        with self._lock:
            given = {name for name, found in self._found.items() if found.state is None}
            return sorted(given | {name for name in self._in_folder() if self._state(name) != self._removed.get(name)})

    def loaded(self) -> list[LoadedAdapter]:
        with self._lock:
            return [found.adapter for found in self._found.values()]

    def _state(self, name: str) -> tuple[int, ...] | None:
        if self._folder is None or not NAME.fullmatch(name):
            return None
        folder = self._folder / name
        return state_of(folder) if folder.resolve().is_relative_to(self._folder.resolve()) else None

    def _in_folder(self) -> set[str]:
        if self._folder is None:
            return set()
        try:
            with os.scandir(self._folder) as entries:
                names = {entry.name for entry in entries if NAME.fullmatch(entry.name)}
        except OSError as error:
            raise AdapterError(f"the folder of adapters cannot be read: {error}") from None
        return {name for name in names if self._state(name) is not None}

    def _load(self, name: str, source: Path | str | AdapterWeights) -> LoadedAdapter:
        try:
            weights = source if isinstance(source, AdapterWeights) else read_folder(Path(source))
            with torch.no_grad():
                return self._loader.load(name, weights)
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from None

    def _keep(self, name: str, adapter: LoadedAdapter, state: tuple[int, ...] | None) -> LoadedAdapter:
        old = self._found.get(name)
        self._found[name] = Found(adapter, state)
        self._removed.pop(name, None)
        if old is not None:
            self.on_replaced(old.adapter)
        return adapter

    def _there_are(self) -> str:
        names = self.names()
        if not names:
            return "are none; add one, or start the server with --adapters FOLDER"
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"are {', '.join(names[:SHOWN])}{more}"


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise AdapterError(
            f"an adapter cannot be named {shown(name, 200)!r}: names have letters, digits and . _ - @ + = (and one / inside), and begin with a "
            "letter or a digit"
        )
