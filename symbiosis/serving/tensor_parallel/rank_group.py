"""How ranks find one another."""

from collections.abc import Sequence
from pathlib import Path

import torch

from symbiosis.serving.tensor_parallel.collectives import RankGroup
from symbiosis.serving.tensor_parallel.gloo_group import GlooGroup
from symbiosis.serving.tensor_parallel.rank_messages import MeetRanks

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
    from symbiosis.serving.tensor_parallel.peer_group import PeerGroup, exchange_by_files

    if meet.by == "nccl":
        return NcclGroup(meet.at, rank, ranks, device)
    exchange = exchange_by_files(Path(meet.at.decode()), rank, ranks, WAIT_S)
    return PeerGroup(exchange, rank, ranks, device, shares_gpu=True)
