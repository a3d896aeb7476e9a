"""`local://PATH`, the client's end."""

import os
import select
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from time import monotonic
from typing import TypeVar

from torch import Tensor

from symbiosis.errors import Code, ConnectionLost, HandshakeFailed, ProtocolError
from symbiosis.kernels.packed import PackedWeight
from symbiosis.protocol import (
    CALL_SIZE,
    LONGEST_TEXT,
    MAX_WELCOME,
    REPLY_SIZE,
    Bye,
    Call,
    Control,
    FromExecutor,
    Grow,
    Grown,
    Hello,
    Refusal,
    Reply,
    Share,
    Shared,
    Welcome,
    decode_from_executor,
    decode_reply,
    encode_call,
)
from symbiosis.transport.control_messages import connected, received, send
from symbiosis.transport.local import packed_file, shared_page, shared_weights, striped_weights
from symbiosis.transport.local.segment import (
    CALL_AT,
    CALL_BELL_AT,
    CLIENT_SLEEPS_AT,
    EXECUTOR_SLEEPS_AT,
    PAYLOAD_AT,
    REPLY_AT,
    REPLY_BELL_AT,
    WORD,
    Slab,
    reply_at,
    ring,
)
from symbiosis.transport.local.shared_page import SharedPage
from symbiosis.transport.patience import SAYS_NOTHING
from symbiosis.transport.reactor import CAN_SPIN, FENCE, spin
from symbiosis.transport.reply_checks import Answers, accepted
from symbiosis.transport.tensors import CPU, Shapes

Answer = TypeVar("Answer", bound=Control)
LARGEST_FIRST = 1 << 30  # most bytes of a session's first segment
LONG_S = 0.5e-3  # a long wait for a reply: ten times what waking up takes
MOST_LONG = 1 << 14  # slow calls that are remembered
BELL, EAR = "eventfd", "eventpoll"  # the kinds of descriptor that wake the executor, and this client
NAP_S = 0.5  # a sleeping client looks again after this time, even if no bell rings


class LocalConnection:
    """Joins over the socket and calls through the segment. It looks for an answer first, and sleeps if there is none yet."""

    device, look_s = CPU, inf
    page: SharedPage | None = None  # set when the served weights are mapped

    def __init__(self, address: str, hello: Hello, timeout: float) -> None:
        self._url = f"local://{address}"
        self._beats, self._closed = 0, False
        self._long: set[Call] = set()  # calls that last took so long that looking would waste a core
        try:
            self._epoll = select.epoll()
            self._socket = connected(address, timeout)
            self._join(hello)
        except TimeoutError:
            raise HandshakeFailed(SAYS_NOTHING) from None
        except OSError as error:
            raise ConnectionLost(error.strerror or str(error)) from None
        self.beat()

    def _join(self, hello: Hello) -> None:
        try:
            with self._asked(hello, Grown, 4) as (first, fds):
                letter, slab, *bells = fds
                self.welcome = accepted(read_letter(letter), self._url, hello)
                self._answers = Answers(self.welcome)
                must_be(BELL, bells[0])
                must_be(EAR, bells[1])
                self._slab = segment(slab, first.nbytes, PAYLOAD_AT + LONGEST_TEXT, LARGEST_FIRST)
                self._call_bell, self._ear = bells
                fds[:] = [letter]
            self._epoll.register(self._ear, select.EPOLLIN | select.EPOLLET)
            self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        except BaseException:
            self._socket.close()
            raise

    @contextmanager
    def _asked(self, message: Control, kind: type[Answer], *descriptors: int) -> Iterator[tuple[Answer, list[int]]]:
        """Send a message and yield the executor's answer, with as many descriptors as one of these numbers says. They are closed after
        the block as in `received`."""
        send(self._socket, message)
        with received(self._socket, decode_from_executor, max(descriptors)) as (answer, fds):
            if isinstance(answer, Refusal):
                raise answer.error()
            if isinstance(answer, Bye):
                raise ConnectionLost("it closed the connection")
            if not isinstance(answer, kind) or len(fds) not in descriptors:
                raise ProtocolError(
                    Code.BAD_FRAME, f"{self._url} answers a {type(message).__name__} with a {type(answer).__name__}"
                )
            yield answer, fds

    @contextmanager
    def _answered(self, message: Control, kind: type[Answer], *descriptors: int) -> Iterator[tuple[Answer, list[int]]]:
        """Do the same once joined: raise `ConnectionLost` where the socket breaks. What the block raises is its own."""
        with ExitStack() as stack:
            try:
                answered = stack.enter_context(self._asked(message, kind, *descriptors))
            except TimeoutError:
                raise ConnectionLost("no answer in time") from None
            except OSError as error:
                raise ConnectionLost(f"it hung up: {error}") from None
            yield answered

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        slab, start = self._slab, reply_at(call)
        if start + LONGEST_TEXT > slab.nbytes:
            slab = self._grow(2 * start)
        if payload:
            slab.tensor(PAYLOAD_AT, call.payload_dtype, payload[0].shape).copy_(payload[0])
            if call.groups:
                slab.tensor(PAYLOAD_AT + call.nbytes - 4 * call.groups, "int32", (call.groups,)).copy_(payload[1])
        slab.memory[CALL_AT : CALL_AT + CALL_SIZE] = encode_call(call, seq)
        ring(slab.memory, CALL_BELL_AT, seq)
        with FENCE:
            pass
        if slab.memory[EXECUTOR_SLEEPS_AT]:
            with suppress(BlockingIOError):  # the bell is full: the executor is awake, or ignores it
                os.eventfd_write(self._call_bell, 1)
        reply = self._await(seq, call, timeout)
        self._answers.check(call, reply)
        if reply.code is Code.GROW and start + self._answers.nbytes(call) > slab.nbytes:
            self._grow(start + self._answers.nbytes(call))
            return self.call(seq, call, payload, timeout, shapes)
        results = []
        for shape in shapes if shapes and reply.code is Code.OK else (reply.shape,):
            part = slab.tensor(start, reply.dtype, shape)
            results.append(part.clone())
            start += part.nbytes
        return reply, results

    def _await(self, seq: int, call: Call, timeout: float) -> Reply:
        """Wait for the reply. Look for it first, unless this call last took long: then looking would take a core from those that need
        it. Then sleep."""
        memory, number, begun = self._slab.memory, WORD.pack(seq), monotonic()

        def answered() -> bool:
            return memory[REPLY_BELL_AT : REPLY_BELL_AT + WORD.size] == number

        if call in self._long or not CAN_SPIN or not spin(answered):
            WORD.pack_into(memory, CLIENT_SLEEPS_AT, 1)
            with FENCE:
                pass
            while not answered():
                left = begun + timeout - monotonic()
                if left <= 0:
                    raise ConnectionLost("no answer in time")
                events = self._epoll.poll(min(left, NAP_S))
                if any(fd != self._ear for fd, _ in events) and not answered():
                    raise ConnectionLost("it hung up")
            WORD.pack_into(memory, CLIENT_SLEEPS_AT, 0)
        if monotonic() - begun < LONG_S:
            self._long.discard(call)
        elif len(self._long) < MOST_LONG:
            self._long.add(call)
        return decode_reply(memory[REPLY_AT : REPLY_AT + REPLY_SIZE])

    def _grow(self, nbytes: int) -> Slab:
        with self._answered(Grow(nbytes), Grown, 1) as (grown, fds):
            slab = segment(fds[0], grown.nbytes, nbytes, 2 * nbytes)
            fds.clear()
        self._slab.close()
        self._slab = slab
        return slab

    def commons(self) -> dict[int, Tensor]:
        with self._answered(Share(), Shared, 1, self.welcome.ranks) as (_, fds):
            return held_in(self.welcome, fds, served=False)

    def served_weights(self) -> dict[int, Tensor | PackedWeight]:
        is_packed = packed_file.holds_packed(self.welcome.manifest)
        with self._answered(Share(weights=True), Shared, 0, 2 + is_packed, self.welcome.ranks + 1) as (_, fds):
            if not fds:
                return {}
            packed = packed_file.taken(self.welcome.manifest, fds[1]) if is_packed else {}
            weights = held_in(self.welcome, fds[: 1 if is_packed else -1], served=True) | packed
            page = Slab(fds[-1], shared_page.NBYTES)
            fds.pop()  # which is the slab's now
            self.page = SharedPage(page)
            return weights

    @property
    def is_lost(self) -> bool:
        if self._socket.fileno() < 0:  # closed by the collector
            return True
        watched = select.poll()
        watched.register(self._socket, select.POLLIN)  # the executor never speaks first: only a hang-up can be read
        return bool(watched.poll(0))

    def beat(self) -> None:
        self._beats += 1
        WORD.pack_into(self._slab.memory, 0, self._beats)

    def close(self) -> None:
        if (
            not self._closed
        ):  # the socket may be closed already, if the collector found both: it never closes descriptors
            self._closed = True
            self._epoll.close()
            self._socket.close()
            self._slab.close()
            if self.page is not None:
                self.page.close()
            os.close(self._call_bell)
            os.close(self._ear)


def held_in(told: Welcome, fds: Sequence[int], served: bool) -> dict[int, Tensor]:
    """Map the served weights, or what is the client's own, by number: from one file, or from those of all ranks."""
    if len(fds) == 1:
        return shared_weights.taken(told.manifest, fds[0], served)
    wanted = shared_weights.in_file(told.manifest, served)
    found = striped_weights.mapped(told.manifest, fds, writable=not served)
    return {number: found[number] for number in wanted}


def read_letter(fd: int) -> FromExecutor:
    """Read the executor's welcome, which comes as a file because it may be larger than a message on a socket."""
    told = os.fstat(fd)
    if not stat.S_ISREG(told.st_mode) or told.st_size > MAX_WELCOME:
        raise ProtocolError(Code.BAD_FRAME, f"an executor's welcome is a file of at most {MAX_WELCOME} bytes")
    return decode_from_executor(os.pread(fd, told.st_size, 0))


def segment(fd: int, nbytes: int, least: int, most: int) -> Slab:
    """Map the segment that an executor shares, or raise `ProtocolError` if it is smaller or much larger than was asked for."""
    if not least <= nbytes <= most:
        raise ProtocolError(Code.BAD_FRAME, f"an executor shares {nbytes} bytes where {least} were asked for")
    return Slab(fd, nbytes)


def must_be(kind: str, fd: int) -> None:
    """Raise `ProtocolError` unless `fd` is of this kind. Another kind could block its reader or writer."""
    if str(Path(f"/proc/self/fd/{fd}").readlink()) != f"anon_inode:[{kind}]":
        raise ProtocolError(Code.BAD_FRAME, f"what an executor hands over to wake or be woken by is an {kind}")
    if kind == BELL:
        os.set_blocking(fd, False)
