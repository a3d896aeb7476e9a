"""Attention over keys and values that come in pieces. The results of the pieces are added up by their weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from symbiosis.kernels.paged_attention import How

SCORES = 1 << 26  # at once, where they are written to memory
FUSED_HALF, MOST_FUSED = (torch.float16, torch.bfloat16), 256  # what a GPU's kernel takes, and the largest head


class JoinedPieces:
    """What rows [heads, rows, size] have seen so far. `y` is float32; `weight` [heads, rows] is the logarithm of the sum of all weights.

    >>> query, key, value = torch.randn(2, 3, 8), torch.randn(2, 10, 8), torch.randn(2, 10, 8)
    >>> joined = JoinedPieces(query, value_size=8, how=How(0.3))
    >>> for at in (slice(0, 4), slice(4, 10)):
    ...     joined.look(key[:, at], value[:, at])
    >>> torch.allclose(joined.result(), torch.softmax(query @ key.transpose(1, 2) * 0.3, -1) @ value, atol=1e-5)
    True
    """

    def __init__(self, query: Tensor, value_size: int, how: How) -> None:
        heads, rows, _ = query.shape
        self._query, self._how = query, how
        self._y = query.new_zeros(heads, rows, value_size, dtype=torch.float32)
        self._weight = query.new_full((heads, rows), float("-inf"), dtype=torch.float32)

    def look(self, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> None:
        """Take in a piece: keys and values [fewer heads, tokens, size]. A row sees all of its tokens, or those where `mask` [rows, tokens]
        is true. If `causal`, the tokens are the rows' own, and a row sees those up to its own."""
        key, value = key.to(self._query.dtype), value.to(self._query.dtype)
        found = None
        if mask is None and self._how.softcap is None:
            found = _fused(self._query, key, value, causal, self._how.scaling)
        if found is not None:
            self._join(slice(None), *found)
            return
        if causal:
            mask = torch.ones(self._query.shape[1], key.shape[1], dtype=torch.bool, device=key.device).tril()
        for rows in _runs(self._query.shape[1], SCORES // (len(self._query) * key.shape[1])):
            some = None if mask is None else mask[rows]
            self._join(rows, *_by_formula(self._query[:, rows], key, value, some, self._how))

    def result(self) -> Tensor:
        y, sinks = self._y, self._how.sinks
        if sinks is not None:
            y = y * torch.sigmoid(self._weight - sinks.float().view(-1, 1)).unsqueeze(-1)
        return y.to(self._query.dtype)

    def _join(self, rows: slice, y: Tensor, weight: Tensor) -> None:
        before = self._weight[:, rows]
        both = torch.logaddexp(before, weight)
        for part, share in ((self._y[:, rows], before), (y, weight)):
            part.mul_(torch.where(share == float("-inf"), 0, torch.exp(share - both)).unsqueeze(-1))
        self._y[:, rows] += y
        self._weight[:, rows] = both


def _runs(rows: int, most: int) -> Iterator[slice]:
    most = max(1, most)
    yield from (slice(first, min(rows, first + most)) for first in range(0, rows, most))


def _by_formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
    """Return, as float32, what the rows see, and the logarithm of the sum of its weights."""
    heads, rows, size = query.shape
    scores = (query.reshape(len(key), -1, size) @ key.transpose(1, 2)).float().view(heads, rows, -1) * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weight = scores.logsumexp(-1)
    shares = torch.exp(scores - weight.where(weight != float("-inf"), 0).unsqueeze(-1)).to(value.dtype)
    y = shares.view(len(key), -1, shares.shape[-1]) @ value
    return y.float().view(heads, rows, -1), weight


def _fused(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Compute the same as `_by_formula` by torch's own kernels, which write no scores to memory. Return None if there is none for these
    tensors."""
    heads, rows, size = query.shape
    if causal and heads != len(key):
        key, value = (each.repeat_interleave(heads // len(key), dim=0) for each in (key, value))
    q, k, v = query.reshape(1, len(key), -1, size), key.unsqueeze(0), value.unsqueeze(0)
    aten = torch.ops.aten
    if query.device.type == "cpu" and size == value.shape[-1]:
        y, weight = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scaling)
    elif (
        query.device.type == "cuda"
        and query.dtype in FUSED_HALF
        and size == value.shape[-1] <= MOST_FUSED
        and size % 8 == 0
    ):
        y, weight = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scaling)[:2]
    elif query.device.type == "cuda" and query.dtype is torch.float32 and size % 4 == 0 == value.shape[-1] % 4:
        y, weight = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scaling)[:2]
    else:
        return None
    return y.float().reshape(heads, rows, -1), weight[..., : q.shape[2]].float().reshape(heads, rows)
