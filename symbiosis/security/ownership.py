"""Checks whose a folder, a file or a socket is. In a shared place like /tmp, another user may have come first."""

import os
import pwd
import socket
import stat
import struct
from pathlib import Path

from symbiosis.errors import CallError, Code, ConfigError

ROOT = 0


def is_trusted(uid: int) -> bool:
    """Whether this user's files and processes are trusted: those of this process's own user, and root's."""
    return uid in (os.getuid(), ROOT)


def is_ours(path: Path) -> bool:
    """Whether a file, or a link itself, belongs to this user or to root."""
    return is_trusted(path.lstat().st_uid)


def why_not_ours(folder: Path) -> str | None:
    """Return why another user may have put what is in `folder`, or None if none can have, or if there is no such folder.

    >>> why_not_ours(Path("/"))
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is a link, where a folder should be" if stat.S_ISLNK(found.st_mode) else "is not a folder"
    if not is_trusted(found.st_uid):
        return f"belongs to {user_name(found.st_uid)}"
    sticky = found.st_uid == ROOT and found.st_mode & stat.S_ISVTX  # as /tmp: there nobody replaces what is ours
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return f"can be written by others (its mode is {stat.S_IMODE(found.st_mode):04o})"
    return None


def make_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, or use an existing one. Raise `ConfigError` if others may write there."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if another user may have put what is in `folder`."""
    if reason := why_not_ours(folder):
        raise ConfigError(
            f"{folder} {reason}: nothing in it can be trusted. Have it removed (or chmod go-w), or choose another folder: "
            "$XDG_RUNTIME_DIR for the default endpoint, --listen local://FOLDER/executor.sock for any other"
        )


def check_socket(path: Path) -> None:
    """Raise `ConfigError` if there is anything at `path` but a socket that a dead executor left behind."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{path} exists and is not a socket: choose another path for local://")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        if probe.connect_ex(str(path)) == 0:
            whose = user_name(peer_uid(probe))
            raise ConfigError(
                f"another executor already serves local://{path} ({whose}): stop it, or choose another path"
            )


def peer_uid(sock: socket.socket) -> int:
    """Return the user at the other end of a Unix socket, as the kernel knows it."""
    return _credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """Return the process at the other end of a Unix socket, as the kernel knows it."""
    return _credentials(sock)[0]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))


def check_server(sock: socket.socket, url: str) -> None:
    """Raise `CallError` if another user's process answers at the socket. Call it before anything is sent."""
    if not is_trusted(uid := peer_uid(sock)):
        raise CallError(
            Code.NOT_ALLOWED,
            f"{url} is served by {user_name(uid)}, not by {user_name(os.getuid())}: it would see all that this program sends. Start "
            "an executor of your own (symbiosis-executor MODEL), or name another endpoint; among users, tcp:// with keys",
        )


def user_name(uid: int) -> str:
    """Return a user's name and number, for messages."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
