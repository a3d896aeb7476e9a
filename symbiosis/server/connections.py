"""Connections: uvicorn's protocol, with the bounds that it leaves to others.

h11 bounds what is not whole yet, and reads one request at a time; the kernel hangs up on who takes nothing of an answer (`STALL_S`). What is left to
do here: a head that comes at once is bounded, too (`MOST_HEAD`), and comes in time, only so many connections wait for one, and what is no request is
counted.
"""

import resource
import socket
import sys
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from symbiosis.server.api_errors import ApiError
from symbiosis.server.observer import Observer
from symbiosis.server.request_record import RequestRecord

HEAD_S = 20  # from a connection's beginning, or its last answer, to the end of the next request's head
STALL_S = 120.0  # a reader that takes nothing for so long is hung up on
MOST_HEAD = 32 << 10  # bytes of a head, and of what follows a body in chunks
MOST_WAITING = 4096  # connections on which no request is under way
COUNT = b"x-symbiosis-tokens"  # a header with which a front end asks what an answer takes, and a server tells it
NO_REQUEST = "this is no HTTP request"
TOO_LONG = f"the head of a request has at most {MOST_HEAD} bytes, and so has what follows a body"


class HttpConnection(H11Protocol):
    """One connection. While no request is under way it is one of those that `wait`, of which the oldest gives way to a new one."""

    waiting: dict["HttpConnection", None] = {}  # of this process, the oldest first  # noqa: RUF012
    most_waiting = MOST_WAITING
    observer: Observer | None = None  # likewise

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.app_state = {**self.app_state, "connection": self}
        self._unread = b""  # what has come, and h11 has not been given

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._unset_keepalive_if_required()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Read on. Unlike uvicorn's, the time for a head goes on while parts of it come."""
        self._unread += data
        self._read_on()

    def _read_on(self) -> None:
        """Give h11 what has come, so much at a time that it has no more than a head may be."""
        while self._unread and not self.transport.is_closing():
            room = MOST_HEAD - len(self.conn.trailing_data[0])
            if room <= 0:  # of a request that waits for an answer to the one before
                break
            piece, self._unread = self._unread[:room], self._unread[room:]
            self.conn.receive_data(piece)
            self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._read_on()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        self.waiting.pop(self, None)
        self.waiting[self] = None
        if len(self.waiting) > self.most_waiting:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            oldest.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, as uvicorn asks for while it handles h11's error; what is wrong later ends the connection."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        error = ApiError(status, TOO_LONG if status == 431 else NO_REQUEST)
        record = RequestRecord()
        record.refuse(status, error.reason, str(error))
        if self.observer is not None:
            self.observer.tell(record, client=self.client[0] if self.client else "")
        if self.cycle is None or self.cycle.response_complete:
            body = bytes(error.response().body)
            head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(head % (status, STATUS_PHRASES[status], record.id.encode(), len(body)) + body)
        self.transport.close()

    # ------------------------------------------------------------------ pieces of an answer that need not wait

    @property
    def takes_pieces(self) -> bool:
        """Whether the answer under way goes in chunks, is not over, and is taken."""
        cycle, is_chunked = self.cycle, self.scope["http_version"] == "1.1"
        return is_chunked and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)

    def send_piece(self, body: bytes) -> None:
        """Send a piece of a chunked answer, past the layers of the application."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def send_count(self, tokens: int) -> None:
        """Tell how many tokens an answer takes by now, in an informational response, before its head."""
        if self.cycle is not None and not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 102 Processing\r\n%b: %d\r\n\r\n" % (COUNT, tokens))


def server_of(app: ASGIApp, observer: Observer, listeners: list[socket.socket], graceful_s: float) -> uvicorn.Server:
    """Return the server for these listeners, with as many connections as this process may have. Those that wait get half of them at most."""
    for listener in listeners:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if limit != resource.RLIM_INFINITY:
        HttpConnection.most_waiting = min(MOST_WAITING, limit // 2)
    HttpConnection.observer = observer
    config = uvicorn.Config(
        app, http=HttpConnection, interface="asgi3", ws="none", lifespan="off", log_config=None, log_level="error", access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=HEAD_S, h11_max_incomplete_event_size=MOST_HEAD - 1, timeout_graceful_shutdown=int(graceful_s),
    )  # fmt: skip
    return uvicorn.Server(config)
