"""Remembers which adapters of the folder were refused, and why: they are not offered, and for some seconds they are not read again."""

import threading
import time
from typing import NamedTuple

from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter_folder import Folder, State

REFUSED_S = 10.0  # for so long an adapter that was refused, and has not changed, is refused unread
MANY = 256


class RefusedAdapter(NamedTuple):
    """Why an adapter of the folder was refused, when, and how it was then."""

    state: State
    at: float
    why: str


class Refusals:
    """What was refused, by name. Those that are not in the folder any more are forgotten. Any thread may call it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._refused: dict[str, RefusedAdapter] = {}
        self._many = MANY  # from so many on, it is asked which of them are still there
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._refused)

    def add(self, name: str, state: State, why: str) -> None:
        with self._lock:
            self._refused[name] = RefusedAdapter(state, time.monotonic(), why)
            if len(self._refused) > self._many:
                self._refused = {each: of for each, of in self._refused.items() if self._folder.state(each) is not None}
                self._many = 2 * len(self._refused) + MANY

    def forget(self, name: str) -> None:
        with self._lock:
            self._refused.pop(name, None)

    def names(self) -> set[str]:
        """Return what is as it was when it was refused."""
        states = self._folder.states()
        with self._lock:
            return {name for name, refused in self._refused.items() if states.get(name) == refused.state}

    def check(self, name: str, state: State) -> None:
        """Raise `AdapterError` if the very same was refused just now."""
        refused = self._refused.get(name)
        if refused is not None and refused.state == state and time.monotonic() - refused.at < REFUSED_S:
            raise AdapterError(refused.why)

    def reason(self, name: str) -> str | None:
        """Return why an adapter was refused, if it is as it was then."""
        refused = self._refused.get(name)
        return refused.why if refused is not None and self._folder.state(name) == refused.state else None
