"""How a checkpoint says that its weights are quantised, and whether the executor reads them so. It loads no torch."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from symbiosis.errors import ConfigError

KEYS = ("quantization_config", "compression_config")
COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
READ = (
    "bitsandbytes (int8, nf4, fp4), fp8 (in blocks or by rows), compressed-tensors (8 bits, or packed integers of 4), "
    "gptq and awq (4 bits), mxfp4, and torchao (8 bits)"
)
OF_TORCHAO = re.compile(r"(Int8|Float8)\w*Config")  # whose weights are of 8 bits


def told_quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a configuration says of quantised weights, also in the configuration of a part; None if they are not.

    >>> told_quantisation({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    {'quant_method': 'fp8'}
    """
    return next(_told(config), None)


def _told(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in config.items():
        if name in KEYS and value:
            yield value if isinstance(value, dict) else {}
        elif name.endswith("_config") and isinstance(value, Mapping):
            yield from _told(value)


def check_format(name: str, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the weights of the model `name` are quantised in a way that the executor does not read."""
    told = told_quantisation(config)
    try:
        if told is None or _is_read(told):
            return
    except (AttributeError, TypeError):
        raise ConfigError(
            f"cannot serve {name!r}: what its config.json says of quantised weights is not understood: copy it again"
        ) from None
    raise ConfigError(
        f"cannot serve {name!r}: its weights are quantised by {shown_method(told)}, which the executor does not read: serve the checkpoint that it "
        f"was made of (with --quantize, if its weights are to be packed). Read are {READ}"
    )


def _is_read(told: Mapping[str, Any]) -> bool:
    """Whether the executor knows this format."""
    match told.get("quant_method"):
        case "bitsandbytes" | "fp8" | "mxfp4":
            return True
        case "torchao":
            return bool(OF_TORCHAO.fullmatch(_torchao_config(told)))
        case "gptq" | "awq":
            return told.get("bits", told.get("w_bit", 4)) == 4 and told.get("version", "gemm") == "gemm"
        case "compressed-tensors":
            return all(_is_read_scheme(told, scheme) for scheme in told.get("config_groups", {}).values())
    return False


def _is_read_scheme(told: Mapping[str, Any], scheme: Mapping[str, Any]) -> bool:
    format = scheme.get("format") or told.get("format")
    bits = 4 if format == "pack-quantized" else 8
    return format in COMPRESSED and (scheme.get("weights") or {}).get("num_bits") == bits


def _torchao_config(told: Mapping[str, Any]) -> str:
    """Return the name of torchao's configuration for all weights."""
    kind = told.get("quant_type")
    default = kind.get("default") if isinstance(kind, Mapping) else None
    return str(default.get("_type")) if isinstance(default, Mapping) else str(kind)


def told_bits(config: Mapping[str, Any]) -> float | None:
    """Return about how many bits a value has in a quantised checkpoint, its scales included; None if its weights are whole.

    >>> told_bits({"quantization_config": {"quant_method": "awq", "bits": 4}}), told_bits({})
    (4.25, None)
    """
    told = told_quantisation(config)
    if told is None:
        return None
    of_four = told.get("quant_method") in ("gptq", "awq", "mxfp4") or told.get("load_in_4bit")
    return 4.25 if of_four or told.get("format") == "pack-quantized" else 8.0


def shown_method(told: Mapping[str, Any]) -> str:
    """Return the name of a method, with what else tells it from others.

    >>> shown_method({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    'bitsandbytes (nf4)'
    """
    method = str(told.get("quant_method", "an unknown method"))
    if method == "bitsandbytes":
        return f"bitsandbytes ({told.get('bnb_4bit_quant_type', 'fp4') if told.get('load_in_4bit') else 'int8'})"
    if method == "torchao":
        return f"torchao ({_torchao_config(told)})"
    bits = f"{told['bits']} bits" if told.get("bits") else None
    block = f"blocks of {told['weight_block_size']}" if told.get("weight_block_size") else None
    more = told.get("format") or block or bits
    return f"{method} ({more})" if more else method


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's configuration; an empty one where transformers is to say what is wrong with it."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
