"""Attacks on rows: they make claims about what the owner sent, from an operator's log and what is public. None of them sees the truth."""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from symbiosis.audit.operator_view import Claim, OperatorView
from symbiosis.audit.public_knowledge import Key, PublicKnowledge
from symbiosis.client.privacy.noise import Noise
from symbiosis.protocol import Op

PHASES = ("train", "known", "repeat", "first")
FOREIGN = 1000.0  # times the variance that rows have in some direction: what lies in it was added
LEAST_VARIANCE = 1e-2  # of the mean over directions: below that nothing is called foreign
RIDGE = 1e-3


def tokens(view: OperatorView, public: PublicKnowledge) -> list[Tensor]:
    """Guess tokens: the first layer's input is one of as many rows as there are tokens, so take the nearest for each."""
    dictionary = F.normalize(public.dictionary().double(), dim=1)
    rows = view.rows(Op.FORWARD, "model.layers.0.self_attn.q_proj", *PHASES)
    return [(x_TK.double() @ dictionary.t()).argmax(1) for x_TK in rows]


def labels_from_head(view: OperatorView, public: PublicKnowledge) -> list[Tensor]:
    """Guess labels: the gradient of the logits is `p - 1` at the label and p elsewhere, so the smallest one is the label's, in each
    call."""
    return [dy_TN.argmin(1) for dy_TN in view.rows(Op.DGRAD, public.head, "train")]


def labels_from_gradients(view: OperatorView, public: PublicKnowledge) -> list[Tensor]:
    """Guess labels: the last layer's gradient is, but for the norm's projection, a sum of the head's rows weighted by `p - label`. The
    label has the lowest weight in the sum that fits best."""
    norm = public.model.model.norm.weight.detach()
    head_VK = (public.weights[public.head] * norm).double()
    gram = head_VK @ head_VK.t()
    solve_VK = torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram)), head_VK)
    last = [name for name in public.weights if name.endswith("down_proj")][-1]
    return [(dy_TK.double() @ solve_VK.t()).argmin(1) for dy_TK in view.rows(Op.DGRAD, last, "train")]


def without_noise(view: OperatorView, public: PublicKnowledge) -> OperatorView:
    """Match noise. When a client joins and has the effects of its noise computed here, it calls each layer forward and backward with the
    noise. Every later row is compared with each of these vectors, and the best one is taken away."""
    noise: dict[int, Tensor] = {}
    for forward, backward in zip(view.at_join[::2], view.at_join[1::2], strict=False):
        noise.update({entry.rows.shape[1]: entry.rows.double() for entry in (forward, backward)})
    if not noise:
        return view
    return view.with_rows(lambda e: _denoised(e.rows.double(), noise[e.rows.shape[1]], e.key, public))


def _denoised(z_TK: Tensor, noise_PK: Tensor, key: Key, public: PublicKnowledge) -> Tensor:
    """Take the noise away. The row is `x + s n`, with s in proportion to the length of x. Across n it shows x; along n it is `c |x| +
    u`, where u is x's part there. Of the two u that fit, the one is taken that is nearer to what usually goes with the rest of x."""
    unit_PK = F.normalize(noise_PK, dim=1)
    along_T, best_T = (z_TK @ unit_PK.t()).max(1)
    unit_TK = unit_PK[best_T]
    across_TK = z_TK - along_T[:, None] * unit_TK
    c_T = torch.linalg.vector_norm(noise_PK, dim=1)[best_T] * (Noise().scale / z_TK.shape[1] ** 0.5)
    root_T = (along_T.square() - (c_T.square() - 1) * across_TK.square().sum(1)).clamp_min(0).sqrt() * c_T
    both_2T = torch.stack([-along_T - root_T, -along_T + root_T]) / (c_T.square() - 1)
    usual_T = _missing_part(across_TK, unit_TK, public.mean(key, False), public.precision(key, False))
    u_T = both_2T.gather(0, (both_2T - usual_T).abs().argmin(0, keepdim=True))[0]
    return across_TK + u_T[:, None] * unit_TK


def _missing_part(across_TK: Tensor, unit_TK: Tensor, mean_K: Tensor, precision_KK: Tensor) -> Tensor:
    """Return the conditional mean of the part along `unit` of a normally distributed row, given the rest of it."""
    along_TK = unit_TK @ precision_KK
    mean_T = unit_TK @ mean_K
    rest_TK = across_TK - mean_K + mean_T[:, None] * unit_TK
    return mean_T - (along_TK * rest_TK).sum(1) / (along_TK * unit_TK).sum(1)


def rows_themselves(view: OperatorView) -> list[Claim]:
    """Claim that each row is as it looks."""
    return [Claim(view.entries[n].rows, n) for n in view.shares]


def both_halves(view: OperatorView) -> list[Claim]:
    """Subtract from a call's rows what its seed expands to, if this operator got both; else claim the rows as they are."""
    halves: dict[tuple[Key, bool], list[int]] = {}
    for n, entry in enumerate(view.entries):
        if not entry.lost:
            halves.setdefault((entry.key, entry.seeded), []).append(n)
    claims = [
        Claim(view.entries[n].rows - view.entries[seed].rows, n)
        for (key, seeded), numbers in halves.items()
        if not seeded
        for n, seed in zip(numbers, halves.get((key, True), ()), strict=False)
        if view.entries[n].rows.shape == view.entries[seed].rows.shape
    ]
    return claims or rows_themselves(view)


def averaged_over_repeats(view: OperatorView) -> list[Claim]:
    """Average what was sent for one prompt again and again: anything added at random averages out."""
    repeats: dict[Key, list[int]] = {}
    for n in view.shares:
        if view.entries[n].phase == "repeat":
            repeats.setdefault(view.entries[n].key, []).append(n)
    together = [(torch.stack([view.entries[n].rows.double() for n in same]), same[0]) for same in repeats.values()]
    return [Claim(rows.mean(0), first) for rows, first in together]


def averaged_over_retries(view: OperatorView) -> list[Claim]:
    """Average the two attempts of a call that got no answer and was sent again."""
    claims = []
    for n, entry in enumerate(view.entries):
        if entry.lost:
            again = next(m for m in range(n + 1, len(view.entries)) if view.entries[m].key == entry.key)
            claims.append(Claim((entry.rows.double() + view.entries[again].rows.double()) / 2, n))
    return claims


def neighbours(view: OperatorView) -> list[Claim]:
    """Subtract neighbouring rows of one call: anything that was added to both is gone."""
    return [Claim(view.entries[n].rows[:-1] - view.entries[n].rows[1:], n, less=n, less_start=1) for n in view.shares]


def two_requests(view: OperatorView) -> list[Claim]:
    """Subtract two calls of one layer that follow each other, place by place."""
    last: dict[tuple[Key, torch.Size], int] = {}
    pairs = []
    for n in view.shares:
        entry = view.entries[n]
        if entry.phase in ("train", "known"):
            if (before := last.get((entry.key, entry.rows.shape))) is not None:
                pairs.append((before, n))
            last[entry.key, entry.rows.shape] = n
    return [_difference(view, one, other) for one, other in pairs]


def two_layers(view: OperatorView) -> list[Claim]:
    """Subtract two calls in a row of layers whose rows have the same width: the same tokens are in both."""
    return [
        _difference(view, one, other)
        for one, other in pairwise(view.shares)
        if view.entries[one].rows.shape == view.entries[other].rows.shape
        and view.entries[one].key != view.entries[other].key
    ]


def _difference(view: OperatorView, one: int, other: int) -> Claim:
    return Claim(view.entries[one].rows - view.entries[other].rows, one, less=other)


def outside_the_subspace(view: OperatorView, public: PublicKnowledge) -> list[Claim]:
    """Project away the directions in which a layer's rows vary far more than the base model's, because they are those of masks that are
    drawn from few. What is missing then is filled in by what usually goes with the rest."""
    by_key: dict[Key, list[int]] = {}
    for n in view.shares:
        by_key.setdefault(view.entries[n].key, []).append(n)
    return [claim for key, numbers in by_key.items() for claim in _projected(view, public, key, numbers)]


def _projected(view: OperatorView, public: PublicKnowledge, key: Key, numbers: list[int]) -> Iterator[Claim]:
    entries = [view.entries[n] for n in numbers]
    rows_TK = torch.cat([entry.rows.double() for entry in entries])
    mean = rows_TK.mean(0) if view.integers else public.mean(key, False)
    usual = public.covariance(key, view.integers)
    usual = usual + LEAST_VARIANCE * usual.diagonal().mean() * torch.eye(len(usual))
    seen = (rows_TK - mean).t() @ (rows_TK - mean) / len(rows_TK)
    if view.integers:
        seen *= usual.trace() / seen.trace()
    lower = torch.linalg.cholesky(usual)
    white = torch.linalg.solve_triangular(lower, seen, upper=False)
    white = torch.linalg.solve_triangular(lower, white.t(), upper=False)
    if torch.linalg.eigvalsh(white)[-1] <= FOREIGN:  # nothing is to be projected away
        yield from (Claim(entry.rows, n) for n, entry in zip(numbers, entries, strict=True))
        return
    values, vectors = torch.linalg.eigh(white)
    foreign, _ = torch.linalg.qr(lower @ vectors[:, values > FOREIGN])
    keep = torch.eye(len(usual)) - foreign @ foreign.t()
    filled = usual @ keep @ torch.linalg.pinv(keep @ usual @ keep, rtol=1e-9, hermitian=True)
    claimed = mean + (rows_TK - mean) @ (keep @ filled.t())
    for n, rows in zip(numbers, claimed.split([len(entry.rows) for entry in entries]), strict=True):
        yield Claim(rows, n)
