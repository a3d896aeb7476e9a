"""Reads checkpoints of `torch.distributed.checkpoint`, as FSDP writes them, without running anything that is in them.

Such a folder has files of tensors' pieces (`*.distcp`), and `.metadata`, a pickle that says where each piece lies. The pickle may name only the few classes
that torch writes there, and pieces are read as torch reads weights only.
"""

import io
import pickle
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from symbiosis.errors import ConfigError

METADATA = ".metadata"
CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype))},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _OfTorch(pickle.Unpickler):
    """Makes nothing but what torch writes into the metadata of a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there")
        return super().find_class(module, name)


class DistributedCheckpoint:
    """The tensors of a checkpoint by their names in it. Each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / METADATA).open("rb") as file:
                told = _OfTorch(file).load()
            assert isinstance(told, Metadata) and isinstance(told.storage_data, dict)
        except OSError as error:
            raise ConfigError(f"cannot read {folder / METADATA}: {error.strerror}") from None
        except Exception as error:  # whatever a damaged pickle does
            raise ConfigError(f"{folder / METADATA} is no metadata of a checkpoint: {error}") from None
        self._places: dict[MetadataIndex, Any] = told.storage_data
        self.tensors = {
            name: one for name, one in told.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor, put together from its pieces."""
        told = self.tensors[name]
        whole = torch.empty(told.size, dtype=told.properties.dtype)
        for offsets, piece in self._pieces(name):
            inside = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
            if piece.dtype != whole.dtype or whole[inside].shape != piece.shape:
                raise self._damaged(name)
            whole[inside] = piece
        if sum(prod(chunk.sizes) for chunk in told.chunks) != whole.numel():
            raise ConfigError(
                f"the checkpoint in {self.folder} holds only a part of {name}: it was not saved by all ranks"
            )
        return whole

    def _pieces(self, name: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        for chunk in self.tensors[name].chunks:
            place = self._places.get(MetadataIndex(name, chunk.offsets))
            if place is None or getattr(place, "transform_descriptors", None):
                raise ConfigError(f"the checkpoint in {self.folder} does not hold {name} as plain pieces")
            file = self.folder / place.relative_path
            if file.resolve().parent != self.folder.resolve():
                raise self._damaged(name)
            try:
                with file.open("rb") as opened:
                    opened.seek(place.offset)
                    piece = torch.load(io.BytesIO(opened.read(place.length)), map_location="cpu", weights_only=True)
            except OSError as error:
                raise ConfigError(f"cannot read {file}: {error.strerror}") from None
            except Exception:  # torch raises many kinds
                raise self._damaged(name) from None
            if not isinstance(piece, Tensor) or piece.shape != chunk.sizes:
                raise self._damaged(name)
            yield tuple(chunk.offsets), piece

    def _damaged(self, name: str) -> ConfigError:
        return ConfigError(f"the checkpoint in {self.folder} is damaged where {name} lies: copy it again")
