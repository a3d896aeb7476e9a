"""A slice of scripts/compat_peft.py, one method for each thing that methods want of a weight; and DoRA and W + delta up close."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("peft", minversion="0.21", reason="scripts/compat_peft.py tries the methods of PEFT 0.21")
from peft import LoraConfig, PeftType, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.helpers import DoraCaching
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

import symbiosis
from scripts.compat_peft import CASES, MAPPED, ORDERS, attempt, batch, build, perturb, run_case, unsplit
from symbiosis.client.weights.remote_sum import RemoteSum
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import WeightRead, WeightWrite

EXPECTED = {  # outcome of W>P, of P>W
    "LoRA": ("bit", "bit"),
    "AdaLoRA": ("bit", "bit"),
    "LoRA, bias all": ("bit", "bit"),
    "LoRA, init MiCA": ("read", "bit"),
    "LoRA, init PiSSA": ("read", "refused"),
    "LoRA, init PiSSA, its layers kept": ("bit", "bit"),
    "DoRA, trained biases": ("close", "close"),
    "GPT-2: DoRA, dropout": ("close", "close"),
    "SHiRA": ("close", "close"),
    "Super-Tuning": ("read", "close"),
    "LoRA, attention and experts": ("close", "close"),
    "HRA": ("close", "close"),
    "GLoRA": ("read", "read"),
    "OSF": ("read", "bit"),
    "LoRA, modules_to_save of a served layer": ("read", "bit"),
}
BY_NAME = {case.name: case for case in CASES}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Tensor]]:
    return {name: unsplit(BY_NAME[name]) for name in EXPECTED}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", EXPECTED)
def test_method(name: str, order: str, references: dict[str, dict[str, Tensor]]) -> None:
    outcome = run_case(BY_NAME[name], order, references[name])
    assert outcome.kind == EXPECTED[name][ORDERS.index(order)], outcome.detail


CHANGING = ("GPT-2: DoRA, dropout", "SHiRA", "HRA", "GLoRA", "LoRA, attention and experts", "DoRA, trained biases")


@pytest.mark.parametrize("name", CHANGING)
def test_a_method_that_changes_weights_is_bit_equal_where_they_are_mapped(
    name: str, references: dict[str, dict[str, Tensor]]
) -> None:
    for order in ORDERS:
        outcome = run_case(BY_NAME[name], order, references[name], MAPPED)
        assert outcome.kind == "bit", (order, outcome)


@pytest.mark.parametrize("name", ["SHiRA", "HRA", "GLoRA", "LoRA, attention and experts"])
def test_a_method_that_changes_weights_is_bit_equal_where_they_are_read_within_a_process(
    name: str, references: dict[str, dict[str, Tensor]]
) -> None:
    outcome = attempt(replace(BY_NAME[name], reformulated=False), "W>P", references[name], allow_read=True)
    assert outcome.kind == "bit", outcome


def test_every_peft_method_has_a_case() -> None:
    covered = {PeftType.ADAMSS}  # whose configuration needs scikit-learn to be made
    for case in CASES:
        with suppress(ImportError):
            covered.add(case.config().peft_type)
    assert covered == set(PeftType) and any(case.name == "AdaMSS" for case in CASES)


# ---------------------------------------------------------------- DoRA


def dora(model: nn.Module, **options: object) -> nn.Module:
    torch.manual_seed(3)
    conv = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    options = (conv if hasattr(model, "transformer") else {"target_modules": "all-linear"}) | options
    model = get_peft_model(model, LoraConfig(r=4, use_dora=True, **options))
    perturb(model)
    return model


def step(model: nn.Module, autocast: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**batch())
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **gradients}


def distance(got: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The relative error over all tensors together."""
    assert got.keys() == truth.keys()
    wrong = sum((got[name].double() - truth[name]).square().sum() for name in truth)
    return float(torch.sqrt(wrong / sum(value.square().sum() for value in truth.values())))


@pytest.mark.parametrize("name", ["biased llama", "gpt2"])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]
)
def test_dora_rounds_no_worse_than_unsplit(name: str, dtype: torch.dtype, autocast: bool) -> None:
    """Against the same adapter in float64: split and unsplit round at other places, but as often."""
    base = build(name).to(dtype)
    plain = dora(copy.deepcopy(base))
    exact = copy.deepcopy(plain).double()
    with symbiosis.Executor(copy.deepcopy(base)) as executor:
        split = dora(symbiosis.wrap(base, executor.endpoint))
        truth = step(exact)
        assert distance(step(split, autocast), truth) < 2 * distance(step(plain, autocast), truth)


def test_dora_asks_once_for_the_norms_and_peft_caches_the_rest() -> None:
    base = build("llama")
    with symbiosis.Executor(copy.deepcopy(base)) as executor, torch.no_grad(), DoraCaching():
        split = dora(symbiosis.wrap(base, executor.endpoint)).eval()
        first = split(**batch()).logits
        calls = dict(symbiosis.stats(split).by_op)
        assert torch.equal(split(**batch()).logits, first)
    assert calls["NORMS"] == 14
    assert symbiosis.stats(split).by_op["FORWARD"] - calls["FORWARD"] == 8  # the groups of two layers


OF_ADAPTERS: dict[str, Callable[[Any, LoraLayer], object]] = {
    "data": lambda model, layer: layer.lora_A["default"].weight.data.mul_(1.5),
    "numpy": lambda model, layer: numpy.negative(*2 * [layer.lora_B["default"].weight.detach().numpy()]),
    "fused": lambda model, layer: torch.optim.AdamW(trained(model), lr=0.1, fused=True).step(),
    "scaling": lambda model, layer: layer.set_scale("default", 3.0),
    "loaded": lambda model, layer: set_peft_model_state_dict(
        model, {name: value * 2 for name, value in get_peft_model_state_dict(model).items()}
    ),
    "swapped": lambda model, layer: torch.utils.swap_tensors(
        layer.lora_B["default"].weight, nn.Parameter(layer.lora_B["default"].weight.detach() + 1)
    ),
    "float64": lambda model, layer: (layer.lora_A.double(), layer.lora_B.double()),
}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return what is trained, after a backward pass."""
    model(**batch()).loss.backward()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("change", OF_ADAPTERS)
@pytest.mark.parametrize("reads", [False, True])
def test_dora_keeps_its_norms_until_something_changes(change: str, reads: bool) -> None:
    base = build("llama")
    plain = dora(copy.deepcopy(base)).eval()
    with symbiosis.Executor(copy.deepcopy(base), allow_read=reads) as executor:
        split = dora(symbiosis.wrap(base, executor.endpoint)).eval()
        for model in (plain, split):
            with torch.no_grad():
                model(**batch())
            layer = model.base_model.model.model.layers[0].self_attn.q_proj
            OF_ADAPTERS[change](model, layer)
        with torch.no_grad():
            got, expected = (model(**batch()).logits for model in (split, plain))
    assert torch.equal(got, expected) if reads else torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reads", [False, True])
def test_dora_makes_its_norms_once(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While A and B stay as they are, a token costs what it costs with LoRA."""
    base, made = build("llama"), []
    norms_of = DoraLinearLayer.get_weight_norm
    monkeypatch.setattr(DoraLinearLayer, "get_weight_norm", lambda *a, **k: made.append(a) or norms_of(*a, **k))
    with symbiosis.Executor(copy.deepcopy(base), allow_read=reads) as executor, torch.no_grad():
        split = dora(symbiosis.wrap(base, executor.endpoint)).eval()
        first = split(**batch()).logits
        calls = dict(symbiosis.stats(split).by_op)
        made.clear()
        assert torch.equal(split(**batch()).logits, first)
        assert not made
        assert symbiosis.stats(split).by_op["FORWARD"] - calls["FORWARD"] == 8  # the groups of two layers


def test_dora_norms_are_those_of_the_weights_it_is_wrapped_for() -> None:
    """Unwrapped, changed and wrapped again, a model has other norms."""
    model = dora(build("llama"))
    first, second = build("llama"), build("llama")
    with torch.no_grad():
        for layer in second.model.layers:
            layer.mlp.up_proj.weight.mul_(3)
    for served in (first, second):
        with torch.no_grad():
            for mine, theirs in zip(model.base_model.model.model.layers, served.model.layers, strict=True):
                mine.mlp.up_proj.base_layer.weight.copy_(theirs.mlp.up_proj.weight)
            expected = model(**batch()).logits
            with symbiosis.Executor(served, allow_read=True) as executor:
                symbiosis.wrap(model, executor.endpoint)
                torch.testing.assert_close(model(**batch()).logits, expected, rtol=1e-5, atol=1e-5)
                symbiosis.unwrap(model)


def test_dora_compiled() -> None:
    """Layer by layer: the rest of a model is compiled as it is with LoRA."""
    base = build("biased llama")
    with symbiosis.Executor(copy.deepcopy(base)) as executor:
        split = dora(symbiosis.wrap(base, executor.endpoint), target_modules=["q_proj", "o_proj"]).eval()
        expected = split(**batch()).logits  # also makes the norms known, which the compiler must not take for constants
        layers = [module for name, module in split.named_modules() if name.endswith(("q_proj", "o_proj"))]
        for layer in layers:
            layer.compile(backend="eager")
        compiled = split(**batch()).logits
    assert len(layers) == 4
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)


def test_dora_merged() -> None:
    base = build("gpt2")
    with symbiosis.Executor(copy.deepcopy(base), allow_read=True) as executor:
        split = dora(symbiosis.wrap(copy.deepcopy(base), executor.endpoint)).merge_and_unload()
        expected = dora(base).merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(split(**batch()).logits, expected(**batch()).logits, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- W + delta


@contextmanager
def remote_weight(may_read: bool) -> Iterator[tuple[RemoteWeight, Tensor]]:
    """A remote weight, and what it is."""
    model = build("llama")
    with symbiosis.Executor(copy.deepcopy(model), allow_read=may_read) as executor:
        # exact: one term, if it may be read
        split = symbiosis.wrap(copy.deepcopy(model), executor.endpoint, exact=False)
        yield split.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight.detach()


@pytest.fixture(params=[False, True], ids=["no reads", "reads"])
def weight(request: pytest.FixtureRequest) -> Iterator[tuple[RemoteWeight, Tensor]]:
    with remote_weight(request.param) as found:
        yield found


@pytest.fixture(scope="module", params=[False, True], ids=["no reads", "reads"])
def kept_weight(request: pytest.FixtureRequest) -> Iterator[tuple[RemoteWeight, Tensor]]:
    """The same for many tests, none of which changes it."""
    with remote_weight(request.param) as found:
        yield found


Product = Callable[[Tensor, Tensor], Tensor]
SUMS: dict[str, Product] = {
    "add": lambda w, d: w + d,
    "reversed": lambda w, d: d + w,
    "alpha": lambda w, d: torch.add(w, d, alpha=0.5),
    "clone": lambda w, d: w.clone().add_(d),
    "twice": lambda w, d: (w + d) + 2 * d,
    "transposed delta": lambda w, d: w + d.t().contiguous().t(),
    "transposed": lambda w, d: (w.t() + d.t()).t(),
    "view before add_": lambda w, d: _view_then_add(w, d),
    "delta changed later": lambda w, d: _add_then_change(w, d),
    "scatter": lambda w, d: w.reshape(-1).scatter_add(0, torch.arange(64), d.reshape(-1)[:64]).reshape_as(w),
    "wider dtype": lambda w, d: (w + d.double()).float(),
}


def _view_then_add(w: Tensor, delta: Tensor) -> Tensor:
    changed = w.clone()
    view = changed.t()
    changed += delta
    return view.t()


def _add_then_change(w: Tensor, delta: Tensor) -> Tensor:
    delta = delta.clone()
    total = w + delta
    delta.zero_()
    return total


PRODUCTS: dict[str, Product] = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x, w, torch.ones(96)),
    "matmul": lambda x, w: x @ w.t(),
    "left": lambda x, w: w @ x[0].t(),
    "addmm": lambda x, w: torch.addmm(torch.ones(96), x[0], w.t(), beta=2.0, alpha=0.5),
    "addmm_": lambda x, w: torch.ones(5, 96).addmm_(x[0], w.t(), beta=2.0, alpha=0.5),
    "rows": lambda x, w: x @ w[10:20].t(),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
@pytest.mark.parametrize("total", SUMS.values(), ids=SUMS.keys())
def test_products_with_sums(total: Product, product: Product, kept_weight: tuple[RemoteWeight, Tensor]) -> None:
    remote, local = kept_weight
    generator = torch.Generator().manual_seed(1)
    x, delta = torch.randn(2, 5, 64, generator=generator), torch.randn(96, 64, generator=generator)
    with torch.no_grad():
        added = total(remote, delta)
        assert isinstance(added, RemoteSum)
        got, expected = product(x, added), product(x, total(local, delta))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


BY_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "right": lambda w: w @ torch.linspace(-1, 1, 64 * 5).view(5, 64).t(),
    "left": lambda w: torch.linspace(-1, 1, 64 * 5).view(64, 5).t() @ w.t(),
    "linear": lambda w: F.linear(torch.linspace(-1, 1, 64 * 5).view(64, 5).t(), w.detach().t().t(), torch.ones(96)),
}


@pytest.mark.parametrize("values", [pytest.param(w, id=n) for n, w in (SUMS | BY_COLUMNS).items()])
def test_where_values_are_at_hand_one_term_is_multiplied(values: Callable[..., Tensor]) -> None:
    """To the bit: whatever is added to a weight, and however the other matrix lies."""
    model, delta = build("llama"), torch.linspace(-1, 1, 96 * 64).view(96, 64)
    local = model.model.layers[0].mlp.up_proj.weight.detach()
    given = (delta,) if values in SUMS.values() else ()
    with symbiosis.Executor(copy.deepcopy(model), allow_read=True) as executor, torch.no_grad():
        remote = symbiosis.wrap(model, executor.endpoint).model.layers[0].mlp.up_proj.weight
        got, expected = values(remote, *given), values(local, *given)
        assert type(got) is Tensor and torch.equal(got, expected) and got.stride() == expected.stride()


def test_gradients_through_a_sum(weight: tuple[RemoteWeight, Tensor]) -> None:
    grads = []
    for w in weight:
        x, delta = torch.ones(3, 64, requires_grad=True), torch.full((96, 64), 0.1, requires_grad=True)
        F.linear(x, w + delta).square().sum().backward()
        grads.append((x.grad, delta.grad))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda w: w.clone().mul_(2),
    "sum": lambda w: (w + torch.ones(96, 64)).clamp_(-1, 1),
    "foreach": lambda w: torch._foreach_mul_([w.clone()], 2.0),
    "out": lambda w: torch.mm(w, torch.ones(64, 64), out=w + torch.ones(96, 64)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_sum_is_not_changed_in_place_by_halves(
    change: Callable[[Tensor], Tensor], weight: tuple[RemoteWeight, Tensor]
) -> None:
    with torch.no_grad(), pytest.raises(WeightWrite, match="in place"):
        change(weight[0])


def test_a_sum_can_take_the_weights_place(weight: tuple[RemoteWeight, Tensor]) -> None:
    remote, local = weight
    with torch.no_grad():
        if not remote.handle.session.welcome.allow_read:
            with pytest.raises(WeightWrite, match="allow-read"):
                remote.data = remote + torch.ones(96, 64)
            return
        remote.data = remote + torch.ones(96, 64)
        reads = remote.handle.session.stats.by_op["READ"]
        assert torch.equal(F.linear(torch.eye(64), remote), F.linear(torch.eye(64), local + 1))
        assert remote.handle.session.stats.by_op["READ"] == reads


def test_a_conversion_is_a_copy(weight: tuple[RemoteWeight, Tensor]) -> None:
    remote, local = weight
    with torch.no_grad():
        if not remote.handle.session.welcome.allow_read:
            with pytest.raises(WeightWrite, match="up_proj"):
                remote.double().mul_(2)
            with pytest.raises(WeightRead, match="up_proj"):
                remote.square()
            return
        twice = remote.double()
        twice.mul_(2)
        assert torch.equal(twice.value(), local.double() * 2)
        assert torch.equal(remote.value(), local)


def test_layouts_survive_a_read(weight: tuple[RemoteWeight, Tensor]) -> None:
    remote, local = weight
    if not remote.handle.session.welcome.allow_read:
        return
    for view in (
        lambda w: w.t(),
        lambda w: w[3],
        lambda w: w.t()[:, 2:9],
        lambda w: w.view(8, 12, 64).permute(2, 0, 1),
    ):
        got = view(remote.detach()).value()
        assert torch.equal(got, view(local))
        order = sorted(range(got.dim()), key=lambda dim: -got.stride(dim))
        assert order == sorted(range(got.dim()), key=lambda dim: -view(local).stride(dim))
    blocks = remote.detach().view(12, 8, 8, 8).permute(2, 0, 1, 3)
    assert torch.equal(blocks.value(), local.view(12, 8, 8, 8).permute(2, 0, 1, 3))
    for read in (
        lambda w: w[3, 4] * 2,
        lambda w: w.flatten()[5].tolist(),
        lambda w: w.bool(),
        lambda w: w.t()[:4].to(torch.int8) + 1,
    ):
        got, expected = torch.as_tensor(read(remote.detach())), torch.as_tensor(read(local))
        assert torch.equal(got.value() if isinstance(got, RemoteWeight) else got, expected)
