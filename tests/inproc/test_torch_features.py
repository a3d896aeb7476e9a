"""What torch does to a model, done to a wrapped one: autocast, checkpointing, compilers, transforms, tracers."""

import copy
import gc
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import symbiosis
from symbiosis.client.connection.lifetime import sessions
from symbiosis.errors import RemoteWeightError, WeightRead
from tests.conftest import tiny_gpt2, tiny_llama
from tests.wrapped import adapted, assert_same, logits, step


def test_autocast(llama: nn.Module, split: nn.Module, ids: Tensor) -> None:
    expected = step(adapted(llama), ids, autocast=True)
    assert_same(step(adapted(split), ids, autocast=True), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(llama: nn.Module, split: nn.Module, ids: Tensor, reentrant: bool) -> None:
    def checkpointed(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return adapted(model)

    assert_same(step(checkpointed(split), ids), step(checkpointed(llama), ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_to_dtype(llama: nn.Module, split: nn.Module, ids: Tensor, dtype: torch.dtype) -> None:
    llama.to(dtype)
    split.to(dtype)
    assert split.model.layers[0].mlp.up_proj.weight.dtype == dtype
    assert torch.equal(logits(split, ids), logits(llama, ids))


def test_gpt2_in_bfloat16_rounds_once(serve: Callable, ids: Tensor) -> None:
    model = tiny_gpt2().to(torch.bfloat16)
    nn.init.normal_(model.transformer.h[0].mlp.c_fc.bias)
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint)
    for name, parameter in split.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "bias" not in name)
    assert torch.equal(logits(split, ids), logits(model, ids))


def test_compiled_without_graph_breaks(llama: nn.Module, split: nn.Module, ids: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(compiled, ids), logits(llama, ids))
    explained = torch._dynamo.explain(split)(ids)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_compiled_training(serve: Callable, ids: Tensor) -> None:
    torch._dynamo.reset()
    model = tiny_llama(layers=1)
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint)
    plain, remote = adapted(model), adapted(split)
    expected = step(plain, ids)
    remote.train()
    torch.manual_seed(5)
    torch.compile(remote, backend="aot_eager")(input_ids=ids, labels=ids).loss.backward()
    got = {name: p.grad for name, p in remote.named_parameters() if p.grad is not None}
    assert_same(got, expected)


def loss_of_a_model_that_is_gone(
    endpoint: str, exact: bool, compiled: bool, ids: Tensor, layers: int = 2
) -> tuple[Tensor, Any]:
    """And the adapter's parameters."""
    model = adapted(symbiosis.wrap(tiny_llama(layers=layers), endpoint, exact=exact))
    model.train()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    logits(model, ids)  # shows which layers get the same tensor
    run = torch.compile(model, backend="aot_eager") if compiled else model
    return run(input_ids=ids, labels=ids).loss, parameters


@pytest.mark.parametrize("exact", [True, False])
def test_a_graph_outlives_its_model(llama: nn.Module, serve: Callable, ids: Tensor, exact: bool) -> None:
    """As it does unsplit, where it keeps the weights; and the session ends with it."""
    endpoint = serve(llama).endpoint
    gc.collect()
    before = len(sessions())
    loss, parameters = loss_of_a_model_that_is_gone(endpoint, exact, False, ids)
    gc.collect()
    loss.backward()
    expected = step(adapted(llama), ids)
    assert len(parameters) > 5
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=0 if exact else 1e-6)
    del loss
    gc.collect()
    assert len(sessions()) == before


def test_a_compiled_graph_says_that_its_model_is_gone(serve: Callable, ids: Tensor) -> None:
    torch._dynamo.reset()
    loss, _ = loss_of_a_model_that_is_gone(serve(tiny_llama(layers=1)).endpoint, True, True, ids, layers=1)
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(RemoteWeightError, match="keep the model until its backward pass is over"):
        loss.backward()


def test_second_derivatives(llama: nn.Module, split: nn.Module) -> None:
    def curvature(layer: nn.Module) -> Tensor:
        x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), x)[0]

    assert torch.equal(curvature(split.model.layers[0].mlp.up_proj), curvature(llama.model.layers[0].mlp.up_proj))


def test_a_transposed_weight_in_a_square_layer_is_not_ignored(llama: nn.Module, split: nn.Module) -> None:
    layers = [model.model.layers[0].self_attn.q_proj for model in (llama, split)]
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().t(), requires_grad=False)
    x = torch.linspace(-1, 1, 128).view(2, 64)
    assert torch.equal(layers[1](x), layers[0](x))


SPELLINGS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "linear": lambda layer, x: F.linear(x, layer.weight, layer.bias),
    "linear, transposed": lambda layer, x: F.linear(x, layer.weight.t(), layer.bias),
    "addmm": lambda layer, x: torch.addmm(layer.bias, x, layer.weight.t()),
    "addmm, transposed": lambda layer, x: torch.addmm(layer.bias, x, layer.weight),
    "addmm, folded": lambda layer, x: torch.addmm(layer.bias[:8], x[:, :8], layer.weight.view(8, -1)[:, :8]),
    "addmm, one row": lambda layer, x: torch.addmm(layer.bias, x, layer.weight[:1].expand(16, 16)),
    "a layer's own": lambda layer, x: swapped(layer)(x),
}


def swapped(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(layer.weight.detach().t(), requires_grad=False)
    return layer


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_bases_bias_in_other_products_than_the_layers_own(spelling: str, serve: Callable) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16)).requires_grad_(False)
    split, x = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint), torch.randn(5, 16)
    results, expected = (SPELLINGS[spelling](of[0], x) for of in (split, model))
    torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast_takes_what_it_takes_of_unsplit_layers(dtype: torch.dtype, serve: Callable) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16)).requires_grad_(False).to(dtype)
    split, x = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint), torch.randn(5, 16, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results, expected = split(x), model(x)
    assert results.dtype == expected.dtype and torch.equal(results, expected)


@pytest.mark.called
def test_transforms_that_would_lose_something_are_refused(serve: Callable) -> None:
    model = nn.Sequential(nn.Linear(16, 16)).requires_grad_(False)
    split, x = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint), torch.randn(5, 16)
    for transformed in (
        torch.func.vmap(split),
        lambda x: torch.func.jvp(split, (x,), (x,)),
        torch.func.grad(lambda x: split(x).sum()),
        torch.func.jacrev(split),
    ):
        with pytest.raises(RemoteWeightError, match="torch.func"):
            transformed(x)
    assert torch.equal(split(x), model(x))


def jvp_by_dual(layer: nn.Module, x: Tensor) -> Tensor:
    return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent


def gradient_of_dual(layer: nn.Module, x: Tensor) -> None:
    y = layer(x.clone().requires_grad_())
    y.backward(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


TANGENTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "dual": jvp_by_dual,
    "dual, with gradients": lambda layer, x: jvp_by_dual(layer, x.clone().requires_grad_()),
    "dual, without gradients": torch.no_grad()(jvp_by_dual),
    "gradient": gradient_of_dual,
}


@pytest.mark.called
@pytest.mark.parametrize("privacy", [None, symbiosis.Noise()])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("way", TANGENTS)
def test_tangents_are_refused(way: str, exact: bool, privacy: Any, serve: Callable) -> None:
    """They would be lost. Rows that have none pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16)).requires_grad_(False)
    endpoint = serve(model, allow_read=True).endpoint
    split, x = symbiosis.wrap(copy.deepcopy(model), endpoint, exact=exact, privacy=privacy), torch.randn(5, 16)
    with forward_ad.dual_level():
        with pytest.raises(RemoteWeightError, match="tangents"):
            TANGENTS[way](split, x)
        torch.testing.assert_close(split(x), model(x), rtol=1e-4, atol=1e-4)  # noise leaves some rounding
    with pytest.raises(RemoteWeightError, match="torch.func|tangents"):
        torch.autograd.functional.jacobian(split, x, strategy="forward-mode", vectorize=True)


@pytest.mark.called
def test_batches_of_gradients_are_refused(serve: Callable) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    split, x = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint), torch.randn(4)
    with pytest.raises(RemoteWeightError, match="one by one"):
        torch.autograd.functional.jacobian(split, x, vectorize=True)
    expected = torch.autograd.functional.jacobian(model, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(split, x), expected)


class Residual(nn.Module):
    """What a tracer takes for a constant, it takes here without a complaint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(x)
        return y


TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jit": lambda model, x: torch.jit.trace(model, (x,)),
    "jit, unchecked": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "make_fx": lambda model, x: make_fx(model)(x),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_traced_calls_are_made_anew(tracer: str, llama: nn.Module, split: nn.Module) -> None:
    x = torch.linspace(-1, 1, 128).view(2, 64)
    made, expected = (TRACERS[tracer](Residual(model.model.layers[0].mlp), x)(-x) for model in (split, llama))
    assert torch.equal(made, expected)


def test_fake_tensors_are_not_sent(llama: nn.Module, serve: Callable) -> None:
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama, serve=["*"]).endpoint)
    before = symbiosis.stats(split).calls
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert split.model.layers[0].mlp(torch.ones(2, 64)).shape == (2, 64)
        with pytest.raises(RemoteWeightError, match="FakeTensorMode"):
            split.model.embed_tokens(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(RemoteWeightError, match="make_fx"):
        make_fx(lambda x: x @ split.model.layers[0].mlp.up_proj.weight.t())(torch.ones(2, 64))
    assert symbiosis.stats(split).calls == before


def test_modes_see_the_products(llama: nn.Module, split: nn.Module, ids: Tensor) -> None:
    """... and change nothing."""

    class Names(TorchDispatchMode):
        seen: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Names():
        made = step(adapted(split), ids)
    assert_same(made, step(adapted(llama), ids))
    assert Names.seen.count("symbiosis.product.default") > 14


def test_gradients_of_what_outlived_a_transform(serve: Callable) -> None:
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    split, x = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint), torch.randn(3, 8)

    def gradient(layer: nn.Module) -> Tensor:
        kept: list[Tensor] = []
        leaf = x.clone().requires_grad_()
        torch.func.grad(lambda z: (kept.append(z * 2), z.pow(2).sum())[1])(leaf)
        layer(kept[0]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(split), gradient(model))


@pytest.mark.called
@pytest.mark.parametrize("exact", [True, False])
def test_compiled_autograd(exact: bool, serve: Callable) -> None:
    """The backward pass alone is compiled, without a break; of a group, too."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint, exact=exact)

    def gradient(layers: nn.ModuleList) -> Tensor:
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        (layers[0](x) * layers[1](x)).sum().backward()
        assert x.grad is not None
        return x.grad

    for _ in range(2):
        gradient(split)
    calls = symbiosis.stats(split).by_op["FORWARD"]
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager", fullgraph=True)):
        made = gradient(split)
    torch._dynamo.reset()
    torch.testing.assert_close(made, gradient(model))
    assert symbiosis.stats(split).by_op["FORWARD"] - calls == 1, "a group"


@pytest.mark.parametrize("exact", [True, False])
def test_members_of_a_group_called_without_gradients(exact: bool, llama: nn.Module, serve: Callable) -> None:
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint, exact=exact)
    x = torch.linspace(-1, 1, 128).view(2, 64)

    def gradient(model: nn.Module) -> Tensor:
        attention, leaf = model.model.layers[0].self_attn, x.clone().requires_grad_()
        q = attention.q_proj(leaf)
        with torch.no_grad():
            k = attention.k_proj(leaf)
        assert not k.requires_grad
        (q[..., : k.shape[-1]] * k + attention.v_proj(leaf)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    for _ in range(3):  # the group is found
        torch.testing.assert_close(gradient(split), gradient(llama))


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda weight: weight.numpy(),
    "asarray": np.asarray,
    "tolist": lambda weight: np.array(weight.tolist(), dtype=np.float32),
    "dlpack": lambda weight: torch.from_dlpack(weight).numpy(),
}


@pytest.mark.called
@pytest.mark.parametrize("way", VALUES)
def test_values_are_not_taken_past_torch(way: str, serve: Callable) -> None:
    model = nn.Sequential(nn.Linear(6, 4)).requires_grad_(False)
    kept, read = (symbiosis.wrap(copy.deepcopy(model), serve(model, allow_read=may).endpoint) for may in (False, True))
    with pytest.raises(WeightRead, match=r"remote weight '0'.*test_torch_features.py.*--allow-read"):
        VALUES[way](kept[0].weight)
    assert np.array_equal(VALUES[way](read[0].weight), model[0].weight.numpy())


def test_a_product_into_a_given_tensor_is_as_torch_makes_it(llama: nn.Module, serve: Callable) -> None:
    layer = symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint).model.layers[0].self_attn.q_proj
    own, x = llama.model.layers[0].self_attn.q_proj.weight.detach(), torch.rand(1, 64)
    with torch.no_grad():
        for shape in ((1, 64), (4, 64), (0,)):
            out = torch.empty(shape)
            torch.mm(x, layer.weight.t(), out=out)
            assert torch.equal(out, torch.mm(x, own.t()))
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(x, layer.weight.t(), out=torch.empty(1, 64, dtype=torch.float64))
