"""Large calls of training beside those who decode: none is lost or overtakes another, and they get their share of the time."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.executor import dispatch, loop
from symbiosis.executor.accounts import Account, ServedSession
from symbiosis.executor.call_kinds import DeviceCall, DeviceWork, Round, RoundKey
from symbiosis.executor.dispatch import TOLD_S
from symbiosis.executor.gpu.train_share import DECODES_S, Background
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.queue import Batch
from symbiosis.protocol import Call, Op, Priority, Reply
from symbiosis.transport.base import Direct, RoundWords, Tokens

PRODUCT_S, SHARE = 1e-3, 0.1
CALLS = 5  # of a large round
WORDS = RoundWords(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0)
ROWS = {Priority.DECODE: 1, Priority.PREFILL: 512, Priority.TRAIN: 512}


def work(number: int = 0, peer: object = None) -> Any:
    return SimpleNamespace(number=number, peer=peer)


def test_alone_they_never_wait() -> None:
    background = Background(SHARE)
    for now in (1.0, 1.0, 1.0001):
        assert not background.takes(work(), now)
        background.ran(PRODUCT_S, now)
    assert not background and background.wake_at() == float("inf")


def test_beside_who_decodes_they_get_their_share() -> None:
    background, now, ran = Background(SHARE), 1.0, 0
    while now < 2.0:
        background.decoded = now
        if not background and not background.takes(work(), now):  # the client calls again as soon as it has its answer
            background.ran(PRODUCT_S, now)
            ran += 1
        while background.next(now):
            background.ran(PRODUCT_S, now)
            ran += 1
        now = min(background.wake_at(), now + 0.01)
    assert ran * PRODUCT_S == pytest.approx(SHARE, rel=0.1)


@pytest.mark.parametrize("late", [0.0, 2e-4, 8e-4])
def test_they_get_their_share_of_a_host_that_is_late(late: float) -> None:
    background, now, ran, seconds = Background(SHARE), 1.0, 0, 1e-4
    while now < 2.0:
        background.decoded = now
        if not background and not background.takes(work(), now):
            background.ran(seconds, now)
            ran += 1
        while background.next(now):
            background.ran(seconds, now)
            ran += 1
        now = min(background.wake_at(), now + 1e-5) + late
    assert ran * seconds == pytest.approx(SHARE, rel=0.05)


def test_time_in_which_nobody_called_is_not_made_up_for() -> None:
    background = Background(SHARE)
    background.decoded = 10.0
    background.ran(PRODUCT_S, 1.0)
    at_once = 0
    while not background.takes(work(), 10.0):
        background.ran(PRODUCT_S, 10.0)
        at_once += 1
    assert at_once == 1


def test_when_nobody_decodes_any_more_they_all_run() -> None:
    background = Background(1e-9)
    background.decoded = 1.0
    background.ran(PRODUCT_S, 1.0)
    assert all(background.takes(work(number), 1.0) for number in range(3))
    assert background.wake_at() == 1.0 + DECODES_S and background.next(1.0 + 0.9 * DECODES_S) is None
    assert [background.next(1.0 + DECODES_S).number for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]


def test_a_share_of_one_is_no_limit() -> None:
    background = Background(1.0)
    background.decoded = 1.0
    background.ran(PRODUCT_S, 1.0)
    assert not background.takes(work(), 1.0)


def test_who_leaves_is_not_answered() -> None:
    background, other = Background(SHARE), object()
    background.decoded = 1.0
    background.ran(PRODUCT_S, 1.0)
    for number, peer in enumerate((None, other, None, other)):
        assert background.takes(work(number, peer), 1.0)
    background.leave(None)
    assert [background.next(9.0).number for _ in range(2)] == [1, 3] and not background  # type: ignore[union-attr]


@given(st.lists(st.tuples(st.sampled_from(["call", "decode", "step"]), st.floats(0, 0.05)), max_size=200))
def test_none_is_lost_and_none_overtakes_another(events: list[tuple[str, float]]) -> None:
    background, now, sent, answered = Background(SHARE), 1.0, 0, list[int]()
    for what, later in [*events, ("step", 10.0)]:
        now += later
        if what == "decode":
            background.decoded = now
        elif what == "call":
            if not background.takes(work(sent), now):
                background.ran(PRODUCT_S, now)
                answered.append(sent)
            sent += 1
        while one := background.next(now):
            background.ran(PRODUCT_S, now)
            answered.append(one.number)
        assert background.wake_at() > now
    assert answered == list(range(sent)) and not background


# ---------------------------------------------------------------- the server, with bells that nobody's GPU rings


class Engine:
    """Instead of one on a GPU: every call is answered when it is launched."""

    batch_below, rounds, shares_time = 256, None, True

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Priority, PRODUCT_S)
        self.launched = Counter[int]()
        self.refuses: Any = None
        self.gpu = self

    def note_addresses(self, call: DeviceCall, at: Any) -> None: ...

    def estimate(self, work: DeviceWork, rows: int) -> float:
        return self.seconds[Priority(work.calls[0].priority)]

    def step(self, batch: Batch) -> float:
        batch.ran()
        for piece in batch.slices:
            piece.item.work.peer.session.end()
            self.launched[piece.item.work.priority] += piece.last
        return PRODUCT_S

    def launch(self, work: DeviceWork, piecemeal: bool = False) -> Reply:
        self.launched[work.priority] += 1
        if isinstance(work, Round):
            left = work.left or CALLS
            work.left = left - 1 if piecemeal else 0
        if self.refuses:
            self.refuses(work.peer)
        return Reply(0)


class Client:
    transport = "cuda"
    session: Any = None

    def __init__(self, here: bool, tenant: str | None) -> None:
        self.here, self.tenant = here, tenant


class Executor:
    """A server whose clock is set by hand, with a session for each priority."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1.0
        for module in (loop, dispatch):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        store = Store(torch.nn.Sequential(torch.nn.Linear(8, 8)))
        self.server, self.engine = ExecutorLoop(store, Options(train_share=SHARE, **options)), Engine()
        self.server.engine = self.server.gpu = self.server.dispatch.gpu = self.engine  # type: ignore[assignment]
        self.works: dict[Priority, Any] = {priority: self.prepared(priority) for priority in Priority}

    def prepared(self, priority: Priority, here: bool = True, tenant: str | None = None) -> DeviceCall:
        number = len(self.server.sessions) + 1
        peer = Client(here, tenant)
        peer.session = ServedSession(number, peer, "", None, False, self.now, Account(self.server.dispatch.limits))
        self.server.sessions[number] = peer.session
        self.server.batcher.join(number)
        call = Call(Op.FORWARD, 0, "float32", (ROWS[priority], 8), priority=priority)
        return self.server.dispatch.prepare(peer, 1, call, (torch.empty(call.shape),), (torch.empty(call.shape),))

    def round_of(self, priority: Priority) -> Round:
        """Its call comes as a round from now on."""
        member = self.works[priority]
        round = self.works[priority] = Round(RoundKey((member.plan.key,) * CALLS), (member,) * CALLS, WORDS)
        return round

    def rings(self, priority: Priority) -> bool:
        """Whether the call has to wait."""
        return self.server.dispatch.on_doorbell(self.works[priority])


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    return Executor(monkeypatch)


def test_training_waits_while_somebody_decodes(executor: Executor) -> None:
    for _ in range(3):
        assert not executor.rings(Priority.TRAIN)
    executor.rings(Priority.DECODE)
    assert executor.rings(Priority.TRAIN) and executor.server.dispatch.waiting
    session = executor.works[Priority.TRAIN].peer.session
    assert session.in_flight == 1 and executor.engine.launched[Priority.TRAIN] == 3
    assert not executor.rings(Priority.PREFILL), "what is not training never waits"
    executor.server._step()
    assert executor.server._sleep_s() == pytest.approx(PRODUCT_S / SHARE)
    executor.now += PRODUCT_S / SHARE
    executor.server._step()
    assert executor.engine.launched[Priority.TRAIN] == 4 and not session.in_flight
    assert session.calls == 4


def test_who_makes_tokens_directly_is_given_way_until_more_is_heard(executor: Executor) -> None:
    told = executor.server.dispatch
    direct = executor.works[Priority.PREFILL].peer
    executor.rings(Priority.TRAIN)
    told.multiplied(direct, Direct(1, 1, 64, Tokens.FEW))
    executor.now += 0.01
    executor.rings(Priority.DECODE)  # by another client, once
    executor.now += TOLD_S / 2
    executor.rings(Priority.TRAIN)
    assert executor.rings(Priority.TRAIN), "the last report says that tokens are still made"


@pytest.mark.parametrize("tokens", [Tokens.FEW, Tokens.MANY])
def test_others_are_advised_at_once_when_the_first_tokens_are_made_directly(tokens: Tokens, executor: Executor) -> None:
    told, direct = executor.server.dispatch, executor.works[Priority.PREFILL].peer
    told.multiplied(direct, Direct(1, 1, 64, Tokens.NONE))
    assert not told.has_news
    told.multiplied(direct, Direct(2, 2, 128, tokens))
    assert told.has_news
    told.has_news = False
    told.multiplied(direct, Direct(3, 3, 192, tokens))
    assert not told.has_news, "they know"


def test_a_large_round_goes_whole_or_call_by_call(executor: Executor) -> None:
    """Beside somebody who decodes each of its calls takes its turn; whoever else trains is served between them."""
    train = executor.round_of(Priority.TRAIN)
    session, launched = train.peer.session, executor.engine.launched
    assert not executor.rings(Priority.TRAIN)
    assert (launched[Priority.TRAIN], session.calls, train.left) == (1, train.plan.calls, 0)
    executor.rings(Priority.DECODE)
    assert executor.rings(Priority.TRAIN) and launched[Priority.TRAIN] == 1
    for call in range(1, CALLS + 1):
        executor.now += PRODUCT_S / SHARE + 1e-6
        executor.server.dispatch.background.decoded = executor.now
        executor.server._step()
        assert launched[Priority.TRAIN] == 1 + call and train.left == CALLS - call
        assert session.in_flight == (call < CALLS), "a client in the midst of a round is not taken for a silent one"
    assert session.calls == 2 * train.plan.calls and not executor.server.dispatch.waiting


def test_the_rest_of_a_large_round_goes_at_once_when_nobody_decodes(executor: Executor) -> None:
    train = executor.round_of(Priority.TRAIN)
    executor.rings(Priority.TRAIN)
    executor.rings(Priority.DECODE)
    executor.rings(Priority.TRAIN)
    executor.now += PRODUCT_S / SHARE + 1e-6
    executor.server._step()
    assert train.left == CALLS - 1
    executor.now += DECODES_S
    executor.server._step()
    assert train.left == 0 and not executor.server.dispatch.waiting


def test_a_slow_token_lets_no_whole_round_go_before_the_next(executor: Executor) -> None:
    """That would make the next token slower still, and so on."""
    train, now = executor.round_of(Priority.TRAIN), executor.now
    executor.rings(Priority.DECODE)
    executor.rings(Priority.TRAIN)
    for token in range(1, 4):
        executor.now = now + 0.25 * token
        executor.server._step()
        assert train.left == CALLS - 1 - token
        executor.rings(Priority.DECODE)


@pytest.mark.parametrize("prefill_s", [1e-3, 2e-4])
def test_prefill_neither_takes_the_share_of_training_nor_adds_to_it(prefill_s: float, executor: Executor) -> None:
    executor.engine.seconds.update({Priority.PREFILL: prefill_s, Priority.TRAIN: 20e-3})
    waits = False
    for step in range(20_000):  # of 0.2 ms
        if step % 25 == 0:
            executor.rings(Priority.DECODE)
            executor.rings(Priority.PREFILL)
        if not waits:
            executor.rings(Priority.TRAIN)
        executor.server._step()
        waits = bool(executor.server.dispatch.background)
        executor.now += 2e-4
    assert executor.engine.launched[Priority.TRAIN] * 20e-3 == pytest.approx(4.0 * SHARE, rel=0.2)


def test_a_client_that_is_hung_up_on_when_its_call_fails_harms_nobody(executor: Executor) -> None:
    executor.rings(Priority.TRAIN)
    executor.rings(Priority.DECODE)
    assert executor.rings(Priority.TRAIN)
    executor.engine.refuses = executor.server.dispatch.left
    executor.now += 1.0
    executor.server._step()
    assert executor.engine.launched[Priority.TRAIN] == 2 and not executor.server.dispatch.waiting


def test_who_leaves_while_its_call_waits_is_forgotten(executor: Executor) -> None:
    executor.rings(Priority.TRAIN)
    executor.rings(Priority.DECODE)
    assert executor.rings(Priority.TRAIN)
    executor.server.dispatch.left(executor.works[Priority.TRAIN].peer)
    assert not executor.server.dispatch.background
    executor.now += 1.0
    executor.server._step()
    assert executor.engine.launched[Priority.TRAIN] == 1


def test_an_executor_that_ends_answers_all(executor: Executor) -> None:
    executor.rings(Priority.TRAIN)
    executor.rings(Priority.DECODE)
    assert executor.rings(Priority.TRAIN)
    while not executor.server.batcher.idle:
        executor.server._step()
    assert executor.server.dispatch.waiting == 1
    executor.server.dispatch.draining = True
    executor.server.dispatch.wait_for_nobody()
    assert not executor.server._over()
    executor.server._step()
    assert executor.engine.launched[Priority.TRAIN] == 2 and executor.server._over()


def test_large_calls_of_tenants_and_from_elsewhere_take_turns(executor: Executor) -> None:
    assert executor.works[Priority.TRAIN].large and executor.works[Priority.PREFILL].large
    assert not executor.works[Priority.DECODE].large
    assert not executor.prepared(Priority.TRAIN, here=False).large
    assert not executor.prepared(Priority.TRAIN, tenant="alice").large


def test_under_lockstep_all_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(monkeypatch, policy="lockstep")
    assert executor.rings(Priority.TRAIN) and len(executor.server.batcher) == 1


def test_what_comes_behind_a_large_call_is_no_sign_of_how_long_a_session_thinks(executor: Executor) -> None:
    decoder = executor.works[Priority.DECODE]
    prefill = executor.server.dispatch.prepare(
        decoder.peer,
        2,
        executor.works[Priority.PREFILL].call,
        executor.works[Priority.PREFILL].payload,
        decoder.results,
    )
    rhythm = executor.server.batcher.callers.sessions[decoder.peer.session.number]
    rhythm.last_key = decoder.plan.key
    executor.server.dispatch.on_doorbell(prefill)
    assert rhythm.last_key is None
