"""The C kernel over pages gives what torch gives over the same keys and values laid out one behind the other."""

import pytest
import torch

from symbiosis.kernels.paged_attention import How, PageLayout, SeenTokens, attend, compiled
from tests.attentions import kinds

BLOCK, PAGES, SEQUENCES, LONGEST = 16, 24, 3, 70
CLOSE = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-3,
}  # scores of 20 are rounded by 1e-6; 8 and 11 bits
KINDS = kinds(heads=4, steepest=2.0)


def laid_out(
    memory: torch.Tensor, table: torch.Tensor, pages: PageLayout, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence, one behind the other: [heads, tokens, size]."""
    heads, key, value, block, _, values_at = pages
    of = memory[table.long()]
    keys = of[:, : block * heads * key].reshape(-1, heads, key)[:tokens].transpose(0, 1)
    values = of[:, values_at : values_at + block * heads * value].reshape(-1, heads, value)[:tokens].transpose(0, 1)
    return keys, values


def reference(
    memory: torch.Tensor, tables: torch.Tensor, ends: list[int], query: torch.Tensor, how: How, pages: PageLayout
) -> torch.Tensor:
    found = []
    for number, end in enumerate(ends):
        k, v = laid_out(memory, tables[number], pages, end)
        mask = torch.arange(end) >= (0 if how.window is None else end - how.window)
        found.append(
            attend(query[None, :, number : number + 1], k[None], v[None], mask[None, None, None], how)[0, :, 0]
        )
    return torch.stack(found)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("shared", "key", "value"), [(4, 8, 8), (2, 20, 12), (1, 64, 33), (2, 32, 48)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch(kind: str, shared: int, key: int, value: int, dtype: torch.dtype) -> None:
    kernel = compiled(dtype)
    if kernel is None:
        pytest.skip("there is no C compiler")
    values_at, generator = BLOCK * shared * key, torch.Generator().manual_seed(0)
    pages = PageLayout(shared, key, value, BLOCK, values_at + BLOCK * shared * value + 7, values_at)
    memory = torch.randn(PAGES, pages.elements, generator=generator).to(dtype)
    tables = torch.randperm(PAGES, generator=generator)[: SEQUENCES * 5].view(SEQUENCES, 5).int()
    query, ends = torch.randn(4, SEQUENCES, key, generator=generator).to(dtype), [1, LONGEST, 33]
    rows = query.transpose(0, 1).contiguous().transpose(0, 1)  # as models give them
    result = torch.full((SEQUENCES + 1, 4, value), 7.0).to(dtype)
    seen = SeenTokens(torch.arange(SEQUENCES), torch.tensor(ends), LONGEST)
    kernel.attend(memory, pages, tables, seen, KINDS[kind], rows, result[:-1])
    expected = reference(memory.float(), tables, ends, query.float(), KINDS[kind], pages)
    torch.testing.assert_close(result[:-1].float(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert (result[-1] == 7).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("heads", "shared", "size"), [(16, 2, 64), (4, 4, 16), (6, 2, 20), (2, 1, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_long_sequences_by_address(
    kind: str, heads: int, shared: int, size: int, dtype: torch.dtype, threads: int
) -> None:
    """Several rows of each sequence, each of which sees tokens of its own; more tokens than one part has."""
    kernel = compiled(dtype)
    if kernel is None:
        pytest.skip("there is no C compiler")
    block, rows, tokens, generator = 48, 3, 610, torch.Generator().manual_seed(0)
    pages = PageLayout(shared, size, size, block, 0, block * shared * size)
    memory = torch.randn(2 * 13, 2 * block * shared * size, generator=generator).to(dtype)
    numbers = torch.randperm(2 * 13, generator=generator).view(2, 13)
    addresses = memory.data_ptr() + numbers * memory.stride(0) * dtype.itemsize
    ends = torch.tensor([608, 609, 610, 300, 0, 16])
    begins = torch.tensor([0, 5, 599, 40, 0, 15])
    mask = torch.rand(6, tokens, generator=generator) < 0.7
    mask[0, 300:450] = False  # no token of some tiles
    mask[:, 15] = True
    query = torch.randn(heads, 2 * rows, size, generator=generator).to(dtype)
    result, how = torch.empty(2 * rows, heads, size, dtype=dtype), KINDS[kind]
    if how.sinks is not None:
        how = How(how.scaling, how.window, how.softcap, torch.linspace(-2, 2, heads))
    seen = SeenTokens(torch.arange(2) * rows, ends, tokens, rows, begins, mask)
    kernel.attend(None, pages, addresses, seen, how, query, result, threads)
    at = torch.arange(tokens)
    sees = mask & (at < ends[:, None]) & (at >= begins[:, None])
    if how.window is not None:
        sees &= at >= ends[:, None] - how.window
    for row in range(2 * rows):
        k, v = laid_out(memory.float(), numbers[row // rows], pages, tokens)
        expected = attend(query[None, :, row : row + 1].float(), k[None], v[None], sees[row][None, None, None], how)
        expected = torch.zeros_like(expected) if not sees[row].any() else expected
        torch.testing.assert_close(result[row].float(), expected[0, :, 0], rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_row(kind: str) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        test_equals_torch(kind, 4, 8, 12, torch.float32)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scores_of_any_size(scale: float) -> None:
    """Weights are those of the softmax also where nearly all of them vanish."""
    kernel = compiled(torch.float32)
    if kernel is None:
        pytest.skip("there is no C compiler")
    pages = PageLayout(1, 16, 16, BLOCK, 2 * BLOCK * 16, BLOCK * 16)
    memory = torch.randn(2, 2 * BLOCK * 16, generator=torch.Generator().manual_seed(1))
    query, result, tables = torch.randn(1, 1, 16), torch.empty(1, 1, 16), torch.tensor([[1, 0]], dtype=torch.int32)
    seen = SeenTokens(torch.tensor([0]), torch.tensor([30]), 30)
    kernel.attend(memory, pages, tables, seen, How(scale), query, result)
    torch.testing.assert_close(
        result[0], reference(memory, tables, [30], query, How(scale), pages)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("where", ["a key", "a value"])
def test_what_is_no_number_stays_none(where: str) -> None:
    kernel = compiled(torch.float32)
    if kernel is None:
        pytest.skip("there is no C compiler")
    pages = PageLayout(1, 16, 16, 256, 2 * 256 * 16, 256 * 16)
    memory, query, result = torch.randn(1, 2 * 256 * 16), torch.randn(1, 1, 16), torch.empty(1, 1, 16)
    memory[0, (0 if where == "a key" else 256 * 16) + 200 * 16] = float("nan")
    seen = SeenTokens(torch.tensor([0]), torch.tensor([256]), 256)
    kernel.attend(memory, pages, torch.zeros(1, 1, dtype=torch.int32), seen, How(0.1), query, result, 2)
    assert result[0, 0, 0].isnan()


@pytest.mark.parametrize("strided", [False, True])
def test_stores_rows(strided: bool) -> None:
    kernel = compiled(torch.float32)
    if kernel is None:
        pytest.skip("there is no C compiler")
    rows, memory = torch.randn(2, 3, 5), torch.zeros(9, 10)
    given = rows.transpose(1, 2).contiguous().transpose(1, 2) if strided else rows
    kernel.store(given, torch.tensor([4, 0, 8]), memory)
    expected = torch.zeros(9, 10)
    expected[torch.tensor([4, 0, 8])] = rows.transpose(0, 1).flatten(1)
    assert torch.equal(memory, expected)
