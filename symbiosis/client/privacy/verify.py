"""Freivalds' test of an executor's answers: `y R == x (W R)` for a secret random R, known before the first call.

`W R` is as narrow as R, so the test costs a small part of the product. A wrong answer passes with a probability of at most 2^-24 with
integers (24 columns, because modulo 2^k half of the columns may miss a wrong highest bit).

With floating point an answer must be wrong by more than rounding explains. `R` keeps lengths, roughly: `|d R|` is about `|d|`. So
`|y R - x S|` is about how far a row of an answer is from the truth, and `|x S|` how large the truth is. It may be this far, as follows
from the call alone:

* `WRITTEN` roundings of the rows' dtype. A product is summed in float32 and rounded when it is written; GPUs that compute the sum
  in parts may round each part as well (`allow_bf16_reduced_precision_reduction`). What is rounded is as large as the answer, or as
  the largest sum on the way to it, `x[:k] S[:k]`: parts that cancel are larger than what they leave.
* A rounding in float32 for each of the K terms, all in one direction, of that same size.
* `SUMMED` roundings in float32 of the longest that an answer can be, `|x| |W|`, as terms may cancel between two such sums.
* What is lost if each value and each term below the smallest normal number is taken for zero, as some processors do.

A value may be infinite where its own sum can be that large, by the lengths of the row and of its column, and the row is nearly that
large; the others of its row are tested all the same. What a single row hides in its roundings shows in many: see `drift`.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.linalg import lstsq, vector_norm
from torch.nn.functional import pad

from symbiosis.base.keystream import keystream, new_key
from symbiosis.client.privacy.drift import BLOCK, CUT_OFF, STEADY, Drift
from symbiosis.client.privacy.fixed_point import INTEGERS
from symbiosis.errors import CallError, Code
from symbiosis.kernels.integers import digits, modular_product, product_of_bytes
from symbiosis.protocol import Op

if TYPE_CHECKING:
    from symbiosis.client.session import Session

COLUMNS = 24  # of R
WRITTEN, SUMMED = 8.0, 16.0  # roundings that a right answer may be off by, of its own dtype and of float32
SUMS = 32  # on the way to an answer, at most, at whose sizes we look
PIECE = 32  # rows' values that are always summed at once
NEAR = 4.0  # no row is so many times as large as it seems through R
LOW = 2.0**10  # times the smallest normal number: rows below it are not counted together


class Proof(NamedTuple):
    """What tests the answers of one layer in one direction: R; W R, as digits of integers or in pieces as floats; and the norms of W and
    of its columns."""

    r: Tensor
    s: Tensor
    norm: float = 0.0
    column_N: Tensor = torch.empty(0)

    @property
    def is_integer(self) -> bool:
        return self.r.dtype is torch.int8

    @property
    def columns(self) -> int:
        """The width of an answer."""
        return self.r.shape[-2]


class Compared(NamedTuple):
    """Rows of floating point and their answers, both multiplied by R."""

    off_TM: Tensor
    truth_TM: Tensor
    size_T: Tensor  # of the largest sum on the way
    expected_T: Tensor  # the mean square of what rounding makes
    wrong_T: Tensor


class Proofs:
    """All proofs of a client, which test the answers of its executors."""

    def __init__(self) -> None:
        self.checked = 0
        self._known: dict[tuple[int, Op], Proof] = {}
        self._drifts: dict[tuple[int, Op, torch.dtype], Drift] = defaultdict(Drift)
        # nobody can foretell which rows are looked at
        self._chance = torch.Generator().manual_seed(int.from_bytes(new_key()[:8]))

    def learn_integers(self, number: int, q_DKN: Tensor) -> None:
        """Learn a quantised layer. `q_DKN` are its digits."""
        dtype = INTEGERS[8 * len(q_DKN)]
        for op, w_DKN in ((Op.FORWARD, q_DKN.cpu()), (Op.DGRAD, q_DKN.transpose(1, 2).cpu())):
            r_NM = _random_bytes(w_DKN.shape[2])
            s_KM = torch.stack([product_of_bytes(w, r_NM).to(dtype) << 8 * n for n, w in enumerate(w_DKN)]).sum(0)
            self._known[number, op] = Proof(r_NM.unsqueeze(0), digits(s_KM.to(dtype)))

    def learn_floats(self, number: int, v_KN: Tensor) -> None:
        norm = vector_norm(v_KN.double()).item()
        for op, w_KN in ((Op.FORWARD, v_KN), (Op.DGRAD, v_KN.t())):
            r_NM = _random_bytes(w_KN.shape[1]).double() / (128 * (COLUMNS / 3) ** 0.5)
            w_KN = w_KN.double().cpu()
            self._known[number, op] = Proof(r_NM, _in_pieces(w_KN @ r_NM), norm, vector_norm(w_KN, dim=0))

    def check(self, session: "Session", op: Op, layer: int, x_TK: Tensor, y_TN: Tensor) -> None:
        """Raise `CallError`, with the names of the executor and the layer, unless `y_TN` is what `op` makes of the rows."""
        proof = self._known[layer, op]
        self.checked += 1
        if y_TN.dtype is not x_TK.dtype or tuple(y_TN.shape) != (len(x_TK), proof.columns):
            raise _wrong(
                session, op, layer, f"with {y_TN.dtype} {tuple(y_TN.shape)} to {len(x_TK)} rows of {x_TK.dtype}"
            )
        if proof.is_integer:
            wrong_T = _differ(proof, x_TK, y_TN)
        else:
            compared = _compare(proof, x_TK, y_TN)
            wrong_T = compared.wrong_T
        if wrong_T.any():
            what = f"{int(wrong_T.sum())} of {len(wrong_T)} rows are not the product of what was sent"
            raise _wrong(session, op, layer, f"wrongly: {what}")
        if not proof.is_integer and self._drifts_off(op, layer, x_TK, compared):
            raise _wrong(session, op, layer, "wrongly: many answers, taken together, are off by what no rounding makes")

    def wrong(self, op: Op, layer: int, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """Return which rows of an answer are wrong."""
        proof = self._known[layer, op]
        return _differ(proof, x_TK, y_TN) if proof.is_integer else _compare(proof, x_TK, y_TN).wrong_T

    def _drifts_off(self, op: Op, layer: int, x_TK: Tensor, compared: Compared) -> bool:
        """Whether many answers together are off. Rows that underflow or overflow say nothing."""
        kind = torch.finfo(x_TK.dtype)
        columns = self._known[layer, op].columns
        truth_T = vector_norm(compared.truth_TM, dim=1)
        told_T = (
            (truth_T > LOW * kind.tiny * columns**0.5)
            & (compared.size_T < kind.max)
            & compared.off_TM.isfinite().all(1)
        )
        rows = told_T.nonzero()[:, 0]
        if not len(rows):
            return False
        if len(rows) > BLOCK:
            rows = rows[torch.randperm(len(rows), generator=self._chance)[:BLOCK]]
        size_T = compared.size_T[rows]
        truth_TM, off_TM = (t[rows] / size_T[:, None] for t in (compared.truth_TM, compared.off_TM))
        steady = STEADY * kind.eps + x_TK.shape[1] * CUT_OFF * torch.finfo(torch.float32).eps
        return self._drifts[layer, op, x_TK.dtype].saw(
            truth_TM, off_TM, compared.expected_T[rows] / size_T**2, kind.eps, steady
        )


def _wrong(session: "Session", op: Op, layer: int, how: str) -> CallError:
    return CallError(
        Code.WRONG_ANSWER,
        f"{session.endpoint} answered {op.name} of {session.name(layer)} {how}. Do not use this executor, and tell its operator",
    )


def _random_bytes(rows: int) -> Tensor:
    return keystream(new_key(), (rows, COLUMNS), torch.int8)


def _differ(proof: Proof, x_TK: Tensor, y_TN: Tensor) -> Tensor:
    return (modular_product(y_TN, proof.r) != modular_product(x_TK, proof.s)).any(1)


def _in_pieces(s_KM: Tensor) -> Tensor:
    """Cut rows into C pieces of equal length. The last one is filled with zeros."""
    size = -(-len(s_KM) // (SUMS * PIECE)) * PIECE
    return pad(s_KM, (0, 0, 0, -len(s_KM) % size)).view(-1, size, COLUMNS)


def _compare(proof: Proof, x_TK: Tensor, y_TN: Tensor) -> Compared:
    """Compare answers with the products, both seen through R. A row may be off by what rounding explains."""
    written, summed = torch.finfo(x_TK.dtype), torch.finfo(torch.float32)
    eps, terms, columns = min(written.eps, summed.eps), x_TK.shape[1], y_TN.shape[1]
    x_TK, y_TN = x_TK.double(), y_TN.double()
    sums_CTM = _sums(x_TK, proof.s)
    seen_TM = y_TN @ proof.r
    gone = (~seen_TM.isfinite().all(1)).nonzero()[:, 0].tolist()  # rows with values that are infinite or no numbers
    off_TM = seen_TM - sums_CTM[-1]
    sizes_CT = vector_norm(sums_CTM, dim=2)
    size_T = sizes_CT.amax(0).clamp(min=written.tiny * columns**0.5)
    longest_T = vector_norm(x_TK, dim=1) * proof.norm
    lost = summed.tiny * terms * (proof.norm + columns**0.5)
    allowed_T = (WRITTEN * written.eps + terms * eps / 2) * size_T + SUMMED * eps * longest_T + lost
    right_T = vector_norm(off_TM, dim=1) <= allowed_T
    for row in gone:
        gone_N, reach_N = ~y_TN[row].isfinite(), vector_norm(x_TK[row]) * proof.column_N
        left_M = y_TN[row].masked_fill(gone_N, 0.0) @ proof.r - sums_CTM[-1, row]
        right_T[row] = _may_be_gone(proof, gone_N, reach_N, NEAR * size_T[row], written.max, left_M, allowed_T[row])
    parts_CT = vector_norm(sums_CTM.diff(dim=0, prepend=torch.zeros_like(sums_CTM[:1])), dim=2)
    on_the_way_T = sizes_CT.square().sum(0)
    by_writing_T = written.eps**2 * (on_the_way_T + parts_CT.square().sum(0))
    by_summing_T = eps**2 * (terms / len(sizes_CT) * on_the_way_T + longest_T.square())
    expected_T = (by_writing_T + by_summing_T) / 12 + lost**2
    # Of a row with infinities or no numbers every right answer is one of these: no sum with them ends in a number.
    judged_T, numbers_T = allowed_T.isfinite() & sums_CTM[-1].isfinite().all(1), x_TK.isfinite().all(1)
    wrong_T = torch.where(numbers_T, ~right_T | ~judged_T, y_TN.isfinite().any(1))
    return Compared(off_TM, sums_CTM[-1], size_T, expected_T, wrong_T)


def _may_be_gone(
    proof: Proof, gone_N: Tensor, reach_N: Tensor, size: Tensor, most: float, off_M: Tensor, allowed: Tensor
) -> bool:
    """Whether these values of a row can have overflown, and the others are right: what is missing is made up by the former."""
    overflown = int(gone_N.sum())
    if size < most or bool((reach_N[gone_N] < most).any()) or overflown**0.5 * most > size:
        return False
    if not 0 < overflown < COLUMNS:
        return True
    r_MG = proof.r[gone_N].t()
    left_M = off_M + r_MG @ lstsq(r_MG, -off_M[:, None]).solution[:, 0]
    return bool(vector_norm(left_M) <= allowed)


def _sums(x_TK: Tensor, s_CkM: Tensor) -> Tensor:
    """Return `x S` after each of the pieces. The last one is the whole product."""
    pieces, size, _ = s_CkM.shape
    x_CTk = pad(x_TK, (0, pieces * size - x_TK.shape[1])).unflatten(1, (pieces, size)).transpose(0, 1)
    return torch.bmm(x_CTk, s_CkM).cumsum(0)
