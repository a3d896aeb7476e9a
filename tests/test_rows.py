"""The kernels that gather and scatter rows by a table, against their reference."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("seed", range(4))
def test_copies_and_answers(seed: int) -> None:
    from symbiosis.kernels import rows

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
