"""Makes the demo's base: the bundled model, enlarged until sharing it can be seen in memory, and still writing the same text.

What is added takes part in every product and adds nothing to the result: the hidden state has zeros behind the old one, and the new heads,
units of the MLPs and layers are read out with weights of zero.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from symbiosis.executor.model.load import DEMO_MODEL, load_model

HIDDEN, UNITS, HEADS = 1152, 4096, 36
READ_OUT = ("o_proj.weight", "down_proj.weight")  # of a layer's new parts: zero


def enlarge(folder: Path, layers: int) -> None:
    """Save the enlarged model, of 68 MiB a layer, with its tokenizer."""
    old: Any = load_model("demo")
    model: Any = LlamaForCausalLM(enlarged_config(old.config, layers))
    seed = torch.Generator().manual_seed(0)
    norm = (old.config.hidden_size / HIDDEN) ** 0.5  # a mean over more values is less by this, squared
    state = old.state_dict()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "lm_head.weight", *READ_OUT)):
                weight.zero_()
            elif not name.endswith("norm.weight"):
                weight.normal_(0.0, 0.02, generator=seed)
            if name in state:
                put(weight, state[name] * (norm if name.endswith("norm.weight") else 1.0))
    model.generation_config = old.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)


def enlarged_config(old: Any, layers: int) -> LlamaConfig:
    """Return the configuration of the enlarged model, which has at least the old one's layers."""
    sharing = old.num_attention_heads // old.num_key_value_heads  # heads of queries to one of keys: as before
    larger = {
        "hidden_size": HIDDEN,
        "intermediate_size": UNITS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // sharing,
        "num_hidden_layers": max(layers, old.num_hidden_layers),
        "rms_norm_eps": old.rms_norm_eps * old.hidden_size / HIDDEN,
    }
    return LlamaConfig(**{**old.to_dict(), **larger})


def put(weight: Tensor, old: Tensor) -> None:
    """Put an old weight into the corner of the new one."""
    weight[tuple(slice(size) for size in old.shape)] = old
