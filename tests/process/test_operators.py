"""`Split` needs two executors that are run by two operators, and stays with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.errors import CallError, Code, WrapError
from tests.conftest import tiny_llama
from tests.private import recorded
from tests.processes import until


def test_two_executors_of_one_operator_are_refused(serve: Callable) -> None:
    names: dict[str, Any] = {}
    for name in ("one", "", "two"):
        names[name] = serve(tiny_llama(), integers=[8], operator=name)
    again = serve(tiny_llama(), integers=[8], operator="one")
    names["ONE"], names["space"] = (serve(tiny_llama(), integers=[8], operator=name) for name in ("ONE\t", " "))
    for first, second, words in (
        (names["one"], names["ONE"], "both run by 'one'"),
        (names["one"], names["space"], "does not say who runs it"),
        (names["one"], again, "both run by 'one'"),
        (names["one"], names["one"], "both run by 'one'"),
        (names["one"], names[""], "does not say who runs it"),
        (names[""], names["two"], "does not say who runs it"),
    ):
        with pytest.raises(WrapError, match=words):
            symbiosis.wrap(tiny_llama(), first.endpoint, privacy=symbiosis.Split(second.endpoint))
    for executor in (*names.values(), again):
        until(lambda executor=executor: not executor.server.sessions, "the end of every session")


def test_an_executor_without_integers_is_refused(serve: Callable) -> None:
    one, other = serve(tiny_llama(), operator="one", integers=[8]), serve(tiny_llama(), operator="two")
    with pytest.raises(WrapError, match="--integers 8"):
        symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    with pytest.raises(WrapError, match="--integers 16"):
        symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint, 16))


def test_another_model_as_second_half_is_refused(serve: Callable) -> None:
    torch.manual_seed(1)
    changed = tiny_llama()
    with torch.no_grad():
        changed.model.layers[0].mlp.gate_proj.weight[0, 0] += 1
    one, other = serve(tiny_llama(), operator="one", integers=[8]), serve(changed, operator="two", integers=[8])
    with pytest.raises(CallError) as refused:
        symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    assert refused.value.code is Code.WRONG_MODEL


def test_a_successor_of_another_operator_gets_nothing(serve: Callable, tmp_path: Path) -> None:
    """Were the second executor replaced by one of the first operator's, who has one half already."""
    address = f"local://{tmp_path}/second.sock"
    one = serve(tiny_llama(), operator="one", integers=[8])
    other = serve(tiny_llama(), operator="two", integers=[8], listen=[address])
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(address))
    layer, x = wrapped.model.layers[0].mlp.gate_proj, torch.ones(1, 64)
    expected = layer(x)
    other.close()
    usurper = serve(tiny_llama(), operator="one", integers=[8], listen=[address])
    log = recorded(usurper)
    with pytest.raises(CallError, match="run by 'one'") as refused:
        layer(x)
    assert refused.value.code is Code.NOT_ALLOWED and not log
    usurper.close()
    rightful = serve(tiny_llama(), operator="two", integers=[8], listen=[address])
    assert torch.equal(layer(x), expected)
    rightful.close()
