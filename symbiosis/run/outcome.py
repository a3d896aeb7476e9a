"""What became of a model that a program loads: one line of stderr, or an error where it was to be shared."""

import sys

from torch import nn

from symbiosis.errors import NotShared
from symbiosis.run.settings import Settings


def left_alone(name: object, why: str, settings: Settings) -> None:
    """Say why a model is loaded as without `symbiosis run`. With `--require`, raise `NotShared`."""
    if settings.require:
        raise NotShared(f"{_short(name)} is not shared, and must be (--require): {why}")
    _say(f"{_short(name)} is not shared: {why}")


def shared(name: object, model: nn.Module, endpoint: str, not_loaded: int, seconds: float) -> None:
    """Say that the executor holds layers of a wrapped model.

    Args:
        not_loaded: Bytes of weights that this process neither reads nor holds.
        seconds: That it took.
    """
    report = model._symbiosis_report
    layers = len(report.wrapped)  # type: ignore[union-attr, arg-type]
    every = layers + len(report.kept)  # type: ignore[union-attr, arg-type]
    _say(
        f"{_short(name)}: {layers} of {every} layers from {endpoint} ({_size(not_loaded)} not loaded, {seconds:.1f} s)"
    )


def _say(line: str) -> None:
    print(f"symbiosis: {line}", file=sys.stderr, flush=True)


def _short(name: object) -> str:
    """Return the last part of a path or of a hub id.

    >>> _short("Qwen/Qwen3-8B"), _short("/srv/models/llama/")
    ('Qwen3-8B', 'llama')
    """
    return str(name).rstrip("/").rpartition("/")[2]


def _size(count: int) -> str:
    """Return bytes as people read them.

    >>> _size(16_320_875_724), _size(1 << 20)
    ('15.2 GiB', '1.0 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 29 else f"{count / 2**20:.1f} MiB"
