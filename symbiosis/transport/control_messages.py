"""Control messages over a Unix socket, and the descriptors that come with them."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TypeVar

from symbiosis.base import ownership
from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import MAX_CONTROL, Bye, Control, Refusal, Welcome, decode_from_executor, encode_control

MOST_AT_ONCE = 253  # descriptors to make room for: as many as the kernel allows, so that it closes none itself
Said = TypeVar("Said", bound=Control)


def connected(path: str, timeout: float) -> socket.socket:
    """Connect to the process that serves at `path`. Raise `CallError`, before anything is sent, unless it is this user's or root's."""
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
    """Yield the next message, or `Bye` if the other side is gone, and at most `most` descriptors. Those still in the list after the
    block are closed."""
    try:
        raw, fds, flags, _ = socket.recv_fds(sock, MAX_CONTROL, MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it left without reading our message; its own message can still be read
        raw, fds, flags, _ = socket.recv_fds(sock, MAX_CONTROL, MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC or len(fds) > most:
            raise ProtocolError(Code.BAD_FRAME, f"more than {most} descriptors came with a message, or more than fit")
        yield decode(raw) if raw else Bye(), fds
    finally:
        if fds:
            _close(fds)


def _close(fds: list[int]) -> None:
    """Close descriptors: memory and bells at once, others in a thread of their own, because closing, say, a socket that lingers may
    take as long as its owner wants."""
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
    """Send what a client asked for, or raise `CallError` if it does not read its answers."""
    try:
        socket.send_fds(sock, [encode_control(message)], fds)
    except BlockingIOError:
        raise CallError(
            Code.LIMIT, "too many unread answers: read pending replies before sending another message"
        ) from None


def let_in(sock: socket.socket, message: Control, welcome: Welcome, fds: Sequence[int]) -> None:
    """Send `message` with the welcome as a memory file, because a manifest may be larger than a socket's buffer."""
    letter = os.memfd_create("symbiosis-welcome", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(letter), "wb") as file:
            file.write(encode_control(welcome))
        answer(sock, message, [letter, *fds])
    finally:
        os.close(letter)


def tell_refusal(sock: socket.socket, error: Exception) -> None:
    """Tell a client why it is refused, if it is still there."""
    with suppress(OSError):
        sock.send(encode_control(Refusal.of(error)))


def send(sock: socket.socket, message: Control, fds: Sequence[int] = ()) -> None:
    """Send a client's message. If the executor has hung up, raise the refusal that it sent before."""
    try:
        socket.send_fds(sock, [encode_control(message)], fds)
    except (BrokenPipeError, ConnectionResetError):
        with suppress(OSError), received(sock, decode_from_executor) as (answer, _):
            if isinstance(answer, Refusal):
                raise answer.error() from None
        raise
