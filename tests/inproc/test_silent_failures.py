"""Ten ways in which a wrapped model could be wrong without saying so; each test is named after its failure."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import symbiosis
from symbiosis.client.weights.remote_weight import RemoteWeight, remote_weights
from symbiosis.errors import RemoteWeightError, WeightRead, WeightWrite
from symbiosis.transport.fingerprint import digest
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral

Wrap = Callable[..., nn.Module]
ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture
def wrapped(serve: Callable) -> Wrap:
    """A wrapped copy of a model, served by an executor with these options."""

    def start(model: nn.Module, **options: object) -> nn.Module:
        return symbiosis.wrap(copy.deepcopy(model), serve(model, **options).endpoint)

    return start


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def adapt(model: nn.Module, config: peft.PeftConfig) -> nn.Module:
    torch.manual_seed(3)
    return get_peft_model(model, config)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What an executor holds must be the same bits afterwards."""
    before = {name: digest(p) for name, p in model.named_parameters()}
    yield
    assert {name: digest(p) for name, p in model.named_parameters()} == before


@pytest.mark.called
def test_1_osf_injects_nothing(llama: nn.Module, wrapped: Wrap, ids: Tensor) -> None:
    config = peft.OSFConfig(target_modules=ATTENTION, effective_rank=4)
    with pytest.raises(WeightRead, match="q_proj.*get_peft_model before wrap"):
        adapt(wrapped(llama), config)
    split, unsplit = adapt(wrapped(llama, allow_read=True), config), adapt(llama, config)
    expected = gradients(unsplit, ids)
    got = gradients(split, ids)
    assert got.keys() == expected.keys() and len(got) == 12
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.called
@pytest.mark.parametrize("safe", [False, True])
def test_2_merging_into_a_weight_that_is_not_there(llama: nn.Module, wrapped: Wrap, ids: Tensor, safe: bool) -> None:
    config = LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False)
    denied = adapt(wrapped(llama), config)
    before = logits(denied, ids)
    with pytest.raises(RemoteWeightError, match="allow-read"):
        denied.merge_adapter(safe_merge=safe)
    assert torch.equal(logits(denied, ids), before)
    merged = adapt(wrapped(llama, allow_read=True), config).merge_and_unload(safe_merge=safe)
    expected = adapt(llama, config).merge_and_unload(safe_merge=safe)
    assert torch.equal(logits(merged, ids), logits(expected, ids))


def test_3_a_forward_that_ignores_its_parametrized_weight(llama: nn.Module, wrapped: Wrap, ids: Tensor) -> None:
    config = LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"], init_lora_weights=False)
    split = adapt(wrapped(llama), config)
    base, unsplit = logits(llama, ids), adapt(llama, config)
    assert (logits(unsplit, ids) - base).abs().max() > 0.01
    torch.testing.assert_close(logits(split, ids), logits(unsplit, ids), rtol=1e-5, atol=1e-6)
    assert gradients(split, ids).keys() == gradients(unsplit, ids).keys()


@pytest.mark.called
@pytest.mark.parametrize("serve_pattern", [(), ("*",)])
def test_4_the_saved_copy_of_a_module_is_not_trained(
    llama: nn.Module, wrapped: Wrap, ids: Tensor, serve_pattern: tuple[str, ...]
) -> None:
    config = LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"])
    split = wrapped(llama, serve=serve_pattern)
    if serve_pattern:
        with pytest.raises(WeightWrite, match="lm_head.*layers="):
            adapt(split, config)
        return
    expected, got = gradients(adapt(llama, config), ids), gradients(adapt(split, config), ids)
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert torch.equal(got[name], expected[name]) and got[name].abs().max() > 0


def test_5_the_executors_bias_instead_of_the_trained_one(wrapped: Wrap, ids: Tensor) -> None:
    model = tiny_gpt2()
    split, name = wrapped(model), "transformer.h.0.attn.c_attn"
    for one in (model, split):
        one.get_submodule(name).bias.requires_grad_(True)
    expected, got = gradients(model, ids), gradients(split, ids)
    torch.testing.assert_close(got[f"{name}.bias"], expected[f"{name}.bias"], rtol=1e-5, atol=1e-7)
    for one in (model, split):
        with torch.no_grad():
            one.get_submodule(name).bias.add_(0.3).requires_grad_(False)
    torch.testing.assert_close(logits(split, ids), logits(model, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=64),
        lambda: peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=64
        ),
        pytest.param(
            lambda: peft.ShadowConfig(task_type="CAUSAL_LM", target_modules=["layers.0", "layers.1"], r=4),
            marks=pytest.mark.skipif(not hasattr(peft, "ShadowConfig"), reason="a method of PEFT 0.21"),
        ),
    ],
    ids=["p-tuning", "prefix-projection", "shadow"],
)
def test_6_the_adapters_own_linears_are_taken_for_base_layers(
    llama: nn.Module, serve: Callable, ids: Tensor, config: Callable[[], peft.PeftConfig]
) -> None:
    unsplit = adapt(copy.deepcopy(llama), config())
    split = symbiosis.wrap(adapt(copy.deepcopy(llama), config()), serve(llama).endpoint)
    assert len(symbiosis.report(split).wrapped) == 14
    trainable = {name for name, p in unsplit.named_parameters() if p.requires_grad}
    assert {name for name, p in split.named_parameters() if p.requires_grad} == trainable
    torch.manual_seed(5)
    expected = gradients(unsplit, ids)
    torch.manual_seed(5)
    got = gradients(split, ids)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.called
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_7_assigning_data_does_nothing(build: Callable, wrapped: Wrap, ids: Tensor) -> None:
    name = "transformer.h.0.mlp.c_fc" if build is tiny_gpt2 else "model.layers.0.self_attn.q_proj"
    model = build()
    denied, allowed = wrapped(model), wrapped(model, allow_read=True)
    layer = model.get_submodule(name)
    new = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(2))
    with pytest.raises(WeightWrite, match=f"{name}.*allow-read"):
        denied.get_submodule(name).weight.data = new
    layer.weight.data = new
    allowed.get_submodule(name).weight.data = new
    assert torch.equal(logits(allowed, ids), logits(model, ids))
    transposed = new.t().contiguous().t()  # the same values, laid out as PiSSA leaves them on a Conv1D
    allowed.get_submodule(name).weight.data = transposed
    torch.testing.assert_close(logits(allowed, ids), logits(model, ids), rtol=1e-5, atol=1e-6)
    assert isinstance(allowed.get_submodule(name), nn.Linear | Conv1D)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "mul_": lambda weight: weight.mul_(2),
    "data.clamp_": lambda weight: weight.data.clamp_(-0.01, 0.01),
    "data +=": lambda weight: weight.data.add_(torch.ones(weight.shape)),
    "view": lambda weight: weight.data.t()[0].zero_(),
    "copy_": lambda weight: weight.copy_(torch.ones(weight.shape)),
    "init": lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(1)),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 2.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_8_a_write_reaches_the_shared_weights(
    llama: nn.Module, ids: Tensor, write: Callable[[nn.Parameter], object]
) -> None:
    expected = logits(llama, ids)
    for allow_read in (False, True):
        held = copy.deepcopy(llama)
        with symbiosis.Executor(held, allow_read=allow_read) as executor, unchanged(held), torch.no_grad():
            writer, reader = (symbiosis.wrap(copy.deepcopy(llama), executor.endpoint) for _ in range(2))
            weight = writer.model.layers[0].mlp.gate_proj.weight
            if allow_read:
                write(weight)
            else:
                with pytest.raises(WeightWrite, match="gate_proj"):
                    write(weight)
            assert torch.equal(logits(reader, ids), expected)
            assert torch.equal(logits(writer, ids), expected) != allow_read
    with torch.no_grad():
        write(llama.model.layers[0].mlp.gate_proj.weight)
        with symbiosis.Executor(held, allow_read=True) as executor:
            changed = symbiosis.wrap(copy.deepcopy(held), executor.endpoint)
            write(changed.model.layers[0].mlp.gate_proj.weight)
            assert torch.equal(logits(changed, ids), logits(llama, ids))


@pytest.mark.called
@pytest.mark.parametrize("serve_pattern", [(), ("*",)])
def test_9_a_tied_head_keeps_its_size(wrapped: Wrap, ids: Tensor, serve_pattern: tuple[str, ...]) -> None:
    model = tiny_gpt2()
    split = wrapped(model, serve=serve_pattern)
    if serve_pattern:
        with pytest.raises(WeightRead, match="wte"):
            split.resize_token_embeddings(120)
        return
    for one in (model, split):
        torch.manual_seed(4)
        one.resize_token_embeddings(120)
    assert logits(split, ids).shape[-1] == 120
    assert split.lm_head.weight is split.transformer.wte.weight
    assert torch.equal(logits(split, ids), logits(model, ids))


@pytest.mark.called
def test_10_experts_stay_on_the_client(wrapped: Wrap, ids: Tensor) -> None:
    model = tiny_mixtral()
    split = wrapped(model)
    kept = sum(p.numel() for p in split.model.layers.parameters() if not isinstance(p, RemoteWeight))
    total = sum(p.numel() for p in model.model.layers.parameters())
    assert kept / total < 0.01
    assert sum(weight.dim() == 3 for weight in remote_weights(split)) == 4
    assert torch.equal(logits(split, ids), logits(model, ids))
    assert symbiosis.stats(split).by_op["GROUPED"] == 4
