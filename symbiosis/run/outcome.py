"""What became of a model that a program loads: one line of stderr, or an error where it was to be shared. A dry run ends there."""

import os
import sys
from pathlib import Path
from typing import Any

from symbiosis.errors import NotShared
from symbiosis.run.settings import Settings, from_environment

SHARES, ALONE = "would share", "would not share"  # the verdicts of a dry run


def left_alone(name: object, why: str, settings: Settings) -> None:
    """Say why a model is loaded as without `symbiosis run`. With `--require`, raise `NotShared`."""
    line = f"{_short(name)} is not shared: {' '.join(why.split())}"
    _end_if_dry(ALONE, line, settings)
    if settings.require:
        raise NotShared(f"{line} (--require forbids that)")
    _say(line)


def shared(name: object, model: Any, endpoint: str, not_loaded: int, seconds: float) -> None:
    """Say that an executor holds layers of a wrapped model.

    Args:
        not_loaded: Bytes of weights that this process neither reads nor holds.
        seconds: That it took.
    """
    report = model._symbiosis_report
    of_all = f"{len(report.wrapped)} of {len(report.wrapped) + len(report.kept)} layers"
    line = f"{_short(name)}: {of_all} from {endpoint} ({_size(not_loaded)} not loaded, {seconds:.1f} s)"
    _end_if_dry(SHARES, line, from_environment())
    _say(line)


def _end_if_dry(verdict: str, line: str, settings: Settings) -> None:
    """Write the verdict of a dry run, and end this process: without a word to others, as its program has done nothing yet."""
    if settings.verdict:
        with Path(settings.verdict).open("a") as file:
            file.write(f"{verdict}: {line}\n")
        sys.stdout.flush()
        os._exit(verdict != SHARES)


def _say(line: str) -> None:
    print(f"symbiosis: {line}", file=sys.stderr, flush=True)


def _short(name: object) -> str:
    """Return the last part of a path or of a hub id.

    >>> _short("Qwen/Qwen3-8B"), _short("/srv/models/llama/"), _short(None)
    ('Qwen3-8B', 'llama', 'a model')
    """
    return "a model" if name is None else str(name).rstrip("/").rpartition("/")[2]


def _size(count: int) -> str:
    """Return bytes as people read them.

    >>> _size(16_320_875_724), _size(1 << 20)
    ('15.2 GiB', '1.0 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 29 else f"{count / 2**20:.1f} MiB"
