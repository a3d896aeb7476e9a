"""Layers that share their input are asked for in one call, and give what they give alone."""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code
from symbiosis.protocol import MAX_GROUP, Op
from tests.conftest import MODELS, tiny_llama

LAYERS = 2  # of the tiny Llama


def calls_of(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """The calls that `run` makes, by op."""
    before = dict(symbiosis.stats(model).by_op)
    run()
    return {op: n - before.get(op, 0) for op, n in symbiosis.stats(model).by_op.items() if n > before.get(op, 0)}


def lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.called
@pytest.mark.parametrize("layers", [LAYERS, 32])  # so many has the model that most people mean: 128 calls for a token
@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "lora"])
def test_a_llama_layer_makes_four_calls_instead_of_seven(
    with_adapter: bool, layers: int, serve: Callable, ids: Tensor
) -> None:
    base = tiny_llama(layers=layers)
    split = symbiosis.wrap(copy.deepcopy(base), serve(base).endpoint)
    model = lora(split) if with_adapter else split
    with torch.no_grad():
        assert calls_of(split, lambda: model(ids)) == {"FORWARD": 7 * layers}
        assert calls_of(split, lambda: model(ids)) == {"FORWARD": 4 * layers}
        assert calls_of(split, lambda: model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)) == {
            "FORWARD": 5 * 4 * layers
        }


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_gradients(exact: bool, url: str, serve: Callable, ids: Tensor) -> None:
    """Exact: one call for each layer, bit for bit. Else one for each group; only the order of a sum differs."""
    unsplit = lora(tiny_llama())
    split = symbiosis.wrap(tiny_llama(), serve(tiny_llama(), listen=[url]).endpoint, exact=exact)
    model = lora(split)
    expected = gradients(unsplit, ids)
    gradients(model, ids)
    got: dict[str, Tensor] = {}
    calls = calls_of(split, lambda: got.update(gradients(model, ids)))
    # The first layer's inputs need no gradient: its q, k and v have none to make.
    assert calls == {"FORWARD": 4 * LAYERS, "DGRAD": (7 if exact else 4) * LAYERS - (3 if exact else 1)}
    assert got.keys() == expected.keys()
    for name in expected:
        if exact:
            assert torch.equal(got[name], expected[name]), name
        else:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def test_without_adapters_the_fast_gradients_are_exact_too(serve: Callable, ids: Tensor) -> None:
    """The sum is made in autograd's order; only what adapters add in between is not."""
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint, exact=False)
    model.requires_grad_(False)
    for _ in range(2):
        embedded = [m.get_input_embeddings()(ids).detach().requires_grad_() for m in (model, split)]
        for m, x in zip((model, split), embedded, strict=True):
            m(inputs_embeds=x, labels=ids).loss.backward()
        assert torch.equal(embedded[0].grad, embedded[1].grad)


class Branches(nn.Module):
    """Layers of one input, of which a test chooses who is called, and how the input fares in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, width) for width in (4, 6, 4))

    def forward(self, x: Tensor, names: str = "abc", between: Callable[[Tensor], object] | None = None) -> list[Tensor]:
        made = []
        for name in names:
            made.append(getattr(self, name)(x))
            if between:
                between(x)
        return made


@pytest.fixture
def pair(serve: Callable) -> tuple[Branches, Branches]:
    plain = Branches()
    return plain, symbiosis.wrap(copy.deepcopy(plain), serve(plain).endpoint)


@pytest.mark.parametrize("names", ["abc", "ab", "a", "acb", "b", "aabbc", "cab"])
def test_another_flow_gives_the_same_results(pair: tuple[Branches, Branches], names: str) -> None:
    plain, split = pair
    for turn in range(6):
        for flow in ("abc", names):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(turn))
            with torch.no_grad():
                for got, expected in zip(split(x, flow), plain(x, flow), strict=True):
                    assert torch.equal(got, expected)


@pytest.mark.called
def test_members_that_are_never_fetched_are_soon_asked_for_no_more(pair: tuple[Branches, Branches]) -> None:
    _, split = pair
    with torch.no_grad():
        for _ in range(2):
            split(torch.randn(3, 8))
        rows = [symbiosis.stats(split).bytes_received]
        for _ in range(6):
            split(torch.randn(3, 8), "a")
            rows.append(symbiosis.stats(split).bytes_received)
    sizes = [after - before for before, after in zip(rows, rows[1:], strict=False)]
    assert sizes[0] == 3 * (4 + 6 + 4) * 4 and sizes[-1] == 3 * 4 * 4


@pytest.mark.parametrize("grad", [True, False])
def test_an_input_that_is_changed_in_between_is_sent_again(pair: tuple[Branches, Branches], grad: bool) -> None:
    plain, split = pair
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(3, 8)
            expected = plain(x.clone(), "abc", lambda x: x.mul_(2))
            for got, wanted in zip(split(x, "abc", lambda x: x.mul_(2)), expected, strict=True):
                assert torch.equal(got, wanted)


def test_inference_mode_has_no_versions_and_hence_no_groups(pair: tuple[Branches, Branches]) -> None:
    plain, split = pair
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(3, 8)
            expected = plain(x.clone(), "abc", lambda x: x.mul_(2))
            for got, wanted in zip(split(x, "abc", lambda x: x.mul_(2)), expected, strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_results_may_be_changed_in_place(exact: bool, serve: Callable) -> None:
    plain = Branches()
    split = symbiosis.wrap(copy.deepcopy(plain), serve(plain).endpoint, exact=exact)
    plain.requires_grad_(False)
    for _ in range(3):
        inputs = [torch.ones(3, 8, requires_grad=True) for _ in range(2)]
        for module, x in zip((plain, split), inputs, strict=True):
            a, b, c = module(x)
            a += 1
            b.mul_(3)
            (a.sum() + b.sum() + c.mul_(2).sum()).backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("used", ["a", "b", "ac", "bc"])
def test_gradients_of_some_members_only(used: str, serve: Callable) -> None:
    plain = Branches()
    split = symbiosis.wrap(copy.deepcopy(plain), serve(plain).endpoint, exact=False)
    plain.requires_grad_(False)
    for _ in range(3):
        inputs = [torch.ones(3, 8, requires_grad=True) for _ in range(2)]
        for module, x in zip((plain, split), inputs, strict=True):
            made = dict(zip("abc", module(x), strict=True))
            sum(made[name].sum() for name in used).backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)


def show_the_group(split: nn.Module) -> None:
    for _ in range(2):
        split(torch.ones(3, 8, requires_grad=True))


class Unwanted(torch.autograd.Function):
    """Nothing of its input's gradient is wanted."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:  # type: ignore[override]
        return None


def test_gradients_that_nobody_wants_are_no_call(serve: Callable) -> None:
    split = symbiosis.wrap(Branches(), serve(Branches()).endpoint, exact=False)
    show_the_group(split)
    x = torch.ones(3, 8, requires_grad=True)
    total = sum(Unwanted.apply(y).sum() for y in split(x))
    assert calls_of(split, total.backward) == {}
    assert x.grad is None or not x.grad.any()


@pytest.mark.called
def test_fast_gradients_have_no_gradients(serve: Callable) -> None:
    """It is said, and what to do instead; nothing wrong is computed."""
    split = symbiosis.wrap(Branches(), serve(Branches()).endpoint, exact=False)
    show_the_group(split)
    x = torch.ones(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"wrap\(\.\.\., exact=True\)"):
        torch.autograd.grad(sum(y.pow(2).sum() for y in split(x)), x, create_graph=True)


@pytest.mark.parametrize("grouped", [False, True])
def test_no_rows_are_no_call(grouped: bool, serve: Callable) -> None:
    """As the last part of a batch that was cut may have none; forward and backward."""
    split = symbiosis.wrap(Branches(), serve(Branches()).endpoint)
    if grouped:
        show_the_group(split)
    x = torch.ones(2, 0, 8, requires_grad=True)
    made: list[Tensor] = []
    assert calls_of(split, lambda: made.extend(split(x))) == {}
    assert [y.shape for y in made] == [y.shape for y in Branches()(x)]
    assert calls_of(split, sum(y.sum() for y in made).backward) == {}
    assert x.grad is not None and x.grad.shape == x.shape


def test_no_graph_outlives_its_step(pair: tuple[Branches, Branches]) -> None:
    """What is remembered of the last call must not keep the activations of the step alive."""
    _, split = pair
    for _ in range(3):
        x = torch.ones(3, 8, requires_grad=True)
        total = sum(y.sum() for y in split(x * 2))
        total.backward()
    gone = weakref.ref(x)
    del x, total
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DGRAD])
def test_groups_of_several_clients_run_together(op: Op, serve: Callable) -> None:
    """In one product for each layer: the rows of both clients, and nobody else's, come back."""
    model = Branches()
    executor = serve(model, policy="lockstep")
    layers = {layer.name: n for n, layer in enumerate(Session(executor.endpoint).manifest)}
    also = (layers["b"], layers["c"])
    sessions, together = [Session(executor.endpoint) for _ in range(3)], Barrier(3)
    rows = [torch.randn(n, 8 if op is Op.FORWARD else 14) for n in (2, 3, 4)]

    def call(session: Session, x: Tensor) -> Tensor:
        together.wait(10)
        for _ in range(50):
            y = session.call(op, layers["a"], x, also=also)
        session.close()  # nobody shall wait for it
        return y

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(call, sessions, rows))
    alone = Session(serve(model).endpoint)
    for x, y in zip(rows, results, strict=True):
        torch.testing.assert_close(y, alone.call(op, layers["a"], x, also=also))
    assert sessions[0].stats.mean_batch > 1


@pytest.mark.parametrize(
    ("op", "also", "width", "code"),
    [
        (Op.FORWARD, ("embed_tokens",), 64, Code.UNKNOWN_LAYER),
        (Op.FORWARD, (10**6,), 64, Code.UNKNOWN_LAYER),
        (Op.FORWARD, ("down_proj",), 64, Code.BAD_SHAPE),
        (Op.DGRAD, ("k_proj",), 64, Code.BAD_SHAPE),
        (Op.DGRAD, ("down_proj",), 128, Code.BAD_SHAPE),
        (Op.PRODUCT, ("k_proj",), 64, Code.UNKNOWN_OP),
        (Op.ECHO, ("k_proj",), 64, Code.UNKNOWN_OP),
    ],
)
def test_wrong_groups_are_refused(op: Op, also: tuple, width: int, code: Code, serve: Callable) -> None:
    session = Session(serve(tiny_llama()).endpoint)
    numbers = {layer.name.rpartition(".")[2]: n for n, layer in enumerate(session.manifest)}
    others = tuple(numbers.get(name, name) for name in also)
    with pytest.raises(CallError) as error:
        session.call(op, numbers["q_proj"], torch.ones(2, width), also=others)
    assert error.value.code is code


def test_a_group_is_not_larger_than_a_call_can_name(serve: Callable) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 4) for _ in range(MAX_GROUP + 1))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.layers]

    plain = Many()
    split = symbiosis.wrap(copy.deepcopy(plain), serve(plain).endpoint)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 8)
            for got, expected in zip(split(x), plain(x), strict=True):
                assert torch.equal(got, expected)


@pytest.mark.parametrize("name", MODELS)
def test_threads_have_groups_of_their_own(name: str, serve: Callable, ids: Tensor) -> None:
    model = MODELS[name]()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, policy="immediate").endpoint)  # else their calls may meet
    with torch.no_grad(), ThreadPoolExecutor(2) as pool:
        inputs = [ids + n for n in range(2)] * 4
        expected = [model(x).logits for x in inputs]

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                return split(x).logits

        for got, wanted in zip(pool.map(run, inputs), expected, strict=True):
            assert torch.equal(got, wanted)
