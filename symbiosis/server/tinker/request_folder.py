"""The requests of one run whose outcome was promised, by number: on disk, so that they are still there when the process was killed."""

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from symbiosis.server.tinker.tinker_messages import AnyAsked, TinkerRefusal

requests = msgspec.msgpack.Decoder(AnyAsked)


class RequestFolder:
    """A file for each request, until nobody can ask for its outcome any more. Number 0 is the one that made the run.

    >>> import tempfile
    >>> from symbiosis.server.tinker.tinker_messages import GetInfo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = RequestFolder(Path(folder) / "requests")
    ...     kept.put(1, GetInfo(model_id="a")), kept.put(1, GetInfo(model_id="a")), RequestFolder(kept.path).get(1).model_id
    (True, False, 'a')
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sizes = {int(each.name): each.stat().st_size for each in path.iterdir() if each.name.isdecimal()}

    @property
    def numbers(self) -> list[int]:
        return sorted(self._sizes)

    def size_from(self, first: int) -> int:
        """Return the bytes of the requests from a number on."""
        return sum(size for number, size in list(self._sizes.items()) if number >= first)

    def put(self, number: int, asked: AnyAsked, may_take: Callable[[int], object] = lambda nbytes: None) -> bool:
        """Keep a request, and return whether it is new. Raises `TinkerRefusal` if another one has its number, what `may_take`
        raises, and `FileNotFoundError` when the folder is removed."""
        contents = msgspec.msgpack.encode(asked)
        with self._lock:
            if number in self._sizes:
                known = (self.path / str(number)).read_bytes()
                # protobuf's maps have no order, and are read in another one by another process
                if known != contents and requests.decode(known) != requests.decode(contents):
                    raise TinkerRefusal(
                        f"number {number} of this run was another request: each has a number of its own, one more than the one before"
                    )
                return False
            may_take(len(contents))
            part = self.path / f".{number}"
            part.write_bytes(contents)
            part.rename(self.path / str(number))
            self._sizes[number] = len(contents)
        return True

    def get(self, number: int) -> AnyAsked | None:
        """Return a request; None if it is not there, or was kept by another release."""
        with suppress(FileNotFoundError, msgspec.MsgspecError):
            return requests.decode((self.path / str(number)).read_bytes())
        return None

    def drop(self, number: int) -> None:
        with self._lock:
            self._sizes.pop(number, None)
            (self.path / str(number)).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
