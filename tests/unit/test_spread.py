"""Which rank makes what of a call that all ranks answer, and where a session's calls go when it has moved."""

from typing import Any

import pytest

from symbiosis.client.connection.spread import Spread, shares_of
from symbiosis.client.session import Session
from symbiosis.protocol import Call, Layer, Limits, Op, View, Welcome

UP = Layer("up", "linear", (256, 64), "float32", "")
TOLD = Welcome(
    5, "", [UP], "", "", Limits(), False, 1.0, "", ranks=3, shard="fsdp", spread_rows=8, shares=(1.0, 1.0, 2.0)
)
URLS = ["inproc://spread", "inproc://spread.rank1", "inproc://spread.rank2", "inproc://other"]


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DGRAD])
def test_ranks_make_what_they_are_told_to_hold(op: Op) -> None:
    """Not in the order of ranks, and whatever their shares are; without being told, by their shares."""
    call = Call(op, 0, "float32", (4, 64 if op is Op.FORWARD else 256))
    held = shares_of(call, 0, UP, TOLD.shares, (192, 0, 64))
    assert [(share.begin, share.end) for share in held] == [(192, 256), (0, 64), (64, 192)]
    assert [share.call.shape for share in held] == ([(4, 64)] * 3 if op is Op.FORWARD else [(4, 64), (4, 64), (4, 128)])
    view = View((64, 128), (1, 64), 64 * 64)
    assert held[2].call.view == (view if op is Op.FORWARD else View((128, 64), (64, 1), 64 * 64))
    assert [(share.begin, share.end) for share in shares_of(call, 0, UP, TOLD.shares)] == [
        (0, 64),
        (64, 128),
        (128, 256),
    ]


def test_a_session_that_moves_keeps_a_session_with_each_other_rank() -> None:
    first: Any = Session(URLS[0])
    joined: list[tuple[str, ...]] = []

    def join(endpoints: tuple[str, ...], fingerprint: str) -> Session:
        joined.append(endpoints)
        return Session(endpoints)

    spread = Spread.over(first, TOLD, URLS, URLS[0], join)
    assert spread.callers[0] is first and [urls[0] for urls in joined] == URLS[1:3]
    assert all(set(urls) == set(URLS) for urls in joined)
    assert spread.moved(URLS[0], join) is spread and spread.moved("inproc://other", join) is spread
    joined.clear()
    moved = spread.moved(URLS[2], join)
    assert moved.callers[2] is first and [urls[0] for urls in joined] == URLS[:2]
