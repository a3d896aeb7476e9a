"""Connections: what a client may send, and have a process hold for it, before anybody knows who it is."""

import resource
from collections import defaultdict
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from symbiosis.server.api_errors import ApiError
from symbiosis.server.observer import Observer
from symbiosis.server.request_record import record_of

HEAD_S = 20.0  # a connection that has not sent the head of a request by then is closed
STALL_S = 120.0  # a reader that takes nothing for so long is hung up on
SLOWEST = 16 << 10  # bytes per second at which what is left of an answer is taken
MOST_HEAD, MOST_LINES = 32 << 10, 128  # bytes of a head and of what follows a body in chunks, and lines of both
TOO_LONG = f"the head of a request has at most {MOST_HEAD} bytes, and so has what follows a body"
FRAMING = b"content-length", b"transfer-encoding"  # what only a request with a body has
MOST_EARLY = 1 << 20  # bytes that come before they may, and are not looked at
MOST_STRANGERS, MOST_OF_AN_ADDRESS = 4096, 2048  # connections whose clients are not known
TOO_MANY = "too many connections have asked nothing yet, or shown no key: try again, or open fewer at once"


class UnauthenticatedConnections:
    """The connections on which nobody has shown a key since their last request began, by address. When there are too many, the one that has
    been there longest is hung up on, of the address that has most: clients that say at once who they are never wait for others.

    Args:
        most: In all.
        of_an_address: Of one.
    """

    def __init__(self, most: int = MOST_STRANGERS, of_an_address: int = MOST_OF_AN_ADDRESS) -> None:
        self._most, self._of_an_address = most, of_an_address
        self._by_address: defaultdict[str, dict[HttpConnection, None]] = defaultdict(
            dict
        )  # in the order of their coming
        self._count = 0

    def come(self, connection: "HttpConnection") -> None:
        """Count a connection, as the one that came last."""
        self.leave(connection)
        there = self._by_address[connection.address]
        there[connection] = None
        self._count += 1
        if len(there) > self._of_an_address:
            self._hang_up(there)
        elif self._count > self._most:
            self._hang_up(max(self._by_address.values(), key=len))

    def leave(self, connection: "HttpConnection") -> None:
        """The connection has ended, or its client is known."""
        there = self._by_address.get(connection.address, {})
        if connection in there:
            del there[connection]
            self._count -= 1
            if not there:
                del self._by_address[connection.address]

    def _hang_up(self, there: "dict[HttpConnection, None]") -> None:
        oldest = next(iter(there))
        self.leave(oldest)
        oldest.turn_away()


class _Refused(Exception):
    """The parser is to read no further."""


class _Answering:
    """A connection as what answers a request sees it: to close it waits for the rest of the request's body."""

    def __init__(self, connection: "HttpConnection") -> None:
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing
        self.close = connection.end


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol, with bounds.

    One request is under way at a time. uvicorn reads all that have come, and each costs a hundred times its bytes. Here a client that sends the
    next request before it has taken the answer is not listened to any more, and hung up on after that answer, as RFC 9112 (9.3.2) lets a
    server do. A head is short, and has few lines. A client that asks nothing, or does not take its answer, is hung up on. Of those that
    have not shown who they are (`known`) there are only so many. A client that is answered while it sends may send on for a while, because
    the kernel throws away an answer when a connection closes on bytes that nobody has read.
    """

    strangers = UnauthenticatedConnections()  # of this process
    observer: Observer | None = None  # likewise

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.address = ""
        self._is_head = self._is_body = self._is_deaf = self._has_ended = False
        self._lines = self._in_lines = self._early = 0
        self._head = 0  # bytes that were no body, since a body or a request began or ended
        self._taken_by: float | None = None  # what is left of an answer, else it is hung up on

    # ------------------------------------------------------------------ what asyncio calls

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._look_later = self.loop.call_later(HEAD_S, self._look)
        self.strangers.come(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.strangers.leave(self)
        self._look_later.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for begin in range(0, len(data), MOST_HEAD):
            if self._is_deaf:
                self._ignore(len(data) - begin)
                return
            piece = data[begin : begin + MOST_HEAD]
            self._head += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:  # which it does not get: the next request is HTTP, too
                if upgrade.args[0] < len(piece):
                    self._stop_reading()  # it has come too early
            except httptools.HttpParserError:
                self._refuse(400, "this is no HTTP request")
            if self._head > MOST_HEAD:
                self._refuse(431, TOO_LONG)

    # ------------------------------------------------------------------ pieces of an answer that need not wait

    @property
    def takes_pieces(self) -> bool:
        """Whether the answer under way has begun, is not over, has no stated length, and is taken."""
        cycle = self.cycle
        return bool(
            cycle.chunked_encoding and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)
        )

    def send_piece(self, body: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    # ------------------------------------------------------------------ what the parser calls

    def on_message_begin(self) -> None:
        if self.cycle is not None and (not self.cycle.response_complete or self.transport.get_write_buffer_size()):
            self._stop_reading()
            raise _Refused
        if self.transport.is_closing():
            raise _Refused
        super().on_message_begin()
        self._is_body = True
        self._is_head, self._lines, self._in_lines, self._taken_by = True, 0, 0, None
        self.scope["symbiosis.connection"] = self  # type: ignore[typeddict-unknown-key]
        self.strangers.come(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        self._in_lines += len(name) + len(value)
        if self._lines > MOST_LINES:
            self._refuse(431, f"a request has at most {MOST_LINES} lines beside its body")
            raise _Refused
        if self._in_lines > MOST_HEAD:  # though it has come in one piece with its end
            self._refuse(431, TOO_LONG)
            raise _Refused
        if self._is_head:  # and not what follows a body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and any(name in FRAMING for name, _ in self.headers):
            self._refuse(400, "a request that has a body cannot ask for another protocol: send it without Upgrade")
            raise _Refused  # the parser would take the body for the next request
        self._is_head = False
        super().on_headers_complete()
        self.cycle.transport = _Answering(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head, self._is_body = 0, False
        super().on_message_complete()
        if self._has_ended:
            self.transport.close()

    # ------------------------------------------------------------------ hanging up

    def end(self) -> None:
        """Hang up: after an answer to a request whose body still comes, when that has come, or no more of it for some seconds, or at the
        second look from now."""
        if self._is_body and not self.transport.is_closing():
            self._has_ended = True
            self.transport.write_eof()
        else:
            self.transport.close()

    def turn_away(self) -> None:
        """Hang up now, to make room for others. A client that has nothing to take yet is told why."""
        if not self.transport.get_write_buffer_size():
            self._refuse(503, TOO_MANY, reason="too_many_connections")
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, status: int, message: str, reason: str = "") -> None:
        """Answer a head that nothing can be made of. What is wrong after it ends the connection."""
        if self._is_deaf:
            return
        self._is_deaf = True
        record, error = record_of(self.headers or ()), ApiError(status, message, reason=reason)
        record.refuse(status, error.reason, message)
        if self.observer is not None:
            self.observer.tell(record, client=self.address)
        if self._is_head or self.cycle is None or not self.cycle.response_started:
            body = bytes(error.response().body)
            head = (
                b"content-type: application/json\r\nx-request-id: %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            head %= record.id.encode(), len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _stop_reading(self) -> None:
        """Hang up when what is under way is answered."""
        self._is_deaf = True
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self.transport.close()

    def _ignore(self, size: int) -> None:
        self._early += size
        if self._early > MOST_EARLY:
            self.transport.abort()

    def _look(self, before: Any = None) -> None:
        """Hang up on a client that has asked nothing since the last look, when `before` had been asked, or that does not take what is left of
        an answer."""
        is_answered = self.cycle is None or self.cycle.response_complete
        left = self.transport.get_write_buffer_size()
        if left and (is_answered or self.transport.is_closing()):
            self._taken_by = self._taken_by or self.loop.time() + STALL_S - HEAD_S + left / SLOWEST
            if self.loop.time() >= self._taken_by:
                self.transport.abort()
        elif is_answered and self.cycle is before:
            self.transport.close()
        self._look_later = self.loop.call_later(HEAD_S, self._look, self.cycle)


def take_all_descriptors() -> None:
    """Let this process have as many connections as it may. Strangers get half of them at most."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if limit != resource.RLIM_INFINITY:
        HttpConnection.strangers = UnauthenticatedConnections(
            min(MOST_STRANGERS, limit // 2), min(MOST_OF_AN_ADDRESS, limit // 2)
        )


def connection_of(scope: Scope) -> HttpConnection | None:
    found: HttpConnection | None = scope.get("symbiosis.connection")
    return found


def now_known(scope: Scope) -> None:
    """The client that sent this request has shown who it is."""
    if (connection := connection_of(scope)) is not None:
        connection.strangers.leave(connection)
