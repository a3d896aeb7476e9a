"""Logs with broken masks, made of a log without masks. Each is broken as one attack expects, so that this attack must succeed on it."""

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from symbiosis.audit.operator_view import OperatorView, SeenCall
from symbiosis.client.privacy.noise import Noise, gaussian

LARGE, SMALL = 100.0, 0.4  # times a row's own root mean square


def known_noise(view: OperatorView) -> OperatorView:
    """Mask rows by the noise of `Noise`, whose effects this operator has computed."""
    options, drawn = Noise(), dict[int, Tensor]()

    def masked(entry: SeenCall) -> Tensor:
        noise_PK = drawn.setdefault(entry.rows.shape[1], gaussian(options.pool, entry.rows.shape[1]))
        return entry.rows + options.scale * _size(entry) * noise_PK[torch.randint(options.pool, (len(entry.rows),))]

    broken = view.with_rows(masked)
    broken.at_join = [replace(view.entries[0], rows=noise_PK) for noise_PK in drawn.values() for _ in range(2)]
    return broken


def both_at_one(view: OperatorView) -> OperatorView:
    """Give both halves of every call to this operator."""
    broken, halves = copy(view), list[SeenCall]()
    for entry in view.entries:
        r_TK = LARGE * _size(entry) * torch.randn_like(entry.rows)
        halves += [replace(entry, rows=entry.rows + r_TK), replace(entry, rows=r_TK, seeded=True)]
    broken.entries = halves
    return broken


def too_small(view: OperatorView) -> OperatorView:
    """Mask rows with fresh masks that are smaller than what they should hide."""
    return view.with_rows(lambda entry: entry.rows + SMALL * _size(entry) * torch.randn_like(entry.rows))


def one_for_all(view: OperatorView) -> OperatorView:
    """Mask all rows of one width with one mask."""
    drawn: dict[int, Tensor] = {}

    def masked(entry: SeenCall) -> Tensor:
        return entry.rows + drawn.setdefault(entry.rows.shape[1], LARGE * torch.randn_like(entry.rows[0]))

    return view.with_rows(masked)


def few(view: OperatorView) -> OperatorView:
    """Mask rows with sums of a few masks that were drawn once."""
    drawn: dict[int, Tensor] = {}

    def masked(entry: SeenCall) -> Tensor:
        width = entry.rows.shape[1]
        pool_PK = drawn.setdefault(width, torch.randn(Noise().pool, width))
        return entry.rows + LARGE * _size(entry) * (torch.randn(len(entry.rows), len(pool_PK)) @ pool_PK)

    return view.with_rows(masked)


def _size(entry: SeenCall) -> Tensor:
    """Return the root mean square of each row."""
    return entry.rows.square().mean(1, keepdim=True).sqrt()
