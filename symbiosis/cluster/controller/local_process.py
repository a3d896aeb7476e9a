"""One process of a cluster: started, watched by its page of health, and ended."""

import contextlib
import json
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import IO

from msgspec.structs import replace

from symbiosis.base.procs import Child
from symbiosis.cluster.controller.member import MemberProcess
from symbiosis.executor.observe.pages import ANSWER_S, read_page
from symbiosis.executor.observe.process_figures import children
from symbiosis.protocol.cluster_state import Member

logger = logging.getLogger("symbiosis")

LOOK_EVERY_S = 0.5  # between two looks at its health
WORKS = ("serving", "ready", "draining", "ending")  # what a page of health says of one that works


class LocalProcess(MemberProcess):
    """One member of a cluster, on this host.

    Args:
        code: What Python is to run.
        place: Called before each start with where its pages were, returns where they will be; nothing: at the URL that it prints.
        descriptors: That it inherits.
        secret: That its stdin says first.
    """

    def __init__(
        self, member: Member, code: list[str], threads: int = 1,
        place: Callable[[str], str] | None = None, descriptors: tuple[int, ...] = (), secret: str = "",
    ) -> None:  # fmt: skip
        super().__init__(member)
        self._code, self._place, self._descriptors, self._secret = code, place, descriptors, secret
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._child: Child | None = None
        self._family: dict[int, str] = {}  # the processes that it has started, and when they began

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.status is None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    @property
    def status(self) -> int:
        return (self._child.status or 0) if self._child else 0

    def _start(self) -> None:
        if self._place is not None:
            self.member = replace(self.member, pages=self._place(self.member.pages))
        self._child = Child(
            self._code, descriptors=self._descriptors, environment=self._environment, stdout=PIPE,
            first=f"{self._secret}\n".encode(),
        )  # fmt: skip
        threading.Thread(target=self._watch, args=[self._child, self.ready], daemon=True).start()

    def _stop(self) -> None:
        assert self._child is not None
        self._child.end()

    def kill(self) -> None:
        if self._child is None:
            return
        self._note_family()
        for pid, began in self._family.items():
            if began_at(pid) == began:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._child.kill()

    def _note_family(self) -> None:
        """Note what it has started: once it is dead, nobody can tell any more."""
        self._family |= {pid: began_at(pid) for pid in descendants(self.pid)}

    def wait(self, seconds: float) -> bool:
        return self._child is None or self._child.wait(seconds)

    def _watch(self, child: Child, ready: threading.Event) -> None:
        """Wait for the line that says that it is ready; then ask after its health until it ends."""
        with child.stdout as lines:
            self._await_line(lines, child.pid)
            if not (line := lines.readline().decode()):
                return
            self._is_ready(line, ready)
            threading.Thread(target=lines.read, daemon=True).start()
            while child.status is None and self.ready is ready:
                begun = time.monotonic()
                found = self._works()
                self._note_family()
                self.silent_s = (
                    0.0 if found is not None else self.silent_s + min(time.monotonic() - begun, ANSWER_S) + LOOK_EVERY_S
                )
                self.health = found or self.health
                time.sleep(LOOK_EVERY_S)

    def _await_line(self, lines: IO[bytes], pid: int) -> None:
        """Wait until it prints something or ends. How long that takes depends on its model, but one that is stopped will never do either."""
        told = select.poll()
        told.register(lines, select.POLLIN)
        while not told.poll(LOOK_EVERY_S * 1000):
            self.silent_s = self.silent_s + LOOK_EVERY_S if is_stopped(pid) else 0.0

    def _works(self) -> dict[str, object] | None:
        """Return what its page of health tells, if it works. A front end does so also without a server."""
        told = health_at(self.member.pages)
        works = told is not None and (self.member.kind == "front" or told.get("status") in WORKS)
        return told if works else None

    def _is_ready(self, line: str, ready: threading.Event) -> None:
        if self.member.kind != "executor":
            url = line.split(" at ")[1].split()[0].rstrip(",").removesuffix("/v1")
            self.member = replace(self.member, url=url, pages=url)
        self.starts = 0
        self.health = self._works() or self.health  # before it gets requests: which base it serves
        ready.set()
        logger.info("%s is ready (pid %d)", self.name, self.pid)


def health_at(pages: str) -> dict[str, object] | None:
    """Return what a process tells of its health, None if nothing works there."""
    with contextlib.suppress(ValueError):
        told = json.loads(read_page(f"{pages}/health") or "null")
        return told if isinstance(told, dict) else None
    return None


def began_at(pid: int) -> str:
    """Return when a process began, as the kernel counts; nothing if there is none. A number may be given to another one."""
    return _stat(pid)[19]


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process, as SIGSTOP does.

    >>> is_stopped(os.getpid())
    False
    """
    return _stat(pid)[0] == "T"


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process after its name; empty words if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [""] * 50


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and that these have."""
    for child in children(pid):
        yield child
        yield from descendants(child)
