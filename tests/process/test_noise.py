"""`Noise`: what it hides, what it does not, and who may know it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import symbiosis
from symbiosis.client.privacy.noise import gaussian
from symbiosis.errors import WrapError
from tests.conftest import tiny_llama
from tests.private import MODELS, lora, one_step, recorded


def test_known_noise_must_be_asked_for(serve: Callable) -> None:
    executor = serve(tiny_llama())
    with pytest.raises(WrapError, match="allow_known_noise"):
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Noise(effects="same"))
    with pytest.raises(WrapError, match="may have the same operator"):
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Noise(effects=serve(tiny_llama()).endpoint))


def test_effects_come_from_a_known_other_operator_or_as_said(serve: Callable) -> None:
    executors = {name: serve(tiny_llama(), operator=name) for name in ("", "north", " North ", "south")}
    for name, other, words in (
        ("", "south", "does not say who runs it"),
        ("north", "", "does not say who runs it"),
        ("north", " North ", "both run by 'north'"),
        ("north", "north", "both run by 'north'"),
    ):
        here, effects = executors[name].endpoint, executors[other].endpoint
        with pytest.raises(WrapError, match=words):
            symbiosis.wrap(tiny_llama(), here, privacy=symbiosis.Noise(effects=effects))
        symbiosis.wrap(tiny_llama(), here, privacy=symbiosis.Noise(effects=effects, allow_known_noise=True))
    symbiosis.wrap(
        tiny_llama(), executors["north"].endpoint, privacy=symbiosis.Noise(effects=executors["south"].endpoint)
    )


@pytest.mark.parametrize(
    "options", [{}, {"every": 5}, {"effects": "same", "allow_known_noise": True}, {"effects": "other"}]
)
@MODELS
def test_noise_is_taken_away_again(build: Callable, options: dict[str, Any], serve: Callable, ids: Tensor) -> None:
    model = build()
    one, other = serve(model, operator="one"), serve(model, operator="two")
    if options.get("effects") == "other":
        options = {"effects": other.endpoint}
    log = recorded(one)
    expected = one_step(lora(copy.deepcopy(model)), ids)
    wrapped = lora(symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Noise(scale=16.0, **options)))
    rows = len(log)
    found = one_step(wrapped, ids)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-3 * float(theirs.abs().max()), rtol=0)
    assert (rows > 0) == (options.get("effects") == "same")  # the noise itself was sent
    assert all(call.dtype == "float32" and not call.bias for call, _ in log)


def test_masked_rows_are_mostly_noise(serve: Callable) -> None:
    executor = serve(tiny_llama())
    log = recorded(executor)
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Noise(scale=16.0, pool=4))
    x = torch.randn(200, 64)
    wrapped.model.layers[0].mlp.gate_proj(x)
    sent = log[-1][1]
    assert sent is not None
    sizes = (sent - x).square().mean(1).sqrt() / x.square().mean(1).sqrt()
    assert 8 < float(sizes.min()) < float(sizes.max()) < 32
    directions = torch.nn.functional.normalize(sent - x, dim=1)
    assert int((directions @ directions[0] > 0.999).sum()) in range(20, 90)  # one of four vectors


def test_noise_is_normally_distributed() -> None:
    values = gaussian(100, 1001).double().flatten()
    assert abs(float(values.mean())) < 0.02 and abs(float(values.var()) - 1) < 0.03
    assert abs(float((values.abs() < 1).double().mean()) - 0.6827) < 0.01
    assert float(values.abs().max()) > 3.5
