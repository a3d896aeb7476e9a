"""Control messages over a Unix socket, and the descriptors that come with them."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TypeVar

from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import MAX_CONTROL, Bye, Control, Refusal, Welcome, decode_from_executor, encode_control
from symbiosis.security import ownership

MOST_AT_ONCE = 253  # descriptors that come with a message: what the kernel allows, so that it closes none itself
Said = TypeVar("Said", bound=Control)


def connected(path: str, timeout: float) -> socket.socket:
    """To who serves there, if that is this user or root. `CallError` if it is another one, to whom nothing was sent."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout)
    try:
        sock.connect(path)
        ownership.check_server(sock, f"local://{path}")
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def received(
    sock: socket.socket, decode: Callable[[bytes], Said], most: int = 1
) -> Iterator[tuple[Said | Bye, list[int]]]:
    """The next message, `Bye` if the other side is gone, and at most so many descriptors. They are closed after the block, but for
    those that are taken out of the list."""
    try:
        raw, fds, flags, _ = socket.recv_fds(sock, MAX_CONTROL, MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it left before it read what we said; what it said comes behind
        raw, fds, flags, _ = socket.recv_fds(sock, MAX_CONTROL, MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC or len(fds) > most:
            raise ProtocolError(Code.BAD_FRAME, f"more than {most} descriptors came with a message, or more than fit")
        yield decode(raw) if raw else Bye(), fds
    finally:
        if fds:
            _close(fds)


def _close(fds: list[int]) -> None:
    """Memory and bells at once; all else in a thread of its own: a socket, say, that lingers is closed when its owner wants."""
    kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]  # noqa: PTH115
    quick = all(kind.startswith(("/memfd:", "anon_inode:")) for kind in kinds)
    if quick:
        _close_all(fds)
    else:
        Thread(target=_close_all, args=(list(fds),), daemon=True).start()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def answer(sock: socket.socket, message: Control, fds: Sequence[int] = ()) -> None:
    """What a client asked for; `CallError` if it does not read that."""
    try:
        socket.send_fds(sock, [encode_control(message)], fds)
    except BlockingIOError:
        raise CallError(
            Code.LIMIT, "too many unread answers: read pending replies before sending another message"
        ) from None


def let_in(sock: socket.socket, message: Control, welcome: Welcome, fds: Sequence[int]) -> None:
    """`message`, and behind it the welcome: in memory, since a manifest may be larger than a socket's buffer."""
    letter = os.memfd_create("symbiosis-welcome", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(letter), "wb") as file:
            file.write(encode_control(welcome))
        answer(sock, message, [letter, *fds])
    finally:
        os.close(letter)


def tell_refusal(sock: socket.socket, error: Exception) -> None:
    """Tell a client, if it is still there."""
    with suppress(OSError):
        sock.send(encode_control(Refusal.of(error)))


def send(sock: socket.socket, message: Control, fds: Sequence[int] = ()) -> None:
    """A client's message; where the executor has hung up, what it said before is raised."""
    try:
        socket.send_fds(sock, [encode_control(message)], fds)
    except (BrokenPipeError, ConnectionResetError):
        with suppress(OSError), received(sock, decode_from_executor) as (answer, _):
            if isinstance(answer, Refusal):
                raise answer.error() from None
        raise
