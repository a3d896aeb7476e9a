"""A service of several ranks as one client sees it: a session with each of them, and which one holds which layer."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from symbiosis import transport
from symbiosis.client.connection.reconnect import Reconnecting
from symbiosis.errors import CallError, Code
from symbiosis.protocol import ELSEWHERE, Layer, Welcome

JoinedSession = TypeVar("JoinedSession", bound=Reconnecting)


class ServiceSessions(Generic[JoinedSession]):
    """The sessions with the ranks beside the one that `first` has joined. `join` makes a session, which joins at its first call."""

    def __init__(self, first: JoinedSession, join: Callable[[tuple[str, ...], str], JoinedSession]) -> None:
        here, hosts = first.welcome.rank, first.welcome.hosts
        self._others: dict[int, JoinedSession] = {
            rank: join(
                tuple(transport.of_rank(url, rank, here, hosts) for url in first.endpoints), first.welcome.fingerprint
            )
            for rank in range(first.welcome.ranks)
            if rank != here
        }
        told = {here: first.welcome, **{rank: session.welcome for rank, session in self._others.items()}}
        for rank, welcome in told.items():
            if (welcome.rank, welcome.ranks) != (rank, len(told)):
                raise CallError(
                    Code.WRONG_MODEL,
                    f"where rank {rank} of {len(told)} of the service at {first.endpoint} should be is rank {welcome.rank} of {welcome.ranks}",
                )
        self._holders, self.manifest = held({rank: welcome.manifest for rank, welcome in told.items()})

    @property
    def others(self) -> list[JoinedSession]:
        return list(self._others.values())

    def holder(self, layer: int) -> JoinedSession | None:
        """Return the session with the rank that holds this layer; None if that is the first one's."""
        return self._others.get(self._holders[layer])


def twins(told: Welcome, url: str, urls: Sequence[str]) -> tuple[bool, str, tuple[str, ...], tuple[str, ...]]:
    """Say where a client joins a service whose ranks can each answer all: whether it stays where it is, the endpoint of its rank, those of all
    ranks, the one that is to be the next first, and the same in the order of ranks, those of this service first. Clients that name the
    service go to each rank in turn.

    `url` is where `told` comes from, one of `urls`."""
    mine = told.session % told.ranks if told.rank == 0 else told.rank
    order = [(mine + step) % told.ranks for step in range(told.ranks)]
    every = tuple(transport.of_rank(one, rank, told.rank) for one in urls for rank in order)
    here = [transport.of_rank(url, rank, told.rank) for rank in range(told.ranks)]
    return mine == told.rank, here[mine], every, (*here, *(one for one in every if one not in here))


def beside(told: Welcome, url: str, urls: Sequence[str], gpu: str) -> str:
    """Return where the rank on this GPU answers, if there is one and this client may go to it; else `url`, where `told` comes from.

    >>> from symbiosis.protocol import Limits
    >>> told = Welcome(5, "", [], "", "", Limits(), False, 1.0, "", ranks=3, shard="fsdp", gpus=("a", "b", "b"))
    >>> urls = [f"inproc://x{end}" for end in ("", ".rank1", ".rank2")]
    >>> [beside(told, urls[0], urls, gpu) for gpu in "abc"]
    ['inproc://x', 'inproc://x.rank2', 'inproc://x']
    """
    ranks = [rank for rank, name in enumerate(told.gpus) if name == gpu]
    if not ranks:
        return url
    there = transport.of_rank(url, ranks[told.session % len(ranks)], told.rank)
    return there if there in urls else url


def held(told: dict[int, list[Layer]]) -> tuple[list[int], list[Layer]]:
    """Return which rank holds each layer, and the manifest of the whole model, from what each rank tells.

    >>> here, there = Layer("up", "linear", (4, 4), "float32", "d"), Layer("up", ELSEWHERE, (4, 4), "float32", "d")
    >>> held({0: [there], 1: [here]}) == ([1], [here])
    True
    """
    holders: list[int] = []
    manifest: list[Layer] = []
    for layers in zip(*told.values(), strict=True):
        found = [(rank, layer) for rank, layer in zip(told, layers, strict=True) if layer.kind != ELSEWHERE]
        if len(found) != 1:
            who = "no rank" if not found else f"ranks {', '.join(str(rank) for rank, _ in found)}"
            raise CallError(Code.WRONG_MODEL, f"{layers[0].name} is held by {who} of the service, and must be by one")
        holders.append(found[0][0])
        manifest.append(found[0][1])
    return holders, manifest
