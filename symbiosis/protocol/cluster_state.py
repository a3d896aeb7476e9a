"""What a running cluster tells of itself to programs of its user on this host: a file in a folder that is locked while the cluster runs."""

import fcntl
import logging
import os
import random
import re
import stat
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from symbiosis.base.folders import Use, user_folder
from symbiosis.base.ownership import is_trusted
from symbiosis.errors import ConfigError, ExecutorUnavailable
from symbiosis.protocol.endpoints import CLUSTERS

SCHEME = "symbiosis://"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")  # of a folder
LONGEST = 16 << 20  # bytes that a cluster tells of itself
logger = logging.getLogger("symbiosis")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a cluster."""

    name: str
    kind: str  # executor, server or front
    model: str = ""
    number: int = 0  # of servers: by which placement knows it
    url: str = ""
    pages: str = ""  # where it has /metrics and /health
    state: Annotated[str, msgspec.Meta(pattern="^(starting|ready|draining|lost|other-base)$")] = "starting"
    pid: int = 0
    batch: int = 0  # of a server: most sequences of a step
    share: int = 0  # ... of one tenant while others wait; 0: no such limit
    most: int = 0  # ... under way; 0: it is not known
    clients: int = 0  # of an executor: that are joined; of a server: sessions of those who train
    trains: bool = False
    fingerprint: str = ""  # of the base that it serves, as itself says


class Told(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A cluster at one moment."""

    name: str
    url: str  # where its front end answers
    members: tuple[Member, ...] = ()
    aliases: dict[str, dict[str, float]] = {}  # names for several models, with the share of each
    adapters: dict[str, str] = {}  # by model: the folder of its adapters
    retiring: tuple[str, ...] = ()  # models that take nothing new, and end when nobody uses them any more

    @cached_property
    def models(self) -> list[str]:
        """Return the models that are served."""
        names = dict.fromkeys(each.model for each in self.of_kind("server"))
        return [name for name in names if name not in self.retiring]

    @property
    def names(self) -> list[str]:
        """Return what clients can ask for besides adapters: models, and names for several."""
        return [*self.models, *self.aliases]

    def of_kind(self, kind: str, model: str | None = None) -> list[Member]:
        return [each for each in self.members if each.kind == kind and model in (None, each.model)]


def folder_of(name: str) -> Path:
    """Return a cluster's folder. Raises `ConfigError` if that is no name, or if another user could tell what is in there."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is no name of a cluster: symbiosis cluster status says which ones run")
    return user_folder(Use.RUNTIME, CLUSTERS, name)


def told_file(name: str) -> Path:
    """Return the file in which a cluster tells of itself."""
    return folder_of(name) / "told.json"


def tell(told: Told) -> None:
    """Replace the file in one go, so that nobody reads half of it."""
    file = told_file(told.name)
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(told))
    new.replace(file)


def told_by(name: str) -> Told:
    """Return what a running cluster has told. Raises `ConfigError` if none of this name runs."""
    try:
        if is_running(folder_of(name)):
            return read_told(name)
    except FileNotFoundError:
        pass
    names = ", ".join(each.name for each in running()) or "none"
    raise ConfigError(
        f"no cluster {name!r} of yours runs on this host (running: {names}): symbiosis cluster up FILE.yaml"
    )


def running() -> Iterator[Told]:
    """Yield what each running cluster of this user has told. One that tells nonsense is logged, and hides no other."""
    for folder in sorted(each for each in user_folder(Use.RUNTIME, CLUSTERS).glob("*") if NAME.fullmatch(each.name)):
        try:
            if is_running(folder):
                yield read_told(folder.name)
        except FileNotFoundError:
            continue
        except ConfigError as error:
            _warn(str(error))


@cache  # a client that waits for a cluster looks again and again
def _warn(message: str) -> None:
    logger.warning("%s", message)


def read_told(name: str) -> Told:
    """Return what is in a cluster's file. Raises `FileNotFoundError` if there is none, and `ConfigError` if a cluster cannot have written
    it."""
    file = told_file(name)
    try:
        told = msgspec.json.decode(_read(file), type=Told)
        if told.name == name:
            return told
        why = f"it is of {told.name!r:.80}"
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        why = str(error)
    raise ConfigError(
        f"{file} is not what the cluster {name!r} tells of itself ({why:.200}): end its process (symbiosis cluster up) and start it again"
    )


def _read(file: Path) -> bytes:
    """Read a file of this user's or root's. What is no file, as a pipe, is not waited for."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or not is_trusted(found.st_uid):
            raise ValueError("it is no file of this user's")
        told = opened.read(LONGEST + 1)
    if len(told) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} bytes")
    return told


def is_running(folder: Path) -> bool:
    """Whether a cluster holds the lock of this folder."""
    try:
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def executors_at(url: str) -> tuple[str, ...]:
    """Return the endpoints of the executors that `symbiosis://MODEL` or `symbiosis://CLUSTER/MODEL` names, the one with the fewest clients
    first. Raises `ExecutorUnavailable` while none of them has a place yet."""
    cluster, _, model = url.removeprefix(SCHEME).rpartition("/")
    clusters = [told_by(cluster)] if cluster else list(running())
    found = {each.name: each.of_kind("executor", model) for each in clusters if model not in each.retiring}
    having = {name: members for name, members in found.items() if members}
    if len(having) > 1:
        raise ConfigError(f"{url}: several clusters serve it: write {SCHEME}{next(iter(having))}/{model}, for example")
    for name, members in having.items():
        if placed := [each for each in members if each.url and each.state != "other-base"]:
            return tuple(each.url for each in sorted(placed, key=_last))
        raise ExecutorUnavailable(
            f"{url}: the cluster is still starting its executors: symbiosis cluster status {name}"
        )
    if any(model in each.retiring for each in clusters):
        raise ConfigError(f"{url}: this model retires, and takes no new programs: wrap the one that comes after it")
    known = sorted({f"{SCHEME}{each.model}" for told in running() for each in told.of_kind("executor")})
    raise ConfigError(
        f"{url}: no running cluster of yours on this host has executors of it (there are: {', '.join(known) or 'none'})"
    )


def _last(executor: Member) -> tuple[bool, int, float]:
    """Return by what executors are sorted. Programs that start at once are spread over those that are alike."""
    return executor.state != "ready", executor.clients, random.random()
