"""Loads a model of which every tensor lies in equal parts in the memory of several ranks. Whole tensors are held a few at a time."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn

from symbiosis.executor.model.checkpoint import AT_ONCE
from symbiosis.executor.model.load import load_model, structure
from symbiosis.executor.model.store import Entry, entries
from symbiosis.protocol import Layer
from symbiosis.transport.fingerprint import digest
from symbiosis.transport.local.striped_weights import PartFile, in_stripes
from symbiosis.transport.tensors import CPU, DTYPE_NAME


class PartWriter(Protocol):
    """One rank's part of all tensors while it is written. Each is given once, in the manifest's order."""

    def add(self, tensor: Tensor) -> None:
        """Keep this rank's part of the next tensor."""
        ...

    def add_tied(self, other: int) -> None:
        """The next tensor is that of an earlier number."""
        ...


class StripedModel:
    """A model on the meta device, until the parts of all ranks are there and `fill` puts them in its place."""

    def __init__(self, name: str, dtype: str | None) -> None:
        self._name, self._dtype = name, dtype
        self.model = load_model(name, dtype, "cpu", [entry.key for entry in entries(structure(name, dtype))])
        self._entries = list(entries(self.model))
        self.manifest = list(map(_layer, self._entries))
        first: dict[int, int] = {}
        numbers = ((number, first.setdefault(id(entry.tensor), number)) for number, entry in enumerate(self._entries))
        self.tied = {number: earlier for number, earlier in numbers if number != earlier}
        self._others: dict[str, Tensor] = {}  # what has no place in the parts
        self._digests: dict[int, str] = {}

    def part(self, shares: Sequence[float], rank: int, at_once: int = AT_ONCE) -> PartFile:
        """Read the checkpoint, and keep the part of a rank in a file."""
        part = PartFile(self.manifest, shares, rank)
        self.read(part, at_once)
        return part

    def read(self, part: PartWriter, at_once: int = AT_ONCE) -> None:
        """Read the checkpoint, and give each tensor to `part`."""
        striped = set(in_stripes(self.manifest))
        for group in self._groups(at_once):
            loaded = self._loaded([self._entries[number].key for number in group])
            own = [number for number in group if number not in self.tied]
            with ThreadPoolExecutor() as pool:
                read = pool.map(lambda number, of=loaded: digest(of[self._entries[number].key]), own)
                self._digests |= zip(own, read, strict=True)
            for number in group:
                key = self._entries[number].key
                if number not in striped:
                    self._others[key] = loaded[key].clone()
                elif number in self.tied:
                    part.add_tied(self.tied[number])
                else:
                    part.add(loaded.pop(key))

    @property
    def digest(self) -> str:
        """A digest of all tensors as this rank has read them."""
        return hashlib.sha256("".join(self._digests[number] for number in sorted(self._digests)).encode()).hexdigest()

    def _groups(self, at_once: int) -> Iterator[list[int]]:
        """Yield the numbers of the tensors that are loaded together."""
        group: list[int] = []
        nbytes = 0
        for number, entry in enumerate(self._entries):
            if group and nbytes + entry.tensor.nbytes > at_once:
                yield group
                group, nbytes = [], 0
            group.append(number)
            nbytes += entry.tensor.nbytes
        yield group

    def _loaded(self, keys: Sequence[str]) -> dict[str, Tensor]:
        wanted = set(keys)
        elsewhere = [entry.key for entry in self._entries if entry.key not in wanted]
        model = load_model(self._name, self._dtype, "cpu", elsewhere)
        return {entry.key: entry.tensor.detach().contiguous() for entry in entries(model) if entry.key in wanted}

    def fill(self, held: Mapping[int, Tensor], device: torch.device = CPU) -> nn.Module:
        """Return the model with all its tensors: those `held` by number, and what had no place in the parts."""
        others = [entry.key for number, entry in enumerate(self._entries) if number not in held]
        if others and not self._others:  # this rank did not have to read its part
            self._others = self._loaded(others)
        for number, entry in enumerate(self._entries):
            path, _, name = entry.key.rpartition(".")
            owner = self.model.get_submodule(path)
            tensor = held[number] if number in held else self._others[entry.key].to(device)
            if name in owner._parameters:
                owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                owner._buffers[name] = tensor
        return self.model


def _layer(entry: Entry) -> Layer:
    """Return as much of a layer as tells where it lies."""
    dtype = DTYPE_NAME.get(entry.tensor.dtype, str(entry.tensor.dtype))
    return Layer(entry.name, entry.kind, tuple(entry.tensor.shape), dtype, "")
