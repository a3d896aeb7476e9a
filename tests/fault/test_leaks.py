"""What one tenant sends or gets is seen by no other: not in replies, logs or figures, not by a mix-up, not in memory used again."""

import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symbiosis.client.session import Session
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.protocol import DTYPES, MAGIC_REPLY, Call, Op, decode_reply, encode_call
from symbiosis.transport.tcp import listener as zeromq
from symbiosis.transport.tcp.sockets import cut
from tests.conftest import exact, tiny_llama
from tests.frames import only_used
from tests.processes import layer_number
from tests.realm import Raw, Realm

SENTINEL = b"\x5a" * 8
LAYER = "model.layers.0.mlp.up_proj"
MODEL = exact(tiny_llama())


@pytest.fixture
def realm(tmp_path: Path) -> Iterator[Realm]:
    realm = Realm(tmp_path, MODEL, policy="opportunistic")
    yield realm
    realm.executor.close()


class Talker:
    """Tenant alice, who says one thing again and again, in every size and way."""

    def __init__(self, realm: Realm) -> None:
        self._session = realm.session()
        self._layer = layer_number(self._session, LAYER)
        self._stop = threading.Event()
        self.calls = 0
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _talk(self) -> None:
        chance = random.Random(1)
        while not self._stop.is_set():
            rows = chance.choice((1, 2, 7, 64, 300, 2000))
            said = torch.full((rows, 64 * 4), SENTINEL[0], dtype=torch.uint8).view(torch.float32)
            assert torch.equal(self._session.call(Op.ECHO, 0, said), said)
            self._session.call(Op.FORWARD, self._layer, said)
            self.calls += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._session.close()


ASKED = (Op.FORWARD, *Op)  # products twice as often


def question(chance: random.Random, layers: int) -> list[bytes | memoryview]:
    """A call of any op, layer, dtype and shape, right or wrong, with a payload of the right size, or not."""
    shape = tuple(chance.choice((0, 1, 3, 64, 96, 200)) for _ in range(chance.choice((1, 2, 2, 2, 3))))
    call = Call(chance.choice(ASKED), chance.randrange(layers + 2), chance.choice(DTYPES), shape)
    call = only_used(call) if chance.random() < 0.9 else call
    if call.nbytes > 1 << 20:
        return question(chance, layers)
    size = call.nbytes if chance.random() < 0.9 else chance.randrange(100)
    frames: list[bytes | memoryview] = [encode_call(call, 1)]
    return [*frames, *cut(memoryview(bytes(size)), encrypted=True)] if call.parts or size != call.nbytes else frames


def ask(realm: Realm, count: int) -> int:
    """How many of bob's questions had an answer in full; the sentinel is in none."""
    layers, good = len(realm.executor.server.store.manifest), 0
    chance, bob = random.Random(2), Raw.joined(realm.endpoint("bob"))
    for _ in range(count):
        bob.socket.send_multipart(question(chance, layers))
        frames = bob.socket.recv_multipart()
        assert not any(SENTINEL in frame for frame in frames)
        good += frames[0][:4] == MAGIC_REPLY and not decode_reply(frames[0]).code
    bob.close()
    return good


@pytest.mark.fault
@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(1800)
def test_what_alice_says_bob_never_sees(
    count: int, realm: Realm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zeromq, "REFUSALS", 10**9)  # bob asks much that is refused
    caplog.set_level(logging.DEBUG)
    realm.let_in("bob")
    alice = Talker(realm)
    try:
        good = ask(realm, count)
    finally:
        alice.stop()
    assert good > count // 20, "too few of the questions were right"
    assert alice.calls > 20
    figures = realm.executor.server.snapshot()
    shown = "".join(str(family.samples) for family in PrometheusCollector(realm.executor.server.snapshot).collect())
    number = str(torch.frombuffer(bytearray(SENTINEL), dtype=torch.float32)[0].item())[:7]
    for text in (caplog.text, shown, repr(figures)):
        assert "ZZZZ" not in text and "5a5a" not in text and number not in text


class Owner:
    """A session with rows of its own, that knows what must come back, bit for bit: sums of such numbers are exact, whoever is
    in the same product."""

    def __init__(self, session: Session, seed: int) -> None:
        self._session, self._layer = session, layer_number(session, LAYER)
        self._x = torch.randint(-512, 513, (256, 64), generator=torch.Generator().manual_seed(seed)) / 512
        weight: Tensor = MODEL.get_submodule(LAYER).weight.detach()  # type: ignore[assignment, operator]
        self._y = self._x @ weight.t()
        self._chance = random.Random(seed)

    def call(self) -> bool:
        rows = self._chance.choice((1, 1, 1, 2, 3, 5, 8, 17, 64, 256))
        start = self._chance.randrange(257 - rows)
        y = self._session.call(Op.FORWARD, self._layer, self._x[start : start + rows])
        return torch.equal(y, self._y[start : start + rows])


@pytest.mark.fault
@pytest.mark.parametrize(
    "count", [3_000, pytest.param(10_000, marks=pytest.mark.full), pytest.param(1_000_000, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(7200)
def test_everybody_gets_the_product_of_its_own_rows(count: int, realm: Realm) -> None:
    """64 sessions of four tenants, joined in batches as they come."""
    names = ("alice", "bob", "carol", "dave")
    for name in names:
        realm.let_in(name)
    sessions = [realm.session(names[number % 4]) for number in range(64)]
    owners = [Owner(session, seed) for seed, session in enumerate(sessions)]
    wrong: list[int] = []

    def work(mine: list[Owner]) -> None:
        for number in range(count // 64 + 1):
            wrong.extend(number for owner in mine if not owner.call())

    threads = [threading.Thread(target=work, args=(owners[first::16],)) for first in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert realm.executor.server.ledger.totals[owners[0]._layer, Op.FORWARD].calls >= count
    assert max(realm.executor.server.ledger.batch_sizes) > 1, "nothing was batched: nothing could be mixed up"
    for session in sessions:
        session.close()


def test_no_reply_holds_memory_that_nobody_wrote(memory_is_filled_with_nan: None, realm: Realm) -> None:
    """Large calls run in slices, small ones batched: every row of the reply is one that was computed."""
    owners = [Owner(realm.session(), seed) for seed in range(4)]
    threads = [threading.Thread(target=lambda one=owner: [one.call() for _ in range(50)]) for owner in owners[1:]]
    for thread in threads:
        thread.start()
    assert all(owners[0].call() for _ in range(50))
    for thread in threads:
        thread.join()
    x = torch.randn(10_000, 64)
    assert not owners[0]._session.call(Op.FORWARD, owners[0]._layer, x).isnan().any()
    assert torch.equal(owners[0]._session.call(Op.ECHO, 0, x), x)
    for owner in owners:
        owner._session.close()
