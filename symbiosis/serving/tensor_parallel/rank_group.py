"""How ranks find one another."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch

from symbiosis.serving.tensor_parallel.collectives import RankGroup
from symbiosis.serving.tensor_parallel.gloo_group import GlooGroup
from symbiosis.serving.tensor_parallel.rank_messages import MeetRanks

LOOK_S = 0.01  # between two looks for what other ranks tell
WAIT_S = 600.0  # for another rank: what dies or hangs is noticed sooner, by its process


def meeting_of(devices: Sequence[str], folder: Path) -> MeetRanks:
    """Return where ranks on these devices meet. NCCL refuses those that share a GPU."""
    if devices[0] == "cpu":
        return MeetRanks("gloo", str(folder / "ranks").encode())
    if len(set(devices)) < len(devices):
        return MeetRanks("memory", str(folder).encode())
    from symbiosis.serving.tensor_parallel.nccl_group import meeting  # with Triton, which is there only with a GPU

    return MeetRanks("nccl", meeting())


def rank_group(meet: MeetRanks, rank: int, ranks: int, device: torch.device) -> RankGroup:
    """Connect this rank with the others, which do so at the same time."""
    if meet.by == "gloo":
        return GlooGroup(meet.at.decode(), rank, ranks, WAIT_S)
    from symbiosis.serving.tensor_parallel.nccl_group import NcclGroup
    from symbiosis.serving.tensor_parallel.peer_group import PeerGroup

    if meet.by == "nccl":
        return NcclGroup(meet.at, rank, ranks, device)
    exchange = exchange_by_files(Path(meet.at.decode()), rank, ranks, WAIT_S)
    return PeerGroup(exchange, rank, ranks, device, shares_gpu=True)


def exchange_by_files(folder: Path, rank: int, ranks: int, seconds: float) -> Callable[[bytes], list[bytes]]:
    """Return how ranks of one host tell each other something by files of a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exchange_by_files(Path(folder), 0, 1, seconds=1.0)(b"mine")
    [b'mine']
    """
    rounds = count()

    def exchange(told: bytes) -> list[bytes]:
        turn, latest = next(rounds), time.monotonic() + seconds
        unfinished = folder / f"{turn}-{rank}.new"
        unfinished.write_bytes(told)
        unfinished.rename(folder / f"{turn}-{rank}")
        files = [folder / f"{turn}-{each}" for each in range(ranks)]
        while not all(file.exists() for file in files):
            if time.monotonic() > latest:
                raise RuntimeError("another rank has not come")
            time.sleep(LOOK_S)
        return [file.read_bytes() for file in files]

    return exchange
