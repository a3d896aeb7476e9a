"""Identities over `tcp://`: a pair of CURVE keys for each executor and each tenant, in files.

`NAME.key` holds both halves and is for its owner's eyes only (mode 0600). `NAME.pub` is for others: it holds the public half (or
several, while one is exchanged for another), and may say when it expires. An executor lets in the owners of the `.pub` files in its
folder of tenants. The file's name is the tenant's.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from math import inf
from pathlib import Path
from time import time
from typing import NamedTuple

from symbiosis.base.ownership import is_trusted, user_name, why_replaceable
from symbiosis.base.secret_files import read_secret, why_exposed
from symbiosis.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LINE = re.compile(r"(public|secret|expires) (\S+)")
KEY = re.compile(r"\S{40}")  # in Z85, as ZeroMQ writes keys
LONGEST_FILE = 64 << 10  # bytes
SETTLED_S = 0.1  # files' clocks are coarse: a more recent write may be followed by another with the same time


class Pair(NamedTuple):
    """Both halves of a key."""

    public: str
    secret: str


class PublicKey(NamedTuple):
    """The contents of a `.pub` file: its owner's keys, and when they expire (in seconds since 1970)."""

    keys: tuple[str, ...]
    expires: float = inf


def generate(name: str, folder: Path, expires: str | None = None) -> tuple[Path, Path]:
    """Write a new pair of keys into `folder`, and return the paths of `NAME.key` and `NAME.pub`. Existing files are never overwritten.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> secret, public = generate("alice", folder)
    >>> read_pair(secret).public == read_public(public)
    True
    """
    import zmq

    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid key name: use letters, digits, '.', '_' and '-'")
    if expires is not None and moment(expires) <= time():
        raise ConfigError(f"a key that expires {expires} lets nobody in: choose a date in the future")
    public, secret = (half.decode() for half in zmq.curve_keypair())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    until = f"expires {expires}\n" if expires else ""
    _write(folder / f"{name}.key", f"public {public}\nsecret {secret}\n", 0o600)
    _write(folder / f"{name}.pub", f"public {public}\n{until}", 0o644)
    return folder / f"{name}.key", folder / f"{name}.pub"


def _write(path: Path, text: str, mode: int) -> None:
    """Write a new file."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def moment(text: str) -> float:
    """Return a day or a time in seconds since 1970. It is in UTC unless it names another zone.

    >>> moment("1970-01-02"), moment("1970-01-01T01:30+01:00")
    (86400.0, 1800.0)
    """
    try:
        given = datetime.fromisoformat(text)
        return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a date: write 2027-01-31, or 2027-01-31T12:00Z") from None


def read_pair(path: Path) -> Pair:
    """Read a `.key` file. Raise `ConfigError` if anybody but its owner can read it."""
    halves = {} if path.suffix == ".pub" else dict(_lines(path, read_secret))
    if not {"public", "secret"} <= halves.keys():
        raise ConfigError(f"{path} does not hold a pair of keys: make one with `symbiosis keygen NAME`")
    return Pair(halves["public"], halves["secret"])


def read_public(path: Path) -> str:
    """Return the first key of a `.pub` file."""
    return read_publics(path).keys[0]


def read_publics(path: Path) -> PublicKey:
    """Return all keys of a `.pub` file, and the earliest time at which it says that they expire."""
    lines = _lines(path, _read_public)
    if any(word == "secret" for word, _ in lines):
        raise ConfigError(
            f"{path} holds a secret key, which only its owner may have: give the .pub file here. If somebody else gave you this one, its "
            "owner needs new keys"
        )
    keys = tuple(dict.fromkeys(value for word, value in lines if word == "public"))
    if not keys:
        raise ConfigError(f"{path} does not hold a public key: give the .pub file that `symbiosis keygen NAME` made")
    try:
        return PublicKey(keys, min((moment(value) for word, value in lines if word == "expires"), default=inf))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_public(path: Path, longest: int) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > longest:
        raise ConfigError(f"cannot read the key file {path}: it is not a key file")
    return path.read_bytes()


def _lines(path: Path, read: Callable[[Path, int], bytes]) -> list[tuple[str, str]]:
    """Return the words and values of a key file. Return nothing if any line cannot be understood: it may be meant to say when the keys
    expire."""
    try:
        text = read(path, LONGEST_FILE).decode("ascii")
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the key file {path}: it is not a key file") from None
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    matches = [match for line in lines if (match := LINE.fullmatch(line))]
    understood = len(matches) == len(lines) and all(
        match[1] == "expires" or KEY.fullmatch(match[2]) for match in matches
    )
    return [(match[1], match[2]) for match in matches] if understood else []


def doubt(path: Path) -> str:
    """Return why another user may have written a file or put it there, or "" if only this user and root (and a group they chose) can have."""
    found = path.stat()
    if not is_trusted(found.st_uid):
        return f"{path} belongs to {user_name(found.st_uid)}, who could change it: chown it to {user_name(os.getuid())}"
    if found.st_mode & stat.S_IWOTH and not os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"everybody can write {path}: chmod o-w {path}"
    return why_replaceable(path, group=True) or ""


class _File(NamedTuple):
    """A tenant's file: its `state`, whether any later change would show in that (`settled`), and its key or what is wrong with it. A
    `linked` file has another name, through which it may change without a sign in its folder."""

    state: object
    settled: bool
    public: PublicKey = PublicKey(())
    problem: str = ""
    linked: bool = False


class Tenants:
    """The public keys in a folder, by tenant. `look` finds all changes, `glance` looks at some files at a time, however many there are,
    and `look_at` reads files that are known to have changed. While others can write the folder, or read the executor's own `secret`,
    nobody is let in."""

    def __init__(self, folder: Path, secret: Path | None = None) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: put the .pub file of each tenant into one")
        self.folder, self._secret = folder, secret
        if doubts := self._doubts():
            raise ConfigError("; ".join(doubts))
        self._files: dict[str, _File] = {}
        self._closed: list[str] = []  # the reasons why nobody is let in
        self._names: dict[str, str] = {}
        self.members: frozenset[str] = frozenset()  # the tenants that may come in
        self._seen: object = None
        self._next: Iterator[str] = iter(())  # the files that `glance` looks at next
        self._unsure: set[str] = set()  # the files it always looks at: recent ones, and links
        self._state: object = None  # of the folder when its files were listed; None if later changes may not show in it
        self._holds_until = 0.0  # when the next key expires
        self.expired: dict[str, str] = {}  # the tenant of each key that has expired
        self.problems: list[str] = []

    def look(self) -> bool:
        """Read all that has changed. Return whether anything has. A file that cannot be read now lets nobody in."""
        self._state = None
        return self._look_again(set(self._files))

    def glance(self, most: int) -> bool:
        """Look at some of the files, and return whether anything has changed: at those that are new, gone, recently changed or links,
        and at `most` of the others in turn."""
        names = set(islice(self._next, most))
        if len(names) < most:  # after each round list the folder, even if it seems unchanged
            self._state = None
            self._next = iter(list(self._files))
            names.update(islice(self._next, most - len(names)))
        return self._look_again(names)

    def _look_again(self, names: set[str]) -> bool:
        before, closed = self._files, self._closed
        self._closed = self._doubts()
        state = self._state_of_folder()
        if state is None or state != self._state:
            self._state = state
            names = names | self._unsure
            self._files = {
                name: self._read(name, before.get(name)) if name in names or name not in before else before[name]
                for name in self._listed()
            }
            self._unsure = {name for name, file in self._files.items() if file.linked or not file.settled}
        else:
            again = {name: self._read(name, before.get(name)) for name in names | self._unsure if name in before}
            self._files = before | again
            self._unsure = {name for name, file in again.items() if file.linked or not file.settled}
        if self._files == before and self._closed == closed and self._seen and time() < self._holds_until:
            return False
        self._sum_up()
        seen, self._seen = self._seen, (self._names, self.problems)
        return seen != self._seen

    def look_at(self, names: Iterable[str]) -> None:
        """Read files that have changed, and forget those that are gone."""
        for name in names:
            self._files.pop(name, None)
            if name.endswith(".pub") and os.path.lexists(self.folder / name):
                self._files[name] = self._read(name)
        self._sum_up()
        self._state, self._holds_until = None, 0.0  # so that the next look reports it
        self._unsure.update(names)

    def _state_of_folder(self) -> object:
        """Return a state that changes if files come or go, or None if that cannot be told now."""
        try:
            found = self.folder.stat()
        except OSError:
            return None
        settled = time() - max(found.st_mtime, found.st_ctime) > SETTLED_S
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev) if settled else None

    def _listed(self) -> list[str]:
        """Return the names of the key files. If no descriptor is left to list them with, return the earlier names: whether one was
        removed shows when it is looked at."""
        try:
            return [name for name in os.listdir(self.folder) if name.endswith(".pub")]  # noqa: PTH208
        except OSError as error:
            self._state = None
            if _no_descriptor(error):
                return list(self._files)
            self._closed.append(f"cannot read the folder of tenants {self.folder} ({error.strerror})")
            return []

    def _doubts(self) -> list[str]:
        """Return the reasons why others may have chosen who is let in, or could pass for this executor."""
        doubts = list[str | None]()
        with suppress(OSError):  # a missing folder shows when it is listed
            doubts.append(doubt(self.folder))
        if self._secret is not None:
            with suppress(OSError):  # it has been read before
                doubts += why_exposed(self._secret, self._secret.stat()), why_replaceable(self._secret)
        return list(filter(None, doubts))

    def _read(self, name: str, before: _File | None = None) -> _File:
        """Read a file if it has changed or may have. If no descriptor is left to read it with, return what it said before."""
        state: object = None
        settled = False
        try:
            found = os.stat(f"{self.folder}/{name}")  # noqa: PTH116  (of many files; a Path costs more than the call)
            state = found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
            if before is not None and before.settled and before.state == state:
                return before
            settled = time() - found.st_ctime > SETTLED_S
            linked = found.st_nlink > 1 or (self.folder / name).is_symlink()
            return _File(state, settled, self._public_in(self.folder / name), linked=linked)
        except OSError as error:
            return _File(state, settled, problem=f"cannot read the key file {self.folder / name}: {error}")
        except ConfigError as error:
            if _no_descriptor(error.__cause__) and before is not None and before.state == state:
                return before
            # unsettled: what is wrong may lie in the way to the file, whose own state does not show it
            return _File(state, False, problem=str(error))

    def _public_in(self, path: Path) -> PublicKey:
        if not NAME.fullmatch(path.stem):
            raise ConfigError(f"{str(path)!r} names no tenant: use letters, digits, '.', '_' and '-'")
        if why := doubt(path):
            raise ConfigError(why)
        return read_publics(path)

    def _sum_up(self) -> None:
        names: dict[str, str] = {}
        expired: dict[str, str] = {}
        problems = [f"{why}: nobody may come in until that is mended" for why in self._closed]
        now = time()
        for name, file in sorted(self._files.items()):
            tenant, public = name[:-4], file.public
            if file.problem:
                problems.append(file.problem)
            elif public.expires <= now:
                problems.append(f"{self.folder / name} has expired: {tenant} may not come in by it")
                expired |= dict.fromkeys(public.keys, tenant)
                continue
            for key in public.keys:
                if names.setdefault(key, tenant) != tenant:
                    problems.append(
                        f"{self.folder / name} holds the key of {names[key]}, too: who has it goes by that name"
                    )
        self._holds_until = min(
            (end for file in self._files.values() if (end := file.public.expires) > now), default=inf
        )
        self._names, self.expired, self.problems = ({} if self._closed else names), expired, problems
        if (members := frozenset(self._names.values())) != self.members:
            self.members = members

    def name_of(self, public: str) -> str | None:
        """Return the tenant with this key, or None for an unknown key."""
        return self._names.get(public)

    def why_not(self, tenant: str) -> str:
        """Return why a tenant that was let in before is not let in now."""
        if self._closed:
            return "nobody may come in"
        if tenant in self.expired.values():
            return "expired"
        return "unreadable" if f"{tenant}.pub" in self._files else "removed"

    def __len__(self) -> int:
        return len(self.members)


def _no_descriptor(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class Keyring(NamedTuple):
    """An executor's own key, and those of its tenants."""

    own: Pair
    tenants: Tenants

    @classmethod
    def open(cls, key: str, tenants: str) -> "Keyring":
        return cls(read_pair(Path(key)), Tenants(Path(tenants), Path(key)))
