"""Checkpoints of strangers: none runs code, and what is wrong with one is said in a line."""

import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations import hub_kernels

from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import check_whole, weights_nbytes
from symbiosis.executor.model.load import DEMO_MODEL, load_config, load_model

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("adapters")))


def configure(checkpoint: Path, **values: Any) -> str:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return str(checkpoint)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize(
    "value", ["someone/kernel", "paged|someone/kernel", "flash_attention_2", 5, {"": "someone/kernel"}]
)
def test_a_checkpoint_names_no_kernel(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    """Transformers would fetch the repository, and run what is in it."""
    for name in [name for name in vars(hub_kernels) if name.startswith("load_and_register")]:
        monkeypatch.setattr(hub_kernels, name, lambda *_, **__: pytest.fail("a kernel is loaded"))
    model = load_model(configure(checkpoint, **{field: value}))
    assert model.config._attn_implementation == load_model("demo").config._attn_implementation


def test_a_part_of_a_model_names_no_kernel(checkpoint: Path) -> None:
    told = {"model_type": "llava", "text_config": {"model_type": "llama", "_attn_implementation": "someone/kernel"}}
    config = load_config(configure(checkpoint, **told))
    assert config._attn_implementation is None and config.text_config._attn_implementation is None


@pytest.mark.parametrize("wrong", [{"model_type": "zzz"}, {"model_type": "llama"}])
def test_code_in_a_checkpoint_is_not_run(checkpoint: Path, wrong: dict[str, Any]) -> None:
    ran = checkpoint / "ran"
    (checkpoint / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\n")
    name = configure(checkpoint, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}, **wrong)
    if wrong["model_type"] == "zzz":
        with pytest.raises(ConfigError, match="zzz|custom code"):
            load_model(name)
    else:
        load_model(name)
    assert not ran.exists()


WRONG = {
    "no list of classes": {"architectures": 5, "model_type": "timm_wrapper"},
    "a size that is a word": {"hidden_size": "x"},
    "sizes that do not fit": {"hidden_size": 10**12},
    "a size that the weights do not have": {"vocab_size": 300},
    "a dtype that is none": {"dtype": "os.system"},
    "layers without end": {"num_hidden_layers": 10**9},
    "fewer layers than none": {"num_hidden_layers": -1},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_built_is_the_checkpoints_fault(checkpoint: Path, what: str) -> None:
    with pytest.raises(ConfigError):
        load_model(configure(checkpoint, **WRONG[what]))


@pytest.mark.parametrize("elsewhere", [(), ("model.layers.0.mlp.up_proj.weight",)])
def test_what_a_checkpoint_lacks_is_not_drawn_at_random(checkpoint: Path, elsewhere: tuple[str, ...]) -> None:
    name = configure(checkpoint, num_hidden_layers=load_config("demo").num_hidden_layers + 1)
    with pytest.raises(ConfigError, match="lacks 9 of the model's tensors"):
        load_model(name, elsewhere=elsewhere)


def test_a_head_that_clients_train_may_be_new(checkpoint: Path) -> None:
    model = load_model(configure(checkpoint, architectures=["LlamaForSequenceClassification"]))
    assert type(model).__name__ == "LlamaForSequenceClassification"


@pytest.mark.parametrize("text", ["null", "[]", "[" * 100_000])
def test_a_configuration_that_is_none(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        load_config(str(checkpoint))


def test_names_of_classes_are_those_of_models(checkpoint: Path) -> None:
    name = configure(checkpoint, architectures=["utils", "TrainingArguments"])
    assert type(load_model(name)).__name__ == "LlamaForCausalLM"


def test_a_class_that_is_a_number_is_refused_or_passed_over(checkpoint: Path) -> None:
    """The former by the oldest transformers."""
    name = configure(checkpoint, architectures=["utils", "TrainingArguments", 5])
    try:
        assert type(load_model(name)).__name__ == "LlamaForCausalLM"
    except ConfigError as error:
        assert "'architectures'" in str(error)  # noqa: PT017


HEADERS: dict[str, Any] = {
    "a dtype that is a number": {"a": {**ENTRY, "dtype": 5}},
    "a shape that is a word": {"a": {**ENTRY, "shape": "xx"}},
    "a shape of words": {"a": {**ENTRY, "shape": ["x"]}},
    "a shape below nothing": {"a": {**ENTRY, "shape": [-2, 1]}},
    "a shape without end": {"a": {**ENTRY, "shape": [10**400]}},
    "no offsets": {"a": {**ENTRY, "data_offsets": 5}},
    "one offset": {"a": {**ENTRY, "data_offsets": [0]}},
    "an offset that is a word": {"a": {**ENTRY, "data_offsets": [0, "x"]}},
    "more than there is": {"a": {**ENTRY, "data_offsets": [0, 1 << 60]}},
    "a list": [1],
}


@pytest.mark.parametrize("what", [*HEADERS, "nested"])
def test_a_header_that_lies_is_a_damaged_file(tmp_path: Path, what: str) -> None:
    header = b"[" * 200_000 if what == "nested" else json.dumps(HEADERS[what]).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"12345678")
    with pytest.raises(ConfigError, match="damaged or cut short"):
        check_whole(file)
        weights_nbytes([file], 16, (8,))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is not a file"):
        check_whole(tmp_path / "model.safetensors")


@pytest.mark.parametrize("sides", [[1 << 62] * 50_000, [1 << 62, 1 << 62], [0, *[1 << 62] * 50_000]])
def test_sides_of_a_tensor_are_counted_before_they_are_multiplied(tmp_path: Path, sides: list[int]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": sides, "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    began = time.process_time()
    with pytest.raises(ConfigError, match="damaged"):
        weights_nbytes([file])
    assert time.process_time() - began < 1
