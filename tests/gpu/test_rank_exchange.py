"""What ranks exchange by each other's memory: here two, or four, of one GPU, on a stream each.

Under MPS the streams of one program may share a queue, and a rank would wait for one behind it: not tried there.
"""

import os
import time

import pytest
import torch

pytest.importorskip("triton")
from symbiosis.kernels.gpu.rank_exchange import (
    BLOCKS,
    BLOCKS_OF_MANY,
    RankMemory,
    gather_of_ranks,
    memory_of,
    sum_of_ranks,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="streams share queues under MPS"),
    pytest.mark.timeout(100, method="thread"),
]
FINISH_S = 20.0


class Ranks:
    """Kernels that are loaded only while others wait for theirs would wait for these: `load` runs all once before."""

    def __init__(self, count: int, blocks: int = BLOCKS) -> None:
        self._memory = [torch.zeros(memory_of(count), dtype=torch.uint8, device="cuda") for _ in range(count)]
        memories = torch.tensor([each.data_ptr() for each in self._memory], device="cuda")
        numbers = torch.zeros(count, blocks, dtype=torch.int32, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(count)]
        self.stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._ends = [RankMemory(rank, memories, numbers[rank], self.stop.data_ptr()) for rank in range(count)]
        torch.cuda.synchronize()

    def load(self, given: list[torch.Tensor]) -> None:
        self.stop[0] = 1
        for rank, x in enumerate(given):
            self.sum(x, rank)
            self.gather(x, rank)
            torch.cuda.synchronize()
        self.stop[0] = 0

    def finish(self) -> None:
        """Wait until all is done; what waits for ever is told to end, and fails the test."""
        events = [stream.record_event() for stream in self.streams]
        deadline = time.monotonic() + FINISH_S
        while not all(event.query() for event in events):
            if time.monotonic() > deadline:
                self.stop[0] = 1
                torch.cuda.synchronize()
                pytest.fail("a rank waits for another")
        torch.cuda.synchronize()

    def sum(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        with torch.cuda.stream(self.streams[rank]):
            return sum_of_ranks(x, self._ends[rank])

    def gather(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        with torch.cuda.stream(self.streams[rank]):
            return gather_of_ranks(x, self._ends[rank])


def rows(count: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    chance = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=chance, device="cuda").to(dtype) for _ in range(count)]


@pytest.mark.parametrize(("count", "blocks"), [(2, BLOCKS), (4, BLOCKS_OF_MANY)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_ranks_have_the_sum_and_the_rows_of_all(count: int, blocks: int, dtype: torch.dtype) -> None:
    ranks = Ranks(count, blocks)
    for number, shape in enumerate([(1, 64), (32, 4096), (3, 5120), (7, 33), (32, 4096), (1, 1), (300, 4096)] * 3):
        given = rows(count, shape, dtype, number)
        ranks.load(given)
        made = [ranks.sum(x, rank) for rank, x in enumerate(given)]
        ranks.finish()
        expected = given[0].float()
        for x in given[1:]:  # in the order of the ranks
            expected = expected + x.float()
        for each in made:
            assert torch.equal(each, expected.to(dtype)), (number, shape)
        whole = [ranks.gather(x, rank) for rank, x in enumerate(given)]
        ranks.finish()
        for each in whole:
            assert torch.equal(each, torch.stack(given)), (number, shape)


def test_captured_sums_go_on_from_one_another() -> None:
    ranks = Ranks(2)
    given = rows(2, (16, 5120), torch.bfloat16, 1)
    ranks.load(given)
    expected = ranks.sum(given[0], 0), ranks.sum(given[1], 1)
    ranks.finish()
    graphs, made = [torch.cuda.CUDAGraph() for _ in range(2)], list[torch.Tensor]()
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            x = given[rank]
            for _ in range(5):
                x = ranks.sum(x, rank) * 0.5
            made.append(x)
    for _ in range(100):
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
    ranks.finish()
    assert torch.equal(made[0], made[1])
    assert torch.allclose(made[0].float(), expected[0].float() / 2, rtol=0.02, atol=0.02)


def test_a_rank_that_never_comes_is_waited_for_until_that_is_said() -> None:
    ranks = Ranks(2)
    x, _ = given = rows(2, (16, 5120), torch.bfloat16, 1)
    ranks.load(given)
    waits = torch.cuda.Event()
    ranks.sum(x, 0)
    waits.record(ranks.streams[0])
    time.sleep(0.2)
    assert not waits.query()
    ranks.stop[0] = 1
    torch.cuda.synchronize()
    ranks.sum(x, 0)
    torch.cuda.synchronize()
