"""What PEFT users do with a model, done with a wrapped one."""

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import symbiosis
from symbiosis.client.layers.virt_layer import VirtLinear
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import WeightRead, WeightWrite, WrapError
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral
from tests.wrapped import adapted, assert_same, logits, step


def test_layers_look_like_what_they_replace(split: nn.Module) -> None:
    layer = split.model.layers[0].self_attn.q_proj
    assert isinstance(layer, nn.Linear) and isinstance(layer, VirtLinear)
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.shape == (64, 64)
    assert (layer.in_features, layer.out_features, layer.weight.device.type) == (64, 64, "cpu")
    assert "in_features=64" in repr(layer) and "RemoteWeight(model.layers.0.self_attn.q_proj" in repr(layer.weight)
    assert str(symbiosis.report(split)) == "wrapped 14/15 (kept: lm_head, not served)"


def test_no_served_weight_stays_in_memory(split: nn.Module) -> None:
    held = sum(p.nbytes for p in split.parameters() if not isinstance(p, RemoteWeight))
    assert held == sum(p.nbytes for n, p in split.named_parameters() if "norm" in n or "embed" in n or "lm_head" in n)


def test_wrap_after_peft(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    expected = step(adapted(copy.deepcopy(llama)), ids)
    model = symbiosis.wrap(adapted(copy.deepcopy(llama)), serve(llama).endpoint)
    assert len(symbiosis.report(model).wrapped) == 14
    assert_same(step(model, ids), expected)


def test_several_adapters_and_mixed_batches(llama: nn.Module, split: nn.Module, ids: Tensor) -> None:
    def two(model: nn.Module) -> nn.Module:
        model = adapted(model)
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return model.eval()

    torch.manual_seed(3)
    plain, remote = two(llama), two(split)
    for name in ("default", "other"):
        plain.set_adapter(name), remote.set_adapter(name)
        assert torch.equal(logits(remote, ids), logits(plain, ids))
    names = ["other", "__base__"]
    with torch.no_grad():
        assert torch.equal(remote(ids, adapter_names=names).logits, plain(ids, adapter_names=names).logits)
    with remote.disable_adapter(), plain.disable_adapter():
        assert torch.equal(logits(remote, ids), logits(plain, ids))


@pytest.mark.called
def test_merge_is_refused_unless_reads_are_allowed(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    model = adapted(symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint))
    with pytest.raises((WeightWrite, WeightRead), match="allow-read"):
        model.merge_adapter()
    executor = serve(llama, allow_read=True)
    merged = adapted(symbiosis.wrap(copy.deepcopy(llama), executor.endpoint)).eval()
    plain = adapted(copy.deepcopy(llama)).eval()
    merged.merge_adapter(), plain.merge_adapter()
    assert torch.equal(logits(merged, ids), logits(plain, ids))
    other = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint)
    assert torch.equal(logits(other, ids), logits(llama, ids)), "a merge must not reach the shared weights"


@pytest.mark.called
def test_base_weights_cannot_be_trained_by_mistake(split: nn.Module) -> None:
    with pytest.raises(WeightWrite, match="q_proj.*layers="):
        split.requires_grad_(True)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "transformer.h.0.mlp.c_fc"])
def test_a_weight_is_multiplied_by_hand(name: str, serve: Callable) -> None:
    """With gradients, as GLoRA does it: also products that are the layer's own."""
    model = tiny_gpt2() if "h.0" in name else tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint)
    results = []
    for one in (model, split):
        x, weight = torch.ones(3, 64, requires_grad=True), one.get_submodule(name).weight
        y = x @ weight if "h.0" in name else x @ weight.t()
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    assert all(torch.equal(got, expected) for got, expected in zip(*results, strict=True))


@pytest.mark.called
def test_reading_a_weight_names_layer_and_line(split: nn.Module) -> None:
    with pytest.raises(WeightRead, match=r"layers\.1\.mlp\.up_proj.*test_features.py"):
        split.model.layers[1].mlp.up_proj.weight.abs()


def test_a_weight_that_is_expanded_is_read_once(llama: nn.Module, serve: Callable) -> None:
    """An executor refuses to send an element many times."""
    own = llama.model.layers[0].mlp.up_proj.weight.detach()
    weight = (
        symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=True).endpoint).model.layers[0].mlp.up_proj.weight
    )
    for view in (lambda w: w.expand(3, *w.shape), lambda w: w[:2, :1].expand(2, w.numel()), lambda w: w[1:3, 4:9]):
        assert torch.equal(view(weight.detach()).abs(), view(own).abs())


def test_experts_are_served_and_trained(serve: Callable, ids: Tensor) -> None:
    model = tiny_mixtral()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint)
    served = sum(w.numel() for w in split.parameters() if isinstance(w, RemoteWeight))
    candidates = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert served == candidates
    assert_same(
        step(adapted(split, target_modules=["q_proj", "o_proj"]), ids),
        step(adapted(copy.deepcopy(model), target_modules=["q_proj", "o_proj"]), ids),
    )


@pytest.mark.called
def test_stats_count_this_clients_calls(split: nn.Module, ids: Tensor) -> None:
    before = symbiosis.stats(split)
    logits(split, ids)
    stats = symbiosis.stats(split)
    assert stats.calls - before.calls == 14 and stats.rows >= 14 * ids.numel() and stats.mean_batch == 1.0
    with pytest.raises(WrapError, match="not wrapped"):
        symbiosis.stats(tiny_llama())


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_rows_of_another_dtype_are_refused_as_torch_refuses_them(build: Callable, serve: Callable) -> None:
    plain = build()
    split = symbiosis.wrap(copy.deepcopy(plain), serve(plain).endpoint)

    def first(model: nn.Module) -> nn.Module:
        return next(m for m in model.modules() if isinstance(m, nn.Linear | Conv1D))

    layer, own = first(split), first(plain)
    assert isinstance(layer.weight, RemoteWeight)
    rows = torch.randn(3, own.weight.shape[1 if isinstance(own, nn.Linear) else 0])
    for of in (layer, own):
        with pytest.raises(RuntimeError, match="dtype|Float"):
            of(rows.bfloat16())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(layer(rows.bfloat16()), own(rows.bfloat16())) and torch.equal(layer(rows), own(rows))
    split.bfloat16(), plain.bfloat16()
    assert torch.equal(layer(rows.bfloat16()), own(rows.bfloat16()))


@pytest.mark.called
def test_numbers_near_zero_cost_no_more_than_others(serve: Callable) -> None:
    """Denormal numbers are zero to the executor: a product with them takes a processor a hundred times as long."""
    layer = nn.Linear(64, 64, bias=False)
    executor = serve(nn.Sequential(layer), serve=["0"])
    split = symbiosis.wrap(copy.deepcopy(nn.Sequential(layer)), executor.endpoint)
    rows = torch.full((2, 64), 1e-41)
    assert layer(rows).count_nonzero() and not split(rows).count_nonzero()
    small = torch.full((2, 64), 1e-20)
    assert torch.equal(split(small), layer(small))
