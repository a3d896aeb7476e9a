"""Packed weights: what they stand for, in whole, in part and one at a time."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symbiosis.executor.model.packed_tensor import PackedTensor
from symbiosis.kernels import packed as kernels
from symbiosis.kernels import packing
from symbiosis.kernels.of_bitsandbytes import packed_of
from symbiosis.kernels.packed import GroupedWeight, MicroscaledWeight, PackedWeight, ScaledWeight, TableWeight
from symbiosis.kernels.packing import FORMATS, pack, packs


def blocks(rows: int, columns: int) -> PackedWeight:
    scale = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return ScaledWeight((rows, columns), "fp8", codes, scale, (16, 16))


def grouped(rows: int, columns: int) -> PackedWeight:
    codes = torch.randint(0, 256, (rows, -(-columns // 2)), dtype=torch.uint8)
    zero = torch.randint(0, 16, (rows, 3), dtype=torch.uint8)
    return GroupedWeight((rows, columns), "int4", codes, torch.rand(rows, 3), zero, torch.randint(0, 3, (columns,)))


def microscaled(rows: int, columns: int) -> PackedWeight:
    codes = torch.randint(0, 256, (2, columns, 16), dtype=torch.uint8)
    return MicroscaledWeight(
        (2, 32, columns), "mxfp4", codes, torch.randint(120, 130, (2, columns, 1), dtype=torch.uint8)
    )


KINDS: dict[str, Callable[[int, int], PackedWeight]] = {
    "blocks": blocks,
    "grouped": grouped,
    "microscaled": microscaled,
    **{
        name: lambda rows, columns, name=name: pack(torch.randn(rows, columns), name) for name in ("int8", "fp8", "nf4")
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_is_that_part_of_the_whole(
    kind: str, piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "PIECE", piece)
    weight = KINDS[kind](24, 40)
    whole = weight.whole(torch.float32)
    assert torch.equal(weight.whole(dtype), whole.to(dtype))  # rounds once
    for rows in (slice(0, 1), slice(5, 19), slice(23, 24), slice(3, 3)):
        for columns in (slice(None), slice(7, 8), slice(13, 40)):
            assert torch.equal(weight.whole(dtype, rows, columns), whole[rows, columns].to(dtype))
    ids = torch.tensor([[3, 0], [23, 3]])
    assert torch.equal(weight.rows(dtype, ids), whole[ids].to(dtype))


@pytest.mark.parametrize("kind", ["blocks", "grouped", "int8", "fp8"])
def test_weights_are_stacked_and_joined(kind: str) -> None:
    torch.manual_seed(0)
    one = KINDS[kind](32, 40)
    two = one.with_parts(lambda part: part if part.dtype is not torch.int8 else -part)
    wholes = [weight.whole(torch.float32) for weight in (one, two)]
    tensors = [PackedTensor(weight, torch.float32) for weight in (one, two)]
    stack, below = torch.stack(tensors), torch.cat(tensors)
    assert isinstance(stack, PackedTensor) and isinstance(below, PackedTensor)
    assert torch.equal(stack.packed.whole(torch.float32).view(2, 32, 40), torch.stack(wholes))
    assert torch.equal(below.packed.whole(torch.float32), torch.cat(wholes))
    both = torch.cat([stack, stack], 1)
    assert isinstance(both, PackedTensor) and both.shape == (2, 64, 40)
    assert torch.equal(both.whole(), torch.cat([torch.stack(wholes)] * 2, 1))


def test_runs_go_on_from_row_to_row() -> None:
    assert packs((3, 64), "nf4") and packs((64, 3), "nf4") and not packs((3, 63), "nf4")
    weight = torch.randn(64, 3)
    packed = pack(weight, "nf4")
    assert isinstance(packed, TableWeight) and packed.absmax.shape == (3,)
    assert (packed.whole(torch.float32) - weight).abs().max() < 0.4 * weight.abs().max()
    with pytest.raises(ValueError, match="do not fill runs of 64"):
        pack(torch.zeros(3, 63), "nf4")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_damaged_is_packed_and_says_so(format: str, value: float) -> None:
    weight = torch.randn(8, 64)
    weight[3, 3] = value
    assert "NaN or infinite" in str(pack(weight, format).problem())


class Params4bit(nn.Parameter):
    """As one of bitsandbytes is known: by the name of its class."""

    quant_state: Any


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_codes_of_bitsandbytes_are_the_same_however_they_are_stored(storage: torch.dtype) -> None:
    """LLaMA-Factory has them stored in the dtype that it computes in."""
    packed = pack(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), "nf4")
    assert isinstance(packed, TableWeight) and packed.nested_absmax is not None
    nested = SimpleNamespace(absmax=packed.nested_absmax, code=packed.nested_table, blocksize=packed.nested_blocksize)
    parameter = Params4bit(packed.codes.view(-1).view(storage).view(-1, 1), requires_grad=False)
    parameter.quant_state = SimpleNamespace(
        shape=packed.shape, quant_type="nf4", code=packed.table, blocksize=packed.blocksize, absmax=packed.absmax, nested=True,
        state2=nested, offset=torch.tensor(packed.offset),
    )  # fmt: skip
    found = packed_of(parameter)
    assert found is not None and found.digest() == packed.digest()


def test_scales_are_rounded_as_bitsandbytes_rounds_them() -> None:
    """Values near the middle of two codes, of which the other one is nearer."""
    values = torch.tensor([1.0, 0.06344547867774963, 0.004938967060297728, -0.5922006964683533])
    codes, largest, _ = packing._dynamic(values)
    assert codes.tolist() == [255, 177, 149, 29] and largest.tolist() == [1.0]


@pytest.mark.parametrize(("format", "error"), [("int8", 1 / 254), ("fp8", 1 / 28), ("nf4", 0.2)])
def test_packing_comes_close(format: str, error: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 2048)
    if format != "nf4":  # whose scales are packed together
        weight *= torch.logspace(-3, 3, 32)[:, None]
        weight[5] = 0
    packed = pack(weight.bfloat16(), format)
    off = (packed.whole(torch.float32) - weight.bfloat16().float()).abs()
    assert torch.isfinite(off).all() and (off <= 1.01 * error * weight.abs().amax(1, keepdim=True) + 1e-9).all()
    assert packed.nbytes <= weight.numel() * (0.56 if format == "nf4" else 1.02)


@pytest.mark.parametrize(
    ("scale", "problem"), [(float("nan"), "NaN or infinite"), (float("inf"), "NaN or infinite"), (0.0, "are 0")]
)
def test_scales_tell_of_damage(scale: float, problem: str) -> None:
    codes = torch.ones(4, 4, dtype=torch.int8)
    weight = ScaledWeight((4, 4), "int8", codes, torch.full((4, 1), scale), (1, 4))
    assert problem in str(weight.problem())
    assert ScaledWeight((4, 4), "int8", codes, torch.ones(4, 1), (1, 4)).problem() is None


def test_shapes_must_belong_together() -> None:
    codes = torch.ones(4, 4, dtype=torch.int8)
    for scale, block in ((torch.ones(3, 1), (1, 4)), (torch.ones(2, 2), (2, 3)), (torch.ones(4), (1, 4))):
        if tuple(scale.shape) != (2, 2):
            with pytest.raises(ValueError, match="do not make a weight of"):
                ScaledWeight((4, 4), "int8", codes, scale, block)
    with pytest.raises(ValueError, match="do not make a weight of"):
        TableWeight((4, 64), "nf4", torch.zeros(100, dtype=torch.uint8), torch.zeros(16), 64, torch.zeros(4))


def test_a_digest_is_of_every_part() -> None:
    weight = pack(torch.randn(8, 64), "nf4")
    assert weight.digest() == weight.with_parts(Tensor.clone).digest()
    for name, part in weight.parts.items():
        other = part.clone()
        other.view(-1)[0] += 1
        assert (
            weight.with_parts(lambda one, part=part, other=other: other if one is part else one).digest()
            != weight.digest()
        ), name
