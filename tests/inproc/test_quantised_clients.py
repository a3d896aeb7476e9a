"""What clients do with packed weights: they map them, test answers by them and hide rows; and what they are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

import symbiosis
from symbiosis.cli.pad_files import make
from symbiosis.errors import CallError, ConfigError, WrapError
from symbiosis.executor.daemon import memory_plan
from symbiosis.executor.model.checkpoint import weight_files, weights_nbytes
from symbiosis.executor.model.load import load_model
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.kernels.packing import FORMATS
from symbiosis.server.launch.footprint import HOST, of_executor
from tests.conftest import tiny_llama, tiny_mixtral
from tests.inproc.test_quantised import IDS, same, whole_of
from tests.quantised import write, write_mxfp4


def folder_of(model: Any, tmp_path: Path) -> str:
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_packed_weights_are_mapped(format: str, tmp_path: Path) -> None:
    """A client makes them whole itself, also when the executor is gone."""
    url = f"local://{tmp_path}/executor.sock"
    with symbiosis.Executor(folder_of(tiny_mixtral(), tmp_path), quantize=format, listen=(url,)) as executor:
        split = symbiosis.from_executor(url)
        unsplit = whole_of(tiny_mixtral(), executor)
        same(split, unsplit)
        stats = symbiosis.stats(split)
        assert stats.direct > 0 and stats.calls == 0
        store = executor.server.store
        for name, parameter in split.named_parameters():  # reads need no permission, as with other mapped weights
            if hasattr(parameter, "value"):
                assert torch.equal(parameter.value(), unsplit.get_parameter(name)), name
        called = symbiosis.from_executor(url, share=False)
        same(called, unsplit)
        assert symbiosis.stats(called).direct == 0
        assert all(part.data_ptr() % 64 == 0 for packed in store.packed.values() for part in packed.parts.values())
    same(split, unsplit)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_answers_are_proved_by_weights_that_the_client_has_packed(format: str, tmp_path: Path) -> None:
    with symbiosis.Executor(folder_of(tiny_llama(), tmp_path), quantize=format, allow_read=True) as executor:
        split = symbiosis.wrap(tiny_llama(), executor.endpoint, verify=True)
        unsplit = whole_of(tiny_llama(), executor)
        same(split, unsplit)
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(split.get_parameter(name).value(), unsplit.get_parameter(name))  # type: ignore[attr-defined]
        store = executor.server.store
        for number, packed in store.packed.items():
            store.packed[number] = packed.with_parts(lambda part: part if part.shape[-1] > 1 else part * 1.5)
        with pytest.raises(CallError, match="answered FORWARD of .* wrongly"):
            logits(split)


def test_rows_are_hidden_from_who_holds_packed_weights(tmp_path: Path) -> None:
    model = folder_of(tiny_llama(), tmp_path)
    words: dict[str, Any] = {"quantize": "int8", "integers": (8,)}
    with (
        symbiosis.Executor(model, operator="one", **words) as one,
        symbiosis.Executor(model, operator="two", **words) as two,
    ):
        unsplit = whole_of(tiny_llama(), one)
        noisy = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Noise(scale=4.0))
        assert torch.allclose(logits(noisy), logits(unsplit), atol=1e-4)
        halves = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(two.endpoint), verify=True)
        with (
            symbiosis.Executor(unsplit, operator="three", integers=(8,)) as three,
            symbiosis.Executor(unsplit, operator="four", integers=(8,)) as four,
        ):
            others = symbiosis.wrap(whole_of(tiny_llama(), one), three.endpoint, privacy=symbiosis.Split(four.endpoint))  # type: ignore[type-var]
            assert torch.equal(logits(halves), logits(others))


def test_what_a_client_cannot_know_is_refused(tmp_path: Path) -> None:
    model = folder_of(tiny_llama(), tmp_path)
    with (
        symbiosis.Executor(model, quantize="nf4") as executor,
        pytest.raises(WrapError, match="do not know all that the executor multiplies by.*packed as nf4"),
    ):
        symbiosis.wrap(tiny_llama(), executor.endpoint, verify=True)
    make(model, 8, tmp_path / "pads")
    with (
        symbiosis.Executor(model, quantize="int8", integers=(8,)) as executor,
        pytest.raises(WrapError, match="pads are made from whole weights"),
    ):
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(tmp_path / "pads"))
    write(tiny_llama(), tmp_path / "packed", "int8 rows")
    with pytest.raises(ConfigError, match="quantised by compressed-tensors"):
        make(str(tmp_path / "packed"), 8, tmp_path / "others")


def test_whole_weights_are_not_those_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    write(tiny_llama(), tmp_path / "packed", "int8 rows")
    with (
        symbiosis.Executor(str(tmp_path / "packed")) as executor,
        pytest.raises(WrapError, match="holds them as int8: symbiosis.from_executor builds a model of them"),
    ):
        symbiosis.wrap(tiny_llama(), executor.endpoint)


def test_rows_of_another_dtype_are_not_proved(tmp_path: Path) -> None:
    """Packed weights are rounded to the dtype of the rows, and those were learned in one."""
    with symbiosis.Executor(folder_of(tiny_llama().bfloat16(), tmp_path), quantize="int8") as executor:
        split = symbiosis.wrap(tiny_llama().bfloat16(), executor.endpoint, verify=True)
        with pytest.raises(CallError, match="keep the model in bfloat16"):
            logits(split.float())


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.6 takes the folder `kernels` of a checkout, from which tests run, for the package of that name
    monkeypatch.setattr("transformers.quantizers.quantizer_mxfp4.is_kernels_available", lambda *_: False)
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=100, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    write_mxfp4(GptOssForCausalLM(config).bfloat16(), tmp_path)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).requires_grad_(False)
    with symbiosis.Executor(str(tmp_path)) as executor:
        assert {layer.packed for layer in executor.server.store.served() if "experts" in layer.name} == {"mxfp4"}
        unsplit = whole_of(load_model(str(tmp_path)), executor)
        for name, value in unsplit.named_parameters():
            assert torch.equal(value, theirs.get_parameter(name)), name
        same(symbiosis.from_executor(executor.endpoint), unsplit)


@pytest.mark.parametrize("format", [*FORMATS, None])
def test_what_is_told_of_packed_weights(format: str | None, tmp_path: Path) -> None:
    """Their bytes in the memory plan, in metrics and before they are loaded; and a fingerprint for each way to hold a model."""
    folder = folder_of(tiny_llama(hidden=256, inner=512), tmp_path)
    store = Store(load_model(folder, quantize=format))
    options = Options(model=folder, quantize=format)
    wanted = weights_nbytes(weight_files(Path(folder)), quantize=format)
    assert store.nbytes <= wanted <= 1.1 * store.nbytes
    assert of_executor(options)[HOST, "weights"] == wanted
    assert memory_plan(store, options)["weights_mib"] == store.nbytes >> 20
    prints = {how: Store(load_model(folder, quantize=how)).fingerprint for how in (*FORMATS, None)}
    assert len(set(prints.values())) == 4 and prints[format] == store.fingerprint
    store.share_weights()
    assert sum(part.nbytes for part in store.held) == store.nbytes
