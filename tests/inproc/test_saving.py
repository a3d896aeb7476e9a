"""Copies of a wrapped model, its state dict, and its weights given back."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.client.layers.virt_layer import VirtLinear
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import Code, WeightRead, WeightWrite, WrapError
from tests.wrapped import adapted, assert_same, logits, step


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


@pytest.mark.called
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


@pytest.mark.called
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


@pytest.mark.called
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


def test_unwrap_says_where_nothing_is_wrapped(llama: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    assert symbiosis.unwrap(llama) is llama and "nothing in this LlamaForCausalLM is wrapped" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())


@pytest.mark.called
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


def test_a_weight_is_saved_when_it_is_no_longer_remote(serve: Callable, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4)).requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, allow_read=True).endpoint)
    with pytest.raises(WeightRead, match=r"'0' has no memory here .*unwrap\(model\)"):
        save_file({"weight": split[0].weight}, tmp_path / "x.safetensors")
    save_file(symbiosis.unwrap(split).state_dict(), tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["0.weight"], model[0].weight)


def test_a_model_is_shared_with_processes(split: nn.Module, ids: Tensor) -> None:
    """What others reach by themselves is left as it is; the client's own parameters move to shared memory."""
    expected = logits(split, ids)
    assert split.share_memory() is split
    own = [p for p in split.parameters() if not isinstance(p, RemoteWeight)]
    assert own and all(p.is_shared() for p in own)
    assert torch.equal(logits(split, ids), expected)
