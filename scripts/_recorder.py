"""Notes which of the package's functions run, in every process that is started with `environment`: `paths.py` asks.

Python imports this as `sitecustomize`. A byte in a shared file says which path is being recorded (0: none). A function is noted once for each
path, with the process and the thread's name, by one `write`, so that processes may be killed at any time.
"""

import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

FOLDER = "SYMBIOSIS_PATHS"


class Noted(NamedTuple):
    """One function that ran."""

    path: int
    pid: int
    command: str  # of its process: the words of its command line
    file: str  # below the package
    function: str


class Flag:
    """Which path is being recorded, in a byte that all processes map."""

    def __init__(self, folder: Path) -> None:
        self.folder, file = folder, folder / "flag"
        if not file.exists():
            file.write_bytes(bytes(mmap.PAGESIZE))
        with file.open("r+b") as opened:
            self._byte = mmap.mmap(opened.fileno(), mmap.PAGESIZE)

    @property
    def path(self) -> int:
        return self._byte[0]

    def record(self, path: int) -> None:
        """Begin to record a path, or end with 0."""
        self._byte[0] = path

    def noted(self) -> Iterator[Noted]:
        """Yield what all processes have noted."""
        for file in self.folder.glob("*.noted"):
            command = file.with_suffix(".command").read_text()
            for line in file.read_text().splitlines():
                path, name, function = line.split("\t")
                yield Noted(int(path), int(file.stem), command, name, function)


def environment(folder: Path) -> dict[str, str]:
    """Return what to start processes with, so that they note what they run in `folder`."""
    start = folder / "start"
    start.mkdir(exist_ok=True)
    (start / "sitecustomize.py").write_text(Path(__file__).read_text() + "\n\nbegin()\n")
    paths = [str(start), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def begin() -> None:
    """Note what runs in this process, whenever a path is being recorded."""
    folder = Path(os.environ[FOLDER])
    flag = Flag(folder)
    output = Output(folder)

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = flag.path
        if path and event == "call":
            output.note(path, frame)

    threading.setprofile(profile)
    sys.setprofile(profile)


class Output:
    """A process's file of what it has noted. A forked process begins another one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid, self._file = folder, 0, -1
        self._known: set[tuple[int, object]] = set()

    def note(self, path: int, frame: FrameType) -> None:
        code = frame.f_code
        place = code.co_filename.rpartition("/symbiosis/")[2]
        if place == code.co_filename or code.co_name.startswith("<"):
            return
        if self._pid != os.getpid():
            self._begin()
        if (path, code) not in self._known:
            self._known.add((path, code))
            os.write(self._file, f"{path}\t{place}\t{code.co_qualname}\n".encode())

    def _begin(self) -> None:
        self._pid, self._known = os.getpid(), set()
        stem = self._folder / str(self._pid)
        words = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        stem.with_suffix(".command").write_text(words)
        self._file = os.open(stem.with_suffix(".noted"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
