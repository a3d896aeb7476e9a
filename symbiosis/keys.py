"""Who is who over `tcp://`: a pair of CURVE keys for each executor and each tenant, as files.

`NAME.key` holds both halves and is for its owner's eyes only (mode 0600); `NAME.pub` holds the public half, to be given away.
An executor lets in whose `.pub` file lies in its folder of tenants; the file's name is the tenant's.
"""

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from symbiosis.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LINE = re.compile(r"(public|secret) (\S{40})")  # Z85, as ZeroMQ writes keys


class Pair(NamedTuple):
    """Both halves of somebody's key."""

    public: str
    secret: str


def generate(name: str, folder: Path) -> tuple[Path, Path]:
    """New keys in `folder`: the paths of `NAME.key` and `NAME.pub`. Files that are there already stay as they are.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> secret, public = generate("alice", folder)
    >>> read_pair(secret).public == read_public(public)
    True
    """
    import zmq

    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a key: use letters, digits, '.', '_' and '-'")
    public, secret = (half.decode() for half in zmq.curve_keypair())
    paths = folder / f"{name}.key", folder / f"{name}.pub"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    for path, text, mode in zip(paths, (f"public {public}\nsecret {secret}\n", f"public {public}\n"), (0o600, 0o644), strict=True):  # fmt: skip
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        with os.fdopen(file, "w") as opened:
            opened.write(text)
    return paths


def read_pair(path: Path) -> Pair:
    """Of a `.key` file that nobody but its owner can read."""
    halves = _halves(path)
    if "secret" not in halves or "public" not in halves:
        raise ConfigError(f"{path} holds no pair of keys: make one with `symbiosis keygen NAME`")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} holds a secret that others can read: chmod 600 {path}")
    return Pair(halves["public"], halves["secret"])


def read_public(path: Path) -> str:
    """Of a `.pub` (or a `.key`) file."""
    halves = _halves(path)
    if "public" not in halves:
        raise ConfigError(f"{path} holds no public key: give the .pub file that `symbiosis keygen NAME` made")
    return halves["public"]


def _halves(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the key file {path}: {error}") from None
    found = [LINE.fullmatch(line.strip()) for line in lines if line.strip()]
    return {match[1]: match[2] for match in found if match}


class Tenants:
    """The public keys in a folder, by tenant. `look` reads what has changed in it."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder: put the .pub file of each tenant into one")
        self._folder = folder
        self._files: list[Path] = []
        self._keys: dict[Path, tuple[object, str]] = {}  # what was read of each file, and which state of it that was
        self._seen: object = None
        self._names: dict[str, str] = {}
        self.problems: list[str] = []

    def look(self) -> bool:
        """Whether something has changed since the last look. Nobody comes in by a file that cannot be read now."""
        names: dict[str, str] = {}
        problems: list[str] = []
        for path in self._listed(problems):
            try:
                public = self._key_in(path)
            except ConfigError as error:
                problems.append(str(error))
                continue
            if public in names:
                problems.append(f"{path} holds the key of {names[public]}, too: who has it goes by that name")
            names.setdefault(public, path.stem)
        seen, self._seen = self._seen, (names, problems)
        self._names, self.problems = names, problems
        return seen != self._seen

    def _listed(self, problems: list[str]) -> list[Path]:
        """The files of keys. While no descriptor is left to list them with, those of before: whether one was removed can be told
        without."""
        try:
            self._files = sorted(path for path in self._folder.iterdir() if path.suffix == ".pub")
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return self._files
            self._files = []
            problems.append(
                f"cannot read the folder of tenants {self._folder} ({error.strerror}): nobody may come in until it is back"
            )
        return self._files

    def _key_in(self, path: Path) -> str:
        """Read anew when the file has changed."""
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f"cannot read the key file {path}: {error}") from None
        state = stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
        if self._keys.get(path, (None, ""))[0] != state:
            self._keys[path] = state, read_public(path)
        return self._keys[path][1]

    def name_of(self, public: str) -> str | None:
        """The tenant with this key; None for a stranger."""
        return self._names.get(public)

    def __len__(self) -> int:
        return len(self._names)


class Keyring(NamedTuple):
    """What an executor needs to tell its tenants from strangers: its own key, and theirs."""

    own: Pair
    tenants: Tenants

    @classmethod
    def open(cls, key: str, tenants: str) -> "Keyring":
        return cls(read_pair(Path(key)), Tenants(Path(tenants)))
