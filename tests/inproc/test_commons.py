"""What every client holds for itself lies once in the memory of a host, and yet is each client's own."""

import copy
import gc
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import ProtocolError
from symbiosis.executor.model.store import Store
from symbiosis.transport.local import shared_weights
from symbiosis.transport.local.client import LocalConnection
from tests.conftest import tiny_llama


@pytest.fixture
def endpoint(serve: Callable[..., Any], tmp_path: Path) -> str:
    return serve(MODEL, listen=[f"local://{tmp_path}/executor.sock"]).endpoint  # type: ignore[no-any-return]


MODEL = tiny_llama()


def own(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict()  # of a split model: what the client owns


def test_nothing_is_read_and_all_is_there(endpoint: str) -> None:
    model = symbiosis.from_executor(endpoint)
    assert "READ" not in symbiosis.stats(model).by_op
    whole = MODEL.state_dict()
    assert own(model) and all(torch.equal(value, whole[name]) for name, value in own(model).items())
    assert any("symbiosis-commons" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_who_changes_a_tensor_changes_no_other(endpoint: str, ids: Tensor) -> None:
    """Neither another client's, nor the executor's, nor another of its own: those that are equal lie in one place."""
    first, second = symbiosis.from_executor(endpoint), symbiosis.from_executor(endpoint)
    norms = [name for name in own(first) if name.endswith("norm.weight")]
    assert len(norms) > 1 and all(torch.equal(own(first)[name], own(first)[norms[0]]) for name in norms)
    with torch.no_grad():
        first.get_input_embeddings().weight.add_(1)
        first.get_parameter(norms[0]).fill_(7)
    whole = MODEL.state_dict()
    for changed, untouched in ((first, norms[1:]), (second, list(own(second)))):
        assert all(torch.equal(own(changed)[name], whole[name]) for name in untouched)
    third = symbiosis.from_executor(endpoint)
    with torch.no_grad():
        assert torch.equal(third(ids).logits, MODEL(ids).logits)


def test_tied_tensors_stay_tied(serve: Callable[..., Any], tmp_path: Path) -> None:
    config = copy.deepcopy(MODEL.config)
    config.tie_word_embeddings = True
    tied = type(MODEL)(config).eval()
    model = symbiosis.from_executor(serve(tied, listen=[f"local://{tmp_path}/executor.sock"]).endpoint)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    store = Store(tied)
    held = shared_weights.taken(store.manifest, store.commons().fileno())
    at = {store.manifest[number].name: tensor.data_ptr() for number, tensor in held.items()}
    assert at["lm_head"] == at["model.embed_tokens"]


@pytest.mark.parametrize("served", [False, True])
def test_tensors_begin_where_those_of_the_checkpoint_do(served: bool) -> None:
    """A product of one row rounds otherwise at another phase."""
    model = nn.ModuleDict({name: nn.Linear(64, 96) for name in "abc"})
    numbers = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    for place, name in enumerate("abc"):
        begin = 8000 * place + 5 * place + 1
        model[name].weight = nn.Parameter(numbers[begin : begin + 96 * 64].view(96, 64))
        model[name].bias = nn.Parameter(numbers[begin + 7000 : begin + 7096])
    store = Store(model)
    before = [shared_weights.phase(weight) for weight in store.weights]
    assert len(set(before)) == 6, "the phases differ"
    x = torch.randn(1, 64)
    expected = [model[name](x) for name in "abc"]
    store.share_weights() if served else store.commons()
    file = store.files[0] if served else store.commons()
    assert file is not None
    held = shared_weights.taken(store.manifest, file.fileno(), served)
    assert len(held) == (6 if served else 3)
    assert all(shared_weights.phase(held[number]) == before[number] for number in held)
    assert [shared_weights.phase(weight) for weight in store.weights] == before
    named = {store.manifest[number].name: tensor for number, tensor in held.items()}
    if served:
        products = [nn.functional.linear(x, named[name], named[f"{name}.bias"]) for name in "abc"]
        assert all(map(torch.equal, products, expected))


def test_of_shared_weights_no_other_copy_is_left() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    before = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    store = Store(model)
    assert store.nbytes and not any(storage.expired() for storage in before)
    store.share_weights()
    del model
    gc.collect()
    assert all(storage.expired() for storage in before)


@pytest.mark.parametrize("wrong", [64, 255, 2])
def test_phases_that_cannot_be_are_refused(wrong: int) -> None:
    manifest = Store(nn.Sequential(nn.Linear(4, 4))).manifest
    with pytest.raises(ProtocolError, match=f"cannot begin {wrong} bytes after"):
        shared_weights.offsets(manifest, bytes([wrong]))


def test_a_model_saves_and_loads(endpoint: str, tmp_path: Path) -> None:
    """Each tensor has a storage of its own: else safetensors would refuse it, and torch would save the storage of all."""
    model = symbiosis.from_executor(endpoint)
    norm = model.model.norm.weight
    assert norm.untyped_storage().nbytes() == norm.nbytes
    torch.save(norm, tmp_path / "norm.pt")
    assert torch.equal(torch.load(tmp_path / "norm.pt"), norm)


def test_nobody_can_change_the_memory(endpoint: str) -> None:
    session = Session(endpoint)
    file = shared_weights.publish(session.manifest, lambda _: 0, lambda n: torch.zeros(session.manifest[n].shape))
    with pytest.raises(PermissionError):
        file.write(b"mine")
    with pytest.raises(PermissionError):
        mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_SHARED)
    with pytest.raises(PermissionError):
        file.truncate(0)
    session.close()


def test_tensors_that_hold_nothing_or_travel_not_are_left_to_reading() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.5))
            self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    store = Store(Odd())
    held = shared_weights.taken(store.manifest, store.commons().fileno())
    assert {store.manifest[number].name for number in held} == {"scalar", "linear.bias"}
    assert all(torch.equal(value, store.weights[number]) for number, value in held.items())
    nothing = Store(nn.Sequential(nn.Linear(4, 4, bias=False)))
    assert shared_weights.taken(nothing.manifest, nothing.commons().fileno()) == {}


def test_a_connection_that_breaks_meanwhile_is_joined_again(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(connection: LocalConnection, served: bool = False) -> dict[int, Tensor]:
        raise symbiosis.errors.ConnectionLost("broken")

    monkeypatch.setattr(LocalConnection, "commons", broken)
    model = symbiosis.from_executor(endpoint)
    assert symbiosis.stats(model).by_op["READ"] > 1
    assert all(torch.equal(value, MODEL.state_dict()[name]) for name, value in own(model).items())
