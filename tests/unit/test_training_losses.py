"""Losses over log probabilities, against what their papers say; and what data are refused."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from symbiosis.errors import ConfigError
from symbiosis.training.datum import Datum, check_tokens, sequences
from symbiosis.training.logit_pieces import sequence_pieces
from symbiosis.training.losses import check_loss, loss_of, slopes, slopes_of_function
from symbiosis.training.row_losses import KINDS, losses_and_slopes, row_numbers
from symbiosis.training.sequence_packing import PackLayout

NOW, OLD, ADVANTAGES = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.6], [1.0, -2.0, 0.5]
RATIO = [math.exp(a - b) for a, b in zip(NOW, OLD, strict=True)]  # 1.65, 0.37, 1.11


def datum(**more: Any) -> Datum:
    return Datum([4, 5, 6], targets=[5, 6, 7], **{"logprobs": OLD, "advantages": ADVANTAGES, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "config", "each"),
    [
        ("cross_entropy", {}, [1.0, 2.0, 0.5]),
        ("importance_sampling", {}, [-RATIO[0], 2 * RATIO[1], -0.5 * RATIO[2]]),
        ("ppo", {}, [-1.2, 2 * 0.8, -0.5 * RATIO[2]]),
        ("ppo", {"clip_high_threshold": 2.0}, [-RATIO[0], 2 * 0.8, -0.5 * RATIO[2]]),
        ("cispo", {}, [-1.2 * -1.0, 2 * 0.8 * -2.0, -0.5 * RATIO[2] * -0.5]),
        ("dro", {"beta": 0.1}, [1.0 + 0.05 * 0.25, -4.0 + 0.05 * 1.0, 0.25 + 0.05 * 0.01]),
    ],
)
@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 0.5]])
def test_losses_are_sums_over_tokens(
    kind: str, config: dict[str, float], each: list[float], weights: list[float] | None
) -> None:
    expected = sum(w * one for w, one in zip(weights or [1.0] * 3, each, strict=True))
    assert float(loss_of(kind, torch.tensor(NOW), datum(weights=weights), config)) == pytest.approx(expected, abs=1e-5)


def test_gspo_has_the_ratio_of_the_sequence() -> None:
    ratio = math.exp((0.5 - 1.0 + 0.1) / 3)
    assert float(loss_of("gspo", torch.tensor(NOW), datum(), {})) == pytest.approx(-ratio * (1.0 - 2.0 + 0.5))
    counted = math.exp((0.5 + 0.1) / 2)  # 1.35, of those that count
    loss = loss_of("gspo", torch.tensor(NOW), datum(weights=[1.0, 0.0, 1.0]), {})
    assert counted > 1.2 and float(loss) == pytest.approx(-1.2 * (1.0 + 0.5))


@pytest.mark.parametrize("kind", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_slopes_are_the_derivatives(kind: str) -> None:
    now, step = torch.tensor(NOW, dtype=torch.float64), 1e-5
    _, found = slopes(kind, now, datum(), {})
    for position in range(3):
        if kind == "cispo":
            break  # its ratio is taken for a constant
        moved = [now + sign * step * torch.eye(3, dtype=torch.float64)[position] for sign in (1, -1)]
        higher, lower = (float(loss_of(kind, each, datum(), {})) for each in moved)
        assert float(found[position]) == pytest.approx((higher - lower) / (2 * step), abs=1e-4)
    if kind == "cispo":
        assert found.tolist() == pytest.approx([-1.2, 1.6, -0.5 * RATIO[2]], abs=1e-5)


def test_several_targets_of_a_token() -> None:
    several = Datum([4, 5], targets=[[5, 6], [7, 8]], weights=[[0.5, 0.5], [1.0, 0.0]])  # type: ignore[arg-type]
    assert float(loss_of("cross_entropy", torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), several, {})) == 4.5


def test_a_function_of_all_sequences() -> None:
    given = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    loss, found = slopes_of_function(lambda each, data: each[0].sum() * each[1].sum(), given, [])
    assert loss == 9.0 and [d.tolist() for d in found] == [[-3.0, -3.0], [-3.0]]
    _, found = slopes_of_function(lambda each, data: each[0].sum(), given, [])
    assert found[1].tolist() == [0.0]
    with pytest.raises(ConfigError, match="returns one number"):
        slopes_of_function(lambda each, data: each[0], given, [])
    with pytest.raises(ConfigError, match="returns one number"):
        slopes_of_function(lambda each, data: torch.tensor(1.0), given, [])


@pytest.mark.parametrize(
    ("kind", "data", "config", "said"),
    [
        ("mse", [datum()], {}, "the losses are"),
        ("ppo", [datum()], {"clip": 1.0}, "has no clip"),
        ("cross_entropy", [datum()], {"beta": 1.0}, "nothing can be chosen"),
        ("dro", [datum(logprobs=None)], {}, "needs logprobs"),
        ("ppo", [Datum([4], [[5, 6]], logprobs=[[0.0, 0.0]], advantages=[[0.0, 0.0]])], {}, "two dimensions"),  # type: ignore[arg-type]
    ],
)
def test_losses_that_cannot_be(kind: str, data: list[Datum], config: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_loss(kind, data, config)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([], "empty"),
        (5, "a batch is"),
        ({"input_ids": [[1, 2]]}, "needs labels"),
        ({"input_ids": [[1, 2]], "labels": [[1, 2]], "position_ids": [[0, 1]]}, "position_ids"),
        ({"input_ids": [[1, 2]], "labels": [[1]]}, "matrices of one shape"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "matrices of one shape"),
        ({"input_ids": [[1, 2, 3]], "labels": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "has a hole"),
        ({"input_ids": [[1, 2]], "labels": [[1, 2]], "attention_mask": [[0, 0]]}, "masked as a whole"),
        ({"input_ids": [[1.5, 2]], "labels": [[1, 2]]}, "whole numbers"),
        ({"input_ids": [["a"]], "labels": [[1]]}, "no list of numbers"),
    ],
)
def test_batches_that_cannot_be(batch: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sequences(batch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"tokens": [], "targets": []}, "whole numbers|one sequence"),
        ({"tokens": [1, 2], "targets": [1]}, "2 tokens need 2 targets"),
        ({"tokens": [[1, 2]], "targets": [[1, 2]]}, "one sequence"),
        ({"tokens": [1, 2], "targets": [1, 2], "weights": [1.0]}, "weights has the shape 1"),
        ({"tokens": [1], "targets": [1], "weights": [float("nan")]}, "not numbers"),
    ],
)
def test_data_that_cannot_be(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Datum(**words)


def test_tokens_that_the_model_cannot_read() -> None:
    check_tokens([Datum([0, 9], [9, 0])], 10, 2)  # type: ignore[arg-type]
    for data, said in (([1, 2, 3], "has 3 tokens"), ([10], "one is 10"), ([-1], "one is -1")):
        with pytest.raises(ConfigError, match=said):
            check_tokens([Datum(data, [0] * len(data))], 10, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="targets are numbers"):
        check_tokens([Datum([0], [10])], 10, 2)  # type: ignore[arg-type]


def test_padding_of_a_batch_is_cut_off() -> None:
    batch = {
        "input_ids": torch.tensor([[0, 5, 6, 7], [5, 6, 0, 0]]),
        "labels": torch.tensor([[-100, 5, 6, 7], [5, 6, -100, -100]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]),
    }
    left, right = sequences(batch)
    assert left.tokens.tolist() == [5, 6, 7] and right.tokens.tolist() == [5, 6]
    assert left.weights is not None and left.weights.tolist() == [0.25, 0.25, 0.0]  # of 4 labels that count
    assert right.weights is not None and right.weights.tolist() == [0.25, 0.0]


def test_layouts() -> None:
    packed, padded = PackLayout((3, 3, 2), True), PackLayout((3, 1, 2), False)
    assert (packed.rows, packed.firsts, list(packed.blocks())) == (8, [0, 3, 6], [(0, 2, 3, None), (6, 1, 2, None)])
    assert (padded.rows, padded.firsts) == (9, [0, 3, 6])


def test_pieces_have_whole_sequences() -> None:
    assert [(p.start, p.stop) for p in sequence_pieces([5, 5, 5, 20, 1], 10)] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert [(p.start, p.stop) for p in sequence_pieces([1], 1)] == [(0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_all_rows_at_once_are_those_of_each_sequence(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.rand, generator=generator)
    data = [
        Datum(list(range(n)), list(range(n)), weights=draw(n), logprobs=-2 * draw(n), advantages=draw(n) - 0.5)
        for n in (3, 50)
    ]
    logprobs = [-2 * draw(len(datum)) for datum in data]
    config = {"beta": 0.3} if kind == "dro" else {}
    kinds, numbers = row_numbers(kind, data, config, backward=True)
    losses, found = losses_and_slopes(torch.cat(logprobs), kinds, numbers)
    expected = [slopes(kind, each, datum, config) for each, datum in zip(logprobs, data, strict=True)]
    assert float(losses.sum()) == pytest.approx(sum(loss for loss, _ in expected), rel=1e-5)
    assert torch.allclose(found, torch.cat([slope for _, slope in expected]), rtol=1e-5, atol=1e-6)
    assert not losses_and_slopes(torch.cat(logprobs), *row_numbers(kind, data, config, backward=False))[1].any()


def test_a_weight_of_zero_hides_what_is_no_number() -> None:
    datum = Datum([1], [2], weights=[0.0], logprobs=[-1e30], advantages=[1.0])
    kinds, numbers = row_numbers("importance_sampling", [datum], {}, backward=True)
    assert [float(each) for each in losses_and_slopes(torch.tensor([-1.0]), kinds, numbers)] == [0.0, 0.0]
