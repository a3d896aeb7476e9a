"""Models whose attention goes over pages, so that sequences are computed side by side. Before any request is served, it is proved that
each sequence then has the logits that it has alone."""

import inspect
import logging
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.kernels.paged_attention import How
from symbiosis.kernels.row_invariant import row_invariant
from symbiosis.offload.logit_check import PROBE, agree, logits_alone, probe_tokens, text_config
from symbiosis.serving.kv_cache.paged_memory import KvShape
from symbiosis.serving.request import Request
from symbiosis.serving.runner.attention import NAME, Lookup, Tables, forward_pass, masked_windows
from symbiosis.serving.runner.bitwise import make_bitwise
from symbiosis.serving.runner.cuda_graph_runner import CudaGraphRunner, is_for
from symbiosis.serving.runner.model_runner import ModelRunner, ask
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence
from symbiosis.transport.base import Tokens
from symbiosis.transport.cuda.driver import HIGHEST

logger = logging.getLogger("symbiosis")


class CannotBatch(Exception):
    """The reason why sequences of this model must be computed one by one."""


class PagedRunner(ModelRunner):
    """A model that computes sequences side by side. If its attention cannot be replaced, or its results are not proved, `CannotBatch` is
    raised, and the model is as it was.

    Args:
        model: Of transformers, wrapped or not.
        memory: Bytes for keys, values and adapters. Default: a quarter of what is free.
        proves: Whether results are proved at once.
        bitwise: Whether each row is computed by itself.
    """

    batches, whole_prompts = True, False
    may_give_way = True  # whether a step may be given up while it is computed

    def __init__(
        self, model: nn.Module, memory: int | float | None = None, *, proves: bool = True, bitwise: bool = False
    ) -> None:
        self.is_bitwise = bitwise
        if bitwise:
            make_bitwise(model)
        before = getattr(text_config(model), "_attn_implementation", None)
        self._tables = Tables()
        self._sessions = {weight.handle.session for weight in remote_weights(model)}
        self.keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        references = logits_of_probes(model) if proves else []
        try:
            layers = _layers(model)
            super().__init__(model, layers, self._memory_for(model, layers, memory))
            if is_for(self.device, self.dtype):
                self.runner = CudaGraphRunner(model, self.arena, self.keeps_rows, HIGHEST if self._sessions else 0)
            if proves:
                self._prove(references)
            if self.runner is not None:
                self.fetcher = self.runner.find_layers(self._probe, model.get_output_embeddings())  # type: ignore[operator]
        except BaseException as error:
            with suppress(AttributeError, ValueError):
                model.set_attn_implementation(before)  # type: ignore[operator]
            if isinstance(error, (CannotBatch, SymbiosisError)) or not isinstance(error, Exception):
                raise
            raise CannotBatch(f"with another attention it raises {type(error).__name__} ({error})") from error
        self.longest = min(self.longest, _same_positions(self.config))
        if (
            self.runner is None and self.may_give_way
        ):  # a model of few layers would ask too seldom before its attention alone
            for module in _products(model):
                module.register_forward_pre_hook(ask)

    def _memory_for(
        self, model: nn.Module, layers: tuple[KvShape, ...], memory: int | float | None
    ) -> int | float | None:
        """Return how much memory to take for such layers."""
        return memory

    @torch.inference_mode()
    def logits(self, step: SchedulerOutput, rows: Tensor) -> Tensor:
        with row_invariant(self.is_bitwise):
            return self._logits(step, rows)

    def _logits(self, step: SchedulerOutput, rows: Tensor) -> Tensor:
        for mapped in [session.mapped for session in self._sessions if session.mapped is not None]:
            # training beside it gives way, though a step may have more rows than a decoding client's
            mapped.made(Tokens.MANY)
        if self.runner is not None:
            self.runner.make_room(step)
        for tell in self.before:
            tell(step, rows)
        if self.runner is not None:
            self.runner.remember = self.remember
            return self.runner.logits(step, rows, lambda: self.inputs(step))  # type: ignore[no-any-return]
        words, rows = self.inputs(step), rows.to(self.device)
        if self.keeps_rows:
            words["logits_to_keep"] = rows
        lookup = Lookup(self.arena, step, self._tables, self.remember)
        with forward_pass(lookup.attend, partial(self.gives_way, step) if self.may_give_way else None):
            logits: Tensor = self.model(**words, use_cache=False).logits[0]
        return (logits if self.keeps_rows else logits[rows]).float()

    def _probe(self) -> None:
        """Compute something, to find out which layers there are."""
        tokens = probe_tokens(self.model)[1]
        sequence = Sequence(Request(id=0, prompt=tuple(tokens)), 0, tokens, None, 0.0)
        self.blocks.grow(sequence, len(tokens))
        self.forward(SchedulerOutput((ScheduledRequest(sequence, 0, len(tokens), 0, True),)))
        self.release(sequence)

    def _prove(self, references: list[Tensor]) -> None:
        """Check that two sequences, computed in pieces and side by side, have the logits that each has alone."""
        (long, short), piece = PROBE
        a, b = (Sequence(Request(id=0, prompt=tuple(of)), 0, of, None, 0.0) for of in probe_tokens(self.model))
        for sequence in (a, b):
            if not self.blocks.grow(sequence, len(sequence.tokens)):
                raise ConfigError("there is not memory for two short sequences: give the server more")
        first = SchedulerOutput(
            (ScheduledRequest(a, 0, piece, 0, True), ScheduledRequest(b, piece, short - 1, 0, True))
        )
        second = SchedulerOutput(
            (ScheduledRequest(b, 0, 1, short - 1, True), ScheduledRequest(a, 1, long - piece, piece, True))
        )
        of_a, of_b = references
        for step, expected in (
            (first, (of_a[piece - 1], of_b[short - 2])),
            (second, (of_b[short - 1], of_a[long - 1])),
        ):
            for mine, alone in zip(self.forward(step), expected, strict=True):
                alone = alone.to(mine.device)
                if not agree(mine, alone, self.dtype):
                    off = float((mine - alone).abs().max() / alone.abs().max())
                    raise CannotBatch(f"its logits in a batch are off those it has alone by {off:.1e} of the largest")
        for sequence in (a, b):
            self.release(sequence)


def _products(model: nn.Module) -> list[nn.Module]:
    """Return the modules that multiply by weights of their own."""
    alone = [
        each
        for each in model.modules()
        if not any(True for _ in each.children()) and not isinstance(each, nn.Embedding)
    ]
    return [each for each in alone if any(weight.dim() > 1 for weight in each.parameters(recurse=False))]


def _layers(model: nn.Module) -> tuple[KvShape, ...]:
    """Replace the attention by ours, and find out what each layer remembers of a token."""
    try:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    except (AttributeError, ValueError, ImportError) as error:
        raise CannotBatch(f"it takes no other attention ({error})") from None
    seen = dict[int, KvShape]()

    def look(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in seen:
            raise CannotBatch(f"{type(module).__name__} does not tell which layer it is")
        seen[layer] = KvShape(k.shape[1], k.shape[3], v.shape[3], how.window)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    with forward_pass(look):
        logits_alone(model, probe_tokens(model)[0])
    count = text_config(model).num_hidden_layers
    if sorted(seen) != list(range(count)):
        raise CannotBatch(f"{len(seen)} of its {count} layers attend by transformers' attention interface")
    _check_windows(getattr(text_config(model), "layer_types", None) or (), seen, masked_windows())
    return tuple(seen[layer] for layer in range(count))


def _check_windows(kinds: Collection[str], seen: dict[int, KvShape], meant: frozenset[int]) -> None:
    """Check that each layer tells its window, because the probe would not show one that is longer than itself. `meant` are the masks
    that the model asked for; some may be for kinds of layers that it does not have."""
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise CannotBatch(f"its layer {layer} has {kind}")
        if kind == "sliding_attention" and seen[layer].window is None:
            raise CannotBatch(f"its layer {layer} does not tell its sliding window")
    if not kinds and (unsaid := meant - {shape.window for shape in seen.values()}):
        raise CannotBatch(f"it masks what lies {min(unsaid)} tokens back, and no layer tells that window")


def _same_positions(config: Any) -> int:
    """Return up to how many tokens a token's position is encoded the same way, whatever else is computed with it."""
    told = getattr(config, "rope_parameters", None) or {}
    kinds = [told, *(kind for kind in told.values() if isinstance(kind, dict))]
    if all(kind.get("rope_type") != "longrope" for kind in kinds):
        return 1 << 30
    longest: int = told.get("original_max_position_embeddings") or config.original_max_position_embeddings
    logger.warning(
        "texts have at most %d tokens: longer ones change how the positions of all others in a batch are encoded (longrope)",
        longest,
    )
    return longest


def logits_of_probes(model: nn.Module) -> list[Tensor]:
    """Return what the model's own attention makes of the probes."""
    try:
        return [logits_alone(model, tokens) for tokens in probe_tokens(model)]
    except SymbiosisError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be served, as it makes no logits of plain tokens: {error}"
        ) from error
