"""What transformers and PEFT users do with a model, done with a wrapped one."""

import copy
import gc
import io
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import symbiosis
from symbiosis.client.remote_weight import RemoteWeight
from symbiosis.client.session import sessions
from symbiosis.client.virt_layer import VirtLinear
from symbiosis.errors import Code, ExecutorUnavailable, RemoteWeightError, WeightRead, WeightWrite, WrapError
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}


@pytest.fixture
def split(llama: nn.Module, serve: Callable) -> nn.Module:
    return symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint)


def adapted(model: nn.Module, **options: object) -> nn.Module:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(**{**LORA, **options}))


def step(model: nn.Module, ids: Tensor, **options: object) -> dict[str, Tensor]:
    """Gradients of one training step."""
    model.train()
    torch.manual_seed(5)
    with torch.autocast("cpu", enabled=bool(options.get("autocast")), dtype=torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


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


def test_deepcopy_and_pickle(split: nn.Module, ids: Tensor) -> None:
    expected = logits(split, ids)
    twin = copy.deepcopy(split)
    assert twin.model.layers[0].mlp.up_proj.weight.handle is not split.model.layers[0].mlp.up_proj.weight.handle
    buffer = io.BytesIO()
    torch.save(split, buffer)
    assert buffer.tell() < 200_000  # 64 kB of embeddings and head, but no layer
    buffer.seek(0)
    for model in (twin, torch.load(buffer, weights_only=False)):
        assert torch.equal(logits(model, ids), expected)


def test_state_dict_holds_what_the_client_owns(
    split: nn.Module, llama: nn.Module, tmp_path: Path, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so, unless only an adapter is asked for."""
    state = split.state_dict()
    assert "model.embed_tokens.weight" in state and not any("proj" in name for name in state)
    assert "14 weights that the executor holds" in caplog.text and "unwrap(model) first" in caplog.text
    caplog.clear()
    split.load_state_dict(state)
    assert not caplog.records
    split.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 60_000 and "unwrap(model) first" in caplog.text
    caplog.clear()
    get_peft_model(split, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    plain = symbiosis.unwrap(split, llama.state_dict())
    plain.state_dict()
    assert "unwrap(model) first" not in caplog.text


def test_a_whole_checkpoint_is_loaded_if_it_is_the_executors(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    other, name = copy.deepcopy(llama), "model.layers.0.mlp.up_proj.weight"
    nn.init.normal_(other.get_parameter(name))
    denied, allowed = (
        symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=may).endpoint) for may in (False, True)
    )
    for split in (denied, allowed):
        split.load_state_dict(llama.state_dict())
        assert torch.equal(logits(split, ids), logits(llama, ids))
    with pytest.raises(RuntimeError, match=f"would write to the shared base weight '{name.removesuffix('.weight')}'"):
        denied.load_state_dict(other.state_dict())
    assert torch.equal(logits(denied, ids), logits(llama, ids))
    allowed.load_state_dict(other.state_dict())
    assert torch.equal(logits(allowed, ids), logits(other, ids))
    allowed.load_state_dict(llama.state_dict())
    assert torch.equal(logits(allowed, ids), logits(llama, ids))


@pytest.mark.parametrize(("change", "to"), [("t_", ()), ("resize_", (8, 8)), ("set_", (torch.zeros(64, 64),))])
def test_a_weight_is_not_given_another_shape_in_place(
    change: str, to: tuple[Any, ...], llama: nn.Module, serve: Callable, ids: Tensor
) -> None:
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=True).endpoint)
    weight = split.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(WeightWrite, match="in place"):
        getattr(weight, change)(*to)
    assert torch.equal(logits(split, ids), logits(llama, ids))


def test_saved_adapter_loads_into_plain_peft(llama: nn.Module, split: nn.Module, tmp_path: Path, ids: Tensor) -> None:
    model = adapted(split).eval()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(llama, tmp_path).eval(), ids), logits(model, ids))


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


def test_reading_a_weight_names_layer_and_line(split: nn.Module) -> None:
    with pytest.raises(WeightRead, match=r"layers\.1\.mlp\.up_proj.*test_features.py"):
        split.model.layers[1].mlp.up_proj.weight.abs()


def test_unwrap(llama: nn.Module, serve: Callable, tmp_path: Path, ids: Tensor) -> None:
    reading = symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=True).endpoint)
    llama.save_pretrained(tmp_path)
    executor = serve(llama)
    with pytest.raises(WrapError, match="weights="):
        symbiosis.unwrap(symbiosis.wrap(copy.deepcopy(llama), executor.endpoint))
    from_files = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint)
    for model in (symbiosis.unwrap(reading), symbiosis.unwrap(from_files, tmp_path)):
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
        assert torch.equal(logits(model, ids), logits(llama, ids))
        assert model.state_dict().keys() == llama.state_dict().keys()
        assert_same(step(adapted(model), ids), step(adapted(copy.deepcopy(llama)), ids))


def test_unwrap_takes_the_weights_from_where_the_model_came(
    llama: nn.Module, serve: Callable, tmp_path: Path, ids: Tensor
) -> None:
    """... as long as they are the executor's."""
    llama.save_pretrained(tmp_path)
    endpoint = serve(llama).endpoint
    split = symbiosis.wrap(AutoModelForCausalLM.from_pretrained(tmp_path), endpoint)
    assert torch.equal(logits(symbiosis.unwrap(split), ids), logits(llama, ids))
    assert type(split.model.layers[0].mlp.up_proj) is nn.Linear
    symbiosis.wrap(split, endpoint)
    with torch.no_grad():
        llama.model.layers[1].mlp.up_proj.weight.add_(1)
    llama.save_pretrained(tmp_path)
    for weights, where in ((None, f"the weights in {tmp_path}"), (llama.state_dict(), "the given weights")):
        with pytest.raises(WrapError, match=rf"layers\.1\.mlp\.up_proj: {where} differ from") as error:
            symbiosis.unwrap(split, weights)
        assert error.value.code is Code.WRONG_MODEL and type(split.model.layers[0].mlp.up_proj) is VirtLinear


@pytest.mark.parametrize("pattern", ["*", "model.layers.0.*", "lm_head"])
def test_serve_chooses_the_layers(llama: nn.Module, serve: Callable, ids: Tensor, pattern: str) -> None:
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama, serve=[pattern]).endpoint)
    assert len(symbiosis.report(split).wrapped) == {"*": 16, "model.layers.0.*": 7, "lm_head": 1}[pattern]
    expected = step(adapted(copy.deepcopy(llama)), ids)
    assert torch.equal(logits(split, ids), logits(llama, ids))
    assert_same(step(adapted(split), ids), expected)


@pytest.mark.parametrize("pattern", [None, "*"])
def test_tied_embeddings(serve: Callable, ids: Tensor, pattern: str | None) -> None:
    model = tiny_gpt2()
    executor = serve(model, serve=[pattern] if pattern else [])
    split = symbiosis.wrap(copy.deepcopy(model), executor.endpoint)
    assert split.lm_head.weight is split.transformer.wte.weight
    assert isinstance(split.lm_head.weight, RemoteWeight) == (pattern == "*")
    assert torch.equal(logits(split, ids), logits(model, ids))
    if pattern is None:
        assert split.resize_token_embeddings(120).weight.shape[0] == 120
        assert logits(split, ids).shape[-1] == 120


def test_layers_argument_keeps_the_rest(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint, layers=["*.mlp.*"])
    assert len(symbiosis.report(split).wrapped) == 6
    assert torch.equal(logits(split, ids), logits(llama, ids))


def test_wrong_model_is_refused_and_left_unchanged(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    executor = serve(llama)
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[1].mlp.gate_proj.weight.view(torch.int32)[0, 0] ^= 1  # one flipped bit
    before = logits(other, ids)
    with pytest.raises(WrapError, match=r"layers\.1\.mlp\.gate_proj: the weights differ") as error:
        symbiosis.wrap(other, executor.endpoint)
    assert error.value.code is pickle.loads(pickle.dumps(error.value)).code is Code.WRONG_MODEL
    assert torch.equal(logits(other, ids), before)
    with pytest.raises(WrapError, match=r"bfloat16.*float32"):
        symbiosis.wrap(copy.deepcopy(llama).to(torch.bfloat16), executor.endpoint)
    with pytest.raises(WrapError, match="none of this model's"):
        symbiosis.wrap(tiny_gpt2(), executor.endpoint)
    with pytest.raises(WrapError, match="wrapped already"):
        symbiosis.wrap(symbiosis.wrap(copy.deepcopy(llama), executor.endpoint), executor.endpoint)


def test_a_tied_head_is_reported_and_why_it_cannot_be_wrapped(serve: Callable, ids: Tensor) -> None:
    model = tiny_llama(tied=True)
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint)
    assert str(symbiosis.report(split)) == "wrapped 14/15 (kept: lm_head, tied)"
    assert torch.equal(logits(split, ids), logits(model, ids))
    with pytest.raises(
        WrapError, match=r"LlamaForCausalLM \(lm_head\), but all .* stay with it: lm_head: tied$"
    ) as error:
        symbiosis.wrap(model, serve(model, serve=["lm_head"]).endpoint)
    assert error.value.code is Code.WRONG_MODEL


def test_a_model_of_other_shapes_is_refused_naming_both(llama: nn.Module, serve: Callable) -> None:
    with pytest.raises(
        WrapError, match=r"q_proj: its shape \(32, 32\) is not the executor's \(64, 64\); .* and 11 more"
    ):
        symbiosis.wrap(tiny_llama(32, 48), serve(llama).endpoint)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_layer_of_another_shape_stays_with_a_warning(llama: nn.Module, serve: Callable, warnings: Callable) -> None:
    endpoint = serve(llama).endpoint
    symbiosis.wrap(copy.deepcopy(llama), endpoint)
    assert not warnings()
    llama.model.layers[1].mlp.up_proj = nn.Linear(64, 80, bias=False)
    symbiosis.wrap(llama, endpoint)
    (told,) = warnings()
    assert "1 of the layers" in told
    assert "model.layers.1.mlp.up_proj: its shape (80, 64) is not the executor's (96, 64)" in told


def test_another_configuration_is_told(llama: nn.Module, serve: Callable, warnings: Callable) -> None:
    """The weights are the same, the results are not."""
    endpoint, config = serve(llama).endpoint, llama.config
    config.rms_norm_eps, config.num_attention_heads, config.use_cache = 1e-3, 8, False
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    symbiosis.wrap(llama, endpoint)
    (told,) = warnings()
    assert endpoint in told and "use_cache" not in told
    assert "rms_norm_eps is 0.001 here and 1e-06 there" in told and "num_attention_heads is 8 here and 4 there" in told
    assert "rope_parameters.rope_theta is 500000.0 here and 10000.0 there" in told
    symbiosis.from_executor(endpoint, rms_norm_eps=1e-3)  # is asked for
    assert len(warnings()) == 1


def test_bare_model_of_what_is_served(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    bare = symbiosis.wrap(copy.deepcopy(llama.model), serve(llama).endpoint)
    with torch.no_grad():
        assert torch.equal(bare(ids).last_hidden_state, llama.model(ids).last_hidden_state)


def test_generation_does_not_gather_experts(serve: Callable, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `generate` decodes by copies of experts' weights, which only a model that has them can make."""
    model = tiny_mixtral()
    executor = serve(model, allow_read=True)
    split = symbiosis.wrap(copy.deepcopy(model), executor.endpoint)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))

    def formula_of_decoding(model: nn.Module) -> object:
        with model._optimize_model_for_decode():
            return model.config._experts_implementation

    assert formula_of_decoding(model) == "batched_mm"
    assert formula_of_decoding(split) == formula_of_decoding(copy.deepcopy(split)) == "grouped_mm"
    assert formula_of_decoding(symbiosis.unwrap(split)) == "batched_mm"


def test_compiled_without_graph_breaks(llama: nn.Module, split: nn.Module, ids: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(compiled, ids), logits(llama, ids))
    explained = torch._dynamo.explain(split)(ids)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_compiled_training(llama: nn.Module, split: nn.Module, ids: Tensor) -> None:
    torch._dynamo.reset()
    plain, remote = adapted(llama), adapted(split)
    expected = step(plain, ids)
    remote.train()
    torch.manual_seed(5)
    torch.compile(remote, backend="aot_eager")(input_ids=ids, labels=ids).loss.backward()
    got = {name: p.grad for name, p in remote.named_parameters() if p.grad is not None}
    assert_same(got, expected)


def loss_of_a_model_that_is_gone(endpoint: str, exact: bool, compiled: bool, ids: Tensor) -> tuple[Tensor, Any]:
    """And the adapter's parameters."""
    model = adapted(symbiosis.wrap(tiny_llama(), endpoint, exact=exact))
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


def test_a_compiled_graph_says_that_its_model_is_gone(llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    torch._dynamo.reset()
    loss, _ = loss_of_a_model_that_is_gone(serve(llama).endpoint, True, True, ids)
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
        torch.testing.assert_close(split(x), model(x))
    with pytest.raises(RemoteWeightError, match="torch.func|tangents"):
        torch.autograd.functional.jacobian(split, x, strategy="forward-mode", vectorize=True)


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


@pytest.mark.parametrize("way", VALUES)
def test_values_are_not_taken_past_torch(way: str, serve: Callable) -> None:
    model = nn.Sequential(nn.Linear(6, 4)).requires_grad_(False)
    kept, read = (symbiosis.wrap(copy.deepcopy(model), serve(model, allow_read=may).endpoint) for may in (False, True))
    with pytest.raises(WeightRead, match=r"remote weight '0'.*test_features.py.*--allow-read"):
        VALUES[way](kept[0].weight)
    assert np.array_equal(VALUES[way](read[0].weight), model[0].weight.numpy())


def test_a_weight_is_saved_when_it_is_no_longer_remote(serve: Callable, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4)).requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, allow_read=True).endpoint)
    with pytest.raises(WeightRead, match=r"'0' has no memory here .*unwrap\(model\)"):
        save_file({"weight": split[0].weight}, tmp_path / "x.safetensors")
    save_file(symbiosis.unwrap(split).state_dict(), tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["0.weight"], model[0].weight)


def test_forked_process_joins_anew(
    split: nn.Module, ids: Tensor, llama: nn.Module, serve: Callable, tmp_path: Path
) -> None:
    executor = serve(llama, listen=[f"local://{tmp_path}/x.sock"])
    model = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint)
    expected = logits(model, ids)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(logits(model, ids), expected) else 1)
    torch.set_num_threads(threads)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(logits(model, ids), expected)


def test_forked_process_cannot_use_an_executor_of_its_parent(llama: nn.Module, ids: Tensor) -> None:
    """The thread that answers is the parent's: the child is told so at once, and the parent goes on."""
    with symbiosis.Executor(copy.deepcopy(llama)) as executor:
        model = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint)
        expected = logits(model, ids)
        child = os.fork()
        if child == 0:
            begun = time.monotonic()
            try:
                logits(model, ids)
            except ExecutorUnavailable as error:
                os._exit(0 if "in this process" in str(error) and time.monotonic() - begun < 5 else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(logits(model, ids), expected)


def test_a_model_is_shared_with_processes(split: nn.Module, ids: Tensor) -> None:
    """What others reach by themselves is left as it is; the client's own parameters move to shared memory."""
    expected = logits(split, ids)
    assert split.share_memory() is split
    own = [p for p in split.parameters() if not isinstance(p, RemoteWeight)]
    assert own and all(p.is_shared() for p in own)
    assert torch.equal(logits(split, ids), expected)


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


def test_stats_count_this_clients_calls(split: nn.Module, ids: Tensor) -> None:
    before = symbiosis.stats(split).calls
    logits(split, ids)
    stats = symbiosis.stats(split)
    assert stats.calls - before == 14 and stats.rows >= 14 * ids.numel() and stats.mean_batch == 1.0
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
