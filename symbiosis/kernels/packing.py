"""Packs weights: int8 and fp8 with a scale for each row, nf4 as bitsandbytes packs it, with packed scales."""

from collections.abc import Iterator
from functools import cache
from math import prod

import torch
from torch import Tensor

from symbiosis.kernels.packed import PackedWeight, ScaledWeight, TableWeight

FORMATS = ("int8", "fp8", "nf4")
PIECE = 1 << 16  # values that are float32 at a time: packed weights are all that grows while a model is loaded
FP8 = torch.float8_e4m3fn
MOST_OF_INT8, MOST_OF_FP8 = 127.0, 448.0
BLOCK, NESTED_BLOCK = 64, 256
STEPS = 1 << 16  # to which bitsandbytes rounds what it packs by 8 bits, on a CPU
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def packs(shape: tuple[int, ...], format: str) -> bool:
    """Whether a weight of this shape can be packed so.

    >>> packs((8, 64), "nf4"), packs((3, 5), "nf4"), packs((3, 5), "int8")
    (True, False, True)
    """
    return format != "nf4" or prod(shape) % BLOCK == 0


def pack(weight: Tensor, format: str) -> PackedWeight:
    """Pack a weight, a piece at a time.

    >>> packed = pack(torch.tensor([[1.0, -127.0], [0.0, 0.0]]), "int8")
    >>> packed.whole(torch.float32).tolist()
    [[1.0, -127.0], [0.0, 0.0]]
    """
    return _nf4(weight) if format == "nf4" else _by_rows(weight, format)


def _by_rows(weight: Tensor, format: str) -> ScaledWeight:
    """Return codes with a scale for each row, by which its largest value has about the largest code. Scales have as few bits as bfloat16: a GPU then
    multiplies codes by them two at a time."""
    shape, dtype = tuple(weight.shape), torch.int8 if format == "int8" else FP8
    rows = weight.detach().reshape(-1, shape[-1])
    codes = torch.empty(rows.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(len(rows), 1, device=weight.device)
    for piece in _pieces(rows):
        values = rows[piece].to(torch.float32, copy=True)
        largest = values.abs().amax(1, keepdim=True)
        scale[piece] = _rounded_up(largest / (MOST_OF_INT8 if dtype is torch.int8 else MOST_OF_FP8))
        values.div_(scale[piece]).nan_to_num_(0)
        codes[piece] = (values.round_() if dtype is torch.int8 else values).to(dtype)
    return ScaledWeight(shape, format, codes.view(shape), scale.view(*shape[:-1], 1), (1, shape[-1]))


def _rounded_up(scale: Tensor) -> Tensor:
    """Return the next values that bfloat16 has.

    >>> _rounded_up(torch.tensor([0.0, 1.0, 1.001])).tolist()
    [0.0, 1.0, 1.0078125]
    """
    return (scale.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def _nf4(weight: Tensor) -> TableWeight:
    """Return codes and packed scales as bitsandbytes' CPU functions make them, bit for bit."""
    shape, device = tuple(weight.shape), weight.device
    if not packs(shape, "nf4"):
        raise ValueError(f"a weight of {shape} is not packed as nf4: its values do not fill runs of {BLOCK}")
    table = torch.tensor(NF4, device=device)
    runs = weight.detach().reshape(-1, BLOCK)
    codes = torch.empty(len(runs), BLOCK // 2, dtype=torch.uint8, device=device)
    absmax = torch.empty(len(runs), device=device)
    between = (table[:-1] + table[1:]) / 2
    for piece in _pieces(runs):
        values = runs[piece].to(torch.float32, copy=True)
        absmax[piece] = values.abs().amax(1)
        scaled = values.mul_((1.0 / absmax[piece].clamp(min=1e-38))[:, None]).clamp_(-1, 1)
        code = torch.bucketize(scaled, between, out_int32=True).to(torch.uint8)
        codes[piece] = (code[:, ::2] << 4) | code[:, 1::2]
    offset = absmax.mean()
    nested, nested_absmax, nested_table = _dynamic(absmax - offset)
    return TableWeight(
        shape, "nf4", codes.view(-1, 1), table, BLOCK, nested, nested_absmax, nested_table, NESTED_BLOCK, offset.item()
    )


def _dynamic(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of 8 bits, a scale for each run of 256, and the values that the codes stand for."""
    table, steps = (each.to(values.device) for each in _dynamic_steps())
    runs = torch.nn.functional.pad(values, (0, -len(values) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    absmax = runs.abs().amax(1)
    scaled = (runs * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp(-1, 1).reshape(-1)[: len(values)]
    codes = steps[((scaled.nan_to_num_(0) + 1) * 0.5 * (STEPS - 1) + 0.5).long()]
    return codes, absmax, table.clone()  # each weight has its own: they are counted, saved and moved one by one


@cache
def _dynamic_steps() -> tuple[Tensor, Tensor]:
    """Return bitsandbytes' values of codes of 8 bits, and the code that is nearest to each of its steps from -1 to 1, to which it rounds first."""
    table = dynamic_table()
    step = -1 + 2 * torch.arange(STEPS, dtype=torch.float32) / (STEPS - 1)
    return table, torch.bucketize(step, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def dynamic_table() -> Tensor:
    """Return bitsandbytes' signed code of 8 bits: seven decades, each with twice as many values as the one below.

    >>> len(dynamic_table()), float(dynamic_table()[-1])
    (256, 1.0)
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values))


def _pieces(rows: Tensor) -> Iterator[slice]:
    step = max(1, PIECE // max(1, rows.shape[1]))
    return (slice(begin, begin + step) for begin in range(0, len(rows), step))
