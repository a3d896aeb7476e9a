"""Loads the base model that an executor serves: a directory, a hub id, or the bundled demo model."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from symbiosis.errors import ConfigError

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
MODEL = "MODEL is a directory with config.json and *.safetensors, a hub id, or demo"


def load_model(name: str, dtype: str | None = None, device: str = "cpu") -> nn.Module:
    """The model as its own class builds it, so that layer names are those a client of that class has.

    >>> type(load_model("demo")).__name__
    'LlamaForCausalLM'
    """
    config, path = load_config(name), _path(name)
    try:
        model = model_class(config).from_pretrained(path, dtype=_dtype(dtype), use_safetensors=True)
    except OSError as error:
        raise ConfigError(f"cannot load the weights of {name!r} (only *.safetensors are read): {error}") from None
    except SafetensorError as error:
        raise ConfigError(
            f"cannot load the weights of {name!r}: a file is damaged or cut short, copy it anew: {error}"
        ) from None
    try:
        return model.eval().to(device)
    except (RuntimeError, AssertionError) as error:  # torch's ways to say that there is no such device
        raise ConfigError(f"--device {device!r}: {str(error).partition(chr(10))[0]}") from None


def load_config(name: str) -> Any:
    """What the model is, without its weights."""
    path = _path(name)
    if _is_path(path) and not Path(path).is_dir():
        raise ConfigError(f"cannot load {name!r}: no such directory\n{MODEL}")
    try:
        return transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot load {name!r}: {error}\n{MODEL}") from None


def structure(name: str, dtype: str | None = None) -> nn.Module:
    """The model without its weights."""
    config = load_config(name)
    words = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    with torch.device("meta"):
        model: nn.Module = model_class(config)._from_config(config, **words)
    return model.eval()


def _path(name: str) -> str:
    return str(DEMO_MODEL) if name == "demo" else str(Path(name).expanduser()) if name.startswith("~") else name


def _is_path(name: str) -> bool:
    """A hub id has one slash, and begins with a letter or digit."""
    return name.startswith(("/", ".", "~")) or name.count(os.sep) > 1


def model_class(config: transformers.PretrainedConfig) -> Any:
    """The transformers class that the checkpoint names, else the one that its kind of configuration has."""
    for name in config.architectures or ():
        if found := getattr(transformers, name, None):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ConfigError(f"transformers {transformers.__version__} has no class for a {type(config).__name__}")


def _dtype(name: str | None) -> torch.dtype | str:
    if name is None:
        return "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"--dtype {name!r} is no floating point type: float32, bfloat16, float16 or float64")
    return dtype
