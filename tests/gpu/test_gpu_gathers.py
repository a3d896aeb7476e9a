"""Weights that are gathered into buffers before products: whatever comes in whatever order, from one stream or two, multiplies by its own weight."""

import random

import pytest
import torch
from torch import Tensor

from symbiosis.executor.gpu.weight_gathers import Gathers, buffer_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda:0")
SHAPES = [(512, 256), (256, 256), (512, 256), (128, 256), (512, 512)]


@pytest.fixture(scope="module")
def weights() -> list[Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(1)
    return [torch.randn(shape, device=DEVICE, generator=draw) for _ in range(4) for shape in SHAPES]


@pytest.mark.parametrize("buffers", [2, 3, 8])
@pytest.mark.parametrize("streams", [1, 2])
def test_products_by_gathered_weights(weights: list[Tensor], buffers: int, streams: int) -> None:
    """Thousands of gathers in random order of layers and directions, and runs through the model; weights are copied in pieces."""
    order = list(range(len(weights)))
    cuts = {number: [4096 * (number % 3 + 1)] for number in order if number % 4}
    gathers = Gathers(weights, order, buffers * buffer_bytes(weights, order), DEVICE, cuts)
    used = [torch.cuda.Stream(DEVICE) for _ in range(streams)]
    draw, at, wrong = random.Random(2), 0, torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    for turn in range(3_000):
        backward = turn % 400 >= 200
        at = draw.choice(order) if draw.random() < 0.2 else (at + (-1 if backward else 1)) % len(order)
        layers = order[at : at + draw.randint(1, 3)]
        if not gathers.takes(layers):
            continue
        with torch.cuda.stream(draw.choice(used)):
            with gathers.of(layers, backward) as held:
                assert held.keys() == set(layers)
                for layer in layers:
                    x = torch.ones(3, weights[layer].shape[1], device=DEVICE)
                    got = x @ held[layer].t()
            wrong += not_equal(got, x @ weights[layers[-1]].t())
    torch.cuda.synchronize()
    assert wrong.item() == 0 and gathers.made > 1_000


def not_equal(got: Tensor, expected: Tensor) -> Tensor:
    return (got != expected).any()


def test_a_run_through_the_model_gathers_each_weight_once(weights: list[Tensor]) -> None:
    """The next ones are gathered ahead, and what is there is not gathered again."""
    order = list(range(len(weights)))
    gathers = Gathers(weights, order, 6 * buffer_bytes(weights, order), DEVICE)
    for layer in order:
        for _ in range(4):  # as many clients
            with gathers.of([layer], backward=False) as held:
                assert torch.equal(held[layer], weights[layer])
    assert gathers.made == len(order)
    for layer in reversed(order):
        with gathers.of([layer], backward=True) as held:
            assert torch.equal(held[layer], weights[layer])
    assert gathers.made <= 2 * len(order)


def test_too_few_buffers_take_nothing(weights: list[Tensor]) -> None:
    order = list(range(len(weights)))
    gathers = Gathers(weights, order, 3 * buffer_bytes(weights, order), DEVICE)
    assert gathers.takes([0, 1]) and not gathers.takes([0, 1, 2])
    assert not Gathers(weights, order, 0, DEVICE).takes([0])
