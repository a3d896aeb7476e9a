"""What tests of `privacy=` have in common."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.protocol import Call
from tests.conftest import tiny_gpt2, tiny_llama

BITS = pytest.mark.parametrize("bits", [8, 16])
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])


TOKENS = 400


def recorded(executor: symbiosis.Executor) -> list[tuple[Call, Tensor | None]]:
    """From now on, what this executor is sent."""
    log: list[tuple[Call, Tensor | None]] = []
    server = executor.server
    arrived = server.dispatch.arrived

    def record(peer: Any, seq: int, call: Call, payload: tuple[Tensor, ...]) -> None:
        log.append((call, payload[0].clone() if payload else None))
        arrived(peer, seq, call, payload)

    server.dispatch.arrived = record  # type: ignore[method-assign]
    return log


def lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))  # type: ignore[arg-type]


def one_step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The logits and every gradient of a step."""
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    return [result.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def trained(model: nn.Module, ids: Tensor, steps: int = 8) -> tuple[list[float], Tensor]:
    model = lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def tampered(executor: symbiosis.Executor, change: Callable[[Tensor], Tensor]) -> None:
    """From now on this executor changes its answers, as an operator could, until its `compute` is put back. On a busy machine it takes turns."""
    slices = executor.server.engine.slices
    compute, compute_turn = slices.compute, slices.compute_turn

    def lie(pieces: Any) -> None:
        compute(pieces)
        for piece in pieces:
            piece.item.work.out.copy_(change(piece.item.work.out))

    def lie_at_last(batch: Any) -> None:
        compute_turn(batch)
        for piece in batch.slices if batch.ends and slices.compute is lie else ():
            piece.item.work.out.copy_(change(piece.item.work.out))

    slices.compute, slices.compute_turn = lie, lie_at_last  # type: ignore[method-assign]
