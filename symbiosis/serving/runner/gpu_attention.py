"""Attention of a step on a GPU. The kernels read rows and pages from tables that stay where they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from symbiosis.kernels import with_triton
from symbiosis.kernels.paged_attention import How
from symbiosis.serving.kv_cache.paged_memory import PagedMemory
from symbiosis.serving.runner.step_tables import Rows, Slots
from symbiosis.serving.scheduler.scheduler_output import BLOCK


@dataclass(slots=True, frozen=True)
class Extent:
    """How much of the tables a step uses: all of a graph's launches have these sizes."""

    rows: int
    singles: int  # sequences with one row
    blocks: int  # of queries of longer segments
    kept: int  # rows whose logits are wanted; 0: all


@dataclass(slots=True, frozen=True)
class TableAttention:
    """Computes attention in a step's layers, by what its tables say."""

    arena: PagedMemory
    slots: Slots
    rows: Rows
    shape: Extent
    remember: Callable[[int, Tensor, Tensor], None] | None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attend in one layer. Each of q, k and v is [1, heads, rows, size]; the result is [1, rows, heads, size]."""
        layer, kernels = module.layer_idx, with_triton("gpu.paged_attention")
        words, shape = self.rows.device, self.shape
        assert isinstance(layer, int)
        if self.remember is not None:
            self.remember(layer, key, value)
        memory = self._memory(layer)
        kernels.store(memory, key[0], value[0], words["slots"][: shape.rows], words["positions"][: shape.rows])
        result = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        if shape.singles:
            kernels.decode(memory, how, query[0], words["singles"][: shape.singles], result[0])
        if shape.blocks:
            kernels.prefill(memory, how, query[0], words["blocks"][: shape.blocks], result[0])
        return result

    def _memory(self, layer: int) -> Any:
        of, arena = self.arena.layers[layer], self.arena
        return with_triton("gpu.paged_attention").Memory(
            arena.flat,
            self.slots.pages,
            BLOCK,
            arena.page_elements,
            arena.values_at(layer),
            of.heads,
            of.key,
            of.value,
            layer,
        )
