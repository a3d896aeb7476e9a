"""What became of a model that a program loads: one line of stderr, or an error where it was to be shared. A dry run notes it, and ends where
something would be computed."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from symbiosis.errors import NotShared
from symbiosis.run.settings import Settings, from_environment
from symbiosis.text import shown

COMPUTES = "a model computes"  # the line after the last verdict of a dry run


@dataclass(frozen=True)
class Verdict:
    """What became of one model: how many layers the executor holds, or why it does not share.

    >>> Verdict("other", shares=False, why="its weights differ").line
    'would not share: other is not shared: its weights differ'
    >>> Verdict("demo", True, endpoint="local:///x", layers=14, all_layers=15, bytes_not_loaded=1 << 20).line
    'would share: demo: 14 of 15 layers from local:///x (1.0 MiB not loaded)'
    """

    model: str
    shares: bool
    why: str | None = None
    endpoint: str | None = None
    layers: int | None = None  # that the executor holds
    all_layers: int | None = None
    bytes_not_loaded: int | None = None  # of weights that its process neither reads nor holds

    @property
    def line(self) -> str:
        """What a dry run says of it."""
        return f"would share: {self.told()}" if self.shares else f"would not share: {self.told()}"

    def told(self, more: str = "") -> str:
        """Return what became of it, with more about one that shares."""
        if not self.shares:
            return shown(f"{self.model} is not shared: {self.why}")
        size = _size(self.bytes_not_loaded or 0)
        return shown(
            f"{self.model}: {self.layers} of {self.all_layers} layers from {self.endpoint} ({size} not loaded{more})"
        )


def left_alone(name: object, why: str, settings: Settings, ends: bool = False) -> None:
    """Say why a model is loaded as without `symbiosis run`. With `--require`, raise `NotShared`.

    Args:
        ends: Whether a dry run learns nothing from what comes after this.
    """
    found = Verdict(_short(name), shares=False, why=" ".join(why.split()))
    if settings.verdict:
        _note(found, settings)
        if ends:
            end_dry_run(settings)
    elif settings.require:
        raise NotShared(f"{found.told()} (--require forbids that)")
    else:
        _say(found.told())


def shared(name: object, model: Any, endpoint: str, not_loaded: int, seconds: float) -> None:
    """Say that an executor holds layers of a wrapped model.

    Args:
        not_loaded: Bytes of weights that this process neither reads nor holds.
        seconds: That it took.
    """
    layers, kept = len(model._symbiosis_report.wrapped), len(model._symbiosis_report.kept)
    found = Verdict(_short(name), True, None, endpoint, layers, layers + kept, not_loaded)
    if (settings := from_environment()).verdict:
        _note(found, settings)
    else:
        _say(found.told(f", {seconds:.1f} s"))


def end_dry_run(settings: Settings) -> NoReturn:
    """End this process of a dry run, without a word to others: its program has done nothing yet."""
    _append(COMPUTES, settings)
    sys.stdout.flush()
    os._exit(0)


def verdicts(text: str) -> Iterator[Verdict]:
    """Yield what processes of a dry run have noted, each verdict once. A line that is still being written is left out.

    >>> [each.model for each in verdicts('{"model": "a", "shares": true}\\n' * 2 + "a model computes\\n{")]
    ['a']
    """
    for line in dict.fromkeys(text.split("\n")[:-1]):
        if line != COMPUTES:
            yield Verdict(**json.loads(line))


def _note(verdict: Verdict, settings: Settings) -> None:
    _append(json.dumps(asdict(verdict)), settings)


def _append(line: str, settings: Settings) -> None:
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
