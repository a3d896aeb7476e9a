"""What moves, replaces, rewrites or writes down a model's layers, on a wrapped one: as unsplit to the bit, or refused with the reason."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import dora
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig, prepare, quantize_dynamic
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import fusion, prune
from torch.utils.flop_counter import FlopCounterMode

import symbiosis
from symbiosis.errors import RemoteWeightError, WeightRead
from tests.conftest import MODELS, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.long

QUERY = "model.layers.0.self_attn.q_proj"


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture
def denied(llama: nn.Module, serve: Callable) -> nn.Module:
    return symbiosis.wrap(copy.deepcopy(llama), serve(llama, share_weights=False).endpoint)


@pytest.fixture
def allowed(llama: nn.Module, serve: Callable) -> nn.Module:
    return symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=True).endpoint)


# ---------------------------------------------------------------- what moves weights

MOVES: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, _: accelerate.cpu_offload(model, torch.device("cpu")),
    "disk_offload": lambda model, path: accelerate.disk_offload(model, str(path), torch.device("cpu")),
}


@pytest.mark.parametrize("move", MOVES)
def test_offloading(
    move: str, llama: nn.Module, denied: nn.Module, allowed: nn.Module, ids: Tensor, tmp_path: Path
) -> None:
    with pytest.raises(RemoteWeightError, match=f"{QUERY}' cannot be offloaded .* --allow-read"):
        MOVES[move](denied, tmp_path / "denied")
    assert torch.equal(logits(MOVES[move](allowed, tmp_path / "allowed"), ids), logits(llama, ids))


@pytest.mark.parametrize("build", [tiny_llama, lambda: tiny_llama(tied=True)])
def test_dispatching_takes_no_weight_for_another(build: Callable, serve: Callable, ids: Tensor) -> None:
    """Tied weights are told by their addresses."""
    base = build()
    split = symbiosis.wrap(copy.deepcopy(base), serve(base, serve=["*"]).endpoint)
    addresses = {p.data_ptr() for p in split.parameters()}
    assert len(addresses) == len(list(split.parameters()))
    places = {name: "cpu" for name, _ in split.named_children()}
    split = accelerate.dispatch_model(split, places, main_device="cpu", force_hooks=True)
    assert torch.equal(logits(split, ids), logits(base, ids))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("original", [False, True])
def test_fsdp(
    original: bool, group: None, llama: nn.Module, denied: nn.Module, allowed: nn.Module, ids: Tensor
) -> None:
    def shard(model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)

    with pytest.raises(WeightRead, match=QUERY):
        shard(denied)
    assert torch.equal(logits(shard(allowed), ids), logits(llama, ids))


def test_rows_on_meta_are_not_sent(denied: nn.Module, llama: nn.Module, ids: Tensor) -> None:
    x = torch.empty(2, 5, 64, device="meta")
    layer, plain = (model.get_submodule(QUERY) for model in (denied, llama))
    calls = symbiosis.stats(denied).calls
    for result in (
        layer(x),
        x @ layer.weight.t(),
        x[0] @ layer.weight,
        layer.weight @ x[0].t(),
        x @ layer.weight[:3].t(),
    ):
        assert result.is_meta
    assert layer(x).shape == plain(x).shape and (layer.weight @ x[0].t()).shape == (64, 5)
    assert (x @ layer.weight[:3].t()).shape == (2, 5, 3)
    y = denied.to("meta")(ids.to("meta")).logits
    assert y.is_meta and y.shape == (2, 9, 100)
    assert symbiosis.stats(denied).calls == calls


@pytest.mark.parametrize("reads", [False, True])
def test_dora_is_made_on_meta(reads: bool, llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    if not reads:
        pytest.importorskip("peft", minversion="0.19", reason="DoRA of PEFT 0.18 reads the weights")
    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=reads).endpoint)
    plain, split = get_peft_model(llama, config), get_peft_model(split, config, low_cpu_mem_usage=True)
    set_peft_model_state_dict(split, get_peft_model_state_dict(plain), low_cpu_mem_usage=True)
    torch.testing.assert_close(logits(split, ids), logits(plain, ids), atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(hasattr(dora, "cache_decorator"), reason="needs a PEFT older than 0.19")
def test_dora_of_an_old_peft_says_what_it_needs(llama: nn.Module, serve: Callable) -> None:
    split = symbiosis.wrap(llama, serve(llama).endpoint)
    with pytest.raises(WeightRead, match=r"needs peft 0\.19 or later; with 0\.18.*--allow-read"):
        get_peft_model(split, LoraConfig(target_modules=["q_proj"], use_dora=True))


# ---------------------------------------------------------------- what replaces layers


class Mine(nn.Linear):
    """A layer that somebody puts in the place of each `nn.Linear`."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)


def copying(layer: nn.Linear) -> nn.Module:
    mine = Mine(layer)
    mine.weight.data.copy_(layer.weight)
    return mine


def keeping(layer: nn.Linear) -> nn.Module:
    mine = Mine(layer)
    mine.weight = layer.weight
    return mine


def normalised(layer: nn.Linear) -> nn.Module:
    return fusion.fuse_linear_bn_eval(layer, nn.BatchNorm1d(layer.out_features).eval())


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.3)


def initialised(init: Callable[..., Any]) -> Callable[[nn.Linear], nn.Module]:
    def again(layer: nn.Linear) -> nn.Module:
        torch.manual_seed(0)
        init(layer.weight)
        return layer

    return again


def quantised_by_hand(layer: nn.Linear) -> nn.Module:
    mine = Mine(layer)
    scale = layer.weight.abs().amax() / 127
    mine.weight.data = (layer.weight / scale).round().clamp(-128, 127).to(torch.int8).float() * scale
    return mine


READING: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "copy_": copying, "fuse_linear_bn_eval": normalised, "prune": pruned, "quantised by hand": quantised_by_hand,
    "weight_norm": nn.utils.parametrizations.weight_norm, "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "normal_": initialised(nn.init.normal_), "kaiming_uniform_": initialised(nn.init.kaiming_uniform_), "eye_": initialised(nn.init.eye_),
    "orthogonal_": initialised(nn.init.orthogonal_), "trunc_normal_": initialised(nn.init.trunc_normal_), "zeros_": initialised(nn.init.zeros_),
}  # fmt: skip


@pytest.mark.parametrize("tool", READING)
def test_layers_that_are_rewritten(
    tool: str, llama: nn.Module, denied: nn.Module, allowed: nn.Module, ids: Tensor
) -> None:
    before = logits(llama, ids)
    with pytest.raises(RemoteWeightError, match=rf"{QUERY}.*test_outside_tools\.py"):
        READING[tool](denied.get_submodule(QUERY))
        denied(ids)
    for model in (llama, allowed):
        torch.manual_seed(0)
        layer = READING[tool](model.get_submodule(QUERY))
        model.set_submodule(QUERY, layer)
    after = logits(llama, ids)
    assert torch.equal(logits(allowed, ids), after)
    assert torch.equal(after, before) == (tool == "copy_")


def test_layers_that_keep_the_weight(llama: nn.Module, denied: nn.Module, ids: Tensor) -> None:
    denied.set_submodule(QUERY, keeping(denied.get_submodule(QUERY)))
    assert torch.equal(logits(denied, ids), logits(llama, ids))


def prepared(model: nn.Module) -> nn.Module:
    model.qconfig = get_default_qconfig("x86")
    return prepare(model)


QUANTISATION: dict[str, Callable[[nn.Module], object]] = {
    "dynamic": lambda model: quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8),
    "default": lambda model: quantize_dynamic(model),
    "in place": lambda model: quantize_dynamic(model, inplace=True),
    "float16": lambda model: quantize_dynamic(model, {nn.Linear}, dtype=torch.float16),
    "prepare": prepared,
    "by hand": lambda model: setattr(model.get_submodule(QUERY), "qconfig", get_default_qconfig("x86")),
}


@pytest.mark.parametrize("way", QUANTISATION)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_quantisation_does_not_pass_by(way: str, reads: bool, llama: nn.Module, serve: Callable, ids: Tensor) -> None:
    split = symbiosis.wrap(copy.deepcopy(llama), serve(llama, allow_read=reads).endpoint)
    with pytest.raises(RemoteWeightError, match=f"cannot quantise the layer '{QUERY}'"):
        QUANTISATION[way](split)
    assert torch.equal(logits(split, ids), logits(llama, ids))
    split.lm_head, llama.lm_head = (quantize_dynamic(nn.Sequential(m.lm_head), {nn.Linear}) for m in (split, llama))
    assert torch.equal(logits(split, ids), logits(llama, ids))  # what stays here can be quantised by itself


# ---------------------------------------------------------------- what writes down


def test_symbolic_tracing_is_refused(denied: nn.Module) -> None:
    with pytest.raises(RemoteWeightError, match=rf"{QUERY}: torch\.fx\.symbolic_trace .* before wrap"):
        torch.fx.symbolic_trace(nn.Sequential(denied.get_submodule(QUERY), nn.ReLU()))


@pytest.mark.filterwarnings("ignore")
def test_scripted_layers_call_the_executor(denied: nn.Module, llama: nn.Module) -> None:
    x = torch.randn(3, 64)
    scripted = torch.jit.script(nn.Sequential(denied.get_submodule(QUERY), nn.ReLU()))
    assert torch.equal(scripted(x), llama.get_submodule(QUERY)(x).relu())


@pytest.mark.full
def test_compiled_experts(serve: Callable) -> None:
    base = tiny_mixtral()
    splits = [symbiosis.wrap(copy.deepcopy(base), serve(base, allow_read=reads).endpoint) for reads in (False, True)]
    results = []
    for model in (base.requires_grad_(False), *splits):
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(1, 9, 64, requires_grad=True)
        y = torch.compile(model.model.layers[0].mlp, backend="aot_eager")(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for result in results[1:]:
        assert torch.equal(results[0][0], result[0]) and torch.equal(results[0][1], result[1])


@pytest.mark.parametrize("name", MODELS)
def test_exported(name: str, serve: Callable, ids: Tensor) -> None:
    base = MODELS[name]()
    split = symbiosis.wrap(copy.deepcopy(base), serve(base).endpoint)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(split, (ids,), {"use_cache": False}, strict=False)
        assert torch.equal(exported.module()(ids, use_cache=False).logits, base(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_counted_as_unsplit(name: str, serve: Callable, ids: Tensor) -> None:
    """Forward and backward."""
    base = MODELS[name]().requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(base), serve(base).endpoint)
    counts = []
    for model in (base, split):
        model.get_input_embeddings().requires_grad_(True)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
