"""`local://` for clients on a GPU, the executor's end: doorbells in host words, payload in device memory, no CPU that waits."""

import fcntl
import itertools
import os
import socket
import struct
from math import prod
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from symbiosis.base.ownership import peer_pid
from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.kernels.gpu import LET_GO
from symbiosis.protocol import (
    ITEMSIZE,
    Bye,
    Call,
    Compose,
    Composed,
    Control,
    Done,
    Forget,
    Hello,
    Register,
    Registered,
    Reply,
    Resume,
    Segment,
    Share,
    Shared,
    decode_from_client,
    parse_call_body,
)
from symbiosis.transport import control_messages
from symbiosis.transport.base import NO_MEMORY, PeerHome, Prepared, PreparedRound, RoundWords
from symbiosis.transport.control_messages import answer, received
from symbiosis.transport.cuda.driver import (
    WRITE_32,
    CudaError,
    DeviceMemory,
    MemOp,
    MemOps,
    WordPage,
    copy,
    device_name,
    has_atomics,
    why_not,
)
from symbiosis.transport.cuda.remote_gpu import Place, RemoteCopies, Staging
from symbiosis.transport.cuda.words import (
    ANSWERED,
    BATCHED,
    BEAT,
    BELL,
    CURRENT,
    ENQUEUED,
    ERROR,
    ERROR_LENGTH,
    ERROR_TEXT,
    FIRST_BYTES,
    LONGEST_ERROR,
    MAX_CALLS,
    MAX_SEGMENTS,
    ROUND_BELL,
    ROUND_REPLY,
    ROUNDS_OVER,
    ROW_ALIGNED,
    SLEEPS,
    VOID,
    aligned,
)
from symbiosis.transport.local.shared_page import Offer


class DevicePeer:
    """The executor's end of one connection whose calls a GPU makes."""

    transport, tenant = "cuda", None
    unread = ()
    nap = 1e-3  # look at least so often: a graph that the client did not announce rings without waking us

    def __init__(self, listener: PeerHome, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        self.session: Any = None
        self.opened = monotonic()
        self._listener, self._inbox, self._socket = listener, listener.inbox, sock
        if len(fds) != 1:
            raise CallError(Code.BAD_FRAME, "a client on a GPU passes one page of words")
        reason = "an observer makes no calls" if hello.observer else why_not_by_gpu(sock, self._inbox.device)
        if reason is not None:
            raise CallError(Code.UNKNOWN_OP, f"this executor takes no calls of GPUs: {reason}")
        check_words(fds[0])
        self._staging = staging_for(hello.device, self._inbox.device)
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._words = WordPage(fds[0])
        except CudaError as error:
            os.close(self._awake)
            raise CallError(Code.RESOURCE, f"the executor cannot use the client's words: {error}") from None
        self.words = self._words.words
        self._segments: dict[int, DeviceMemory] = {}
        self._calls: dict[int, Prepared] = {}
        self._uses: dict[int, frozenset[int]] = {}  # by the calls' numbers: which segments they use
        self._remote: dict[int, RemoteCopies] = {}
        self._replies: dict[int, MemOps] = {}
        self._rounds: dict[int, PreparedRound] = {}  # the calls that are rounds
        self.offer = Offer(self._inbox, self, sock)
        self._waits = False  # whether kernels of the client wait for answers
        self._looking = self._gone = False
        self._beats = 0
        try:
            control_messages.let_in(sock, Done(), self._inbox.joined(self, hello), [self._awake])
        except BaseException:  # it is refused, or has gone meanwhile
            self._inbox.left(self)
            os.close(self._awake)
            self._words.close()
            raise
        listener.reactor.watch(self._awake, self.look, self, on_change=True)
        listener.reactor.watch_bell(self)

    @property
    def address(self) -> str:
        return f"pid {peer_pid(self._socket)}"

    def control(self) -> None:
        """Read from the socket: a control message has come, or the client is gone."""
        said: Control | None = None
        weights: list[int] = []
        try:
            with received(self._socket, decode_from_client) as (message, fds):
                if isinstance(message, Share) and message.weights and self.here:
                    weights = self.offer.descriptors(on_gpu=True)
                said = self._control(message, fds)
            if said is None:
                self._gone = isinstance(message, Bye)
                self._listener.drop(self)
        except BlockingIOError:
            pass
        except torch.OutOfMemoryError:
            control_messages.tell_refusal(self._socket, CallError(Code.RESOURCE, NO_MEMORY))
        except (CallError, CudaError, OSError) as error:
            control_messages.tell_refusal(self._socket, error)
        try:
            if said is not None:
                answer(self._socket, said, weights)
        except (CallError, OSError):  # it reads nothing, or is gone
            self._listener.drop(self)

    def _control(self, message: Control, fds: list[int]) -> Control | None:
        if isinstance(message, Segment) and fds:
            self._take_over(message, fds[0])
            return Done()
        if fds:
            raise ProtocolError(Code.BAD_FRAME, f"a descriptor came with {type(message).__name__}, which takes none")
        if isinstance(message, Share) and message.weights:
            return Shared()
        if isinstance(message, Register):
            return Registered(self._register(message))
        if isinstance(message, Compose) and self._segments:
            return Composed(self._compose(message))
        if isinstance(message, Forget):
            self._forget(message)
            return Done()
        if isinstance(message, Resume) and self._segments:
            self._resume()
            return Done()
        return None

    def _take_over(self, message: Segment, fd: int) -> None:
        check_segment(message, self._segments, self._inbox.device)
        self._segments[message.number] = DeviceMemory.of_fd(fd, message.nbytes, self._inbox.device)

    def _compose(self, message: Compose) -> bool:
        """Make a round of registered calls. Return whether they are large."""
        if message.number:
            self._check_number(message.number)
        if not all(number in self._calls and number not in self._rounds for number in message.calls):
            raise CallError(Code.BAD_FRAME, "a round is of calls that are registered")
        if len(message.calls) > MAX_CALLS or self._segments[0].nbytes < FIRST_BYTES:
            raise CallError(Code.BAD_FRAME, "there is no room for such a round")
        first = self._segments[0]
        bell, reply = (first.tensor(at, "int32", (1,)) for at in (ROUND_BELL, ROUND_REPLY))
        words = RoundWords(bell, reply, self._words.at(ERROR))
        calls = [self._calls[number] for number in message.calls]
        composed = self._inbox.compose(message.number, calls, words, message.again)
        self._waits = True
        if message.number:
            self._calls[message.number] = self._rounds[message.number] = composed
            self._uses[message.number] = frozenset[int]().union(*(self._uses[number] for number in message.calls))
            self._replies[message.number] = MemOps([MemOp(WRITE_32, first.address + ROUND_REPLY, LET_GO)])
        return composed.large

    def _check_number(self, number: int) -> None:
        if not 0 < number < 1 << 31 or number in self._calls:
            raise CallError(Code.BAD_FRAME, "each call has a number of its own, of 31 bits")
        if len(self._calls) >= MAX_CALLS:
            raise CallError(Code.LIMIT, f"a client registers at most {MAX_CALLS} calls: use fewer different shapes")

    def _forget(self, message: Forget) -> None:
        """Forget calls and segments. The client has had the answers, but the work behind these on the stream may still use the memory."""
        calls, segments = set(message.calls), set(message.segments)
        used = frozenset[int]().union(*(self._uses[number] for number in self._uses.keys() - calls))
        if not (segments <= self._segments.keys() - used - {0} and calls <= self._calls.keys()):
            raise CallError(Code.BAD_FRAME, "only what is registered, and not used any more, can be forgotten")
        self._inbox.forget(self, [self._calls[number] for number in calls])
        for number in calls:
            del self._calls[number], self._uses[number]
            self._remote.pop(number, None)
            self._replies.pop(number, None)
            self._rounds.pop(number, None)
        for number in segments:
            self._segments.pop(number).close()

    def _register(self, message: Register) -> tuple[int, ...]:
        call = parse_call_body(message.call)
        shape = self._inbox.shape(call)
        self._check_number(message.number)
        *starts, behind = itertools.accumulate(map(aligned, call.parts), initial=message.start)
        places_of = message.results or ((message.segment, behind),)
        shapes = self._inbox.results(call) if message.results else (shape,)
        if len(places_of) != len(shapes):
            raise CallError(Code.BAD_FRAME, "each result of a call has one place")
        of_payload = zip(starts, call.payload_kinds, strict=True)
        places = [self._place(message.segment, start, *kind) for start, kind in of_payload]
        parts = len(places)
        places += [self._place(*place, call.dtype, part) for place, part in zip(places_of, shapes, strict=True)]
        remote = self._staging and self._staging.copies(places, parts)
        tensors = remote.tensors if remote else [place.tensor() for place in places]
        parted, at = (tuple(tensors[:parts]), tuple(tensors[parts:])), remote.at if remote else Tensor.data_ptr
        self._calls[message.number] = self._inbox.prepare(self, message.number, call, *parted, at=at)
        if remote:
            self._remote[message.number] = remote
        self._uses[message.number] = frozenset([message.segment, *(segment for segment, _ in places_of)])
        return shape

    def _place(self, segment: int, start: int, dtype: str, shape: tuple[int, ...]) -> Place:
        if segment not in self._segments or start < 0 or start % ROW_ALIGNED:
            raise CallError(Code.BAD_FRAME, "there is no such place in the client's device memory")
        memory = self._segments[segment]
        if (end := start + prod(shape) * ITEMSIZE[dtype]) > memory.nbytes:
            raise CallError(Code.GROW, str(end))
        return Place(memory, start, dtype, shape)

    def _resume(self) -> None:
        """Look at the bell from now on. A call that an earlier executor left unanswered counts as having come again."""
        number = self.words[CURRENT]
        if number in self._calls and not self.words[BELL] and self._is_unanswered(number):
            if self.words[CURRENT] == number:
                self.words[BELL] = self.words[BELL] or number  # the client may have rung again meanwhile
            elif number in self._rounds:
                self._rounds[number].is_behind(LET_GO)
        self._looking = True

    def _is_unanswered(self, number: int) -> bool:
        if number in self._rounds:
            return self._rounds[number].is_behind(self._word(ROUND_REPLY))
        return self._word(0) != number

    def _word(self, at: int) -> int:
        """Read the word at this byte of the first segment."""
        word = torch.empty(1, dtype=torch.int32, device=self._inbox.device)
        copy(word.data_ptr(), self._segments[0].address + at, word.nbytes, self._inbox.stream)
        return int(word.item())

    def look(self) -> bool:
        """Look at the bell. Return whether it rang and the call waits in a queue now; a call may also be answered at once."""
        words = self.words
        number = words[BELL]
        if not number or not self._looking or self._listener.leaving:  # the bell is left to a successor
            return False
        words[CURRENT] = number
        words[BELL] = 0
        prepared = self._calls.get(number)
        if prepared is None:
            self._listener.drop(self)
            return True
        if self._staging:
            self._remote[number].fetch(self._inbox.stream)
        return self._inbox.on_doorbell(prepared)

    @property
    def busy(self) -> bool:
        """Whether the client has enqueued calls that have not yet come."""
        ahead = (self.words[ENQUEUED] - self.words[ANSWERED]) & 0xFFFFFFFF
        return 0 < ahead < 1 << 31

    def sleeping(self, flag: bool) -> None:
        self.words[SLEEPS] = flag

    def out(self, call: Call, shape: tuple[int, ...]) -> None:
        return None

    def reply(self, reply: Reply, result: Tensor) -> None:
        """Reply on the stream, behind the product. After a refusal, too, the client's stream goes on; its CPU is told of the error."""
        self.count(reply.batch)
        if reply.code is not Code.OK:
            self._refuse(reply, result)
        self.enqueue_reply()

    def enqueue_reply(self) -> None:
        """Enqueue what the stream does after the product: it delivers the results, and writes the reply word."""
        if remote := self._remote.get(self.words[CURRENT]):
            remote.deliver(self._inbox.stream)
        self._ring()

    @property
    def here(self) -> bool:
        """Whether the client's memory is on the executor's own GPU."""
        return self._staging is None

    def answer(self, number: int) -> tuple[int, int]:
        """Return the address of the word that tells the client of an answer, and the value that it must take."""
        return self._segments[0].address, number

    def _ring(self) -> None:
        number = self.words[CURRENT]
        reply = self._replies.get(number)
        if reply is None:
            reply = MemOps([MemOp(WRITE_32, self._segments[0].address, number)])
            if number in self._calls:  # the client may have written anything there
                self._replies[number] = reply
        reply.enqueue(torch._C._cuda_getCurrentRawStream(self._inbox.device.index))

    def count(self, batch: int, calls: int = 1) -> None:
        """Count what rang last as answered: so many calls, each in a batch of so many."""
        words = self.words
        if words[ANSWERED] != words[ENQUEUED]:  # else a graph rang that was not announced
            words[ANSWERED] = (words[ANSWERED] + 1) & 0xFFFFFFFF
        words[BATCHED] = (words[BATCHED] + batch * calls) & 0xFFFFFFFF

    def _refuse(self, reply: Reply, text: Tensor) -> None:
        """Fill the place of the result with NaN, so that nobody mistakes it for one, and tell the client's CPU of the error."""
        prepared = self._calls.get(self.words[CURRENT])
        for result in prepared.results if prepared else ():
            result.view(torch.uint8).fill_(0xFF)
        raw = bytes(text.cpu().numpy())[:LONGEST_ERROR]
        self._words.memory[4 * ERROR_TEXT : 4 * ERROR_TEXT + len(raw)] = raw
        self.words[ERROR_LENGTH] = len(raw)
        self.words[ERROR] = int(reply.code)

    def beat_seen(self) -> bool:
        beats = self.words[BEAT]
        moved, self._beats = beats != self._beats, beats
        return moved

    def close(self) -> None:
        self._listener.drop(self)

    def release(self) -> None:
        """Wait for the end of what was launched for this client, and release its memory. The wait is short, because whatever waits for the
        client is stopped."""
        reactor = self._listener.reactor
        reactor.forget_bell(self)
        reactor.forget(self._socket.fileno())
        reactor.forget(self._awake)
        self._socket.close()
        os.close(self._awake)
        self.offer.close()
        self._inbox.drain_gpu(self, self._free)

    def _free(self) -> None:
        if self._gone and self._looking and self._waits:
            # the process ends only when its stream does, and the stream may wait for us
            self.words[ERROR] = VOID
            first = self._segments[0].address
            let_go = MemOp(WRITE_32, first + ROUND_REPLY, LET_GO), MemOp(WRITE_32, first + ROUNDS_OVER, 1)
            MemOps(let_go).enqueue(self._inbox.stream)
            self._word(ROUNDS_OVER)
        self._calls.clear()
        self._remote.clear()
        self._staging = self._staging and Staging(self._inbox.device, in_reach=False)
        for memory in self._segments.values():
            memory.close()
        self._words.close()
        self.words = memoryview(bytearray(WordPage.nbytes)).cast("I")  # for whatever still reads or writes them
        del self._words  # and with it the descriptor, even if something still refers to this peer


def why_not_by_gpu(sock: socket.socket, device: torch.device) -> str | None:
    """Return why the GPU of the program at the other end cannot make calls, or None if it can."""
    if device.type != "cuda":
        return "it computes on the CPU"
    pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    if pid == os.getpid():  # CUDA may wait for everything that its context has queued before it loads a kernel
        return "it lives in the client's own process, where neither may wait for the other"
    return why_not(device)


def staging_for(client: str | None, device: torch.device) -> Staging | None:
    """Return memory on `device` for the calls of a client on the GPU of this name, or None if that is the same GPU."""
    if client == device_name(device):
        return None
    seen = {device_name(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    return Staging(device, in_reach=client in seen and has_atomics(device, seen[client]))


def check_words(fd: int) -> None:
    """Raise `CallError` if the client could shrink the page while we read it."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = False
    if not sealed or os.fstat(fd).st_size < WordPage.nbytes:
        raise CallError(Code.BAD_FRAME, "a client on a GPU passes one page of words, sealed against shrinking")


def check_segment(message: Segment, segments: dict[int, DeviceMemory], device: torch.device) -> None:
    """Raise `CallError` if a client may not share this segment besides those it has shared. The memory is the client's own, so no more than
    the GPU has can be shared."""
    if message.nbytes <= 0:
        raise CallError(Code.BAD_FRAME, f"a segment has more than {message.nbytes} bytes")
    limit = torch.cuda.get_device_properties(device).total_memory
    if message.nbytes + sum(memory.nbytes for memory in segments.values()) > limit:
        raise CallError(Code.TOO_LARGE, f"a session shares at most {limit} bytes of device memory")
    if message.number in segments or bool(message.number) is not bool(segments):
        raise CallError(Code.BAD_FRAME, "segments have different numbers, and the first one is 0")
    if len(segments) >= MAX_SEGMENTS:
        raise CallError(Code.LIMIT, f"a client shares at most {MAX_SEGMENTS} pieces of device memory")
