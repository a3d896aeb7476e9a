"""CUDA MPS: lets the processes of one user run on a GPU at the same time instead of in turns.

Its control daemon listens in a directory of pipes. When a program initialises CUDA, it joins the daemon in CUDA_MPS_PIPE_DIRECTORY, or else
in the default directory. Nothing here initialises CUDA, and no daemon is waited for longer than `ANSWER_S`.
"""

import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from symbiosis.base.folders import Use, user_folder
from symbiosis.base.ownership import is_ours, make_folder, resolved, why_not_ours
from symbiosis.errors import ConfigError

CONTROL = "nvidia-cuda-mps-control"  # the daemon, and the tool that talks to it
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # where CUDA looks if nothing is said
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
ANSWER_S, QUIT_S = 5.0, 1.0
INSTALL = (
    f"{CONTROL} comes with the NVIDIA driver (package nvidia-compute-utils-NNN or nvidia-driver-cuda); "
    "containers get it by NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)
NONE = f"there is no CUDA MPS on this machine: {INSTALL}"

logger = logging.getLogger("symbiosis.executor.mps")


class PipesState(Enum):
    """The state of a directory of pipes."""

    ABSENT = "no daemon"
    SILENT = "a daemon that does not answer"
    FOREIGN = "another user's daemon"
    SERVES = "a daemon that answers"


def places() -> list[Path]:
    """Return the directories of pipes in which to look for a daemon, and to start one. CUDA by itself looks in the first."""
    if named := os.environ.get(PIPES):
        return [Path(named)]
    try:
        return [DEFAULT_PIPES, user_folder(Use.RUNTIME, "mps")]
    except ConfigError:  # another user has taken it
        return [DEFAULT_PIPES]


def state(pipes: Path) -> PipesState:
    """Whether a daemon serves this user there. Without the tool to ask it, its socket is all that can be seen."""
    control = pipes / "control"
    if not os.access(control, os.W_OK):
        return PipesState.ABSENT
    try:
        if not (is_ours(resolved(pipes)) and is_ours(control)):
            return PipesState.FOREIGN
    except ConfigError:
        return PipesState.FOREIGN
    if shutil.which(CONTROL) is None:
        return PipesState.SERVES
    try:
        return PipesState.ABSENT if ask(pipes, "get_server_list") is None else PipesState.SERVES
    except (OSError, subprocess.TimeoutExpired):
        return PipesState.SILENT


def ask(pipes: Path, question: str) -> str | None:
    """Return the daemon's answer, or None if there is no daemon (its socket outlives it)."""
    done = subprocess.run(
        [CONTROL], input=question + "\n", env=_environment(pipes), capture_output=True, text=True, timeout=ANSWER_S
    )
    nobody = done.returncode or "Cannot find MPS control daemon" in done.stdout + done.stderr
    return None if nobody else done.stdout


@contextmanager
def running() -> Iterator[Path]:
    """Yield the pipes of a daemon that serves this process. A daemon that had to be started is stopped after the block.

    To be entered before CUDA is initialised, because CUDA then reads the variable that is set here.
    """
    found = {pipes: state(pipes) for pipes in places()}
    for pipes, what in found.items():
        if what is PipesState.SERVES:
            if why := why_not_ours(pipes):  # NVIDIA's daemon opens a folder that it makes to all
                logger.warning(f"{pipes} {why}, who could put a daemon of their own there: chmod go-w {pipes}")
            os.environ[PIPES] = str(pipes)
            yield pipes
            return
    if shutil.which(CONTROL) is None:
        raise ConfigError(NONE)
    free = next((pipes for pipes, what in found.items() if what is PipesState.ABSENT and claim(pipes)), None)
    if free is None:
        there = "; ".join(f"{pipes} has {what.value}" for pipes, what in found.items())
        raise ConfigError(
            f"there is nowhere to put the pipes of CUDA MPS ({there}): set {PIPES} to a directory that you own"
        )
    os.environ[PIPES] = str(free)
    ours = start(free)
    try:
        yield free
    finally:
        if ours is not None and ours == daemon_pid(free):
            stop(free)


def claim(directory: Path) -> bool:
    """Make a directory that only this user may enter, or find one. In /tmp, another user may have made it first."""
    try:
        make_folder(directory)
        if directory.stat().st_uid != os.getuid():
            return False
        if PIPES not in os.environ:  # then it is MPS's alone; other users' programs would wait for ours
            directory.chmod(0o700)
    except (OSError, ConfigError):
        return False
    return True


def start(pipes: Path) -> str | None:
    """Start a daemon, wait until it answers, and return its process id, or None if another process started one first."""
    logs = Path(os.environ.get(LOGS) or user_folder(Use.RUNTIME, "mps-log"))
    make_folder(logs, otherwise=f"set {LOGS} to another one")
    os.environ[LOGS] = str(logs)
    environment = _environment(pipes)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # it would renumber the devices of every client
    with tempfile.TemporaryFile() as output:  # a pipe would stay open for as long as the daemon lives
        try:
            done = subprocess.run(
                [CONTROL, "-d"], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                timeout=ANSWER_S, start_new_session=True,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"cannot start CUDA MPS: {error}") from None
        output.seek(0)
        said = output.read().decode(errors="replace").strip() or "it does not answer"
    if not until(lambda: state(pipes) is PipesState.SERVES):
        if done.returncode == 0:
            quit_daemon(pipes)
        raise ConfigError(f"cannot start CUDA MPS in {pipes}: {said}. Its log is in {logs}")
    return daemon_pid(pipes) if done.returncode == 0 else None


def stop(pipes: Path) -> None:
    """End the daemon, unless other programs still use it: they could not go on, nor start again while it waits for them."""
    if until(lambda: alone(pipes)):
        quit_daemon(pipes)
    else:
        logger.warning(
            "CUDA MPS is left running: other programs use it, or it does not answer. "
            f"End it with: echo quit | {PIPES}={pipes} {CONTROL}"
        )


def quit_daemon(pipes: Path) -> None:
    """Tell the daemon to quit. It waits for all clients, and so for this process if it has used CUDA; then the tool goes on without us."""
    tool = subprocess.Popen(
        [CONTROL], env=_environment(pipes), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    with suppress(BrokenPipeError, subprocess.TimeoutExpired):
        tool.communicate(b"quit\n", timeout=QUIT_S)


def alone(pipes: Path) -> bool:
    """Whether no process but this one is known to use the daemon."""
    try:
        servers = (ask(pipes, "get_server_list") or "").split()
        clients = {pid for server in servers for pid in (ask(pipes, f"get_client_list {server}") or "").split()}
    except (OSError, subprocess.TimeoutExpired):
        return False
    return clients <= {str(os.getpid())}


def daemon_pid(pipes: Path) -> str:
    """Return the daemon's process id, which tells one daemon from another at the same place."""
    try:
        return (pipes / f"{CONTROL}.pid").read_text().strip()
    except OSError:
        return ""


def how_to_join(pipes: Path) -> str:
    """Return what to tell clients. CUDA reads the variable when a process initialises it, and never again."""
    if pipes == DEFAULT_PIPES:
        return f"CUDA MPS is in {pipes}: clients on this host need no variable"
    return f"CUDA MPS is in {pipes}: on this host start clients that use CUDA with {PIPES}={pipes}"


def until(true: Callable[[], bool]) -> bool:
    """Whether it came true within `ANSWER_S`."""
    deadline = time.monotonic() + ANSWER_S
    while not (done := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def _environment(pipes: Path) -> dict[str, str]:
    return {**os.environ, PIPES: str(pipes)}
