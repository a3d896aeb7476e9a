"""The adapters that there are: by name, in versions that never change, and found in a folder when they are first asked for.

The host's memory that they take is bounded. Adapters of the folder are let go, the least recently used first, and read again when they are
wanted. They keep their version as long as their files are the same.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from symbiosis.errors import AdapterError, NoAdapterMemory, UnknownAdapter
from symbiosis.serving.lora.adapter import Adapter, versions
from symbiosis.serving.lora.adapter_files import MOST_TENSOR_BYTES, AdapterWeights, read_adapter
from symbiosis.serving.lora.adapter_folder import Folder, State, check_name
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter, without_numbers
from symbiosis.serving.lora.loader import Loader
from symbiosis.serving.lora.publish import adapter_of, weights_of
from symbiosis.serving.lora.refusals import Refusals
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.text import FEW_LETTERS, shown

logger = logging.getLogger("symbiosis")

SHOWN = 10  # names in a message
MOST_KEPT = 1024  # adapters whose numbers only must be read again
ODD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)  # what odd values in files lead to
OF_A_MODULE, FEW_TENSORS = 8, 1024  # tensors that an adapter may have at each module of the base, and in any case
FIXED_BYTES = 1 << 16  # what an adapter takes besides its numbers: so the limit is one on how many there are, too


class FoundAdapter(NamedTuple):
    """An adapter, and the state of the folder that it came from."""

    adapter: LoadedAdapter
    state: State | None  # None: it was given, not found
    bytes: int  # of the host's memory


@dataclass(slots=True)
class Looked:
    """What came of looking at all adapters."""

    problems: dict[str, str] = field(default_factory=dict)  # of those that cannot be served, by name
    left: int = 0  # so many were not looked at


class Turns:
    """Of each name one at a time, and different names side by side: a large adapter holds up nobody who wants another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._users = Counter[str]()

    def is_taken(self, name: str) -> bool:
        return name in self._users

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        with self._lock:
            mine = self._locks.setdefault(name, threading.Lock())
            self._users[name] += 1
        try:
            with mine:
                yield
        finally:
            with self._lock:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name], self._locks[name]


class AdapterRegistry:
    """Adapters for one served model. Its methods may be called by any thread.

    Args:
        served: The model.
        folder: Where further adapters are looked for, each in a folder of its name, when they are first asked for.
        max_rank: Adapters of a larger rank are refused.
        memory: Bytes that adapters may take of the host's memory. None is no limit.
        base: What the model is called, and so no adapter.
        most_file_bytes: Of the file of an adapter's tensors. If `memory` is more, that is the limit.
    """

    def __init__(
        self,
        served: ModelRunner,
        folder: Path | None = None,
        max_rank: int = 256,
        memory: int | None = None,
        base: str | None = None,
        most_file_bytes: int = MOST_TENSOR_BYTES,
    ) -> None:
        self._loader = Loader.of(served, max_rank)
        most_tensors = OF_A_MODULE * len(self._loader.base.modules) + FEW_TENSORS
        self._folder = Folder(folder, base, max(most_file_bytes, memory or 0), most_tensors)
        self._memory = memory
        self._found: dict[str, FoundAdapter] = {}  # the one used last comes last
        self._let_go: dict[str, tuple[State, int]] = {}  # with their versions
        self._refusals = Refusals(self._folder)
        # by version: let go, and in use by somebody
        self._alive: WeakValueDictionary[int, LoadedAdapter] = WeakValueDictionary()
        self._kept: dict[int, LoadedAdapter] = {}  # by version: those let go last, without numbers
        self._removed: dict[str, State] = {}  # by name, as they were in the folder
        self._lock = threading.Lock()  # held for moments only
        self._turns = Turns()  # of each name, one is read at a time; taken before the lock
        self.on_replaced: Callable[[LoadedAdapter], None] = lambda old: None
        self.on_let_go: Callable[[LoadedAdapter], None] = lambda old: None  # it may come again in the same version

    def add(self, name: str, source: Path | str | AdapterWeights) -> LoadedAdapter:
        """Add a new version of the adapter `name`. Requests that run with an older version keep it."""
        check_name(name, self._folder.base)
        with self._turns.of(name):
            return self._keep(self._load(name, source, next(versions)), None)

    def publish(self, name: str, model: Any, adapter: str | None = None) -> LoadedAdapter:
        """Add a new version of the adapter `name`: what a PEFT model of this process trains, as it is now."""
        check_name(name, self._folder.base)
        adapter = adapter_of(model, adapter)
        with self._turns.of(name):
            version = next(versions)
            try:
                with torch.no_grad():
                    added = self._loader.read_trained(name, model, adapter, version)
            except AdapterError as error:
                raise AdapterError(f"adapter {name!r}: {error}") from None
            return self._keep(added or self._load(name, weights_of(model, adapter), version), None)

    def remove(self, name: str) -> None:
        """Remove an adapter, once it is read if it is being read. Its name is unknown until it is added again, or its folder changes."""
        with self._turns.of(name):  # what is being read is there first, and is removed, too
            state = self._folder.state(name)
            with self._lock:
                found = self._found.pop(name, None)
                is_given = found is not None and found.state is None
                is_there = is_given or state not in (None, self._removed.get(name))
                self._let_go.pop(name, None)
                if state is not None:
                    self._removed[name] = state
            if found is not None:
                self.on_replaced(found.adapter)
            if not is_there:
                raise self._unknown(name)

    def get(self, name: str) -> LoadedAdapter:
        """Return the present version. An adapter in the folder is loaded when it is first asked for, and again when it has changed."""
        if (adapter := self._loaded(name)) is not None:
            return adapter
        with self._turns.of(name):
            if (adapter := self._loaded(name)) is not None:  # somebody else has asked for it, too
                return adapter
            state = self._folder.state(name)
            if state is None or self._folder.path is None:
                raise self._unknown(name)
            folder, version = self._folder.path / name, self._earlier_version(name, state)
            adapter = None if version is None else self._load_again(name, folder, version)
            if adapter is None or self._folder.state(name) != state:  # it changed while it was read
                adapter = self._load_new(name, folder, state)
            return self._keep(adapter, state)

    def look(self, is_enough: Callable[[], bool]) -> Looked:
        """Load what lies in the folder and was not asked for yet, as long as nothing has to be let go for it."""
        looked, largest = Looked({name: self._folder.why_not(name) for name in self._folder.others()}), 0
        for name in self._offered()[0]:
            if is_enough() or (self._memory is not None and self.bytes + largest > self._memory):
                looked.left += 1
                continue
            try:
                largest = max(largest, self.get(name).bytes + FIXED_BYTES)
            except AdapterError as error:
                looked.problems[name] = str(error)
            except Exception as error:  # whatever it is: the others are looked at
                logger.warning("adapter %r: it cannot be loaded", name, exc_info=error)
                looked.problems[name] = f"adapter {name!r}: {type(error).__name__}"
        return looked

    def has(self, name: str) -> bool:
        """Whether an adapter is loaded, in whatever version, and is not being read now."""
        return name in self._found and not self._turns.is_taken(name)

    def is_replaced(self, adapter: Adapter) -> bool:
        """Whether no later request gets this version: another one, or none, has the name."""
        with self._lock:
            found, let_go = self._found.get(adapter.name), self._let_go.get(adapter.name)
        versions = {found.adapter.version if found else 0, let_go[1] if let_go else 0}
        return adapter.version not in versions

    def check(self, name: str) -> None:
        """Raise `AdapterError` if there is no such adapter, or if it was refused and is as it was then. Nothing is loaded."""
        if self._loaded(name) is None and (why := self._refusals.reason(name)) is not None:
            raise AdapterError(why)

    def names(self) -> list[str]:
        """Return the names of all adapters, loaded or not, except those that were refused and have not changed."""
        return list(self._offered(self._refusals.names())[0])

    def _offered(self, refused: Set[str] = frozenset()) -> tuple[Iterator[str], int]:
        """Return all names in order, and how many they are. There may be thousands, so no list is made of them."""
        in_folder = self._folder.states()
        with self._lock:
            given = {name for name, found in self._found.items() if found.state is None}
            removed = dict(self._removed)
        hidden = {name for name in refused if name in in_folder}
        hidden |= {
            name for name in removed.keys() - given if name in in_folder and self._folder.state(name) == removed[name]
        }
        others = [name for name in given if name not in in_folder]
        names = (name for name in merge(sorted(others), in_folder) if name not in hidden)
        return names, len(in_folder) + len(others) - len(hidden)

    def loaded(self) -> list[LoadedAdapter]:
        with self._lock:
            return [found.adapter for found in self._found.values()]

    @property
    def bytes(self) -> int:
        """The host's memory that adapters take."""
        with self._lock:
            return sum(found.bytes for found in self._found.values())

    def _loaded(self, name: str) -> LoadedAdapter | None:
        """Return an adapter that need not be read. Raises `UnknownAdapter` if there is none of this name."""
        found = self._found.get(name)
        state = None if found is not None and found.state is None else self._folder.state(name)
        gone = None
        with self._lock:
            found = self._found.get(name)
            if found is not None and found.state in (None, state):
                self._found[name] = self._found.pop(name)
                return found.adapter
            if state is None or state == self._removed.get(name):
                gone = self._found.pop(name, None)
                self._let_go.pop(name, None)
            else:
                return None
        if gone is not None:
            self.on_replaced(gone.adapter)
        raise self._unknown(name)

    def _load_new(self, name: str, folder: Path, state: State) -> LoadedAdapter:
        """Load an adapter, unless the very same was refused just now: then nothing is read."""
        self._refusals.check(name, state)
        try:
            return self._load(name, folder, next(versions))
        except AdapterError as error:
            if not isinstance(error.__cause__, OSError):  # which may pass, though the files stay as they are
                self._refusals.add(name, state, str(error))
            raise

    def _earlier_version(self, name: str, state: State) -> int | None:
        """Return the version number that this adapter had before it was let go, if its files are as they were."""
        with self._lock:
            before, version = self._let_go.pop(name, (None, 0))
        return version if before == state else None

    def _load_again(self, name: str, folder: Path, version: int) -> LoadedAdapter | None:
        """Read an adapter that was let go. Return None if its file cannot be read as it was."""
        if (alive := self._alive.get(version)) is not None:
            return alive
        with self._lock:
            kept = self._kept.pop(version, None)
        if kept is None:
            return self._load(name, folder, version, is_known=True)
        try:
            return self._loader.read_again(kept, folder)
        except OSError:
            return None

    def _load(
        self, name: str, source: Path | str | AdapterWeights, version: int, is_known: bool = False
    ) -> LoadedAdapter:
        try:
            if not isinstance(source, AdapterWeights):
                source = read_adapter(Path(source), self._folder.most_bytes, self._folder.most_tensors)
            with torch.no_grad():
                return self._loader.load(name, source, version, is_known)
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from None
        except OSError as error:
            raise AdapterError(f"adapter {name!r}: its files cannot be read: {error.strerror}") from error
        except ODD as error:
            logger.warning("adapter %r: what its files say cannot be understood", name, exc_info=error)
            told = f"{type(error).__name__}: {shown(str(error), 200)}"
            raise AdapterError(
                f"adapter {name!r}: its adapter_config.json says what PEFT does not write there ({told}): save it again"
            ) from None

    def _keep(self, adapter: LoadedAdapter, state: State | None) -> LoadedAdapter:
        name, new = adapter.name, FoundAdapter(adapter, state, adapter.bytes + FIXED_BYTES)
        with self._lock:
            held = sum(found.bytes for other, found in self._found.items() if other != name)
            excess = 0 if self._memory is None else new.bytes + held - self._memory
            let_go = self._make_room(new, excess) if excess > 0 else []
            old = self._found.pop(name, None)
            self._found[name] = new
            self._removed.pop(name, None)
            self._let_go.pop(name, None)
        self._refusals.forget(name)
        if old is not None:
            self.on_replaced(old.adapter)
        for gone in let_go:
            self.on_let_go(gone)
        return adapter

    def _make_room(self, new: FoundAdapter, excess: int) -> list[LoadedAdapter]:
        """Let other adapters of the folder go, and return them. Raises `NoAdapterMemory` if that would not be enough, and then lets none go."""
        let_go: list[LoadedAdapter] = []
        others = [(name, found) for name, found in self._found.items() if name != new.adapter.name]
        from_folder = [(name, found, found.state) for name, found in others if found.state is not None]
        if excess > sum(found.bytes for _, found, _ in from_folder):
            given = sum(found.bytes for _, found in others if found.state is None)
            raise NoAdapterMemory(
                f"adapter {new.adapter.name!r} takes {new.bytes} bytes, those that were sent or named hold {given}, and all may have "
                f"{self._memory}: remove some (DELETE /v1/adapters/NAME), or start the server with more --adapter-memory"
            )
        for name, found, state in from_folder:
            if excess <= 0:
                break
            excess -= found.bytes
            del self._found[name]
            self._let_go[name] = state, found.adapter.version
            self._keep_what_is_small(found.adapter)
            let_go.append(found.adapter)
        return let_go

    def _keep_what_is_small(self, adapter: LoadedAdapter) -> None:
        if adapter.own:
            self._alive[adapter.version] = adapter
        if (kept := without_numbers(adapter)) is not None:
            self._kept[adapter.version] = kept
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def _unknown(self, name: str) -> AdapterError:
        if name not in self._removed and self._folder.state(name) is None and self._folder.holds(name):
            return AdapterError(self._folder.why_not(name))
        return UnknownAdapter(f"there is no adapter {shown(name, FEW_LETTERS)!r}: there {self._there_are()}")

    def _there_are(self) -> str:
        names, count = self._offered(self._refusals.names())
        if not count:
            return "are none; add one, or start the server with --adapters FOLDER"
        more = f" and {count - SHOWN} more" if count > SHOWN else ""
        return f"are {', '.join(islice(names, SHOWN))}{more}"
