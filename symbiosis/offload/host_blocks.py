"""Keys and values of one sequence in the host's memory. They are added to in place, and never moved."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symbiosis.offload.host_memory import HostMemory

BLOCK_BYTES, FEWEST, MOST = 1 << 22, 16, 1024  # of a block; its tokens, which are a multiple of the fewest


@dataclass(frozen=True, slots=True)
class TokenShape:
    """What a layer keeps of a token."""

    heads: int
    key: int
    value: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key + self.value) * self.dtype.itemsize

    @property
    def tokens(self) -> int:
        """How many tokens a block holds."""
        return min(MOST, max(FEWEST, BLOCK_BYTES // self.token_bytes // FEWEST * FEWEST))

    @property
    def values_at(self) -> int:
        """How many elements of a block come before its values."""
        return self.tokens * self.heads * self.key


@dataclass(eq=False, slots=True)
class HostBlock:
    """`owners` counts the sequences that share it; only one that has it for itself may write to it."""

    keys: Tensor  # [tokens, heads, size]
    values: Tensor
    owners: int = 1


@dataclass(slots=True)
class HostSequence:
    """The blocks of one sequence. Those before token `first` are gone."""

    shape: TokenShape
    memory: HostMemory
    blocks: list[HostBlock] = field(default_factory=list)
    first: int = 0
    end: int = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add keys and values [tokens, heads, size]. From a GPU, they are copied when its stream comes to it."""
        tokens, done = self.shape.tokens, 0
        while done < len(keys):
            inside = (self.end - self.first) % tokens
            if not inside:
                self.blocks.append(self._new_block())
            elif self.blocks[-1].owners > 1:
                self._own_last(inside)
            count = min(len(keys) - done, tokens - inside)
            block = self.blocks[-1]
            for to, rows in ((block.keys, keys), (block.values, values)):
                to[inside : inside + count].copy_(rows[done : done + count], non_blocking=True)
            self.end += count
            done += count

    def pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield what is kept, block by block: its first token, its keys and its values [tokens, heads, size]."""
        for number, block in enumerate(self.blocks):
            first = self.first + number * self.shape.tokens
            count = min(self.shape.tokens, self.end - first)
            yield first, block.keys[:count], block.values[:count]

    def crop(self, end: int) -> None:
        """Forget tokens from `end` on."""
        needed = -(-(end - self.first) // self.shape.tokens)
        self._let_go(self.blocks[needed:])
        del self.blocks[needed:]
        self.end = end

    def forget_before(self, token: int) -> None:
        """Give back blocks all of whose tokens are before this one."""
        first = self.first_after(token)
        gone = (first - self.first) // self.shape.tokens
        self._let_go(self.blocks[:gone])
        del self.blocks[:gone]
        self.first = first

    def first_after(self, token: int) -> int:
        """Return the first token that is kept once those before `token` are forgotten."""
        return self.first + max(0, token - self.first) // self.shape.tokens * self.shape.tokens

    def fork(self) -> "HostSequence":
        """Return another sequence with the same beginning. Its blocks are shared, not copied."""
        for block in self.blocks:
            block.owners += 1
        return HostSequence(self.shape, self.memory, list(self.blocks), self.first, self.end)

    def release(self) -> None:
        self._let_go(self.blocks)
        self.blocks = []

    @staticmethod
    def _let_go(blocks: list[HostBlock]) -> None:
        for block in blocks:
            block.owners -= 1

    def _new_block(self) -> HostBlock:
        shape = self.shape
        flat = self.memory.take(shape.tokens * shape.token_bytes).view(shape.dtype)
        keys, values = flat[: shape.values_at], flat[shape.values_at :]
        return HostBlock(keys.view(-1, shape.heads, shape.key), values.view(-1, shape.heads, shape.value))

    def _own_last(self, count: int) -> None:
        shared, own = self.blocks[-1], self._new_block()
        own.keys[:count].copy_(shared.keys[:count])
        own.values[:count].copy_(shared.values[:count])
        shared.owners -= 1
        self.blocks[-1] = own
