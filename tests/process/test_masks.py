"""With `privacy=`: what an executor is sent, and that what comes back is exact."""

import copy
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.audit.unmasked import Unmasked
from symbiosis.demo.data import base_text, blocks
from symbiosis.errors import CallError, Code, WrapError
from symbiosis.executor.model.load import DEMO_MODEL
from symbiosis.protocol import Op
from tests.conftest import tiny_llama, tiny_mixtral
from tests.private import BITS, MODELS, lora, one_step, recorded, trained


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
@BITS
@MODELS
def test_masks_leave_nothing_behind(
    build: Callable, bits: int, verify: bool, two: Callable, pads: Callable, ids: Tensor
) -> None:
    """Logits and gradients of `Split` and `Pads` are those of the integer model without masks, bit for bit."""
    model = build()
    one, other = two(model)
    levels = [Unmasked(bits), symbiosis.Split(other.endpoint, bits), symbiosis.Pads(pads(model, bits=bits))]
    results = []
    for level in levels:
        wrapped = lora(symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=level, verify=verify))
        for _ in range(3):  # from the second step on, calls are made in groups
            wrapped.zero_grad()
            result = one_step(wrapped, ids)
        results.append(result)
        symbiosis.unwrap(wrapped, copy.deepcopy(model).state_dict())
    for result in results[1:]:
        assert len(result) == len(results[0]) > 10
        assert all(map(torch.equal, result, results[0]))


def hard_rows(rows: int) -> Tensor:
    """The largest, the smallest, zero, one massive channel, and many at random, of every size."""
    info, generator = torch.finfo(torch.float32), torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator)
    x[300:] *= 10.0 ** torch.randint(-44, 38, (len(x[300:]), 1), generator=generator)
    for row, value in enumerate((0.0, info.max, -info.max, info.tiny, 1e-45, 1e30)):
        x[row] = value
    x[6] = torch.eye(64)[3] * 1e38
    return x


@pytest.mark.parametrize("rows", [300, pytest.param(250_000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))])
@pytest.mark.parametrize("level", ["split", "pads"])
@BITS
def test_hard_rows_are_exact(bits: int, level: str, rows: int, two: Callable, pads: Callable) -> None:
    """In the long form, a million of them in all."""
    model = tiny_llama()
    one, other = two(model)
    x = hard_rows(rows)
    choices = {
        "split": lambda: symbiosis.Split(other.endpoint, bits),
        "pads": lambda: symbiosis.Pads(pads(model, tokens=rows + 100, bits=bits)),
    }
    found = []
    for privacy in (Unmasked(bits), choices[level]()):
        wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=privacy)
        layer = wrapped.model.layers[0].mlp.gate_proj
        with torch.no_grad():
            found.append(torch.cat([layer(some) for some in x.split(5000)]))
    assert torch.equal(*found) and found[0].isfinite().all()


@pytest.mark.parametrize("asked", [{"privacy": symbiosis.Noise()}, {"verify": True}])
def test_privacy_without_the_weights_is_refused_not_ignored(asked: dict[str, Any], serve: Callable) -> None:
    executor = serve(tiny_llama())
    with pytest.raises(WrapError, match=f"knows no {next(iter(asked))}.*: wrap a model from a checkpoint for that"):
        symbiosis.from_executor(executor.endpoint, **asked)
    with pytest.raises(WrapError, match="knows no atn_implementation, nor does the configuration of LlamaForCausalLM$"):
        symbiosis.from_executor(executor.endpoint, atn_implementation="eager")


def test_an_infinite_gradient_stays_one_and_is_not_sent(two: Callable, ids: Tensor) -> None:
    """As loss scaling needs it."""
    model = tiny_llama()
    one, other = two(model)
    log = recorded(one)
    layer = symbiosis.wrap(model, one.endpoint, privacy=symbiosis.Split(other.endpoint)).model.layers[0].mlp.gate_proj
    x = torch.randn(4, 64, requires_grad=True)
    gradient = torch.ones(4, 96)
    gradient[2, 5] = math.inf
    layer(x).backward(gradient)
    assert x.grad is not None and x.grad[2].isnan().all() and x.grad[[0, 1, 3]].isfinite().all()
    assert [call.dtype for call, _ in log] == ["int32", "int32"]


@pytest.mark.full
def test_quantised_weights_are_closer_to_float32_than_bfloat16_is(two: Callable) -> None:
    """By the divergence of the predictions, on text of the kind that the model was trained on."""
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    one, other = two(reference)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = torch.tensor(blocks(base_text(), tokenizer, 96, 16, seed=1))
    with torch.no_grad():
        expected = reference(ids).logits.log_softmax(-1)

        def divergence(model: nn.Module) -> float:
            found = model(ids).logits.float().log_softmax(-1)
            return (expected.exp() * (expected - found)).sum(-1).mean().item()

        bfloat16 = divergence(copy.deepcopy(reference).bfloat16())
        wrapped = [
            divergence(
                symbiosis.wrap(copy.deepcopy(reference), one.endpoint, privacy=symbiosis.Split(other.endpoint, bits))
            )
            for bits in (8, 16)
        ]
    assert wrapped[0] < bfloat16
    assert wrapped[1] < 1e-4 * bfloat16


def test_training_follows_float32(two: Callable, ids: Tensor) -> None:
    model = tiny_llama()
    one, other = two(model)
    losses, adapter = trained(copy.deepcopy(model), ids)
    for bits, most, cosine in ((8, 1e-2, 0.999), (16, 1e-4, 0.999999)):
        wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Split(other.endpoint, bits))
        found, other_adapter = trained(wrapped, ids)
        assert max(abs(a - b) for a, b in zip(losses, found, strict=True)) < most
        assert torch.cosine_similarity(adapter.double(), other_adapter.double(), dim=0) > cosine
    assert losses[-1] < losses[0] - 0.2


def test_joined_gradients_are_taken_apart_again(two: Callable, ids: Tensor) -> None:
    """`exact=False` makes one call of a group's gradients; every member's rows are masked by themselves."""
    model = tiny_llama()
    one, other = two(model)
    results = []
    for exact in (True, False):
        wrapped = lora(
            symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Split(other.endpoint, 16), exact=exact)
        )
        for _ in range(3):
            wrapped.zero_grad()
            result = one_step(wrapped, ids)
        results.append(result)
    for mine, others in zip(*results, strict=True):
        torch.testing.assert_close(mine, others, atol=1e-5, rtol=1e-4)


def test_generating_needs_no_other_calls(two: Callable, ids: Tensor) -> None:
    model = tiny_llama()
    one, other = two(model)
    logs = recorded(one), recorded(other)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Split(other.endpoint, 16))
    assert torch.equal(wrapped.generate(ids, max_new_tokens=8, do_sample=False), expected)
    for log in logs:
        assert {(call.op, call.dtype) for call, _ in log} == {(Op.FORWARD, "int64")}
    assert {call.seeded for call, _ in logs[0]} == {False} and {call.seeded for call, _ in logs[1]} == {True}


def test_only_layers_whose_rows_can_be_masked_are_sent(two: Callable) -> None:
    one, other = two(tiny_mixtral(), serve=["*"])
    wrapped = symbiosis.wrap(tiny_mixtral(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    report = symbiosis.report(wrapped)
    private_ones = {name for name, reason in report.kept.items() if reason == "private"}
    assert {"lm_head", "model.embed_tokens"} <= private_ones
    assert any("experts" in name for name in private_ones)
    assert report.wrapped and all("proj" in name for name in report.wrapped)


@pytest.mark.parametrize("verify", [False, True])
def test_calls_that_cannot_be_masked_are_refused(verify: bool, two: Callable) -> None:
    one, other = two(tiny_llama())
    log = recorded(one)
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint), verify=verify)
    weight = wrapped.model.layers[0].mlp.gate_proj.weight
    session = weight.handle.session
    x = torch.ones(2, 64)
    for attempt in (
        lambda: x[:, :32] @ weight[:, :32].t(),
        lambda: weight @ x.t(),
        lambda: session.call(Op.ECHO, 0, x),
        lambda: session.call(Op.FORWARD, weight.handle.index, x, bias=True),
        lambda: session.call(Op.LOOKUP, 0, torch.tensor([1])),
    ):
        with pytest.raises(CallError, match="not masked") as refused:
            attempt()
        assert refused.value.code is Code.NOT_ALLOWED
    assert not log
    assert (x @ weight.t()).shape == (2, 96)  # which is the layer's own product
    assert [call.dtype for call, _ in log] == ["int32"]


@pytest.mark.parametrize("value", [0, -1])
def test_sums_with_the_mask_wrap(value: int, two: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics do not show a sum that does not wrap; masks of all ones and of nothing do."""
    monkeypatch.setattr(
        "symbiosis.client.privacy.split.keystream", lambda key, shape, dtype: torch.full(shape, value, dtype=dtype)
    )
    one, other = two(tiny_llama())
    log = recorded(one)
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    x = torch.eye(64)[:1] * 1e30
    wrapped.model.layers[0].mlp.gate_proj(x)
    sent = log[0][1]
    assert sent is not None and sent.dtype is torch.int32
    assert int(sent[0, 1]) == value  # 0 + r
    assert 0 < int(sent[0, 0]) - value < 2**31


def test_nothing_is_masked_alike(two: Callable, pads: Callable, ids: Tensor) -> None:
    """The same prompt again and again: no row comes twice, on any level."""
    model = tiny_llama()
    for privacy in (symbiosis.Split, symbiosis.Pads):
        one, other = two(model)
        log = recorded(one)
        given = other.endpoint if privacy is symbiosis.Split else pads(model, name=f"{privacy.__name__}.pads")
        wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=privacy(given))
        for _ in range(4):
            wrapped(ids)
        rows = [tuple(row.tolist()) for _, sent in log if sent is not None for row in sent]
        assert len(rows) > 400 and len(set(rows)) == len(rows)


def test_a_forked_child_masks_otherwise(two: Callable, tmp_path: Path) -> None:
    """What would be the same in parent and child shows the difference of their rows."""
    one, other = two(tiny_llama(), listen=["tcp://127.0.0.1:0"])
    log = recorded(one)
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    layer, x = wrapped.model.layers[0].mlp.gate_proj, torch.ones(1, 64)
    expected = layer(x)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if torch.equal(layer(x), expected) else 3)
        except BaseException:
            os._exit(4)
    assert torch.equal(layer(x), expected)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len({tuple(sent.flatten().tolist()) for _, sent in log if sent is not None}) == len(log) == 3


def test_a_private_session_is_not_copied_into_other_processes(two: Callable) -> None:
    one, other = two(tiny_llama())
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    with pytest.raises(WrapError, match="secrets of this process"):
        pickle.dumps(wrapped)


def test_words_that_name_no_level_are_refused(serve: Callable) -> None:
    executor = serve(tiny_llama(), integers=[8])
    for privacy in ("split", "pads", "secret"):
        with pytest.raises(WrapError, match="symbiosis.Split"):
            symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=privacy)
    with pytest.raises(WrapError, match="8 or 16"):
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Split(executor.endpoint, 12))


@pytest.mark.parametrize("level", [symbiosis.Noise, symbiosis.Split, symbiosis.Pads])
def test_a_class_instead_of_a_level_is_told_how_to_write_it(level: type, serve: Callable) -> None:
    with pytest.raises(WrapError, match=rf"write {level.__name__}\(\.\.\.\)"):
        symbiosis.wrap(tiny_llama(), serve(tiny_llama()).endpoint, privacy=level)  # type: ignore[arg-type]
