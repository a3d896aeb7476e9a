"""For which arguments a captured step's graph may be replayed; and one capture at a time."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from transformers import BatchEncoding

from symbiosis.client.capture import WarmUp, capture, key_of, only_makes_tokens
from symbiosis.client.direct.mapped import DirectFigures
from symbiosis.client.direct.step_routes import Multiplied, Way
from symbiosis.errors import CaptureError
from symbiosis.kernels.gpu import graphs
from symbiosis.protocol import Call, Op, Priority
from symbiosis.transport.base import Tokens
from tests.processes import WAIT_S

A, B = torch.zeros(2, 3), torch.ones(2, 3)


def key(*arguments: Any, **named: Any) -> tuple[Any, ...]:
    return key_of(*tree_flatten((arguments, named)))


@pytest.mark.parametrize(
    ("one", "same"),
    [(A, B), ({"ids": A, "labels": B}, {"ids": B, "labels": A}), ([A, (B, 3, "x")], [B, (A, 3, "x")]), (None, None)],
)
def test_the_same_kind_of_arguments(one: Any, same: Any) -> None:
    assert key(one) == key(same) and hash(key(one)) == hash(key(same))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"ids": A, "labels": B}, {"labels": B, "ids": A}),  # in this order they would be copied
        ({"ids": A}, {"labels": A}),
        ([A, [B]], [[A], B]),
        ((A, B), [A, B]),
        (A, A.T),
        (A, A.double()),
        (A, None),
        (0, False),
        (1, 1.0),
        (1, 2),
    ],
)
def test_other_arguments(one: Any, other: Any) -> None:
    assert key(one) != key(other)


def test_named_arguments() -> None:
    assert key(A, labels=B) == key(B, labels=A) != key(A, B)
    assert key(a=A, b=B) != key(b=B, a=A)


def test_modes() -> None:
    keys = {key(A)}
    with torch.no_grad():
        keys.add(key(A))
    with torch.inference_mode():
        keys.add(key(A))
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # as torch.autocast would, were there a GPU
    try:
        for dtype in (torch.bfloat16, torch.float16):
            torch.set_autocast_dtype("cuda", dtype)
            keys.add(key(A))
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert len(keys) == 5


def test_arguments_that_a_graph_cannot_have() -> None:
    with pytest.raises(CaptureError, match=r"BatchEncoding: .*\*\*batch"):
        key(BatchEncoding({"input_ids": A}))
    with pytest.raises(CaptureError, match="no gradient"):
        key(nn.Parameter(A))
    with torch.no_grad():
        key(nn.Parameter(A))


def run(*priorities: Priority, tokens: Tokens = Tokens.NONE) -> WarmUp:
    """A run that made calls of these priorities, and directly such tokens."""
    line: Any = None
    calls = tuple(Call(Op.FORWARD, 0, "float32", (1, 8), priority=priority) for priority in priorities)
    mapped: Any = None
    return WarmUp([(line, calls)], [Multiplied(mapped, DirectFigures(), tokens)])


NOBODY_TRAINS, SOMEBODY_TRAINS = {1: (True, False)}, {1: (False, False), 2: (False, True)}


@pytest.mark.parametrize(
    ("made", "asked", "expected"),
    [
        (run(Priority.DECODE), NOBODY_TRAINS, True),
        (run(tokens=Tokens.FEW), NOBODY_TRAINS, True),
        (run(tokens=Tokens.MANY), {}, True),
        (run(), {}, False),  # what it is for cannot be told
        (run(Priority.PREFILL), {}, False),
        (run(Priority.DECODE, Priority.TRAIN), {}, False),
        (run(Priority.DECODE), SOMEBODY_TRAINS, False),
    ],
)
def test_what_only_makes_tokens_is_urgent(made: WarmUp, asked: dict[int, tuple[bool, bool]], expected: bool) -> None:
    assert only_makes_tokens(made, asked) is expected


def test_runs_by_weights_of_an_executor_that_is_gone_are_forgotten() -> None:
    """They would keep those weights in memory."""
    captured = capture(lambda: None)
    now, before = (Way(1, join, 0, False) for join in (2, 1))
    for way in (now, before, Way(2, 1, 0, False)):
        captured._is_warming(("kind", (way,)), run())
    captured._drop_what_was_unmapped((now,))
    assert list(captured._warming) == [("kind", (now,))]


def test_one_thread_captures_at_a_time() -> None:
    """Whoever could wait for the other does not."""
    begun, over = threading.Event(), threading.Event()

    def capture() -> None:
        with graphs.capturing:
            begun.set()
            over.wait(WAIT_S)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(WAIT_S)
    assert graphs.captured(lambda: None, (0, 1)) is None
    over.set()
    thread.join(WAIT_S)
