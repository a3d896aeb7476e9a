"""Checks whose a folder, a file or a socket is. In a shared place like /tmp, another user may have come first."""

import grp
import os
import pwd
import socket
import stat
import struct
from functools import cache
from pathlib import Path

from symbiosis.errors import CallError, Code, ConfigError

ROOT = 0
WRITABLE = stat.S_IWGRP | stat.S_IWOTH  # by others than the owner
MOST_LINKS = 40  # on the way to a folder, as the kernel has it


def is_trusted(uid: int) -> bool:
    """Whether this user's files and processes are trusted: those of this process's own user, and root's."""
    return uid in (os.getuid(), ROOT)


def is_ours(path: Path) -> bool:
    """Whether a file, or a link itself, belongs to this user or to root."""
    return is_trusted(path.lstat().st_uid)


def why_not_ours(folder: Path, shared: bool = False) -> str | None:
    """Return why another user may have put what is in `folder`, or may replace it or a folder on the way to it. Return None if none can, or
    if it is not there yet. With `shared`, which is for sockets (who answers there is asked of the kernel), it may be a folder like /tmp, where
    others may add files and replace none of ours, and lie in one that others may write to.

    >>> why_not_ours(Path("/"))
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return _way_to(folder, shared)[1]
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is a link, where a folder should be" if stat.S_ISLNK(found.st_mode) else "is not a folder"
    if not is_trusted(found.st_uid):
        return f"belongs to {user_name(found.st_uid)}"
    if found.st_mode & WRITABLE and not (shared and found.st_uid == ROOT and found.st_mode & stat.S_ISVTX):
        return f"can be written by others (its mode is {stat.S_IMODE(found.st_mode):04o})"
    return _way_to(folder, shared)[1]


def resolved(path: Path) -> Path:
    """Return where a path leads that the user has named for a socket. Raise `ConfigError` if it leads over a link or a folder of another
    user's."""
    place, why = _way_to(path, shared=True)
    if why:
        raise ConfigError(f"{path} {why}: nothing there can be trusted. Name another place")
    return place


def why_replaceable(path: Path, group: bool = False) -> str | None:
    """Return why another user may put another file at `path`, with what to do, or None if none can. With `group`, one that may write to a
    folder is trusted.

    >>> why_replaceable(Path("/etc/passwd"))
    """
    why = _way_to(path, False, group)[1]
    return why and f"{path} {why}: nothing there can be trusted. Name a file that only this user and root can replace"


def _way_to(path: Path, shared: bool, group: bool = False) -> tuple[Path, str | None]:
    """Follow a path from the root on. Return where it leads, and why another user may have it lead elsewhere, or None if none can. With
    `shared`, what others may write to will do, and what they own will not; with `group`, what any group may write to."""
    here, left, links = Path("/"), _steps(path.absolute()), 0
    while left:
        step = here / left.pop()
        try:
            if why := _why_replaceable(here, shared, group):
                return here, f"lies in {here}, which {why}"
            found = step.lstat() if step.name != ".." else None
        except FileNotFoundError:
            return step.joinpath(*reversed(left)), None
        except OSError as error:
            return here, f"lies in {here}, which cannot be looked at ({error.strerror})"
        if found is None:
            here = here.parent
        elif not stat.S_ISLNK(found.st_mode):
            here = step
        elif not _may_lead(found.st_uid):
            return step, f"leads over the link {step}, which belongs to {user_name(found.st_uid)}"
        elif (links := links + 1) > MOST_LINKS:
            return step, f"leads over the link {step} again and again"
        else:
            target = step.readlink()
            here = Path("/") if target.is_absolute() else here
            left += _steps(target)
    return here, None


def _steps(path: Path) -> list[str]:
    """Return the names in a path, the first one last."""
    return [part for part in reversed(path.parts) if part != "/"]


def _why_replaceable(folder: Path, shared: bool, group: bool) -> str | None:
    """Return why another user could replace what this user has in a folder, or None if none could."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if not _may_lead(found.st_uid):
        return f"belongs to {user_name(found.st_uid)}"
    is_closed = not found.st_mode & stat.S_IWOTH and (group or not found.st_mode & stat.S_IWGRP or _is_chosen(found))
    if is_closed or shared or found.st_mode & stat.S_ISVTX:  # as /tmp: there nobody replaces what is another's
        return None
    if os.statvfs(folder).f_flag & os.ST_RDONLY:  # as Kubernetes mounts a ConfigMap, with mode 0777
        return None
    return f"can be written by others (its mode is {stat.S_IMODE(found.st_mode):04o}; chmod +t would do)"


def _may_lead(uid: int) -> bool:
    return is_trusted(uid) or uid == _root_from_within()


@cache
def _root_from_within() -> int | None:
    """Return as whose root's files appear in a user namespace that does not have root, as containers without privileges do."""
    try:
        spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(int(first) <= ROOT < int(first) + int(count) for first, _, count in spans):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _is_chosen(found: os.stat_result) -> bool:
    """Whether the group that may write to a folder is this user's alone, as many systems make one for each user, who then shares nothing by
    a umask of 002; or root lets this process write to its folder by that group, as Kubernetes does with `fsGroup`."""
    if os.getuid() == ROOT:
        return False
    if found.st_uid == ROOT:
        return found.st_gid in (os.getegid(), *os.getgroups())
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return (me.pw_gid, me.pw_name) == (found.st_gid, group.gr_name) and {*group.gr_mem} <= {me.pw_name}


def make_folder(folder: Path, shared: bool = False, otherwise: str = "") -> None:
    """Make a folder that only this user may enter, and those on the way to it, or use an existing one. Raise `ConfigError` if others may
    write there, or `otherwise` says what to do then."""
    check_folder(folder, shared, otherwise)
    try:
        for each in (*reversed(folder.parents), folder):
            each.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        hint = f". {otherwise}" if otherwise else ""
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}{hint}") from None
    check_folder(folder, shared, otherwise)


def check_folder(folder: Path, shared: bool = False, otherwise: str = "") -> None:
    """Raise `ConfigError` if another user may have put what is in `folder`. `otherwise` says what else the user can do."""
    if reason := why_not_ours(folder, shared):
        raise ConfigError(
            f"{folder} {reason}: nothing in it can be trusted. Have it removed (or chmod go-w), or "
            + (otherwise or "name another folder")
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
