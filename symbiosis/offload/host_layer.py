"""What one layer keeps of a context in the host's memory, and attention over it. The CPUs compute few rows, where keys and values lie.
Many rows are computed on their own device, to which keys and values come in pieces."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from symbiosis.errors import CaptureError, ConfigError
from symbiosis.kernels.attention_pieces import JoinedPieces
from symbiosis.kernels.paged_attention import How, PageLayout, attend_within, compiled
from symbiosis.offload.copies import AllCopies, Copies
from symbiosis.offload.host_blocks import HostSequence, TokenShape
from symbiosis.offload.host_memory import HostMemory
from symbiosis.offload.host_rows import HostRows
from symbiosis.offload.masks import Mask, Masks

FEW_ROWS = 8  # that the CPUs compute: for more, moving keys and values takes no longer than looking at them
SLACK = 256  # tokens beyond a window that are kept at least, for `crop`


class HostLayer(DynamicLayer):
    """Adds what is new to the host's memory, and hands attention a `HostRows` for keys and for values."""

    def __init__(
        self, memory: HostMemory, masks: Masks, copies: AllCopies, threads: int, window: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._masks, self._all_copies = memory, masks, copies
        self._threads, self._window = threads, window
        self.is_sliding = window is not None
        self._sequences: list[HostSequence] = []
        self._waiting: list[Tensor] = []  # keys and values of few rows, on their way from a GPU
        self._table: tuple[list[list[int]], Tensor] | None = None
        self._copies: Copies | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        sequences, heads, _, size = key_states.shape
        self.shape = TokenShape(heads, size, value_states.shape[-1], key_states.dtype)
        self._memory.pinned |= key_states.device.type == "cuda"
        self._sequences = [HostSequence(self.shape, self._memory) for _ in range(sequences)]
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigError("keys and values in the host's memory have no gradients: use torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        shape = TokenShape(key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype)
        if shape != self.shape or len(key_states) != len(self._sequences):
            raise ConfigError(
                f"a batch of {len(key_states)} with {shape} cannot be added to a cache that holds {len(self._sequences)} with {self.shape}: "
                "make another by symbiosis.offload_cache"
            )
        for sequence in self._sequences:
            sequence.forget_before(self._shown_from)
        self._masks.begin(self)
        self._keep(key_states.detach(), value_states.detach())
        size = len(self._sequences), shape.heads, self._kept
        return (
            HostRows((*size, shape.key), key_states.detach(), self),
            HostRows((*size, shape.value), value_states.detach(), self),
        )

    def _keep(self, keys: Tensor, values: Tensor) -> None:
        rows = keys.shape[2]
        if keys.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("keys and values in the host's memory cannot be part of a CUDA graph")
            self._copies = self._all_copies.of(keys.device)
            if rows <= FEW_ROWS:
                both = torch.cat([keys.transpose(1, 2), values.transpose(1, 2)], dim=-1)
                self._waiting.append(torch.empty(both.shape, dtype=both.dtype, pin_memory=True))
                self._waiting[-1].copy_(both, non_blocking=True)
                return
        self._settle(reads=False)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self._copies is None or keys.device.type != "cuda":
            self._append(keys, values)
            return
        with self._copies.behind(keys := keys.contiguous(), values := values.contiguous()):
            self._append(keys, values)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        for sequence, k, v in zip(self._sequences, keys, values, strict=True):
            sequence.append(k, v)

    def _settle(self, reads: bool = True) -> None:
        """Put away what has come from a GPU; before a CPU reads, wait for all of it."""
        if self._copies is not None and (reads or self._waiting):
            self._copies.wait(bool(self._waiting))
        for both in self._waiting:
            self._append(both[..., : self.shape.key], both[..., self.shape.key :])
        self._waiting.clear()

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, how: How) -> Tensor:
        """Compute attention of queries [sequences, heads, rows, size] over all that is kept, as [sequences, rows, heads, size]. `keys` and
        `values` are the newest of it."""
        read = self._masks.of(mask, len(query), query.shape[2], self._kept)
        if query.shape[2] <= FEW_ROWS and compiled(self.shape.dtype) is not None:
            result = self._beside_the_memory(query, read, how)
        elif self._kept == keys.shape[2] and mask is None and how.softcap is None and how.sinks is None:
            result = attend_within(query, keys, values, how).transpose(1, 2)
        else:
            result = self._in_pieces(query, keys, values, read, how)
        return result

    def _beside_the_memory(self, query: Tensor, mask: Mask, how: How) -> Tensor:
        sequences, heads, rows, _ = query.shape
        device, shape, kernel = query.device, self.shape, compiled(self.shape.dtype)
        assert kernel is not None
        is_gpu = device.type == "cuda"
        q = query.transpose(1, 2).flatten(0, 1).to(shape.dtype)
        if is_gpu:
            host = torch.empty(q.shape, dtype=q.dtype, pin_memory=True).copy_(q, non_blocking=True)
            torch.cuda.current_stream(device).synchronize()
            q = host
        self._settle()
        result = torch.empty(sequences * rows, heads, shape.value, dtype=shape.dtype, pin_memory=is_gpu)
        pages = PageLayout(shape.heads, shape.key, shape.value, shape.tokens, 0, shape.values_at)
        how = How(how.scaling, None, how.softcap, None if how.sinks is None else how.sinks.detach().to("cpu"))
        kernel.attend(None, pages, self._addresses(), mask.seen(), how, q.transpose(0, 1), result, self._threads)
        return result.view(sequences, rows, heads, -1).to(device, query.dtype, non_blocking=True)

    def _addresses(self) -> Tensor:
        """Return where the blocks lie, int64 [sequences, blocks]."""
        addresses = [[block.keys.data_ptr() for block in sequence.blocks] for sequence in self._sequences]
        if self._table is None or self._table[0] != addresses:
            self._table = addresses, torch.tensor(addresses, dtype=torch.int64)
        return self._table[1]

    def _in_pieces(self, query: Tensor, keys: Tensor, values: Tensor, mask: Mask, how: How) -> Tensor:
        sequences, heads, rows, _ = query.shape
        result = query.new_empty(sequences, rows, heads, self.shape.value)
        if keys.device != query.device:
            keys, values = keys.to(query.device), values.to(query.device)
        before = self._kept - keys.shape[2]  # what a GPU still has need not come back
        for number, sequence in enumerate(self._sequences):
            joined = JoinedPieces(query[number], self.shape.value, how)
            for first, k, v in self._pieces(sequence, before, query.device):
                found = mask.piece(number, first, first + len(k))
                if found.any:
                    joined.look(k.transpose(0, 1), v.transpose(0, 1), found.mask)
            own = mask.piece(number, before, self._kept)
            if own.any:
                joined.look(keys[number], values[number], own.mask, causal=mask.mask is None)
            result[number] = joined.result().transpose(0, 1)
        return result

    def _pieces(self, sequence: HostSequence, end: int, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield keys and values [tokens, heads, size] before token `end`. Tokens are counted from the first that is kept."""
        self._settle(reads=device.type == "cpu")
        parts = (
            (first - sequence.first, k[: end - (first - sequence.first)], v[: end - (first - sequence.first)])
            for first, k, v in sequence.pieces()
            if first - sequence.first < end
        )
        if device.type == "cpu":
            return parts
        self._copies = self._all_copies.of(device)
        return self._copies.brought(parts, self.shape)

    @property
    def _kept(self) -> int:
        """How many tokens of each sequence are kept."""
        waiting = sum(both.shape[1] for both in self._waiting)
        return waiting + self._sequences[0].end - self._sequences[0].first if self._sequences else 0

    def get_seq_length(self) -> int:
        return self._kept + self._sequences[0].first if self._sequences else 0

    @property
    def _shown_from(self) -> int:
        """The first token that new ones may see."""
        return 0 if self._window is None else self.get_seq_length() - self._window - SLACK

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        rows = query_length if isinstance(query_length, int) else len(query_length)
        if not self._sequences:
            return rows, 0
        first = self._sequences[0].first_after(self._shown_from)  # as `update` will have it
        return self.get_seq_length() + rows - first, first

    def reset(self) -> None:
        self._change([])
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last tokens, given as a negative number. (Older versions of transformers say how many stay.)"""
        self._settle()
        for sequence in self._sequences:
            end = sequence.end + tokens_to_remove if tokens_to_remove <= 0 else min(sequence.end, tokens_to_remove)
            least = sequence.first + (self._window or 0) - 1 if sequence.first else 0
            if end < min(least, sequence.end):
                raise ValueError(f"{sequence.end - end} tokens cannot be removed: of a window, older ones are gone")
            sequence.crop(end)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        numbers = range(len(self._sequences))
        chosen = [i for i in numbers if indices[i]] if indices.dtype is torch.bool else indices.tolist()
        self._change(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change([number for number in range(len(self._sequences)) for _ in range(repeats)])

    def _change(self, chosen: list[int]) -> None:
        """Let these sequences, in this order, take the place of all. No key or value is copied."""
        if not self._sequences:
            return
        self._settle()
        before = self._sequences
        self._sequences = [before[number].fork() for number in chosen]
        for sequence in before:
            sequence.release()

    def offload(self) -> None:
        """Do nothing: all of it is in the host's memory."""

    def prefetch(self) -> None:
        """Do nothing: nothing comes back before it is needed."""
