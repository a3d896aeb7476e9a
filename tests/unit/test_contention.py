"""What a product costs where threads want more cores than there are; and that the batcher waits longer there."""

import os
import threading
from pathlib import Path

import pytest

from symbiosis.executor.scheduling import contention as module
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.contention import MOST, Contention
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import OPPORTUNISTIC

PRODUCT_S, THINKS_S = 1e-4, 1e-3


def looked(contention: Contention, times: int = 300) -> float:
    for _ in range(times):
        contention.look()
    return contention.now


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the kernel's file, on a machine of four cores."""
    file = tmp_path / "loadavg"
    file.write_text("0.20 0.18 0.12 1/80 11206\n")
    monkeypatch.setattr(module, "FileIO", lambda _: file.open("rb", buffering=0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return file


@pytest.mark.parametrize(("running", "many"), [(1, 1.0), (4, 1.0), (6, 1.5), (12, 3.0), (400, MOST)])
def test_it_is_how_many_want_each_core(running: int, many: float, said: Path) -> None:
    said.write_text(f"0.20 0.18 0.12 {running}/800 11206\n")
    contention = Contention()
    assert looked(contention) == pytest.approx(many, rel=1e-3)
    said.write_text("0.20 0.18 0.12 1/800 11206\n")
    assert looked(contention) == pytest.approx(1.0, rel=1e-3)
    contention.close()
    contention.look()


@pytest.mark.parametrize("text", ["", "0.20 0.18", "a b c d e"])
def test_what_is_not_understood_is_not_looked_at_again(text: str, said: Path) -> None:
    said.write_text("0.20 0.18 0.12 400/800 11206\n")
    contention = Contention()
    assert looked(contention) == pytest.approx(MOST)
    said.write_text(text)
    assert looked(contention) == 1.0


def test_without_that_file_nobody_is_taken_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(module, "FileIO", fails)
    assert looked(Contention()) == 1.0


def test_this_machine_says_it() -> None:
    contention, stop = Contention(), threading.Event()
    threads = [threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert 1.0 <= looked(contention) <= MOST
        assert contention._load > 0
    finally:
        stop.set()


@pytest.mark.parametrize(("many", "waits"), [(1.0, False), (4.0, True)])
def test_who_comes_soon_is_waited_for_if_a_product_costs_more(many: float, waits: bool) -> None:
    """Two who make the same two calls in turn, the second two products' time behind the first."""
    batcher, now = Batcher(OPPORTUNISTIC, max_wait=1e-2), 1.0
    batcher.rules.contention = many
    for session in (1, 2):
        batcher.join(session)
    for turn in range(20):
        key = "ab"[turn % 2]
        for session in (1, 2):
            batcher.add(Item(session, key, 1, 0, now))
            if session == 1 and turn == 19:
                assert (batcher.next_batch(now) is None) is waits
                return
            if session == 1:
                now += 2 * PRODUCT_S
        while batch := batcher.next_batch(now):
            batch.ran()
            batcher.done(batch, PRODUCT_S, now + PRODUCT_S)
        now += THINKS_S


@pytest.mark.parametrize("after_others", [False, True])
def test_who_joins_does_at_first_what_those_did_who_left(after_others: bool) -> None:
    """Two who come anew, one behind the other by half a product: do they meet at their second call already?"""
    batcher, now = Batcher(OPPORTUNISTIC, max_wait=1e-2), 1.0
    rounds = 3 if after_others else 1
    for number in range(rounds):
        sessions = (2 * number + 1, 2 * number + 2)
        for session in sessions:
            batcher.join(session)
        together = []
        for turn in range(2 if number == rounds - 1 else 20):
            for session in sessions:
                batcher.add(Item(session, "ab"[turn % 2], 1, 0, now))
                if batch := batcher.next_batch(now):
                    together.append(len(batch.slices))
                    batch.ran()
                    batcher.done(batch, PRODUCT_S, now + PRODUCT_S)
                now += PRODUCT_S / 2
            now += THINKS_S
        for session in sessions:
            batcher.leave(session)
    assert (2 in together) is after_others


def test_who_pauses_for_long_and_stays_away_holds_up_nobody() -> None:
    """One decodes; another makes a round of the same calls every half second, three times, and never again."""
    batcher, now, product, keys = Batcher(OPPORTUNISTIC, max_wait=1e-2, overdue=3.0), 1.0, 2e-4, 20
    at: dict[int, float | None] = {1: now, 2: now}
    made = {1: 0, 2: 0}
    for session in at:
        batcher.join(session)
    answered = []
    while now < 4.0:
        now = max(now, min([batcher.wake_at(), *(when for when in at.values() if when is not None)]))
        for session, when in at.items():
            if when is not None and now >= when:
                batcher.add(Item(session, made[session] % keys, 1, 0, now))
                made[session], at[session] = made[session] + 1, None
        while batch := batcher.next_batch(now):
            batch.ran()
            now += product
            batcher.done(batch, product, now)
            for piece in batch.slices:
                session = piece.item.session
                pause = 0.5 if session == 2 and made[2] % keys == 0 else product
                at[session] = now + pause if session == 1 or made[2] < 3 * keys else None
                answered += [now] if session == 1 else []
    for second in (2.5, 3.0, 3.5):  # it is overdue, and then forgotten
        assert sum(second <= when < second + 0.5 for when in answered) > 0.9 * 0.5 / (2 * product)
