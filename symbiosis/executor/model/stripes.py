"""Loads a model of which every tensor lies in equal parts in the memory files of several ranks. Whole tensors are held a few at a time."""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from torch import Tensor, nn

from symbiosis.executor.model.load import load_model, structure
from symbiosis.executor.model.store import Entry, entries
from symbiosis.protocol import Layer
from symbiosis.transport.local.striped_weights import PartFile, in_stripes, mapped
from symbiosis.transport.tensors import DTYPE_NAME

AT_ONCE = 1 << 30  # bytes of whole tensors that are held while a rank loads its part


class StripedModel:
    """A model on the meta device, until the parts of all ranks are there and `fill` maps them."""

    def __init__(self, name: str, dtype: str | None) -> None:
        self._name, self._dtype = name, dtype
        self.model = load_model(name, dtype, "cpu", [entry.key for entry in entries(structure(name, dtype))])
        self._entries = list(entries(self.model))
        self._manifest = list(map(_layer, self._entries))
        self._others: dict[str, Tensor] = {}  # what has no place in the files

    def part(self, shares: Sequence[float], rank: int, at_once: int = AT_ONCE) -> PartFile:
        """Read the checkpoint, and keep the part of a rank."""
        part, striped = PartFile(self._manifest, shares, rank), set(in_stripes(self._manifest))
        first: dict[int, int] = {}
        for group in self._groups(at_once):
            loaded = self._loaded([self._entries[number].key for number in group])
            for number in group:
                entry = self._entries[number]
                tied_to = first.setdefault(id(entry.tensor), number)
                if number not in striped:
                    self._others[entry.key] = loaded[entry.key].clone()
                elif tied_to != number:
                    part.add_tied(tied_to)
                else:
                    part.add(loaded.pop(entry.key))
        return part

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

    def fill(self, files: Sequence[BinaryIO]) -> nn.Module:
        """Return the model with all its tensors, which lie in these files."""
        held = mapped(self._manifest, [file.fileno() for file in files])
        for number, entry in enumerate(self._entries):
            path, _, name = entry.key.rpartition(".")
            owner = self.model.get_submodule(path)
            tensor = held[number] if number in held else self._others[entry.key]
            if name in owner._parameters:
                owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                owner._buffers[name] = tensor
        return self.model


def _layer(entry: Entry) -> Layer:
    """Return as much of a layer as tells where it lies."""
    dtype = DTYPE_NAME.get(entry.tensor.dtype, str(entry.tensor.dtype))
    return Layer(entry.name, entry.kind, tuple(entry.tensor.shape), dtype, "")
