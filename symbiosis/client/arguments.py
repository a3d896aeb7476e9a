"""Checks the arguments that users pass. An error names the argument, says what it was, and what to write."""

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from symbiosis import transport
from symbiosis.errors import ConfigError, WrapError
from symbiosis.protocol import FLOATS, Priority
from symbiosis.protocol.cluster_state import SCHEME
from symbiosis.protocol.endpoints import named_endpoints

PATTERNS = 'write a pattern of layer names ("model.layers.*", or "!*.o_proj" to keep layers), or a list of them'


def a_model(value: Any, function: str) -> None:
    """Check the first argument of `function`, which must be a model."""
    if isinstance(value, type):
        raise WrapError(f"{function} takes a model, and {value.__name__} is a class: create an instance of it first")
    if not isinstance(value, nn.Module):
        raise WrapError(
            f"{function} takes a model, not {value!r:.80}: load it with AutoModelForCausalLM.from_pretrained(...), or let "
            "symbiosis.from_executor(...) build it"
        )


def model_or_endpoint(value: Any) -> None:
    """Check the first argument of an `Engine`."""
    if not isinstance(value, nn.Module | str):
        raise ConfigError(
            f"Engine takes a causal language model or the endpoint of an executor, not {value!r:.80} (of an Executor: its .endpoint)"
        )


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r:.80}: write True or False")
    return value


def endpoints(value: Any) -> tuple[str, ...]:
    """Return one URL, several with commas between them (as in $SYMBIOSIS_ENDPOINT), or a list of URLs, each once. Names of models in
    clusters stay names."""
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    urls = [url for one in (value if several else [value]) for url in _urls(one)]
    if not urls:
        raise ConfigError(f"{value!r} is an empty list of endpoints: name at least one executor")
    for url in urls:
        if not url.startswith(SCHEME):
            transport.check_endpoint(url)
    return tuple(dict.fromkeys(urls))


def _urls(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r:.80} is not an endpoint: write its URL (of an Executor: its .endpoint)")
    return named_endpoints(value) or (value,)


def timeout(value: Any) -> float:
    if not _is_number(value) or not value > 0:
        raise ConfigError(f"timeout must be positive, not {value!r:.80}, in seconds that one call may take")
    return float(value)


def seconds(name: str, value: Any) -> float:
    """Check an optional duration in seconds. 0 means not to wait."""
    if not _is_number(value) or not value >= 0:
        raise ConfigError(f"{name} must not be negative, and is {value!r:.80}, in seconds to wait for an executor")
    return float(value)


def wait(value: Any) -> float | None:
    """Check the argument `wait`, which is not needed any more. None: the patience covers the first join, too."""
    if value is None:
        return None
    found = seconds("wait", value)
    warnings.warn(
        "wait= will go, and is not needed any more: patience= (60 s, or $SYMBIOSIS_PATIENCE_S) says how long to wait for an executor, at "
        "first as later. With wait= the first wait is still as long as it says",
        FutureWarning,
        stacklevel=3,
    )
    return found


def seconds_in(variable: str, default: float) -> float:
    """Return the seconds that an environment variable names, or `default` where it is not set."""
    text = os.environ.get(variable, "").strip()
    try:
        found = float(text or default)
    except ValueError:
        found = math.nan
    if not found >= 0:
        raise ConfigError(f"${variable} is {text!r:.80}: write a number of seconds that is not negative, or unset it")
    return found


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond all floating-point ones
        return False


def patterns(value: Any) -> list[str] | None:
    """Check the argument `layers=` of wrap and from_executor."""
    if value is None:
        return None
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, Sequence | set | frozenset) or not all(isinstance(one, str) and one for one in named):
        raise ConfigError(f"layers={value!r:.80}: {PATTERNS}")
    if not named:
        raise ConfigError(f"layers={value!r} is empty: leave it out for every layer that is served, or {PATTERNS}")
    return list(named)


def priority(value: Any) -> Priority | None:
    if value is None:
        return None
    names = {one.name.lower(): one for one in Priority}
    if not isinstance(value, str) or value.lower() not in names:
        raise WrapError(f"priority is decode, prefill or train, not {value!r:.80}")
    return names[value.lower()]


def dtype(value: Any) -> torch.dtype | None:
    """Return a floating-point dtype, which may be given by torch's name for it, or None for the executor's."""
    if value is None or value == "auto":
        return None
    named = value.removeprefix("torch.") if isinstance(value, str) else str(value).removeprefix("torch.")
    if named not in FLOATS or not isinstance(value, str | torch.dtype):
        raise ConfigError(
            f"dtype={value!r:.80}: write {', '.join(f'torch.{name}' for name in sorted(FLOATS))}, the name of one as a text, or leave it out "
            "for what the executor holds"
        )
    found: torch.dtype = getattr(torch, named)
    return found


def device(value: Any) -> torch.device:
    """Check that a device is one that this machine has."""
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError):
        raise ConfigError(f'device={value!r:.80}: write "cpu", "cuda", "cuda:NUMBER", or a torch.device') from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={str(found)!r}: this process sees {torch.cuda.device_count()} GPUs")
    return found
