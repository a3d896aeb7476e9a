"""The keys and values of sequences, in blocks of 16 tokens. Full blocks are found again by what they were computed from.

A block's name is a hash of the tenant, the adapter's version and all tokens up to its end. So a prefix is shared by one tenant's sequences
of one version of one adapter, and by no others. Only full blocks are shared, and nothing writes to them, so none is ever copied.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from hashlib import blake2b

from symbiosis.serving.kv_cache.page_pool import PagePool
from symbiosis.serving.scheduler.scheduler_output import BLOCK, Block, Sequence

HASH_BYTES = 16


class BlockManager:
    """The blocks of all sequences. A block takes one page for each layer.

    Args:
        shares: Whether prefixes are found again.
        windows: For each layer, how many tokens a row sees; None is all.
    """

    def __init__(self, pool: PagePool, layers: int, shares: bool = True, windows: Iterable[int | None] = ()) -> None:
        self._windowed: dict[int, frozenset[int]] = {}  # layers by their window
        for layer, window in enumerate(windows):
            if window is not None:
                self._windowed[window] = self._windowed.get(window, frozenset()) | {layer}
        self.pool, self.layers, self.shares = pool, layers, shares
        self._named: dict[bytes, Block] = {}
        self._versions: dict[bytes, int] = {}  # of the adapter that a named block was computed with
        # named, and of no sequence; the one unused for longest is first
        self._unused: OrderedDict[bytes, Block] = OrderedDict()

    def needed(self, tokens: int, piece: int | None = None) -> int:
        """Return how many pages so many tokens need.

        Args:
            piece: So many tokens are computed at a time, and what lies behind windows is given back. None: all are.
        """
        count = -(-tokens // BLOCK)
        if piece is None:
            return count * self.layers
        seen = {window: min(count, (window + piece) // BLOCK + 2) for window in self._windowed}
        return count * self.layers - sum(
            (count - seen[window]) * len(layers) for window, layers in self._windowed.items()
        )

    def spare(self) -> int:
        """How many pages `grow` can still get."""
        return self.pool.free + len(self._unused) * self.layers

    def held_by(self, sequences: Iterable[Sequence]) -> int:
        """How many more pages `grow` could get if these sequences were released."""
        users = Counter(block for each in sequences for block in each.blocks)
        return sum(self.layers - len(block.gone) for block, count in users.items() if count == block.users)

    def find(self, sequence: Sequence) -> int:
        """Give a sequence the blocks of its first tokens that were computed before, and return how many tokens that is. At least one
        token is left to be computed."""
        assert not sequence.blocks
        name = _start(sequence)
        while (end := (len(sequence.blocks) + 1) * BLOCK) < len(sequence.tokens):
            name = _name(name, sequence.tokens[end - BLOCK : end])
            if (block := self._named.get(name)) is None:
                break
            block.users += 1
            self._unused.pop(name, None)
            sequence.blocks.append(block)
        sequence.computed = len(sequence.blocks) * BLOCK
        return sequence.computed

    def grow(self, sequence: Sequence, upto: int) -> bool:
        """Make room for a sequence's first `upto` tokens. If there are not enough pages, nothing changes."""
        count = max(0, -(-upto // BLOCK) - len(sequence.blocks))
        pages = count * self.layers
        if pages > self.pool.free and not self.make_room(pages):
            return False
        sequence.blocks.extend(Block(tuple(self.pool.take(self.layers))) for _ in range(count))
        return True

    def keep(self, sequence: Sequence) -> None:
        """Let those of a sequence's blocks be found that are full by now."""
        blocks, full = sequence.blocks, sequence.computed // BLOCK if self.shares else 0
        first = full
        while first and not blocks[first - 1].key:
            first -= 1
        if first == full:  # as in most steps
            return
        name = blocks[first - 1].key if first else _start(sequence)
        for number, block in enumerate(blocks[first:full], first):
            block.key = name = _name(name, sequence.tokens[number * BLOCK : (number + 1) * BLOCK])
            if name not in self._named and not block.gone:  # else another sequence has computed the same just now
                self._named[name] = block
                self._versions[name] = sequence.adapter.version if sequence.adapter else 0

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back. Those that may be found stay until their room is needed; the last ones go first."""
        self._take_back(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.behind = [], 0, {}

    def shrink(self, sequence: Sequence) -> None:
        """Take back the blocks behind a sequence's tokens."""
        count = -(-len(sequence.tokens) // BLOCK)
        if count < len(sequence.blocks):
            self._take_back(sequence.blocks[count:])
            sequence.blocks = sequence.blocks[:count]

    def _take_back(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.users -= 1
            if block.users:
                continue
            if self._named.get(block.key) is block:
                self._unused[block.key] = block
            else:
                self.pool.give_back(page for layer, page in enumerate(block.pages) if layer not in block.gone)

    def trim(self, sequences: Iterable[Sequence]) -> None:
        """Give back the pages at which no row to come looks any more, because they lie behind the window of their layer. Blocks without
        them are not found again, so this is for when there is no room."""
        for sequence in sequences:
            for window, layers in self._windowed.items():
                behind = max(0, (sequence.computed - window + 1) // BLOCK)
                for number in range(sequence.behind.get(window, 0), behind):
                    self._give_back(sequence, number, layers)
                sequence.behind[window] = behind

    def _give_back(self, sequence: Sequence, number: int, layers: frozenset[int]) -> None:
        """Give back these layers' pages of a block, unless others use it, too. Another block takes its place, by which those notice it
        who know its pages."""
        block = sequence.blocks[number]
        if block.users > 1:
            return
        if self._named.get(block.key) is block:
            del self._named[block.key], self._versions[block.key]
        self.pool.give_back(block.pages[layer] for layer in layers)
        pages = tuple(0 if layer in layers else page for layer, page in enumerate(block.pages))
        sequence.blocks[number] = Block(pages, key=block.key, gone=block.gone | layers)

    def forget(self, version: int) -> None:
        """Let no block of this version of an adapter be found any more."""
        for name in [name for name, of in self._versions.items() if of == version]:
            if name in self._unused:
                self._drop(name)
            else:
                del self._named[name], self._versions[name]

    def forget_all(self) -> None:
        """Let nothing be found any more that was computed so far. No sequence may have blocks."""
        for name in list(self._unused):
            self._drop(name)

    def make_room(self, pages: int) -> bool:
        """Drop unused blocks until so many pages are free, if that can be."""
        if pages > self.spare():
            return False
        while pages > self.pool.free:
            self._drop(next(iter(self._unused)))
        return True

    def _drop(self, name: bytes) -> None:
        self.pool.give_back(self._unused.pop(name).pages)
        del self._named[name], self._versions[name]


def _start(sequence: Sequence) -> bytes:
    """Begin the hash of a sequence. It names the tenant, so that tenants share nothing: how many tokens are found would tell one tenant
    what another has asked."""
    return struct.pack("<Q", sequence.adapter.version if sequence.adapter else 0) + sequence.tenant.encode()


def _name(before: bytes, tokens: Tokens[int]) -> bytes:
    return blake2b(before + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=HASH_BYTES).digest()
