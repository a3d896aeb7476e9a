"""Writes a model's checkpoint in each quantised format, by code that shares nothing with what reads it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from symbiosis.kernels.packing import NF4, pack

GROUP, SIDE = 32, 32  # columns of a group, and rows and columns of a block
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, Tensor]


def write(model: nn.Module, folder: Path, name: str) -> dict[str, Tensor]:
    """Write a checkpoint of a model into a folder, its projections packed. Return these whole, in float32."""
    told, packed = WRITERS[name]
    folder.mkdir(parents=True)
    tensors: Parts = {}
    whole: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        if key.endswith("_proj.weight") or "experts" in key and value.dim() == 2:
            parts, whole[key] = packed(value.detach())
            tensors |= {f"{key.removesuffix('.weight')}.{end}": part.contiguous() for end, part in parts.items()}
        elif not (key == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[key] = value.detach().clone()
    said = {"format": "pt"}
    if told["quant_method"] == "torchao":
        said |= {key: _said_by_torchao(value) for key, value in whole.items()} | {
            "tensor_names": json.dumps(list(whole))
        }
    save_file(tensors, folder / "model.safetensors", metadata=said)
    config = json.loads(model.config.to_json_string(use_diff=False))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config |= {"architectures": [type(model).__name__], "quantization_config": told, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    return whole


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each value, and of each block."""
    rows, columns = -(-weight.shape[0] // SIDE), -(-weight.shape[1] // SIDE)
    scale = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            scale[i, j] = weight[SIDE * i : SIDE * (i + 1), SIDE * j : SIDE * (j + 1)].float().abs().max() / 448
    each = scale.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
    return each[: weight.shape[0], : weight.shape[1]], scale


def _fp8_blocks(weight: Tensor, end: str = "weight_scale_inv") -> tuple[Parts, Tensor]:
    each, scale = _blocks(weight)
    codes = (weight.float() / each).to(torch.float8_e4m3fn)
    return {"weight": codes, end: scale}, codes.float() * each


def _fp8_rows(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def _fp8_tensor(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = (weight.float().abs().max() / 448).bfloat16().view(1)
    codes = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def _int8_rows(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def _scb(weight: Tensor) -> tuple[Parts, Tensor]:
    scb = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / scb[:, None])).round().to(torch.int8)
    parts = {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * (scb * (1 / 127))[:, None]


def _torchao(weight: Tensor) -> tuple[Parts, Tensor]:
    parts, whole = _int8_rows(weight)
    return {"_weight_qdata": parts["weight"], "_weight_scale": parts["weight_scale"]}, whole


def _said_by_torchao(weight: Tensor) -> str:
    figures = {"block_size": [1, weight.shape[1]], "dtype": {"_type": "torch.dtype", "_data": "float32"}}
    return json.dumps({"_type": "Int8Tensor", "_data": figures, "_tensor_data_names": ["qdata", "scale"]})


def _four_bits(weight: Tensor, nested: bool, kind: str = "nf4", blocksize: int = 64) -> tuple[Parts, Tensor]:
    packed: Any = pack(weight, "nf4")
    scales = packed.scales
    table = torch.tensor(NF4)
    codes = packed.codes.view(-1)
    values = torch.stack([table[(codes >> 4).long()], table[(codes & 15).long()]], 1).view(-1, blocksize)
    if not nested:
        scales = weight.float().view(-1, blocksize).abs().amax(1)
    state = {"quant_type": kind, "blocksize": blocksize, "dtype": "float32", "shape": list(weight.shape)}
    parts = {"weight": packed.codes, "weight.absmax": packed.absmax if nested else scales, "weight.quant_map": table}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": packed.offset}
        parts |= {"weight.nested_absmax": packed.nested_absmax, "weight.nested_quant_map": packed.nested_table}
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return parts, (values * scales[:, None]).view(weight.shape)


def write_mxfp4(model: nn.Module, folder: Path) -> None:
    """Write a checkpoint of a GPT-OSS model whose experts are packed as OpenAI packs them, with codes and exponents by chance."""
    model.save_pretrained(folder)  # type: ignore[operator]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    chance = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        places = experts, outputs, inputs // 32
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*places, 16), dtype=torch.uint8, generator=chance)
        tensors[f"{key}_scales"] = torch.randint(118, 124, places, dtype=torch.uint8, generator=chance)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def _in_order(weight: Tensor) -> Tensor:
    """Return the group of each column."""
    return torch.arange(weight.shape[1]) // GROUP


def _groups(weight: Tensor, group: Tensor, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers of 4 bits, and scales and zero points of these groups of columns."""
    order = group.argsort(stable=True)
    grouped = weight.float()[:, order].view(len(weight), -1, GROUP)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / 15).clamp(min=1e-8).half()
    zero = (
        torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(1, 15)
    )  # GPTQ stores it less 1
    codes = torch.empty(weight.shape)
    codes[:, order] = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15).view(weight.shape)
    return codes.int(), scale, zero.int()


def _of_groups(codes: Tensor, scale: Tensor, zero: Tensor, group: Tensor) -> Tensor:
    return (codes - zero[:, group]).float() * scale.float()[:, group]


def _words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight integers of 4 bits of a row into one of 32."""
    eights = values.reshape(len(values), -1, 8).to(torch.int64)
    words = sum(eights[..., source] << (4 * place) for place, source in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)  # type: ignore[call-overload, no-any-return]


def _gptq(weight: Tensor, in_order: bool = True) -> tuple[Parts, Tensor]:
    group = _in_order(weight)
    if not in_order:  # columns in the order of their importance have their groups anywhere
        group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(0))]
    codes, scale, zero = _groups(weight, group)
    parts = {"qweight": _words(codes).t(), "qzeros": _words((zero - 1).t()), "scales": scale.t(), "g_idx": group.int()}
    return parts, _of_groups(codes, scale, zero, group)


def _awq(weight: Tensor) -> tuple[Parts, Tensor]:
    codes, scale, zero = _groups(weight, _in_order(weight))
    parts = {"qweight": _words(codes.t(), AWQ_ORDER), "qzeros": _words(zero.t(), AWQ_ORDER), "scales": scale.t()}
    return parts, _of_groups(codes, scale, zero, _in_order(weight))


def _packed(weight: Tensor, symmetric: bool = True) -> tuple[Parts, Tensor]:
    codes, scale, zero = _groups(weight, _in_order(weight), symmetric)
    scale = scale.bfloat16()
    shape = torch.tensor(weight.shape)
    parts = {"weight_packed": _words(codes), "weight_scale": scale, "weight_shape": shape}
    if not symmetric:
        parts["weight_zero_point"] = _words(zero.t()).t()
    return parts, _of_groups(codes, scale, zero, _in_order(weight))


def _compressed(format: str, **weights: object) -> dict[str, Any]:
    group = {"weights": {"symmetric": True, **weights}, "targets": ["Linear"], "format": format}
    told = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return {**told, "ignore": ["lm_head"], "quantization_status": "compressed"}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [SIDE, SIDE], "activation_scheme": "dynamic"}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
OF_GROUPS = {"bits": 4, "group_size": GROUP}
WRITERS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Parts, Tensor]]]] = {
    "fp8 blocks": (BLOCKS, _fp8_blocks),
    "fp8 blocks, compressed": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[SIDE, SIDE]),
        lambda weight: _fp8_blocks(weight, "weight_scale"),
    ),
    "fp8 rows": (_compressed("float-quantized", num_bits=8, type="float", strategy="channel"), _fp8_rows),
    "fp8 tensor": (_compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), _fp8_tensor),
    "int8 rows": (_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), _int8_rows),
    "int8 bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _scb),
    "int8 torchao": (TORCHAO, _torchao),
    "nf4": (NF4_CONFIG, lambda weight: _four_bits(weight, nested=False)),
    "nf4 nested": (NF4_CONFIG | {"bnb_4bit_use_double_quant": True}, lambda weight: _four_bits(weight, nested=True)),
    "gptq": ({"quant_method": "gptq", **OF_GROUPS, "checkpoint_format": "gptq"}, _gptq),
    "gptq by importance": ({"quant_method": "gptq", **OF_GROUPS, "desc_act": True}, lambda w: _gptq(w, in_order=False)),
    "awq": ({"quant_method": "awq", **OF_GROUPS, "zero_point": True, "version": "gemm"}, _awq),
    "int4": (_compressed("pack-quantized", **INT4), _packed),
    "int4 with zeros": (_compressed("pack-quantized", **INT4, symmetric=False), lambda w: _packed(w, False)),
}
