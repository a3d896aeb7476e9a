"""Which layers are wrapped, and what is said of the others."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import symbiosis
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import Code, WrapError
from symbiosis.transport.patience import AWAY
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral
from tests.wrapped import adapted, assert_same, logits, step


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
    """What was warned of. That their executors are gone is said by sessions of earlier tests; here none is."""

    def warned() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING" and each.msg != AWAY]

    return warned


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
