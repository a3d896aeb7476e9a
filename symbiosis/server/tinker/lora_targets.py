"""Which layers Tinker's settings of LoRA mean in a model."""

from typing import Any

import torch

from symbiosis.server.tinker.tinker_messages import LoraSettings, TinkerRefusal

ALPHA = 32  # as Tinker has it, whatever the rank
ATTENTION = ("attn", "attention")


def lora_config(settings: LoraSettings, config: Any) -> Any:
    """Return PEFT's configuration of an adapter with these settings, for a base with this one."""
    from peft import LoraConfig

    if not settings.train_mlp and not settings.train_attn:
        raise TinkerRefusal("train_attn or train_mlp: this server trains no adapter at the output layer alone")
    if not 1 <= settings.rank <= 1024:
        raise TinkerRefusal(f"a rank is from 1 to 1024, and not {settings.rank}")
    wanted = [
        name
        for name, of_attention in linear_layers(config)
        if (settings.train_attn if of_attention else settings.train_mlp)
    ]
    if not wanted:
        raise TinkerRefusal("the model has no such layers")
    return LoraConfig(r=settings.rank, lora_alpha=ALPHA, target_modules=sorted(set(wanted)), task_type="CAUSAL_LM")


def linear_layers(config: Any) -> list[tuple[str, bool]]:
    """Return the model's linear layers but the last one, each by its name within its parent, and whether it is one of attention.

    >>> from transformers import LlamaConfig
    >>> linear_layers(LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=8))[0]
    ('self_attn.q_proj', True)
    """
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
            parent = name.split(".")[-2] if "." in name else ""
            found.append((".".join(name.split(".")[-2:]), any(each in parent.lower() for each in ATTENTION)))
    return found
