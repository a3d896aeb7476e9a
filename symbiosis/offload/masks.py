"""Reads the masks that transformers makes: who sees which of the tokens that a layer has kept."""

from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.errors import ConfigError
from symbiosis.kernels.paged_attention import SeenTokens


class SeenPiece(NamedTuple):
    """What rows see of some tokens: whether any, and which; `mask` is None if every row sees all of them."""

    any: bool
    mask: Tensor | None


class Mask:
    """The mask of one step, bool [sequences, rows, tokens]: a row sees a token where it is true. None is the causal mask."""

    def __init__(self, mask: Tensor | None, sequences: int, rows: int, tokens: int) -> None:
        self.sequences, self.rows, self.tokens = sequences, rows, tokens
        self.mask = None if mask is None else self._checked(mask)
        self._seen: SeenTokens | None = None
        self._pieces: dict[tuple[int, int, int], tuple[bool, bool]] = {}

    def seen(self) -> SeenTokens:
        """Return the mask as the kernel for CPUs takes it."""
        if self._seen is None:
            which = torch.arange(self.sequences) * self.rows
            if self.mask is None:
                ends = torch.arange(self.tokens - self.rows, self.tokens).add_(1).repeat(self.sequences)
                self._seen = SeenTokens(which, ends, self.tokens, self.rows)
            else:
                self._seen = self._read(self.mask.to("cpu").flatten(0, 1).contiguous(), which)
        return self._seen

    def _read(self, sees: Tensor, which: Tensor) -> SeenTokens:
        tokens = torch.arange(self.tokens)
        begins = tokens.where(sees, self.tokens).amin(1)
        ends = (tokens + 1).where(sees, 0).amax(1)
        everything = torch.equal((ends - begins).clamp_(min=0), sees.sum(1))
        return SeenTokens(which, ends, self.tokens, self.rows, begins, None if everything else sees)

    def piece(self, sequence: int, first: int, end: int) -> SeenPiece:
        """Return what the rows of a sequence see of the tokens from `first` up to `end`. Without a mask, these must all come before the
        rows' own tokens."""
        if self.mask is None:
            return SeenPiece(True, None)
        some = self.mask[sequence, :, first:end]
        key = sequence, first, end
        if key not in self._pieces:  # for all layers; a GPU is waited for
            sees_any, sees_all = torch.stack([some.any(), some.all()]).tolist()
            self._pieces[key] = sees_any, sees_all
        sees_any, sees_all = self._pieces[key]
        return SeenPiece(sees_any, None if sees_all else some)

    def _checked(self, mask: Tensor) -> Tensor:
        shape = tuple(mask.shape)
        if len(shape) != 4 or shape[1] != 1 or shape[3] != self.tokens:
            raise ConfigError(
                f"an attention mask of shape {shape}, where {self.rows} rows look at {self.tokens} tokens with all heads alike: a cache in "
                "the host's memory takes masks of shape (sequences, 1, rows, tokens)"
            )
        if mask.dtype is not torch.bool:
            unseen = mask <= torch.finfo(mask.dtype).min / 2
            if not bool(((mask == 0) | unseen).all()):
                raise ConfigError(
                    "an attention mask with other values than 0 and -inf: a cache in the host's memory takes no biases"
                )
            mask = ~unseen
        return mask[:, 0].expand(self.sequences, self.rows, self.tokens)


class Masks:
    """The masks of one step. There is one for each kind of layer, and each is read once for all layers of that kind."""

    def __init__(self) -> None:
        self._read: list[tuple[Tensor | None, Mask]] = []
        self._first: int | None = None

    def begin(self, layer: object) -> None:
        """Forget the masks of the last step, which may be large, when the layer that is always first comes again."""
        if self._first is None:
            self._first = id(layer)  # the layer itself would keep its cache from being freed at once
        if self._first == id(layer):
            self._read.clear()

    def of(self, mask: Tensor | None, sequences: int, rows: int, tokens: int) -> Mask:
        sizes = sequences, rows, tokens
        for known, read in self._read:
            if known is mask and (read.sequences, read.rows, read.tokens) == sizes:
                return read
        read = Mask(mask, *sizes)
        self._read.append((mask, read))
        return read
