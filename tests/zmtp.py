"""ZMTP by hand, without encryption: what no ZeroMQ would send."""

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from symbiosis.protocol import Control, Hello, encode_control
from tests.realm import WAIT_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)


class Stream:
    """A client."""

    READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self._seen = b""
        self.socket.sendall(GREETING)
        self._wait_for(b"NULL")
        self.socket.sendall(struct.pack("BB", 4, len(self.READY)) + self.READY)
        self._wait_for(b"Identity")

    def _wait_for(self, text: bytes) -> None:
        while text not in self._seen:
            more = self.socket.recv(1 << 16)
            assert more, f"hung up after {self._seen!r}"
            self._seen += more

    def say(self, *messages: Control) -> "Stream":
        """Each in a frame of its own, all at once."""
        self.socket.sendall(b"".join(struct.pack("BB", 0, len(raw)) + raw for raw in map(encode_control, messages)))
        return self

    def join(self) -> "Stream":
        self.say(Hello(client="stream"))
        self._wait_for(b"welcome")
        return self

    def send_empty_frames(self, count: int) -> None:
        """A message of so many, which takes two bytes for each."""
        self.socket.sendall(b"\x01\x00" * (count - 1) + b"\x00\x00")

    @property
    def was_hung_up_on(self) -> bool:
        """Whether that has been noticed by now; what has come until then is forgotten."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.socket.close()

    def send_until_hung_up(self, most: int) -> int:
        """Frames of 100 bytes, each of which promises another; how many bytes went out before the other side said goodbye."""
        block = (struct.pack("BB", 1, 100) + bytes(100)) * 640
        sent, poll = 0, select.poll()
        poll.register(self.socket, select.POLLOUT | select.POLLRDHUP)
        self.socket.setblocking(False)
        with suppress(ConnectionError):
            while sent < most and poll.poll(1000 * WAIT_S) == [(self.socket.fileno(), select.POLLOUT)]:
                sent += self.socket.send(block[sent % len(block) :])
        self.socket.settimeout(WAIT_S)
        with self.socket, suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return sent


@contextmanager
def answering(raw: bytes, endless: bytes = b"", sent: list[int] | None = None) -> Iterator[str]:
    """An endpoint where whatever a client says is answered by these bytes, and then by the `endless` ones again and again; how many of
    them were `sent` until the client hung up."""
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity" + bytes(4)

    def run() -> None:
        with suppress(OSError):
            sock, _ = listening.accept()
            with sock:
                sock.sendall(GREETING + struct.pack("BB", 4, len(ready)) + ready)
                while b"hello" not in sock.recv(1 << 16):
                    pass
                sock.sendall(raw)
                while endless and sent is not None:
                    sent.append(sock.send(endless))
                while sock.recv(1 << 16):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    thread.join(WAIT_S)
