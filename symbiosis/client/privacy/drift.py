"""Finds out whether many answers of a layer that look right are wrong together: rounding has no direction, and a change does."""

import math
import threading

import torch
from torch import Tensor
from torch.linalg import vector_norm

from symbiosis.base.forks import look_for_fork

FALSE_ALARM = 1e-20  # for each window of a layer and direction
BLOCK = 64  # rows that are judged together, and at most as many of a call
WINDOW = 4096  # rows after which all begins anew
STEADY = 1 / 64  # of a rounding, that may point in one direction
# of a rounding in float32, for each term of a sum, that may do so: tensor cores cut off what they cannot hold
CUT_OFF = 1 / 8
ALIKE, KEYED = 16.0, 8  # roundings between rows that count as two; of so many of their projections
ENOUGH, TOO_LARGE = 256, 2.0  # rows, and how much larger their errors' mean square may be than what rounding makes


class Martingale:
    """A sum that a right answer makes neither large nor small."""

    def __init__(self) -> None:
        self._sum = self._squares = 0.0

    def add(self, s_T: Tensor, squares_T: Tensor) -> None:
        self._sum += s_T.sum().item()
        self._squares += squares_T.sum().item()

    def is_out_of_hand(self, scale: float) -> bool:
        """Whether the sum is larger than a right answer makes it. `scale` is the sum of squares at which this is most sensitive."""
        whole = self._squares + scale
        return self._sum > 0 and self._sum**2 > whole * (math.log(whole / scale) - 2 * math.log(FALSE_ALARM))


class Drift:
    """Tracks by how much the answers of one layer, in one direction, are off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fork = look_for_fork()
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._begin()

    def _begin(self) -> None:
        self._rows, self._square = 0, 0.0
        self._seen: list[Tensor] = []
        self._linear = self._off_M = self._truth_M = torch.zeros(())  # sums: of rows x off, off, rows
        self._by_mean, self._by_row = Martingale(), Martingale()

    def saw(self, truth_TM: Tensor, off_TM: Tensor, expected_T: Tensor, eps: float, steady: float) -> bool:
        """Whether these rows make it clear that answers are wrong. All is in units of a row's size; `expected_T`: the mean square
        of what rounding makes."""
        if self._fork != (fork := look_for_fork()):  # a forked child, in which the thread that held the lock is not
            self._lock, self._fork = threading.Lock(), fork
        self._waiting.append((truth_TM, off_TM, off_TM.square().sum(1) / expected_T))
        if sum(len(rows) for rows, *_ in self._waiting) < BLOCK or not self._lock.acquire(blocking=False):
            return False
        try:
            waiting, self._waiting = self._waiting, []
            truth_TM, off_TM, square_T = (torch.cat(parts) for parts in zip(*waiting, strict=True))
            return self._judge(truth_TM, off_TM, square_T, eps, steady)
        finally:
            self._lock.release()

    def _judge(self, truth_TM: Tensor, off_TM: Tensor, square_T: Tensor, eps: float, steady: float) -> bool:
        if self._rows >= WINDOW:
            self._begin()
        new_T = self._new(truth_TM, eps)
        truth_TM, off_TM = truth_TM[new_T], off_TM[new_T]
        rows = max(1, self._rows)
        mean_M, centre_M = self._off_M / rows, self._truth_M / rows
        moved_TM = truth_TM - centre_M
        if self._rows:
            direction_TM = (mean_M / vector_norm(mean_M).clamp(min=1e-300)).expand_as(off_TM)
            self._foretold(self._by_mean, off_TM, direction_TM, steady + eps * vector_norm(centre_M).item())
            size = vector_norm(self._linear).clamp(min=1e-300)
            self._foretold(self._by_row, off_TM, moved_TM @ self._linear / size, steady)
        self._linear = self._linear + moved_TM.t() @ (off_TM - mean_M)
        self._off_M, self._truth_M = self._off_M + off_TM.sum(0), self._truth_M + truth_TM.sum(0)
        self._rows, self._square = self._rows + len(off_TM), self._square + square_T[new_T].sum().item()
        too_large = self._rows >= ENOUGH and self._square > TOO_LARGE * self._rows
        return too_large or any(sum_.is_out_of_hand(BLOCK * steady**2) for sum_ in (self._by_mean, self._by_row))

    @staticmethod
    def _foretold(martingale: Martingale, off_TM: Tensor, by_TM: Tensor, steady: float) -> None:
        """Add rows to a martingale. A steady error of the allowed size cannot make its sum grow."""
        along_T, most_T = (off_TM * by_TM).sum(1), steady * vector_norm(by_TM, dim=1)
        martingale.add(along_T - most_T, (along_T.abs() + most_T).square())

    def _new(self, truth_TM: Tensor, eps: float) -> Tensor:
        """Return which rows are unlike all others of this window."""
        keys_TM = truth_TM[:, :KEYED].float()
        near = max(ALIKE * eps, 2**-9) * (KEYED / truth_TM.shape[1]) ** 0.5
        new_T = ~(torch.cdist(keys_TM, keys_TM).tril(-1) + torch.ones(len(keys_TM), len(keys_TM)).triu() < near).any(1)
        for seen_TM in self._seen:
            new_T &= ~(torch.cdist(keys_TM, seen_TM) < near).any(1)
        self._seen = [torch.cat([*self._seen, keys_TM[new_T]])]
        return new_T
