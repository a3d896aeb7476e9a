"""`local://` for clients on a GPU, the client's end: its stream makes the calls, and its CPU only enqueues them.

When the executor dies, the client's stream waits. The next executor answers whatever is unanswered (`handshake.py`), and the stream goes on as if
nothing had happened, even in the middle of a captured graph. If no executor comes within the patience, the answers are filled with NaN, the
stream is let go, and the next call raises.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symbiosis.errors import CallError, CallNotTaken, Code
from symbiosis.kernels.gpu import LET_GO
from symbiosis.protocol import ITEMSIZE, Call, Welcome
from symbiosis.transport.cuda.captured_step import CapturedSteps, RegisteredCall, doorbell
from symbiosis.transport.cuda.driver import (
    WRITE_32,
    DeviceMemory,
    MemOp,
    MemOps,
    copy,
    enter,
    fill,
    shares_time,
    why_not,
)
from symbiosis.transport.cuda.handshake import CudaHandshake, Joining
from symbiosis.transport.cuda.words import (
    BATCHED,
    BELL,
    CURRENT,
    ENQUEUED,
    ERROR,
    ERROR_LENGTH,
    ERROR_TEXT,
    FIRST_SEGMENT,
    LONGEST_ERROR,
    MOST_KEPT,
    ROUND_REPLY,
    ROUNDS_OVER,
    SLEEPS,
    VOID,
    aligned,
)
from symbiosis.transport.tensors import Shapes, cut

WORD = 8  # bytes that a kernel copies at once

logger = logging.getLogger("symbiosis")


class CopiedTensor:
    """The place of a prepared call's rows or results, in the model's shape. The driver copies them, because torch would take twice as long
    to ask for a copy."""

    __slots__ = "address", "nbytes", "tensor"

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.address, self.nbytes = tensor, tensor.data_ptr(), tensor.nbytes

    def put(self, rows: Tensor, stream: int) -> None:
        if type(rows) is Tensor and rows.is_contiguous():
            copy(self.address, rows.data_ptr(), self.nbytes, stream)
        else:
            self.tensor.copy_(rows)

    def take(self, stream: int) -> Tensor:
        taken = torch.empty_like(self.tensor)
        copy(taken.data_ptr(), self.address, self.nbytes, stream)
        return taken


class Shaped(NamedTuple):
    """A prepared call whose rows have the model's shape. A small call has `make`, which launches one kernel for all of it."""

    x: CopiedTensor
    outs: list[CopiedTensor]
    prepared: RegisteredCall
    make: Callable[[int, list[int], int], None] | None


class CudaConnection:
    """The calls of one process's GPU to one executor. All streams of the process may make them, one after another.

    The class is long because one lock and one memory bind its methods. Making, registering, giving up and forgetting a call all need to know
    which stream made the last one, and what captured graphs still use.
    """

    def __init__(self, joining: Joining) -> None:
        device = joining.device
        if reason := why_not(device):
            raise CallError(Code.UNKNOWN_OP, reason)
        enter(device)
        self._address, self.device = joining.address, device
        self.kernel: Any = None  # the module `kernels.gpu.small_call`, where it works
        self.noted: list[Call] | None = None  # the calls that are made, while a step is watched
        self.recorded = 0  # how often captured graphs ring for the executor's CPU
        self._link = CudaHandshake(joining, self._give_up)
        self.steps = CapturedSteps(self._link, device, self._registered_apart)
        self.words = self._link.words.words
        self._newest = 0  # the segment in which calls are registered
        self._prepared: dict[Call, RegisteredCall] = {}
        self._small: Any = None  # the maker of kernels for small calls, once the executor has agreed to them
        self._stay: set[int] = set()  # the numbers of calls that graphs make, or that the next executor is asked about
        self._shaped: dict[tuple[Call, torch.Size], Shaped] = {}
        self._void: CallError | None = None  # set if what was computed is void
        self._closed = False
        self._calls = threading.Lock()
        self._rescue = torch.cuda.Stream(device)
        self._releaser = threading.Thread(target=self._release, name="symbiosis-release", daemon=True)
        self._stream: int | None = None  # the one that made the last call; torch's default stream is 0
        self._index = torch.cuda.current_device() if device.index is None else device.index
        try:
            # CUDA loads now what filling needs: it could not while a stream waits
            fill(self._link.first.address, self._link.first.nbytes, 0, self._rescue.cuda_stream)
            self._rescue.synchronize()
            self._link.join()
        except BaseException:
            self._link.free()
            raise

    @property
    def reconnects(self) -> int:
        return self._link.reconnects

    @property
    def welcome(self) -> Welcome:
        return self._link.welcome

    # ------------------------------------------------------------------ calls

    def call(self, call: Call, payload: tuple[Tensor, ...]) -> Tensor:
        """Enqueue a call on the current stream, and return its reply, which is there when the stream has come so far."""
        if torch._C._cuda_getDevice() != self._index:  # the driver enqueues on the current device
            with torch.cuda.device(self._index):
                return self.call(call, payload)
        with self._calls:
            if self._link.failed or self._void or self.words[ERROR] or self.steps.dropped:
                self._attend()
            prepared = self._prepared.get(call) or self._prepare(call)
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if stream != self._stream:
                self._follow(stream)
            alone = len(payload) == 1 and self.steps.current is not None
            if alone and (outs := self._in_step(call, payload[0], (prepared.out.shape,), stream)):
                return outs[0]
            for target, tensor in zip(prepared.payload, payload, strict=True):
                target.copy_(tensor)
            self._ring(prepared, stream)
            return prepared.out.clone()

    def rows(self, call: Call, x: Tensor, shapes: Shapes) -> list[Tensor]:
        """Enqueue a call and return what each of its layers makes of the rows of `x`, in these shapes."""
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self.rows(call, x, shapes)
        with self._calls:
            if self._link.failed or self._void or self.words[ERROR] or self.steps.dropped:
                self._attend()
            shaped = self._shaped.get((call, x.shape)) or self._shape(call, x, shapes)
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if stream != self._stream:
                self._follow(stream)
            if self.steps.current and (outs := self._in_step(call, x, shapes, stream)):
                return outs
            if shaped.make and _lies_well(x) and not torch._C._cuda_isCurrentStreamCapturing():
                return self._make(shaped, shaped.make, x, stream)
            shaped.x.put(x, stream)
            self._ring(shaped.prepared, stream)
            return [out.take(stream) for out in shaped.outs]

    def _make(
        self, shaped: Shaped, make: Callable[[int, list[int], int], None], x: Tensor, stream: int
    ) -> list[Tensor]:
        taken = [torch.empty_like(out.tensor) for out in shaped.outs]
        self._note(shaped.prepared)
        make(x.data_ptr(), [out.data_ptr() for out in taken], stream)
        return taken

    def _in_step(self, call: Call, x: Tensor, shapes: Shapes, stream: int) -> list[Tensor] | None:
        """Make a call as part of the step that is being captured. Return None if there is no such step, or if it expects another call."""
        step = self.steps.current
        if step is None or not torch._C._cuda_isCurrentStreamCapturing():
            return None
        outs = step.call(call, x, shapes, stream)
        self.recorded += outs is not None and (step.round is None or step.made == 1)
        return outs

    def _ring(self, prepared: RegisteredCall, stream: int) -> None:
        if torch._C._cuda_isCurrentStreamCapturing():
            self.recorded += 1
            self._stay.add(prepared.number)
        else:
            self._note(prepared)
        prepared.ring.enqueue(stream)

    def _note(self, prepared: RegisteredCall) -> None:
        """Note a call that is made directly, and not by a graph."""
        self.announce(1)
        if self.noted is not None:
            self.noted.append(prepared.call)

    def _shape(self, call: Call, x: Tensor, shapes: Shapes) -> Shaped:
        prepared = self._prepared.get(call) or self._prepare(call)
        place, outs = (
            CopiedTensor(prepared.payload[0].view(x.shape)),
            [CopiedTensor(out) for out in cut(prepared.out, shapes)],
        )
        make = None if self.kernel is None else self._by_kernel(prepared.number, place, outs)
        shaped = self._shaped[call, x.shape] = Shaped(place, outs, prepared, make)
        return shaped

    def _by_kernel(
        self, number: int, x: CopiedTensor, outs: list[CopiedTensor]
    ) -> Callable[[int, list[int], int], None] | None:
        """Return what launches the kernel that makes this call, or None if the call is not small. A kernel that waits must not keep those of
        the executor from running, so both processes have to be served by MPS."""
        lies = self.kernel.Lies(number, (x.address, x.nbytes), [(out.address, out.nbytes) for out in outs])
        if not self.kernel.takes(lies) or torch.cuda.is_current_stream_capturing():
            return None
        if self._small is None and (reason := self._why_not_by_kernels(number)):
            logger.info("small calls are made by stream memory operations: %s", reason)
            return None
        return self._small.prepared(lies)  # type: ignore[no-any-return]

    def _why_not_by_kernels(self, number: int) -> str | None:
        """Return why small calls are not made by kernels, or None if they are. The executor may still agree to another call; what this process
        itself lacks, it lacks for all calls."""
        try:
            if shares_time(self.device):
                raise RuntimeError("MPS does not serve this process")
            self._link.agrees([number])
            first, words = self._link.first.address, self._link.words
            mine = self.kernel.CallWords(words.at(BELL), first, first + ROUNDS_OVER, words.at(ERROR), VOID)
            # should this process stand still, it cannot say that no answer will come: the stream goes on by itself after this time
            self._small = self.kernel.SmallCalls(mine, 2 * self._link.longest, self.device)
        except CallError as error:
            return error.message
        except Exception as error:  # Triton may lack anything
            self.kernel = None
            return f"{type(error).__name__}: {error}"
        self._stay.add(number)
        return None

    def announce(self, calls: int) -> None:
        """Tell the executor's CPU that the stream will make so many calls."""
        words = self.words
        words[ENQUEUED] = (words[ENQUEUED] + calls) & 0xFFFFFFFF
        if words[SLEEPS]:
            os.eventfd_write(self._link.awake, 1)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Keep other calls away while the block enqueues a graph on the current stream."""
        with self._calls:
            if self._link.failed or self._void or self.words[ERROR] or self.steps.dropped:
                self._attend()
            self._follow(torch._C._cuda_getCurrentRawStream(self._index))
            yield

    # ------------------------------------------------------------------ captured steps

    def begin_step(self, calls: tuple[Call, ...], shares: bool, kernel: Any) -> None:
        """Prepare the capture of a step that will make these calls (`CapturedSteps.begin`)."""
        with self._calls:
            self._attend()
            prepared = [self._prepared.get(call) or self._prepare(call) for call in calls]
            step = self.steps.begin(prepared, shares, kernel)
            if step:
                self._stay.update(step.borrowed)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies where replies are written, outside of the memory of steps."""
        address = tensor.data_ptr()
        return any(0 <= address - memory.address < memory.nbytes for memory in self._ours())

    def _ours(self) -> list[DeviceMemory]:
        """Return the memory that belongs to no step."""
        return [memory for memory in list(self._link.segments.values()) if memory.is_ours]

    def _registered_apart(self, calls: Sequence[Call], sizes: list[int]) -> list[RegisteredCall]:
        """Register calls at places of their own, where nobody writes until the graph runs again. The kernel that calls copies the rows there."""
        if sum(sizes) > self._link.segments[self._newest].nbytes:
            self._grow(sum(sizes))
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return [self._registered(call, start) for call, start in zip(calls, starts, strict=True)]

    @property
    def batched(self) -> int:
        """How many calls ran in one product, summed over all calls."""
        return self.words[BATCHED]

    def _follow(self, stream: int) -> None:
        """Have this stream begin when the last call of another one is over, because all streams use the same memory."""
        if self._stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).wait_stream(self._last())
        self._stream = stream

    def _last(self) -> torch.cuda.Stream:
        """Return the stream that made the last call."""
        if not self._stream:
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(self._stream, self.device)

    def _attend(self) -> None:
        """Raise an error that has happened meanwhile, and give back what dropped steps held."""
        if error := self._link.failed or self._void:
            raise error
        if self.words[ERROR]:
            self._raise()
        if self.steps.dropped and not torch.cuda.is_current_stream_capturing() and self._is_idle():
            self.steps.give_back()

    def _raise(self) -> None:
        """Raise the error that the executor, or a kernel that nobody answered, has left in the words."""
        if self.words[ERROR] == VOID:
            self._void = CallError(
                Code.RESOURCE,
                "nobody answered a call in time, and what was computed since then is void: start over",
            )
            raise self._void
        length = min(self.words[ERROR_LENGTH], LONGEST_ERROR)
        text = bytes(self._link.words.memory[4 * ERROR_TEXT : 4 * ERROR_TEXT + length]).decode(errors="replace")
        code, self.words[ERROR] = self.words[ERROR], 0
        raise CallError.told(code, f"an earlier call failed, and what was computed from it is void: {text}")

    # ------------------------------------------------------------------ what is agreed with the executor

    def _prepare(self, call: Call) -> RegisteredCall:
        if len(self._prepared) - len(self._stay) >= MOST_KEPT and not torch.cuda.is_current_stream_capturing():
            self._forget()
        try:
            self._link.welcome.limits.check(call)  # before anything is allocated for it
        except CallError as error:
            raise CallNotTaken(error.code, error.message) from None
        if not self._newest:
            self._grow(max(FIRST_SEGMENT, 4 * sum(map(aligned, call.parts))))
        while True:
            try:
                prepared = self._prepared[call] = self._registered(call, 0)
            except CallError as error:
                needed = sum(map(aligned, call.parts)) + self._link.answers.nbytes(call)
                if error is self._link.failed:
                    raise
                if error.code is not Code.GROW or needed <= self._link.segments[self._newest].nbytes:
                    raise CallNotTaken(error.code, error.message) from None
                self._grow(2 * needed)
            else:
                return prepared

    def _forget(self) -> None:
        """Forget all calls but those that stay. A call that comes again is registered again."""
        if self._is_idle():
            gone = {call: p for call, p in self._prepared.items() if p.number not in self._stay}
            self._link.forget([prepared.number for prepared in gone.values()], [])
            self._prepared = {call: prepared for call, prepared in self._prepared.items() if call not in gone}
            self._shaped = {key: shaped for key, shaped in self._shaped.items() if key[0] not in gone}

    def _registered(self, call: Call, start: int) -> RegisteredCall:
        """Register a call, to be made at byte `start` of the newest segment."""
        number, shape = self._link.register(call, self._newest, start)
        memory = self._link.segments[self._newest]
        *starts, behind = itertools.accumulate(map(aligned, call.parts), initial=start)
        payload = tuple(memory.tensor(at, *kind) for at, kind in zip(starts, call.payload_kinds, strict=True))
        out = memory.tensor(behind, call.dtype, shape)
        assert prod(shape) * ITEMSIZE[call.dtype] == out.nbytes
        return RegisteredCall(call, number, payload, out, MemOps(doorbell(self._link, number)))

    def _grow(self, nbytes: int) -> None:
        """Add a segment for the calls that are registered from now on. Earlier calls stay where they are."""
        self._newest = self._link.share(DeviceMemory.create(nbytes, self.device))

    # ------------------------------------------------------------------ the end

    def _give_up(self) -> None:
        """Let the stream go, with answers that cannot be mistaken for results."""
        with torch.cuda.device(self.device):
            ours = [(memory.address, memory.nbytes) for memory in self._ours() if memory is not self._link.first]
            try:
                for address, nbytes in (*ours, *self.steps.places):
                    fill(address, nbytes, 0xFF, self._rescue.cuda_stream)  # NaN in every float
                self._rescue.synchronize()
            finally:
                self._releaser.start()

    def _release(self) -> None:
        with torch.cuda.device(self.device):
            while not self._closed:
                waited_for, first = self.words[BELL] or self.words[CURRENT], self._link.first.address
                answers = [
                    MemOp(WRITE_32, first, waited_for),
                    MemOp(WRITE_32, first + ROUND_REPLY, LET_GO),
                    MemOp(WRITE_32, first + ROUNDS_OVER, 1),
                ]
                MemOps(answers).enqueue(self._rescue.cuda_stream)
                time.sleep(50e-6)

    def close(self) -> None:
        """Leave the executor, after it has answered the calls that are enqueued."""
        if self._closed:
            return
        over = self._is_idle()
        self._closed = True
        if self.words[ERROR]:
            logger.error("%s is left after a call that failed: what was computed from it is void", self._address)
        over = self._link.close() and over
        if self._releaser.is_alive() and self._releaser is not threading.current_thread():
            self._releaser.join(1.0)
            over = over and not self._releaser.is_alive()
        if over and self._ends(self._rescue):
            self._link.free()

    def _is_idle(self) -> bool:
        """Wait until all calls are answered. Return False if that takes too long."""
        return self._stream is None or self._ends(self._last())

    def _ends(self, stream: torch.cuda.Stream) -> bool:
        """Wait for all that is enqueued on a stream, which may itself wait for replies. Return False if that takes too long."""
        give_up = time.monotonic() + self._link.longest
        try:
            while not stream.query():
                if time.monotonic() > give_up:
                    return False
                time.sleep(1e-3)
        except RuntimeError:  # CUDA is broken
            return False
        return True


def _lies_well(rows: Tensor) -> bool:
    """Whether a kernel can copy these rows word by word."""
    return type(rows) is Tensor and rows.is_contiguous() and not rows.data_ptr() % WORD
