"""What `symbiosis run` makes of `from_pretrained`: the model of the unsplit program, to the bit, without the weights that the executor holds."""

import filecmp
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
)

import symbiosis
from symbiosis.client import known_checkpoints
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import NotShared, WrapError
from symbiosis.run import loading
from symbiosis.run.settings import Settings
from tests.conftest import MODELS, tiny_llama
from tests.wrapped import adapted, assert_same, step

Shared = Callable[..., Any]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shared:
    """Calls `from_pretrained` as a program under `symbiosis run` does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def run(auto: Any, path: Any, executor: Any, require: bool = False, **words: Any) -> Any:
        monkeypatch.setenv("SYMBIOSIS_ENDPOINT", getattr(executor, "endpoint", executor))
        settings = Settings(require)

        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            return loading.load(cls, MethodType(original, cls), name, args, kwargs, settings)

        with monkeypatch.context() as patch:
            patch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
            return auto.from_pretrained(path, **words)

    return run


@pytest.fixture
def offer(serve: Callable, tmp_path: Path) -> Callable[[nn.Module], tuple[Path, symbiosis.Executor]]:
    """Saves a model, and serves it to programs that map its weights."""

    def start(model: Any, is_read: bool = False, **options: Any) -> tuple[Path, symbiosis.Executor]:
        """With `is_read`, tensors of the executor begin where those of the checkpoint's file do, as a daemon's."""
        path = tmp_path / "checkpoint"
        model.save_pretrained(path)
        model = str(path) if is_read else model
        return path, serve(model, listen=[f"local://{tmp_path}/executor.sock"], share_weights=True, **options)

    return start


def tiny_qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()


def remote(model: nn.Module) -> int:
    return len({id(weight) for weight in remote_weights(model)})


def assert_loaded_alike(got: Any, expected: Any) -> None:
    """All that a loader sets: each own weight and buffer, whether it is trainable, configurations, and what is tied."""
    assert type(got).__mro__ == type(expected).__mro__ and got.training is expected.training
    assert got.config.to_dict() == expected.config.to_dict()
    assert got.name_or_path == expected.name_or_path and got.dtype == expected.dtype
    for name in (
        "generation_config",
        "hf_device_map",
        "_no_split_modules",
        "_keys_to_ignore_on_save",
        "is_gradient_checkpointing",
    ):
        one, other = getattr(got, name, None), getattr(expected, name, None)
        assert one == other, name
    theirs = dict(expected.named_parameters(remove_duplicate=False))
    for name, parameter in got.named_parameters(remove_duplicate=False):
        assert (parameter.shape, parameter.dtype, parameter.device) == (
            theirs[name].shape,
            theirs[name].dtype,
            theirs[name].device,
        )
        if not isinstance(parameter, symbiosis.client.weights.remote_weight.RemoteWeight):
            assert torch.equal(parameter, theirs[name]) and parameter.requires_grad is theirs[name].requires_grad, name
    for name, buffer in expected.named_buffers():
        assert torch.equal(got.get_buffer(name), buffer), name
    ties = [[(id(p) == id(q)) for _, q in m.named_parameters(remove_duplicate=False)] for m in (got, expected) for _, p in m.named_parameters(remove_duplicate=False)]  # fmt: skip
    assert ties[: len(ties) // 2] == ties[len(ties) // 2 :]


def mapped_as(tensor: Tensor) -> str:
    """The name of what is mapped where a tensor lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return next((name for name in ("symbiosis-commons",) if name in line), line)
    return ""


def outputs(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids)[0]  # type: ignore[no-any-return]


SERVED = {"llama": 14, "gpt2": 8, "mixtral": 12}
TASKS = [
    (AutoModelForCausalLM, {}),
    (AutoModel, {}),
    (AutoModelForSequenceClassification, {"num_labels": 1}),
    (AutoModelForTokenClassification, {"num_labels": 3}),
]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("auto", "words"), TASKS)
def test_a_model_comes_without_base_weights(
    auto: Any, words: dict[str, Any], family: str, offer: Callable, shared: Shared, ids: Tensor
) -> None:
    """By the caller's class, with the state of the random numbers after it, when the checkpoint is new and when it is known."""
    path, executor = offer(MODELS[family]())
    torch.manual_seed(7)
    unsplit, told = auto.from_pretrained(path, output_loading_info=True, **words)
    after = torch.get_rng_state()
    for _ in range(2):
        torch.manual_seed(7)
        split, also_told = shared(auto, path, executor, require=True, output_loading_info=True, **words)
        assert torch.equal(torch.get_rng_state(), after) and also_told == told
        assert remote(split) == SERVED[family]
        assert_loaded_alike(split, unsplit)
        assert torch.equal(outputs(split, ids), outputs(unsplit, ids))


def test_a_model_that_sees_and_reads(offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_qwen2_vl())
    unsplit = AutoModelForImageTextToText.from_pretrained(path)
    split = shared(AutoModelForImageTextToText, path, executor, require=True)
    assert_loaded_alike(split, unsplit)
    assert remote(split) > 20 and torch.equal(outputs(split, ids), outputs(unsplit, ids))


def test_a_known_checkpoint_is_not_read(offer: Callable, shared: Shared, ids: Tensor) -> None:
    """What the executor holds is zero in the file, of the same size and mtime. That is seen; but not where the file's digests are known."""
    path, executor = offer(tiny_llama())
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    expected = outputs(unsplit, ids)
    shared(AutoModelForCausalLM, path, executor)
    [known] = known_checkpoints._folder().iterdir()
    file, name = path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    times = file.stat()
    before = unsplit.get_parameter(name).detach().clone()
    begin = file.read_bytes().index(before.numpy().tobytes())
    with file.open("r+b") as written:
        written.seek(begin)
        written.write(bytes(before.nbytes))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with safe_open(file, "pt") as tensors:
        assert not tensors.get_tensor(name).any()
    with pytest.raises(NotShared, match=r"checkpoint is not shared: .*layers\.0\.mlp\.up_proj differs"):
        shared(AutoModelForCausalLM, path, executor, require=True)
    assert not torch.equal(outputs(shared(AutoModelForCausalLM, path, executor), ids), expected)
    [now] = set(known_checkpoints._folder().iterdir()) - {known}
    shutil.copy(known, now)
    assert torch.equal(outputs(shared(AutoModelForCausalLM, path, executor), ids), expected)


def test_what_is_the_programs_own_lies_once_for_all_programs(offer: Callable, shared: Shared, ids: Tensor) -> None:
    """Embedding, norms and head come from memory that all map, also where the checkpoint is new. Whoever writes to it changes nobody else's."""
    path, executor = offer(tiny_llama(), is_read=True)
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    expected = outputs(unsplit, ids)
    first, second, third = (shared(AutoModelForCausalLM, path, executor, require=True) for _ in range(3))
    for model in (first, second):
        assert mapped_as(model.model.embed_tokens.weight) == mapped_as(model.lm_head.weight) == "symbiosis-commons"
        assert_loaded_alike(model, unsplit)
    with torch.no_grad():
        first.model.embed_tokens.weight.zero_()
        first.model.norm.weight.zero_()
    assert torch.equal(outputs(second, ids), expected) and torch.equal(outputs(third, ids), expected)
    fourth = shared(AutoModelForCausalLM, path, executor, require=True)
    assert torch.equal(outputs(fourth, ids), expected)


def test_equal_tensors_are_not_made_one(offer: Callable, shared: Shared, ids: Tensor) -> None:
    """Norms are all ones, and the executor lends these values once."""
    path, executor = offer(tiny_llama(), is_read=True)
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    for _ in range(2):
        split = shared(AutoModelForCausalLM, path, executor, require=True)
        norms = [module.weight for name, module in split.named_modules() if name.endswith("norm")]
        assert len({norm.data_ptr() for norm in norms}) == len(norms) > 2
        assert_loaded_alike(split, unsplit)
        with torch.no_grad():
            norms[0].zero_()
        assert all(bool(norm.all()) for norm in norms[1:])


def test_a_tensor_that_begins_elsewhere_is_the_programs_own(
    offer: Callable, shared: Shared, ids: Tensor, tmp_path: Path
) -> None:
    """A product of one row may round otherwise there. In this checkpoint of the same weights all begin elsewhere than in the executor's."""
    path, executor = offer(tiny_llama(), is_read=True)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    for file in (path / "config.json", path / "generation_config.json"):
        (tmp_path / "moved").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "moved")
    safetensors.torch.save_file(tensors, tmp_path / "moved" / "model.safetensors", {"format": "pt", "note": "a" * 16})
    for _ in range(2):
        unsplit = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
        split = shared(AutoModelForCausalLM, tmp_path / "moved", executor, require=True)
        assert mapped_as(split.lm_head.weight) != "symbiosis-commons"
        assert split.lm_head.weight.data_ptr() % 64 == unsplit.lm_head.weight.data_ptr() % 64
        assert torch.equal(outputs(split, ids), outputs(unsplit, ids))


def test_a_checkpoint_that_is_written_meanwhile_is_not_known(
    offer: Callable, shared: Shared, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of the new files would be kept for the old ones, which may come back."""
    path, executor = offer(tiny_llama())
    kept: list[str] = []
    monkeypatch.setattr(known_checkpoints, "read", lambda key: (path / "model.safetensors").touch() or [])
    monkeypatch.setattr(known_checkpoints, "write", lambda key, made: kept.append(key))
    shared(AutoModelForCausalLM, path, executor, require=True)
    assert not kept
    monkeypatch.setattr(known_checkpoints, "read", lambda key: [])
    shared(AutoModelForCausalLM, path, executor, require=True)
    assert len(kept) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[[1]]", b'[{"sources": ["lm_head.weight"], "digests": {"no.such": ""}}]']
)
def test_what_is_known_may_be_damaged(content: bytes, offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama(), is_read=True)
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    shared(AutoModelForCausalLM, path, executor, require=True)
    (known,) = (Path(os.environ["XDG_CACHE_HOME"]) / "symbiosis" / "checkpoints").iterdir()
    known.write_bytes(content)
    split = shared(AutoModelForCausalLM, path, executor, require=True)
    assert remote(split) == 14 and torch.equal(outputs(split, ids), outputs(unsplit, ids))


def test_a_checkpoint_in_parts_and_in_a_subfolder(offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama())
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(path / "inner" / "most", max_shard_size="60kB")
    assert len(list(path.rglob("model-*.safetensors"))) > 2
    expected = outputs(AutoModelForCausalLM.from_pretrained(path), ids)
    for _ in range(2):
        split = shared(AutoModelForCausalLM, path / "inner", executor, require=True, subfolder="most")
        assert torch.equal(outputs(split, ids), expected) and remote(split) == 14


def test_a_hub_id_and_a_variant(
    offer: Callable, shared: Shared, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Transformers looks for an adapter on the hub, whatever it was told.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path, executor = offer(tiny_llama())
    snapshot = tmp_path / "hub" / "models--us--tiny" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    unsplit.save_pretrained(snapshot, variant="fp32")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    words = {"cache_dir": tmp_path / "hub", "local_files_only": True, "revision": "main", "variant": "fp32"}
    for _ in range(2):
        split = shared(AutoModelForCausalLM, "us/tiny", executor, require=True, **words)
        assert_loaded_alike(split, AutoModelForCausalLM.from_pretrained("us/tiny", **words))
        assert remote(split) == 14 and torch.equal(outputs(split, ids), outputs(unsplit, ids))


def test_a_checkpoint_of_another_format(offer: Callable, shared: Shared, ids: Tensor) -> None:
    """It is loaded, and what the executor holds is let go of."""
    path, executor = offer(tiny_llama())
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    torch.save(unsplit.state_dict(), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    split = shared(AutoModelForCausalLM, path, executor, require=True)
    assert remote(split) == 14 and torch.equal(outputs(split, ids), outputs(unsplit, ids))
    state, config = unsplit.state_dict(), unsplit.config
    split = shared(type(unsplit), None, executor, require=True, config=config, state_dict=state)
    assert remote(split) == 14 and torch.equal(outputs(split, ids), outputs(unsplit, ids))


def write_gguf(file: Path, quantised: bool) -> None:
    """A tiny Llama, with matrices of blocks or of floats."""
    gguf = pytest.importorskip("gguf")
    numbers, sizes = np.random.default_rng(0), {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}  # fmt: skip
    writer = gguf.GGUFWriter(file, "llama")
    told = {"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "head_count": 4, "head_count_kv": 2, "vocab_size": 100}  # fmt: skip
    for name, number in told.items():
        getattr(writer, f"add_{name}")(number)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(100)])

    def add(name: str, *shape: int) -> None:
        values = numbers.standard_normal(shape, dtype=np.float32) / 8
        if quantised and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)

    add("token_embd", 100, 64)
    add("output", 100, 64)
    add("output_norm", 64)
    for layer in range(2):
        for name, shape in sizes.items():
            add(f"blk.{layer}.{name}", *shape)
        add(f"blk.{layer}.attn_norm", 64)
        add(f"blk.{layer}.ffn_norm", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantised", [False, True])
def test_a_file_of_gguf(quantised: bool, offer: Callable, shared: Shared, ids: Tensor, tmp_path: Path) -> None:
    """The executor holds what transformers makes of it, as floats."""
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf" / "tiny.gguf", quantised)
    words = {"gguf_file": "tiny.gguf", "dtype": torch.float32}
    unsplit = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", **words)
    plain = type(unsplit)(type(unsplit.config).from_dict({k: v for k, v in unsplit.config.to_dict().items() if k != "quantization_config"}))  # fmt: skip
    plain.load_state_dict(unsplit.state_dict())
    _, executor = offer(plain.eval())
    split = shared(AutoModelForCausalLM, tmp_path / "gguf", executor, require=True, **words)
    assert_loaded_alike(split, unsplit)
    assert remote(split) == 14 and torch.equal(outputs(split, ids), outputs(unsplit, ids))


WORDS: list[dict[str, Any]] = [
    {"dtype": "auto"}, {"torch_dtype": torch.float32}, {"dtype": "float32"}, {"device_map": "cpu"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}},
    {"attn_implementation": "eager"}, {"low_cpu_mem_usage": True}, {"trust_remote_code": True}, {"use_safetensors": True, "local_files_only": True},
    {"tie_word_embeddings": True}, {"use_cache": False}, {"token": "none", "revision": "main"},
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_what_a_program_may_ask_for(words: dict[str, Any], offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama())
    unsplit = AutoModelForCausalLM.from_pretrained(path, **words)
    split = shared(AutoModelForCausalLM, path, executor, require=True, **words)
    assert_loaded_alike(split, unsplit)
    assert remote(split) == 14 and torch.equal(outputs(split, ids), outputs(unsplit, ids))
    got = [model.generate(ids[:1], max_new_tokens=5, do_sample=False) for model in (split, unsplit)]
    assert torch.equal(*got)


def test_a_configuration_with_keys_of_its_own(offer: Callable, shared: Shared) -> None:
    path, executor = offer(tiny_llama())
    told = json.loads((path / "config.json").read_text()) | {"my_own_key": {"kept": ["a/b"]}, "use_cache": False}
    (path / "config.json").write_text(json.dumps(told))
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    assert_loaded_alike(shared(AutoModelForCausalLM, path, executor, require=True), unsplit)
    assert unsplit.config.my_own_key == {"kept": ["a/b"]}


def test_a_configuration_that_is_passed(offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama())
    config = AutoModelForCausalLM.from_pretrained(path).config
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    unsplit = AutoModelForCausalLM.from_pretrained(path, config=config)
    split = shared(AutoModelForCausalLM, path, executor, require=True, config=config)
    assert_loaded_alike(split, unsplit)
    assert torch.equal(outputs(split, ids), outputs(unsplit, ids))


def test_another_dtype_is_told_with_the_option(offer: Callable, shared: Shared, ids: Tensor, capfd: Any) -> None:
    path, executor = offer(tiny_llama())
    with pytest.raises(
        NotShared, match=r"holds float32, and this program asks for bfloat16: load it with .*float32.*--dtype bfloat16"
    ):
        shared(AutoModelForCausalLM, path, executor, require=True, dtype=torch.bfloat16)
    alone = shared(AutoModelForCausalLM, path, executor, dtype=torch.bfloat16)
    assert remote(alone) == 0 and "asks for bfloat16" in capfd.readouterr().err
    assert torch.equal(
        outputs(alone, ids), outputs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), ids)
    )


def test_a_checkpoint_in_another_dtype_than_it_is_loaded_in(offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama().bfloat16())
    with symbiosis.Executor(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)) as wide:
        for _ in range(2):
            split = shared(AutoModelForCausalLM, path, wide, require=True, dtype=torch.float32)
            unsplit = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            assert_loaded_alike(split, unsplit)
            assert torch.equal(outputs(split, ids), outputs(unsplit, ids))
    assert remote(shared(AutoModelForCausalLM, path, executor, require=True)) == 14


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: tiny_llama(hidden=32), r"other sizes .*q_proj.*\(32, 32\) is not the executor's \(64, 64\)"),
        (MODELS["gpt2"], "has none of the layers of the LlamaForCausalLM"),
    ],
)
def test_another_model_is_left_alone(
    other: Callable[[], nn.Module], why: str, offer: Callable, shared: Shared, ids: Tensor, tmp_path: Path, capfd: Any
) -> None:
    _, executor = offer(tiny_llama())
    other().save_pretrained(tmp_path / "other")  # type: ignore[operator]
    with pytest.raises(NotShared, match=why):
        shared(AutoModelForCausalLM, tmp_path / "other", executor, require=True)
    alone = shared(AutoModelForCausalLM, tmp_path / "other", executor)
    assert capfd.readouterr().err.count("symbiosis: other is not shared: ") == 1
    assert remote(alone) == 0 and torch.equal(outputs(alone, ids), outputs(other(), ids))


def test_a_model_that_is_the_executors_in_part(offer: Callable, shared: Shared, ids: Tensor, capfd: Any) -> None:
    """What is the same is shared, whatever was trained further stays here, and other weights altogether are another model."""
    path, executor = offer(tiny_llama())
    unsplit = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer in unsplit.model.layers:
            layer.mlp.up_proj.weight.add_(1)
    unsplit.save_pretrained(path)
    split = shared(AutoModelForCausalLM, path, executor)
    assert remote(split) == 12 and torch.equal(outputs(split, ids), outputs(unsplit, ids))
    assert "12 of 15 layers" in capfd.readouterr().err
    with pytest.raises(NotShared, match="up_proj"):
        shared(AutoModelForCausalLM, path, executor, require=True)
    with torch.no_grad():
        for parameter in unsplit.parameters():
            parameter.add_(1)
    unsplit.save_pretrained(path)
    alone = shared(AutoModelForCausalLM, path, executor)
    assert remote(alone) == 0 and torch.equal(outputs(alone, ids), outputs(unsplit, ids))
    assert "another checkpoint or revision" in capfd.readouterr().err


def test_no_executor(
    shared: Shared, llama: nn.Module, tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    nobody = f"inproc://nobody-{tmp_path}"
    with pytest.raises(NotShared, match="nobody"):
        shared(AutoModelForCausalLM, tmp_path / "model", nobody, require=True)
    alone = shared(AutoModelForCausalLM, tmp_path / "model", nobody)
    assert torch.equal(outputs(alone, ids), outputs(llama, ids))


def files_of(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def assert_same_files(got: Path, expected: Path) -> None:
    assert files_of(got) == files_of(expected)
    for name in files_of(got):
        assert filecmp.cmp(got / name, expected / name, shallow=False), name


@pytest.mark.parametrize("family", MODELS)
def test_what_is_saved(family: str, offer: Callable, shared: Shared, ids: Tensor, tmp_path: Path) -> None:
    """A whole model, a trained adapter, and the model that it was merged into: the files of the unsplit program."""
    path, executor = offer(MODELS[family]())
    targets = {"target_modules": ["c_attn"]} if family == "gpt2" else {"target_modules": ["q_proj", "v_proj"]}
    for kind in ("split", "unsplit"):
        torch.manual_seed(3)
        model = (
            shared(AutoModelForCausalLM, path, executor)
            if kind == "split"
            else AutoModelForCausalLM.from_pretrained(path)
        )
        model.save_pretrained(tmp_path / kind / "whole")
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **targets)).train()
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], 1e-2)
        for _ in range(2):
            tuned(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tuned.save_pretrained(tmp_path / kind / "adapter")
        tuned.merge_and_unload().save_pretrained(tmp_path / kind / "merged")
    assert_same_files(tmp_path / "split", tmp_path / "unsplit")


def test_what_is_saved_where_nothing_may_be_read(serve: Callable, shared: Shared, tmp_path: Path, caplog: Any) -> None:
    llama = tiny_llama()
    llama.save_pretrained(tmp_path / "checkpoint")  # type: ignore[operator]
    split = shared(
        AutoModelForCausalLM, tmp_path / "checkpoint", serve(llama, listen=["tcp://127.0.0.1:0"]), require=True
    )
    tuned = adapted(split)
    with pytest.raises(symbiosis.errors.RemoteWeightError, match="--allow-read"):
        tuned.merge_and_unload()
    split.save_pretrained(tmp_path / "saved")
    assert "unwrap(model) first" in caplog.text


def test_two_models_of_a_program_share_a_session(offer: Callable, shared: Shared, ids: Tensor) -> None:
    """A policy and its reference. What either writes to is its own."""
    path, executor = offer(tiny_llama())
    policy, reference = (shared(AutoModelForCausalLM, path, executor) for _ in range(2))
    sessions = {weight.handle.session for model in (policy, reference) for weight in remote_weights(model)}
    assert len(sessions) == 1
    mapped = [next(remote_weights(model)).values_to_read().data_ptr() for model in (policy, reference)]
    assert mapped[0] == mapped[1]
    expected = outputs(reference, ids)
    with torch.no_grad():
        policy.model.embed_tokens.weight.zero_()
        policy.model.layers[0].mlp.up_proj.weight.zero_()
    assert torch.equal(outputs(reference, ids), expected) and not torch.equal(outputs(policy, ids), expected)


def test_training_is_that_of_the_unsplit_program(offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama())
    models = shared(AutoModelForCausalLM, path, executor), AutoModelForCausalLM.from_pretrained(path)
    for model in models:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    assert_same(*(step(adapted(model), ids) for model in models))


def test_training_all_weights_is_refused(offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama())
    model = shared(AutoModelForCausalLM, path, executor).train()
    before = model.model.norm.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(
        WrapError, match=r"trains all weights of its LlamaForCausalLM, and 14 of them .*without symbiosis run"
    ):
        optimizer.step()
    assert torch.equal(model.model.norm.weight, before)


def test_training_a_head_alone_is_not_bothered(offer: Callable, shared: Shared, ids: Tensor) -> None:
    path, executor = offer(tiny_llama())
    after = []
    for load in (lambda *a: shared(*a, executor), lambda auto, path: auto.from_pretrained(path)):
        torch.manual_seed(0)
        model = load(AutoModelForSequenceClassification, path).train()
        model.base_model.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
        optimizer.step()
        after.append(model.score.weight)
    assert torch.equal(*after)


def test_an_adapters_folder_is_loaded_with_its_base(
    offer: Callable, shared: Shared, ids: Tensor, tmp_path: Path
) -> None:
    pytest.importorskip("peft", minversion="0.19", reason="transformers' load_adapter needs it")
    path, executor = offer(tiny_llama())
    adapted(AutoModelForCausalLM.from_pretrained(path)).save_pretrained(tmp_path / "adapter")
    split = shared(AutoModelForCausalLM, tmp_path / "adapter", executor, require=True)
    unsplit = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert remote(split) == 14 and torch.equal(outputs(split, ids), outputs(unsplit, ids))


def test_unsloth_is_refused_by_name(offer: Callable, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded: the checkpoint is not even looked for. Its own package needs a GPU to be imported."""
    _, executor = offer(tiny_llama())
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    model = type(tiny_llama())
    with pytest.raises(NotShared, match="no-such-folder is not shared: Unsloth's kernels read the weights"):
        shared(model, "/no-such-folder", executor, require=True)


@pytest.mark.parametrize(
    ("words", "environment", "why"),
    [
        ({"tp_plan": "auto"}, {}, "tp_plan divides its weights"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "FSDP divides the weights.*DDP"),
        ({}, {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}, "FSDP divides the weights.*DDP"),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, {}, "device_map spreads it over cpu, disk"),
    ],
    ids=str,
)
def test_what_cannot_share_is_refused_by_name(
    words: dict[str, Any],
    environment: dict[str, str],
    why: str,
    offer: Callable,
    shared: Shared,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, executor = offer(tiny_llama())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotShared, match=why):
        shared(AutoModelForCausalLM, path, executor, require=True, **words)


def test_zero_3_is_refused_by_name(offer: Callable, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import deepspeed

    class Config:  # as DeepSpeed's, which is not installed here
        def is_zero3(self) -> bool:
            return True

    path, executor = offer(tiny_llama())
    config = Config()
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: config)
    with pytest.raises(NotShared, match="ZeRO-3 divides .* DDP"):
        shared(AutoModelForCausalLM, path, executor, require=True)


def test_a_quantised_checkpoint_is_refused_by_name(offer: Callable, shared: Shared) -> None:
    path, executor = offer(tiny_llama())
    told = json.loads((path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (path / "config.json").write_text(json.dumps(told))
    try:
        with pytest.raises(NotShared, match="quantised here .fp8."):
            shared(AutoModelForCausalLM, path, executor, require=True)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))  # triton, without which some releases of transformers do not read it


def test_floats_are_not_packed_unseen(offer: Callable, shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = offer(tiny_llama())
    with symbiosis.Executor(path, quantize="int8") as executor:
        with pytest.raises(NotShared, match="packed as int8, and this program loads whole ones"):
            shared(AutoModelForCausalLM, path, executor, require=True)
        model = shared(AutoModelForCausalLM, path, executor)
        assert "packed as int8, so results are those of the packed weights" in caplog.text
        assert list(remote_weights(model))


@pytest.mark.parametrize("is_packed", [False, True])
def test_bitsandbytes_in_4_bits(is_packed: bool, offer: Callable, shared: Shared, ids: Tensor, tmp_path: Path) -> None:
    """A program that packs a checkpoint, or reads one that is packed, shares the base of an executor that holds the same."""
    pytest.importorskip("bitsandbytes")
    path, whole = offer(tiny_llama(inner=128).bfloat16())
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )  # fmt: skip
    words: dict[str, Any] = {"quantization_config": config, "dtype": torch.bfloat16}
    unsplit = AutoModelForCausalLM.from_pretrained(path, **words)
    with pytest.raises(NotShared, match="packed as nf4, the executor's are whole"):
        shared(AutoModelForCausalLM, path, whole, require=True, **words)
    if is_packed:
        unsplit.save_pretrained(path := tmp_path / "packed")
        del words["quantization_config"]
    with symbiosis.Executor(path, quantize=None if is_packed else "nf4") as executor:
        split = shared(AutoModelForCausalLM, path, executor, require=True, **words)
        assert len(list(remote_weights(split))) == 14 and split.is_loaded_in_4bit
        ready = prepare_model_for_kbit_training(split, use_gradient_checkpointing=False)
        assert all(gradient.isfinite().all() for gradient in step(adapted(ready), ids).values())
