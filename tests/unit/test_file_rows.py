"""Matrices of a file come into pages as torch would scale, round and turn them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.kernels import file_rows
from symbiosis.serving.lora.adapter_cache import place

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
MATRICES = st.lists(
    st.tuples(DTYPES, st.integers(1, 40), st.integers(1, 150), st.sampled_from([1.0, 2.0, 0.3, 1e-3]), st.booleans()),
    min_size=1, max_size=5,
)  # fmt: skip


def run_table(runs: list, page: int) -> torch.Tensor:  # type: ignore[type-arg]
    return torch.tensor([(*run[1:5], run.page * page + run.offset) for run in runs])


@settings(deadline=None, max_examples=60)
@given(MATRICES, DTYPES, st.sampled_from([64, 200, 4096]), st.integers(1, 3))
def test_they_are_what_torch_makes_of_them(kinds: list, dtype: torch.dtype, page: int, threads: int) -> None:  # type: ignore[type-arg]
    generator = torch.Generator().manual_seed(len(kinds))
    contents, sources, expected = b"head", [], []
    for of, rows, columns, scale, is_transposed in kinds:
        stored = torch.randn((columns, rows) if is_transposed else (rows, columns), generator=generator).to(of)
        sources.append(file_rows.Source(len(contents), of, rows, columns, scale, is_transposed))
        contents += stored.view(-1).view(torch.uint8).numpy().tobytes()
        expected.append(((stored.t() if is_transposed else stored).float() * scale).to(dtype))
    assert file_rows.can_read(sources, dtype)
    count, runs = place([(s.rows, s.columns) for s in sources], page)
    table = file_rows.matrices(sources, [sum(run.matrix == n for run in runs) for n in range(len(sources))])
    fd = os.memfd_create("matrices")
    try:
        os.write(fd, contents)
        for file in (fd, torch.frombuffer(bytearray(contents), dtype=torch.uint8)):
            pages = torch.zeros(count, page, dtype=dtype)
            taken = torch.zeros(1, dtype=torch.int64)
            given = file, table, run_table(runs, page), pages, taken
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda _, given=given: file_rows.put(*given), range(threads)))
            assert taken.item() == len(sources) + threads
            for run in runs:
                found = pages[run.page, run.offset : run.offset + run.rows * run.width].view(run.rows, run.width)
                of = expected[run.matrix][run.row : run.row + run.rows, run.column : run.column + run.width]
                assert torch.equal(found, of)
    finally:
        os.close(fd)


def test_a_file_that_ends_too_soon_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(60))
    table = file_rows.matrices([file_rows.Source(0, torch.float32, 4, 4)], [1])
    with (tmp_path / "short").open("rb") as file, pytest.raises(OSError):
        file_rows.put(
            file.fileno(),
            table,
            run_table(place([(4, 4)], 16)[1], 16),
            torch.zeros(1, 16),
            torch.zeros(1, dtype=torch.int64),
        )


def test_numbers_that_are_neither_are_not_read() -> None:
    assert not file_rows.can_read([file_rows.Source(0, torch.float16, 4, 4)], torch.float32)
    assert not file_rows.can_read([file_rows.Source(0, torch.float32, 4, 4)], torch.float16)
