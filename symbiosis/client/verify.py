"""Freivalds' test of an executor's answers: `y R == x (W R)` for a secret random R, known before the first call.

`W R` is as narrow as R, so the test costs a small part of the product. A wrong answer passes with a probability of at most 2^-24 with
integers (24 columns, because modulo 2^k half of the columns may miss a wrong highest bit).

With floating point an answer must be wrong by more than rounding explains. `R` keeps lengths, roughly: `|d R|` is about `|d|`. So
`|y R - x S|` is about how far a row of an answer is from the truth. It may be this far:

* `WRITTEN` roundings of the answer's dtype. A product is summed in float32 and rounded when it is written; GPUs that compute the sum
  in parts may round each part as well (`allow_bf16_reduced_precision_reduction`). What is rounded is as large as the answer, or as
  the largest sum on the way to it, `x[:k] S[:k]`: parts that cancel are larger than what they leave.
* A rounding in float32 for each of the K terms, all in one direction, of that same size.
* `SUMMED` roundings in float32 of the longest that an answer can be, `|x| |W|`, as terms may cancel between two such sums.
* What is lost if each value and each term below float32's smallest normal number is taken for zero, as some processors do.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from symbiosis.client.fixed_point import INTEGERS
from symbiosis.errors import CallError, Code
from symbiosis.kernels.integers import digits, modular_product, product_of_bytes
from symbiosis.keystream import keystream, new_key
from symbiosis.protocol import Op

if TYPE_CHECKING:
    from symbiosis.client.session import Session

COLUMNS = 24  # of R
WRITTEN, SUMMED = 8.0, 16.0  # roundings that a right answer may be off by, of its own dtype and of float32
SUMS = 32  # on the way to an answer, at most, at whose sizes we look
PIECE = 32  # rows' values that are always summed at once


class Proof(NamedTuple):
    """For one layer and direction: R, and W R, as integers' digits or, in pieces, as it is; and the norm of W."""

    r: Tensor
    s: Tensor
    norm: float = 0.0


class Proofs:
    """What a client keeps to test the answers of its executors."""

    def __init__(self) -> None:
        self.checked = 0
        self._known: dict[tuple[int, Op], Proof] = {}

    def learn_integers(self, number: int, q_DKN: Tensor) -> None:
        """`q_DKN`: the digits of a quantised layer."""
        dtype = INTEGERS[8 * len(q_DKN)]
        for op, w_DKN in ((Op.FORWARD, q_DKN.cpu()), (Op.DGRAD, q_DKN.transpose(1, 2).cpu())):
            r_NM = _random_bytes(w_DKN.shape[2])
            s_KM = torch.stack([product_of_bytes(w, r_NM).to(dtype) << 8 * n for n, w in enumerate(w_DKN)]).sum(0)
            self._known[number, op] = Proof(r_NM.unsqueeze(0), digits(s_KM.to(dtype)))

    def learn_floats(self, number: int, v_KN: Tensor) -> None:
        norm = vector_norm(v_KN.double()).item()
        for op, w_KN in ((Op.FORWARD, v_KN), (Op.DGRAD, v_KN.t())):
            r_NM = _random_bytes(w_KN.shape[1]).double() / (128 * (COLUMNS / 3) ** 0.5)
            self._known[number, op] = Proof(r_NM, _in_pieces(w_KN.double().cpu() @ r_NM), norm)

    def check(self, session: "Session", op: Op, layer: int, x_TK: Tensor, y_TN: Tensor) -> None:
        """`CallError` with the executor and the layer if `y_TN` is not what `op` makes of the rows."""
        wrong = self.wrong(op, layer, x_TK, y_TN)
        self.checked += 1
        if wrong.any():
            raise CallError(
                Code.WRONG_ANSWER,
                f"{session.endpoint} answered {op.name} of {session.name(layer)} wrongly: {int(wrong.sum())} of {len(wrong)} rows "
                "are not the product of what was sent. Do not use this executor, and tell its operator",
            )

    def wrong(self, op: Op, layer: int, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """For each row, whether it is not what `op` makes of it."""
        proof = self._known[layer, op]
        return (_differ if proof.r.dtype is torch.int8 else _differ_by_much)(proof, x_TK, y_TN)


def _random_bytes(rows: int) -> Tensor:
    return keystream(new_key(), (rows, COLUMNS), torch.int8)


def _differ(proof: Proof, x_TK: Tensor, y_TN: Tensor) -> Tensor:
    return (modular_product(y_TN, proof.r) != modular_product(x_TK, proof.s)).any(1)


def _in_pieces(s_KM: Tensor) -> Tensor:
    """C pieces of as many rows, the last one filled with zeros."""
    size = -(-len(s_KM) // (SUMS * PIECE)) * PIECE
    return pad(s_KM, (0, 0, 0, -len(s_KM) % size)).view(-1, size, COLUMNS)


def _differ_by_much(proof: Proof, x_TK: Tensor, y_TN: Tensor) -> Tensor:
    """A row may be off by what rounding explains; one that has overflown, as it may, has nothing left to be tested."""
    written, summed = torch.finfo(y_TN.dtype), torch.finfo(torch.float32)
    eps, terms, columns = min(written.eps, summed.eps), x_TK.shape[1], y_TN.shape[1]
    x_TK, y_TN = x_TK.double(), y_TN.double()
    sums_CTM = _sums(x_TK, proof.s)
    off_T = vector_norm(y_TN @ proof.r - sums_CTM[-1], dim=1)
    answer_T = vector_norm(y_TN.abs().clamp(min=written.tiny), dim=1)
    largest_T = torch.maximum(vector_norm(sums_CTM, dim=2).amax(0), answer_T)
    longest_T = vector_norm(x_TK, dim=1) * proof.norm
    lost = summed.tiny * terms * (proof.norm + columns**0.5)
    allowed_T = (WRITTEN * written.eps + terms * eps / 2) * largest_T + SUMMED * eps * longest_T + lost
    finite_T = y_TN.isfinite().all(1)
    right_T = torch.where(finite_T, off_T <= allowed_T, longest_T > written.max)
    return ~right_T & x_TK.isfinite().all(1)


def _sums(x_TK: Tensor, s_CkM: Tensor) -> Tensor:
    """`x S` after each of the pieces, of which the last is all of it."""
    pieces, size, _ = s_CkM.shape
    x_CTk = pad(x_TK, (0, pieces * size - x_TK.shape[1])).unflatten(1, (pieces, size)).transpose(0, 1)
    return torch.bmm(x_CTk, s_CkM).cumsum(0)
