"""Casts of weights that the executor holds: whatever comes after whatever, the numbers are the unsplit model's, or an error says why not."""

import copy
import io
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import symbiosis
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import RemoteWeightError, WeightRead
from tests.conftest import tiny_llama, tiny_mixtral
from tests.wrapped import logits

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
EXACT = [(HALF,), (DOUBLE, SINGLE), (DOUBLE, HALF), (DOUBLE, SINGLE, BRAIN), (HALF, HALF)]
LOSSY = [(HALF, SINGLE), (BRAIN, SINGLE), (HALF, BRAIN), (BRAIN, DOUBLE), (HALF, SINGLE, HALF, DOUBLE)]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 16), "conv1d": lambda: Conv1D(16, 16),
    "embedding": lambda: nn.Embedding(16, 16)
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {"llama": tiny_llama, "experts": tiny_mixtral}


def cast(model: nn.Module, chain: tuple[torch.dtype, ...]) -> nn.Module:
    return reduce(lambda cast, dtype: cast.to(dtype), chain, model)


def set_data(model: nn.Module, chain: tuple[torch.dtype, ...]) -> nn.Module:
    for dtype in chain:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def one_layer(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[kind]()).requires_grad_(False)
    model[0].weight.data = torch.randn(16, 16)
    return model


def given(kind: str, dtype: torch.dtype) -> Tensor:
    return torch.arange(16) if kind == "embedding" else torch.randn(3, 16, generator=torch.manual_seed(1)).to(dtype)


@pytest.fixture(params=["mapped", "called"])
def how(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if request.param == "called":
        return {"share_weights": False}
    return {"share_weights": True, "listen": [f"local://{tmp_path_factory.mktemp('executor')}/executor.sock"]}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("by", [cast, set_data])
@pytest.mark.parametrize("chain", EXACT + LOSSY)
def test_chains_of_casts(kind: str, by: Callable, chain: tuple, how: dict[str, Any], serve: Callable) -> None:
    unsplit = one_layer(kind)
    split = symbiosis.wrap(copy.deepcopy(unsplit), serve(unsplit, serve=["*"], **how, allow_read=True).endpoint)
    by(split, chain), by(unsplit, chain)
    assert split[0].weight.dtype is unsplit[0].weight.dtype
    x = given(kind, chain[-1])
    assert torch.equal(split(x), unsplit(x))
    assert torch.equal(copy.deepcopy(split)(x), unsplit(x))
    assert torch.equal(symbiosis.unwrap(split)(x), unsplit(x))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("by", [cast, set_data])
@pytest.mark.parametrize("chain", EXACT + LOSSY)
def test_chains_without_reads(kind: str, by: Callable, chain: tuple, serve: Callable) -> None:
    unsplit = one_layer(kind)
    split = symbiosis.wrap(copy.deepcopy(unsplit), serve(unsplit, serve=["*"], share_weights=False).endpoint)
    if chain in LOSSY:
        with pytest.raises(WeightRead, match=f"a cast to {chain[1]} of what was rounded to {chain[0]}"):
            by(split, chain)
        return
    by(split, chain), by(unsplit, chain)
    x = given(kind, chain[-1])
    assert torch.equal(split(x), unsplit(x))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chain", [(HALF, SINGLE), (BRAIN, SINGLE), (SINGLE, BRAIN, SINGLE)])
def test_models_cast_to_and_fro(kind: str, chain: tuple, how: dict[str, Any], serve: Callable, ids: Tensor) -> None:
    unsplit = MODELS[kind]()
    executor = serve(unsplit, serve=["*"], **how, allow_read=True)
    split = cast(symbiosis.wrap(copy.deepcopy(unsplit), executor.endpoint), chain)
    cast(unsplit, chain)
    assert torch.equal(logits(split, ids), logits(unsplit, ids))
    state = split.state_dict()
    assert not [name for name, value in unsplit.state_dict().items() if not torch.equal(state[name], value)]
    own, alike = split.get_input_embeddings().weight, split.get_output_embeddings().weight
    assert (own is alike) is (unsplit.get_input_embeddings().weight is unsplit.get_output_embeddings().weight)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t().half().float(),
    "rows": lambda w: w.bfloat16()[2:5].float().t(),
    "column": lambda w: w.half()[:, 3:4].bfloat16(),
    "type": lambda w: w.type(HALF).type(SINGLE),
    "clone": lambda w: w.half().clone().float(),
    "sum": lambda w: w.half() + torch.ones(16, 16),
    "sum of sums": lambda w: (w.half() + torch.ones(16, 16).half()).float() + torch.ones(16, 16),
    "integers": lambda w: w.to(torch.int32).float(),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("inference", [False, True])
def test_views_that_are_cast(name: str, inference: bool, how: dict[str, Any], serve: Callable) -> None:
    unsplit = one_layer("linear")
    split = symbiosis.wrap(copy.deepcopy(unsplit), serve(unsplit, serve=["*"], **how, allow_read=True).endpoint)
    denied = symbiosis.wrap(copy.deepcopy(unsplit), serve(unsplit, serve=["*"], share_weights=False).endpoint)
    with torch.inference_mode(inference):
        got, expected = VIEWS[name](split[0].weight), VIEWS[name](unsplit[0].weight)
        x = torch.randn(2, len(expected)).to(expected.dtype)
        assert torch.equal(x @ got, x @ expected) and got.dtype is expected.dtype
        with pytest.raises(WeightRead):
            VIEWS[name](denied[0].weight)


def test_autocast_to_another_half(serve: Callable) -> None:
    unsplit = one_layer("linear")
    split = symbiosis.wrap(copy.deepcopy(unsplit), serve(unsplit, serve=["*"], share_weights=False).endpoint)
    split.bfloat16()
    with torch.autocast("cpu", HALF), pytest.raises(RemoteWeightError, match="rounded to torch.bfloat16"):
        split(torch.randn(2, 16))


def test_data_that_is_put_back(serve: Callable) -> None:
    """The digits are there again, in the unsplit model, too."""
    unsplit = one_layer("linear")
    split = symbiosis.wrap(copy.deepcopy(unsplit), serve(unsplit).endpoint)
    for model in (split, unsplit):
        before = model[0].weight.data
        model[0].weight.data = before.half()
        model[0].weight.data = before
    x = given("linear", SINGLE)
    assert torch.equal(split(x), unsplit(x)) and isinstance(split[0].weight, RemoteWeight)


def test_private_copies_take_the_dtype_of_what_they_are_given(serve: Callable) -> None:
    unsplit = one_layer("linear")
    split = symbiosis.wrap(copy.deepcopy(unsplit), serve(unsplit, serve=["*"], allow_read=True).endpoint)
    for model in (split, unsplit):
        model[0].weight.data.add_(1)
        set_data(model, (HALF,))
        model[0].weight.data = torch.eye(16, dtype=BRAIN) / 3
        model[0].bias.data = model[0].bias.data.bfloat16()
    x = given("linear", BRAIN)
    assert split[0].weight.dtype is BRAIN and torch.equal(split(x), unsplit(x))


@pytest.mark.parametrize("dtype", [BRAIN, DOUBLE])
def test_state_dicts_of_cast_models(dtype: torch.dtype, serve: Callable) -> None:
    unsplit = one_layer("linear")
    executor = serve(copy.deepcopy(unsplit), allow_read=True)
    split = symbiosis.wrap(copy.deepcopy(unsplit), executor.endpoint).to(dtype)
    unsplit.to(dtype)
    saved = io.BytesIO()
    finer = {name: value.double() * (1 + 2**-40) for name, value in unsplit.state_dict().items()}
    torch.save(finer, saved)
    for model in (split, unsplit):
        model.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
    x = given("linear", dtype)
    assert torch.equal(split(x), unsplit(x))
