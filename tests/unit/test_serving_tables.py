"""What a step's tables say of its rows, and which rows of it have which adapter. The tables lie in a CPU's memory here."""

import pytest
import torch

from symbiosis.serving.lora.target_layers import _spans_of
from symbiosis.serving.request import Request
from symbiosis.serving.runner.step_tables import EMPTY, Rows, Slots
from symbiosis.serving.scheduler.scheduler_output import Block, Fed, ScheduledRequest, SchedulerOutput, Sequence

CPU = torch.device("cpu")
LAYERS, QUERIES, TILE = 2, 4, 2


def sequence(tokens: int, first_page: int) -> Sequence:
    made = Sequence(Request(id=0, prompt=(1,)), 0, list(range(100, 100 + tokens)), None, 0.0)
    made.blocks = [Block((first_page + 2 * n, first_page + 2 * n + 1)) for n in range(-(-tokens // 16))]
    return made


def test_tables_say_where_each_row_belongs() -> None:
    one, many, other = sequence(9, 10), sequence(20, 20), sequence(1, 30)
    slots, rows = Slots(4, LAYERS, CPU), Rows(16, 8, QUERIES, TILE, CPU)
    first = SchedulerOutput(
        (
            ScheduledRequest(one, 0, 1, 8, True),
            ScheduledRequest(many, 1, 6, 14, True),
            ScheduledRequest(other, 7, 1, 0, True),
        )
    )
    second = SchedulerOutput((ScheduledRequest(other, 0, 1, 0, True),), Fed([0], [3], torch.arange(50, 56)))
    for step, kept in ((first, [0, 6, 7]), (second, [0])):
        rows.fill(step, slots, torch.tensor(kept))
        rows.upload(step)
        if step is first:
            a, b, c = (slots.of(each) for each in (one, many, other))
            assert rows.host["ids"].tolist()[:9] == [108, *range(114, 120), 100, 0]
            assert rows.host["positions"].tolist()[:9] == [8, *range(14, 20), 0, 0]
            assert rows.host["slots"].tolist()[:9] == [a, *[b] * 6, c, EMPTY]
            assert rows.host["singles"].tolist()[:3] == [[0, a, 9], [7, c, 1], [EMPTY] * 3]
            assert rows.host["blocks"].tolist()[:3] == [[1, 4, b, 14], [5, 2, b, 18], [0] * 4]
            assert rows.host["kept"].tolist()[:4] == [0, 6, 7, 0]
    assert rows.device["ids"].tolist() == [53] + [0] * 15, "what only the device knows"
    assert rows.host["slots"].tolist() == [c] + [EMPTY] * 15
    assert rows.host["singles"].tolist()[:2] == [[0, c, 1], [EMPTY] * 3] and not rows.host["blocks"].any()
    assert slots.pages[b, :, :2].tolist() == [[20, 22], [21, 23]]


def test_slots_follow_blocks_that_are_replaced_and_are_free_again() -> None:
    slots, one = Slots(1, LAYERS, CPU), sequence(40, 10)
    slot = slots.of(one)
    one.blocks[1] = Block((0, 7))
    one.blocks.append(Block((50, 51)))
    assert slots.of(one) == slot
    assert slots.pages[slot, :, :4].tolist() == [[10, 0, 14, 50], [11, 7, 15, 51]]
    slots.forget(one)
    assert slots.of(sequence(1, 3)) == slot and slots.moved == 0


@pytest.mark.parametrize(
    ("kept", "expected"),
    [([], []), ([0, 4, 9], [(1, 1, "b")]), ([2, 3, 4, 5, 8], [(0, 1, "a"), (2, 1, "b"), (3, 1, "b"), (4, 1, "c")])],
)
def test_kept_rows_belong_to_the_spans_they_lie_in(kept: list[int], expected: list[tuple[int, int, str]]) -> None:
    spans = [(1, 2, "a"), (4, 3, "b"), (8, 1, "c")]
    assert _spans_of(kept, spans) == expected  # type: ignore[arg-type, comparison-overlap]
