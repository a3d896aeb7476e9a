"""Cross entropy of a frozen head's logits, some rows at a time. Gradients are found with the loss, where the logits still exist: so there
are two products with the head, and no second pass over the rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.training.logit_pieces import row_pieces


def loss_in_pieces(
    hidden: Tensor,
    target: Tensor,
    head: Callable[[Tensor], Tensor],
    changes: Sequence[Callable[[Tensor], Tensor]],
    vocabulary: int,
    ignore_index: int = -100,
) -> Tensor:
    """Return the loss of each row of `hidden` [T, H], zero where the target is to be ignored. `head` is a product and no more; `changes` are
    what comes between it and the loss."""
    target = target.to(hidden.device)
    return _LossInPieces.apply(hidden, target, head, _without_cast(changes), vocabulary, ignore_index)  # type: ignore[no-any-return, no-untyped-call]


def _without_cast(changes: Sequence[Callable[[Tensor], Tensor]]) -> Sequence[Callable[[Tensor], Tensor]]:
    """Leave out a cast to float32 at the end, which the loss makes by itself."""
    return changes[:-1] if changes and getattr(changes[-1], "function", None) is Tensor.float else changes


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        target: Tensor,
        head: Callable[[Tensor], Tensor],
        changes: Sequence[Callable[[Tensor], Tensor]],
        vocabulary: int,
        ignore_index: int,
    ) -> Tensor:
        losses = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        dh_TH = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        kept = target != ignore_index
        target = torch.where(kept, target, 0)[:, None]
        for piece in row_pieces(len(hidden), vocabulary, each=4):
            leaf = hidden[piece].detach()
            with torch.set_grad_enabled(dh_TH is not None):
                leaf.requires_grad_(dh_TH is not None)
                product = logits = head(leaf)
                for change in changes:
                    logits = change(logits)
            logp = F.log_softmax(logits.detach(), -1, dtype=losses.dtype)
            of_target = logp.gather(1, target[piece])
            losses[piece] = torch.where(kept[piece], -of_target[:, 0], 0.0)
            if dh_TH is not None:
                dz = torch.empty_like(logits) if changes else product.detach()  # no product needs its result
                torch.exp(logp, out=dz).scatter_(1, target[piece], torch.expm1(of_target).to(dz.dtype))
                del logp
                [dh] = torch.autograd.grad(logits, leaf, dz)
                torch.mul(dh, kept[piece, None], out=dh_TH[piece])
            del product, logits
        if dh_TH is not None:
            ctx.save_for_backward(dh_TH)
        return losses

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients: symbiosis.unfuse(model) first")
        [dh_TH] = ctx.saved_tensors
        return torch.mul(dh_TH, d_losses[:, None], out=torch.empty_like(dh_TH)), None, None, None, None, None
