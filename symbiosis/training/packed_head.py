"""The head of a model over the rows of a pass, in pieces whose logits fit into memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.errors import ConfigError
from symbiosis.kernels import with_triton
from symbiosis.kernels.row_invariant import row_invariant, total_of
from symbiosis.offload.logit_check import text_config
from symbiosis.training.captured_pass import PassTables
from symbiosis.training.datum import Datum
from symbiosis.training.logit_pieces import row_pieces, rows_at_once, sequence_pieces
from symbiosis.training.row_losses import losses_and_slopes
from symbiosis.training.run_adapter import RunAdapter

SCALES = "logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping"


class PackedHead:
    """The head of a causal language model, and what the model makes of its product."""

    def __init__(self, model: nn.Module, bitwise: bool = False) -> None:
        self.module, self.is_bitwise = _head_of(model), bitwise
        self.name = next(name for name, module in model.named_modules() if module is self.module)
        self._config = text_config(model)
        self.vocabulary: int = self._config.vocab_size
        self._scales = any(getattr(self._config, name, None) for name in SCALES)
        self._owners: Sequence[RunAdapter] = ()  # of the sequences that it is given
        self._lengths: Sequence[int] = ()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits as the model's own: with `bitwise` rounded where the model rounds."""
        with row_invariant(self.is_bitwise):
            logits: Tensor = self.module(hidden[None])[0]
        config, logits = self._config, logits if self.is_bitwise else logits.float()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        if multiplier := getattr(config, "lm_head_multiplier", None):
            logits = logits * multiplier
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits.float()

    def logits_of(self, hidden: Tensor, owners: Sequence[RunAdapter], lengths: Sequence[int]) -> Tensor:
        """Return the logits of sequences, with what the adapters of their runs do at the head."""
        self._owners, self._lengths = owners, lengths
        try:
            return self.logits(hidden)
        finally:
            self._owners = self._lengths = ()

    def run_layers(self, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
        """Run PEFT's layers at the head on the rows of their runs: a hook."""
        if not any(self.name in adapter.layers for adapter in self._owners):
            return None
        parts, at = [], 0
        for adapter, count in zip(self._owners, self._lengths, strict=True):
            x, own = inputs[0].narrow(1, at, count), y.narrow(1, at, count)
            parts.append(adapter.run(self.name, x, own).to(y.dtype) if self.name in adapter.layers else own)
            at += count
        return torch.cat(parts, 1)

    def compute_tabled(self, hidden: Tensor, tables: PassTables) -> tuple[Tensor, Tensor]:
        """Return log probabilities and losses of the rows, [2, rows], and the gradient of what the head was given."""
        found, gradients = list[Tensor](), list[Tensor]()
        for piece in row_pieces(len(hidden), self.vocabulary, each=2):
            leaf = hidden[piece].requires_grad_(tables.backward)
            with torch.set_grad_enabled(tables.backward):
                logits = self.logits(leaf) if self._scales else self.module(leaf[None])[0]
            values, targets = logits.detach().contiguous(), tables.targets[piece]
            logprobs, totals = head_kernels().find(values, targets)
            losses, slopes = losses_and_slopes(logprobs, tables.kinds[piece], tables.numbers[:, piece])
            found.append(torch.stack([logprobs, losses]))
            if tables.backward:
                head_kernels().differentiate_(values, targets, totals, slopes)
                gradients += torch.autograd.grad(logits, leaf, values)
        return torch.cat(found, 1), torch.cat(gradients) if gradients else hidden


class SequencesAtHead:
    """The head over the sequences of a pass. What was made of a single piece is kept until the backward pass, of others it is computed again."""

    def __init__(self, head: PackedHead, hidden: Tensor, owners: list[RunAdapter], data: list[Datum]) -> None:
        self._head, self._owners, self._data = head, owners, data
        self._pieces = list(sequence_pieces(map(len, data), rows_at_once(head.vocabulary, each=8)))
        self._hidden = hidden.split([sum(len(datum) for datum in data[piece]) for piece in self._pieces])
        self._kept: tuple[Tensor, list[Tensor]] | None = None

    def logprobs(self) -> list[Tensor]:
        """Return the log probabilities of each sequence's targets."""
        found = []
        for piece, hidden in zip(self._pieces, self._hidden, strict=True):
            leaf, made = self._made(hidden, piece)
            found += [each.detach() for each in made]
            self._kept = (leaf, made) if len(self._pieces) == 1 else None
        return found

    def backward(self, wanted: list[Tensor]) -> Tensor:
        """Return the gradient of what the head was given, for these derivatives of the loss by the log probabilities."""
        gradients: list[Tensor] = []
        for piece, hidden in zip(self._pieces, self._hidden, strict=True):
            leaf, made = self._kept or self._made(hidden, piece)
            torch.autograd.backward(made, [slope.to(leaf.device) for slope in wanted[piece]])
            assert leaf.grad is not None
            gradients.append(leaf.grad)
        return torch.cat(gradients)

    @torch.enable_grad()
    def _made(self, hidden: Tensor, piece: slice) -> tuple[Tensor, list[Tensor]]:
        leaf, data = hidden.detach().requires_grad_(), self._data[piece]
        lengths = [len(datum) for datum in data]
        logits, made = self._head.logits_of(leaf, self._owners[piece], lengths), []
        totals = total_of(logits)
        for datum, own, total in zip(data, logits.split(lengths), totals.split(lengths), strict=True):
            targets = datum.targets.to(own.device)
            made.append((own.gather(1, targets.view(len(datum), -1)) - total).view(targets.shape))
        return leaf, made


def head_kernels() -> Any:
    return with_triton("gpu.token_logprobs")


def _head_of(model: nn.Module) -> nn.Module:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise ConfigError(f"{type(model).__name__} is no causal language model: load one with AutoModelForCausalLM")
    return head
