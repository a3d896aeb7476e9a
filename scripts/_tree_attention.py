"""AsyncGRPO of TRL attends by a kernel for GPUs, and asks which GPU there is. Here is the same attention in torch, so that it runs on a CPU;
nothing else of TRL is touched."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, softmax_scale: float | None, **_: Any
) -> Tensor:  # fmt: skip
    """Attention of segments [tokens, heads, size], causal from the end of each."""
    made = []
    for (a, b), (c, d) in zip(
        zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True),
        zip(cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True),
        strict=True,
    ):
        rows, columns = b - a, d - c
        mask = torch.arange(columns) <= torch.arange(columns - rows, columns)[:, None]
        heads = [each.transpose(0, 1) for each in (q[a:b], k[c:d], v[c:d])]
        made.append(
            scaled_dot_product_attention(*heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(made)


def on_a_cpu(replace: Callable[..., Any]) -> None:
    """Have TRL attend by torch. `replace(where, value)` sets a name."""
    replace("trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None)
    replace("trl.experimental.async_grpo.packing._flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen))
