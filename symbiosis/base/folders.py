"""The folders of this user: for sockets, for what was compiled, for what is to stay, for files of one process. No other module names one, and
none is returned unless it is this user's alone: in a shared place like /tmp, another user may have made it first."""

import fcntl
import getpass
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from symbiosis.base.ownership import check_folder, make_folder, why_not_ours, why_replaceable
from symbiosis.errors import ConfigError

OF_A_PROCESS = "serve-"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}  # who reads them runs what lies there
logger = logging.getLogger("symbiosis")


class Use(StrEnum):
    """What a folder is for: by the variable that says where the user wants it."""

    RUNTIME = "XDG_RUNTIME_DIR"  # sockets, and what running processes tell of themselves
    CACHE = "XDG_CACHE_HOME"  # what can be made again
    STATE = "XDG_STATE_HOME"  # what is to stay
    TEMPORARY = "TMPDIR"  # large files that end with their process


def user_folder(use: Use, *names: str, make: bool = False) -> Path:
    """Return this user's folder for this use, or one inside it. Raise `ConfigError` if another user may have put what is in there.

    >>> user_folder(Use.STATE, "pads").parts[-2:]
    ('symbiosis', 'pads')
    """
    folder = _own(use).joinpath(*names)
    otherwise = f"set ${use} to a folder of your own"
    (make_folder if make else check_folder)(folder, otherwise=otherwise)
    return folder


def _own(use: Use) -> Path:
    named = Path(os.environ.get(use, ""))
    is_named = (
        named.is_absolute()
    )  # a relative one is ignored, as its specification demands: it would change with the working directory
    if use in (Use.CACHE, Use.STATE):
        return (named if is_named else _home() / (".cache" if use is Use.CACHE else ".local/state")) / "symbiosis"
    if use is Use.RUNTIME and is_named and os.access(named, os.W_OK) and why_not_ours(named) is None:
        return named / "symbiosis"
    return Path(tempfile.gettempdir()) / f"symbiosis-{os.getuid()}"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError("this user has no home directory: set $HOME") from None


def check_caches(inductor: bool = False) -> None:
    """Have torch.compile and Triton keep what they compile in folders of this user's alone, whose contents they run. Call it before they
    compile anything, with `inductor` if torch.compile does. Raise `ConfigError` if the environment names a folder that is not, or if others
    could change what compilers have in $TMPDIR."""
    if why := why_replaceable(Path(tempfile.gettempdir(), "compiler")):
        raise ConfigError(f"{why}: set ${Use.TEMPORARY} to a folder of your own")
    if inductor:  # which keeps some things, such as compiled headers, there wherever its folder is
        os.environ["PYTHONSAFEPATH"] = "1"  # its processes and theirs import nothing from the working directory
        make_folder(_of_inductor(), otherwise=f"set ${Use.TEMPORARY} to a folder of your own")
    for variable, name in CACHES.items():
        if named := os.environ.get(variable):
            make_folder(Path(named), otherwise=f"set ${variable} to another one")
        elif variable == "TRITON_CACHE_DIR" and (home := os.environ.get("TRITON_HOME")):
            make_folder(Path(home, ".triton", "cache"), otherwise="set $TRITON_HOME to another one")
        else:
            os.environ[variable] = str(_cache(name))


def _of_inductor() -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _cache(name: str) -> Path:
    try:
        return user_folder(Use.CACHE, name, make=True)
    except ConfigError as error:
        folder = user_folder(Use.TEMPORARY, "cache", name, make=True)
        logger.warning("what is compiled is kept in %s, because %s", folder, error)
        return folder


@contextmanager
def temporary_folder(prefix: str = "symbiosis-", within: Path | None = None) -> Iterator[Path]:
    """Make a folder for the time of the block, within one that `user_folder` or `process_folder` has returned, or where $TMPDIR says."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as made:
        if within is None:
            check_folder(Path(made), otherwise=f"set ${Use.TEMPORARY} to another one")
        yield Path(made)


@contextmanager
def process_folder(use: Use) -> Iterator[Path]:
    """Make a folder for this process, and remove those of processes that were killed: each is locked while its process lives."""
    parent = user_folder(use, make=True)
    with _locked(parent, fcntl.LOCK_EX):
        for left in parent.glob(f"{OF_A_PROCESS}*"):
            _remove_if_left(left)
        folder = Path(tempfile.mkdtemp(prefix=OF_A_PROCESS, dir=parent))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    try:
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder)
    except OSError:
        return  # somebody lives there


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
