"""Adapters of many kinds in one batch: each sequence has the logits that its adapter gives it under PEFT alone."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, TaskType
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from symbiosis.errors import AdapterError
from symbiosis.serving.lora import peft_layers
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.registry import AdapterRegistry
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.model_runner import ModelRunner
from tests.adapters import Configure, Made, off, run, saved, sequence_of

TINY = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TWO = ["q_proj", "v_proj"]
MEMORY = 1 << 24
AS_ALONE = 1e-5  # sums in another order

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of kinds that it would rather not see


def llama(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY, "intermediate_size": 112, "num_key_value_heads": 2, **changes})
    return with_biases(LlamaForCausalLM(config).eval())


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return with_biases(GPT2LMHeadModel(GPT2Config(**TINY)).eval())


def with_biases(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def lora(**options: object) -> Configure:
    return lambda: LoraConfig(**{"task_type": TaskType.CAUSAL_LM, "r": 4, "target_modules": ALL, **options})


def of(kind: type[peft.PeftConfig], **options: object) -> Configure:
    return lambda: kind(**{"task_type": TaskType.CAUSAL_LM, **options})


FUSED: dict[str, Configure] = {
    "rank 1": lora(r=1),
    "rank 3": lora(r=3, lora_alpha=7),
    "rank 64": lora(r=64),
    "rsLoRA": lora(r=8, use_rslora=True),
    "patterns": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"layers.0.self_attn.v_proj": 3}),
    "all-linear": lora(target_modules="all-linear"),
    "lm_head": lora(target_modules=["lm_head", "q_proj"]),
    "trained bias": lora(lora_bias=True),
    "DoRA": lora(r=5, use_dora=True),
    "VeRA": of(peft.VeraConfig, r=16, target_modules=["q_proj", "down_proj"]),
    "IA3": of(peft.IA3Config, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}
BY_PEFT: dict[str, Configure] = {
    "AdaLoRA": of(peft.AdaLoraConfig, init_r=6, target_r=4, total_step=100, target_modules=TWO),
    "LoHa": of(peft.LoHaConfig, r=4, target_modules=TWO),
    "LoKr": of(peft.LoKrConfig, r=4, target_modules=TWO),
    "OFT": of(peft.OFTConfig, oft_block_size=8, r=0, target_modules=TWO),
    "BOFT": of(peft.BOFTConfig, boft_block_size=4, target_modules=TWO),
    "HRA": of(peft.HRAConfig, r=4, target_modules=TWO),
    "FourierFT": of(peft.FourierFTConfig, n_frequency=50, target_modules=TWO),
    "RandLoRA": of(peft.RandLoraConfig, r=8, target_modules=TWO),
    "RoAd": of(peft.RoadConfig, group_size=16, target_modules=TWO),
    "C3A": of(peft.C3AConfig, block_size=16, target_modules=TWO),
    "MiSS": of(peft.MissConfig, r=8, target_modules=TWO),
    "VB-LoRA": of(peft.VBLoRAConfig, r=4, num_vectors=8, vector_length=16, target_modules=TWO),
    "SHiRA": of(peft.ShiraConfig, r=2, random_seed=3, target_modules=TWO),
    "DeLoRA": of(peft.DeloraConfig, r=4, target_modules=TWO),
    "LN tuning": of(peft.LNTuningConfig, target_modules=["input_layernorm", "norm"]),
    "saved module": lora(target_modules=TWO, modules_to_save=["lm_head"]),
    "embedding": lora(target_modules=["embed_tokens"]),
    "tokens": of(peft.TrainableTokensConfig, token_indices=[5, 6]),
    "parameters": lora(target_modules=[], target_parameters=["q_proj.weight"]),
}
VIRTUAL: dict[str, Configure] = {
    "prompt tuning": of(peft.PromptTuningConfig, num_virtual_tokens=5),
    "p-tuning": of(peft.PromptEncoderConfig, num_virtual_tokens=4, encoder_hidden_size=32),
    "prefix tuning": of(peft.PrefixTuningConfig, num_virtual_tokens=18),
}


class Serving:
    """A served model with its adapters, and the same model by itself."""

    def __init__(self, model: nn.Module, memory: int = MEMORY) -> None:
        self.base = deepcopy(model)
        self.served: ModelRunner = make_ready(model, memory)
        self.library = AdapterRegistry(self.served)
        self.residency = AdapterCache(self.served.arena)
        self.sites = TargetLayers(self.served, self.residency)

    def together(self, made: dict[str, Made]) -> dict[str, float]:
        """How far the logits of each are off those that it has alone: after a prompt, and after one token more."""
        sequences, alone = [], []
        for number, (name, (folder, model)) in enumerate(made.items()):
            adapter = self.library.add(f"a{number}", folder)
            assert self.residency.fetch(adapter), name
            tokens = prompt(number)
            sequences.append(sequence_of(tokens, adapter))
            alone.append(logits(model, tokens))
            assert off(alone[-1][-1], logits(self.base, tokens)[-1]) > 1e-3, f"{name} changes nothing"
        middle, names = len(made) // 2, [*made]
        names.insert(middle, "no adapter")
        sequences.insert(middle, sequence_of(prompt(99)))
        alone.insert(middle, logits(self.base, prompt(99)))
        before = run(self.served, [(s, len(s.tokens) - 1) for s in sequences])
        last = run(self.served, [(s, 1) for s in reversed(sequences)]).flip(0)
        return {name: max(off(before[i], alone[i][-2]), off(last[i], alone[i][-1])) for i, name in enumerate(names)}


def prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    tokens: list[int] = torch.randint(3, 90, (4 + number % 5,), generator=generator).tolist()
    return [5, *tokens]  # one that some kinds train


@torch.no_grad()
def logits(model: nn.Module, tokens: list[int]) -> Tensor:
    found: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return found


def check(model: nn.Module, kinds: dict[str, Configure], folder: Path, most: float = AS_ALONE) -> None:
    made = {name: saved(model, kind(), folder / str(i), seed=i) for i, (name, kind) in enumerate(kinds.items())}
    found = Serving(model).together(made)
    assert {name: error for name, error in found.items() if not error < most} == {}


def test_kinds_that_are_computed_together(tmp_path: Path) -> None:
    check(llama(), FUSED, tmp_path)


def test_kinds_that_peft_computes(tmp_path: Path) -> None:
    check(llama(), BY_PEFT | {"LoRA": FUSED["rank 3"]}, tmp_path)


def test_an_adapter_is_loaded_while_others_run(tmp_path: Path) -> None:
    """It is tried at layers that are the sites of the present step."""
    serving = Serving(llama())
    first = saved(llama(), FUSED["rank 3"](), tmp_path / "first")[0]
    second = saved(llama(), BY_PEFT["OFT"](), tmp_path / "second")[0]
    adapter = serving.library.add("first", first)
    assert serving.residency.fetch(adapter)
    norm = serving.served.model.model.norm
    hook = norm.register_forward_hook(lambda *_: serving.library.add("second", second) and None)  # type: ignore[operator, union-attr]
    run(serving.served, [(sequence_of(prompt(5), adapter), 5)])
    hook.remove()
    assert serving.library.has("second")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_kinds_in_half_types(dtype: torch.dtype, tmp_path: Path) -> None:
    """But for rounding: PEFT computes most of them in float32 between two roundings."""
    kinds = (
        FUSED | VIRTUAL | {name: BY_PEFT[name] for name in ("LoHa", "OFT", "LN tuning", "embedding", "saved module")}
    )
    check(llama().to(dtype), kinds, tmp_path, most=5 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", BY_PEFT)
def test_what_peft_computes_leaves_the_base_as_it_is(name: str, tmp_path: Path) -> None:
    base = llama()
    serving = Serving(base)
    before = {key: (value.data_ptr(), value.clone()) for key, value in base.state_dict().items()}
    adapter = serving.library.add("a", saved(base, BY_PEFT[name](), tmp_path)[0])
    for length in (4, 1):
        sequence = sequence_of(prompt(length), adapter)
        assert serving.residency.fetch(adapter)
        run(serving.served, [(sequence, len(sequence.tokens))])
        for key, value in base.state_dict().items():
            assert value.data_ptr() == before[key][0] and torch.equal(value, before[key][1]), key
    shared = {p.data_ptr() for p in base.parameters()}
    own = {
        p.data_ptr(): p.nbytes
        for layer in adapter.layers.values()
        for p in (*layer.parameters(), *layer.buffers())
        if p.data_ptr() not in shared
    }
    assert adapter.bytes >= sum(own.values()) > 0


@pytest.mark.parametrize("when", ["loaded", "run"])
def test_what_changes_the_base_is_undone_and_refused(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some of PEFT's ways to begin do."""
    base = llama()
    serving, (folder, _) = Serving(base), saved(base, BY_PEFT["LoHa"](), tmp_path)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    method = {"loaded": "update_layer", "run": "forward"}[when]
    kept = getattr(peft.tuners.loha.layer.Linear, method)

    def writes(self: nn.Module, *arguments: object, **options: object) -> object:
        self.get_base_layer().weight.data.mul_(2)
        return kept(self, *arguments, **options)

    monkeypatch.setattr(peft.tuners.loha.layer.Linear, method, writes)
    with pytest.raises(AdapterError, match="changes the base's weights"):
        serving.library.add("a", folder)
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())


def test_virtual_tokens(tmp_path: Path) -> None:
    check(llama(), VIRTUAL | {"LoRA": FUSED["rank 3"]}, tmp_path)


def test_biases(tmp_path: Path) -> None:
    kinds = {
        "trained biases": lora(bias="all", target_modules=TWO),
        "of its layers": lora(bias="lora_only", target_modules=TWO),
        "DoRA": lora(use_dora=True),
        "DoRA, trained": lora(use_dora=True, bias="lora_only", target_modules=TWO),
        "IA3": FUSED["IA3"],
    }
    check(llama(attention_bias=True, mlp_bias=True), kinds, tmp_path)


def test_transposed_weights(tmp_path: Path) -> None:
    layers = ["c_attn", "c_proj", "c_fc"]
    kinds = {
        "LoRA": lora(target_modules=layers, fan_in_fan_out=True),
        "DoRA": lora(target_modules=layers, fan_in_fan_out=True, use_dora=True),
        "IA3": of(peft.IA3Config, target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True),
        "biases": lora(target_modules=["c_attn"], fan_in_fan_out=True, bias="all"),
        "norms": of(peft.LNTuningConfig, target_modules=["ln_1", "ln_f"]),
        "prefix": VIRTUAL["prefix tuning"],
    }
    check(gpt2(), kinds, tmp_path)


@pytest.mark.parametrize("kind", ["TinyLoraConfig", "PsoftConfig"])
def test_what_factors_a_large_base_is_refused_soon(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", minversion="0.21", reason="methods of PEFT 0.21")
    model = llama()
    config = getattr(peft, kind)(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "down_proj"])
    folder, _ = saved(model, config, tmp_path)
    library = Serving(model).library
    factored: list[tuple[int, ...]] = []
    svd = torch.linalg.svd

    def counted(matrix: Tensor, *args: Any, **named: Any) -> Any:
        factored.append(tuple(matrix.shape))
        return svd(matrix, *args, **named)

    monkeypatch.setattr(torch.linalg, "svd", counted)
    monkeypatch.setattr(peft_layers, "MOST_FACTORING", 1000.0)
    with pytest.raises(AdapterError, match="factors the base's weights"):
        library.add("mine", folder)
    assert len(factored) <= 1


def test_factoring_is_counted_in_all() -> None:
    square = torch.eye(10)
    with peft_layers.FactoringLimit(3000.0):
        torch.linalg.svd(square)
        assert float(torch.linalg.norm(square)) == pytest.approx(10**0.5)
        torch.linalg.inv(square)
        torch.stack([square @ square] * 8)
        torch.linalg.qr(square)
        for _ in range(2):
            with pytest.raises(AdapterError, match="save it as a LoRA"):
                torch.inverse(square)
    with peft_layers.FactoringLimit(10.0):  # matrices in a list
        assert torch.linalg.multi_dot([torch.ones(1, 2), torch.ones(2, 2), torch.ones(2, 1)]).item() == 4
