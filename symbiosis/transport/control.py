"""Control messages over a Unix socket, and the descriptors that come with them."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from symbiosis import ownership
from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import Bye, Control, Refusal, decode_control, encode_control

MAX_CONTROL = 1 << 14  # bytes of a message


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
def received(sock: socket.socket, most: int = 1) -> Iterator[tuple[Control, list[int]]]:
    """The next message, `Bye` if the other side is gone, and at most so many descriptors. They are closed after the block, but for
    those that are taken out of the list."""
    try:
        raw, fds, flags, _ = socket.recv_fds(sock, MAX_CONTROL, most, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it left before it read what we said; what it said comes behind
        raw, fds, flags, _ = socket.recv_fds(sock, MAX_CONTROL, most, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(Code.BAD_FRAME, f"more than {most} descriptors came with a message, or more than fit")
        yield decode_control(raw) if raw else Bye(), fds
    finally:
        for fd in fds:
            os.close(fd)


def answer(sock: socket.socket, message: Control, fds: Sequence[int] = ()) -> None:
    """What a client asked for; `CallError` if it does not read that."""
    try:
        socket.send_fds(sock, [encode_control(message)], fds)
    except BlockingIOError:
        raise CallError(Code.LIMIT, "a client reads the answers to its messages before it sends more") from None


def refuse(sock: socket.socket, error: Exception) -> None:
    """Tell a client, if it is still there."""
    code = error.code if isinstance(error, CallError) else Code.RESOURCE
    with suppress(OSError):
        sock.send(encode_control(Refusal(code, getattr(error, "message", str(error)))))


def send(sock: socket.socket, message: Control, fds: Sequence[int] = ()) -> None:
    """A client's message; where the executor has hung up, what it said before is raised."""
    try:
        socket.send_fds(sock, [encode_control(message)], fds)
    except (BrokenPipeError, ConnectionResetError):
        with suppress(OSError), received(sock) as (answer, _):
            if isinstance(answer, Refusal):
                raise answer.error() from None
        raise
