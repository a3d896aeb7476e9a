"""The kernels of the server on a GPU, against the plain formulas. With TRITON_INTERPRET=1 they run on a CPU, too."""

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from symbiosis.kernels.paged_attention import How, attend
from tests.attentions import kinds

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
OFF = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest value


def off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max())


# ---------------------------------------------------------------- adapters


class Pages:
    """Memory in which rows lie wherever there is room."""

    def __init__(self, page: int, count: int, dtype: torch.dtype) -> None:
        self.page, self.flat = page, torch.full((page * count,), float("nan"), dtype=dtype, device=DEVICE)
        self._free = torch.randperm(count).tolist()

    def put(self, matrix: Tensor) -> list[int]:
        """Each row in pages of its own: the addresses of its pieces, row by row."""
        addresses = []
        for row in matrix:
            for piece in row.split(self.page):
                begin = self._free.pop() * self.page
                self.flat[begin : begin + len(piece)] = piece
                addresses.append(self.flat.data_ptr() + begin * self.flat.element_size())
        return addresses


class Lora:
    """What one adapter does at the layers of a group, and its records."""

    def __init__(
        self, ranks: list[int], K: int, widths: list[int], pages: Pages, extras: bool, is_wide: bool = False
    ) -> None:
        dtype, like = pages.flat.dtype, {"device": DEVICE, "dtype": pages.flat.dtype}
        self.down = [(torch.randn(r, K, device=DEVICE) / K**0.5).to(dtype) for r in ranks]
        self.up = [
            (torch.randn(r, n, device=DEVICE) / max(1, r) ** 0.5).to(dtype) for r, n in zip(ranks, widths, strict=True)
        ]
        self.gain = [torch.randn(1, n, **like) if extras else None for n in widths]
        self.shift = [torch.randn(1, n, **like) if extras else None for n in widths]
        records = [[sum(ranks), *(word for down in self.down for word in pages.put(down))]]
        for member, up in enumerate(self.up):
            rows = pages.put(up)
            behind = []
            where = []
            for vector in (self.gain[member], self.shift[member]):
                where.append(0 if vector is None else 4 + len(rows) + len(behind))
                behind += [] if vector is None else pages.put(vector)
            records.append([ranks[member], sum(ranks[:member]), *where, *rows, *behind])
        flag = 1 << 32 if is_wide else 0
        self.words = [torch.tensor([first + flag, *more, *[0] * 64], device=DEVICE) for first, *more in records]

    def adapted(self, y: Tensor, x: Tensor, member: int) -> Tensor:
        y, x = y.double(), x.double()
        for vector, by in ((self.gain[member], torch.mul), (self.shift[member], torch.add)):
            y = y if vector is None else by(y, vector.double())
        return y + x @ self.down[member].double().t() @ self.up[member].double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("K", "widths", "page"),
    [(64, [48, 32, 80], 128), (77, [131], 200), (300, [33, 290], 96), (1056, [520, 24, 24, 8], 2048)],
)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("singly", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_adapters_of_any_rank_side_by_side(
    K: int, widths: list[int], page: int, extras: bool, singly: bool, wide: bool, dtype: torch.dtype
) -> None:
    """`wide`: every other adapter is float32, whatever the rows are."""
    if wide and dtype == torch.float32:
        pytest.skip("float32 is as wide as rows are")
    from symbiosis.kernels.gpu.adapter_rows import TILE, Tiles, expand_, parts_of, shrink, tiles_of

    torch.manual_seed(K)
    memory = Pages(page, 12 * 1024, dtype)
    members = len(widths)
    ranks = [[1] * members, [3] * members, [7, 16, 2, 0][:members], [65] * members, [0] * members]
    floats = Pages(page // 2, 12 * 1024, torch.float32)
    loras = [
        Lora(each, K, widths, floats if is_wide else memory, extras, is_wide)
        for number, each in enumerate(ranks)
        for is_wide in [wide and number % 2 == 0]
    ]
    runs = [(0, 1), (1, 20), (21, 2), (23, 1), (26, 17), (50, 0)]  # 24, 25, and what follows, are of nobody
    of = [0, 1, 2, 3, 4, 0]
    rows = 52
    tiles = tiles_of(runs, 1 if singly else TILE)
    room = len(tiles) + 3
    words = torch.zeros(room, 2, dtype=torch.int32)
    records = torch.zeros(2 + members, room, dtype=torch.int64)
    for number, (first, count, run) in enumerate(tiles):
        words[number] = torch.tensor([first, count])
        for entry, record in enumerate(loras[of[run]].words):
            records[1 + entry, number] = record.data_ptr()
    where = Tiles(words.to(DEVICE), records.to(DEVICE), singly, wide)
    x = torch.randn(rows, K, device=DEVICE).to(dtype)
    ys = [torch.randn(rows, n, device=DEVICE).to(dtype) for n in widths]
    before = [y.clone() for y in ys]
    low = torch.full((rows, parts_of(K), 65 * members), float("nan"), device=DEVICE)
    shrink(x, where, room, 1, page, low)
    expand_(ys, where, room, 2, page, low)
    for member, y in enumerate(ys):
        expected = before[member].double()
        for (first, count), lora in zip(runs, (loras[each] for each in of), strict=True):
            expected[first : first + count] = lora.adapted(
                expected[first : first + count], x[first : first + count], member
            )
        assert off(y, expected) < OFF[dtype]
        if wide:  # of rows 21 and 22, whose adapter is float32, nothing is rounded but the result
            assert torch.allclose(y[21:23].double(), expected[21:23], rtol=torch.finfo(dtype).eps, atol=1e-4)
        assert torch.equal(y[24:26], before[member][24:26]) and torch.equal(y[43:], before[member][43:])


def test_nothing_is_done_without_records() -> None:
    from symbiosis.kernels.gpu.adapter_rows import Tiles, expand_, shrink

    x, y = torch.randn(3, 64, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    before, low = y.clone(), torch.zeros(3, 1, 16, device=DEVICE)
    words = torch.tensor([[0, 3], [0, 0]], dtype=torch.int32, device=DEVICE)
    nobody = Tiles(words, torch.zeros(2, 2, dtype=torch.int64, device=DEVICE))
    shrink(x, nobody, 2, 0, 64, low)
    expand_([y], nobody, 2, 1, 64, low)
    assert torch.equal(y, before) and not low.any()


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_matrices_are_gathered_as_by_copies(source: torch.dtype, to: torch.dtype) -> None:
    from symbiosis.kernels.gpu.gather_matrices import gather
    from symbiosis.serving.lora.adapter_cache import place
    from symbiosis.serving.lora.held import copy_pieces

    torch.manual_seed(0)
    page, matrices = 200, [torch.randn(shape, device=DEVICE).to(source) for shape in [(3, 77), (131, 20), (5, 450)]]
    matrices[1] = matrices[1].t()
    scales = [1.0, 1.7, 0.3]
    count, runs = place([tuple(matrix.shape) for matrix in matrices], page)
    pieces = [
        (
            matrices[run.matrix][run.row :, run.column :].data_ptr(), run.page * page + run.offset, run.rows, run.width,
            *matrices[run.matrix].stride(),
        )
        for run in runs
    ]  # fmt: skip
    mine, expected = (torch.zeros(count * page, dtype=to, device=DEVICE) for _ in range(2))
    factors = torch.tensor([scales[run.matrix] for run in runs], device=DEVICE)
    gather(torch.tensor(pieces, device=DEVICE), factors, mine, matrices[0])
    copy_pieces(expected, runs, matrices, scales, page)
    assert off(mine, expected) < 2 * torch.finfo(to).eps


# ---------------------------------------------------------------- attention

BLOCK, LAYERS, SLOTS, MOST = 16, 3, 4, 12
HEADS = 8  # of queries
KINDS = kinds(HEADS, steepest=1.0)


class Sequences:
    """Random keys and values of some sequences in pages, and the same one behind the other."""

    def __init__(self, shared: int, key: int, value: int, dtype: torch.dtype) -> None:
        from symbiosis.kernels.gpu.paged_attention import Memory

        torch.manual_seed(0)
        values_at = BLOCK * shared * key + 8
        page = values_at + BLOCK * shared * value + 16
        count = SLOTS * LAYERS * MOST
        flat = torch.full((count * page,), float("nan"), dtype=dtype, device=DEVICE)
        pages = torch.randperm(count).view(SLOTS, LAYERS, MOST).int().to(DEVICE)
        self.keys = torch.randn(SLOTS, shared, MOST * BLOCK, key, device=DEVICE).to(dtype)
        self.values = torch.randn(SLOTS, shared, MOST * BLOCK, value, device=DEVICE).to(dtype)
        self.memory = Memory(flat, pages, BLOCK, page, values_at, shared, key, value, 1)

    def put(self, slot: int, begin: int, end: int) -> None:
        from symbiosis.kernels.gpu.paged_attention import store

        slots = torch.full((end - begin + 1,), slot, dtype=torch.int32, device=DEVICE)
        slots[-1] = -1  # of nobody
        positions = torch.arange(begin, end + 1, device=DEVICE).int()
        key = self.keys[slot][:, begin : end + 1].transpose(0, 1).contiguous().transpose(0, 1)  # as models give them
        store(self.memory, key, self.values[slot][:, begin : end + 1], slots, positions)

    def expected(self, slot: int, query: Tensor, position: int, how: How) -> Tensor:
        """Of rows [heads, rows, size] from this position on."""
        end = position + query.shape[1]
        own, token = torch.arange(position, end, device=DEVICE)[:, None], torch.arange(end, device=DEVICE)[None]
        mask = token <= own
        if how.window is not None:
            mask &= token > own - how.window
        how = How(
            how.scaling,
            how.window,
            how.softcap,
            None if how.sinks is None else how.sinks.to(DEVICE, query.dtype).double(),
        )
        k, v = self.keys[slot][None, :, :end].double(), self.values[slot][None, :, :end].double()
        return attend(query[None].double(), k, v, mask[None, None], how)[0].transpose(0, 1)


def on_device(how: How, dtype: torch.dtype) -> How:
    return How(how.scaling, how.window, how.softcap, None if how.sinks is None else how.sinks.to(DEVICE, dtype))


def test_a_launch_takes_the_memory_that_a_gpu_has() -> None:
    from symbiosis.kernels.gpu.paged_attention import Decode, cut_to_fit

    wanted, kib = Decode(4, 4, 3), 1 << 10
    assert cut_to_fit(wanted, 8 * kib, 200 * kib) == wanted
    assert cut_to_fit(wanted, 8 * kib, 86 * kib) == Decode(4, 4, 2)
    assert cut_to_fit(wanted, 32 * kib, 200 * kib) == Decode(2, 4, 3)
    assert cut_to_fit(wanted, 96 * kib, 200 * kib) == Decode(1, 4, 2)
    assert cut_to_fit(wanted, 96 * kib, 86 * kib) == Decode(1, 4, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shared", "key", "value"), [(8, 256, 256), (1, 576, 512)])
def test_single_rows_of_large_heads(shared: int, key: int, value: int, dtype: torch.dtype) -> None:
    test_single_rows("all", shared, key, value, 0, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shared", "key", "value"), [(8, 32, 32), (2, 20, 12), (1, 64, 33), (4, 96, 128)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 4, 0])
def test_single_rows(kind: str, shared: int, key: int, value: int, split: int, dtype: torch.dtype) -> None:
    from symbiosis.kernels.gpu.paged_attention import decode

    if INTERPRETED and (split == 0 or (shared == 4 and kind != "all")):
        pytest.skip("slow without a GPU")
    sequences = Sequences(shared, key, value, dtype)
    ends = {0: 1, 2: 70, 3: 33}
    for slot, end in ends.items():
        sequences.put(slot, 0, end)
    singles = [(3, 2, 70), (-1, 0, 0), (0, 0, 1), (2, 3, 33)]
    query = torch.randn(5, HEADS, key, device=DEVICE).to(dtype).transpose(0, 1)
    result = torch.full((5, HEADS, value), 7.0, dtype=dtype, device=DEVICE)
    table = torch.tensor(singles, dtype=torch.int32, device=DEVICE)
    decode(sequences.memory, on_device(KINDS[kind], dtype), query, table, result, split=split)
    for row, slot, end in singles:
        if row >= 0:
            expected = sequences.expected(slot, query[:, row : row + 1], end - 1, KINDS[kind])
            assert off(result[row], expected[0]) < OFF[dtype], (row, slot, end)
    assert (result[[1, 4]] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shared", "key", "value"), [(8, 32, 32), (2, 20, 12), (4, 192, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_longer_segments(kind: str, shared: int, key: int, value: int, dtype: torch.dtype) -> None:
    from symbiosis.kernels.gpu.paged_attention import QUERIES, prefill

    if INTERPRETED and shared == 4 and kind != "all":
        pytest.skip("slow without a GPU")
    sequences = Sequences(shared, key, value, dtype)
    for slot, end in ((0, 90), (1, 100), (3, 2)):
        sequences.put(slot, 0, end)
    segments = [(2, 90, 0, 0), (92, 30, 1, 70), (123, 2, 3, 0)]  # first row, rows, slot, position
    blocks = [
        (first + at, min(QUERIES, rows - at), slot, position + at)
        for first, rows, slot, position in segments
        for at in range(0, rows, QUERIES)
    ]
    blocks.insert(1, (0, 0, 0, 0))
    query = torch.randn(126, HEADS, key, device=DEVICE).to(dtype).transpose(0, 1)
    result = torch.full((126, HEADS, value), 7.0, dtype=dtype, device=DEVICE)
    how = on_device(KINDS[kind], dtype)
    prefill(sequences.memory, how, query, torch.tensor(blocks, dtype=torch.int32, device=DEVICE), result)
    for first, rows, slot, position in segments:
        expected = sequences.expected(slot, query[:, first : first + rows], position, KINDS[kind])
        assert off(result[first : first + rows], expected) < OFF[dtype]
    assert (result[[0, 1, 122, 125]] == 7).all()
