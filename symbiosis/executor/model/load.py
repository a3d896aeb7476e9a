"""Loads the base model that an executor serves: a directory, a hub id, or the bundled demo model."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from symbiosis.base.dtypes import check_dtype
from symbiosis.base.layer_selection import HEADS
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL, MODEL, check_whole, path_of, weight_files
from symbiosis.executor.model.part import load_packed, load_packing, load_part
from symbiosis.executor.model.quantisation import KEYS, check_format, shown_method, told_quantisation

__all__ = ["DEMO_MODEL", "load_config", "load_model", "model_class", "structure", "torch_dtype"]

MOST_LAYERS = 10_000  # of a model: to build very many takes for ever


def load_model(
    name: str,
    dtype: str | None = None,
    device: str = "cpu",
    elsewhere: Collection[str] = (),
    quantize: str | None = None,
    serve: Sequence[str] = (),
) -> nn.Module:
    """Load the model as its own class builds it, so that its layers have the names that clients see. The parameters and buffers that are
    `elsewhere` are not read, and stay on the meta device. With `quantize`, the weights that these patterns `serve` are packed as they are read.

    >>> type(load_model("demo")).__name__
    'LlamaForCausalLM'
    """
    config, path = load_config(name), path_of(name)
    for file in weight_files(path) if path else ():
        check_whole(file)  # the last of many files may be cut short: say so before the first is read
    quantised = _without_quantisation(config)
    if quantised and quantize:
        raise ConfigError(
            f"--quantize {quantize}: the weights of {name!r} are quantised by {shown_method(quantised)} already"
        )
    try:
        kind, words = model_class(config), {"config": config, "dtype": torch_dtype(dtype)}
        if quantised and dtype is None:  # else it would be that of the codes
            words["dtype"] = config.dtype or torch.bfloat16
        if quantised:
            model, told = load_packed(kind, path or name, device, elsewhere, name, quantised, **words)
            model.config.quantization_config = quantised  # type: ignore[union-attr]
        elif quantize:
            model, told = load_packing(kind, path or name, device, elsewhere, quantize, serve, **words)
        elif elsewhere:
            model, told = load_part(kind, path or name, device, elsewhere, **words)
        else:
            model, told = kind.from_pretrained(path or name, use_safetensors=True, output_loading_info=True, **words)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot load the weights of {name!r} (only *.safetensors are read): {_in_a_line(error)}") from None  # fmt: skip
    except SafetensorError as error:
        raise ConfigError(
            f"cannot load the weights of {name!r}: a file is damaged or cut short, copy it again: {error}"
        ) from None
    except (ArithmeticError, ImportError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _not_built(name, error) from error
    _check_complete(name, told["missing_keys"])
    if elsewhere or quantised or quantize:  # it is on its device, as far as it is read
        return model.eval()
    try:
        return model.eval().to(device)
    except (RuntimeError, AssertionError) as error:  # how torch says that there is no such device
        raise ConfigError(f"--device {device!r}: {str(error).partition(chr(10))[0]}") from None


def _check_complete(name: str, missing: Collection[str]) -> None:
    """Refuse a checkpoint that lacks tensors of its model: transformers would draw them at random. A task's head may be new, since clients
    train it."""
    lacking = sorted(key for key in missing if HEADS.isdisjoint(key.split(".")))
    if lacking:
        raise ConfigError(
            f"{name!r} lacks {len(lacking)} of the model's tensors, {lacking[0]!r} among them, which would be random: does its config.json "
            "belong to these files, and were all files copied?"
        )


def load_config(name: str) -> Any:
    """Load the model's configuration. Nothing in it runs code: neither the checkpoint's own, nor a kernel of the hub for attention."""
    path = path_of(name)
    try:
        config = transformers.AutoConfig.from_pretrained(path or name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load {name!r}: {_in_a_line(error)} {MODEL}") from None
    except Exception as error:  # whatever transformers makes of it
        raise _not_built(name, error) from error
    check_format(name, config.to_dict())
    for part in _parts(config):
        # left to transformers: a checkpoint could name a repository for them, whose code would run
        part._attn_implementation = part._experts_implementation = None
        layers = getattr(part, "num_hidden_layers", 0)
        if isinstance(layers, int) and not 0 <= layers <= MOST_LAYERS:
            raise ConfigError(f"cannot load {name!r}: its config.json says num_hidden_layers: {layers}")
    return config


def _parts(config: transformers.PreTrainedConfig) -> Iterator[transformers.PreTrainedConfig]:
    """Yield a configuration and those within it."""
    yield config
    for part in vars(config).values():
        if isinstance(part, transformers.PreTrainedConfig):
            yield from _parts(part)


def _without_quantisation(config: transformers.PreTrainedConfig) -> dict[str, Any] | None:
    """Take from a configuration what it says of quantised weights, so that transformers builds a model of whole ones. Return it."""
    told = told_quantisation(config.to_dict())
    for part in _parts(config):
        for key in KEYS:
            part.__dict__.pop(key, None)
    return told


def _not_built(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"transformers cannot load {name!r}: {type(error).__name__}: {_in_a_line(error)}")


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


def structure(name: str, dtype: str | None = None) -> nn.Module:
    """Build the model on the meta device, without its weights."""
    config = load_config(name)
    _without_quantisation(config)
    words = {} if dtype is None else {"dtype": torch_dtype(dtype)}
    with torch.device("meta"):
        model: nn.Module = model_class(config)._from_config(config, **words)
    return model.eval()


def model_class(config: transformers.PretrainedConfig) -> Any:
    """Return the transformers class that the checkpoint names, else the one for its kind of configuration."""
    names = config.architectures
    for name in names if isinstance(names, list | tuple) else ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ConfigError(f"transformers {transformers.__version__} does not have a class for a {type(config).__name__}")


def torch_dtype(name: str | None) -> Any:
    """Return the dtype of this name, or "auto", which means the checkpoint's, for None."""
    check_dtype(name)
    return "auto" if name is None else getattr(torch, name)
