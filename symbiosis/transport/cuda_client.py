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
from collections import deque
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
    Composed,
    Control,
    Done,
    Forget,
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
    WAIT_AT_LEAST,
    WAIT_EQUAL,
    WRITE_32,
    CudaError,
    DeviceMemory,
    MemOp,
    MemOps,
    Words,
    allocation,
    fill,
    shares_time,
    why_not,
)
from symbiosis.transport.cuda_step import OTHER, Placed, Round, Step
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
    LET_GO,
    MOST_KEPT,
    ROUND_BELL,
    ROUND_REPLY,
    ROUNDS_OVER,
    ROW_ALIGNED,
    SLEEPS,
    VOID,
    aligned,
)
from symbiosis.transport.slab import MAX_CONTROL
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, cut

logger = logging.getLogger("symbiosis")
FIRST_SEGMENT = 64 << 20
MOST_APART = 64 << 20  # bytes: what the calls of a captured step may take so that their results need not be copied
JOIN_S = 10.0  # an executor may take to let us in
PAUSE_S = 0.05  # between two attempts to find an executor again
FORGOTTEN_AT_ONCE = 512  # calls, in one message


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
        self._steps: list[Step] = []  # that were captured
        self._step: Step | None = None  # that is being captured
        self._dropped = deque[Step]()  # of which the executor is yet to be told that they are not made again
        self._address, self._hello, self._patience = address, hello, patience
        self._awake = os.eventfd(0)  # from the moment we join on the executor's own, which each join puts in its place
        self._fd = os.memfd_create("symbiosis-words", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, Words.nbytes)
        self._words = Words(self._fd)
        self.words = self._words.words
        self._segments: dict[int, DeviceMemory] = {}
        self._segment_numbers = itertools.count()
        self._newest = 0  # of those that are not of steps
        self._prepared: dict[Call, Prepared] = {}
        self._in_graphs: set[int] = set()  # the numbers of those of them that graphs make
        self._shaped: dict[tuple[Call, torch.Size], Shaped] = {}
        self._failed: SymbiosisError | None = None
        self._closed = False
        self._calls, self._control = threading.Lock(), threading.RLock()
        self._rescue = torch.cuda.Stream(device)
        self._stream: int | None = None  # that made the last call; torch's default one is 0
        self._index = torch.cuda.current_device() if device.index is None else device.index
        try:
            self._first = self._segments[next(self._segment_numbers)] = DeviceMemory.create(FIRST_BYTES, device)
            # CUDA loads what filling takes now; while a stream waits, it could not
            fill(self._first.address, self._first.nbytes, 0, self._rescue.cuda_stream)
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
            if self._failed or self.words[ERROR] or self._dropped:
                self._attend()
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if stream != self._stream:
                self._follow(stream)
            if self._step and len(payload) == 1:
                outs = self._in_step(call, payload[0], (prepared.out.shape,), stream)
                if outs:
                    return outs[0]
            for target, tensor in zip(prepared.payload, payload, strict=True):
                target.copy_(tensor)
            self._ring(prepared, stream)
            return prepared.out.clone()

    def rows(self, call: Call, x: Tensor, shapes: Shapes) -> list[Tensor]:
        """What each layer of `call` makes of the rows of `x`, in these shapes."""
        with self._calls:
            shaped = self._shaped.get((call, x.shape)) or self._shape(call, x, shapes)
            if self._failed or self.words[ERROR] or self._dropped:
                self._attend()
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if stream != self._stream:
                self._follow(stream)
            if self._step and (outs := self._in_step(call, x, shapes, stream)):
                return outs
            shaped.x.copy_(x)
            self._ring(shaped.prepared, stream)
            return [out.clone() for out in shaped.outs]

    def _in_step(self, call: Call, x: Tensor, shapes: Shapes, stream: int) -> list[Tensor] | None:
        """What becomes of a call of the step that is being captured."""
        if not self._step or not torch._C._cuda_isCurrentStreamCapturing():
            return None
        outs = self._step.call(call, x, shapes, stream)
        self.recorded += outs is not None and (self._step.round is None or self._step.made == 1)
        return outs

    def _ring(self, prepared: Prepared, stream: int) -> None:
        if torch._C._cuda_isCurrentStreamCapturing():
            self.recorded += 1
            self._in_graphs.add(prepared.register.number)
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
            if self._failed or self.words[ERROR] or self._dropped:
                self._attend()
            self._follow(torch._C._cuda_getCurrentRawStream(self._index))
            yield

    # ------------------------------------------------------------------ captured steps

    @property
    def shares_time(self) -> bool:
        """Whether kernels here take turns with those of other programs: then none may wait for another's."""
        return shares_time(self.device)

    def begin_step(self, calls: tuple[Call, ...], shares: bool, kernel: Any) -> None:
        """A step that made these calls is about to be captured; `shares`: its memory comes from `kernels.step_memory`. The calls will be
        a round, if the executor agrees. `kernel`: the module `kernels.rounds`, where there is one."""
        with self._calls:
            self._attend()
            prepared = [self._prepared.get(call) or self._prepare(call) for call in calls]
            agreed = self._agreed(prepared) if kernel and not self.shares_time else None
            step = Step(self._placed, self._ring_one, _as_it_lies) if shares else None
            if agreed is not None:
                sizes = [sum(map(aligned, p.call.parts)) + aligned(p.out.nbytes) for p in prepared]
                if sum(sizes) <= MOST_APART and not agreed.large:
                    step = self._step_apart(prepared, sizes)
                elif step is None:
                    self._in_graphs.update(p.register.number for p in prepared)
                    step = Step(partial(_at, prepared), self._ring_one, Tensor.clone)
                self._as_round(step, calls, agreed.large, kernel)
            self._step = step

    def end_step(self) -> Step | None:
        """... is captured."""
        step, self._step = self._step, None
        if step is None:
            return None
        if step.complete and step.round:
            numbers = tuple(step.numbers) or step.round.compose.calls
            step.round.compose = replace(step.round.compose, calls=numbers)
            try:
                self._ask(step.round.compose)
            except CallError as error:
                logger.info("the calls of a captured step are made one by one: %s", error)
                step.round = None
                step.made = OTHER
        self._steps.append(step)
        return step

    def drop_step(self, step: Step) -> None:
        """It is not made again. Callable at any time, from any thread."""
        self._dropped.append(step)

    @property
    def rounds(self) -> int:
        """Captured steps of which the executor knows."""
        return sum(step.round is not None for step in self._steps)

    def owns(self, tensor: Tensor) -> bool:
        """Whether it lies where replies do that are not of a step alone."""
        address = tensor.data_ptr()
        segments = list(self._segments.values())
        return any(memory.is_ours and 0 <= address - memory.address < memory.nbytes for memory in segments)

    def _agreed(self, prepared: list[Prepared]) -> Composed | None:
        """What the executor says of such calls as a round, if it agrees."""
        try:
            answer = self._ask(Compose(0, tuple(p.register.number for p in prepared)))
        except CallError as error:
            logger.info("the calls of a captured step are made one by one: %s", error)
            return None
        assert isinstance(answer, Composed)
        return answer

    def _step_apart(self, prepared: list[Prepared], sizes: list[int]) -> Step:
        """One whose calls have places where nobody writes until a graph runs again: the kernel that calls copies the rows there."""
        if sum(sizes) > self._segments[self._newest].nbytes:
            self._grow(sum(sizes))
        starts = itertools.accumulate(sizes[:-1], initial=0)
        apart = [self._registered(p.call, start) for p, start in zip(prepared, starts, strict=True)]
        numbers = [p.register.number for p in apart]
        return Step(partial(_at, apart), self._ring_one, _as_it_lies, numbers=numbers)

    def _as_round(self, step: Step, calls: tuple[Call, ...], large: bool, kernel: Any) -> None:
        first, words, number = self._first, self._words, next(self._numbers)
        bell, reply, over = (first.tensor(at, "int32", (1,)) for at in (ROUND_BELL, ROUND_REPLY, ROUNDS_OVER))
        begin = MemOps([
            MemOp(WRITE_32, words.at(CURRENT), 0), MemOp(WRITE_32, bell.data_ptr(), 0),
            MemOp(WRITE_32, reply.data_ptr(), 0), MemOp(WRITE_32, words.at(BELL), number),
        ])  # fmt: skip
        step.round = Round(Compose(number, tuple(self._prepared[call].register.number for call in calls)), calls, begin)
        if large:
            step.ring = partial(_ring_by_stream, bell.data_ptr(), reply.data_ptr())
            return
        kernel.load_call(self.device)
        # if this process does not say that there will be no answer, because it stands still, the stream goes on at some time
        make = partial(
            kernel.call, kernel.Words(bell, reply, over, words.at(ERROR), VOID), 2 * (self._patience + JOIN_S)
        )
        step.ring = lambda number, placed, _: make(number, placed.rows, placed.payload)

    def _ring_one(self, number: int, placed: Placed, stream: int) -> None:
        """A call of a captured step that is none of a round."""
        if placed.rows is not placed.payload:
            placed.payload.copy_(placed.rows)
        MemOps(self._doorbell(number)).enqueue(stream)

    def _placed(self, at: int, call: Call, x: Tensor, shapes: Shapes) -> Placed | None:
        """In the memory of the step, which the executor maps as it is met; None if it turns out that it cannot."""
        assert self._step
        x = x.detach().to(TORCH_DTYPE[call.payload_dtype]).reshape(call.shape).contiguous()
        if (source := self._shared(self._step, x)) is None:
            x = x.clone()
            source = self._shared(self._step, x)
        outs = [torch.empty(shape, dtype=TORCH_DTYPE[call.dtype], device=x.device) for shape in shapes]
        targets = [self._shared(self._step, out) for out in outs]
        if source is None or None in targets:
            return None
        register = Register(next(self._numbers), call_body(call), *source, tuple(targets))  # type: ignore[arg-type]
        self._ask(register)
        self._places.append(register)
        self._step.numbers.append(register.number)
        self._step.results += [(out.data_ptr(), out.nbytes) for out in outs]
        return Placed(register.number, x, x, outs)

    def _shared(self, step: Step, tensor: Tensor) -> tuple[int, int] | None:
        """The segment of the step in which it lies, and where there."""
        address = tensor.data_ptr()
        found = allocation(address) if tensor.nbytes and not address % ROW_ALIGNED else None
        if found is None or address + tensor.nbytes > sum(found):
            return None
        start, nbytes = found
        if start not in step.segments:
            try:
                memory = DeviceMemory.at(start, nbytes, self.device)
                step.segments[start] = next(self._segment_numbers), memory
                self._hand_over(*step.segments[start])
            except (CallError, CudaError) as error:
                logger.info("the memory of a captured step cannot be shared: %s", error)
                step.segments.pop(start, None)
                return None
        return step.segments[start][0], address - start

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

    def _attend(self) -> None:
        """Raise what has happened, if something has; and give back what dropped steps held."""
        if self._failed or self.words[ERROR]:
            self._raise()
        if not torch.cuda.is_current_stream_capturing():
            self._give_back()

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
        if len(self._prepared) - len(self._in_graphs) >= MOST_KEPT and not torch.cuda.is_current_stream_capturing():
            self._forget()
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

    def _forget(self) -> None:
        """All calls but those of graphs: who makes others again and again, registers them again."""
        gone = {call: p for call, p in self._prepared.items() if p.register.number not in self._in_graphs}
        if self._tell_forgotten([prepared.register.number for prepared in gone.values()], []):
            self._prepared = {call: prepared for call, prepared in self._prepared.items() if call not in gone}
            self._shaped = {key: shaped for key, shaped in self._shaped.items() if key[0] not in gone}

    def _give_back(self) -> None:
        """What dropped steps held."""
        while self._dropped:
            step = self._dropped.popleft()
            if step in self._steps:
                self._steps.remove(step)
            numbers, segments = step.numbers, list(step.segments.values())
            if step.round and step.complete:
                numbers = [step.round.compose.number, *numbers]
            if self._tell_forgotten(numbers, [number for number, _ in segments]):
                for number, memory in segments:
                    del self._segments[number]
                    memory.close()

    def _tell_forgotten(self, numbers: list[int], segments: list[int]) -> bool:
        """None of these calls is made any more, when what is under way is over; false if that takes too long."""
        if self._stream is not None and not self._ends(self._last()):
            return False
        forgotten = set(numbers)
        self._places = [register for register in self._places if register.number not in forgotten]
        try:
            for start in range(0, len(numbers), FORGOTTEN_AT_ONCE):
                self._ask(Forget(tuple(numbers[start : start + FORGOTTEN_AT_ONCE])))
            for start in range(0, len(segments), FORGOTTEN_AT_ONCE):
                self._ask(Forget((), tuple(segments[start : start + FORGOTTEN_AT_ONCE])))
        except CallError as error:  # an executor after the one that knew them, perhaps
            logger.info("not forgotten: %s", error)
        return True

    def _registered(self, call: Call, start: int) -> Prepared:
        """The call, from now on made at `start` of the newest segment."""
        register = Register(next(self._numbers), call_body(call), self._newest, start)
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
        return Prepared(call, register, tuple(payload), out, MemOps(self._doorbell(register.number)))

    def _doorbell(self, number: int) -> list[MemOp]:
        """How the stream makes a call."""
        reply, bell = self._first.address, self._words.at(BELL)
        return [MemOp(WRITE_32, reply, 0), MemOp(WRITE_32, bell, number), MemOp(WAIT_EQUAL, reply, number)]

    def _grow(self, nbytes: int) -> None:
        """One more segment, for the calls that are registered from now on; the others stay where they are."""
        memory, number = DeviceMemory.create(nbytes, self.device), next(self._segment_numbers)
        self._hand_over(number, memory)
        self._newest = number

    def _hand_over(self, number: int, memory: DeviceMemory) -> None:
        """... to the executor, and to whichever comes after it."""
        fd = memory.fd()
        try:
            self._ask(Segment(number, memory.nbytes), fd)
        finally:
            os.close(fd)
        self._segments[number] = memory

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
            for number, memory in list(self._segments.items()):
                fd = memory.fd()
                try:
                    _exchange(sock, Segment(number, memory.nbytes), fd)
                finally:
                    os.close(fd)
            for register in list(self._places):
                _exchange(sock, register)
            for round in [step.round for step in list(self._steps) if step.round and step.complete]:
                _exchange(sock, replace(round.compose, again=True))
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
            for address, nbytes in self._results():
                fill(address, nbytes, 0xFF, self._rescue.cuda_stream)  # NaN in every float
            self._rescue.synchronize()
        self._releaser.start()

    def _results(self) -> Iterator[tuple[int, int]]:
        """Where answers go, and how many bytes."""
        for memory in self._segments.values():
            if memory.is_ours and memory is not self._first:
                yield memory.address, memory.nbytes
        for step in self._steps:
            yield from step.results

    def _release(self) -> None:
        with torch.cuda.device(self.device):
            while not self._closed:
                waited_for, first = self.words[BELL] or self.words[CURRENT], self._first.address
                answers = [
                    MemOp(WRITE_32, first, waited_for),
                    MemOp(WRITE_32, first + ROUND_REPLY, LET_GO),
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
        for memory in self._segments.values():
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
    assert isinstance(answer, Done | Registered | Composed)
    return answer


def _at(prepared: list[Prepared], at: int, call: Call, x: Tensor, shapes: Shapes) -> Placed:
    """In a place that was registered before."""
    its = prepared[at]
    return Placed(its.register.number, x.reshape(call.shape), its.payload[0], cut(its.out, shapes))


def _ring_by_stream(bell: int, reply: int, number: int, placed: Placed, stream: int) -> None:
    """A large call of a round."""
    if placed.rows is not placed.payload:
        placed.payload.copy_(placed.rows)
    MemOps([MemOp(WRITE_32, bell, number), MemOp(WAIT_AT_LEAST, reply, number)]).enqueue(stream)


def _as_it_lies(result: Tensor) -> Tensor:
    """It is used in its place, and nobody knows who else wrote there."""
    return result.data
