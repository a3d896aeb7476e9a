"""Clients that map the executor's weights: the same bits whether a product is called or made directly, for layers and whole models."""

import copy
import errno
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from prometheus_client import CollectorRegistry
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_storage
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.cli import top
from symbiosis.client.connection import reconnect
from symbiosis.client.direct import rule
from symbiosis.client.direct.step_routes import Way, following
from symbiosis.client.layers.virt_layer import is_multiplied_here
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import CallError, WeightRead
from symbiosis.executor.accounts import MOST_COUNTED
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.executor.scheduling import advice
from symbiosis.protocol import Op, Priority, View
from symbiosis.transport.base import Advice, Direct
from symbiosis.transport.local import client as local_client
from symbiosis.transport.local import listener, shared_page
from symbiosis.transport.local.segment import Slab
from symbiosis.transport.local.shared_page import NBYTES, SharedPage
from tests.conftest import MODELS, tiny_gpt2, tiny_llama, tiny_mixtral
from tests.inproc.test_equality import gradients
from tests.processes import layer_number, save_tiny_llama, until

pytestmark = pytest.mark.usefixtures("memory_is_filled_with_nan")
Share = Callable[..., symbiosis.Executor]


@pytest.fixture
def share(serve: Callable[..., symbiosis.Executor], tmp_path: Path) -> Share:
    def start(model: nn.Module, **options: Any) -> symbiosis.Executor:
        return serve(model, listen=[f"local://{tmp_path}/executor.sock"], **{"share_weights": True, **options})

    return start


def joined(endpoint: str) -> Session:
    """Who maps what that executor shares."""
    session = Session(endpoint, share=True)
    assert session.manifest and session.mapped
    return session


def advise(session: Session, others: int = 0, give_way: bool = False) -> None:
    """As if the executor did, for as long as this session lives."""
    page = SharedPage(Slab.create(NBYTES))
    page.advise(Advice(others, give_way))
    assert session.mapped
    session.mapped._page = page


def session_of(model: nn.Module) -> Session:
    return next(symbiosis.client.weights.remote_weight.remote_weights(model)).handle.session  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("way", ["direct", "called", "unshared"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_unsplit_one_either_way(
    name: str, way: str, share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "WORTH_BATCHING", 0)
    model = MODELS[name]()
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint, share=way != "unshared")
    if way == "called":
        advise(session_of(split), others=1, give_way=True)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, model(ids).logits)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(split.generate(ids, **options), model.generate(ids, **options))
    if name != "mixtral":
        loss, expected = gradients(model, ids)
        split_loss, got = gradients(split, ids)
        assert split_loss == loss and got.keys() == expected.keys()
        assert all(torch.equal(got[parameter], expected[parameter]) for parameter in expected)
    figures = symbiosis.stats(split)
    assert (figures.calls > 0, figures.direct > 0) == {
        "direct": (False, True),
        "called": (True, True),  # what many rows without gradients make is direct
        "unshared": (True, False),
    }[way]


@pytest.mark.parametrize(
    "limits", [{"max_rows": 20}, {"max_call_bytes": 1 << 14}, {"max_call_multiplications": 1 << 16}, {}], ids=str
)
@pytest.mark.parametrize("exact", [True, False])
def test_what_the_executor_refuses_for_its_rows_is_multiplied_directly(
    exact: bool, limits: dict[str, int], share: Share, ids: Tensor
) -> None:
    """Else a program that works alone would fail once somebody else decodes. Without limits, the rows hold an infinity."""
    endpoint, ids = share(tiny_llama(), **limits).endpoint, ids.repeat(4, 1)
    x = tiny_llama().get_input_embeddings()(ids).detach()
    if not limits:
        x[0, 0, 0] = torch.inf

    def trained(one: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        adapted = get_peft_model(one, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
        for _ in range(2):  # groups are known in the second
            loss = adapted(inputs_embeds=x, labels=ids).loss
            loss.backward()
        return [loss.detach(), *(p.grad for p in adapted.parameters() if p.grad is not None)]

    split = symbiosis.wrap(tiny_llama(), endpoint, exact=exact)
    advise(session_of(split), give_way=True)
    got, expected = trained(split), trained(tiny_llama())
    assert len(got) == len(expected) > 2
    for mine, its in zip(got, expected, strict=True):
        if exact:
            assert torch.equal(mine.nan_to_num(), its.nan_to_num())
        else:  # gradients of a group are added in another order
            torch.testing.assert_close(mine, its, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert symbiosis.stats(split).direct > 0
    with pytest.raises(CallError, match="TOO_LARGE" if limits else "NON_FINITE"):
        trained(symbiosis.wrap(tiny_llama(), endpoint, share=False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_makes_again_is_counted_as_often_as_it_is_made(
    reentrant: bool, share: Share, ids: Tensor
) -> None:
    split = symbiosis.wrap(tiny_llama(), share(tiny_llama()).endpoint)
    adapted = get_peft_model(split, LoraConfig(r=4, target_modules="all-linear")).train()
    adapted.gradient_checkpointing_enable({"use_reentrant": reentrant})
    adapted.enable_input_require_grads()
    adapted(input_ids=ids, labels=ids).loss.backward()
    figures = symbiosis.stats(adapted)
    assert (figures.direct, figures.direct_rows) == (3 * 14, 3 * 14 * ids.numel()), "forward, once more, and gradients"


def test_a_grouped_gradient_is_that_of_the_executor(share: Share) -> None:
    endpoint = share(tiny_llama()).endpoint
    called, direct = Session(endpoint), joined(endpoint)
    first, *others = (layer_number(called, f"model.layers.0.self_attn.{name}_proj") for name in ("q", "k", "v"))
    widths = [called.manifest[number].shape[0] for number in (first, *others)]
    dys = torch.cat([torch.randn(5, width).reshape(-1) for width in widths]).view(5, -1)
    words: dict[str, Any] = {"priority": Priority.TRAIN, "also": tuple(others)}
    expected, got = (session.call(Op.DGRAD, first, dys, **words) for session in (called, direct))
    assert torch.equal(expected, got) and (called.stats.calls, direct.stats.calls) == (1, 0)


def test_hooks_of_whatever_kind_may_keep_tensors(share: Share, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama(), share(tiny_llama()).endpoint)
    keep = partial(lambda kept: kept)  # which has no name
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        x = split.get_input_embeddings()(ids).detach().requires_grad_()
        split(inputs_embeds=x, labels=ids).loss.backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_who_is_answering_keeps_the_weights_when_the_next_executor_shares_none(
    share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = joined(share(tiny_llama()).endpoint)
    number, x = layer_number(session, "model.layers.0.mlp.up_proj"), torch.randn(3, 64)
    expected, mapped = session.call(Op.FORWARD, number, x), session.mapped
    assert mapped is not None and session._connection is not None

    def takes(call: Any) -> bool:
        monkeypatch.undo()
        with monkeypatch.context() as patched:
            patched.setattr(session._connection, "served_weights", dict)
            session._map(session._connection)
        return True

    monkeypatch.setattr(mapped, "takes", takes)
    assert torch.equal(session.call(Op.FORWARD, number, x), expected)
    assert session.mapped is not mapped and not session.mapped.suffices
    assert (session.mapped.calls, session.stats.calls) == (1, 0), "figures go on from where they were"


def test_an_eager_product_costs_few_calls_of_python(share: Share) -> None:
    """Eager steps are bound by Python, and a model makes hundreds of products in one."""
    model = tiny_llama().requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    layer, x, called = split.model.layers[0].mlp.up_proj, torch.randn(1, 1, model.config.hidden_size), list[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    with torch.no_grad():
        layer(x)
        sys.setprofile(note)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    assert len(called) <= 10, called  # of which torch makes three


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_run_as_in_the_unsplit_model(
    experts: str, share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their forward finds the mapped tensors, also after a copy, a pickle, and under checkpointing; outside of it they are remote."""
    model = tiny_mixtral()
    model.set_experts_implementation(experts)
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    asked: list[Any] = []
    monkeypatch.setattr(Session, "call", lambda *args, **named: asked.append(args))
    with torch.no_grad():
        for one in (split, copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
            assert torch.equal(one(ids).logits, model(ids).logits)
            assert isinstance(one.model.layers[0].mlp.experts.down_proj, RemoteWeight)
    trained = []
    for one in (model, split):
        torch.manual_seed(3)
        adapted = get_peft_model(one, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        loss = adapted.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        trained.append((loss.detach(), [p.grad for p in adapted.parameters() if p.grad is not None]))
    (loss, expected), (split_loss, got) = trained
    assert torch.equal(loss, split_loss) and expected and all(map(torch.equal, got, expected))
    assert not asked


def test_experts_that_should_be_called_are(share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "WORTH_BATCHING", 0)
    model = tiny_mixtral()
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    with torch.no_grad():
        for others in (0, 1):
            advise(session_of(split), others=others)
            before = symbiosis.stats(split)
            calls, direct = before.calls, before.direct
            assert torch.equal(split(ids[:, :1]).logits, model(ids[:, :1]).logits)
            after = symbiosis.stats(split)
            assert (after.calls > calls, after.direct > direct) == (others == 1, others == 0)
    kind = type(split.model.layers[0].mlp.experts)
    assert kind.__name__ == type(model.model.layers[0].mlp.experts).__name__ and issubclass(
        kind, type(model.model.layers[0].mlp.experts)
    )
    symbiosis.unwrap(split)
    assert type(split.model.layers[0].mlp.experts) is type(model.model.layers[0].mlp.experts)


@pytest.mark.parametrize("way", ["direct", "called", "unshared"])
def test_a_checkpoint_is_the_unsplit_model_row_by_row(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file tensors begin anywhere, and so they do in memory: products of one row would round otherwise elsewhere."""
    monkeypatch.setattr(rule, "WORTH_BATCHING", 0)
    checkpoint = str(save_tiny_llama(tmp_path))
    unsplit = AutoModelForCausalLM.from_pretrained(checkpoint)
    x = torch.randn(1, 64)
    with symbiosis.Executor(checkpoint, listen=f"local://{tmp_path}/x.sock") as executor:
        split = symbiosis.from_executor(executor.endpoint, share=way != "unshared")
        if way == "called":
            advise(session_of(split), others=1, give_way=True)
        for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "lm_head"):
            assert torch.equal(split.get_submodule(name)(x), unsplit.get_submodule(name)(x)), name
        figures = symbiosis.stats(split)
        assert (figures.calls, figures.direct) == ((0, 2) if way == "direct" else (2, 0))


ROWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 3, 64).transpose(0, 1),
    "every second": lambda: torch.randn(3, 5, 128)[..., ::2],
    "part of a wider one": lambda: torch.randn(3, 5, 100)[..., 20:84],
    "expanded": lambda: torch.randn(1, 5, 64).expand(3, 5, 64),
    "in other order": lambda: torch.randn(64, 3, 5).permute(1, 2, 0),
    "one row": lambda: torch.randn(64, 1, 1).permute(2, 1, 0),
}


@pytest.mark.parametrize("way", ["direct", "called", "unshared"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_may_lie_in_memory_as_they_like(bias: bool, rows: str, way: str, share: Share) -> None:
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(64, 96, bias=bias)]).requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint, share=way != "unshared")
    if way == "called":
        advise(session_of(split), give_way=True)
    given = ROWS[rows]()
    found = []
    for one in (model, split.train()):
        x = given.detach().requires_grad_()
        y = one[0](x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape[::-1]).permute(2, 1, 0))
        found.append((y.detach(), x.grad))
    assert all(map(torch.equal, *found))
    figures = symbiosis.stats(split)
    assert (figures.calls, figures.direct) == ((0, 2) if way == "direct" else (2, 0))


STACKS: dict[str, Callable[[int], Tensor]] = {
    "transposed": lambda rows: torch.randn(rows, 3, 256).transpose(0, 1),
    "channels first": lambda rows: torch.randn(3, 256, rows).transpose(1, 2),
    "expanded": lambda rows: torch.randn(1, rows, 256).expand(3, rows, 256),
    "the last of each": lambda rows: torch.randn(3, rows + 4, 256)[:, -rows:],
    "every second": lambda rows: torch.randn(3, rows, 512)[..., ::2],
    "four dimensions": lambda rows: torch.randn(2, rows, 3, 256).transpose(1, 2),
}


@pytest.mark.parametrize("way", ["direct", "called", "unshared", "compiled"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_stacks_that_are_not_contiguous_round_as_in_the_unsplit_model(
    bias: bool, frozen: bool, way: str, share: Share
) -> None:
    """Torch multiplies each matrix by itself if the weight is frozen, else all rows at once, and adds the bias afterwards."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(256, 192, bias=bias)]).requires_grad_(not frozen)
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint, share=way in ("direct", "called"))
    if way == "called":
        advise(session_of(split), give_way=True)
    layer = torch.compile(split[0], backend="aot_eager", dynamic=False) if way == "compiled" else split.train()[0]
    for name, stack in STACKS.items():
        for rows in (1, 2, 3, 5, 8):
            given = stack(rows)
            found = []
            for one in (model[0], layer):
                x = given.detach().requires_grad_()
                y = one(x)
                y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
                with torch.no_grad():
                    found.append((y.detach(), x.grad, one(given)))
            assert all(map(torch.equal, *found)), (name, rows)


def test_a_weight_that_is_frozen_later_multiplies_as_a_frozen_one(share: Share) -> None:
    """`get_peft_model` freezes a base after `wrap`, and copies of it remember."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(256, 192)])
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint, share=False)
    given = [stack(rows) for stack in STACKS.values() for rows in (1, 2, 3, 5, 8)]
    with torch.no_grad():
        before = [model[0](x) for x in given]
        assert all(map(torch.equal, (split[0](x) for x in given), before))
        for parameter in (*model.parameters(), *split.parameters()):
            parameter.requires_grad = False
        after = [model[0](x) for x in given]
        for one in (split, copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
            assert all(map(torch.equal, (one[0](x) for x in given), after))
    if all(map(torch.equal, before, after)):
        pytest.skip("this CPU rounds both alike, which shows nothing")


@pytest.mark.parametrize("frozen", [False, True])
def test_stacks_times_a_remote_tensor_round_as_in_the_unsplit_model(frozen: bool, share: Share) -> None:
    """As models write it that use a layer's weight (mamba)."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(256, 192)]).requires_grad_(not frozen)
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint, share=False)
    for name, stack in STACKS.items():
        given = stack(3)
        with torch.no_grad():
            assert torch.equal(given @ split[0].weight.t(), given @ model[0].weight.t()), name
            assert torch.equal(split[0].weight @ given.mT, model[0].weight @ given.mT), name


def test_threads_share_what_is_mapped(share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what they do is called, over connections of their own where they would wait for each other."""
    monkeypatch.setattr(rule, "WORTH_BATCHING", 0)
    monkeypatch.setattr("symbiosis.client.session.LANE_AFTER_S", 0.0)
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), share(model, policy="immediate").endpoint)
    advise(session_of(split), others=1)
    texts = [
        torch.cat([ids, ids], -1)[:1, : 4 + 3 * number] for number in range(6)
    ]  # 4 to 19 rows: some many, some few
    expected = [model(text).logits for text in texts]
    wrong: list[int] = []

    def run(first: int) -> None:
        for number in range(30):
            at = (first + number) % len(texts)
            with torch.no_grad():
                if not torch.equal(split(texts[at]).logits, expected[at]):
                    wrong.append(at)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    figures = symbiosis.stats(split)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert figures.calls > 0 and figures.direct > 0


def test_a_replica_is_mapped_in_place_of_the_one_that_ends(
    serve: Callable[..., symbiosis.Executor], ids: Tensor, tmp_path: Path
) -> None:
    model = tiny_llama()
    urls = [f"local://{tmp_path}/{number}.sock" for number in range(2)]
    first, second = (serve(model, listen=[url], share_weights=True, heartbeat_s=1) for url in urls)
    split = symbiosis.wrap(copy.deepcopy(model), urls)
    session = session_of(split)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(split(ids).logits, expected) and session.endpoint == urls[0]
        told = symbiosis.stats(split).direct_rows
        until(lambda: first.server.sessions.usage[""].direct_rows == told, "figures told to the first")
        first.close()
        assert torch.equal(split(ids).logits, expected)
        until(
            lambda: session.endpoint == urls[1] and session.mapped._page is not None,
            "mapping what the other one shares",
        )
        assert torch.equal(split(ids).logits, expected)
    assert symbiosis.stats(split).calls == 0 and session.stats.reconnects == 1
    rest = symbiosis.stats(split).direct_rows - told
    until(lambda: second.server.sessions.usage[""].direct_rows == rest, "what was multiplied while none was there, too")


CALLS: list[tuple[Callable[[], nn.Module], str, Op, tuple[int, ...], dict[str, Any]]] = [
    (tiny_llama, "model.layers.0.mlp.up_proj", Op.FORWARD, (5, 64), {}),
    (tiny_llama, "model.layers.0.mlp.up_proj", Op.FORWARD, (5, 64), {"dtype": torch.bfloat16}),
    (tiny_llama, "model.layers.0.mlp.up_proj", Op.FORWARD, (0, 64), {}),
    (tiny_llama, "model.layers.0.mlp.up_proj", Op.DGRAD, (5, 96), {}),
    (tiny_llama, "model.layers.0.mlp.up_proj", Op.PRODUCT, (5, 64), {"view": View((64, 10), (1, 64), 128)}),
    (tiny_llama, "model.layers.0.mlp.up_proj", Op.PRODUCT, (2, 5, 64), {"view": View((2, 64, 10), (640, 1, 64), 0)}),
    (tiny_llama, "model.layers.0.mlp.up_proj", Op.LEFT, (64, 3), {"view": View((10, 64), (64, 1), 0)}),
    (tiny_gpt2, "transformer.h.0.mlp.c_fc", Op.FORWARD, (5, 64), {"bias": True}),
    (tiny_gpt2, "transformer.h.0.mlp.c_fc", Op.FORWARD, (5, 64), {"bias": True, "dtype": torch.float64}),
    (tiny_gpt2, "transformer.h.0.mlp.c_fc", Op.DGRAD, (5, 256), {}),
    (tiny_mixtral, "model.layers.0.mlp.experts.gate_up_proj", Op.GROUPED, (6, 64),
     {"view": View((4, 64, 96), (6144, 1, 64), 0), "ends": torch.tensor([2, 2, 5, 5], dtype=torch.int32)}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "layer", "op", "shape", "words"), CALLS, ids=lambda value: getattr(value, "name", ""))
def test_a_layer_makes_the_same_either_way(
    make: Callable[[], nn.Module], layer: str, op: Op, shape: tuple[int, ...], words: dict[str, Any], share: Share
) -> None:
    endpoint = share(make()).endpoint
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(words.get("dtype", torch.float32))
    called, direct = Session(endpoint), joined(endpoint)
    number = layer_number(called, layer)
    expected, got = (session.call(op, number, x, **words) for session in (called, direct))
    assert torch.equal(expected, got) and expected.dtype is got.dtype
    assert called.stats.calls == 1 and direct.stats.calls == 0
    assert direct.mapped and (direct.mapped.calls, direct.mapped.rows) == (1, x.numel() // x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookups_norms_and_reads_are_the_same(dtype: torch.dtype, share: Share) -> None:
    model = tiny_llama()
    endpoint = share(model, serve=["*"], allow_read=True).endpoint
    called, direct = Session(endpoint), joined(endpoint)
    embedding, layer = (layer_number(called, name) for name in ("model.embed_tokens", "model.layers.0.mlp.up_proj"))
    for op, number, x, words in (
        (Op.LOOKUP, embedding, torch.tensor([5, 0, 99, 5]), {}),
        (Op.NORMS, layer, None, {}),
        (Op.READ, layer, None, {}),
        (Op.READ, layer, None, {"view": View((3, 4), (64, 2), 7)}),
    ):
        expected, got = (session.call(op, number, x, dtype=dtype, **words) for session in (called, direct))  # type: ignore[arg-type]
        assert torch.equal(expected, got) and expected.dtype is got.dtype
        got.zero_()  # a copy
    assert direct.stats.calls == 0


def test_advice_that_changes_in_the_midst_of_a_step_changes_no_bit(
    share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "WORTH_BATCHING", 0)
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    session, asked = session_of(split), []
    advise(session, others=1)

    class Fickle:
        """Every third time nobody waits."""

        others, is_none = 0, False

        @property
        def give_way(self) -> bool:
            asked.append(len(asked) % 3 > 0)
            return asked[-1]

        def report(self, *figures: int) -> None: ...

    assert session.mapped
    session.mapped._page = Fickle()
    expected, got = gradients(model, ids), gradients(split, ids)
    assert expected[0] == got[0] and all(torch.equal(got[1][name], value) for name, value in expected[1].items())
    figures = symbiosis.stats(split)
    assert figures.calls > 5 and figures.direct > 5


def test_what_is_shared_is_read_without_allow_read_and_merged_and_unwrapped(share: Share, ids: Tensor) -> None:
    model = tiny_llama()
    endpoint = share(model).endpoint
    plain = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    split = get_peft_model(symbiosis.from_executor(endpoint), LoraConfig(r=4, target_modules="all-linear"))
    split.load_state_dict({n: p for n, p in plain.state_dict().items() if "lora" in n}, strict=False)
    with torch.no_grad():
        assert torch.equal(split.merge_and_unload()(ids).logits, plain.merge_and_unload()(ids).logits)
    again = symbiosis.unwrap(symbiosis.wrap(copy.deepcopy(model), endpoint))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    again.model.layers[0].mlp.up_proj.weight.data.zero_()  # its own


def test_a_weight_that_is_mapped_cannot_be_written(share: Share) -> None:
    model = symbiosis.from_executor(share(tiny_llama()).endpoint)
    weight = model.model.layers[0].mlp.up_proj.weight
    other = symbiosis.from_executor(session_of(model).endpoint).model.layers[0].mlp.up_proj.weight
    before = other.value()
    with torch.no_grad():
        weight.add_(1)  # a private copy, as where the provider allows reads
    assert torch.equal(other.value(), before) and not torch.equal(weight.value(), before)


@pytest.mark.parametrize("how", ["verify", "noise", "share=False", "the provider", "another user"])
def test_who_says_no_maps_nothing(
    how: str, share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {}
    words: dict[str, Any] = {"verify": {"verify": True}, "noise": {"privacy": "noise"}, "share=False": {"share": False}}
    if how == "the provider":
        options["share_weights"] = False
    if how == "another user":
        monkeypatch.setattr(listener, "is_trusted", lambda uid: True)
        monkeypatch.setattr(listener, "peer_uid", lambda sock: 12345)
        monkeypatch.setattr(shared_page, "peer_uid", lambda sock: 12345)
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), share(model, **options).endpoint, **words.get(how, {}))
    session = session_of(split)
    with torch.no_grad():
        split(ids)
    assert session.mapped is None and symbiosis.stats(split).calls > 0
    assert not session.may_read


@pytest.mark.parametrize("how", ["tcp", "split"])
def test_who_comes_by_tcp_or_hides_rows_maps_nothing(
    how: str, serve: Callable[..., symbiosis.Executor], ids: Tensor, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"integers": [8], "operator": "here"} if how == "split" else {}
    urls = [f"local://{tmp_path}/x.sock", "tcp://127.0.0.1:0"]
    executor = serve(tiny_llama(), listen=urls, share_weights=True, **options)
    local, tcp = (listener.url for listener in executor.server.listeners)
    if how == "split":
        other = serve(tiny_llama(), listen=["tcp://127.0.0.1:0"], integers=[8], operator="elsewhere")
        split = symbiosis.wrap(tiny_llama(), local, privacy=symbiosis.Split(other.endpoint))
    else:
        split = symbiosis.wrap(tiny_llama(), tcp)
    with torch.no_grad():
        split(ids)
    assert session_of(split).mapped is None and symbiosis.stats(split).calls > 0


def test_rates_and_sharing_exclude_each_other() -> None:
    with pytest.raises(symbiosis.errors.ConfigError, match="no rate limit can slow them down"):
        symbiosis.executor.options.Options(share_weights=True, max_tenant_rows_per_s=5)


SHARING: list[tuple[bool, dict[str, Any]]] = [
    (True, {}),
    (True, {"listen": ("tcp://127.0.0.1:0", "local:///a")}),
    (False, {"listen": ("tcp://127.0.0.1:0",)}),
    (False, {"listen": ("tcp://127.0.0.1:0",), "share_weights": True}),
    (False, {"share_weights": False}),
    (True, {"device": "cuda"}),
    (False, {"device": "cuda", "share_weights": False}),
    (False, {"device": "cuda", "max_tenant_rows_per_s": 5}),
    (False, {"max_tenant_rows_per_s": 5}),
    (False, {"max_tenant_bytes_per_s": 5}),
]


@pytest.mark.parametrize(("shares", "options"), SHARING, ids=str)
def test_weights_are_shared_unless_something_that_was_said_excludes_it(shares: bool, options: dict[str, Any]) -> None:
    assert symbiosis.executor.options.Options(**{"listen": ("local:///a",), **options}).shares_weights is shares


@pytest.mark.parametrize("options", [{}, {"share_weights": True}, {"share_weights": False}], ids=str)
def test_an_embedded_executor_shares_what_it_has_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    """A model that is handed over keeps its own weights: there would be two copies."""
    said = options.get("share_weights")
    for model, shares in (("demo", said is not False), (tiny_llama(), said is True)):
        with symbiosis.Executor(model, listen=f"local://{tmp_path}/x.sock", **options) as executor:
            assert (bool(executor.server.store.files)) is shares


def test_there_is_one_copy_of_what_is_served(share: Share) -> None:
    """The executor multiplies by the very memory that its clients map."""
    store = share(tiny_llama()).server.store
    served = {number for number, layer in enumerate(store.manifest) if layer.kind != "client"}
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "symbiosis-weights" in line]
    ranges = [tuple(int(at, 16) for at in fields[0].split("-")) for fields in maps]
    assert all(fields[1] == "r--p" for fields in maps)
    for number in served:
        at = store.weights[number].data_ptr()
        assert any(begin <= at < end for begin, end in ranges)


def test_a_captured_step_knows_which_products_it_computes_itself(share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "WORTH_BATCHING", 0)
    model = tiny_llama()
    own = copy.deepcopy(model.model.layers[0].mlp.up_proj)
    wrapped = symbiosis.wrap(model, share(copy.deepcopy(model)).endpoint, share=True)
    layer, mapped = wrapped.model.layers[0].mlp.up_proj, session_of(wrapped).mapped
    assert mapped is not None and is_multiplied_here(own, 1) and not is_multiplied_here(nn.ReLU(), 1)
    assert not is_multiplied_here(layer, 1), "outside of a step that is captured, advice may change"
    for priority in (None, Priority.DECODE, Priority.TRAIN):
        monkeypatch.setattr(mapped, "_priority", priority)
        for others, give_way, rows in product((0, 1), (False, True), (1, rule.DECODE_ROWS, rule.DECODE_ROWS + 1)):
            with following((Way(session_of(wrapped).number, mapped.joins, others, give_way),), {}), torch.no_grad():
                found = mapped.weight_for_local_product(
                    layer.weight.handle.index, torch.float32, torch.randn(rows, 64), True
                )
                assert is_multiplied_here(layer, rows) is (found is not None), (priority, others, give_way, rows)
    assert not mapped.multiplies(-1, torch.float32, 1)


def test_those_who_decode_are_told_of_each_other_and_counted(share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "WORTH_BATCHING", 0)
    monkeypatch.setattr(advice, "LASTS_S", 3600.0)
    executor = share(tiny_llama(), heartbeat_s=2)
    first, second = (joined(executor.endpoint) for _ in range(2))
    number = layer_number(first, "model.layers.0.mlp.up_proj")
    x = torch.randn(1, 64)
    expected = first.call(Op.FORWARD, number, x)
    assert first.mapped and second.mapped and first.stats.calls == 0
    torch.testing.assert_close(second.call(Op.FORWARD, number, x), expected, rtol=0, atol=0)
    until(lambda: first.mapped._page.others == 1 and second.mapped._page.others == 1, "advice")
    assert torch.equal(first.call(Op.FORWARD, number, x, priority=Priority.DECODE), expected)
    assert first.stats.calls == 1, "few rows are called when somebody else decodes"
    third = joined(executor.endpoint)
    until(lambda: third.mapped._page.give_way, "rationing")  # first's tokens come by calls now
    rows = torch.randn(300, 64)
    third.call(Op.FORWARD, number, rows)
    assert third.mapped and third.mapped.rows == 300, "many rows are direct"
    third.call(Op.FORWARD, number, rows, priority=Priority.TRAIN)
    assert third.stats.calls == 1, "training gives way"
    until(lambda: executor.server.sessions.usage[""].direct_rows == 1 + 1 + 300, "figures")
    assert executor.server.sessions.usage[""].rows == 1 + 300, "what was called counts apart"
    assert sorted(s.direct.rows for s in executor.server.sessions.values()) == [1, 1, 300]
    second.close()
    until(lambda: len(executor.server.sessions) == 2)
    assert executor.server.sessions.usage[""].direct_rows == 302, "what a client did last is counted when it leaves"
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(executor.server.snapshot))
    for name, value in (("rows", 301), ("direct_rows", 302), ("direct_multiplications", 302 * 64 * 96)):
        assert registry.get_sample_value(f"symbiosis_tenant_{name}_total", {"tenant": ""}) == value


def test_values_that_the_executor_refuses_are_refused(share: Share) -> None:
    lookups = share(tiny_llama(), serve=["*"]).endpoint
    called, direct = Session(lookups), joined(lookups)
    embedding = layer_number(called, "model.embed_tokens")
    for ids in ([5, -1, 7], [5, 100]):
        for session in (called, direct):
            with pytest.raises(CallError, match="ids must lie between 0 and 99"):
                session.call(Op.LOOKUP, embedding, torch.tensor(ids), dtype=torch.float32)


@pytest.mark.parametrize("ends", [[2, 1, 5, 5], [0, 0, 0, 7], [-1, 2, 5, 5]])
def test_ends_of_groups_that_the_executor_refuses_are_refused(ends: list[int], share: Share) -> None:
    endpoint = share(tiny_mixtral()).endpoint
    called, direct = Session(endpoint), joined(endpoint)
    number = layer_number(called, "model.layers.0.mlp.experts.gate_up_proj")
    words: dict[str, Any] = {"view": View((4, 64, 96), (6144, 1, 64), 0), "ends": torch.tensor(ends, dtype=torch.int32)}
    for session in (called, direct):
        with pytest.raises(CallError, match="group ends"):
            session.call(Op.GROUPED, number, torch.randn(6, 64), **words)


@pytest.mark.parametrize("observer", [False, True])
def test_nobody_is_taken_to_decode_who_multiplies_nothing(observer: bool, share: Share) -> None:
    executor = share(tiny_llama())
    idle = Session(executor.endpoint, share=False, observer=observer, priority=Priority.DECODE)
    idle.call(Op.ECHO, 0, torch.randn(4), dtype=torch.float32)
    assert not executor.server.dispatch._advisor._decoded


def test_figures_that_cannot_be_are_not_counted(share: Share) -> None:
    executor = share(tiny_llama(), heartbeat_s=2)
    session = joined(executor.endpoint)
    assert session.mapped
    (record,) = executor.server.sessions.values()
    for wrong in (
        Direct(1, 2**63, 1, False), Direct(2**64 - 1, 1, 1, False), Direct(1, 1, 1e25, False), Direct(1, 1, -1.0, False),
        Direct(1, 1, float("nan"), False), Direct(1, 1, float("inf"), False),
    ):  # fmt: skip
        record.count_direct(wrong)
    assert record.direct == Direct(0, 0, 0, False) and executor.server.sessions.usage[""].direct_rows == 0
    record.count_direct(Direct(3, 7, 9, True))
    record.count_direct(Direct(1, 2, 3, True))  # fewer than before
    usage = executor.server.sessions.usage[""]
    assert record.direct.rows == 7 == usage.direct_rows and usage.rows == 0
    usage.direct_rows = MOST_COUNTED
    record.count_direct(Direct(4, 8, 10, True))
    assert usage.direct_rows == MOST_COUNTED, "a counter neither grows without end nor goes back"


def test_compiled_layers_are_counted_too(share: Share, ids: Tensor) -> None:
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    compiled = torch.compile(split.model.layers[0].mlp, backend="eager", fullgraph=True)
    x = torch.randn(2, 9, 64)
    assert torch.equal(compiled(x), model.model.layers[0].mlp(x))
    figures = symbiosis.stats(split)
    assert (figures.calls, figures.direct, figures.direct_rows) == (0, 3, 3 * 18)


def test_who_goes_on_with_another_models_weights_is_told(share: Share, caplog: pytest.LogCaptureFixture) -> None:
    first = share(tiny_llama(), heartbeat_s=1)
    session = joined(first.endpoint)
    number, x = layer_number(session, "model.layers.0.mlp.up_proj"), torch.randn(3, 64)
    expected = session.call(Op.FORWARD, number, x)
    first.close()
    other = tiny_llama()
    other.model.layers[0].mlp.up_proj.weight.data += 1.0
    share(other, heartbeat_s=1)
    until(lambda: "refuses this client, which goes on" in caplog.text, "a warning")
    assert torch.equal(session.call(Op.FORWARD, number, x), expected)
    assert caplog.text.count("refuses this client") == 1


def test_the_memory_goes_with_the_last_who_uses_it(share: Share) -> None:
    endpoint = share(tiny_llama()).endpoint
    before = Path("/proc/self/maps").read_text().count("symbiosis-weights")
    session = joined(endpoint)
    number = layer_number(session, "model.layers.0.mlp.up_proj")
    x = torch.randn(3, 64, requires_grad=True)
    assert session.mapped
    weight = session.mapped.weight_for_local_product(number, torch.float32, x, False)
    assert weight is not None
    y = torch.nn.functional.linear(x, weight)
    del weight
    session.close()
    del session
    y.sum().backward()  # whose graph keeps it
    assert x.grad is not None and x.grad.isfinite().all()
    del y
    assert Path("/proc/self/maps").read_text().count("symbiosis-weights") == before


def test_a_closed_executor_leaves_no_file_open(share: Share, ids: Tensor) -> None:
    """A file that is collected instead warns in whatever runs then. What is mapped stays."""
    model = tiny_llama()
    executor = share(copy.deepcopy(model))
    split, store = symbiosis.from_executor(executor.endpoint), executor.server.store
    files = [*store.files, *store.commons_files()]
    assert len(files) == 2 and not any(file.closed for file in files)
    executor.close()
    assert all(file.closed for file in files)
    assert torch.equal(split(ids).logits, model(ids).logits)


GAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "every third": lambda weight: weight.flatten()[::3].sum(),
    "columns": lambda weight: weight[:, ::5].sum(0),
    "a column": lambda weight: torch.linalg.norm(weight[:, 3]),
    "one for all": lambda weight: weight[1, ::2].expand(7, -1).sum(1),
    "windows": lambda weight: weight.unfold(1, 8, 2).sum(2),
    "transposed": lambda weight: weight.t()[::3].std(1),
}


@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("view", GAPS)
def test_sums_over_views_with_gaps(view: str, share_weights: bool, serve: Callable[..., Any], tmp_path: Path) -> None:
    """They are read as they lie: sums of the same numbers without gaps are rounded otherwise."""
    layer = nn.Sequential(nn.Linear(96, 80))
    torch.nn.init.normal_(layer[0].weight)
    url = f"local://{tmp_path}/executor.sock"
    executor = serve(copy.deepcopy(layer), listen=[url], share_weights=share_weights, allow_read=True)
    split = symbiosis.wrap(copy.deepcopy(layer), executor.endpoint)
    with torch.no_grad():
        assert torch.equal(GAPS[view](split[0].weight), GAPS[view](layer[0].weight))


SAME_MEMORY: dict[str, Callable[[Tensor], Any]] = {  # what lies in the same memory, and is written to
    "other numbers": lambda weight: weight.view(torch.int32).zero_(),
    "complex": lambda weight: torch.view_as_complex(weight.view(-1, 2)).zero_(),
    "real": lambda weight: torch.view_as_real(torch.view_as_complex(weight.view(-1, 2))).zero_(),
    "negative": lambda weight: torch._neg_view(weight).zero_(),
    "set_": lambda weight: torch.empty(0).set_(weight).zero_(),
    "sparse": lambda weight: torch.sparse_coo_tensor(torch.arange(len(weight))[None], weight)._values().zero_(),
    "lift": lambda weight: torch.ops.aten.lift(weight).zero_(),
    "a column": lambda weight: weight[:, 3].view(torch.int32).zero_(),
    "dlpack": lambda weight: torch.from_dlpack(weight).zero_(),
    "dlpack to numpy": lambda weight: torch.from_numpy(np.from_dlpack(weight)).zero_(),
    "copy.copy": lambda weight: copy.copy(weight).zero_(),
    "a parameter": lambda weight: nn.Parameter(weight.detach()).data.zero_(),
    "a frozen parameter": lambda weight: nn.Parameter(weight.detach(), requires_grad=False).zero_(),
    "data= of a parameter": lambda weight: _assigned(nn.Parameter(torch.zeros(weight.shape)), weight).data.zero_(),
    "data= of a tensor": lambda weight: _assigned(torch.zeros(weight.shape), weight).zero_(),
}


def _assigned(tensor: Tensor, weight: Tensor) -> Tensor:
    tensor.data = weight.data
    assert torch.equal(tensor.detach(), weight + 0)
    return tensor


@pytest.mark.parametrize("way", SAME_MEMORY)
def test_what_lies_in_the_memory_of_a_weight_is_written_with_it(way: str, share: Share, ids: Tensor) -> None:
    """As in the unsplit model, and for no other client: such writes were lost, or ended the process."""
    model = tiny_llama().requires_grad_(False)
    plain, endpoint = copy.deepcopy(model), share(model).endpoint
    split, other = (symbiosis.wrap(copy.deepcopy(plain), endpoint) for _ in range(2))
    for one in (plain, split):
        with torch.no_grad():
            SAME_MEMORY[way](one.model.layers[0].mlp.up_proj.weight)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, plain(ids).logits)
        assert torch.equal(other(ids).logits, model(ids).logits)


READ_ONLY: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda weight: weight.numpy().fill(0),
    "asarray": lambda weight: np.asarray(weight).fill(0),
    "storage.fill_": lambda weight: weight.untyped_storage().fill_(0),
    "storage.copy_": lambda weight: weight.untyped_storage().copy_(torch.zeros(weight.shape).untyped_storage()),
    "storage.share_memory_": lambda weight: weight.untyped_storage().share_memory_(),
    "set_ of the storage": lambda weight: torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape).zero_(),
    "to_dlpack": lambda weight: torch.utils.dlpack.to_dlpack(weight),
    "another process": lambda weight: reduce_storage(weight.untyped_storage()),
}


@pytest.mark.parametrize("way", READ_ONLY)
def test_what_cannot_be_written_with_a_weight_is_refused(way: str, share: Share) -> None:
    """It was lost, or ended the process."""
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    weight = split.model.layers[0].mlp.up_proj.weight
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError, WeightRead)):
        READ_ONLY[way](weight)
    assert torch.equal(weight.value(), model.model.layers[0].mlp.up_proj.weight)


def test_a_tensor_takes_no_weight_that_may_not_be_read(serve: Callable[..., Any]) -> None:
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint)
    tensor = torch.zeros(3)
    with pytest.raises(WeightRead, match="data="):
        tensor.data = split.model.layers[0].mlp.up_proj.weight.data
    assert torch.equal(tensor, torch.zeros(3))


def test_a_function_mode_sees_no_mapped_weight(share: Share, ids: Tensor) -> None:
    """One that writes to what it sees would end the process."""

    class Zeroes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for weight in args:
                if type(weight) is Tensor and weight.shape == (128, 64):
                    weight.zero_()
            return func(*args, **(kwargs or {}))

    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    with torch.no_grad():
        expected = model(ids).logits
        with Zeroes():
            assert torch.equal(split(ids).logits, expected)
        with torch.device("cpu"):  # a mode that writes to nothing
            before = symbiosis.stats(split).direct
            assert torch.equal(split(ids).logits, expected) and symbiosis.stats(split).direct > before


def test_products_of_a_group_are_counted_as_those_of_its_layers(share: Share) -> None:
    """Under a mode each group is answered as one call."""

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    attention = symbiosis.wrap(tiny_llama(), share(tiny_llama()).endpoint).model.layers[0].self_attn
    mapped = attention.q_proj.weight.handle.session.mapped

    def counted(mode: Any) -> Any:
        before = mapped.figures
        with mode:
            x = torch.randn(1, 20, 64, requires_grad=True)
            sum(layer(x).sum() for layer in (attention.q_proj, attention.k_proj, attention.v_proj)).backward()
        return mapped.figures.since(before)

    plain = counted(nullcontext())
    assert plain == (6, 120, 2 * 20 * 64 * (64 + 32 + 32))
    assert [counted(Sees()) for _ in range(4)] == [plain] * 4


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_mixtral])
def test_advice_may_change_between_a_checkpoint_and_what_it_makes_again(
    build: Callable[[], nn.Module], share: Share, ids: Tensor
) -> None:
    model = build()
    split = symbiosis.wrap(copy.deepcopy(model), share(model).endpoint)
    targets, trained = ["c_attn", "c_fc"] if build is tiny_gpt2 else ["q_proj", "v_proj"], []
    for one in (model, split):
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=build is tiny_gpt2)
        adapted = get_peft_model(one, config)
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.enable_input_require_grads()
        for before, after in ((False, True), (True, False)):
            if one is split:
                advise(session_of(split), give_way=before)
            loss = adapted.train()(input_ids=ids, labels=ids).loss
            if one is split:
                advise(session_of(split), give_way=after)
            loss.backward()
        trained.append((loss.detach(), [p.grad for p in adapted.parameters() if p.grad is not None]))
    (loss, expected), (split_loss, got) = trained
    assert torch.equal(loss, split_loss) and expected and all(map(torch.equal, got, expected))
    figures = symbiosis.stats(split)
    assert figures.calls > 0 and figures.direct > 0


def test_a_closed_session_joins_and_maps_again(share: Share, ids: Tensor) -> None:
    model = tiny_llama()
    executor = share(copy.deepcopy(model))
    split = symbiosis.wrap(copy.deepcopy(model), executor.endpoint)
    session = session_of(split)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(split(ids).logits, expected)
        before = symbiosis.stats(split).direct
        session.close()
        assert session.may_read and session._connection is not None, "mapped again, to be read"
        session.close()
        until(lambda: not executor.server.sessions, "both leave")
        assert torch.equal(split(ids).logits, expected)
    assert session.mapped and session.mapped._page is not None and len(executor.server.sessions) == 1
    assert symbiosis.stats(split).direct > before


def test_an_answer_about_weights_that_comes_too_late_is_not_taken_for_another(
    share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    executor = share(copy.deepcopy(model))
    split = symbiosis.wrap(copy.deepcopy(model), executor.endpoint)
    session = session_of(split)
    session.close()
    served, slept = executor.server.dispatch.served_weights, []

    def slow() -> Any:
        if not slept:
            slept.append(True)
            time.sleep(1.0)
        return served()

    monkeypatch.setattr(reconnect, "JOIN_S", 0.4)
    monkeypatch.setattr(executor.server.dispatch, "served_weights", slow)
    many = torch.randint(3, 100, (2, 64))
    with torch.no_grad():
        assert torch.equal(split(many).logits, model(many).logits)
    assert slept and session.mapped and session.mapped.suffices


def test_a_program_without_memory_for_the_mappings_calls_and_says_so(
    share: Share, ids: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def held_in(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(local_client, "held_in", held_in)
    model = tiny_llama()
    endpoint = share(copy.deepcopy(model), allow_read=True).endpoint
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, model(ids).logits)
    assert session_of(split).mapped is None and symbiosis.stats(split).calls > 0
    assert "cannot be mapped" in caplog.text and "Cannot allocate memory" in caplog.text


def test_multiplications_of_weeks_are_counted(share: Share) -> None:
    executor = share(tiny_llama(), heartbeat_s=1)
    session = joined(executor.endpoint)
    assert session.mapped
    session.mapped.count(1, 10, 3 * 10**21)
    session.beat()
    usage = executor.server.sessions.usage[""]
    until(lambda: usage.direct_multiplications == 3e21, "a report")
    usage.multiplications += 10**20
    session.mapped.count(1, 10, 10**21)
    session.beat()
    until(lambda: usage.direct_multiplications == 4e21, "another one")
    told = top.snapshot(Session(executor.endpoint, observer=True))
    assert told.tenants[""].multiplications >= 1e20 and told.tenants[""].direct_rows == 20
