"""How ranks find one another."""

import torch

from symbiosis.serving.tensor_parallel.collectives import RankGroup
from symbiosis.serving.tensor_parallel.gloo_group import GlooGroup
from symbiosis.serving.tensor_parallel.nccl_group import NcclGroup

WAIT_S = 600.0  # for another rank: what dies or hangs is noticed sooner, by its process


def rank_group(at: bytes, rank: int, ranks: int, device: torch.device) -> RankGroup:
    """Connect this rank with the others, which do so at the same time.

    Args:
        at: Where they meet: a file that is not there yet, or NCCL's bytes.
    """
    if device.type == "cuda":
        return NcclGroup(at, rank, ranks, device)
    return GlooGroup(at.decode(), rank, ranks, WAIT_S)
