"""Runs the part of a model that one rank has."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from symbiosis.client.from_executor import built
from symbiosis.errors import ConfigError
from symbiosis.offload.logit_check import place_of, text_config
from symbiosis.serving.kv_cache.paged_memory import KvShape, page_elements
from symbiosis.serving.lora.trial import misplaced
from symbiosis.serving.runner.attention import NAME
from symbiosis.serving.runner.model_runner import bytes_of
from symbiosis.serving.runner.paged_runner import CannotBatch, PagedRunner
from symbiosis.serving.scheduler.scheduler_output import SchedulerOutput
from symbiosis.serving.tensor_parallel.collectives import Collectives
from symbiosis.serving.tensor_parallel.divided_model import cut, structure_of
from symbiosis.serving.tensor_parallel.division import INSTEAD, Division
from symbiosis.serving.tensor_parallel.rank_messages import RankOrder


def whole_model(endpoint: str, wait: float | None) -> nn.Module:
    """Return the model of an executor, whose weights this process maps."""
    return built(endpoint, {"wait": wait}, device="cpu", priority="decode").eval()


class RankRunner(PagedRunner):
    """The runner of one rank. Until ranks are connected, what it computes is of the right shape only.

    All ranks are prepared for their steps before they meet: one that is not would run other rows than the rest, which pad theirs to those
    of a graph, and NCCL waits for ever if ranks add up different numbers of rows.

    Args:
        whole: The model, whose weights are mapped; it stays as it is.
        order: What this rank was told.
    """

    may_give_way = False  # all ranks compute the same step to its end

    def __init__(self, whole: nn.Module, order: RankOrder) -> None:
        self.division = Division.of(whole, order.ranks)
        self.collectives = collectives = Collectives(order.rank, order.ranks)
        self._pages = order.pages
        part = structure_of(whole)
        try:
            part.set_attn_implementation(NAME)  # type: ignore[operator]
            cut(part, self.division, collectives, torch.device(order.device))
            super().__init__(part, order.memory, proves=False)
            self.misplaced = misplaced(self)
            super().serve(order.max_batch, order.max_batch + order.prefill_tokens, order.compiles)
        except (CannotBatch, AttributeError, ValueError) as why:
            if isinstance(why, ConfigError):
                raise
            raise ConfigError(
                f"{type(whole).__name__} cannot be divided over {collectives.ranks} ranks: {why}. {INSTEAD}"
            ) from why
        self.whole = whole

    def serve(self, sequences: int, rows: int, compiles: bool = False) -> None:
        """Nothing is left to prepare."""

    def _memory_for(self, model: nn.Module, layers: tuple[KvShape, ...], memory: int | float | None) -> int:
        """Return how much memory to take. What is free on a CPU is that of all ranks."""
        device, dtype = place_of(model)
        nbytes = page_elements(layers) * dtype.itemsize
        if self._pages is not None:
            return self._pages * nbytes
        is_share = device.type == "cpu" and (memory is None or memory < 1)
        return bytes_of(memory, device) // (self.collectives.ranks if is_share else 1) // nbytes * nbytes

    def logits(self, step: SchedulerOutput, rows: Tensor) -> Tensor:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return super().logits(step, rows)

    @property
    def whole_kv(self) -> tuple[KvShape, ...]:
        config = text_config(self.whole)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return tuple(replace(layer, heads=heads) for layer in self.arena.layers)

    @property
    def weight_bytes(self) -> int:
        """The bytes of this rank's part of the model."""
        return sum({p.data_ptr(): p.nbytes for p in self.model.parameters()}.values())

    def broadcast(self, tokens: Tensor) -> None:
        """Give all ranks the tokens that the first one has."""
        self.collectives.broadcast(tokens)
