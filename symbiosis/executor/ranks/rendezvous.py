"""Where the ranks of a service tell each other what they hold, by one of torch's stores: a file of the service, or what `torchrun` set up."""

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from symbiosis.errors import ConfigError
from symbiosis.executor.observe.log import ALARM_S, log
from symbiosis.executor.ranks.descriptor_exchange import Exchange, close, part_of
from symbiosis.protocol import ELSEWHERE, Layer
from symbiosis.transport.fingerprint import of_the_model

LONGEST_LOAD = timedelta(hours=6)  # that a rank waits for the others to load their parts
TURN_S = 0.05  # of waiting for what a rank has yet to tell
PAUSE_S = 0.2  # between two attempts to ask a rank that is started again


class Held(NamedTuple):
    """What a rank tells of a tensor that it holds: its digest; if it is packed, the format, and the digest of what it holds."""

    digest: str
    packed: str = ""
    packed_digest: str = ""


class RankDigests(msgspec.Struct, frozen=True):
    """What a rank tells: of the tensors that it holds, by number."""

    held: dict[int, Held]


OTHER_CHECKPOINT = "rank {} reads another checkpoint than rank {}: the models' configurations or tensors differ. Give all ranks the same one"
OTHER_THAN_BEFORE = "rank {} was started again and finds another checkpoint than before: start the service anew"


class Rendezvous:
    """The ranks of a service, as one of them sees them."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        store.set_timeout(LONGEST_LOAD)

    @classmethod
    def at(cls, file: str, rank: int, ranks: int) -> "Rendezvous":
        """Return the ranks that meet in this file."""
        return cls(FileStore(file, ranks), rank, ranks)

    def complete(self, config: str, manifest: list[Layer]) -> list[Layer]:
        """Return the manifest with the digests of all ranks, or raise `ConfigError` if they have not loaded parts of one checkpoint."""
        here = ((number, layer) for number, layer in enumerate(manifest) if layer.kind != ELSEWHERE)
        mine = {number: Held(layer.digest, layer.packed, layer.packed_digest) for number, layer in here}
        self.agree(config, manifest)
        told = RankDigests(mine)
        self._tell(f"rank{self.rank}", msgspec.json.encode(told).decode())
        return merged(manifest, [told if rank == self.rank else self._heard(rank) for rank in range(self.ranks)])

    def agree(self, config: str, manifest: Sequence[Layer]) -> None:
        """Raise `ConfigError` unless all ranks have read one configuration and tensors of the same shapes, this one in its earlier life, too."""
        self._agree_on("model", _model(config, manifest))

    def agree_on_values(self, sample: str) -> None:
        """Raise `ConfigError` unless all ranks have found this `sample` of their checkpoints, this one in its earlier life, too."""
        self._agree_on("sample", sample)

    def _agree_on(self, what: str, mine: str) -> None:
        self._tell(f"{what}{self.rank}", mine)
        for rank in range(self.ranks):
            if self._get(what, rank) != mine:
                raise ConfigError(OTHER_CHECKPOINT.format(rank, self.rank))

    def kept_by_others(self) -> tuple[str, list[int]] | None:
        """Return the digest and descriptors of this rank's part, if another rank has kept it from this one's earlier life."""
        for rank in range(self.ranks):
            if rank != self.rank and self._store.check([f"file{rank}"]) and self._store.check([f"file{self.rank}"]):
                with suppress(OSError, ValueError):
                    if found := part_of(self.rank, self._get("file", rank)):
                        return found
        return None

    def parts(self, exchange: Exchange, digest: str) -> dict[int, list[int]]:
        """Tell the others where this rank hands out its part, and return descriptors of theirs, by rank. Raise `ConfigError` if they are of
        something else."""
        self._store.set(f"file{self.rank}", exchange.address)
        return {rank: self._part(rank, digest) for rank in range(self.ranks) if rank != self.rank}

    def names(self, mine: str) -> tuple[str, ...]:
        """Tell the others the name of this rank's GPU, and return those of all."""
        self._store.set(f"gpu{self.rank}", mine)
        return tuple(self._get("gpu", rank) for rank in range(self.ranks))

    def note(self, what: str) -> None:
        """Note that this rank has done something that others wait for."""
        self._store.set(f"{what}{self.rank}", "done")

    def forget(self, what: str) -> None:
        """Forget what this rank has told or noted in an earlier attempt."""
        self._store.delete_key(f"{what}{self.rank}")

    def wait_for(self, what: str, rank: int) -> None:
        """Wait until another rank has noted this."""
        self._get(what, rank)

    def all_ready(self, layers: int, nbytes: int) -> list[tuple[int, int]]:
        """Tell the others how many layers and bytes this rank serves; to the first, return those of all, once all are ready."""
        self._store.set(f"ready{self.rank}", f"{layers} {nbytes}")
        told = [self._get("ready", rank).split() for rank in range(self.ranks * (self.rank == 0))]
        return [(int(one), int(two)) for one, two in told]

    def _part(self, rank: int, digest: str) -> list[int]:
        """Ask a rank for its part, again if it has died meanwhile and is started again."""
        wait = Wait(rank)
        while True:
            found = None
            with suppress(OSError, ValueError):
                found = part_of(rank, self._get("file", rank))
            if found and found[0] == digest:
                return found[1]  # a small model's part may be nothing at all
            if found:
                close(found[1])
                raise ConfigError(OTHER_CHECKPOINT.format(rank, self.rank))
            wait.turn(PAUSE_S)

    def _tell(self, key: str, said: str) -> None:
        """Tell the others something that is the same in each life of this rank."""
        if self._store.check([key]) and self._store.get(key).decode() != said:
            raise ConfigError(OTHER_THAN_BEFORE.format(self.rank))
        self._store.set(key, said)

    def _heard(self, rank: int) -> RankDigests:
        return msgspec.json.decode(self._get("rank", rank), type=RankDigests)

    def _get(self, what: str, rank: int) -> str:
        """Wait until a rank has told this. The wait is in short turns: a store would let no signal handler run, and so nobody end it."""
        key, wait = f"{what}{rank}", Wait(rank)
        while not self._store.check([key]):
            wait.turn(TURN_S)
        return self._store.get(key).decode()


class Wait:
    """One wait for another rank, of which the log tells from time to time."""

    def __init__(self, rank: int) -> None:
        self._rank, self._begun = rank, time.monotonic()
        self._tell_at = self._begun + ALARM_S

    def turn(self, seconds: float) -> None:
        """Wait so long, or raise `ConfigError` if it has been too long already."""
        now = time.monotonic()
        if now > self._begun + LONGEST_LOAD.total_seconds():
            raise ConfigError(f"rank {self._rank} has not loaded its part: start the service anew")
        if now > self._tell_at:
            log(logging.INFO, "waiting for another rank", rank=self._rank, seconds=round(now - self._begun))
            self._tell_at = now + ALARM_S
        time.sleep(seconds)


def _model(config: str, manifest: Sequence[Layer]) -> str:
    shapes = "\n".join(f"{layer.name}|{layer.shape}|{layer.dtype}" for layer in manifest)
    return hashlib.sha256(f"{of_the_model(config)}\n{shapes}".encode()).hexdigest()


def merged(manifest: Sequence[Layer], told: Sequence[RankDigests]) -> list[Layer]:
    """Return the manifest with the digests that all ranks told.

    >>> part = Layer("up", ELSEWHERE, (4, 4), "float32", "")
    >>> merged([part], [RankDigests({}), RankDigests({0: Held("d")})])[0].digest
    'd'
    """
    held: dict[int, Held] = {}
    for one in told:
        held |= one.held
    return [replace(layer, **held[number]._asdict()) for number, layer in enumerate(manifest)]


def launched_store() -> tuple[Store, int]:
    """Return the store that torch's launcher has brought, and this process's rank.

    The launcher keeps its store when it starts all ranks again. On one host each attempt has keys of its own. On several, the launcher counts
    attempts on each host apart, so there ranks see what the last attempt told; what may differ then is forgotten (`Rendezvous.forget`).
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, _ = next(rendezvous("env://"))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        store = PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return store, rank
