"""Chooses the next tokens, for all sequences of a step at once.

The random number for a token is a hash of its sequence's seed and of its position. So a sequence draws the same tokens whatever else runs,
and however often it is evicted and computed again. Log probabilities are those of the model's own distribution,
unless a request wants them at its temperature.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from symbiosis.kernels.row_invariant import total_of
from symbiosis.serving.request import Sampling, Token
from symbiosis.serving.scheduler.scheduler_output import Sequence
from symbiosis.serving.speculation.speculation import Drafted

NOWHERE = float("-inf")
COLDEST = 1e-5  # a lower temperature changes nothing but that its numbers become too small
NONE = -1  # no token
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # the constants of splitmix64
MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
Row = Sequence | Drafted  # what a token is to follow


class Chosen:
    """The tokens that a step chooses, on their way to the host.

    `ids` has them on the device, int64 [sequences], `NONE` where there is none.
    """

    def __init__(self, ids: Tensor, logprobs: Tensor | None, asked: list[int], tops: list[int]) -> None:
        self.ids, self._asked, self._tops = ids, asked, tops
        self._width = 0 if logprobs is None else logprobs.shape[1]
        numbers = ids.double() if logprobs is None else torch.cat([ids.double(), logprobs.flatten()])
        self._numbers, self._arrived = numbers, None
        if numbers.is_cuda:  # the one copy to the host
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tokens(self) -> list[Token | None]:
        """Wait for them, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        told, count = self._numbers.tolist(), len(self.ids)
        tokens = [Token(int(id)) if id >= 0 else None for id in told[:count]]
        for number, row in enumerate(self._asked):
            if tokens[row] is not None:
                begin = count + number * self._width
                tokens[row] = _token(int(told[row]), told[begin : begin + self._width], self._tops[number])
        return tokens


def begin_choice(
    logits: Tensor,
    sequences: Items[Row],
    ends: frozenset[int] = frozenset(),
    allowed: dict[int, Tensor] | None = None,
) -> Chosen:
    """Choose a token for each row of `logits` (float32 [sequences, vocabulary]), or none where the model's numbers, or the tokens allowed,
    leave none. This does not wait for what the device computes.

    Args:
        ends: The tokens that end a text.
        allowed: By row, what its grammar allows: bool [vocabulary].

    >>> from symbiosis.serving.request import Request
    >>> greedy = Sequence(Request(id=1, prompt=(0,), sampling=Sampling(temperature=0.0)), 0, [0], None, 0.0)
    >>> [token.id for token in begin_choice(torch.tensor([[0.5, 2.0, 1.0]]), [greedy]).tokens()]
    [1]
    """
    scores = _shaped(logits, sequences, ends, allowed or {})
    best, ids = scores.max(dim=-1)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature]
    if drawn:
        which = _there(drawn, scores.device)
        ids = ids.index_copy(0, which, _draw(scores[which], [sequences[row] for row in drawn]))
    ids = torch.where(best.isfinite(), ids, NONE)
    asked = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.logprobs is not None]
    if not asked:
        return Chosen(ids, None, [], [])
    samplings, which = [sequences[row].request.sampling for row in asked], _there(asked, scores.device)
    named = [tuple(dict.fromkeys(sampling.logprob_tokens)) for sampling in samplings]
    tops = [len(tokens) or sampling.logprobs or 0 for sampling, tokens in zip(samplings, named, strict=True)]
    logprobs = _logprobs(_scaled(logits[which], samplings), ids[which].clamp(min=0), max(tops), named)
    return Chosen(ids, logprobs, asked, tops)


def _scaled(logits: Tensor, samplings: list[Sampling]) -> Tensor:
    """Divide rows by their temperature, where that is asked for."""
    heat = [each.temperature or 1.0 if each.scaled_logprobs else 1.0 for each in samplings]
    return logits if set(heat) == {1.0} else logits / _there(heat, logits.device).unsqueeze(1)


def depends_on_tokens(sampling: Sampling) -> bool:
    """Whether how a token is chosen depends on which ones were chosen before it, besides what the model makes of them."""
    penalties = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    return bool(penalties or sampling.bad_sequences) or sampling.guide is not None


def logprobs_of(logits: Tensor, ids: list[int], tops: int) -> list[Token]:
    """Return these tokens with their log probabilities and ranks, and with the log probabilities of so many of the most likely tokens."""
    there = _there(ids, logits.device)
    found = _logprobs(logits, there, tops).tolist()
    ranks = (logits >= logits.gather(1, there.unsqueeze(1))).sum(dim=1).tolist()
    return [_token(id, row, tops, rank) for id, row, rank in zip(ids, found, ranks, strict=True)]


def _logprobs(logits: Tensor, ids: Tensor, most: int, named: Iterable[tuple[int, ...]] = ()) -> Tensor:
    """Return in each row that of its token, then the most likely tokens, then theirs, in float64, which holds all of them as they are. Rows with
    `named` tokens have those instead of the most likely."""
    logprobs = logits - total_of(logits)  # log_softmax of a CPU is off by 1e-5 over a large vocabulary
    values, which = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    for row, tokens in enumerate(named):
        if tokens:
            there = which[row, : len(tokens)] = _there(list(tokens), logits.device)
            values[row, : len(tokens)] = logprobs[row, there]
    return torch.cat([each.double() for each in (logprobs.gather(1, ids.unsqueeze(1)), which, values)], dim=1)


def _token(id: int, row: list[float], count: int, rank: int = 0) -> Token:
    most = len(row) // 2
    tops = tuple((int(which), logprob) for which, logprob in zip(row[1 : 1 + most], row[1 + most :], strict=True))
    return Token(id, row[0], tops[:count], rank)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64: a hash of a sequence's seed and a token's position, both int64.

    >>> first, again, other = uniform(torch.tensor([1, 1, 2]), torch.tensor([7, 7, 7])).tolist()
    >>> first == again, first == other
    (True, False)
    """
    return _shifted(_mixed(_mixed(seeds) + positions), 12).double() * 2.0**-52


def seed_of(sequence: Row) -> int:
    """Return the seed of a completion, int64: from the request's seed, and the completion's number in the request."""
    seed = (sequence.request.sampling.seed or 0) + sequence.completion * GOLDEN
    return _signed(seed)


def _draw(scores: Tensor, sequences: Items[Row]) -> Tensor:
    """Draw by the inverse of the cumulative distribution, in the order of the tokens' numbers. Then rounding hardly ever changes which
    token is drawn."""
    device, samplings = scores.device, [sequence.request.sampling for sequence in sequences]
    heat = _there([max(sampling.temperature, COLDEST) for sampling in samplings], device)
    scores = (scores - scores.max(dim=-1, keepdim=True).values) / heat.unsqueeze(1)
    probabilities = _truncated(scores, samplings).softmax(dim=-1, dtype=torch.float64)
    seeds = _there([seed_of(sequence) for sequence in sequences], device)
    positions = _there([sequence.produced for sequence in sequences], device)
    cumulative = probabilities.cumsum(dim=-1)
    reached = uniform(seeds, positions).unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, reached, right=True).squeeze(1)
    return drawn.clamp(max=scores.shape[1] - 1)


def _truncated(scores: Tensor, samplings: list[Sampling]) -> Tensor:
    """Keep only the likely tokens: the top k, of these the ones that make up the top p, and of these the ones not too far below the
    best."""
    device, count = scores.device, scores.shape[1]
    if any(0 < sampling.top_k < count or sampling.top_p < 1.0 for sampling in samplings):
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        k = _there([min(sampling.top_k or count, count) for sampling in samplings], device)
        p = _there([sampling.top_p for sampling in samplings], device)
        ranked = ranked.masked_fill(torch.arange(count, device=device) >= k.unsqueeze(1), NOWHERE)
        likely = ranked.softmax(dim=-1)
        before = likely.cumsum(dim=-1) - likely
        beyond = (before >= p.unsqueeze(1)) & (p < 1.0).unsqueeze(1)
        beyond[:, 0] = False
        scores = torch.empty_like(scores).scatter_(1, order, ranked.masked_fill(beyond, NOWHERE))
    if any(sampling.min_p > 0.0 for sampling in samplings):
        least = _there([sampling.min_p for sampling in samplings], device).log().unsqueeze(1)
        scores = scores.masked_fill(scores < scores.max(dim=-1, keepdim=True).values + least, NOWHERE)
    return scores


def _shaped(logits: Tensor, sequences: Items[Row], ends: frozenset[int], allowed: dict[int, Tensor]) -> Tensor:
    """Return the scores to choose from: the logits after penalties and biases, without the tokens that may not come."""
    shaping = []
    for row, sequence in enumerate(sequences):
        how = sequence.request.sampling
        penalties = how.repetition_penalty != 1.0 or how.presence_penalty or how.frequency_penalty
        names_tokens = how.logit_bias or how.allowed_tokens or how.bad_sequences
        if row in allowed or names_tokens or penalties or sequence.produced < how.min_tokens:
            shaping.append(row)
    if not shaping:
        return logits
    scores = logits.clone()
    for row in shaping:
        _shape(scores[row], sequences[row], ends, allowed.get(row))
    return scores


def _shape(scores: Tensor, sequence: Row, ends: frozenset[int], allowed: Tensor | None) -> None:
    """Shape one row, in place."""
    how, device = sequence.request.sampling, scores.device
    if how.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.tokens[sequence.virtual :], dtype=torch.long, device=device).unique()
        of = scores[seen]
        scores[seen] = torch.where(of < 0, of * how.repetition_penalty, of / how.repetition_penalty)
    if sequence.produced and (how.presence_penalty or how.frequency_penalty):
        own = torch.tensor(sequence.tokens[sequence.prompt_length :], device=device)
        said, times = own.unique(return_counts=True)
        scores[said] -= how.presence_penalty + how.frequency_penalty * times
    if how.logit_bias:
        scores[torch.tensor(list(how.logit_bias), device=device)] += torch.tensor(
            list(how.logit_bias.values()), device=device
        )
    if how.allowed_tokens:
        others = torch.ones(len(scores), dtype=torch.bool, device=device)
        others[torch.tensor(how.allowed_tokens, device=device)] = False
        scores.masked_fill_(others, NOWHERE)
    if how.bad_sequences and (ending := _ending(sequence.tokens[sequence.prompt_length :], how.bad_sequences)):
        scores[torch.tensor(ending, device=device)] = NOWHERE
    if sequence.produced < how.min_tokens and (never := [*ends, *how.stop_tokens]):
        scores[torch.tensor(never, device=device)] = NOWHERE
    if allowed is not None:
        scores.masked_fill_(~allowed.to(device), NOWHERE)


def _ending(tokens: list[int], bad: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return the tokens with which a text would have one of these sequences.

    >>> _ending([5, 1, 2], ((1, 2, 3), (4,), (5, 2, 6)))
    [3, 4]
    """
    return [each[-1] for each in bad if each and tuple(tokens[len(tokens) - len(each) + 1 :]) == each[:-1]]


def _there(numbers: list[int] | list[float], device: torch.device) -> Tensor:
    """Put numbers on the device, without waiting for what it computes."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device, dtype=None if numbers else torch.long)
    return torch.tensor(numbers, dtype=None if numbers else torch.long).pin_memory().to(device, non_blocking=True)


def _mixed(x: Tensor) -> Tensor:
    """Mix bits by splitmix64, in integers that wrap round."""
    x = x + _signed(GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(MIX[0])
    x = (x ^ _shifted(x, 27)) * _signed(MIX[1])
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros coming in. (torch's own shift repeats the sign.)"""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    number &= MASK
    return number - (1 << 64) if number >> 63 else number
