"""`symbiosis run --dry-run`: runs a program until one of its models computes, ends all that it has started, and says what becomes of its models."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from symbiosis.base.folders import temporary_folder
from symbiosis.base.procs import exit_at
from symbiosis.run.command import environment_of, program_of
from symbiosis.run.outcome import COMPUTES, Verdict, verdicts
from symbiosis.run.settings import VERDICT

MOST_S = 1800.0  # until a model computes
GRACE_S = 2.0  # for a program whose verdicts are known
END_S = 10.0  # that processes take at most to be gone once they are killed
POLL_S = 0.05
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class DryRun(msgspec.Struct, frozen=True):
    """What a dry run has found.

    Args:
        ended_with: The program's exit status, if it ended before a model computed; negative: the signal that ended it.
        waited_s: For how long it was waited in vain for a model to compute; None: it was not.

    >>> found = DryRun(ended_with=3)
    >>> found.text
    'no verdict: it ended with 3 before it loaded a model of transformers'
    >>> found.json
    '{"shares":false,"models":[],"ended_with":3}'
    """

    models: tuple[Verdict, ...] = ()
    ended_with: int | None = None
    waited_s: float | None = None

    @property
    def shares(self) -> bool:
        """Whether there are models, and all share."""
        return bool(self.models) and self.waited_s is None and all(each.shares for each in self.models)

    @property
    def why_not_whole(self) -> str | None:
        """Why there may be other models than those that are known."""
        if self.waited_s is not None:
            return f"no verdict: no model has computed within {self.waited_s:g} s (--timeout), so it was ended"
        if not self.models:
            return f"no verdict: it ended with {self.ended_with} before it loaded a model of transformers"
        return None

    @property
    def text(self) -> str:
        """A line for each model, as people read it."""
        return "\n".join([*(each.line for each in self.models), *filter(None, [self.why_not_whole])])

    @property
    def json(self) -> str:
        """All of it as one object, as programs read it."""
        told = {"shares": self.shares, "models": self.models, "ended_with": self.ended_with}
        return msgspec.json.encode(told).decode()


def dry_run(command: Sequence[str], endpoint: str | None = None, most_s: float = MOST_S) -> DryRun:
    """Run a program until one of its models computes, for so long at most. Return what becomes of each model that it has loaded."""
    with _ended_by_signals(), temporary_folder() as folder:
        verdict = folder / "verdict"
        verdict.touch()
        environment = {**environment_of(os.environ, endpoint), VERDICT: str(verdict)}
        program = program_of(command, environment)
        process = subprocess.Popen([program, *command[1:]], env=environment, stdout=sys.stderr, start_new_session=True)
        try:
            deadline = time.monotonic() + most_s
            while process.poll() is None and not _computes(verdict) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            status, computes = process.poll(), _computes(verdict)
            if computes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        finally:
            _end(process, verdict)
        found = tuple(verdicts(verdict.read_text()))
    return DryRun(found, None if computes else status, None if computes or status is not None else most_s)


def _computes(verdict: Path) -> bool:
    return COMPUTES in verdict.read_text().splitlines()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have the first signal that asks for the end raise `SystemExit` in the block."""
    before = exit_at(*SIGNALS)
    try:
        yield
    finally:
        for each, done in before.items():
            signal.signal(each, done)


def _end(process: "subprocess.Popen[bytes]", verdict: Path) -> None:
    """Kill a program with all that it has started, in whatever session: each has the name of the verdict's file in its environment."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + END_S
    while (left := _processes_with(f"{VERDICT}={verdict}")) and time.monotonic() < deadline:
        for number in left:
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(POLL_S)


def _processes_with(variable: str) -> list[int]:
    """Return the numbers of the processes that have been started with `NAME=VALUE` in their environment."""
    found = list[int]()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.fsencode(variable) in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found
