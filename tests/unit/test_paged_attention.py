"""The C kernel over pages gives what torch gives over the same keys and values laid out one behind the other."""

import pytest
import torch

from symbiosis.kernels.paged_attention import How, attend, compiled

BLOCK, PAGES, SEQUENCES, LONGEST = 16, 24, 3, 70
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # scores of 20 are rounded by 1e-6, and bfloat16 keeps 8 bits
SINKS = torch.linspace(-2, 2, 4)
KINDS = {
    "plain": How(0.3),
    "window": How(0.3, window=5),
    "window beyond": How(0.3, window=200),
    "soft cap": How(0.3, softcap=1.5),
    "sinks": How(0.3, sinks=SINKS),
    "all": How(2.0, 20, 30.0, SINKS),
}


def reference(
    memory: torch.Tensor, tables: torch.Tensor, ends: list[int], query: torch.Tensor, how: How, sizes: tuple
) -> torch.Tensor:
    heads, key, value, _, values_at = sizes
    found = []
    for number, end in enumerate(ends):
        pages = memory[tables[number].long()]
        k = pages[:, : BLOCK * heads * key].reshape(-1, heads, key)[:end].transpose(0, 1)
        v = pages[:, values_at : values_at + BLOCK * heads * value].reshape(-1, heads, value)[:end].transpose(0, 1)
        mask = torch.arange(end) >= (0 if how.window is None else end - how.window)
        found.append(
            attend(query[None, :, number : number + 1], k[None], v[None], mask[None, None, None], how)[0, :, 0]
        )
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shared", "key", "value"), [(4, 8, 8), (2, 20, 12), (1, 64, 33)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch(kind: str, shared: int, key: int, value: int, dtype: torch.dtype) -> None:
    kernel = compiled(dtype, BLOCK)
    if kernel is None:
        pytest.skip("there is no C compiler")
    values_at, generator = BLOCK * shared * key, torch.Generator().manual_seed(0)
    sizes = shared, key, value, values_at + BLOCK * shared * value + 7, values_at
    memory = torch.randn(PAGES, sizes[3], generator=generator).to(dtype)
    tables = torch.randperm(PAGES, generator=generator)[: SEQUENCES * 5].view(SEQUENCES, 5).int()
    query, ends = torch.randn(4, SEQUENCES, key, generator=generator).to(dtype), [1, LONGEST, 33]
    rows = query.transpose(0, 1).contiguous().transpose(0, 1)  # as models give them
    result = torch.full((SEQUENCES + 1, 4, value), 7.0).to(dtype)
    which = torch.arange(SEQUENCES)
    kernel.attend(memory, sizes, tables, which, torch.tensor(ends), LONGEST, KINDS[kind], rows, result)
    expected = reference(memory.float(), tables, ends, query.float(), KINDS[kind], sizes)
    torch.testing.assert_close(result[:-1].float(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert (result[-1] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_the_heads_of_a_row(kind: str) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        test_equals_torch(kind, 4, 8, 12, torch.float32)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scores_of_any_size(scale: float) -> None:
    """Weights are those of the softmax also where nearly all of them vanish."""
    kernel = compiled(torch.float32, BLOCK)
    if kernel is None:
        pytest.skip("there is no C compiler")
    memory, sizes = (
        torch.randn(2, 2 * BLOCK * 16, generator=torch.Generator().manual_seed(1)),
        (1, 16, 16, 2 * BLOCK * 16, BLOCK * 16),
    )
    query, result, tables = torch.randn(1, 1, 16), torch.empty(1, 1, 16), torch.tensor([[1, 0]], dtype=torch.int32)
    kernel.attend(memory, sizes, tables, torch.tensor([0]), torch.tensor([30]), 30, How(scale), query, result)
    torch.testing.assert_close(
        result[0], reference(memory, tables, [30], query, How(scale), sizes)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("strided", [False, True])
def test_stores_rows(strided: bool) -> None:
    kernel = compiled(torch.float32, BLOCK)
    if kernel is None:
        pytest.skip("there is no C compiler")
    rows, memory = torch.randn(2, 3, 5), torch.zeros(9, 10)
    given = rows.transpose(1, 2).contiguous().transpose(1, 2) if strided else rows
    kernel.store(given, torch.tensor([4, 0, 8]), memory)
    expected = torch.zeros(9, 10)
    expected[torch.tensor([4, 0, 8])] = rows.transpose(0, 1).flatten(1)
    assert torch.equal(memory, expected)
