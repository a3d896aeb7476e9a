"""A group of ranks by NCCL, of which this process is the only one: what needs no second GPU."""

import time

import pytest
import torch

pytest.importorskip("triton")
from symbiosis.serving.tensor_parallel.nccl_group import NcclGroup, meeting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timeout(60, method="thread")
def test_a_group_that_a_graph_has_is_aborted_at_once() -> None:
    """NCCL waits for the graph to go, and whoever lets it go must not wait for NCCL."""
    group = NcclGroup(meeting(), 0, 1, torch.device("cuda:0"))
    x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = group.sum(x)
    graph.replay()
    assert torch.equal(made, x)
    began = time.monotonic()
    group.abort()
    assert time.monotonic() - began < 3
    with pytest.raises(RuntimeError, match="not connected any more"):
        group.sum(x)
    del graph, made
    again = NcclGroup(meeting(), 0, 1, torch.device("cuda:0"))
    assert torch.equal(again.sum(x), x)
