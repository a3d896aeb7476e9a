"""How a checkpoint says that its weights are quantised, and whether the executor reads them so. It loads no torch."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from symbiosis.errors import ConfigError

KEYS = ("quantization_config", "compression_config")
WHOLE = (
    "AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=FineGrainedFP8Config(dequantize=True))"
    ".save_pretrained(FOLDER)"
)
# What makes the weights whole, by quant_method; else where they came from has them.
REMEDIES = {
    "bitsandbytes": "AutoModelForCausalLM.from_pretrained(MODEL).dequantize().save_pretrained(FOLDER)",
    "fp8": WHOLE,
    "mxfp4": WHOLE.replace("FineGrainedFP8Config", "Mxfp4Config"),
}


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
    if told is None:
        return
    method = str(told.get("quant_method", "an unknown method"))
    remedy = REMEDIES.get(method)
    how = (
        f"make its weights whole once, by {remedy}, and serve FOLDER"
        if remedy
        else "serve the checkpoint that it was made of"
    )
    raise ConfigError(
        f"cannot serve {name!r}: its weights are quantised by {shown_method(told)}, which the executor does not read: {how}"
    )


def shown_method(told: Mapping[str, Any]) -> str:
    """Return the name of a method, with what else tells it from others.

    >>> shown_method({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    'bitsandbytes (nf4)'
    """
    method = str(told.get("quant_method", "an unknown method"))
    if method == "bitsandbytes":
        return f"bitsandbytes ({told.get('bnb_4bit_quant_type', 'fp4') if told.get('load_in_4bit') else 'int8'})"
    more = told.get("format") or (f"blocks of {told['weight_block_size']}" if told.get("weight_block_size") else None)
    return f"{method} ({more})" if more else method


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's configuration; an empty one where transformers is to say what is wrong with it."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
