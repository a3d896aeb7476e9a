"""Runs the steps of a paged model on a GPU. Once the engine serves, there is one CUDA graph for each bucket of rows, whatever the
adapters.

Some steps cannot be graphs, and run as they are: those with adapters that PEFT computes, with virtual tokens, with log probabilities of
whole prompts, or with texts of which vectors are made.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.client.capture import Captured
from symbiosis.errors import CaptureError
from symbiosis.kernels import with_triton
from symbiosis.serving.kv_cache.paged_memory import PagedMemory
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.lora.gpu_lora import GpuLora, Run
from symbiosis.serving.lora.gpu_staging import Fetcher
from symbiosis.serving.runner.attention import forward_pass
from symbiosis.serving.runner.compiled_layers import compile_layers
from symbiosis.serving.runner.gpu_attention import Extent, TableAttention
from symbiosis.serving.runner.shared_inputs import find_groups
from symbiosis.serving.runner.step_tables import Rows, Slots
from symbiosis.serving.scheduler.scheduler_output import SchedulerOutput
from symbiosis.serving.scheduler.scheduler_output import Sequence as OneSequence

logger = logging.getLogger("symbiosis")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_GRAPHS = 64
FINEST = 32  # rows; steps of more are rounded up to a power of two, or to one and a half times a power of two


def is_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device and dtype."""
    return device.type == "cuda" and dtype in DTYPES and with_triton("gpu.paged_attention") is not None


def bucket(rows: int) -> int:
    """Return how many rows the graph has that runs so many.

    >>> [bucket(rows) for rows in (1, 3, 32, 33, 70, 100)]
    [1, 4, 32, 48, 96, 128]
    """
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power > FINEST and rows <= power * 3 // 4 else power


class CudaGraphRunner:
    """Runs the steps of one model, in one thread."""

    def __init__(self, model: nn.Module, arena: PagedMemory, keeps_rows: bool, priority: int = 0) -> None:
        self._model, self._arena, self._keeps_rows, self._priority = model, arena, keeps_rows, priority
        self._device = arena.flat.device
        self._attention = with_triton("gpu.paged_attention")
        self._slots = Slots(8, len(arena.layers), self._device)
        self._rows = self._new_rows(64, 8)
        self.adapting: GpuLora | None = None
        self.remember: Callable[[int, Tensor, Tensor], None] | None = None
        self.is_plain = True  # whether this step needs the kernels only
        self.is_watched = False  # whether hooks look at what this step computes
        self._state = 0  # tells graphs apart
        self._captured: Any = None

    def find_layers(self, run: Callable[[], object], head: Any) -> Fetcher:
        """Find the layers on which adapters can act, by running `run`, which computes something. To be called once."""
        groups = find_groups(self._model, run, head)
        fetcher = Fetcher(self._arena, groups)
        page, dtype = self._arena.page_elements, self._arena.flat.dtype
        self.adapting = GpuLora(groups, self._rows, page, dtype, fetcher.come, self._priority)
        return fetcher

    def compile(self, backend: str = "inductor") -> None:
        """Let the model's layers be compiled, each when it first runs."""
        assert self.adapting is not None
        self.adapting.put_everywhere()
        count = compile_layers(self._model, len(self._arena.layers), backend)
        logger.info("%d layers are compiled", count)

    def add(self, adapter: LoadedAdapter) -> None:
        """Prepare the layers on which an adapter acts."""
        assert self.adapting is not None
        self.adapting.add(adapter)

    def begin(self, is_plain: bool, runs: Sequence[Run], kept_runs: Sequence[Run]) -> None:
        """Say which adapters a step's rows have, and which those of them whose logits are kept."""
        self.is_plain = is_plain
        if self.adapting is not None:
            self.adapting.begin(runs, kept_runs)

    def serve(self, sequences: int, rows: int, blocks: int) -> None:
        """Capture steps from now on, which have up to so many sequences and rows, and up to so many blocks of each sequence."""
        self._resize(rows, sequences)
        self._slots.reserve(sequences, blocks)
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Capture steps anew."""
        self._captured = (
            Captured(self._logits, MOST_GRAPHS, draws=False) if self._device.type == "cuda" else self._logits
        )

    def make_room(self, step: SchedulerOutput) -> None:
        """Make room for a step. To be called before anything else about it."""
        self._resize(step.rows, len(step.segments))

    def forget(self, sequence: OneSequence) -> None:
        """Free the slot of a sequence."""
        self._slots.forget(sequence)

    def logits(self, step: SchedulerOutput, kept: Tensor, inputs: Callable[[], dict[str, Any]]) -> Tensor:
        """Return the logits of the kept rows. `inputs` returns what the model is called with if the step is no graph."""
        must_be = not self.is_plain or self.is_watched or len(kept) > self._rows.sequences
        is_eager = self._captured is None or must_be
        shape = Extent(step.rows, *self._counts(step), 0) if is_eager else self._shape(step, kept)
        self._fill(step, kept, shape)
        if is_eager:
            with torch.compiler.set_stance("force_eager"):  # compiled code does not see hooks
                return self._run(shape, inputs(), kept.to(self._device))
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                logits: Tensor = self._captured(shape.rows, shape.singles, shape.blocks, shape.kept, self._key())
        except CaptureError as error:
            logger.warning("steps run without CUDA graphs: %s", error)
            self._captured = self._logits
            logits = self._logits(shape.rows, shape.singles, shape.blocks, shape.kept, self._key())
        return logits[: len(kept)]

    def _fill(self, step: SchedulerOutput, kept: Tensor, shape: Extent) -> None:
        """Fill in the tables of a step, and copy them to the device."""
        self._rows.fill(step, self._slots, kept)
        if self.adapting is not None:
            self.adapting.fill(singly=not shape.blocks)
            self.adapting.upload()
        self._rows.upload(step)

    def _shape(self, step: SchedulerOutput, kept: Tensor) -> Extent:
        singles, blocks = self._counts(step)
        rows = min(bucket(step.rows), self._rows.rows)
        if not blocks and kept.tolist() == list(range(step.rows)):
            return Extent(rows, rows, 0, 0)
        return Extent(rows, self._rows.sequences, self._rows.blocks_of(rows), self._rows.sequences)

    def _counts(self, step: SchedulerOutput) -> tuple[int, int]:
        longer = [segment.rows for segment in step.segments if segment.rows > 1]
        return len(step.segments) - len(longer), sum(-(-rows // self._attention.QUERIES) for rows in longer)

    def _key(self) -> int:
        """Return what tells graphs of the same shape apart: which tensors there are, and on which layers adapters act in this step."""
        adapting = self.adapting
        acting = adapting.state << 1 | adapting.is_wide if adapting and adapting.acts else 0
        return (self._state + self._slots.moved) << 32 | acting

    def _logits(self, rows: int, singles: int, blocks: int, kept: int, key: int) -> Tensor:
        """Compute the step that the tables describe. This is captured: all that changes from step to step lies in the tables."""
        words = self._rows.device
        inputs = {
            name: words[at][:rows].long().unsqueeze(0)
            for name, at in (("input_ids", "ids"), ("position_ids", "positions"))
        }
        return self._run(Extent(rows, singles, blocks, kept), inputs, words["kept"][:kept].long() if kept else None)

    def _run(self, shape: Extent, inputs: dict[str, Any], kept: Tensor | None) -> Tensor:
        if kept is not None and self._keeps_rows:
            inputs["logits_to_keep"] = kept
        if self.adapting is not None:
            self.adapting.begin_pass()
        attention = TableAttention(self._arena, self._slots, self._rows, shape, self.remember)
        with forward_pass(attention.attend):
            logits: Tensor = self._model(**inputs, use_cache=False).logits[0]
        return (logits if kept is None or self._keeps_rows else logits[kept]).float()

    def _resize(self, rows: int, sequences: int) -> None:
        if rows <= self._rows.rows and sequences <= self._rows.sequences:
            return
        self._rows = self._new_rows(max(bucket(rows), self._rows.rows), max(sequences, self._rows.sequences))
        self._state += 1
        if self.adapting is not None:
            self.adapting.resize(self._rows)

    def _new_rows(self, rows: int, sequences: int) -> Rows:
        return Rows(
            rows, bucket(sequences), self._attention.QUERIES, with_triton("gpu.adapter_rows").TILE, self._device
        )
