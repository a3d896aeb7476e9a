"""Reads the packed weights of a quantised checkpoint, and checks all of them before the model is loaded.

What lies in memory is what lies in the file, except for GPTQ, AWQ and compressed-tensors' integers of 4 bits: these are laid out by rows.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from symbiosis.base.memory import give_back
from symbiosis.errors import ConfigError
from symbiosis.executor.model.quantisation import shown_method
from symbiosis.kernels.packed import GroupedWeight, MicroscaledWeight, PackedWeight, ScaledWeight, TableWeight
from symbiosis.transport.release import apart

STATE = ".quant_state.bitsandbytes__"
IN_ORDER, AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)
CODES = ("I8", "U8", "F8_E4M3", "F8_E5M2")  # dtypes of which no plain weight is
NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
TORCHAO = ("Int8Tensor", "Float8Tensor")
Parts = Mapping[str, Tensor]  # of one weight, by the ends of their names
Told = Mapping[str, Any]


class QuantisedFiles:
    """The tensors of a checkpoint: `packed` weights, with their shapes, by the names that whole ones would have, and the names of the `others`."""

    def __init__(self, name: str, files: Sequence[Path], told: Told, opened: ExitStack, is_part: bool = False) -> None:
        """The files stay open as long as `opened`. With `is_part`, what is laid out anew is not kept, but laid out again where it is needed."""
        self._holders: dict[str, Any] = {}
        said: dict[str, str] = {}  # of tensors, by torchao
        for file in files:
            holder = opened.enter_context(safe_open(file, framework="pt"))
            said |= holder.metadata() or {}
            self._holders |= dict.fromkeys(holder.keys(), holder)
        read, marks = READERS[str(told["quant_method"])]
        self.packed: dict[str, tuple[tuple[int, ...], Callable[[], PackedWeight]]] = {}
        used: set[str] = set()
        problems: list[str] = []
        for name_of_weight, keys in self._named(marks) if isinstance(marks, re.Pattern) else self._in_modules(marks):
            try:
                make = partial(
                    self._made, read, keys, {**told, "of_tensor": json.loads(said.get(name_of_weight, "{}"))}
                )
                packed = make()
                problem = None if packed is None else packed.problem()
            except KeyError as error:
                packed, problem = None, f"lacks {error}"
            except (ValueError, RuntimeError, TypeError, IndexError, ArithmeticError, AttributeError) as error:
                packed, problem = None, str(error)
            if problem is not None:
                problems.append(f"{name_of_weight}: {problem}")
            elif packed is not None:
                is_new = isinstance(packed, GroupedWeight)  # laid out anew
                self.packed[name_of_weight] = packed.shape, make if is_new and is_part else partial(_given, packed)
                if is_new:
                    give_back()
                used |= {key for end, key in keys.items() if end != "bias"}
        self.others = [key for key in self._holders if key not in used]
        problems += [f"{key}: its scales are missing" for key in self.others if self.lazy(key).get_dtype() in CODES]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ConfigError(f"cannot load {name!r}, quantised by {shown_method(told)}: {problems[0]}{more}: copy the files again, or quantise it again")  # fmt: skip

    def _made(self, read: Callable[[Parts, Told], PackedWeight | None], keys: Mapping[str, str], told: Told) -> Any:
        return read({end: self.read(key) for end, key in keys.items()}, told)

    def read(self, key: str) -> Tensor:
        """Return a tensor of the files, which lies in them until its values are looked at."""
        return self._holders[key].get_tensor(key)  # type: ignore[no-any-return]

    def lazy(self, key: str) -> Any:
        """Return a tensor that is read by `[...]`."""
        return self._holders[key].get_slice(key)

    def _named(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the weights of whose parts this is the names' pattern, with the names of these, by end."""
        found: dict[str, dict[str, str]] = {}
        for key in self._holders:
            if match := pattern.fullmatch(key):
                found.setdefault(f"{match['module']}{match['weight']}", {})[match["end"]] = key
        yield from sorted(found.items())

    def _in_modules(self, ends: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the weights of modules of which a tensor's name has one of these ends, with the names of all their tensors, by end."""
        marks = {self._module(key, end) for key in self._holders for end in ends if _has_end(key, end)}
        found: dict[str, dict[str, str]] = {module: {} for module in sorted(marks)}
        for key in self._holders:
            for module in _prefixes(key):
                if module in found:
                    found[module][key.removeprefix(f"{module}.")] = key
        yield from ((f"{module}.weight", keys) for module, keys in found.items())

    def _module(self, key: str, end: str) -> str:
        return key[: key.rindex(end)].removesuffix(".weight").removesuffix(".")


def _given(packed: PackedWeight) -> PackedWeight:
    return packed


def _has_end(key: str, end: str) -> bool:
    return key.endswith(end) or (end.endswith("__") and end in key)


def _prefixes(key: str) -> Iterable[str]:
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _bitsandbytes(parts: Parts, told: Told) -> PackedWeight | None:
    state = next((end for end in parts if STATE[1:] in end), None)
    return _eight_bits(parts) if state is None else _four_bits(parts, state)


def _eight_bits(parts: Parts) -> PackedWeight:
    codes, scb = parts["weight"], parts["SCB"]
    return ScaledWeight(tuple(codes.shape), "int8", codes, (scb.float() * (1 / 127))[:, None], (1, codes.shape[-1]))


def _four_bits(parts: Parts, state: str) -> PackedWeight:
    meta = json.loads(bytes(parts[state].numpy().tobytes()))
    nested = "weight.nested_absmax" in parts
    return TableWeight(
        tuple(meta["shape"]),
        meta["quant_type"],
        parts["weight"].view(torch.uint8),
        parts["weight.quant_map"].float(),
        int(meta["blocksize"]),
        parts["weight.absmax"],
        parts["weight.nested_absmax"].float() if nested else None,
        parts["weight.nested_quant_map"].float() if nested else None,
        int(meta.get("nested_blocksize", 256)),
        float(meta.get("nested_offset", 0.0)),
    )


def _fine_grained(parts: Parts, told: Told) -> PackedWeight:
    return _scaled(parts["weight"], parts["weight_scale_inv"], told.get("weight_block_size"))


def _compressed(parts: Parts, told: Told) -> PackedWeight:
    if "weight_packed" in parts:
        return _pack_quantised(parts, told)
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.any():
        raise ValueError("its zero points are not 0, which is read of integers of 4 bits only")
    blocks = [scheme.get("weights", {}).get("block_structure") for scheme in told.get("config_groups", {}).values()]
    return _scaled(parts["weight"], parts["weight_scale"], next(filter(None, blocks), None))


def _scaled(codes: Tensor, scale: Tensor, block: Sequence[int] | None) -> PackedWeight:
    """Return codes with a scale for all, for each row, or for each block."""
    rows, columns = codes.shape[-2:]
    if codes.dtype not in NAMES:
        raise ValueError(f"its weight is of {codes.dtype}, not of int8 or fp8")
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(rows, 1).contiguous()
    elif scale.dim() == 1:
        scale = scale[:, None]
    by_blocks = scale.shape[-1] > 1 or (block and scale.shape[-2] != rows)
    wanted = (int(block[0]), int(block[1])) if block and by_blocks else (1, columns)
    return ScaledWeight(tuple(codes.shape), NAMES[codes.dtype], codes, scale, wanted)


def _pack_quantised(parts: Parts, told: Told) -> PackedWeight:
    rows, columns = parts["weight_shape"].tolist()
    scale, packed, order = parts["weight_scale"], parts["weight_packed"], parts.get("weight_g_idx")
    _must_be(packed, (rows, -(-columns // 8)), "weight_packed")
    zeros = parts.get("weight_zero_point")
    zero = torch.full(scale.shape, 8, dtype=torch.uint8) if zeros is None else _nibbles(zeros.t(), rows).t()
    group = -(-columns // max(1, scale.shape[-1]))
    size = next((s.get("weights", {}).get("group_size") for s in told.get("config_groups", {}).values()), None) or group
    index = torch.arange(columns, dtype=torch.int32) // int(size) if order is None or (order < 0).any() else order
    if scale.shape[-1] == 1:
        index = torch.zeros(columns, dtype=torch.int32)
    return _grouped((rows, columns), _nibbles(packed, columns), scale, zero, index)


def _gptq(parts: Parts, told: Told) -> PackedWeight:
    qweight, scales = parts["qweight"], parts["scales"]
    columns, rows = 8 * qweight.shape[0], qweight.shape[1]
    _must_be(parts["qzeros"], (scales.shape[0], -(-rows // 8)), "qzeros")
    zero = _nibbles(parts["qzeros"], rows)
    if told.get("checkpoint_format", "gptq") == "gptq":  # which keeps the zero point less 1
        zero = (zero + 1) & 15
    order = parts.get("g_idx")
    if order is None:
        order = torch.arange(columns, dtype=torch.int32) // _group_size(told, columns)
    return _grouped((rows, columns), _nibbles(qweight.t(), columns), scales.t(), zero.t(), order)


def _awq(parts: Parts, told: Told) -> PackedWeight:
    qweight, scales = parts["qweight"], parts["scales"]
    columns, rows = qweight.shape[0], 8 * qweight.shape[1]
    _must_be(parts["qzeros"], (scales.shape[0], qweight.shape[1]), "qzeros")
    codes, zero = _nibbles(qweight, rows, AWQ_ORDER), _nibbles(parts["qzeros"], rows, AWQ_ORDER)
    order = torch.arange(columns, dtype=torch.int32) // _group_size(told, columns)
    return _grouped((rows, columns), codes.t(), scales.t(), zero.t(), order)


def _mxfp4(parts: Parts, told: Told) -> PackedWeight:
    blocks, exponents = parts["blocks"], parts["scales"]
    if blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8 or blocks.dim() != 4:
        raise ValueError(f"its blocks are {tuple(blocks.shape)} of {blocks.dtype}, and its scales of {exponents.dtype}")
    experts, rows, runs, half = blocks.shape
    return MicroscaledWeight((experts, 2 * half * runs, rows), "mxfp4", blocks.reshape(experts, rows, -1), exponents)


def _torchao(parts: Parts, told: Told) -> PackedWeight:
    kind, figures = told["of_tensor"].get("_type"), told["of_tensor"].get("_data", {})
    if kind not in TORCHAO:
        what = (
            f"it is a {kind} of torchao, which is not read" if kind else "the file does not say what torchao made of it"
        )
        raise ValueError(f"{what}: {' and '.join(TORCHAO)} are read")
    codes, scale, block = parts["qdata"], parts["scale"], figures["block_size"]
    if codes.dtype not in NAMES or any(size != 1 for size in block[:-2]):
        raise ValueError(f"its codes are {codes.dtype}, in blocks of {block}")
    if scale.dim() == 1:
        scale = scale[:, None]
    return ScaledWeight(tuple(codes.shape), NAMES[codes.dtype], codes, scale, (int(block[-2]), int(block[-1])))


def _group_size(told: Told, columns: int) -> int:
    size = int(told.get("group_size", 128))
    return size if size > 0 else columns


def _grouped(shape: tuple[int, int], codes: Tensor, scale: Tensor, zero: Tensor, group: Tensor) -> PackedWeight:
    """Return integers by rows. `codes` are of 4 bits, one in a byte."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).contiguous()
    pairs = codes[:, ::2] | (codes[:, 1::2] << 4)
    weight = GroupedWeight(shape, "int4", pairs, scale.contiguous(), zero.contiguous(), group.to(torch.int32))
    return weight.with_parts(apart)


def _nibbles(packed: Tensor, count: int, order: Sequence[int] = IN_ORDER) -> Tensor:
    """Return the first values of 4 bits in each row of integers of 32 bits, one in a byte."""
    found = torch.empty(*packed.shape, 8, dtype=torch.uint8)
    for place, which in enumerate(order):
        found[..., which] = (packed >> (4 * place)) & 15
    return found.view(packed.shape[0], -1)[:, :count]


def _must_be(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, and belongs to a weight where it is {shape}")


# For each quant_method: what makes a weight of its parts, and the ends of names by which modules with such parts are known, or what the names of
# parts look like.
READERS: dict[str, tuple[Callable[[Parts, Told], PackedWeight | None], tuple[str, ...] | re.Pattern[str]]] = {
    "bitsandbytes": (_bitsandbytes, (STATE, ".SCB")),
    "fp8": (_fine_grained, (".weight_scale_inv",)),
    "compressed-tensors": (_compressed, (".weight_scale", ".weight_packed")),
    "gptq": (_gptq, (".qweight",)),
    "awq": (_awq, (".qweight",)),
    "mxfp4": (_mxfp4, re.compile(r"(?P<module>.*\.)(?P<weight>\w+)_(?P<end>blocks|scales)")),
    "torchao": (
        _torchao,
        re.compile(
            r"(?P<module>.*\.)_(?P<weight>\w+?)_(?P<end>qdata|scale_and_zero|per_tensor_scale|act_pre_scale|scale|zero_point)"
        ),
    ),
}
