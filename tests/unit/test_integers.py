"""Exact products of integers, the keystream that masks them, and rows of floating point that fit into them."""

import pytest
import torch
from torch import Tensor

from symbiosis.base.keystream import keystream, new_key
from symbiosis.client.privacy.fixed_point import INTEGERS, Quantum, to_floats, to_integers
from symbiosis.kernels import integers
from symbiosis.kernels.integers import LARGEST, digits, modular_product, quantise

BITS = pytest.mark.parametrize("bits", [8, 16])


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of all bits, with the smallest and the largest number among them."""
    info = torch.iinfo(dtype)
    x = torch.randint(
        0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    x_TK = x.view(dtype).clone()
    x_TK[0], x_TK[-1] = info.min, info.max
    return x_TK


def weights(inputs: int, outputs: int, seed: int = 0) -> Tensor:
    v_KN = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(seed))
    v_KN[:, 0] = 0
    v_KN[:, -1] *= 1e6
    return v_KN


def whole(digits_DKN: Tensor) -> Tensor:
    return sum(digit.long() << (8 * place) for place, digit in enumerate(digits_DKN))  # type: ignore[return-value]


# ---------------------------------------------------------------- products


def reference_product(x_TK: Tensor, w_DKN: Tensor) -> Tensor:
    """Compute a product modulo 2^32 or 2^64 with Python's integers, which cannot overflow."""
    w_KN = [
        [sum(int(digit) << (8 * place) for place, digit in enumerate(w)) for w in row] for row in w_DKN.movedim(0, -1)
    ]
    bits = 8 * x_TK.element_size()
    y = [[sum(int(a) * row[n] for a, row in zip(x, w_KN, strict=True)) for n in range(w_DKN.shape[-1])] for x in x_TK]
    wrapped = [[(value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for value in row] for row in y]
    return torch.tensor(wrapped, dtype=x_TK.dtype).view(len(x_TK), w_DKN.shape[-1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 37, 11), (17, 64, 5), (2, 1, 1)])
@BITS
def test_products_are_exact(bits: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    q_DKN, _ = quantise(weights(inputs, outputs), bits)
    x_TK = random_rows(rows, inputs, dtype)
    assert torch.equal(modular_product(x_TK, q_DKN), reference_product(x_TK, q_DKN))
    dy_TN = random_rows(rows, outputs, dtype)
    w_DNK = q_DKN.transpose(1, 2)
    assert torch.equal(modular_product(dy_TN, w_DNK), reference_product(dy_TN, w_DNK))


def test_products_are_exact_by_bytes_and_by_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    q_DKN, _ = quantise(weights(300, 9), 16)
    x_TK = random_rows(5, 300, torch.int64)
    for by_bytes in {False, integers._bytes_are_worth_it()}:
        monkeypatch.setattr(integers, "_bytes_are_worth_it", lambda by_bytes=by_bytes: by_bytes)
        assert torch.equal(modular_product(x_TK, q_DKN), reference_product(x_TK, q_DKN))


@pytest.mark.parametrize(("wrong", "seconds", "worth_it"), [(0, 1.0, True), (0, 3.0, False), (1, 1.0, False)])
def test_bytes_are_multiplied_where_that_is_right_and_fast(
    wrong: int, seconds: float, worth_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are processors whose sums saturate, and some for which torch has but a loop."""

    def by_bytes(x_TK: Tensor, w_KN: Tensor) -> Tensor:
        return (x_TK.int() @ w_KN.int()).clamp(max=(1 << 31) - 1 if not wrong else (1 << 15) - 1)

    monkeypatch.setattr(torch, "_int_mm", by_bytes)
    monkeypatch.setattr(integers, "_seconds", lambda multiply, *_: seconds if multiply is by_bytes else 2.0)
    assert integers._bytes_are_worth_it.__wrapped__() is worth_it


def test_a_product_may_go_into_given_memory() -> None:
    q_DKN, _ = quantise(weights(8, 4), 8)
    x_TK, out_TN = random_rows(3, 8, torch.int32), torch.full((3, 4), 77, dtype=torch.int32)
    assert modular_product(x_TK, q_DKN, None, out_TN) is out_TN
    assert torch.equal(out_TN, reference_product(x_TK, q_DKN))


@BITS
def test_digits_are_what_was_quantised(bits: int) -> None:
    v_KN = weights(200, 70)
    q_DKN, unit_N = quantise(v_KN, bits)
    q_KN = whole(q_DKN)
    assert q_DKN.shape[0] == bits // 8
    assert int(q_KN.abs().max()) == LARGEST[bits]
    assert torch.equal(q_KN, (v_KN / unit_N).round().long())
    assert unit_N[0] == 1.0  # of a column of zeros


def test_wide_matrices_are_quantised_block_by_block_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    v_KN = weights(50, 33)
    expected = quantise(v_KN, 16)
    monkeypatch.setattr(integers, "BLOCK", 50 * 7)
    assert all(torch.equal(a, b) for a, b in zip(quantise(v_KN, 16), expected, strict=True))


def test_sums_too_long_for_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        quantise(torch.empty(integers.LONGEST, 1), 8)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_digits_make_up_the_number(dtype: torch.dtype) -> None:
    x = random_rows(4, 100, dtype)
    size = dtype.itemsize
    for number, parts in zip(x.flatten().tolist(), digits(x).flatten(1).t().tolist(), strict=True):
        assert (sum(part << (8 * place) for place, part in enumerate(parts)) - number) % (1 << (8 * size)) == 0


# ---------------------------------------------------------------- the keystream


def test_the_keystream_is_aes_256_in_counter_mode() -> None:
    """NIST SP 800-38A, F.5.5: the output blocks."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    rows = keystream(key, (2, 16), torch.uint8, stream=0xF0F1F2F3F4F5F6F7, start=0xF8F9FAFBFCFDFEFF)
    assert bytes(rows[0].tolist()).hex() == "0bdf7df1591716335e9a8b15c860c502"
    assert bytes(rows[1].tolist()).hex() == "5a6e699d536119065433863c8f657b94"


@pytest.mark.parametrize("width", [1, 4, 5, 64])
def test_rows_of_a_keystream_never_overlap(width: int) -> None:
    key = new_key()
    rows = [keystream(key, (1, width), torch.int64, stream, start) for stream in range(3) for start in range(5)]
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 15
    assert torch.equal(torch.cat(rows[:5]), keystream(key, (5, width), torch.int64))


def test_keys_are_never_the_same() -> None:
    assert len({new_key() for _ in range(1000)}) == 1000


# ---------------------------------------------------------------- rows as integers


def hard_rows(q_KN: Tensor) -> Tensor:
    """What could overflow, vanish or lose all its bits, in float32."""
    info, width = torch.finfo(torch.float32), len(q_KN)
    worst = q_KN[:, q_KN.double().norm(dim=0).argmax()].float()
    rows = [
        worst, -worst, worst * 1e30, worst.sign(), torch.full((width,), info.max), torch.full((width,), -info.max),
        torch.full((width,), info.smallest_normal), torch.full((width,), 1e-45), torch.zeros(width),
        torch.eye(width)[0] * info.max, torch.eye(width)[0] * 1e-45, torch.randn(width) + torch.eye(width)[1] * 1e4,
    ]  # fmt: skip
    return torch.stack(rows)


@BITS
def test_no_row_overflows(bits: int) -> None:
    """The products in k bits are the products in Python's integers, on rows made to exceed any bound that is not exact."""
    q_DKN, unit_N = quantise(weights(60, 20), bits)
    known, q_KN = Quantum.of(q_DKN, unit_N), whole(q_DKN)
    for matrix, norm in ((q_KN, known.column), (q_KN.t(), known.row)):
        x_int, _ = to_integers(hard_rows(matrix), norm, INTEGERS[bits])
        exact = [
            [sum(a * b for a, b in zip(x, column, strict=True)) for column in matrix.t().tolist()]
            for x in x_int.tolist()
        ]
        most = torch.iinfo(INTEGERS[bits]).max
        assert max(abs(value) for row in exact for value in row) <= most
        assert max(abs(value) for row in exact for value in row) > 0.9 * most  # and the bits are used


@BITS
def test_rows_come_back(bits: int) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    x_int, step = to_integers(x, Quantum.of(*quantise(weights(64, 32), bits)).column, INTEGERS[bits])
    error = (to_floats(x_int, step, None, torch.float64) - x.double()).norm() / x.double().norm()
    assert error < {8: 1e-4, 16: 1e-9}[bits]


def test_rows_that_are_not_finite_are_not_numbers_and_hurt_no_others() -> None:
    x = torch.ones(3, 4)
    x[1, 2] = torch.inf
    x_int, step = to_integers(x, 100.0, torch.int32)
    back = to_floats(x_int, step, None, torch.float32)
    assert back[1].isnan().all() and torch.allclose(back[[0, 2]], torch.ones(2, 4))
