"""What became of a model that a program loads: one line of stderr, or an error where it was to be shared. A dry run notes it, and ends where
something would be computed."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from symbiosis.errors import NotShared
from symbiosis.run.settings import Settings, from_environment
from symbiosis.text import shown

SHARES, ALONE = "would share", "would not share"  # the verdicts of a dry run
COMPUTES = "a model computes"  # the line after the last one


def left_alone(name: object, why: str, settings: Settings, ends: bool = False) -> None:
    """Say why a model is loaded as without `symbiosis run`. With `--require`, raise `NotShared`.

    Args:
        ends: Whether a dry run learns nothing from what comes after this.
    """
    line = shown(f"{_short(name)} is not shared: {' '.join(why.split())}")
    if settings.verdict:
        _note(f"{ALONE}: {line}", settings)
        if ends:
            end_dry_run(settings)
    elif settings.require:
        raise NotShared(f"{line} (--require forbids that)")
    else:
        _say(line)


def shared(name: object, model: Any, endpoint: str, not_loaded: int, seconds: float) -> None:
    """Say that an executor holds layers of a wrapped model.

    Args:
        not_loaded: Bytes of weights that this process neither reads nor holds.
        seconds: That it took.
    """
    report = model._symbiosis_report
    of_all = f"{len(report.wrapped)} of {len(report.wrapped) + len(report.kept)} layers"
    what = shown(f"{_short(name)}: {of_all} from {endpoint} ({_size(not_loaded)} not loaded")
    if (settings := from_environment()).verdict:
        _note(f"{SHARES}: {what})", settings)
    else:
        _say(f"{what}, {seconds:.1f} s)")


def end_dry_run(settings: Settings) -> NoReturn:
    """End this process of a dry run, without a word to others: its program has done nothing yet."""
    _note(COMPUTES, settings)
    sys.stdout.flush()
    os._exit(0)


def _note(line: str, settings: Settings) -> None:
    with Path(settings.verdict).open("a") as file:
        file.write(f"{line}\n")


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
