"""Which products are called and which are made directly, and what the executor advises: plain data."""

import pytest
import torch

from symbiosis.client.direct.mapped import Mapped
from symbiosis.client.direct.rule import DECODE_ROWS, WORTH_BATCHING, should_send
from symbiosis.executor.scheduling.advice import BELIEVED_S, LASTS_S, Advisor
from symbiosis.transport.local.segment import Slab
from symbiosis.transport.local.shared_page import NBYTES, SharedPage


@pytest.mark.parametrize(
    ("rows", "nbytes", "training", "others", "give_way", "called"),
    [
        (1, WORTH_BATCHING, False, 0, False, False),  # nobody to be batched with
        (1, WORTH_BATCHING, False, 1, False, True),
        (DECODE_ROWS, WORTH_BATCHING, False, 1, False, True),
        (DECODE_ROWS + 1, WORTH_BATCHING, False, 7, True, False),  # many rows gain nothing from others
        (1, WORTH_BATCHING - 1, False, 7, True, False),  # a small weight is read sooner than a call is made
        (512, WORTH_BATCHING, True, 7, False, False),
        (512, WORTH_BATCHING, True, 1, True, True),  # training gives way to tokens in the queue
        (1, 0, True, 0, True, True),
        (0, WORTH_BATCHING, False, 0, True, False),
    ],
)
def test_a_call_is_made_only_where_it_pays(
    rows: int, nbytes: int, training: bool, others: int, give_way: bool, called: bool
) -> None:
    assert should_send(rows, nbytes, training, others, give_way) is called


def test_who_decodes_is_told_of_others_and_not_of_itself() -> None:
    advisor = Advisor(batches=True, rations=False)
    advisor.decoded(1, 0.0, called=False)
    assert advisor.of(1, 0.0) == (0, False)
    assert advisor.of(2, 0.0) == (1, False)
    advisor.decoded(2, 0.1, called=False)
    assert advisor.of(1, 0.2) == advisor.of(2, 0.2) == (1, False)
    assert advisor.of(3, 0.2) == (2, False)


def test_training_gives_way_only_to_who_decodes_by_calls() -> None:
    advisor = Advisor(batches=True, rations=False)
    advisor.decoded(1, 0.0, called=False)
    assert not advisor.of(3, 0.1)[1]
    advisor.decoded(1, 0.2, called=True)
    assert advisor.of(3, 0.3) == (1, True)
    assert not advisor.of(1, 0.3)[1]


def test_training_on_a_gpu_gives_way_to_all_who_make_tokens() -> None:
    advisor = Advisor(batches=True, rations=True)
    assert advisor.decoded(1, 0.0, called=False, few=False), "others should be advised at once"
    assert not advisor.decoded(1, 0.1, called=False, few=False)
    assert advisor.of(3, 0.1) == (0, True), "and nobody can be batched with many rows"
    assert advisor.of(1, 0.1) == (0, False)
    advisor.left(1)
    assert advisor.of(3, 0.1) == (0, False)
    assert advisor.decoded(2, LASTS_S + 0.1, called=True) and advisor.of(3, 2.0) == (1, True)


def test_what_was_long_ago_counts_no_more_and_neither_do_those_who_left() -> None:
    advisor = Advisor(batches=True, rations=False)
    for session in (1, 2):
        advisor.decoded(session, 0.0, called=True)
    advisor.left(2)
    assert advisor.of(3, 0.0) == (1, True)
    assert advisor.of(3, LASTS_S) == (0, False)


def test_who_only_says_that_it_decodes_is_not_believed_for_long() -> None:
    advisor = Advisor(batches=True, rations=False)
    told = []
    for step in range(20):  # every half second
        now = step / 2
        advisor.decoded(1, now, called=bool(told and told[-1]))  # as it is told
        advisor.decoded(2, now, called=False)  # never
        advisor.of(2, now)
        told.append(advisor.of(1, now)[0])
    assert told == [1] * int(2 * BELIEVED_S) + [0] * (20 - int(2 * BELIEVED_S))
    advisor.decoded(2, 10.0, called=True)
    assert advisor.of(1, 10.0) == (1, True), "until it calls"


def test_who_pauses_is_believed_again() -> None:
    advisor = Advisor(batches=True, rations=False)
    for now in (0.0, 100.0, 200.0):  # between which it decoded nothing
        advisor.decoded(1, now, called=False)
        advisor.decoded(2, now, called=True)
        assert advisor.of(1, now) == (1, True) and advisor.of(2, now) == (1, False)
        advisor.of(1, now + LASTS_S)


def test_an_executor_that_joins_nothing_advises_nobody_to_call() -> None:
    advisor = Advisor(batches=False, rations=False)
    advisor.decoded(1, 0.0, called=True)
    assert advisor.of(2, 0.0)[0] == 0


def test_what_one_executor_was_told_the_next_is_not() -> None:
    """Whether a session maps weights anew with what it has, or with another one in its place, as on another GPU."""
    cpu, first, *others = torch.device("cpu"), *(SharedPage(Slab.create(NBYTES)) for _ in range(3))
    mapped = Mapped([], None, cpu)
    mapped.join({}, first)
    mapped.count(5, 50, 500)
    mapped.report()
    mapped.count(1, 10, 100)  # and the executor goes before it is told
    for page in others:
        if page is others[0]:
            mapped.join({}, page)
        else:
            mapped.count(2, 20, 200)  # nor is it told this
            another = Mapped([], None, cpu)
            another.join({}, page)
            mapped = another.take_over(mapped)
        mapped.count(1, 10, 100)
        mapped.report()
    assert [page.read()[:3] for page in (first, *others)] == [(5, 50, 500), (2, 20, 200), (3, 30, 300)]
    assert mapped.joins == 3 and mapped.figures == (10, 100, 1000)
    for page in (first, *others):
        page.close()
