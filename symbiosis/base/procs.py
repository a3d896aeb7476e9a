"""Processes whose lives are tied: whoever starts one ends it, and one whose parent dies ends by itself.

A child's stdin is a pipe that only its parent can write to. A line there tells the child to end; the end of the pipe tells it that its parent is
gone, however that came about. Either is said once, whatever signals came before: those are an operator's, and only a second one of his ends a
process at once. (The signal that Linux sends at a parent's death, PR_SET_PDEATHSIG, comes once for each of the parent's threads.)
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, TimeoutExpired, run
from typing import IO, Any

from symbiosis.base.logs import name_process

logger = logging.getLogger("symbiosis")

SAME_S = 0.2  # `timeout` sends its signal twice at once, and means one
LOOK_S = 0.1  # at whether an orphan is still needed
END = b"end\n"
TRIED_S = 60.0  # that code which is tried waits for its seconds of a processor at most
MOST_STARTS = 5  # of a process that dies again and again, before it is given up


def python(*words: str) -> list[str]:
    """Return the command line that runs Python with these words. It imports nothing from the working directory, where others may have
    put a module."""
    return [sys.executable, "-P", *words]


def tried(code: str, *words: str, given: bytes, most_s: int) -> CompletedProcess[bytes]:
    """Run code that may never end in a process of its own, which reads what is given. Raises `TimeoutExpired` if it takes more seconds of a processor:
    how busy the machine is changes nothing. What is ended so leaves no core dump.

    >>> tried("print(int(input()) + 1)", given=b"1", most_s=2).stdout
    b'2\\n'
    >>> tried("while True: pass", given=b"", most_s=1)
    Traceback (most recent call last):
    subprocess.TimeoutExpired: Command 'the code that is tried' timed out after 1 seconds
    >>> tried("print(resource.getrlimit(resource.RLIMIT_CORE))", given=b"", most_s=1).stdout
    b'(0, 0)\\n'
    """
    limits = f"{{resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_CPU: ({most_s}, {most_s + 1})}}"
    bounded = f"import resource\nfor each in {limits}.items(): resource.setrlimit(*each)\n{code}"
    ran = run(python("-c", bounded, *words), input=given, timeout=TRIED_S, capture_output=True, check=False)
    if ran.returncode == -signal.SIGXCPU:
        raise TimeoutExpired("the code that is tried", most_s)
    return ran


class Child:
    """A process that runs Python, in a session of its own: ctrl-C is for its parent.

    Args:
        words: Of its command line, after the interpreter.
        first: What its stdin says before anything else, as whole lines.
    """

    def __init__(
        self, words: Sequence[str], *, descriptors: Sequence[int] = (), environment: Mapping[str, str] | None = None,
        stdout: int = DEVNULL, stderr: IO[bytes] | None = None, first: bytes = b"",
    ) -> None:  # fmt: skip
        self._process = Popen(
            python(*words), stdin=PIPE, stdout=stdout, stderr=stderr, env=environment, pass_fds=descriptors,
            bufsize=0, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        if first:
            self.say(first)

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout
        return self._process.stdout

    @property
    def status(self) -> int | None:
        """With which it has ended; None while it runs."""
        return self._process.poll()

    def say(self, line: bytes) -> None:
        """Write a line to its stdin, unless it has ended."""
        assert self._process.stdin
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line)

    def end(self) -> None:
        """Tell it to end. Once more does no harm."""
        self.say(END)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self._process.wait(max(0.0, seconds))
        except TimeoutExpired:
            return False
        assert self._process.stdin
        self._process.stdin.close()
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.wait(0.0)

    def stop(self, seconds: float) -> None:
        """Tell it to end, and kill it if it has not by then."""
        self.end()
        if not self.wait(seconds):
            self.kill()


# ---------------------------------------------------------------- in a child

parent_is_gone = threading.Event()  # whether the process that started this one has died
_has_word = threading.Event()  # the parent's, which the next SIGTERM stands for
_is_needed: Callable[[], bool] = bool
heard = ""  # what the parent said first


def program(entry: str, *arguments: str, name: str = "", most_s: float = 0.0, hears: bool = False) -> list[str]:
    """Return the words of a `Child` that runs a function, with these arguments on its command line; the others are those of `become`."""
    code = f"from symbiosis.base.procs import become; become({entry!r}, {name!r}, {most_s!r}, {hears!r})"
    return ["-c", code, *arguments]


def become(entry: str, name: str = "", most_s: float = 0.0, hears: bool = False) -> None:
    """Run `MODULE:FUNCTION` in a child of a process of ours.

    Args:
        name: Whose its lines of the log are.
        most_s: As of `follow_parent`.
        hears: Take the first line of stdin. What other users must not know is told so: they can read command lines.
    """
    global heard
    if hears:
        with open(0, "rb", buffering=0, closefd=False) as stdin:  # noqa: PTH123  (what follows the line stays there)
            heard = stdin.readline().decode().strip()
    follow_parent(most_s)
    if name:
        name_process(name)
    module, _, function = entry.partition(":")
    getattr(import_module(module), function)()


def follow_parent(most_s: float = 0.0) -> None:
    """Have this process, which a `Child` stands for, end when its parent says so or is gone, and not by a SIGHUP: it has no terminal, and
    whoever rotates logs sends it to all processes of a service.

    Args:
        most_s: For how long an orphan may go on while it is needed (`while_needed`).
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_follow, args=[most_s], name="symbiosis-parent", daemon=True).start()


def while_needed(is_needed: Callable[[], bool]) -> None:
    """Have an orphan go on while this is so, within the time that its parent gave it. It is asked in a thread of its own."""
    global _is_needed
    _is_needed = is_needed


def _follow(most_s: float) -> None:
    if not os.read(0, 1):
        parent_is_gone.set()
        logger.warning("the process that started this one is gone, so it ends when nobody needs it, or in %g s", most_s)
        ends = time.monotonic() + most_s
        while time.monotonic() < ends and _is_needed():
            time.sleep(LOOK_S)
    _has_word.set()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def exit_at(*signals: signal.Signals) -> dict[signal.Signals, Any]:
    """Let the first of these signals end this process as an exception does, so that it cleans up. Later ones are ignored, because they would break
    off what the first one has begun: `timeout N make demo` sends two. Return what was done at each before; what is ignored stays so."""

    def come(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {each: done for each in signals if (done := signal.getsignal(each)) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, come)
    return before


def when_told_to_end(begin: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> None:
    """Have `begin` called, once, when this process is to end: by SIGTERM, SIGINT, its parent's word or its parent's death. `at_once` is called
    when SIGTERM or SIGINT comes again."""
    first: list[tuple[int, float]] = []

    def come(number: int, _: object) -> None:
        is_word = _has_word.is_set()
        _has_word.clear()
        now = time.monotonic()
        if not first:
            first.append((number, now))
            begin()
        elif not is_word and (number != first[0][0] or now - first[0][1] > SAME_S):
            at_once()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, come)
