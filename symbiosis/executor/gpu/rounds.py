"""Rounds: all calls of a captured step, which the GPU answers by itself, for one client or for several together.

A captured step makes the same calls in the same order each time. So the whole round is enqueued ahead, as one CUDA graph. For each
call the graph waits for the clients' bells, multiplies, and answers. A CPU only begins the round, once every client that takes part
has rung for it. If one of several clients dies in the middle, or takes too long, the graph stops answering, and the rounds of the
other clients go on from where they are, each by itself.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter

import torch

from symbiosis.errors import CallError, Code
from symbiosis.executor.call_kinds import DeviceCall, Round, RoundKey, call_error
from symbiosis.executor.gpu.gathered_calls import Multiply, power_of_two, rounded
from symbiosis.executor.gpu.playback import ByKernels, ByStream, Few, Playback, for_one, load, rest, together
from symbiosis.kernels.gpu import gather as rows
from symbiosis.protocol import Call
from symbiosis.transport.base import Peer, refuse
from symbiosis.transport.cuda.driver import HIGHEST, new_stream

PLAYBACKS_KEPT = 32
END_S = 0.05  # at most, between a round's last answer and its end
DRAIN_S = 20.0  # how long an executor that ends waits for the rest of a client's round


class Rounds:
    """The rounds of all clients of one GPU, on which several programs run at the same time."""

    def __init__(
        self,
        multiply: Multiply,
        few_rows: Few,
        on_over: Callable[[Hashable, float], None],
        device: torch.device,
        gathers_for: Callable[[Call], bool] = lambda call: False,
    ) -> None:
        """`few_rows` returns the kernel for a call and a number of rows, or None if there is none. `on_over` is told how long rounds of a
        key take. `gathers_for` says whether weights are brought here for a call."""
        self._gathers_for = gathers_for
        self._multiply, self._few_rows, self._on_over = multiply, few_rows, on_over
        self._device, self._streams = device, defaultdict[int, list[torch.cuda.Stream]](list)  # by priority
        self._bare: dict[int, torch.cuda.Stream] = {}  # by priority: a stream that still lacks its memory
        self._clients: defaultdict[int, set[Peer]] = defaultdict(set)  # by priority: the clients with such rounds
        self._give_up = math.inf  # when an executor that ends stops waiting for clients
        self._keys: dict[RoundKey, RoundKey] = {}
        self._alone: dict[Round, Playback] = {}  # the playbacks that answer one round by itself
        self._together: OrderedDict[Hashable, list[ByKernels]] = OrderedDict()
        self._running: list[Playback] = []
        self._gone: list[tuple[Peer, Callable[[], None]]] = []  # clients, and what to do when their rounds are over
        load(device)

    def key_of(self, calls: Sequence[DeviceCall], most: float) -> RoundKey:
        """Return the key of a round of these calls. Raises `CallError` if they cannot be a round, or if one has `most` rows or more."""
        if (
            not calls
            or not calls[0].peer.here
            or any(call.addresses is None or call.plan.rows >= most for call in calls)
        ):
            raise CallError(
                Code.UNKNOWN_OP, "a round has calls of few rows, which a program on the executor's own GPU makes"
            )
        if len({call.plan.rows for call in calls}) > 1:
            raise CallError(Code.UNKNOWN_OP, "the calls of a round have the same number of rows")
        key = RoundKey(tuple(call.plan.key for call in calls))
        return self._keys.setdefault(key, key)

    def make_room(self, round: Round) -> None:
        """Make a stream for each client with such rounds, now: when all run at once, no memory may be left for it. Raises `CallError` if
        there is none now."""
        priority = 0 if round.large else HIGHEST
        clients = self._clients[priority] | {round.peer}
        try:
            while len(self._streams[priority]) < len(clients):
                self._new_stream(priority)
        except Exception as error:  # whatever it is: the executor has other clients
            reason = f"there is no room for the captured steps of one more client: {type(error).__name__}"
            raise CallError(Code.RESOURCE, reason) from error
        self._clients[priority] = clients

    @property
    def running(self) -> bool:
        """Whether a round was begun whose end nobody has seen yet."""
        return bool(self._running)

    def begin(self, rounds: Sequence[Round]) -> None:
        """Answer these small rounds of one key together. A round that an earlier executor began is answered by itself, and so is that of a
        client that kept others waiting."""
        if len(rounds) > rows.PLACES:
            raise ValueError(f"{len(rounds)} rounds do not fit a page")
        if len(rounds) == 1:
            self._begin_alone(rounds[0])
            return
        fresh = sorted([r for r in rounds if not r.goes_on and not r.alone_for], key=lambda round: round.serial)
        if len(fresh) > 1:
            self._begin(self._for_all(fresh), fresh, 0, len(fresh[0].calls))
        for round in [round for round in rounds if len(fresh) < 2 or round not in fresh]:
            self._go_on(round)

    def begin_large(self, round: Round, calls: int) -> None:
        """Answer the next `calls` calls of a large round, without waiting for the GPU. If none are left, the round begins again."""
        if round.goes_on:
            self._begin_alone(round)
            return
        playback = self._alone.get(round)
        if playback is None or not round.left:
            playback, round.left = self._for_one(round), len(round.calls)
        first = len(round.calls) - round.left
        last = min(first + calls, len(round.calls))
        round.left, round.launched = len(round.calls) - last, round.calls[first:last]
        self._begin(playback, [round], first, last)

    def drain(self) -> None:
        """Begin no more rests of rounds: the next executor answers them."""
        self._give_up = perf_counter() + DRAIN_S

    @property
    def draining(self) -> bool:
        return self._give_up < math.inf

    def look(self) -> None:
        """Look which rounds are over. A round that was not answered to its end goes on alone."""
        if perf_counter() > self._give_up:
            self._give_up_waiting()
        for playback in [playback for playback in self._running if playback.over]:
            self._running.remove(playback)
            rounds, playback.rounds = playback.rounds, []
            if playback.replayed and not playback.late and not rounds[0].large:
                self._on_over(rounds[0].key, perf_counter() - playback.begun)
            for round in [round for round in rounds if playback.late and not round.gone and not self.draining]:
                answered = int(round.reply.item())
                if round.is_behind(answered):
                    if not playback.stopped and int(round.bell.item()) == answered:
                        round.was_late()
                    self._go_on(round)
        for playback in self._running:
            if playback.stopped:
                playback.stop()
        for peer, then in [(peer, then) for peer, then in self._gone if not self._runs_for(peer)]:
            self._gone.remove((peer, then))
            then()

    def _give_up_waiting(self) -> None:
        """Stop all rounds. What was computed for the unfinished ones is void, because their memory may hold anything."""
        for playback in self._running:
            late = [] if playback.over or playback.stopped else [round for round in playback.rounds if not round.gone]
            playback.stop()
            for round in late:
                round.gone = True
                refuse(round.peer, 0, CallError(Code.DRAINING, "the executor ended in the midst of a captured step"))

    def leave(self, peer: Peer, then: Callable[[], None]) -> None:
        """End the rounds of a client that is gone. `then` is called when nothing uses its memory any more."""
        for clients in self._clients.values():
            clients.discard(peer)
        self._alone = {round: playback for round, playback in self._alone.items() if round.peer is not peer}
        for playback in [playback for playback in self._running if not playback.over]:
            theirs = [round for round in playback.rounds if round.peer is peer]
            for round in theirs:
                round.gone, round.left = True, 0
            if theirs:
                playback.stop()
        if self._runs_for(peer):
            self._gone.append((peer, then))
        else:
            then()

    def forget(self, round: Round) -> None:
        """Forget a round that does not come again. Raises `CallError` if it is under way."""
        self._see_the_end([playback for playback in self._running if round in playback.rounds])
        self._alone.pop(round, None)

    def _see_the_end(self, playbacks: list[Playback]) -> None:
        """Wait until these are over. That is soon, because their last answers are out: else their clients would not have called."""
        give_up, now = perf_counter() + END_S, 0.0
        while not all(playback.over for playback in playbacks):
            if now > give_up:  # before we looked: this thread may have slept
                raise CallError(Code.BAD_FRAME, "a round is under way, and has to be over first")
            now = perf_counter()

    def _runs_for(self, peer: Peer) -> bool:
        return any(
            not playback.over and any(round.peer is peer for round in playback.rounds) for playback in self._running
        )

    def _go_on(self, round: Round) -> None:
        """Answer the rest of a round by itself. If that fails, only its own client is told."""
        try:
            self._begin_alone(round)
        except Exception as error:  # whatever it is: the executor has other clients
            refuse(round.peer, 0, call_error(error))

    def _begin_alone(self, round: Round) -> None:
        goes_on, first, round.goes_on, round.answered = round.goes_on, round.answered, False, 0
        playback = rest(self._device, round, self._multiply) if goes_on else self._for_one(round)
        if not goes_on:
            round.alone_for = max(0, round.alone_for - 1)
        self._begin(playback, [round], first, len(round.calls))

    def _for_one(self, round: Round) -> Playback:
        """Return the playback that answers this round by itself. It is not running."""
        playback = self._alone.get(round)
        if playback is None:
            make: Callable[..., Playback] = ByStream if round.large else for_one
            playback = self._alone[round] = make(self._device, round, self._multiply)
            playback.captures = not any(map(self._gathers_for, round.calls))
        if playback in self._running:
            self._see_the_end([playback])
            self._running.remove(playback)
        return playback

    def _begin(self, playback: Playback, rounds: list[Round], first: int, last: int) -> None:
        """Begin a playback on a stream that no other one uses."""
        goes_on = playback in self._running
        stream = playback.stream if goes_on else self._free_stream(playback)
        if not goes_on:
            self._running.append(playback)
        try:
            playback.begin(rounds, stream, first, last)
        except BaseException:
            playback.stop()
            if playback.over:
                self._running.remove(playback)
            raise

    def _free_stream(self, playback: Playback) -> torch.cuda.Stream:
        """Return a stream that is free, if possible one for which this playback has a graph."""
        streams, used = self._streams[playback.priority], {other.stream for other in self._running}
        free = [stream for stream in streams if stream not in used] or [self._new_stream(playback.priority)]
        return max(free, key=lambda stream: playback.graphs_on(stream))

    def _new_stream(self, priority: int) -> torch.cuda.Stream:
        """Make a stream, with the memory that cuBLAS wants for it."""
        if priority not in self._bare:
            self._bare[priority] = new_stream(self._device, priority)
        with torch.cuda.stream(self._bare[priority]):
            torch.cuda.current_blas_handle()
        stream = self._bare.pop(priority)
        self._streams[priority].append(stream)
        return stream

    def _for_all(self, rounds: list[Round]) -> ByKernels:
        """Return a playback for these rounds together that is not running."""
        count, sessions = rounded(sum(round.rows for round in rounds)), power_of_two(len(rounds))
        key = rounds[0].key, count, sessions
        playbacks = self._together.setdefault(key, [])
        self._together.move_to_end(key)
        playback = next((playback for playback in playbacks if playback not in self._running), None)
        if playback is None:
            playback = together(self._device, rounds[0], self._multiply, self._few_rows, count, sessions)
            playbacks.append(playback)
            if len(self._together) > PLAYBACKS_KEPT:
                self._together.popitem(last=False)
        return playback
