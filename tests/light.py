"""The process that speaks HTTP, forked from one that has imported what it needs, and no torch: Python would take most of a server's start for it.

It is no descendant of those who start it: tests that look for it there want one of Python (`forked_http=False`).
That one starts with the first that is needed, and ends with the process that started it. Where it listens stands in the environment, so that
processes which tests start find it, too.
"""

import gc
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.forking import ForkedChild, Forks, ask

MODULE = "symbiosis.server.http_process"
PLACE = "SYMBIOSIS_TESTS_LIGHT"
_kept: list[Any] = []  # as long as this process: the other one, and the folder of its socket


def begin() -> str:
    """Have one to fork from, and return where it listens."""
    if PLACE in os.environ:
        return os.environ[PLACE]
    folder = tempfile.TemporaryDirectory()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"{folder.name}/door")
        door.listen(64)
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-c", "from tests.light import main; main()", str(door.fileno())], stdin=subprocess.PIPE,
            pass_fds=[door.fileno()], env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
    _kept.extend((process, folder))
    os.environ[PLACE] = f"{folder.name}/door"
    return os.environ[PLACE]


def runs(command: Sequence[str]) -> bool:
    """Whether it is such a process."""
    return MODULE in words_of(command)[1]


def popen(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes] | ForkedChild":
    """What takes the place of `subprocess.Popen`. Where the environment knows of none to fork from, Python starts it."""
    if PLACE not in os.environ:
        return subprocess.Popen(command, **options)
    return ForkedChild(_fork, words_of(command), **options)


def words_of(command: Sequence[str]) -> list[str]:
    """Those after the interpreter and its own."""
    return list(command[command.index("-P") + 1 :])


def _fork(words: list[str], environment: dict[str, str], given: dict[int, int], status: int) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as orders:
        orders.connect(os.environ[PLACE])
        return ask(orders, words, environment, given, status)


# ---------------------------------------------------------------- in the process that forks


def main() -> NoReturn:
    _import_all()
    door, forks = socket.socket(fileno=int(sys.argv[1])), Forks()
    while True:
        for ready in select.select([0, door.fileno(), *forks], [], [])[0]:
            if ready == 0:  # whoever started this one is gone
                os._exit(0)
            if ready != door.fileno():
                forks.ended(ready)
                continue
            with door.accept()[0] as orders:
                forks.fork(orders, lambda _: sys.modules.pop(MODULE))  # which it is to run as its program


def _import_all() -> None:
    from symbiosis.server.http_process import do_without_torch

    do_without_torch()
    import uvicorn.lifespan.off  # noqa: F401
    import uvicorn.loops.auto  # noqa: F401
    import uvicorn.protocols.http.auto  # noqa: F401
    from transformers import AutoTokenizer

    from symbiosis.executor.model.checkpoint import DEMO_MODEL

    AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
