"""The folder in which adapters are looked for. It says what lies there now, without reading any of it."""

import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter import IS_THE_BASE
from symbiosis.serving.lora.adapter_files import MOST_TENSOR_BYTES, MOST_TENSORS, read_adapter, state_of
from symbiosis.text import FEW_LETTERS, shown

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._@+=-]{0,127})?")
LISTED_S = 1.0  # a list is as good as new for so long, if the folder itself is as it was
TIMES_LISTED = 10  # and for so many times as long as it took to make
State = tuple[int, ...]


class Folder:
    """A folder of adapters, each in a subfolder of its name. Without a path it is empty.

    Args:
        base: What the base is called, and so no adapter.
        most_bytes: Of the file of an adapter's tensors.
        most_tensors: In it.
    """

    def __init__(
        self,
        path: Path | None,
        base: str | None = None,
        most_bytes: int = MOST_TENSOR_BYTES,
        most_tensors: int = MOST_TENSORS,
    ) -> None:
        self.path, self.base, self.most_bytes, self.most_tensors = path, base, most_bytes, most_tensors
        self._lock = threading.Lock()  # one lists, and the others wait for that list
        self._listed, self._until, self._like = dict[str, State](), float("-inf"), 0

    def state(self, name: str) -> State | None:
        """Return a tuple that differs whenever the adapter of this name has changed, or None if there is none."""
        if self.path is None or not self._may_be(name):
            return None
        folder = self.path / name
        state = state_of(folder)
        return state if state is None or is_within(folder, self.path) else None

    def states(self) -> Mapping[str, State]:
        """Return the states of all adapters in the folder, in the order of their names, as they were at most a moment ago."""
        if self.path is None:
            return {}
        with self._lock:
            try:
                like, now = self.path.stat().st_mtime_ns, time.monotonic()
                if like != self._like or now > self._until:
                    self._listed = self._list(self.path)
                    took = time.monotonic() - now
                    self._like, self._until = like, now + max(LISTED_S, TIMES_LISTED * took)
            except OSError as error:
                raise AdapterError(f"the folder of adapters cannot be read: {error.strerror}") from None
            return self._listed

    def holds(self, name: str) -> bool:
        """Whether something of this name lies in the folder, be it an adapter or not."""
        if self.path is None or not NAME.fullmatch(name):
            return False
        found = self.path / name
        return found.is_dir() if is_within(found, self.path) else found.is_symlink() and "/" not in name

    def others(self) -> list[str]:
        """The folders in it that are no adapters which can be asked for, hidden ones left out."""
        if self.path is None:
            return []
        with os.scandir(self.path) as entries:
            folders = {each.name for each in entries if Path(each).is_dir() and not each.name.startswith(".")}
        return sorted(folders - self.states().keys())

    def why_not(self, name: str) -> str:
        """Return what is wrong with something in the folder that is no adapter."""
        assert self.path is not None
        try:
            check_name(name, self.base)
            if not is_within(self.path / name, self.path):
                raise AdapterError(
                    "it is a link to a folder outside of that of --adapters: move it there, or name it: --adapters NAME=PATH"
                )
            read_adapter(self.path / name, self.most_bytes, self.most_tensors)
        except AdapterError as error:
            return f"adapter {shown(name)!r}: {error}"
        except OSError as error:
            return f"adapter {shown(name)!r}: its files cannot be read: {error.strerror}"
        return f"adapter {shown(name)!r} has only just come: ask again"

    def _may_be(self, name: str) -> bool:
        """Whether an adapter may have this name."""
        return NAME.fullmatch(name) is not None and name != self.base

    def _list(self, path: Path) -> dict[str, State]:
        with os.scandir(path) as entries:
            links = {entry.name: entry.is_symlink() for entry in entries if self._may_be(entry.name)}
        states = {name: self.state(name) if links[name] else state_of(path / name) for name in sorted(links)}
        return {name: state for name, state in states.items() if state is not None}


def is_within(path: Path, folder: Path) -> bool:
    """Whether something lies in a folder, wherever links lead to. (`Path.resolve` fails where links go round in circles.)"""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_name(name: str, base: str | None = None) -> None:
    """Raise `AdapterError` for a name that no adapter may have; `base` is the base's."""
    if isinstance(name, str) and name == base:
        raise AdapterError(IS_THE_BASE.format(shown(name, FEW_LETTERS)))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise AdapterError(
            f"an adapter cannot be named {shown(str(name), FEW_LETTERS)!r}: names have letters, digits and . _ - @ + = (and one / inside), and begin with a "
            "letter or a digit"
        )
