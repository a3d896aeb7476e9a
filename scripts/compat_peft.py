"""Every PEFT method on a split model, in both wrap orders, compared bit by bit with the unsplit model.

Run from the repository root (about a minute on one core):
    python scripts/compat_peft.py
    python scripts/compat_peft.py --only 'DoRA*'
    python scripts/compat_peft.py --mapped             # clients map the weights: every method must be bit-equal
    python scripts/compat_peft.py --privacy verify     # or split, or pads: with the results that this level promises

Compared, from the same seeds: initial values of everything the client holds, logits, loss, every adapter gradient, and
logits without gradients; the adapter's parameters are perturbed first, so that each of them matters. Outcomes:

    bit      all bits are equal, and no weight was read
    close    within 1e-5 of each tensor's largest value: only for methods that are computed in another way, where no weight is mapped
    read     needs the executor's --allow-read (then bit-equal or close); refused without
    refused  an error of Symbiosis says what to do instead
    ERROR    an error that is not ours
    SILENT   a difference that nobody would have noticed

"W>P" is wrap, then get_peft_model; "P>W" the other way round. With `--privacy verify` results are compared with the unsplit model's,
too; with `split` and `pads`, with those of the same program on the quantised weights, without masks and executors: to the bit.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, PeftConfig, TaskType, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, CordaConfig, KasaConfig, LoftQConfig, MontecloraConfig, VeloraConfig
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, MixtralConfig

import symbiosis
from symbiosis.audit.unmasked import Unmasked
from symbiosis.base.reporting import Report, print_table
from symbiosis.cli.pad_files import make as make_pads
from symbiosis.client.weights.remote_weight import RemoteWeight, remote_weights
from symbiosis.errors import SymbiosisError
from symbiosis.transport.fingerprint import digest

TOLERANCE = 1e-5  # float32 sums in another order
ORDERS = ("W>P", "P>W")
BY_LEVEL = ("verify", "split", "pads")
MAPPED = "mapped"  # by clients, which then compute as the unsplit model does
BIASED = ("gpt2", "biased llama")  # whose biases a client that has its answers proved adds itself
PADS = 2000  # for each layer and run
ATTENTION = ["q_proj", "v_proj"]
CAUSAL = TaskType.CAUSAL_LM


@dataclass(frozen=True)
class Case:
    """One configuration of one method. `group` says what the method wants of a base layer's weight (see GROUPS)."""

    name: str
    group: str
    config: Callable[[], PeftConfig]
    model: str = "llama"
    serve: tuple[str, ...] = ()
    adapt: Callable[[nn.Module, PeftConfig], nn.Module] = get_peft_model
    inputs: dict[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] | None = None  # what goes to the executor, if not everything
    reformulated: bool = False  # computed in another order: W + delta as two products, a trained bias after the product


GROUPS = {
    "A": "the layer's output and metadata",
    "B": "to train its bias",
    "C": "its values once, at init",
    "D": "to rewrite it at init",
    "E": "its values in every forward",
    "F": "to own it",
}


# ---------------------------------------------------------------- models

# The default range of initial weights (0.02) makes attention uniform at this width, and its gradients mostly rounding.
TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "initializer_range": 0.1,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=96, num_key_value_heads=2, **changes))


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(GPT2Config(**TINY))


def _mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(
        MixtralConfig(**TINY, intermediate_size=48, num_key_value_heads=2, **experts)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "biased llama": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama without cache": lambda: _llama(use_cache=False),
    "gpt2": _gpt2,
    "mixtral": _mixtral,
}


def build(name: str) -> nn.Module:
    """The same model each time. Biases, which are zero in a fresh model, get values, so that they matter."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(".bias"):
                parameter.normal_(std=0.1)
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.randint(10, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 4:8] = torch.arange(5, 9)  # tokens that some methods train or wait for
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


# ---------------------------------------------------------------- methods


def make(config_class: type[PeftConfig], **options: Any) -> Callable[[], PeftConfig]:
    return lambda: config_class(task_type=CAUSAL, **options)


def on(config_class: type[PeftConfig], modules: Any = ATTENTION, **options: Any) -> Callable[[], PeftConfig]:
    return make(config_class, target_modules=modules, **options)


def lora_on(modules: Any = ATTENTION, **options: Any) -> Callable[[], PeftConfig]:
    return on(LoraConfig, modules, **{"r": 4, **options})


def _eva(model: nn.Module, config: PeftConfig) -> nn.Module:
    model = get_peft_model(model, config)
    peft.initialize_lora_eva_weights(model, [batch()], show_progress_bar=False)
    return model


def _corda(model: nn.Module, config: PeftConfig) -> nn.Module:
    from peft.tuners.lora.corda import preprocess_corda  # needs attrs, which PEFT does not depend on

    def run() -> None:
        for seed in range(8):
            model(torch.randint(3, 100, (1, 120), generator=torch.Generator().manual_seed(seed)))

    preprocess_corda(model, config, run_model=run)
    return get_peft_model(model, config)


def _lora_ga(model: nn.Module, config: PeftConfig) -> nn.Module:
    peft.preprocess_loraga(model, config, lambda: model(**batch()).loss.backward())
    return get_peft_model(model, config)


@cache
def _saved_adapters() -> list[tempfile.TemporaryDirectory]:
    """Two LoRA adapters on disk, for the methods that mix trained ones."""
    folders = [tempfile.TemporaryDirectory(prefix="adapter-") for _ in range(2)]
    with torch.random.fork_rng():
        for seed, folder in enumerate(folders):
            base = build("llama")
            torch.manual_seed(seed)
            get_peft_model(base, lora_on(init_lora_weights=False)()).save_pretrained(folder.name)
    return folders


def _xlora() -> PeftConfig:
    adapters = {str(number): folder.name for number, folder in enumerate(_saved_adapters())}
    return peft.XLoraConfig(task_type=CAUSAL, hidden_size=64, adapters=adapters, xlora_depth=2, xlora_size=16)


def _arrow(model: nn.Module, config: PeftConfig) -> nn.Module:
    arrow = peft.ArrowConfig(top_k=2, rng_seed=0)
    return peft.create_arrow_model(model, [folder.name for folder in _saved_adapters()], arrow)


def _mixed(model: nn.Module, config: PeftConfig) -> nn.Module:
    mixed = get_peft_model(model, config, mixed=True)
    mixed.add_adapter("second", peft.LoHaConfig(r=4, target_modules=["k_proj"], init_weights=False))
    mixed.set_adapter(["default", "second"])
    return mixed


def _several(model: nn.Module, config: PeftConfig) -> nn.Module:
    model = get_peft_model(model, config)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])
    return model


TASKS = {"task_ids": torch.tensor([0, 1])}
EVERYTHING = ("*",)
MLP = ["gate_proj", "up_proj", "down_proj"]
CONV = ["c_attn", "c_proj", "c_fc"]
WITHOUT_Q_AND_V = ("*.k_proj", "*.o_proj", "*.mlp.*")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

LORA = [
    Case("LoRA", "A", lora_on(lora_dropout=0.1)),
    Case("LoRA, init gaussian", "A", lora_on(init_lora_weights="gaussian")),
    Case("LoRA, init orthogonal", "A", lora_on(init_lora_weights="orthogonal")),
    Case("LoRA, init random", "A", lora_on(init_lora_weights=False)),
    Case("LoRA, init EVA", "A", lora_on(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0)), adapt=_eva),
    Case("LoRA, rsLoRA", "A", lora_on(use_rslora=True)),
    Case("LoRA, lora_bias", "A", lora_on(lora_bias=True), model="biased llama"),
    Case("LoRA, all-linear", "A", lora_on("all-linear")),
    Case("LoRA, rank and alpha patterns", "A", lora_on(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3})),
    Case("LoRA, served lm_head", "A", lora_on(["lm_head"]), serve=EVERYTHING),
    Case("LoRA, served embedding", "A", lora_on(["embed_tokens"]), serve=EVERYTHING),
    Case("LoRA, trainable_token_indices", "A", lora_on(trainable_token_indices=[5, 6])),
    Case("LoRA, layer_replication", "A", lora_on(layer_replication=[[0, 2], [1, 2]])),
    Case("LoRA, modules_to_save lm_head", "A", lora_on(modules_to_save=["lm_head"])),
    Case("LoRA, two adapters at once", "A", lora_on(), adapt=_several),
    Case("LoRA and LoHa, mixed", "A", lora_on(), adapt=_mixed),
    Case("LoRA, BD-LoRA", "A", lora_on([*ATTENTION, "o_proj"], use_bdlora=BdLoraConfig(
        target_modules_bd_a=["o_proj"], target_modules_bd_b=ATTENTION, nblocks=2))),
    Case("LoRA, MonteCLoRA", "A", lora_on(monteclora_config=MontecloraConfig())),
    Case("LoRA, VeLoRA", "A", lora_on(velora_config=VeloraConfig(num_groups=4))),
    Case("LoRA, QALoRA flag", "A", lora_on(use_qalora=True, qalora_group_size=16)),
    Case("LoRA, aLoRA", "A", lora_on(alora_invocation_tokens=[7, 8])),
    Case("LoRA, Arrow", "A", lora_on(), adapt=_arrow),
    Case("X-LoRA", "A", _xlora, model="llama without cache"),
    Case("LoRA, bias all", "B", lora_on(bias="all"), model="biased llama"),
    Case("LoRA, bias lora_only", "B", lora_on(bias="lora_only"), model="biased llama"),
    Case("LoRA, init MiCA", "C", lora_on(init_lora_weights="mica")),
    Case("LoRA, init PiSSA", "D", lora_on(init_lora_weights="pissa")),
    Case("LoRA, init PiSSA, fast SVD", "D", lora_on(init_lora_weights="pissa_niter_4"), reformulated=True),
    Case("LoRA, init OLoRA", "D", lora_on(init_lora_weights="olora")),
    Case("LoRA, init CorDA", "D", lora_on(init_lora_weights="corda", corda_config=CordaConfig(
        corda_method="kpm")), adapt=_corda),
    Case("LoRA, init LoftQ", "D", lora_on(init_lora_weights="loftq", loftq_config=LoftQConfig())),
    Case("LoRA, KaSA", "D", lora_on(kasa_config=KasaConfig())),
    Case("LoRA, init PiSSA, its layers kept", "D", lora_on(init_lora_weights="pissa"), layers=WITHOUT_Q_AND_V),
    Case("LoRA, init LoRA-GA", "F", lora_on(init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig()),
         adapt=_lora_ga),
    Case("LoRA, init LoRA-GA, its layers kept", "F", lora_on(init_lora_weights="lora_ga",
         lora_ga_config=peft.LoraGAConfig()), adapt=_lora_ga, layers=WITHOUT_Q_AND_V),
    Case("LoRA, modules_to_save of a served layer", "F", lora_on(modules_to_save=["o_proj"])),
    Case("LoRA, modules_to_save of a kept layer", "F", lora_on(modules_to_save=["v_proj"]), layers=WITHOUT_Q_AND_V),
    Case("DoRA", "E", lora_on(use_dora=True), reformulated=True),
    Case("DoRA, dropout", "E", lora_on(use_dora=True, lora_dropout=0.1), reformulated=True),
    Case("DoRA, all-linear, biased layers", "E", lora_on("all-linear", use_dora=True), model="biased llama",
         reformulated=True),
    Case("DoRA, trained biases", "E", lora_on(["v_proj", "up_proj"], use_dora=True, bias="lora_only"),
         model="biased llama", reformulated=True),
    Case("DoRA, served embedding", "E", lora_on(["embed_tokens"], use_dora=True), serve=EVERYTHING, reformulated=True),
    Case("LoRA, target_parameters", "E", lora_on([], target_parameters=["q_proj.weight", "v_proj.weight"]),
         reformulated=True),
    Case("LoRA, target_parameters, experts", "E", lora_on([], target_parameters=EXPERTS), model="mixtral",
         reformulated=True),
    Case("LoRA, experts of two adapters", "E", lora_on([], target_parameters=EXPERTS), model="mixtral", adapt=_several,
         reformulated=True),
    Case("LoRA, attention and experts", "E", lora_on(ATTENTION, target_parameters=EXPERTS), model="mixtral",
         reformulated=True),
]  # fmt: skip

OTHERS = [
    Case("AdaLoRA", "A", on(peft.AdaLoraConfig, init_r=6, target_r=4, total_step=100)),
    Case("IA3", "A", on(peft.IA3Config, ["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])),
    Case("LoHa", "A", on(peft.LoHaConfig, r=4)),
    Case("LoKr", "A", on(peft.LoKrConfig, r=4)),
    Case("LoKr, both decomposed", "A", on(peft.LoKrConfig, r=2, decompose_both=True, decompose_factor=8)),
    Case("OFT", "A", on(peft.OFTConfig, oft_block_size=8)),
    Case("OFT, coft, block_share", "A", on(peft.OFTConfig, oft_block_size=8, coft=True, block_share=True)),
    Case("BOFT", "A", on(peft.BOFTConfig, boft_block_size=4, boft_n_butterfly_factor=2)),
    Case("VeRA", "A", on(peft.VeraConfig, r=16)),
    Case("PVeRA", "A", on(peft.PveraConfig, r=16)),
    Case("VB-LoRA", "A", on(peft.VBLoRAConfig, r=4, num_vectors=8, vector_length=16)),
    Case("Uni-LoRA", "A", on(peft.UniLoraConfig, r=4, theta_d_length=32)),
    Case("FourierFT", "A", on(peft.FourierFTConfig, n_frequency=50)),
    Case("WaveFT", "A", on(peft.WaveFTConfig, n_frequency=50)),
    Case("MiSS", "A", on(peft.MissConfig, r=8)),
    Case("MiSS, mini", "A", on(peft.MissConfig, r=8, mini_r=4, init_weights="mini")),
    Case("RandLoRA", "A", on(peft.RandLoraConfig, r=8)),
    Case("RandLoRA, sparse", "A", on(peft.RandLoraConfig, r=8, sparse=True)),
    Case("C3A", "A", on(peft.C3AConfig, block_size=16)),
    Case("RoAd", "A", on(peft.RoadConfig, group_size=16)),
    Case("RoAd, variant 4", "A", on(peft.RoadConfig, group_size=16, variant="road_4")),
    Case("GraLoRA", "A", on(peft.GraloraConfig, r=4)),
    Case("GraLoRA, hybrid", "A", on(peft.GraloraConfig, r=4, hybrid_r=2)),
    Case("BEFT", "A", on(peft.BeftConfig)),
    Case("Lily", "A", on(peft.LilyConfig, r=4)),
    Case("Poly", "A", on(peft.PolyConfig, r=4, n_tasks=2, n_skills=2), inputs=TASKS),
    Case("DEFT", "A", on(peft.DeftConfig, r=4)),
    Case("DEFT, para", "A", on(peft.DeftConfig, r=4, para=True)),
    Case("LN tuning", "A", on(peft.LNTuningConfig, ["input_layernorm", "norm"])),
    Case("Trainable tokens", "A", make(peft.TrainableTokensConfig, token_indices=[5, 6])),
    Case("Prompt tuning", "A", make(peft.PromptTuningConfig, num_virtual_tokens=4)),
    Case("Prompt tuning, multitask", "A", make(peft.MultitaskPromptTuningConfig, num_virtual_tokens=4, num_tasks=2),
         inputs=TASKS),
    Case("P-tuning, MLP", "A", make(peft.PromptEncoderConfig, num_virtual_tokens=4, encoder_hidden_size=32)),
    Case("P-tuning, LSTM", "A", make(peft.PromptEncoderConfig, num_virtual_tokens=4, encoder_hidden_size=32,
         encoder_reparameterization_type="LSTM")),
    Case("Prefix tuning", "A", make(peft.PrefixTuningConfig, num_virtual_tokens=4)),
    Case("Prefix tuning, projection", "A", make(peft.PrefixTuningConfig, num_virtual_tokens=4, prefix_projection=True,
         encoder_hidden_size=32)),
    Case("CPT", "A", make(peft.CPTConfig, cpt_token_ids=[5, 6, 7], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4]),
         inputs={"input_type_mask": torch.ones(2, 12, dtype=torch.long)}),
    Case("Cartridge", "A", make(peft.CartridgeConfig, num_virtual_tokens=4)),
    Case("Shadow", "A", on(peft.ShadowConfig, ["layers.0", "layers.1"], r=4)),
    Case("Adaption prompt", "A", make(peft.AdaptionPromptConfig, adapter_len=4, adapter_layers=2)),
    Case("AdaMSS", "C", on(peft.AdamssConfig, r=8, num_subspaces=2)),
    Case("TinyLoRA", "C", on(peft.TinyLoraConfig, r=2, u=8)),
    Case("PSOFT", "C", on(peft.PsoftConfig, r=8)),
    Case("DeLoRA", "C", on(peft.DeloraConfig, r=4)),
    Case("FRoD", "C", on(peft.FrodConfig, progressbar=False)),
    Case("SHiRA", "E", on(peft.ShiraConfig, r=2, random_seed=3), reformulated=True),
    Case("Super-Tuning", "E", on(peft.SupertuningConfig, sparsity=0.9), reformulated=True),
    Case("Super-Tuning, with LoRA", "E", on(peft.SupertuningConfig, sparsity=0.9, r=4, lora_alpha=4), reformulated=True),
    Case("HRA", "E", on(peft.HRAConfig, r=4), reformulated=True),
    Case("HRA, Gram-Schmidt", "E", on(peft.HRAConfig, r=4, apply_GS=True), reformulated=True),
    Case("HiRA", "E", on(peft.HiraConfig, r=4)),
    Case("MiSS, bat", "E", on(peft.MissConfig, r=8, init_weights="bat"), reformulated=True),
    Case("GLoRA", "E", on(peft.GloraConfig, r=4), reformulated=True),
    Case("PEANuT", "E", on(peft.PeanutConfig, r=4, depth=1)),
    Case("OSF", "F", on(peft.OSFConfig, effective_rank=4)),
]  # fmt: skip

GPT2 = [
    Case("GPT-2: LoRA", "A", lora_on(CONV, lora_dropout=0.1, fan_in_fan_out=True), model="gpt2"),
    Case("GPT-2: LoRA, bias all", "B", lora_on(CONV, bias="all", fan_in_fan_out=True), model="gpt2", reformulated=True),
    Case("GPT-2: AdaLoRA", "A", on(peft.AdaLoraConfig, CONV, init_r=6, target_r=4, total_step=100, fan_in_fan_out=True),
         model="gpt2"),
    Case("GPT-2: IA3", "A", on(peft.IA3Config, ["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"],
         fan_in_fan_out=True), model="gpt2"),
    Case("GPT-2: VeRA", "A", on(peft.VeraConfig, CONV, r=16, fan_in_fan_out=True), model="gpt2"),
    Case("GPT-2: FourierFT", "A", on(peft.FourierFTConfig, CONV, n_frequency=50, fan_in_fan_out=True), model="gpt2"),
    Case("GPT-2: DEFT", "A", on(peft.DeftConfig, CONV, r=4, fan_in_fan_out=True), model="gpt2"),
    Case("GPT-2: Prefix tuning", "A", make(peft.PrefixTuningConfig, num_virtual_tokens=4), model="gpt2"),
    Case("GPT-2: LoRA, init PiSSA", "D", lora_on(CONV, init_lora_weights="pissa", fan_in_fan_out=True), model="gpt2"),
    Case("GPT-2: DoRA", "E", lora_on(CONV, use_dora=True, fan_in_fan_out=True), model="gpt2", reformulated=True),
    Case("GPT-2: DoRA, dropout", "E", lora_on(CONV, use_dora=True, lora_dropout=0.1, fan_in_fan_out=True),
         model="gpt2", reformulated=True),
    Case("GPT-2: HiRA", "E", on(peft.HiraConfig, CONV, r=4, fan_in_fan_out=True), model="gpt2"),
]  # fmt: skip
CASES = [*LORA, *OTHERS, *GPT2]


# ---------------------------------------------------------------- comparing


Trace = dict[str, Tensor | None]  # None: in the executor, and may not be read


def trace(model: nn.Module, case: Case, values_allowed: bool) -> Trace:
    """Everything that is compared, by name."""
    seen = {f"initial {name}": value for name, value in held_by_client(model, values_allowed)}
    perturb(model)
    model.train()
    torch.manual_seed(5)
    output = model(**batch(), **case.inputs)
    if output.loss.requires_grad:  # Arrow routes between trained adapters and trains nothing
        output.loss.backward()
    seen |= {"logits": output.logits.detach(), "loss": output.loss.detach()}
    seen |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    torch.manual_seed(6)
    with torch.no_grad():
        seen["logits without gradients"] = model(**batch(), **case.inputs).logits
    return seen


def held_by_client(model: nn.Module, values_allowed: bool) -> Iterator[tuple[str, Tensor | None]]:
    """A copy of every parameter and buffer; of a remote weight, its value if that may be read."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not isinstance(tensor, RemoteWeight):
            yield name, tensor.detach().clone()
        else:
            yield name, tensor.value().clone() if values_allowed else None


def perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def unsplit(case: Case) -> Trace:
    """The reference. Its adapter must change what the model says, or the comparison would show nothing."""
    model = build(case.model)
    with torch.no_grad():
        base_logits = model(**batch()).logits
    torch.manual_seed(3)
    reference = trace(case.adapt(model, case.config()), case, True)
    if torch.equal(reference["logits"], base_logits):
        raise AssertionError(f"{case.name}: the adapter changes nothing")
    return reference


@dataclass(frozen=True)
class Outcome:
    """What one case gave in one order. `error` is the largest relative difference (0: all bits are equal)."""

    case: Case
    order: str
    kind: str
    detail: str = ""
    error: float = 0.0
    remote: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.error:.0e}" if self.error else self.kind


def attempt(case: Case, order: str, reference: Trace, allow_read: bool, level: str = "") -> Outcome:
    """Run the case split, and compare."""
    base = build(case.model)
    before = {name: digest(p) for name, p in base.named_parameters()}
    with ExitStack() as stack:
        options = {
            "serve": case.serve,
            "allow_read": allow_read,
            "policy": "immediate",
            "integers": [8] if level in BY_LEVEL else [],
        }
        if level == MAPPED:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mapped-"))
            options |= {"listen": [f"local://{folder}/sock"], "share_weights": True}
            case = replace(case, reformulated=False)
        one = stack.enter_context(symbiosis.Executor(base, operator="one", **options))
        try:
            if level == "verify" and case.model in BIASED:
                case = replace(case, reformulated=True)
            if level in ("split", "pads"):
                unmasked = _split(case, order, one.endpoint, privacy=Unmasked())
                case, reference = replace(case, reformulated=False), trace(unmasked, case, allow_read)
            model = _split(case, order, one.endpoint, **_asked_for(level, case, base, options, stack))
            kind, detail, error = compare(trace(model, case, allow_read), reference, case)
            remote = len({w.handle.index for w in remote_weights(model) if w.handle.private is None})
            calls = symbiosis.stats(model).calls
        except SymbiosisError as refusal:
            return Outcome(case, order, "refused", f"{type(refusal).__name__}: {refusal}")
        except Exception as failure:  # whatever a method says that does not get what it wants
            return Outcome(case, order, "ERROR", f"{type(failure).__name__}: {failure}")
    if changed := [name for name, p in base.named_parameters() if digest(p) != before[name]]:
        return Outcome(case, order, "SILENT", f"the shared weight {changed[0]} was changed", remote=remote)
    if not calls and level != MAPPED:
        return Outcome(case, order, "SILENT", "the executor computed nothing", remote=remote)
    return Outcome(case, order, kind, detail, error, remote)


def _asked_for(level: str, case: Case, base: nn.Module, options: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """What `wrap` is told."""
    if level == "split":
        other = stack.enter_context(symbiosis.Executor(base, operator="two", **options))
        return {"privacy": symbiosis.Split(other.endpoint)}
    if level == "pads":
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pads-"))) / "pads"
        make_pads(_saved(case.model), PADS, file, training=True)
        return {"privacy": symbiosis.Pads(file)}
    return {"verify": level == "verify"}


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="models-")


@cache
def _saved(model: str) -> str:
    folder = f"{_folder().name}/{model}"
    build(model).save_pretrained(folder)
    return folder


def _split(case: Case, order: str, endpoint: str, **how: Any) -> nn.Module:
    model = build(case.model)
    if order == "W>P":
        symbiosis.wrap(model, endpoint, layers=case.layers, **how)
        torch.manual_seed(3)
        return case.adapt(model, case.config())
    torch.manual_seed(3)
    return symbiosis.wrap(case.adapt(model, case.config()), endpoint, layers=case.layers, **how)


def compare(got: Trace, expected: Trace, case: Case) -> tuple[str, str, float]:
    """Outcome, detail and error: the same names on both sides, and the same values under them?"""
    if different := got.keys() ^ expected.keys():
        return "SILENT", f"{len(different)} tensors on one side only, such as {min(different)}", 0.0
    errors = {name: difference(value, expected[name]) for name, value in got.items() if value is not None}
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] == 0.0:
        return "bit", "", 0.0
    kind = "close" if case.reformulated and errors[worst] <= TOLERANCE else "SILENT"
    return kind, worst, errors[worst]


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value; 0.0 only if all bits are equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if torch.equal(got, expected):
        return 0.0
    apart = (got - expected).abs().max() / expected.abs().max()
    return float(apart) if apart.isfinite() else float("inf")


# ---------------------------------------------------------------- the run


def run_case(case: Case, order: str, reference: Trace, level: str = "") -> Outcome:
    """Without reads first; with reads if that was refused."""
    denied = attempt(case, order, reference, False, level)
    if denied.kind != "refused":
        return denied
    allowed = attempt(case, order, reference, True, level)
    return replace(allowed, kind="read", detail=denied.detail) if allowed.kind in ("bit", "close") else allowed


def run(cases: list[Case], level: str = "") -> tuple[list[Outcome], dict[str, str]]:
    """Outcomes in both orders; and the cases that the unsplit model cannot run, with its error."""
    outcomes, impossible = [], {}
    for case in cases:
        try:
            reference = unsplit(case)
        except (ImportError, ValueError) as error:  # a package that PEFT wants for this method only
            if not isinstance(error, ImportError) and "is not available" not in str(error):
                raise
            impossible[case.name] = f"{type(error).__name__}: {error}"
            continue
        outcomes += [run_case(case, order, reference, level) for order in ORDERS]
        print(f"{case.name}: {', '.join(f'{o.order} {o}' for o in outcomes[-2:])}", file=sys.stderr)
    return outcomes, impossible


def show(outcomes: list[Outcome], impossible: dict[str, str]) -> None:
    """One row per method; below, why something was refused, read, or failed."""
    pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
    rows = [(w.case.name, w.case.group, w, p, f"{w.remote} / {p.remote}") for w, p in pairs]
    print_table(("method", "wants", "W>P", "P>W", "remote layers"), rows, title="PEFT methods on a split model")
    print("\n".join(f"{letter}: wants {wish}" for letter, wish in GROUPS.items()))
    for outcome in outcomes:
        if outcome.kind not in ("bit", "close"):
            print(f"{outcome.case.name}, {outcome.order}: {outcome.kind}: {outcome.detail}")
    for name, error in impossible.items():
        print(f"{name}: the unsplit model cannot run it here: {error}")


def report(outcomes: list[Outcome], impossible: dict[str, str], everything: bool) -> Report:
    made = Report("compat_peft")
    made.figure("outcomes", {f"{o.case.name}, {o.order}": str(o) for o in outcomes})
    made.figure("unsplit_cannot_run", impossible)
    for order in ORDERS:
        kinds = Counter(o.kind for o in outcomes if o.order == order and o.case.model != "gpt2")
        name = {"W>P": "wrap_first", "P>W": "peft_first"}[order]
        made.figure(f"{name}_configs", kinds.total())
        free = kinds["bit"] + kinds["close"]
        if everything:
            made.bar(f"{name}_without_read", free, ">=", 56)
            made.bar(f"{name}_with_read", free + kinds["read"], ">=", 75)
        else:
            made.figure(f"{name}_without_read", free)
            made.figure(f"{name}_with_read", free + kinds["read"])
    made.bar("silent", sum(o.kind == "SILENT" for o in outcomes), "<=", 0)
    made.bar("errors_not_ours", sum(o.kind == "ERROR" for o in outcomes), "<=", 0)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="methods whose name matches, such as 'DoRA*'")
    parser.add_argument(
        "--privacy", choices=BY_LEVEL, default="", help="a level of privacy, or verify=True (default: neither)"
    )
    parser.add_argument("--mapped", action="store_true", help="clients map the weights")
    options = parser.parse_args()
    only, level = options.only, MAPPED if options.mapped else options.privacy
    warnings.simplefilter("ignore")  # PEFT warns about many of these configurations, rightly and at length
    transformers.logging.set_verbosity_error()
    outcomes, impossible = run([case for case in CASES if fnmatchcase(case.name, only)], level)
    show(outcomes, impossible)
    return report(outcomes, impossible, only == "*" and not level).finish()


if __name__ == "__main__":
    sys.exit(main())
