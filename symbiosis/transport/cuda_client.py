"""`local://` for clients on a GPU, the client's end: its stream makes the calls, its CPU only enqueues them.

The words and the memory are ours. When the executor dies, our stream waits; a thread joins the next executor, hands it the same
memory under the same numbers, and it answers what is unanswered: the stream goes on as if nothing had been, a captured graph
in the midst of it, too. Only if no executor comes within the patience are the answers filled with NaN, the stream let go, and
the next call raises.
"""

import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import CallError, Code, ConnectionLost, ExecutorUnavailable, SymbiosisError
from symbiosis.protocol import (
    ITEMSIZE,
    Call,
    Compose,
    Control,
    Done,
    Hello,
    Refusal,
    Register,
    Registered,
    Resume,
    Segment,
    Welcome,
    call_body,
    decode_control,
    encode_control,
)
from symbiosis.transport.cuda_driver import (
    WAIT_EQUAL,
    WRITE_32,
    CudaError,
    DeviceMemory,
    MemOp,
    MemOps,
    Words,
    fill,
    shares_time,
    why_not,
)
from symbiosis.transport.cuda_round import Round
from symbiosis.transport.line import (
    BATCHED,
    BEAT,
    BELL,
    CURRENT,
    ENQUEUED,
    ERROR,
    ERROR_LENGTH,
    ERROR_TEXT,
    FIRST_BYTES,
    ROUND_BELL,
    ROUND_REPLY,
    ROUNDS_OVER,
    SLEEPS,
    VOID,
    aligned,
)
from symbiosis.transport.slab import MAX_CONTROL
from symbiosis.transport.tensors import Shapes, cut

logger = logging.getLogger("symbiosis")
FIRST_SEGMENT = 64 << 20
MOST_APART = 64 << 20  # bytes: what the calls of a captured step may take so that their results need not be copied
JOIN_S = 10.0  # an executor may take to let us in
PAUSE_S = 0.05  # between two attempts to find an executor again


@dataclass(slots=True)
class Prepared:
    """A registered call: where its payload and its reply lie, and what the stream does in between."""

    call: Call
    register: Register
    payload: tuple[Tensor, ...]
    out: Tensor
    ring: MemOps


@dataclass(slots=True)
class Shaped:
    """A prepared call whose rows have the shape in which the model has them."""

    x: Tensor
    outs: list[Tensor]
    prepared: Prepared


class DeviceLine:
    """The calls of one process's GPU to one executor. All of its streams may make them, one after another."""

    def __init__(self, address: str, hello: Callable[[], Hello], device: torch.device, patience: float) -> None:
        """`hello`: what to join with; asked for whenever an executor is joined (again)."""
        if reason := why_not(device):
            raise CallError(Code.UNKNOWN_OP, reason)
        self.device, self.reconnects = device, 0
        self.noted: list[Call] | None = None  # the calls that are made, if somebody wants to know
        self.recorded = 0  # times that graphs, as they were captured, ring for the executor's CPU
        self._numbers = itertools.count(1)
        self._places: list[Register] = []  # all that the executor knows of
        self._rounds: dict[tuple[Call, ...], Round | None] = {}
        self._round: Round | None = None  # of the step that is being captured
        self._address, self._hello, self._patience = address, hello, patience
        self._awake = os.eventfd(0)  # from the moment we join on the executor's own, which each join puts in its place
        self._fd = os.memfd_create("symbiosis-words", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, Words.nbytes)
        self._words = Words(self._fd)
        self.words = self._words.words
        self._segments: list[DeviceMemory] = []
        self._prepared: dict[Call, Prepared] = {}
        self._shaped: dict[tuple[Call, torch.Size], Shaped] = {}
        self._failed: SymbiosisError | None = None
        self._closed = False
        self._calls, self._control = threading.Lock(), threading.RLock()
        self._rescue = torch.cuda.Stream(device)
        self._stream: int | None = None  # that made the last call; torch's default one is 0
        self._index = torch.cuda.current_device() if device.index is None else device.index
        try:
            first = DeviceMemory.create(FIRST_BYTES, device)
            self._segments.append(first)
            # CUDA loads what filling takes now; while a stream waits, it could not
            fill(first, 0, self._rescue.cuda_stream)
            self._rescue.synchronize()
            self._socket = self._join(JOIN_S)
        except BaseException:
            self._free()
            raise
        self._watcher = threading.Thread(target=self._watch, name="symbiosis-line", daemon=True)
        self._releaser = threading.Thread(target=self._release, name="symbiosis-release", daemon=True)
        self._watcher.start()

    # ------------------------------------------------------------------ calls

    def call(self, call: Call, payload: tuple[Tensor, ...]) -> Tensor:
        """Enqueue a call on the current stream; its reply, as of then."""
        with self._calls:
            prepared = self._prepared.get(call) or self._prepare(call)
            if self._failed or self.words[ERROR]:
                self._raise()
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if stream != self._stream:
                self._follow(stream)
            if self._round and (outs := self._in_round(call, payload[0], (prepared.out.shape,), stream)):
                return outs[0]
            for target, tensor in zip(prepared.payload, payload, strict=True):
                target.copy_(tensor)
            self._ring(prepared, stream)
            return prepared.out.clone()

    def rows(self, call: Call, x: Tensor, shapes: Shapes) -> list[Tensor]:
        """What each layer of `call` makes of the rows of `x`, in these shapes."""
        with self._calls:
            shaped = self._shaped.get((call, x.shape)) or self._shape(call, x, shapes)
            if self._failed or self.words[ERROR]:
                self._raise()
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if stream != self._stream:
                self._follow(stream)
            if self._round and (outs := self._in_round(call, x, shapes, stream)):
                return outs
            shaped.x.copy_(x)
            self._ring(shaped.prepared, stream)
            return [out.clone() for out in shaped.outs]

    def _in_round(self, call: Call, x: Tensor, shapes: Shapes, stream: int) -> list[Tensor] | None:
        """What becomes of a call of the step that is being captured."""
        if not self._round or not torch._C._cuda_isCurrentStreamCapturing():
            return None
        outs = self._round.call(call, x, shapes, stream)
        self.recorded += self._round.made == 1
        return outs

    def _ring(self, prepared: Prepared, stream: int) -> None:
        if torch._C._cuda_isCurrentStreamCapturing():
            self.recorded += 1
        else:
            self.announce(1)
            if self.noted is not None:
                self.noted.append(prepared.call)
        prepared.ring.enqueue(stream)

    def _shape(self, call: Call, x: Tensor, shapes: Shapes) -> "Shaped":
        prepared = self._prepared.get(call) or self._prepare(call)
        outs = cut(prepared.out, shapes)
        shaped = self._shaped[call, x.shape] = Shaped(prepared.payload[0].view(x.shape), outs, prepared)
        return shaped

    def announce(self, calls: int) -> None:
        """Tell the executor's CPU that the stream is going to make so many calls."""
        words = self.words
        words[ENQUEUED] = (words[ENQUEUED] + calls) & 0xFFFFFFFF
        if words[SLEEPS]:
            os.eventfd_write(self._awake, 1)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """In the block a graph that was announced is enqueued on the current stream, and no other call."""
        with self._calls:
            if self._failed or self.words[ERROR]:
                self._raise()
            self._follow(torch._C._cuda_getCurrentRawStream(self._index))
            yield

    # ------------------------------------------------------------------ captured steps

    @property
    def shares_time(self) -> bool:
        """Whether kernels here take turns with those of other programs: then none may wait for another's."""
        return shares_time(self.device)

    def compose(self, calls: tuple[Call, ...], kernel: Any) -> None:
        """A step that made these calls is about to be captured: they will be a round, if the executor agrees. `kernel`: the module
        `kernels.rounds`."""
        with self._calls:
            if calls not in self._rounds:
                self._rounds[calls] = self._composed(calls, kernel)
            self._round = self._rounds.get(calls)
            if self._round:
                self._round.made = 0

    def captured(self) -> bool:
        """... is captured; false if it made other calls after all."""
        round, self._round = self._round, None
        return round is None or round.complete

    @property
    def rounds(self) -> int:
        """Captured steps of which the executor knows."""
        return sum(round is not None for round in self._rounds.values())

    def owns(self, tensor: Tensor) -> bool:
        """Whether it lies where replies do."""
        return any(memory.address <= tensor.data_ptr() < memory.address + memory.nbytes for memory in self._segments)

    def _composed(self, calls: tuple[Call, ...], kernel: Any) -> Round | None:
        prepared = [self._prepared[call] for call in calls]
        sizes = [sum(map(aligned, call.parts)) + aligned(p.out.nbytes) for call, p in zip(calls, prepared, strict=True)]
        apart = sum(sizes) <= MOST_APART
        try:
            self._ask(Compose(next(self._numbers), tuple(p.register.number for p in prepared)))  # whether that can be
            kernel.load_call(self.device)
            if apart:
                if sum(sizes) > self._segments[-1].nbytes:
                    self._grow(sum(sizes))
                starts = itertools.accumulate(sizes[:-1], initial=0)
                prepared = [self._registered(call, start) for call, start in zip(calls, starts, strict=True)]
            compose = Compose(next(self._numbers), tuple(p.register.number for p in prepared))
            self._ask(compose)
        except (CallError, CudaError) as error:
            logger.info("the calls of a captured step are made one by one: %s", error)
            return None
        first, words = self._segments[0], self._words
        bell, reply, over = (first.tensor(at, "int32", (1,)) for at in (ROUND_BELL, ROUND_REPLY, ROUNDS_OVER))
        begin = MemOps([
            MemOp(WRITE_32, words.at(CURRENT), 0), MemOp(WRITE_32, bell.data_ptr(), 0),
            MemOp(WRITE_32, reply.data_ptr(), 0), MemOp(WRITE_32, words.at(BELL), compose.number),
        ])  # fmt: skip
        # if this process does not say that there will be no answer, because it stands still, the stream goes on at some time
        seconds = 2 * (self._patience + JOIN_S)
        make = partial(kernel.call, kernel.Words(bell, reply, over, words.at(ERROR), VOID), seconds)
        return Round(replace(compose, again=True), prepared, apart, begin, make)

    @property
    def batched(self) -> int:
        """The sum over all calls of how many ran together."""
        return self.words[BATCHED]

    def _follow(self, stream: int) -> None:
        """All streams use the same memory: this one begins when the other's last call is over."""
        if self._stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).wait_stream(self._last())
        self._stream = stream

    def _last(self) -> torch.cuda.Stream:
        """The stream that made the last call."""
        if not self._stream:
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(self._stream, self.device)

    def _raise(self) -> None:
        if self._failed:
            raise self._failed
        if self.words[ERROR] == VOID:
            self._failed = CallError(
                Code.RESOURCE,
                "nobody answered a call of a captured step, and what was computed since is void: begin anew",
            )
            raise self._failed
        length = self.words[ERROR_LENGTH]
        text = bytes(self._words.memory[4 * ERROR_TEXT : 4 * ERROR_TEXT + length]).decode(errors="replace")
        code, self.words[ERROR] = Code(self.words[ERROR]), 0
        raise CallError(code, f"an earlier call failed, and what was computed from it is void: {text}")

    # ------------------------------------------------------------------ what is agreed with the executor

    def _prepare(self, call: Call) -> Prepared:
        if len(self._segments) == 1:
            self._grow(max(FIRST_SEGMENT, 4 * sum(map(aligned, call.parts))))
        while True:
            try:
                prepared = self._prepared[call] = self._registered(call, 0)
            except CallError as error:
                if error.code is not Code.GROW:
                    raise
                self._grow(2 * int(error.message))
            else:
                return prepared

    def _registered(self, call: Call, start: int) -> Prepared:
        """The call, from now on made at `start` of the newest segment."""
        register = Register(next(self._numbers), call_body(call), len(self._segments) - 1, start)
        answer = self._ask(register)
        assert isinstance(answer, Registered)
        prepared = self._place(call, register, tuple(answer.shape))
        self._places.append(register)
        return prepared

    def _place(self, call: Call, register: Register, shape: tuple[int, ...]) -> Prepared:
        memory, start = self._segments[register.segment], register.start
        payload = [memory.tensor(start, call.payload_dtype, call.shape)]
        if call.groups:
            payload.append(memory.tensor(start + aligned(call.parts[0]), "int32", (call.groups,)))
        out = memory.tensor(start + sum(map(aligned, call.parts)), call.dtype, shape)
        assert prod(shape) * ITEMSIZE[call.dtype] == out.nbytes
        reply, words = self._segments[0].address, self._words
        ring = [
            MemOp(WRITE_32, reply, 0), MemOp(WRITE_32, words.at(BELL), register.number),
            MemOp(WAIT_EQUAL, reply, register.number),
        ]  # fmt: skip
        return Prepared(call, register, tuple(payload), out, MemOps(ring))

    def _grow(self, nbytes: int) -> None:
        """One more segment, for the calls that are registered from now on; the others stay where they are."""
        memory = DeviceMemory.create(nbytes, self.device)
        self._ask_with(memory)
        self._segments.append(memory)

    def _ask_with(self, memory: DeviceMemory) -> None:
        fd = memory.fd()
        try:
            self._ask(Segment(memory.nbytes), fd)
        finally:
            os.close(fd)

    def _ask(self, message: Control, fd: int | None = None) -> Control:
        """The executor's answer; if it is gone, the next one's."""
        give_up = time.monotonic() + self._patience
        while True:
            with self._control:
                try:
                    return _exchange(self._socket, message, fd)
                except (OSError, ConnectionLost) as error:
                    cause = error
            if self._failed or self._closed or time.monotonic() > give_up:
                raise self._failed or self._unavailable(cause)
            time.sleep(PAUSE_S)  # the watcher looks for another one

    def _join(self, timeout: float) -> socket.socket:
        """A new connection on which all is agreed that was agreed before; what wakes the executor is its descriptor now."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(timeout)
        try:
            sock.connect(self._address)
            socket.send_fds(sock, [encode_control(self._hello())], [self._fd])
            raw, fds, _, _ = socket.recv_fds(sock, MAX_CONTROL, 2)
            _answer(raw)
            letter, awake = fds
            os.dup2(awake, self._awake, inheritable=False)  # in one step: a call may be about to write there
            os.close(awake)
            with os.fdopen(letter, "rb") as file:
                file.seek(0)
                welcome = decode_control(file.read())
            assert isinstance(welcome, Welcome)
            self.welcome = welcome
            for memory in self._segments:
                fd = memory.fd()
                try:
                    _exchange(sock, Segment(memory.nbytes), fd)
                finally:
                    os.close(fd)
            for register in list(self._places):
                _exchange(sock, register)
            for round in [round for round in list(self._rounds.values()) if round]:
                _exchange(sock, round.compose)
            _exchange(sock, Resume())
        except BaseException:
            sock.close()
            raise
        return sock

    # ------------------------------------------------------------------ the executor's life

    def _watch(self) -> None:
        """Beat; and when the executor hangs up, find another one."""
        watched = select.poll()
        watched.register(self._socket.fileno(), select.POLLRDHUP)
        while not self._closed:
            self.words[BEAT] = (self.words[BEAT] + 1) & 0xFFFFFFFF
            if watched.poll(self.welcome.heartbeat_s / 4 * 1000) and not self._closed:
                watched.unregister(self._socket.fileno())
                if not self._find_another():
                    return
                watched.register(self._socket.fileno(), select.POLLRDHUP)
        self._socket.close()  # what was joined again, perhaps, just when we were to leave

    def _find_another(self) -> bool:
        give_up = time.monotonic() + self._patience
        with self._control:
            self._socket.close()
            while not self._closed:
                try:
                    self._socket = self._join(JOIN_S)
                    self.reconnects += 1
                    return True
                except CallError as error:
                    if error.code not in (Code.DRAINING, Code.LIMIT):
                        self._give_up(error)
                        return False
                    cause: Exception = error
                except (OSError, ConnectionLost, CudaError) as error:
                    cause = error
                if time.monotonic() > give_up:
                    self._give_up(self._unavailable(cause))
                    return False
                time.sleep(PAUSE_S)
        return False

    def _unavailable(self, cause: Exception) -> ExecutorUnavailable:
        return ExecutorUnavailable.at([f"local://{self._address}"], cause)

    def _give_up(self, error: SymbiosisError) -> None:
        """Let the stream go, with answers that nobody can mistake for results."""
        self._failed = error
        with torch.cuda.device(self.device):
            for memory in self._segments[1:]:
                fill(memory, 0xFF, self._rescue.cuda_stream)  # NaN in every float
            self._rescue.synchronize()
        self._releaser.start()

    def _release(self) -> None:
        with torch.cuda.device(self.device):
            while not self._closed:
                waited_for, first = self.words[BELL] or self.words[CURRENT], self._segments[0].address
                answers = [
                    MemOp(WRITE_32, first, waited_for),
                    MemOp(WRITE_32, first + ROUNDS_OVER, 1),
                ]
                MemOps(answers).enqueue(self._rescue.cuda_stream)
                time.sleep(50e-6)

    def close(self) -> None:
        """Leave. Calls that are enqueued are still answered."""
        if self._closed:
            return
        over = self._stream is None or self._ends(self._last())
        self._closed = True
        if self.words[ERROR]:
            logger.error("%s is left after a call that failed: what was computed from it is void", self._address)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the watcher
        for thread in (self._watcher, self._releaser):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(1.0)
                over = over and not thread.is_alive()
        self._socket.close()
        if over and self._ends(self._rescue):
            self._free()

    def _ends(self, stream: torch.cuda.Stream) -> bool:
        """Wait for what is enqueued there, which may wait for replies; false if that takes too long."""
        give_up = time.monotonic() + self._patience + JOIN_S
        try:
            while not stream.query():
                if time.monotonic() > give_up:
                    return False
                time.sleep(1e-3)
        except RuntimeError:  # CUDA is broken
            return False
        return True

    def _free(self) -> None:
        """What nothing uses any more."""
        for memory in self._segments:
            memory.close()
        self._words.close()
        os.close(self._fd)
        os.close(self._awake)


def _exchange(sock: socket.socket, message: Control, fd: int | None = None) -> Control:
    socket.send_fds(sock, [encode_control(message)], [] if fd is None else [fd])
    return _answer(sock.recv(MAX_CONTROL))


def _answer(raw: bytes) -> Control:
    if not raw:
        raise ConnectionLost("the executor hung up")
    answer = decode_control(raw)
    if isinstance(answer, Refusal):
        raise answer.error()
    assert isinstance(answer, Done | Registered)
    return answer
