"""Which architectures compute the same split as unsplit: every one that transformers has, tiny, compared bit by bit.

Each model is built from its own configuration class with all sizes made small, and served by an executor in this
process. Logits, greedy generation (tokens and their logits) and the adapter gradients of one LoRA training step of the
split model are compared with those of the unsplit one: float32, unbatched, reads of weights denied. A model that needs
them is tried again with reads allowed, and marked. Models that also see images get text alone, unless they cannot do without
an image. One whose unsplit form cannot be built small or run on such inputs, or of which nothing but a head could be served, counts as not run, with the
reason.

Run from the repository root (five to ten minutes on one core):
    python scripts/compat_models.py
    python scripts/compat_models.py --group causal --only llama --only mixtral
"""

import argparse
import copy
import gc
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symbiosis
from symbiosis.base.layer_selection import head_names, is_in
from symbiosis.base.reporting import Report, print_table
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import RemoteWeightError

GROUPS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
STAGES = ("forward", "generate", "step")
VOCAB, FIRST_SPECIAL, TOKENS, NEW_TOKENS = 128, 64, 9, 6
LIMIT_S = 60

MOSTLY = 0.9  # of the parameters of linear layers and experts
Stage = Callable[[nn.Module, dict[str, Tensor]], list[Tensor]]

# What may differ, or be served less than mostly, and why: (architecture, stage) -> cause.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("blt", "served"): "freezes a part of itself, so that wrap takes the rest for layers which the client trains",
}

# ---------------------------------------------------------------- small configurations

# The first pattern that matches a field's whole name says what the field becomes; fields that none matches stay.
SIZES: list[tuple[re.Pattern[str], int]] = [(re.compile(pattern), value) for pattern, value in (
    (r"vocab_size_per_layer_input|(\w+_)?vocab_size", VOCAB),
    (r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_decoder_layers|num_encoder_layers|depth", 2),
    (r"(?!attention_)(\w+_)?hidden_size(_global)?|d_model|dim_model|n_embd|embed_dim|emb_dim|embedding_size", 64),
    (r"word_embed_proj_dim|projection_dim|adapter_(in|out)_dim|adapter_input_size", 64),
    (r"(\w+_)?(num_key_value_heads|kv_n_heads|num_kv_heads)", 2),
    (r"(\w+_)?(num_attention_heads|attention_heads|num_heads|n_heads?|index_n_heads)", 4),
    (r"qk_head_dim", 32),
    (r"rotary_dim", 8),
    (r"head_dim|(\w+_)?head_dim|d_kv|d_head|dim_head|attention_head_size|kv_channels", 16),
    (r"(\w+_)?(intermediate_size|ffn_dim|ffn_hidden_size|dim_ff|dff|d_ff|mlp_dim|n_inner|d_inner)(_mlp)?", 96),
    (r"(\w+_)?(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(\w+_)?(experts_per_tok\w*|moe_topk|moe_top_k|moe_k|top_k_experts)", 2),
    (r"(q|kv|o)_lora_rank", 16),
    (r"n_group|topk_group|num_expert_group", 1),
)]  # fmt: skip
DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers|num_decoder_layers|depth")
HEADS = re.compile(r"num_attention_heads|num_heads|n_heads?")
TOKEN_ID = re.compile(r"\w+_(id|index)")
FIRST_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
UNSET = {"head_dim": 16, "num_key_value_heads": 4}  # where None is no size that the model can use


def mrope(*sections: int) -> dict[str, Any]:
    """Rotary positions of several axes: their sections are as wide as a small head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


# Fields by kind of configuration, for what the patterns cannot know.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"use_cache": False, "encoder_hash_byte_group_vocab": VOCAB},
    "chameleon": {"vocabulary_map": {"<image>": FIRST_SPECIAL}},
    "chameleon_vqgan": {"base_channels": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": mrope(2, 3, 3)["rope_parameters"]}},
    "cosmos3_edge_text": mrope(2, 3, 3),
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96},
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": FIRST_SPECIAL, "<|extra_200|>": FIRST_SPECIAL + 1}},
    "emu3_vqgan": {"base_channels": 32},
    "ernie4_5_vl_moe_text": mrope(3, 3, 2),
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 3},
    "florence_vision": {
        "depths": (1, 1, 1, 1), "embed_dim": (16, 32, 32, 64), "num_heads": (2, 2, 2, 2), "num_groups": (2, 2, 2, 2),
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": 96,
    },
    "glm4v_moe_text": mrope(2, 1, 1),
    "glm4v_text": mrope(2, 3, 3),
    "glm_ocr_text": mrope(2, 3, 3),
    "granite4_vision": {"deepstack_layer_map": [(-1, 0)], "downsample_rate": "4/8"},
    "granite_speech_encoder": {"hidden_dim": 64},
    "granite_speech_plus_encoder": {"hidden_dim": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_vl_text": mrope(2, 2, 2, 2),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {"base_channels": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 32},
    "mobilebert": {"intra_bottleneck_size": 64},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "nemotron_h": {"n_groups": 2},
    "paddleocr_vl_text": mrope(2, 3, 3),
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
    "qwen2_5_omni_text": mrope(2, 3, 3),
    "qwen2_5_vl_text": mrope(2, 3, 3),
    "qwen2_vl_text": mrope(2, 3, 3),
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "radio": {"video_temporal_patch_size": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "step3p5": {"sliding_window": 8},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
}  # fmt: skip


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


# What some architectures want beside, or instead of, plain tokens.
MORE_INPUTS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "blip": lambda: {"pixel_values": noise(2, 3, 384, 384)},
    "musicgen": lambda: {"input_ids": torch.arange(3, 3 + 8 * TOKENS).view(8, TOKENS) % FIRST_SPECIAL},
    "musicgen_melody": lambda: {"input_ids": torch.arange(3, 3 + 8 * TOKENS).view(8, TOKENS) % FIRST_SPECIAL},
    "pp_formulanet": lambda: {"pixel_values": noise(2, 3, 512, 512)},
    "udop": lambda: {"bbox": torch.zeros(2, TOKENS, 4)},
    "vision-encoder-decoder": lambda: {"pixel_values": noise(2, 3, 224, 224)},
}


def shrink(config: Any, by_layer: bool) -> Any:
    """The same configuration with small sizes; `by_layer`: one layer of every kind that its per-layer lists name."""
    picks = picked_layers(config) if by_layer else []
    special = iter(range(FIRST_SPECIAL, VOCAB))
    small: dict[str, Any] = {}
    for name, value in vars(config).items():
        if value is None and name in UNSET:
            small[name] = UNSET[name]
        elif hasattr(value, "to_diff_dict"):
            small[name] = shrink(value, by_layer)
        elif name in FIRST_TOKENS and value is not None:
            small[name] = FIRST_TOKENS[name]
        elif TOKEN_ID.fullmatch(name) and isinstance(value, int) and value > 2:
            small[name] = next(special)
        elif picks and isinstance(value, list | tuple) and len(value) == depth(config):
            small[name] = type(value)(value[layer] for layer in picks)
        elif picks and DEPTH.fullmatch(name):
            small[name] = len(picks)
        elif isinstance(value, int) and (size := small_size(config, name)):
            small[name] = min(size, value)
    small |= SPECIAL.get(config.model_type, {})
    return type(config)(**small)


def small_size(config: Any, name: str) -> int | None:
    size = next((size for pattern, size in SIZES if pattern.fullmatch(name)), None)
    return 4 if size == 2 and "heads" in name and vars(config)[name] == first(config, HEADS) else size


def first(config: Any, pattern: re.Pattern[str]) -> int:
    """The first integer field whose name the pattern matches."""
    found = (value for name, value in vars(config).items() if pattern.fullmatch(name) and isinstance(value, int))
    return next(found, 0)


def depth(config: Any) -> int:
    return first(config, DEPTH)


def picked_layers(config: Any) -> list[int]:
    """One layer of each kind (2 to 4 in all), if the configuration describes its layers one by one."""
    count = depth(config)
    lists = [value for value in vars(config).values() if isinstance(value, list | tuple) and len(value) == count]
    if not lists or count < 2:
        return []
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(str([value[layer] for value in lists if isinstance(value[layer], str)]), layer)
    picks = sorted(kinds.values())[:4]
    return picks if len(picks) > 1 else [0, count - 1]


# ---------------------------------------------------------------- models and their inputs


def architectures(group: str) -> dict[str, str]:
    """Model type -> class name, of one group."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return dict(getattr(auto, GROUPS[group]))


def build(group: str, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model that runs, and its inputs."""
    failure: Exception | None = None
    for by_layer in (True, False):
        try:
            model = tiny(group, name, by_layer)
            inputs = inputs_of(name, model)
            with torch.no_grad():
                logits = logits_of(copy.deepcopy(model)(**inputs))
            assert logits.float().std() > 0, "the logits are all alike, or no numbers"
            return model, inputs
        except Exception as error:  # whatever a model raises is a reason not to run
            failure = failure or error
    assert failure
    raise failure


def tiny(group: str, name: str, by_layer: bool) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[name](), by_layer)
    if group == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    model_class = getattr(transformers, architectures(group)[name])
    text = config.get_text_config(decoder=True)
    if not isinstance(config, model_class.config_class) and isinstance(text, model_class.config_class):
        config = text
    torch.manual_seed(0)
    model: nn.Module = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not (parameter.isfinite().all() and parameter.any()):
                parameter.normal_(std=0.1)  # never initialised, or so that nothing would depend on the input
    return model


def inputs_of(name: str, model: nn.Module) -> dict[str, Tensor]:
    ids = torch.randint(3, FIRST_SPECIAL, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    accepted = inspect.signature(model.forward).parameters
    inputs = {"input_ids": ids, **MORE_INPUTS.get(name, dict)()}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = ids.flip(1)
    return inputs


def logits_of(output: Any) -> Tensor:
    for name in ("logits", "prediction_logits", "lm_logits"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return next(value for value in output.to_tuple() if isinstance(value, Tensor) and value.dim() > 1)


# ---------------------------------------------------------------- what is compared


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    with torch.no_grad():
        return [logits_of(model(**inputs))]


def generate(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Tokens and the logits they were chosen by."""
    torch.manual_seed(3)
    given = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    output = model.generate(
        **given, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        bos_token_id=1, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return [output.sequences, *output.logits]


def step(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Loss and adapter gradients of one LoRA training step, with dropout."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = LoraConfig(r=4, lora_dropout=0.1, init_lora_weights=False, target_modules=lora_targets(model))
    adapted = get_peft_model(model, config)
    adapted.train()
    torch.manual_seed(5)
    logits = logits_of(adapted(**inputs))
    targets = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(6))
    loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten().to(logits.device))
    loss.backward()
    gradients = [p.grad for p in adapted.parameters() if p.requires_grad and p.grad is not None]
    assert any(gradient.any() for gradient in gradients), "no adapter has a gradient"
    return [loss.detach(), *gradients]


def lora_targets(model: nn.Module) -> list[str]:
    """Every linear layer but the head; and but those that PEFT refuses, or takes for experts' fused parameters."""
    left_out = set[str]()
    if model.config.model_type in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"):
        left_out |= {"out_proj"}
    if experts(model):
        left_out |= {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        name
        for name, module in model.named_modules()
        if is_linear(module) and module is not head and name.rpartition(".")[2] not in left_out
        if not re.search("Router|Grouped", type(module).__name__)  # linear layers by class, but not by what they return
    ]


def is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def experts(model: nn.Module) -> set[str]:
    """Names of the parameters in which experts' matrices are stacked."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if re.search("[Ee]xpert", f"{path} {type(module).__name__}") and not is_linear(module)
        if p.dim() == 3 or (p.dim() == 2 and "bias" not in name)
    }


def possible(model: nn.Module) -> set[str]:
    """The parameters of linear layers, but those of heads, and of experts."""
    heads = head_names(model)
    linear = {f"{name}.weight" for name, m in model.named_modules() if is_linear(m) and not is_in(name, heads)}
    return dict(model.named_parameters()).keys() & (linear | experts(model))


def shares(model: nn.Module, split: nn.Module) -> tuple[float, float]:
    """Served parameters as a share of all, and of those that are possible."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    wanted = possible(model)
    served = {name for name, p in split.named_parameters() if isinstance(p, RemoteWeight)}

    def total(names: Iterable[str]) -> int:
        return sum(sizes[name] for name in names)

    return total(served) / total(sizes), total(wanted & served) / total(wanted)


# ---------------------------------------------------------------- one model after another


@dataclass
class Outcome:
    """What became of one architecture. `equal`: whether bits agree, for every stage that the unsplit model can do."""

    name: str
    equal: dict[str, bool] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)  # the stages that needed them
    share: float = 0.0
    covered: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        return "forward" in self.equal

    def cell(self, stage: str) -> str:
        if stage not in self.equal:
            return "-"
        return ("equal" if self.equal[stage] else "DIFFERS") + (", read" if stage in self.reads else "")

    def row(self) -> tuple[str, ...]:
        numbers = (f"{self.share:.0%}", f"{self.covered:.0%}") if self.ran else ("-", "-")
        return self.name, *map(self.cell, STAGES), *numbers, "; ".join(self.notes)


def examine(name: str, group: str, allow_read: bool = False) -> Outcome:
    """Build, run, compare. Hardly takes longer than LIMIT_S."""
    outcome = Outcome(name)
    try:
        with time_limit(LIMIT_S):
            try:
                model, inputs = build(group, name)
            except Exception as error:  # whatever a model raises is a reason not to run
                outcome.notes.append(f"not run: {brief(error)}")
                return outcome
            if not possible(model):
                outcome.notes.append("not run: there is nothing to serve but a head")
                return outcome
            for stage in STAGES:
                compare(outcome, stage, model, inputs, allow_read)
    except TimeUp:
        outcome.notes.append(f"stopped after {LIMIT_S} s")
    gc.collect()
    return outcome


def compare(outcome: Outcome, stage: str, model: nn.Module, inputs: dict[str, Tensor], allow_read: bool) -> None:
    """One stage, unsplit and split, each on a fresh copy of the model."""
    run = {"forward": forward, "generate": generate, "step": step}[stage]
    if stage == "generate" and not model.can_generate():  # type: ignore[operator]
        return
    try:
        expected = run(copy.deepcopy(model), inputs)
    except Exception as error:
        outcome.notes.append(f"unsplit, too, has no {stage}: {brief(error)}")
        return
    try:
        with symbiosis.Executor(copy.deepcopy(model), allow_read=allow_read) as executor:
            split = symbiosis.wrap(copy.deepcopy(model), executor.endpoint)
            outcome.share, outcome.covered = shares(model, split)
            got = run(split, inputs)
    except Exception as error:  # must not end the sweep
        if isinstance(error, RemoteWeightError) and not allow_read:
            outcome.reads.append(stage)
            outcome.notes.append(f"{stage} needs reads: {brief(error)}")
            compare(outcome, stage, model, inputs, allow_read=True)
        else:
            outcome.equal[stage] = False
            outcome.notes.append(f"split {stage} failed: {brief(error)}")
        return
    outcome.equal[stage] = same(got, expected)
    if not outcome.equal[stage]:
        outcome.notes.append(f"{stage}: {difference(run, model, inputs, got, expected)}")


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def difference(
    run: Stage, model: nn.Module, inputs: dict[str, Tensor], got: list[Tensor], expected: list[Tensor]
) -> str:
    """What is to be said of results that differ."""
    if not same(run(copy.deepcopy(model), inputs), expected):
        return "the unsplit model differs from itself"
    if [x.shape for x in got] != [x.shape for x in expected]:
        return "other shapes"
    return f"off by {max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)):.1e}"


class TimeUp(BaseException):
    """No Exception: model code that catches those must not swallow it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def brief(error: Exception) -> str:
    """One short line; of our own errors, the operation and the place."""
    if isinstance(error, RemoteWeightError) and (found := re.search(r"(\S+).*\(at .*?([^/]+:\d+)\)", str(error))):
        return f"{found[1]} at {found[2]}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def quietly() -> None:
    """One thread, and none of the warnings that odd configurations cause."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def sweep(group: str, only: Sequence[str], jobs: int, allow_read: bool) -> list[Outcome]:
    names = [name for name in architectures(group) if not only or name in only]
    outcomes = []
    os.environ["PYTHONSAFEPATH"] = "1"  # workers import nothing from the working directory
    with ProcessPoolExecutor(jobs, get_context("spawn"), quietly) as pool:
        for number, outcome in enumerate(pool.map(partial(examine, group=group, allow_read=allow_read), names), 1):
            print(f"{group} {number}/{len(names)}", *outcome.row(), flush=True)
            outcomes.append(outcome)
    return outcomes


def summarise(group: str, outcomes: list[Outcome], report: Report) -> None:
    """The group's table, figures and bars."""
    head = ("architecture", *STAGES, "of all", "of linear", "note")
    print_table(head, [outcome.row() for outcome in outcomes], f"{group}: split against unsplit")
    ran = [outcome for outcome in outcomes if outcome.ran]
    report.figure(f"{group}_tried", len(outcomes))
    report.figure(f"{group}_ran", len(ran))
    report.figure(f"{group}_with_reads", sum(bool(outcome.reads) for outcome in ran))
    for stage in STAGES:
        compared = [outcome for outcome in ran if stage in outcome.equal]
        listed = sum((outcome.name, stage) in EXCEPTIONS for outcome in compared)
        report.figure(f"{group}_{stage}_ran", len(compared))
        report.bar(f"{group}_{stage}_equal", sum(o.equal[stage] for o in compared), ">=", len(compared) - listed)
    for outcome in outcomes:
        if outcome.ran:
            report.figure(f"{group}_{outcome.name}_share", round(outcome.share, 3))
    report.figure(f"{group}_notes", {outcome.name: "; ".join(outcome.notes) for outcome in outcomes if outcome.notes})
    listed = sum((outcome.name, "served") in EXCEPTIONS for outcome in ran)
    report.bar(f"{group}_mostly_served", sum(o.covered >= MOSTLY for o in ran), ">=", len(ran) - listed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare split and unsplit models of every architecture, bit by bit.")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only this group (may be repeated)")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="only this architecture (repeatable)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that work at the same time")
    parser.add_argument("--allow-read", action="store_true", help="allow reads of weights from the start")
    options = parser.parse_args()
    groups = options.group or list(GROUPS)
    if unknown := set(options.only) - {name for group in groups for name in architectures(group)}:
        parser.error(f"no architecture is called {', '.join(sorted(unknown))}")
    report = Report("compat_models")
    for group in groups:
        if outcomes := sweep(group, options.only, options.jobs, options.allow_read):
            summarise(group, outcomes, report)
    report.figure("listed_exceptions", {" ".join(key): cause for key, cause in EXCEPTIONS.items()})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
