"""Where the ranks of a service tell each other what they hold, by one of torch's stores: a file of the service, or what `torchrun` set up."""

import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import BinaryIO

import msgspec
from msgspec.structs import replace
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from symbiosis.errors import ConfigError
from symbiosis.protocol import ELSEWHERE, Layer
from symbiosis.transport.local.striped_weights import opened

LONGEST_LOAD = timedelta(hours=6)  # that a rank waits for the others to load their parts


class Told(msgspec.Struct, frozen=True):
    """What a rank tells: a digest of the model's configuration and of the shapes of its tensors, and the digests of those that it holds."""

    model: str
    digests: dict[int, str]


class Place(msgspec.Struct, frozen=True):
    """What a rank tells of its file: where to open it, and a digest of where tensors begin."""

    path: str
    phases: str


class Ranks:
    """The ranks of a service, as one of them sees them."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        store.set_timeout(LONGEST_LOAD)

    @classmethod
    def at(cls, file: str, rank: int, ranks: int) -> "Ranks":
        """Return the ranks that meet in this file."""
        return cls(FileStore(file, ranks), rank, ranks)

    def complete(self, config: str, manifest: list[Layer]) -> list[Layer]:
        """Return the manifest with the digests of all ranks, or raise `ConfigError` if they have not loaded parts of one checkpoint."""
        mine = {number: layer.digest for number, layer in enumerate(manifest) if layer.kind != ELSEWHERE}
        told = Told(_model(config, manifest), mine)
        self._tell(told)
        return merged(manifest, [told if rank == self.rank else self._heard(rank) for rank in range(self.ranks)])

    def files(self, file: BinaryIO, phases: Sequence[int]) -> list[BinaryIO]:
        """Tell the others of this rank's file, and return the files of all. They are opened by way of the processes that made them."""
        told = Place(f"/proc/{os.getpid()}/fd/{file.fileno()}", hashlib.sha256(str(phases).encode()).hexdigest())
        self._store.set(f"file{self.rank}", msgspec.json.encode(told).decode())
        found = []
        for rank in range(self.ranks):
            place = msgspec.json.decode(self._store.get(f"file{rank}"), type=Place)
            if place.phases != told.phases:
                raise ConfigError(
                    f"rank {rank} reads another checkpoint than rank {self.rank}: give all ranks the same one"
                )
            found.append(file if rank == self.rank else opened(place.path))
        return found

    def _tell(self, told: Told) -> None:
        """Tell the others. A rank that was started again must hold what it held before."""
        key, raw = f"rank{self.rank}", msgspec.json.encode(told).decode()
        if self._store.check([key]) and self._store.get(key).decode() != raw:
            raise ConfigError(
                f"rank {self.rank} was started again and finds another checkpoint than before: start the service anew"
            )
        self._store.set(key, raw)

    def _heard(self, rank: int) -> Told:
        return msgspec.json.decode(self._store.get(f"rank{rank}"), type=Told)


def _model(config: str, manifest: Sequence[Layer]) -> str:
    shapes = "\n".join(f"{layer.name}|{layer.shape}|{layer.dtype}" for layer in manifest)
    return hashlib.sha256(f"{config}\n{shapes}".encode()).hexdigest()


def merged(manifest: Sequence[Layer], told: Sequence[Told]) -> list[Layer]:
    """Return the manifest with the digests that all ranks told.

    >>> part = Layer("up", ELSEWHERE, (4, 4), "float32", "")
    >>> merged([part], [Told("m", {}), Told("m", {0: "d"})])[0].digest
    'd'
    """
    for rank, one in enumerate(told):
        if one.model != told[0].model:
            raise ConfigError(
                f"rank {rank} reads another checkpoint than rank 0: the models' configurations or tensors differ. Give all ranks the same one"
            )
    digests: dict[int, str] = {}
    for one in told:
        digests |= one.digests
    return [replace(layer, digest=digests[number]) for number, layer in enumerate(manifest)]
