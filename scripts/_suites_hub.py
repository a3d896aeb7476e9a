"""A hub cache of tiny models, built here from configurations, under the names that others' tests ask the hub for."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

COMMIT = "0" * 40
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1024}
GATED = {**HIDDEN, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
EXPERTS = {**GATED, "num_experts_per_tok": 2}
ENCODER = {**HIDDEN, "intermediate_size": 64, "max_position_embeddings": 512}
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 1024, "decoder_start_token_id": 0
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 1024, "n_positions": 512}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# The first that is found in a name, small letters only, decides: a kind of configuration, its values, and the usual class.
KINDS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("opt", "opt", {**HIDDEN, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 512}, "ForCausalLM"),
    ("gptj", "gptj", {**GPT, "rotary_dim": 4}, "ForCausalLM"),
    ("gpt_neox", "gpt_neox", ENCODER, "ForCausalLM"),
    ("gptneox", "gpt_neox", ENCODER, "ForCausalLM"),
    ("gptoss", "gpt_oss", {**EXPERTS, "num_local_experts": 4}, "ForCausalLM"),
    ("gpt2", "gpt2", GPT, "LMHeadModel"),
    ("llama", "llama", GATED, "ForCausalLM"),
    ("bloom", "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 1024}, "ForCausalLM"),
    ("mixtral", "mixtral", {**EXPERTS, "num_local_experts": 4}, "ForCausalLM"),
    ("mistral", "mistral", GATED, "ForCausalLM"),
    ("qwen3moe", "qwen3_moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}, "ForCausalLM"),
    ("qwen3", "qwen3", GATED, "ForCausalLM"),
    ("qwen2", "qwen2", GATED, "ForCausalLM"),
    ("gemma3", "gemma3_text", GATED, "ForCausalLM"),
    ("mt0", "mt5", T5, "ForConditionalGeneration"),
    ("t5", "t5", T5, "ForConditionalGeneration"),
    ("bart", "bart", BART, "ForConditionalGeneration"),
    ("deberta-v2", "deberta-v2", ENCODER, "Model"),
    ("deberta", "deberta", ENCODER, "Model"),
    ("roberta", "roberta", ENCODER, "Model"),
    ("bert", "bert", ENCODER, "Model"),
)  # fmt: skip
NOT_PLAIN = re.compile("llama4|gptq|awq|lora|vl|nemotron|embeddinggemma|gemma4|megatron|gguf")  # not built here


def builder(name: str) -> Callable[[], torch.nn.Module] | None:
    """What builds a tiny model of the architecture that `name` tells, if it is one of the plain ones."""
    small = name.partition("/")[2].lower()
    if NOT_PLAIN.search(small):
        return None
    for part, kind, values, usual in KINDS:
        if part in small:
            return lambda: _built(kind, values, usual, name)
    return None


def _built(kind: str, values: dict[str, Any], usual: str, name: str) -> torch.nn.Module:
    config: PreTrainedConfig = transformers.AutoConfig.for_model(kind, **{**SPECIAL, **values})
    named = re.search(r"(For[A-Z]\w+|LMHeadModel)", name)
    wanted = [f"{_stem(type(config).__name__)}{ending}" for ending in ([named.group(1)] if named else []) + [usual]]
    torch.manual_seed(0)
    return next(getattr(transformers, cls) for cls in wanted if hasattr(transformers, cls))(config)


def _stem(config_class: str) -> str:
    return config_class.removesuffix("Config").removesuffix("Text")


def names_in(folder: Path) -> set[str]:
    """What looks like a hub id in the tests of a folder."""
    found = {
        name for file in folder.glob("*.py") for name in re.findall(r"[\"']([\w-]+/[\w.-]+)[\"']", file.read_text())
    }
    return {name for name in found if builder(name)}


def fill(hub: Path, names: set[str]) -> None:
    """Put a tiny model and a tokenizer under each name, as huggingface_hub keeps what it has fetched."""
    for name in sorted(names):
        home = hub / f"models--{name.replace('/', '--')}"
        snapshot = home / "snapshots" / COMMIT
        if (snapshot / "tokenizer.json").exists():
            continue
        build = builder(name)
        assert build is not None
        snapshot.mkdir(parents=True, exist_ok=True)
        build().save_pretrained(snapshot)
        tokenizer().save_pretrained(snapshot)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(COMMIT)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a few special tokens."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *_bytes()]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def _bytes() -> Iterator[str]:
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
