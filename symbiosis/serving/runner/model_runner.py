"""A causal language model made ready to be served, whatever model it is. It runs the steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.base.memory import free_memory, whole_memory
from symbiosis.errors import SymbiosisError
from symbiosis.offload.logit_check import place_of, text_config
from symbiosis.serving.kv_cache.block_manager import BlockManager
from symbiosis.serving.kv_cache.paged_memory import KvShape, PagedMemory
from symbiosis.serving.runner.attention import this_pass
from symbiosis.serving.scheduler.scheduler_output import BLOCK, SchedulerOutput, Sequence
from symbiosis.serving.serve_options import SHARE


class GaveWay(Exception):
    """A step was not computed to its end, because something else comes first. Its rows can be computed again."""


class RanksLost(SymbiosisError):
    """Other ranks of a divided model have died or hang, and what was being computed is void. `ModelRunner.restart` starts them again."""


def ask(*_: object) -> None:
    """Raise `GaveWay`, if so. It is a hook, and a plain function, so that copies of a model copy nothing of the server."""
    if this_pass.gives_way is not None and this_pass.gives_way():
        raise GaveWay


class ModelRunner(ABC):
    """Runs steps: `forward` returns how likely each token is to come next. Nothing else may use its model.

    `before` are called with each step, and with the rows whose logits are kept, before it runs. `embed` may return a step's input rows
    where they are not those of its tokens. `remember` may change the keys and values of a layer, [1, heads, rows, size], before they are
    kept. On a CPU `gives_way` is asked before each product by weights whether the step is given up: then `GaveWay` is raised.
    """

    batches: bool  # whether a step may have segments of several sequences
    whole_prompts: bool  # whether a prompt must be computed in one piece
    keeps_rows: bool = False  # whether its last layer is given the rows only whose logits are kept
    runner: Any = None  # of a GPU's kernels: `symbiosis.serving.runner`
    fetcher: Any = None
    misplaced: dict[str, str] | None = None  # the layers at which no adapter can act, and why, if that is known
    # of a model that is divided over ranks: gives each its piece of an adapter's contents, and returns this one's
    divide_adapter: Callable[[Any], Any] | None = None

    def __init__(self, model: nn.Module, layers: tuple[KvShape, ...], memory: int | float | None) -> None:
        self.model, self.config = model, text_config(model)
        self.whole = model  # as adapters know it, where `model` is a part of it
        self.before: list[Callable[[SchedulerOutput, Tensor], None]] = []
        self.embed: Callable[[SchedulerOutput, Tensor], Tensor | None] | None = None
        self.remember: Callable[[int, Tensor, Tensor], None] | None = None
        self.gives_way: Callable[[SchedulerOutput], bool] = lambda step: False
        self.device, self.dtype = place_of(model)
        self.vocabulary: int = self.config.vocab_size
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
        self.width: int = getattr(embeddings, "embedding_dim", None) or self.config.hidden_size  # of hidden states
        self.longest: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.ends = _ends(model)
        self.arena = PagedMemory(layers, bytes_of(memory, self.device), self.dtype, self.device)
        self.blocks = BlockManager(self.arena.pool, len(layers), self.batches, [layer.window for layer in layers])

    def forward(self, step: SchedulerOutput) -> Tensor:
        """Return the logits of the rows that choose tokens, float32 [such rows, vocabulary]."""
        return self.logits(step, torch.tensor(step.choices, dtype=torch.long))

    @abstractmethod
    def logits(self, step: SchedulerOutput, rows: Tensor) -> Tensor:
        """Return the logits of these rows of the step, float32 [rows, vocabulary]."""

    def serve(self, sequences: int, rows: int, compiles: bool = False) -> None:
        """Prepare for steps of up to so many sequences and rows."""
        if self.runner is not None:
            blocks = min(self.longest // BLOCK + 1, self.arena.pool.total // self.blocks.layers)
            self.runner.serve(sequences, rows, blocks)
            if compiles:
                self.runner.compile()

    @property
    def whole_kv(self) -> tuple[KvShape, ...]:
        """What each layer of the whole model remembers of a token."""
        return self.arena.layers

    def check(self) -> None:  # noqa: B027  a model that is not divided has no other ranks
        """Raise `RanksLost` if what was computed last is void."""

    def restart(self) -> None:  # noqa: B027
        """Start the other ranks again. No sequence may have anything computed."""

    def close(self) -> None:  # noqa: B027
        """End the other ranks."""

    def release(self, sequence: Sequence) -> None:
        """Free what was computed of a sequence."""
        if self.runner is not None:
            self.runner.forget(sequence)
        self.blocks.release(sequence)

    def inputs(self, step: SchedulerOutput) -> dict[str, Any]:
        """Return what the model is called with."""
        tokens = [token for each in step.segments for token in each.tokens]
        ids = torch.tensor([tokens], device=self.device)
        if (fed := step.fed) is not None:
            ids[0, fed.rows] = fed.chosen[fed.sources].clamp(min=0)
        positions = torch.cat([torch.arange(segment.position, segment.end) for segment in step.segments])
        embedded = None if self.embed is None else self.embed(step, ids)
        words = {"input_ids": ids} if embedded is None else {"inputs_embeds": embedded}
        return {**words, "position_ids": positions.unsqueeze(0).to(self.device)}


def _ends(model: nn.Module) -> frozenset[int]:
    """Return the tokens that end a text."""
    for config in (getattr(model, "generation_config", None), model.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()


def bytes_of(memory: int | float | None, device: torch.device) -> int:
    """Return how many bytes that is: a number below 1 is a share of what is free, and None a quarter of it."""
    if memory is not None and memory >= 1:
        return int(memory)
    free = free_memory() if device.type != "cuda" else torch.cuda.mem_get_info(device)[0]
    whole = whole_memory() if device.type != "cuda" else free
    return int((SHARE if memory is None else memory) * min(free, whole))
