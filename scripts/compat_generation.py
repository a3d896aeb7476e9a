"""Every mode of transformers' `generate` on split models of many families, with and without adapters, compared bit by bit.

Run from the repository root (some minutes on one core):
    python scripts/compat_generation.py
    python scripts/compat_generation.py --only 'mamba*' --adapter LoRA --mode 'beam*'

Each combination runs unsplit, wrapped with every product called (`share=False`), and wrapped with the weights mapped. Tokens, and the scores
and logits that they were chosen by, are compared. Outcomes:

    equal    all bits are equal
    close    tokens are equal and scores within 1e-4 of their largest, of methods that are computed in another way (DoRA)
    refused  an error of Symbiosis says what to do instead
    unclear  an error that is not ours
    silent   a difference that nobody would have noticed

A mode that the unsplit model refuses proves nothing, and is counted as "not here".
"""

import argparse
import copy
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import TaskType, get_peft_model
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.errors import SymbiosisError

WAYS = ("called", "mapped")
NEW = 6
TOLERANCE = 1e-4  # of scores, where a method is computed in another order
Result = dict[str, Tensor]
Options = dict[str, Any]

# ---------------------------------------------------------------- models

COMMON: Options = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
GATED: Options = {
    **COMMON, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128
}  # fmt: skip
ENDS: Options = {name: COMMON[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
T5: Options = {
    **ENDS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "initializer_factor": 3.0
}  # fmt: skip
BART: Options = {
    **ENDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 128, "init_std": 0.1, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
GPT: Options = {
    **ENDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.1
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A kind of configuration, small sizes, and the layers that adapters go to."""

    kind: str
    sizes: Options
    targets: list[str]
    feedforward: list[str]

    @property
    def is_encoder_decoder(self) -> bool:
        return self.kind in ("t5", "bart")


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", GATED, ["q_proj", "v_proj", "down_proj"], ["down_proj"]),
    "gemma3": Family("gemma3_text", {**GATED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
                     ["q_proj", "v_proj", "down_proj"], ["down_proj"]),
    "gpt2": Family("gpt2", GPT, ["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "bloom": Family("bloom", {**ENDS, "hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.1},
                    ["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "bart": Family("bart", BART, ["q_proj", "v_proj", "fc2"], ["fc2"]),
    "t5": Family("t5", T5, ["q", "v", "wo"], ["wo"]),
    "mamba": Family("mamba", {**COMMON, "state_size": 8}, ["in_proj", "x_proj"], ["in_proj"]),
    "jamba": Family("jamba", {**GATED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
                              "mamba_d_state": 8, "use_mamba_kernels": False}, ["q_proj", "in_proj", "x_proj"], ["in_proj"]),
    "qwen3 moe": Family("qwen3_moe", {**GATED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
                        ["q_proj", "v_proj"], ["v_proj"]),
    "mixtral": Family("mixtral", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2}, ["q_proj", "v_proj"], ["v_proj"]),
    "falcon": Family("falcon", COMMON, ["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "opt": Family("opt", {**ENDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96,
                          "word_embed_proj_dim": 64, "max_position_embeddings": 128, "init_std": 0.1}, ["q_proj", "v_proj", "fc2"], ["fc2"]),
}  # fmt: skip


def build(family: Family) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.kind, **family.sizes)
    auto = transformers.AutoModelForSeq2SeqLM if family.is_encoder_decoder else transformers.AutoModelForCausalLM
    return auto.from_config(config).eval()  # type: ignore[no-any-return]


# ---------------------------------------------------------------- adapters


def adapted(model: nn.Module, adapter: str, family: Family) -> nn.Module:
    """The model with an adapter whose parameters are perturbed, so that each of them matters."""
    if adapter == "none":
        return model
    task = TaskType.SEQ_2_SEQ_LM if family.is_encoder_decoder else TaskType.CAUSAL_LM
    turned = {"fan_in_fan_out": True} if family.kind == "gpt2" else {}
    torch.manual_seed(3)
    split = get_peft_model(model, ADAPTERS[adapter](task, family, turned)).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, parameter in sorted(split.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return split


ADAPTERS: dict[str, Callable[[TaskType, Family, Options], peft.PeftConfig]] = {
    "LoRA": lambda task, f, turned: peft.LoraConfig(task_type=task, r=4, target_modules=f.targets, **turned),
    "DoRA": lambda task, f, turned: peft.LoraConfig(task_type=task, r=4, target_modules=f.targets, use_dora=True, **turned),
    "IA3": lambda task, f, turned: peft.IA3Config(
        task_type=task, target_modules=f.targets, feedforward_modules=f.feedforward, **turned
    ),
    "VeRA": lambda task, f, turned: peft.VeraConfig(task_type=task, r=8, target_modules=f.targets[:1], **turned),
    "prefix": lambda task, f, turned: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
    "prompt": lambda task, f, turned: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
}  # fmt: skip
REFORMULATED = ("DoRA",)  # computed in another order

# ---------------------------------------------------------------- modes


class Kept(BaseStreamer):
    """A streamer that keeps what comes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


class Colder(LogitsProcessor):
    """A processor of a user's own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * 1.5


SAMPLE: Options = {"do_sample": True}
MODES: dict[str, Callable[[nn.Module], Options]] = {
    "greedy": lambda m: {},
    "greedy, no cache": lambda m: {"use_cache": False},
    "sampling": lambda m: SAMPLE,
    "sampling, temperature and top-k": lambda m: {**SAMPLE, "temperature": 0.7, "top_k": 20},
    "sampling, top-p": lambda m: {**SAMPLE, "top_p": 0.8},
    "sampling, min-p": lambda m: {**SAMPLE, "min_p": 0.05},
    "sampling, typical": lambda m: {**SAMPLE, "typical_p": 0.8},
    "sampling, epsilon and eta": lambda m: {**SAMPLE, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    "three sequences": lambda m: {**SAMPLE, "num_return_sequences": 3},
    "beam": lambda m: {"num_beams": 3},
    "beam, several, length penalty": lambda m: {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    "beam, sampling": lambda m: {**SAMPLE, "num_beams": 3},
    "diverse beam": lambda m: {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beam": lambda m: {"num_beams": 3, "force_words_ids": [[7]]},
    "contrastive": lambda m: {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": lambda m: {"dola_layers": "low"},
    "assisted": lambda m: {"assistant_model": assistant_of(m)},
    "assisted, sampling": lambda m: {"assistant_model": assistant_of(m), **SAMPLE},
    "assisted by early exit": lambda m: {"assistant_early_exit": 1},
    "prompt lookup": lambda m: {"prompt_lookup_num_tokens": 2},
    "static cache": lambda m: {"cache_implementation": "static"},
    "sliding window cache": lambda m: {"cache_implementation": "sliding_window"},
    "dynamic cache": lambda m: {"cache_implementation": "dynamic"},
    "quantized cache": lambda m: {"cache_implementation": "quantized"},
    "offloaded cache": lambda m: {"cache_implementation": "offloaded"},
    "prefill in chunks": lambda m: {"prefill_chunk_size": 4},
    "guidance": lambda m: {"guidance_scale": 1.5},
    "watermark": lambda m: {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    "streamer": lambda m: {"streamer": Kept()},
    "repetition penalty": lambda m: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "encoder repetition penalty": lambda m: {"encoder_repetition_penalty": 1.3},
    "bad words and suppressed": lambda m: {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9], "begin_suppress_tokens": [8]},
    "sequence bias": lambda m: {"sequence_bias": {(10,): 2.0}},
    "forced ends": lambda m: {"forced_bos_token_id": 5, "forced_eos_token_id": 2, "min_new_tokens": 2},
    "exponential decay": lambda m: {"exponential_decay_length_penalty": (2, 1.5)},
    "renormalised": lambda m: {**SAMPLE, "renormalize_logits": True, "remove_invalid_values": True},
    "own processor": lambda m: {"logits_processor": LogitsProcessorList([Colder()])},
    "own stopping": lambda m: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(10)])},
    "hidden states": lambda m: {"output_hidden_states": True},
}  # fmt: skip

_assistants: dict[str, nn.Module] = {}


def assistant_of(model: nn.Module) -> nn.Module:
    """A small model of the same family, that no executor serves."""
    return _assistants[model.config.model_type]


def inputs(model: nn.Module) -> Options:
    """Two prompts, the first of which is padded on the left."""
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if not model.config.is_encoder_decoder:
        ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


ONE_ROW = ("assisted", "prompt lookup")  # which transformers does for one sequence at a time


def generate(model: nn.Module, mode: str) -> Result:
    """Tokens, and what they were chosen by."""
    random.seed(0)
    torch.manual_seed(5)
    given, chosen = inputs(model), MODES[mode](model)
    if mode.startswith(ONE_ROW):
        given = {name: value[1:] for name, value in given.items()}
    wanted = {"max_new_tokens": NEW, "do_sample": False, **chosen}
    output = model.generate(**given, **wanted, return_dict_in_generate=True, output_scores=True, output_logits=True)  # type: ignore[operator]
    seen: Result = {"tokens": output.sequences}
    for name in ("scores", "logits"):
        seen |= {f"{name} {step}": value for step, value in enumerate(getattr(output, name, None) or ())}
    if (best := getattr(output, "sequences_scores", None)) is not None:
        seen["sequences_scores"] = best
    if isinstance(streamer := chosen.get("streamer"), Kept):
        seen["streamed"] = torch.tensor(streamer.tokens)
    return seen


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Outcome:
    family: str
    adapter: str
    mode: str
    way: str
    kind: str
    why: str = ""


def compared(got: Result, expected: Result, may_be_close: bool) -> tuple[str, str]:
    if got.keys() != expected.keys():
        return "silent", f"other results: {sorted(got.keys() ^ expected.keys())[:3]}"
    differing = [name for name in expected if not same(got[name], expected[name])]
    if not differing:
        return "equal", ""
    if may_be_close and all(is_close(got[name], expected[name]) for name in differing):
        return "close", ""
    return "silent", f"{len(differing)} of {len(expected)} differ, {differing[0]} first"


def same(got: Tensor, expected: Tensor) -> bool:
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and torch.equal(got.nan_to_num(), expected.nan_to_num())
    )


def is_close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or not got.is_floating_point():
        return False
    a, b = got.nan_to_num(posinf=0, neginf=0), expected.nan_to_num(posinf=0, neginf=0)
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def reference(model: nn.Module, mode: str) -> Result | str:
    """What the unsplit model gives, twice the same; else why it gives nothing."""
    try:
        first = generate(copy.deepcopy(model), mode)
        again = generate(copy.deepcopy(model), mode)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return first if compared(again, first, False)[0] == "equal" else "the unsplit model differs from itself"


def attempt(split: nn.Module, mode: str, expected: Result, may_be_close: bool) -> tuple[str, str]:
    try:
        return compared(generate(split, mode), expected, may_be_close)
    except SymbiosisError as error:
        return "refused", str(error)
    except Exception as error:
        return "unclear", f"{type(error).__name__}: {error}"


def run(name: str, adapter: str, modes: list[str], folder: Path) -> tuple[list[Outcome], list[str]]:
    """All modes of one family with one adapter, and those that are not here."""
    family = FAMILIES[name]
    base = build(family)
    _assistants[base.config.model_type] = build(family)
    try:
        unsplit = adapted(copy.deepcopy(base), adapter, family)
    except Exception as error:  # PEFT refuses this method for this family
        return [], [f"{name}, {adapter}: {type(error).__name__}: {error}"]
    outcomes, not_here = list[Outcome](), list[str]()
    url = f"local://{folder}/{name.replace(' ', '-')}.sock"
    with symbiosis.Executor(copy.deepcopy(base), listen=[url], share_weights=True) as executor:
        splits = {}
        for way in WAYS:
            wrapped = symbiosis.wrap(copy.deepcopy(base), executor.endpoint, share=way == "mapped")
            splits[way] = adapted(wrapped, adapter, family)
        for mode in modes:
            expected = reference(unsplit, mode)
            if isinstance(expected, str):
                not_here.append(f"{mode}: {expected}")
                continue
            for way, split in splits.items():
                kind, why = attempt(split, mode, expected, adapter in REFORMULATED)
                outcomes.append(Outcome(name, adapter, mode, way, kind, why))
        if outcomes:
            check_ways({way: symbiosis.stats(split) for way, split in splits.items()})
    return outcomes, not_here


def check_ways(figures: dict[str, Any]) -> None:
    """Each way must have been gone, or nothing is shown."""
    assert figures["called"].calls and not figures["called"].direct, "nothing was called"
    assert figures["mapped"].direct, "nothing was multiplied by mapped weights"


# ---------------------------------------------------------------- the report


def show(outcomes: list[Outcome], not_here: list[str]) -> None:
    kinds = sorted({outcome.kind for outcome in outcomes})
    rows = []
    for family in FAMILIES:
        for way in WAYS:
            counts = Counter(o.kind for o in outcomes if o.family == family and o.way == way)
            if counts:
                rows.append((family, way, *(counts[kind] for kind in kinds)))
    print_table(("family", "way", *kinds), rows, title="generate() on split models: modes and adapters")
    for reason, number in Counter(reason.splitlines()[0][:160] for reason in not_here).most_common():
        print(f"not here, {number}: {reason}")
    for outcome in outcomes:
        if outcome.kind in ("silent", "unclear", "refused"):
            print(
                f"{outcome.kind}: {outcome.family}, {outcome.adapter}, {outcome.mode}, {outcome.way}: {outcome.why[:200]}"
            )


def report(outcomes: list[Outcome], not_here: list[str]) -> Report:
    made = Report("compat_generation")
    counts = Counter(outcome.kind for outcome in outcomes)
    made.figure("families", len({outcome.family for outcome in outcomes}))
    made.figure("modes", len({outcome.mode for outcome in outcomes}))
    made.figure("not_here", len(not_here))
    for kind in ("equal", "close", "refused"):
        made.figure(kind, counts[kind])
    made.bar("tried", len(outcomes), ">=", 1)
    made.bar("silent", counts["silent"], "<=", 0)
    made.bar("unclear_errors", counts["unclear"], "<=", 0)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="families whose name matches")
    parser.add_argument("--adapter", default="*", metavar="PATTERN", help="adapters whose name matches, and 'none'")
    parser.add_argument("--mode", default="*", metavar="PATTERN", help="modes whose name matches")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    modes = [mode for mode in MODES if fnmatchcase(mode, chosen.mode)]
    adapters = [name for name in ("none", *ADAPTERS) if fnmatchcase(name, chosen.adapter)]
    outcomes, not_here = list[Outcome](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(lambda name: fnmatchcase(name, chosen.only), FAMILIES):
            for adapter in adapters:
                found, missing = run(name, adapter, modes, Path(folder))
                outcomes, not_here = outcomes + found, not_here + missing
    show(outcomes, not_here)
    return report(outcomes, not_here).finish()


if __name__ == "__main__":
    sys.exit(main())
