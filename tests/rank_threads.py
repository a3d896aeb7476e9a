"""Ranks that are threads of one process, and small models of several families."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
OF_GPT2: dict[str, Any] = {
    "vocab_size": 257, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_inner": 100, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# the vocabulary is odd, so that no number of ranks divides it
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 8}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "mixtral": ("MixtralConfig", LOCAL_EXPERTS),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, "moe_intermediate_size": 36, "decoder_sparse_step": 1, "norm_topk_prob": True, **EXPERTS}),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", OF_GPT2),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], **LOCAL_EXPERTS}),
}  # fmt: skip


def family(name: str, **changes: Any) -> nn.Module:
    """Return a small model whose biases, norms and sinks do something."""
    config, own = FAMILIES[name]
    sizes = own if name == "gpt2" else SIZES | own
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes | changes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        made, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.requires_grad_(False)


class ThreadGroup:
    """One rank's end."""

    def __init__(self, rank: int, given: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank, self._given, self._barrier = rank, given, barrier

    def gather(self, x: Tensor) -> Tensor:
        self._given[self._rank] = x
        self._barrier.wait()
        made = torch.stack([each for each in self._given if each is not None])
        self._barrier.wait()
        return made

    def sum(self, x: Tensor) -> Tensor:
        return self.gather(x).sum(0)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.gather(x)[0])

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(ranks: int, run: Callable[[int, ThreadGroup], Any]) -> list[Any]:
    """Return what `run` returns on each rank."""
    given: list[Tensor | None] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=30)

    def of(rank: int) -> Any:
        try:
            with torch.inference_mode():
                return run(rank, ThreadGroup(rank, given, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of, range(ranks)))
