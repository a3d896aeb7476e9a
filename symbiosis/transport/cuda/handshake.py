"""`local://` for clients on a GPU, the client's end: what is agreed with the executor, and agreed again with the next one.

Words and memory belong to the client. When the executor dies, a thread joins the next one, and hands it the same memory and the same calls
under the same numbers. So the next executor answers whatever is unanswered.
"""

import fcntl
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import CallError, Code, ConnectionLost, ExecutorUnavailable, ProtocolError, SymbiosisError
from symbiosis.kernels.packed import PackedWeight
from symbiosis.protocol import (
    Bye,
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
    Reply,
    Resume,
    Segment,
    Share,
    Shared,
    call_body,
    decode_from_executor,
)
from symbiosis.transport.base import Sharing
from symbiosis.transport.control_messages import MOST_AT_ONCE, connected, received, send
from symbiosis.transport.cuda import packed_pieces
from symbiosis.transport.cuda.driver import CudaError, DeviceMemory, WordPage
from symbiosis.transport.cuda.weights import layout, mapped
from symbiosis.transport.cuda.words import ANSWERED, BEAT, ENQUEUED, FIRST_BYTES
from symbiosis.transport.local import packed_file
from symbiosis.transport.local.client import BELL, must_be, read_letter
from symbiosis.transport.local.segment import Slab
from symbiosis.transport.local.shared_page import NBYTES, SharedPage
from symbiosis.transport.patience import AWAY, JOIN_S, LONGEST_PAUSE_S, Patience, Reason, unavailable
from symbiosis.transport.reply_checks import Answers, accepted

logger = logging.getLogger("symbiosis")
PAUSE_S = 0.05  # between two attempts to find an executor again, while somebody waits for it
FORGOTTEN_AT_ONCE = 512  # calls in one message


class Joining(NamedTuple):
    """How a GPU of this process joins an executor, for the first time and again."""

    address: str
    hello: Callable[[], Hello]  # returns the message to join with, each time
    device: torch.device
    patience: float
    sharing: Sharing | None = None  # set if the session wants to map the weights


class CudaHandshake:
    """One process's agreement with an executor. `failed` says why there is none any more."""

    def __init__(self, joining: Joining, on_failed: Callable[[], None]) -> None:
        """`on_failed` is called in another thread."""
        self._address, self._hello, self._device, self._patience, self._sharing = joining
        self._on_failed = on_failed
        self.first = DeviceMemory.create(FIRST_BYTES, self._device)
        self._page: SharedPage | None = None  # once the weights are mapped
        self._url = f"local://{self._address}"
        self.reconnects, self.closed = 0, False
        self.failed: SymbiosisError | None = None
        # seconds until this process, if it lives, gives up waiting for an answer
        self.longest = self._patience + JOIN_S
        self.segments: dict[int, DeviceMemory] = {0: self.first}
        self.places: dict[int, Register] = {}  # by the calls' numbers
        self.rounds: dict[int, Compose] = {}
        self._agreed = Compose(0, ())  # the round that was asked about last
        self._numbers, self._segment_numbers = itertools.count(1), itertools.count(1)
        self._control = threading.RLock()
        self.awake = os.eventfd(0)  # each join puts the executor's own in its place
        self._fd = os.memfd_create("symbiosis-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, WordPage.nbytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.words = WordPage(self._fd)
        self._watcher = threading.Thread(target=self._watch, name="symbiosis-line", daemon=True)

    def join(self) -> None:
        """Join for the first time. Raises the error that keeps us out."""
        self._socket = self._join(JOIN_S)
        self._watcher.start()

    # ------------------------------------------------------------------ what is agreed

    def share(self, memory: DeviceMemory) -> int:
        """Share a piece of memory, and return the number of the segment that it becomes."""
        number = next(self._segment_numbers)
        with _descriptor(memory) as fd:
            self._ask(Segment(number, memory.nbytes), fd)
        self.segments[number] = memory
        return number

    def register(
        self, call: Call, segment: int, start: int, results: Sequence[tuple[int, int]] = ()
    ) -> tuple[int, tuple[int, ...]]:
        """Register a call to be made at this place, and return its number and the shape of its reply."""
        register = Register(next(self._numbers), call_body(call), segment, start, tuple(results))
        answer = self._ask(register)
        assert isinstance(answer, Registered)
        self.answers.check(call, Reply(0, Code.OK, call.dtype, answer.shape))
        self.places[register.number] = register
        return register.number, answer.shape

    def agrees(self, numbers: Sequence[int]) -> Composed:
        """Ask whether the executor would answer these calls as a round. Raises `CallError` if it would not."""
        compose = Compose(0, tuple(numbers))
        answer = self._ask(compose)
        assert isinstance(answer, Composed)
        self._agreed = compose
        return answer

    def new_round(self) -> int:
        """Return the number for a round that is about to be composed."""
        return next(self._numbers)

    def compose(self, number: int, numbers: Sequence[int]) -> None:
        """Make a round of these calls, begun by `number`. Raises `CallError` if the executor does not agree."""
        compose = Compose(number, tuple(numbers))
        self._ask(compose)
        self.rounds[number] = replace(compose, again=True)

    def forget(self, numbers: Sequence[int], segments: Sequence[int]) -> None:
        """Forget calls and rounds that are not made any more and are all answered, and give these segments up."""
        for number in numbers:
            self.places.pop(number, None)
            self.rounds.pop(number, None)
        calls = [
            Forget(tuple(numbers[at : at + FORGOTTEN_AT_ONCE])) for at in range(0, len(numbers), FORGOTTEN_AT_ONCE)
        ]
        for message in (*calls, Forget((), tuple(segments))):
            with suppress(CallError):  # a later executor may not know them
                self._ask(message)
        for number in segments:
            self.segments.pop(number).close()

    def _ask(self, message: Control, fd: int | None = None) -> Control:
        """Ask the executor, or if it is gone the next one, and return the answer."""
        give_up = time.monotonic() + self._patience
        while True:
            with self._control:
                try:
                    return _exchange(self._socket, message, fd)
                except (OSError, ConnectionLost) as error:
                    cause = error
                    with suppress(OSError):  # so that a late answer is not taken for the next one: join anew
                        self._socket.shutdown(socket.SHUT_RDWR)
            if self.failed or self.closed or time.monotonic() > give_up:
                raise self.failed or self._unavailable(cause)
            time.sleep(PAUSE_S)  # the watcher looks for another one

    def _join(self, timeout: float) -> socket.socket:
        """Return a new connection, on which everything is agreed again that was agreed before. `awake` wakes the new executor."""
        sock = connected(self._address, timeout)
        try:
            hello = self._hello()
            send(sock, hello, [self._fd])
            with received(sock, decode_from_executor, 2) as (message, fds):
                _answer(message)
                if len(fds) != 2:
                    raise ProtocolError(Code.BAD_FRAME, f"{self._url} answers a join with {len(fds)} descriptors")
                letter, awake = fds
                must_be(BELL, awake)
                self.welcome = accepted(read_letter(letter), self._url, hello)
                os.dup2(awake, self.awake, inheritable=False)  # in one step: a call may be about to write there
            self.answers = Answers(self.welcome)
            if self._sharing is not None:
                self._map(sock, self._sharing)
            for number, memory in list(self.segments.items()):
                with _descriptor(memory) as fd:
                    _exchange(sock, Segment(number, memory.nbytes), fd)
            for register in list(self.places.values()):
                _exchange(sock, register)
            for compose in list(self.rounds.values()):
                _exchange(sock, compose)
            if self._agreed.calls and self.places.keys() >= set(
                self._agreed.calls
            ):  # so that it knows that kernels wait
                with suppress(CallError):
                    _exchange(sock, self._agreed)
            _exchange(sock, Resume())
            # a slow executor is not a lost one: if we hung up, it would let us go
            sock.settimeout(max(timeout, self._patience))
        except BaseException:
            sock.close()
            raise
        return sock

    def _map(self, sock: socket.socket, sharing: Sharing) -> None:
        """Map the served weights, if the executor shares them."""
        send(sock, Share(weights=True))
        with received(sock, decode_from_executor, MOST_AT_ONCE) as (answer, fds):
            if isinstance(answer, Refusal):
                raise answer.error()
            if not isinstance(answer, Shared):
                raise ProtocolError(Code.BAD_FRAME, f"{self._url} answers a Share with a {type(answer).__name__}")
            if not fds:
                sharing.join({}, None)
                return
            manifest, dense = self.welcome.manifest, len(layout(self.welcome.manifest)[1])
            found: dict[int, Tensor | PackedWeight] = {**mapped(manifest, fds[:dense], self._device)}
            if packed_file.holds_packed(manifest):
                found |= packed_pieces.mapped(manifest, fds[dense:-1], self._device)
            page = Slab(fds[-1], NBYTES)
            fds.pop()  # which is the slab's now
            self._page = SharedPage(page)
        sharing.join(found, self._page)

    def _unmap(self) -> None:
        """Take leave of the executor's advice, because one side is leaving. The weights stay mapped as long as something uses them."""
        if self._sharing is not None:
            self._sharing.leave()
        if self._page is not None:
            self._page.close()
            self._page = None

    # ------------------------------------------------------------------ the executor's life

    def _watch(self) -> None:
        """Beat, and find another executor when this one hangs up."""
        watched = select.poll()
        watched.register(self._socket.fileno(), select.POLLRDHUP)
        while not self.closed:
            self.words.words[BEAT] = (self.words.words[BEAT] + 1) & 0xFFFFFFFF
            if self._sharing is not None:
                self._sharing.report()
            if watched.poll(self.welcome.heartbeat_s / 4 * 1000) and not self.closed:
                watched.unregister(self._socket.fileno())
                if not self._find_another():
                    return
                watched.register(self._socket.fileno(), select.POLLRDHUP)
        self._socket.close()  # it may have joined again just when we left

    def _find_another(self) -> bool:
        with self._control:
            self._socket.close()
            self._unmap()
            if self._goes_on_alone():
                logger.warning(AWAY, self._url)
                return self._joins_again(math.inf)
            waiting, found = Patience([self._url], self._patience, "patience=, $SYMBIOSIS_PATIENCE_S"), False
            try:
                found = self._joins_again(self._patience)
            finally:
                waiting.end(self._url if found else None)
            return found

    def _goes_on_alone(self) -> bool:
        """Whether nothing is unanswered, and nothing will be asked."""
        words = self.words.words
        return self._sharing is not None and self._sharing.suffices and words[ENQUEUED] == words[ANSWERED]

    def _joins_again(self, patience: float) -> bool:
        give_up, pause = time.monotonic() + patience, PAUSE_S
        while not self.closed:
            try:
                self._socket = self._join(JOIN_S)
                self.reconnects += 1
                return True
            except CallError as error:
                if error.code not in (Code.DRAINING, Code.LIMIT) and patience < math.inf:
                    self._fail(error)
                    return False
                cause: Exception = error
            except (OSError, ConnectionLost, CudaError) as error:
                cause = error
            if time.monotonic() > give_up:
                self._fail(self._unavailable(cause))
                return False
            time.sleep(pause)
            pause = PAUSE_S if patience < math.inf else min(2 * pause, LONGEST_PAUSE_S)
        return False

    def _unavailable(self, cause: Exception) -> ExecutorUnavailable:
        return unavailable({self._url: Reason.of(cause)})

    def _fail(self, error: SymbiosisError) -> None:
        logger.error("what this program computes from now on is void: %s", error)
        self.failed = error
        self._on_failed()

    def close(self) -> bool:
        """Hang up. Return whether nothing of ours uses the memory any more."""
        self.closed = True
        if self._sharing is not None:
            self._sharing.report()  # while the executor still looks
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the watcher
        over = _ends(self._watcher)
        self._socket.close()
        if over:
            self._unmap()
        return over

    def free(self) -> None:
        """Free all memory. Nothing may use it any more."""
        for memory in self.segments.values():
            memory.close()
        self.words.close()
        os.close(self._fd)
        os.close(self.awake)


def _ends(thread: threading.Thread) -> bool:
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(1.0)
        return not thread.is_alive()
    return True


@contextmanager
def _descriptor(memory: DeviceMemory) -> Iterator[int]:
    fd = memory.fd()
    try:
        yield fd
    finally:
        os.close(fd)


def _exchange(sock: socket.socket, message: Control, fd: int | None = None) -> Control:
    send(sock, message, [] if fd is None else [fd])
    with received(sock, decode_from_executor) as (answer, _):
        return _answer(answer)


def _answer(answer: Control) -> Control:
    if isinstance(answer, Bye):
        raise ConnectionLost("it hung up")
    if isinstance(answer, Refusal):
        raise answer.error()
    if not isinstance(answer, Done | Registered | Composed):
        raise ProtocolError(Code.BAD_FRAME, f"an executor answers with a {type(answer).__name__}")
    return answer
