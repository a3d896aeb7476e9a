"""The kernels that move rows by a table, and the one that multiplies them where they lie, against their references."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("seed", range(4))
def test_copies_and_answers(seed: int) -> None:
    from symbiosis.kernels.gpu import gather as rows

    random = torch.Generator().manual_seed(seed)
    table, turn = rows.new_table()
    words, copies = 1 << 16, 24
    memory = torch.randint(0, 1 << 40, (2 * words,), generator=random)
    on_gpu = memory.cuda()
    answers = torch.zeros(8, dtype=torch.int32, device="cuda")
    for time in range(2 * rows.PAGES + 3):  # the pages come again
        page = table[time % rows.PAGES]
        counts = torch.randint(0, words // copies, (copies,), generator=random) & ~1
        counts[seed] = 0
        targets = words + torch.arange(copies) * (words // copies)  # apart from each other
        sources = torch.randint(0, words - words // copies, (copies,), generator=random) & ~1
        first = rows.IN if time % 2 else rows.OUT
        entries = torch.stack((8 * sources, 8 * targets, counts), 1)
        rows.reference(entries.reshape(-1), 0, copies, memory)
        base = on_gpu.data_ptr()
        page[first : first + 3 * copies] = (entries + torch.tensor([base, base, 0])).reshape(-1)
        page[: 2 * rows.PLACES] = 0
        for word in range(0, 8, 2):
            page[2 * word], page[2 * word + 1] = answers.data_ptr() + 4 * word, time + word
        (rows.copy_in if time % 2 else rows.copy_out)(table, turn, copies, 8 * words)
        rows.answer(table, turn)
        torch.cuda.synchronize()
        assert answers.tolist() == [time + word if word % 2 == 0 else 0 for word in range(8)]
        assert torch.equal(on_gpu.cpu(), memory)
    assert turn.item() == 2 * rows.PAGES + 3


@pytest.mark.parametrize(
    ("dtype", "width", "columns", "rows", "bias"),
    [
        (torch.bfloat16, 4096, (4096, 1024), 3, False),
        (torch.float16, 416, (72, 200, 8), 11, True),
        (torch.bfloat16, 11008, (1000,), 32, True),
        (torch.bfloat16, 512, (97, 31), 17, False),
        (torch.bfloat16, 1040, (12000, 24000), 9, True),
    ],
)
def test_few_rows_are_multiplied_where_they_lie(
    dtype: torch.dtype, width: int, columns: tuple[int, ...], rows: int, bias: bool
) -> None:
    from symbiosis.kernels.gpu.few_rows import FewRowsKernel, takes
    from symbiosis.kernels.gpu.gather import IN, PLACES
    from symbiosis.kernels.product import product

    torch.manual_seed(0)
    weights = [(torch.randn(n, width, device="cuda") / width**0.5).to(dtype).t() for n in columns]
    biases = [torch.randn(n, device="cuda").to(dtype) if bias else None for n in columns]
    assert takes(weights, rows) and not takes(weights, 33)
    assert not takes([weights[0].t()], rows) and not takes([weights[0].float()], rows)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    assert not takes([weights[0], weights[0].to(other)], rows) and not takes([weights[0].cpu()], rows)
    few = FewRowsKernel(weights, biases, rows)
    x = torch.randn(rows, width, device="cuda").to(dtype)
    results = [torch.full((rows + 1, -(-n // 8) * 8), 7.0, device="cuda", dtype=dtype) for n in columns]
    order = torch.randperm(rows).tolist()
    sources = [x[row].data_ptr() for row in order]
    targets = [[result[row].data_ptr() for row in order] for result in results]
    for addresses in (sources, *targets):
        addresses[0] = 0  # no such row
    replies = torch.zeros(64, dtype=torch.int32, device="cuda")
    answers = [replies.data_ptr(), 5, replies[32:].data_ptr(), 9] + [0] * (2 * PLACES - 4)
    page = torch.tensor([0, *answers, *few.page(sources, targets)], device="cuda")[1:]  # aligned no better than a word
    assert len(page) == IN + few.words
    turn, done = (torch.zeros(1, dtype=kind, device="cuda") for kind in (torch.int64, torch.int32))
    for turned in (4, 9):
        replies.zero_()
        few.multiply(page, turn, turned, done)
        torch.cuda.synchronize()
        assert turn.item() == turned and done.item() == 0
        assert replies.nonzero().flatten().tolist() == [0, 32] and replies[[0, 32]].tolist() == [5, 9]
    rounding = 2 * torch.finfo(dtype).eps
    for result, weight, its_bias in zip(results, weights, biases, strict=True):
        n = weight.shape[1]
        expected = product(x[order[1:]], weight, its_bias)
        torch.testing.assert_close(result[order[1:], :n], expected, atol=rounding, rtol=rounding)
        assert (result[[order[0], rows]] == 7).all() and (result[:, n:] == 7).all(), "written beside a row"
