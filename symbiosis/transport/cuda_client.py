"""`local://` for clients on a GPU, the client's end: its stream makes the calls, its CPU only enqueues them.

The words and the memory are ours. When the executor dies, our stream waits; a thread joins the next executor, hands it the same
memory under the same numbers, and it answers what is unanswered: the stream goes on as if nothing had been, a captured graph
in the midst of it, too. Only if no executor comes within the patience are the answers filled with NaN, the stream let go, and
the next call raises.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from symbiosis.errors import CallError, Code, ConnectionLost, ExecutorUnavailable, SymbiosisError
from symbiosis.protocol import (
    ITEMSIZE,
    Call,
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
    why_not,
)
from symbiosis.transport.line import (
    ALIGNED,
    BATCHED,
    BEAT,
    BELL,
    CURRENT,
    ENQUEUED,
    ERROR,
    ERROR_LENGTH,
    ERROR_TEXT,
    SLEEPS,
    aligned,
)
from symbiosis.transport.slab import MAX_CONTROL
from symbiosis.transport.tensors import Shapes, cut

FIRST_SEGMENT = 64 << 20
JOIN_S = 10.0  # an executor may take to let us in
PAUSE_S = 0.05  # between two attempts to find an executor again


@dataclass(slots=True)
class Prepared:
    """A registered call: where its payload and its reply lie, and what the stream does in between."""

    register: Register
    payload: tuple[Tensor, ...]
    out: Tensor
    ring: MemOps


@dataclass(slots=True)
class Shaped:
    """A prepared call whose rows have the shape in which the model has them."""

    x: Tensor
    outs: list[Tensor]
    ring: MemOps


class DeviceLine:
    """The calls of one process's GPU to one executor. All of its streams may make them, one after another."""

    def __init__(self, address: str, hello: Callable[[], Hello], device: torch.device, patience: float) -> None:
        """`hello`: what to join with; asked for whenever an executor is joined (again)."""
        if reason := why_not(device):
            raise CallError(Code.UNKNOWN_OP, reason)
        self.device, self.reconnects = device, 0
        self.recorded = 0  # calls that were captured into graphs so far
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
            first = DeviceMemory.create(ALIGNED, device)
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
            for target, tensor in zip(prepared.payload, payload, strict=True):
                target.copy_(tensor)
            if torch.cuda.is_current_stream_capturing():
                self.recorded += 1
            else:
                self.announce(1)
            prepared.ring.enqueue(stream)
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
            shaped.x.copy_(x)
            if torch._C._cuda_isCurrentStreamCapturing():
                self.recorded += 1
            else:
                self.announce(1)
            shaped.ring.enqueue(stream)
            return [out.clone() for out in shaped.outs]

    def _shape(self, call: Call, x: Tensor, shapes: Shapes) -> "Shaped":
        prepared = self._prepared.get(call) or self._prepare(call)
        outs = cut(prepared.out, shapes)
        shaped = self._shaped[call, x.shape] = Shaped(prepared.payload[0].view(x.shape), outs, prepared.ring)
        return shaped

    def announce(self, calls: int) -> None:
        """Tell the executor's CPU that the stream is going to make so many calls."""
        words = self.words
        words[ENQUEUED] = (words[ENQUEUED] + calls) & 0xFFFFFFFF
        if words[SLEEPS]:
            os.eventfd_write(self._awake, 1)

    def replay(self, calls: int) -> None:
        """A graph is about to make so many calls on the current stream."""
        with self._calls:
            if self._failed or self.words[ERROR]:
                self._raise()
            self._follow(torch._C._cuda_getCurrentRawStream(self._index))
            self.announce(calls)

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
        length = self.words[ERROR_LENGTH]
        text = bytes(self._words.memory[4 * ERROR_TEXT : 4 * ERROR_TEXT + length]).decode(errors="replace")
        code, self.words[ERROR] = Code(self.words[ERROR]), 0
        raise CallError(code, f"an earlier call failed, and what was computed from it is void: {text}")

    # ------------------------------------------------------------------ what is agreed with the executor

    def _prepare(self, call: Call) -> Prepared:
        if len(self._segments) == 1:
            self._grow(max(FIRST_SEGMENT, 4 * sum(map(aligned, call.parts))))
        while True:
            register = Register(len(self._prepared) + 1, call_body(call), len(self._segments) - 1, 0)
            try:
                answer = self._ask(register)
            except CallError as error:
                if error.code is not Code.GROW:
                    raise
                self._grow(2 * int(error.message))
            else:
                break
        assert isinstance(answer, Registered)
        prepared = self._prepared[call] = self._place(call, register, tuple(answer.shape))
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
        return Prepared(register, tuple(payload), out, MemOps(ring))

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
            for prepared in list(self._prepared.values()):
                _exchange(sock, prepared.register)
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
        return ExecutorUnavailable(
            f"no executor at local://{self._address} ({cause}). Start one with: "
            f"symbiosis-executor MODEL --listen local://{self._address}"
        )

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
                waited_for = self.words[BELL] or self.words[CURRENT]
                MemOps([MemOp(WRITE_32, self._segments[0].address, waited_for)]).enqueue(self._rescue.cuda_stream)
                time.sleep(50e-6)

    def close(self) -> None:
        """Leave. Calls that are enqueued are still answered."""
        if self._closed:
            return
        over = self._stream is None or self._ends(self._last())
        self._closed = True
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
