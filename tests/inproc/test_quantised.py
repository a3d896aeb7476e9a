"""Executors of quantised checkpoints, and of checkpoints that they pack: clients are the unsplit model with whole weights, bit for bit."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis import training
from symbiosis.errors import ConfigError, WrapError
from symbiosis.executor.model import part as loading
from symbiosis.executor.model.load import load_model
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.executor.preflight import check_quantised
from symbiosis.kernels.operand import matrix_of
from symbiosis.kernels.packed import PackedWeight
from symbiosis.kernels.packing import pack
from symbiosis.protocol import Op
from symbiosis.server.launch.preflight import check_model as check_served
from symbiosis.serving import Engine
from symbiosis.serving.request import Request, Sampling
from symbiosis.serving.serve_options import ServeOptions
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral
from tests.inproc.test_training import batch, lora
from tests.quantised import WRITERS, write

PACKS = ("int8", "fp8", "nf4")
IDS = torch.arange(2 * 24).view(2, 24) % 90


def with_values(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Put these values into a model's parameters, in its dtype."""
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        old = model.get_parameter(name)
        whole = nn.Parameter(value.to(old.dtype).view(old.shape), requires_grad=False)
        setattr(model.get_submodule(path), last, whole)
    return model


def whole_of(model: Any, executor: symbiosis.Executor) -> nn.Module:
    """Put what an executor's packed weights stand for into a model."""
    store = executor.server.store
    named = dict(model.named_parameters())
    names = {number: store.manifest[number].name for number in store.packed}
    assert names
    return with_values(
        model, {(n if n in named else f"{n}.weight"): store.whole(number) for number, n in names.items()}
    )


def same(split: Any, unsplit: Any) -> None:
    """Assert that two models compute the same values, and the same gradients of their inputs."""
    results = []
    for model in (split, unsplit):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        x = model.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = model(inputs_embeds=x).logits
        logits.float().square().sum().backward()
        results.append((logits.detach(), x.grad))
    for of_split, of_unsplit in zip(*results, strict=True):
        assert torch.equal(of_split, of_unsplit)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_a_quantised_checkpoint(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_llama().to(dtype)
    values = write(model, tmp_path / "model", name)
    loaded = load_model(str(tmp_path / "model"))
    for key, value in values.items():
        assert torch.equal(loaded.get_parameter(key).whole(), value.to(dtype)), key  # type: ignore[operator]
    with symbiosis.Executor(str(tmp_path / "model")) as executor:
        split = symbiosis.from_executor(executor.endpoint)
        assert "wrapped 14/15" in str(symbiosis.report(split))
        same(split, with_values(loaded, values))
        packed = sum(weight.nbytes for weight in executor.server.store.packed.values())
        assert packed < 0.6 * sum(value.nbytes for value in values.values())


@pytest.mark.parametrize("format", PACKS)
@pytest.mark.parametrize("make", [tiny_llama, pytest.param(tiny_gpt2, marks=pytest.mark.full), tiny_mixtral])
def test_a_checkpoint_that_is_packed(format: str, make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model: Any = make()
    model.save_pretrained(tmp_path)
    with symbiosis.Executor(str(tmp_path), quantize=format, allow_read=True) as executor:
        split: Any = symbiosis.from_executor(executor.endpoint)
        unsplit = whole_of(model, executor)
        same(split, unsplit)
        kinds = {layer.packed for layer in executor.server.store.served()}
        assert kinds == {format}
        for name, parameter in split.named_parameters():  # reads are whole
            value = parameter.value() if hasattr(parameter, "value") else parameter
            assert torch.equal(value, unsplit.get_parameter(name)), name
        assert torch.equal(
            split.generate(IDS[:1], max_new_tokens=5, do_sample=False, pad_token_id=0),
            unsplit.generate(IDS[:1], max_new_tokens=5, do_sample=False, pad_token_id=0),  # type: ignore[operator]
        )


def test_biases_are_as_they_were(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=100,
        attention_bias=True,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    values = write(model, tmp_path / "model", "gptq")
    with symbiosis.Executor(str(tmp_path / "model")) as executor:
        same(symbiosis.from_executor(executor.endpoint), with_values(model.requires_grad_(False), values))


def test_an_operand_lies_as_in_the_whole_matrix(tmp_path: Path) -> None:
    """Rounding depends on strides, too."""
    tiny_mixtral().save_pretrained(tmp_path)  # type: ignore[operator]
    store = Store(load_model(str(tmp_path), quantize="int8"))
    parts = [(...,), (..., slice(5, 9)), (slice(3, 7), slice(None)), (slice(1, 3), slice(2, 8), slice(5, 9))]
    for number, layer in enumerate(store.manifest):
        for op in (Op.FORWARD, Op.DGRAD) if layer.kind == "linear" else (Op.READ,) if layer.kind == "tensor" else ():
            matrix = matrix_of(store.whole(number), layer.transposes(op), None)
            for part in parts[: 4 if layer.kind == "tensor" else 3]:
                found = store.operand(number, op, None, "float32", part)
                wanted = matrix if part == (...,) else matrix[part]
                assert torch.equal(found, wanted) and found.stride() == wanted.stride(), (layer.name, op, part)


def test_several_calls_are_joined(tmp_path: Path) -> None:
    """Rows of several clients, in turns: bits do not depend on how a product is cut."""
    model: Any = tiny_llama()
    model.save_pretrained(tmp_path)
    with symbiosis.Executor(str(tmp_path), quantize="int8", max_batch_tokens=16) as executor:
        split = symbiosis.from_executor(executor.endpoint)
        same(split, whole_of(model, executor))


def test_a_program_wraps_the_checkpoint_that_was_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_llama()
    model.save_pretrained(tmp_path)
    with symbiosis.Executor(str(tmp_path), quantize="nf4") as executor:
        split = symbiosis.wrap(tiny_llama(), executor.endpoint)
        assert "packed as nf4" in caplog.text
        same(split, whole_of(model, executor))
        other = tiny_llama()
        other.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] += 1
        with pytest.raises(WrapError, match="up_proj: the weights differ"):
            symbiosis.wrap(other, executor.endpoint)


def test_servers_and_trainers_compute_with_packed_weights(tmp_path: Path) -> None:
    """Tokens are those of the unsplit model with whole weights, and a run's step is that over an executor of whole weights."""
    demo: Any = load_model("demo")
    demo.save_pretrained(tmp_path)
    answers: SimpleQueue[Any] = SimpleQueue()
    with symbiosis.Executor(str(tmp_path), quantize="int8") as executor:
        whole: Any = whole_of(demo, executor)
        with Engine(executor.endpoint, memory=1 << 24) as engine:
            prompt = tuple(b"Once upon a time")
            engine.submit(Request(id=1, prompt=prompt, sampling=Sampling(max_tokens=8, temperature=0.0)), answers.put)
            tokens: list[int] = []
            while not (answer := answers.get(timeout=60)).finish:
                tokens += [token.id for token in answer.tokens]
            tokens += [token.id for token in answer.tokens]
        expected = whole.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert tokens == expected.tolist()[: len(tokens)] and tokens
        trained = []
        with symbiosis.Executor(whole) as other:
            for endpoint in (executor.endpoint, other.endpoint):
                with training.Engine(endpoint) as trainer:
                    run = trainer.create(lora(), seed=1)
                    run.forward_backward(batch(1)).result(60)
                    run.step(1e-2).result(60)
                    trained.append([p.detach().clone() for p in run.model.parameters() if p.requires_grad])
        assert trained[0] and all(map(torch.equal, *trained))


def test_a_model_that_bitsandbytes_has_packed(tmp_path: Path) -> None:
    """QLoRA's script, with `wrap` in it and without: losses and adapters are the same."""
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_llama(layers=1, inner=128).bfloat16().save_pretrained(tmp_path / "floats")  # type: ignore[operator]
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    load = AutoModelForCausalLM.from_pretrained
    load(tmp_path / "floats", quantization_config=config).save_pretrained(tmp_path / "packed")

    def trained(base: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model: Any = get_peft_model(prepare_model_for_kbit_training(base), lora).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(3):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, get_peft_model_state_dict(model)

    losses, adapter = trained(load(tmp_path / "packed", dtype=torch.bfloat16))
    with symbiosis.Executor(str(tmp_path / "packed")) as executor:
        split = symbiosis.wrap(load(tmp_path / "packed", dtype=torch.bfloat16), executor.endpoint)
        assert "wrapped 7/8" in str(symbiosis.report(split))
        mine, tensors = trained(split)
        assert mine == losses
        assert all(torch.equal(tensors[name], value) for name, value in adapter.items())
        proved = symbiosis.wrap(load(tmp_path / "packed", dtype=torch.bfloat16), executor.endpoint, verify=True)
        assert trained(proved)[0] == losses
    with symbiosis.Executor(str(tmp_path / "floats"), quantize="nf4") as executor:
        symbiosis.wrap(load(tmp_path / "floats", quantization_config=config), executor.endpoint)
    packed = load(tmp_path / "floats", quantization_config=config)
    other = pytest.raises(WrapError, match="packed as nf4, the executor's are packed as fp8")
    with symbiosis.Executor(str(tmp_path / "floats"), quantize="fp8") as executor, other:
        symbiosis.wrap(packed, executor.endpoint)


def test_what_is_not_served_is_not_packed(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)  # type: ignore[operator]
    with symbiosis.Executor(str(tmp_path), quantize="int8", serve=("*.mlp.*",)) as executor:
        layers = executor.server.store.manifest
        assert {layer.packed for layer in layers if ".mlp." in layer.name} == {"int8"}
        assert {layer.packed for layer in layers if ".mlp." not in layer.name} == {""}


def test_whole_weights_are_held_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_mixtral().bfloat16().save_pretrained(tmp_path)  # type: ignore[operator]
    seen: list[weakref.ref[Tensor]] = []

    def packed(weight: Tensor, format: str) -> PackedWeight:
        assert not any(earlier() is not None for earlier in seen[:-1])
        seen.append(weakref.ref(weight))
        return pack(weight, format)

    monkeypatch.setattr(loading, "pack", packed)
    store = Store(load_model(str(tmp_path), quantize="int8"))
    assert len(seen) == len(store.packed) and not any(one() is not None for one in seen)


def broken(tensors: dict[str, Tensor], key: str, change: Callable[[Tensor], Tensor | None]) -> None:
    key = next(name for name in tensors if name.endswith(key))
    value = change(tensors.pop(key))
    if value is not None:
        tensors[key] = value.contiguous()


def spoilt(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = value
    return tensor


BAD: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "a scale that is NaN": ("fp8 blocks", "weight_scale_inv", lambda t: spoilt(t, float("nan")), "NaN or infinite"),
    "scales of 0": ("int8 rows", "weight_scale", torch.zeros_like, "scales are 0"),
    "no scale": ("int8 rows", "weight_scale", lambda t: None, "its scales are missing"),
    "too few scales": ("fp8 blocks", "weight_scale_inv", lambda t: t[:1], "do not make a weight of"),
    "too few codes": ("nf4 nested", "q_proj.weight", lambda t: t[:-1], "do not make a weight of"),
    "no packed scales": ("nf4 nested", "nested_absmax", lambda t: t[:-1], "packed scales need"),
    "no table": ("nf4", "quant_map", lambda t: None, "lacks 'weight.quant_map'"),
    "zeros of another weight": ("gptq", "qzeros", lambda t: t[:, :1], "qzeros is"),
    "a group that is not there": ("gptq", "g_idx", lambda t: spoilt(t, 99), "columns are said to be in groups"),
    "no scale of torchao": ("int8 torchao", "q_proj._weight_scale", lambda t: None, "q_proj.weight: lacks 'scale'"),
    "a part of another dtype": (
        "int8 bitsandbytes",
        "q_proj.weight",
        lambda t: t.float(),
        "q_proj.weight: codes of torch.float32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_checkpoint_is_refused_by_name(name: str, tmp_path: Path) -> None:
    format, key, change, message = BAD[name]
    write(tiny_llama(), tmp_path / "model", format)
    file = tmp_path / "model/model.safetensors"
    with safe_open(file, framework="pt") as opened:
        said = opened.metadata()
    tensors = load_file(file)
    broken(tensors, key, change)
    save_file(tensors, file, metadata=said)
    with pytest.raises(ConfigError, match=message):
        symbiosis.Executor(str(tmp_path / "model"))


BAD_CONFIGS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "blocks of nothing": ("fp8 blocks", lambda told: told.update(weight_block_size=[0, 0]), "down_proj.weight: "),
    "half a block": ("fp8 blocks", lambda told: told.update(weight_block_size=[32]), "down_proj.weight: "),
    "another block": ("fp8 blocks", lambda told: told.update(weight_block_size=[16, 16]), "do not make a weight of"),
    "blocks of a word": ("fp8 blocks", lambda told: told.update(weight_block_size="ab"), "down_proj.weight: "),
    "groups in a list": ("int8 rows", lambda told: told.update(config_groups=[1]), "is not understood"),
    "a group that is a word": ("int8 rows", lambda told: told.update(config_groups={"a": "b"}), "is not understood"),
    "groups of another size": ("int4", lambda told: told["config_groups"]["group_0"]["weights"].update(group_size=8), "columns are said to be"),
    "a size that is a word": ("awq", lambda told: told.update(group_size="a"), "down_proj.weight: invalid literal"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_configuration_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    format, change, message = BAD_CONFIGS[name]
    write(tiny_llama(layers=1), tmp_path / "model", format)
    config = json.loads((tmp_path / "model/config.json").read_text())
    change(config["quantization_config"])
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_model(str(tmp_path / "model"))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    write(tiny_llama(), tmp_path / "model", "fp8 rows")
    with pytest.raises(ConfigError, match="compressed-tensors .float-quantized. already"):
        symbiosis.Executor(str(tmp_path / "model"), quantize="int8")
    for words in ({"devices": "cpu", "ranks": 2, "shard": "fsdp"}, {"devices": "0,1"}):
        with pytest.raises(ConfigError, match="over ranks of a CPU by --shard layers only.*or on one device"):
            check_quantised(Options(model="demo", **words), {"quantization_config": {"quant_method": "fp8"}})
    (tmp_path / "model" / "tokenizer.json").touch()
    with pytest.raises(ConfigError, match="--devices cpu: quantised weights are not divided over several devices yet"):
        check_served(ServeOptions(model=str(tmp_path / "model"), devices="cpu", ranks=2))
    with pytest.raises(ConfigError, match="quantize is for models that the executor loads"):
        symbiosis.Executor(tiny_llama(), quantize="int8")
