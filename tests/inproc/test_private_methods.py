"""What PEFT methods and users do with private layers: results may be changed in place, what is asked besides products is proved, and
what cannot be masked is refused in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from torch import Tensor

import symbiosis

pytest.importorskip("peft", minversion="0.21", reason="scripts/compat_peft.py tries the methods of PEFT 0.21")
from scripts.compat_peft import BY_LEVEL, run_case, unsplit
from symbiosis.cli.pad_files import make
from symbiosis.client.layers.groups import GroupMember
from symbiosis.errors import CallError, Code, WrapError
from symbiosis.protocol import Op, Priority
from tests.conftest import tiny_llama
from tests.inproc.test_compat_peft import BY_NAME
from tests.private import one_step, tampered

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_FLOATS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64]


@pytest.fixture
def private(serve: Callable, tmp_path: Path) -> Callable[[str], Any]:
    """A model that is wrapped at a level, or with its answers proved."""
    options = {"integers": [8], "allow_read": True}
    one, other = (serve(tiny_llama(), operator=name, **options) for name in ("one", "two"))

    def wrapped(level: str) -> Any:
        if level == "pads":
            tiny_llama().save_pretrained(tmp_path / "model")  # type: ignore[operator]
            make(str(tmp_path / "model"), 2000, tmp_path / "pads", training=True)
        how: dict[str, dict[str, Any]] = {
            "verify": {"verify": True},
            "noise": {"privacy": symbiosis.Noise()},
            "split": {"privacy": symbiosis.Split(other.endpoint)},
            "pads": {"privacy": symbiosis.Pads(tmp_path / "pads")},
        }
        model = symbiosis.wrap(tiny_llama(), one.endpoint, **how[level])
        model.executor = one
        return model

    return wrapped


every_level = pytest.mark.parametrize("level", ["verify", "noise", "split", "pads"])


@every_level
def test_results_may_be_changed_in_place(level: str, private: Callable, ids: Tensor) -> None:
    """As AdaLoRA does, with those of groups, too."""
    model = get_peft_model(private(level), AdaLoraConfig(target_modules="all-linear", total_step=10))
    for _ in range(3):
        one_step(model, ids)
    layer = model.model.model.layers[0].mlp.down_proj.base_layer
    x = torch.randn(2, 3, 96, requires_grad=True)
    y, added = layer(x), layer(x)
    added += 1
    assert torch.allclose(added, y + 1, atol=1e-4) and not y._is_view()
    added.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("level", BY_LEVEL)
@pytest.mark.parametrize("name", ["AdaLoRA", "DoRA", "GPT-2: IA3"])
def test_methods_give_what_the_level_promises(name: str, level: str) -> None:
    case = BY_NAME[name]
    for order in ("W>P", "P>W"):
        outcome = run_case(case, order, unsplit(case), level)
        assert outcome.kind in ("bit", "close" if level == "verify" else "bit"), str(outcome)


@every_level
@pytest.mark.parametrize("dtype", NOT_FLOATS, ids=str)
def test_rows_that_are_no_floats_are_refused(level: str, dtype: torch.dtype, private: Callable) -> None:
    layer = private(level).model.layers[0].mlp.down_proj
    session, index = layer.weight.handle.session, layer.weight.handle.index
    x = torch.ones(2, 96).to(dtype)
    attempts = [
        lambda: layer(x),
        lambda: session.rows(Op.FORWARD, (GroupMember(index, 64, False),), x, Priority.PREFILL),
        lambda: session.call(Op.FORWARD, index, x),
        lambda: session.call(Op.DGRAD, index, torch.ones(2, 64).to(dtype)),
    ]
    for attempt in attempts:
        with pytest.raises(CallError, match="rows of") as refused:
            attempt()
        assert refused.value.code is Code.BAD_DTYPE
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CallError, match="rows of"):
        layer(x)


@pytest.mark.parametrize(
    "privacy",
    [
        *(symbiosis.Split("inproc://other", bits) for bits in (7, 8.0, "8", None, True, [8])),
        *(symbiosis.Split(other) for other in (3, None, [1])),
        *(symbiosis.Noise(scale) for scale in ("x", None, 0, float("nan"), float("inf"))),
        *(symbiosis.Noise(pool=pool) for pool in (0, 1.5, "3", True)),
        *(symbiosis.Noise(every=every) for every in (-1, 1.5)),
        symbiosis.Noise(effects=3),
        3,
    ],
    ids=repr,
)
def test_levels_that_there_are_not_are_refused_before_anything_is_wrapped(privacy: Any) -> None:
    with pytest.raises(WrapError):
        symbiosis.wrap(tiny_llama(), "inproc://nobody", privacy=privacy)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "3", None, True])
def test_pads_are_made_for_a_number_of_tokens(tokens: Any, tmp_path: Path) -> None:
    with pytest.raises(WrapError, match="--tokens is a whole number of at least 1"):
        make("demo", tokens, tmp_path / "pads")


@every_level
def test_norms_are_not_the_executors_to_say(level: str, private: Callable) -> None:
    """DoRA's magnitudes would be wrong, and no product with them."""
    model = private(level)
    tampered(model.executor, lambda y: 2 * y)
    layer = model.model.layers[0].mlp.down_proj
    norms = layer.weight.handle.session.call(Op.NORMS, layer.weight.handle.index, dtype=torch.float32)
    assert torch.equal(norms, tiny_llama().model.layers[0].mlp.down_proj.weight.square().sum(1))  # type: ignore[union-attr, index]


@pytest.mark.called
def test_a_weight_that_is_read_is_the_one_that_was_served(private: Callable) -> None:
    model = private("verify")
    weight, true = model.model.layers[0].mlp.down_proj.weight, tiny_llama().model.layers[0].mlp.down_proj.weight  # type: ignore[union-attr, index]
    assert torch.equal(weight.value(), true) and torch.equal(weight.t()[3:7].value(), true.t()[3:7])  # type: ignore[operator, arg-type]
    with torch.no_grad():
        model.executor.server.store.weights[weight.handle.index].mul_(1.001)
    for read in (weight.value, weight[3:7].value):
        with pytest.raises(CallError, match="answered READ of model.layers.0.mlp.down_proj with other values") as found:
            read()
        assert found.value.code is Code.WRONG_ANSWER


@pytest.mark.called
@pytest.mark.parametrize("layer", ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"])
@pytest.mark.parametrize("op", Op, ids=lambda op: op.name)
def test_of_no_op_a_wrong_answer_is_taken(op: Op, layer: str, serve: Callable) -> None:
    """An op that nobody can prove is refused; so is any op of a layer that this client has not wrapped."""
    executor = serve(tiny_llama(), allow_read=True)
    model = symbiosis.wrap(tiny_llama(), executor.endpoint, layers=["*.up_proj"], verify=True)
    handle = model.model.layers[0].mlp.up_proj.weight.handle
    number = next(n for n, told in enumerate(handle.session.manifest) if told.name == layer)
    with torch.no_grad():
        executor.server.store.weights[number].mul_(2)
    tampered(executor, lambda y: 3 * y)
    rows = torch.ones(2, 96 if op is Op.DGRAD else 64) if op.traits.has_payload else None
    if op is Op.NORMS and number == handle.index:  # never asked of an executor
        norms = handle.session.call(op, number, dtype=torch.float32)
        assert torch.equal(norms, tiny_llama().model.layers[0].mlp.up_proj.weight.square().sum(1))  # type: ignore[union-attr, index]
        return
    with pytest.raises(CallError) as refused:
        handle.session.call(op, number, rows, dtype=torch.float32)
    assert refused.value.code in (Code.NOT_ALLOWED, Code.WRONG_ANSWER)


def test_effects_of_noise_are_proved_too(serve: Callable) -> None:
    one, two = (serve(tiny_llama(), operator=name) for name in ("one", "two"))
    tampered(two, lambda y: 1.01 * y)
    noise = symbiosis.Noise(effects=two.endpoint)
    with pytest.raises(CallError, match=f"{two.endpoint} answered FORWARD"):
        symbiosis.wrap(tiny_llama(), one.endpoint, privacy=noise, verify=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lie", [lambda y: y * 1.005, lambda y: y + 0.01 * y.std()], ids=["factor", "constant"])
def test_a_small_lie_of_an_executor_is_found_after_a_while(lie: Callable, dtype: torch.dtype, serve: Callable) -> None:
    executor = serve(tiny_llama().to(dtype))
    layer = symbiosis.wrap(tiny_llama().to(dtype), executor.endpoint, verify=True).model.layers[0].mlp.down_proj  # type: ignore[union-attr, index, operator]

    def calls() -> None:
        for _ in range(20):
            layer(torch.randn(64, 96).to(dtype))  # type: ignore[operator]

    calls()
    honest = executor.server.engine.slices.compute
    tampered(executor, lambda y: lie(y.float()).to(y.dtype))
    with pytest.raises(CallError, match="answered FORWARD of model.layers.0.mlp.down_proj wrongly") as found:
        calls()
    assert found.value.code is Code.WRONG_ANSWER
    executor.server.engine.slices.compute = honest
