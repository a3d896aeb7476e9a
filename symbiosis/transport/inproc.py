"""`inproc://NAME`: client and executor in one process. Tensors are handed over as they are; the code path is the true one."""

import itertools
import threading
from collections import deque
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from symbiosis.base.forks import at_fork, look_for_fork
from symbiosis.errors import CallError, Code, ConfigError, ConnectionLost
from symbiosis.kernels.packed import PackedWeight
from symbiosis.protocol import Call, Hello, Refusal, Reply, Welcome, checked
from symbiosis.transport.base import ServerPort, refuse
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.reply_checks import Answers, accepted
from symbiosis.transport.tensors import CPU, Shapes, cut

OWN_NAME = "executor-"  # begins the name of an executor that was given no endpoint; its number is never used again
_numbers = itertools.count(1)
_listeners: dict[str, "InprocListener"] = {}
at_fork(_listeners.clear)  # their threads are the parent's


class InprocPeer:
    """The executor's end: replies go into the client's queue."""

    transport, tenant = "inproc", None
    unread, address = (), ""

    def __init__(self, listener: "InprocListener | None" = None) -> None:
        self.session = None
        self._listener = listener
        self.replies: SimpleQueue[tuple[Reply, Tensor] | Welcome | Refusal | None] = SimpleQueue()

    def out(self, call: Call, shape: tuple[int, ...]) -> None:
        return None

    def reply(self, reply: Reply, result: Tensor) -> None:
        self.replies.put((reply, result))

    def close(self) -> None:
        self.replies.put(None)
        if self._listener:
            self._listener.drop(self)


class InprocListener:
    """The executor's endpoint. Messages wait in a deque until the reactor's thread takes them."""

    def __init__(self, name: str, reactor: Reactor, inbox: ServerPort) -> None:
        if name in _listeners:
            raise ConfigError(f"inproc://{name} is already in use in this process")
        self.url = f"inproc://{name}"
        self._name, self._reactor, self._inbox = name, reactor, inbox
        self._messages: deque[tuple[InprocPeer, object]] = deque()
        self._peers: set[InprocPeer] = set()
        _listeners[name] = self

    def post(self, peer: InprocPeer, message: object) -> None:
        self._messages.append((peer, message))
        self._reactor.call_soon(self._drain)

    def _drain(self) -> None:
        while self._messages:
            peer, message = self._messages.popleft()
            self._reactor.attempt(peer, self._handle, peer, message)

    def _handle(self, peer: InprocPeer, message: Any) -> None:
        if isinstance(message, Hello):
            self._join(peer, message)
        elif message is None:
            self.drop(peer)
        elif peer in self._peers:
            self._call(peer, *message)

    def _call(self, peer: InprocPeer, seq: int, call: Call, payload: tuple[Tensor, ...]) -> None:
        try:
            checked(call)
        except CallError as error:
            refuse(peer, seq, error)
            return
        if self._inbox.admits(peer, seq, call):
            self._inbox.arrived(peer, seq, call, payload)

    def _join(self, peer: InprocPeer, hello: Hello) -> None:
        try:
            welcome = self._inbox.joined(peer, hello)
        except CallError as error:
            peer.replies.put(Refusal.of(error))
        else:
            self._peers.add(peer)
            peer.replies.put(welcome)

    def drop(self, peer: InprocPeer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._inbox.left(peer)

    def tick(self) -> None:
        for peer in self._peers:  # they are alive as long as this process is
            self._inbox.heard(peer)

    def stop_accepting(self) -> None:
        if _listeners.get(self._name) is self:
            del _listeners[self._name]

    def close(self) -> None:
        self.stop_accepting()
        for peer in list(self._peers):
            peer.close()


class InprocConnection:
    """The client's end."""

    device, page, is_lost, look_s = CPU, None, False, inf

    def __init__(self, listener: InprocListener, hello: Hello, timeout: float) -> None:
        self._listener, self._peer = listener, InprocPeer(listener)
        self._closed = threading.Event()
        listener.post(self._peer, hello)
        try:
            self.welcome = accepted(self._next(timeout), listener.url, hello)
        except BaseException:
            self.close()  # it may be let in yet
            raise
        self._answers = Answers(self.welcome)

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        if payload:
            payload = (payload[0].reshape(call.payload_shape).contiguous(), *payload[1:])
        self._listener.post(self._peer, (seq, call, payload))
        answer = self._next(timeout)
        assert isinstance(answer, tuple) and answer[0].seq == seq
        reply, result = answer
        self._answers.check(call, reply)
        return reply, cut(result, shapes if reply.code is Code.OK else ())

    def _next(self, timeout: float) -> object:
        try:
            answer = self._peer.replies.get(timeout=timeout)
        except Empty:
            raise ConnectionLost("no answer in time") from None
        if answer is None:
            raise ConnectionLost("it closed")
        return answer

    def commons(self) -> dict[int, Tensor]:
        return {}

    def served_weights(self) -> dict[int, Tensor | PackedWeight]:
        return {}

    def beat(self) -> None:
        pass

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._listener.post(self._peer, None)


def new_url() -> str:
    """Return a fresh URL, for an executor that was given no endpoint."""
    return f"inproc://{OWN_NAME}{next(_numbers)}"


def may_come_back(name: str) -> bool:
    """Whether an executor answers by this name, or may do so again. A name from `new_url` is gone with its executor."""
    return name in _listeners or not name.startswith(OWN_NAME)


def connect(name: str, hello: Hello, timeout: float) -> InprocConnection:
    look_for_fork()
    listener = _listeners.get(name)
    if listener is None:
        raise ConnectionLost("none of this process has the name")
    return InprocConnection(listener, hello, timeout)
