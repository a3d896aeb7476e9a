"""Freivalds' test of an executor's answers: `y R == x (W R)` for a secret random R, known before the first call.

`W R` is as narrow as R, so the test costs a small part of the product. A wrong answer passes with a probability of at most 2^-24 with
integers (24 columns, because modulo 2^k half of the columns may miss a wrong highest bit). With floating point an answer must be
wrong by more than rounding explains: by some hundredths of its row's length in bfloat16, some thousandths in float16, some 10^-4 in float32.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from symbiosis.client.fixed_point import INTEGERS
from symbiosis.errors import CallError, Code
from symbiosis.kernels.integers import digits, modular_product, product_of_bytes
from symbiosis.keystream import keystream, new_key
from symbiosis.protocol import Op

if TYPE_CHECKING:
    from symbiosis.client.session import Session

COLUMNS = 24  # of R
ROUNDED = 4.0  # how many times what each value of an answer loses by rounding, by chance no two in the same direction
EPS_32 = torch.finfo(torch.float32).eps
SUMMED = 16.0  # ... and what a sum of products loses in float32


class Proof(NamedTuple):
    """For one layer and direction: R, and W R, as integers' digits or as they are. Of floats also how large the terms of `x W R` are
    (squares, to be weighed by those of x), and how long the columns of W, as R weighs them."""

    r: Tensor
    s: Tensor
    squares_KM: Tensor | None = None
    lengths_M: Tensor | None = None


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
        for op, w_KN in ((Op.FORWARD, v_KN), (Op.DGRAD, v_KN.t())):
            r_NM = _random_bytes(w_KN.shape[1]).double() / 128
            w_KN = w_KN.double().cpu()
            squares_KM = w_KN.square() @ r_NM.square()
            self._known[number, op] = Proof(r_NM, w_KN @ r_NM, squares_KM, squares_KM.sum(0).sqrt())

    def check(self, session: "Session", op: Op, layer: int, x_TK: Tensor, y_TN: Tensor) -> None:
        """`CallError` with the executor and the layer if `y_TN` is not what `op` makes of the rows."""
        proof = self._known[layer, op]
        wrong = (_differ if proof.r.dtype is torch.int8 else _differ_by_much)(proof, x_TK, y_TN)
        self.checked += 1
        if wrong.any():
            raise CallError(
                Code.WRONG_ANSWER,
                f"{session.endpoint} answered {op.name} of {session.name(layer)} wrongly: {int(wrong.sum())} of {len(wrong)} rows "
                "are not the product of what was sent. Do not use this executor, and tell its operator",
            )


def _random_bytes(rows: int) -> Tensor:
    return keystream(new_key(), (rows, COLUMNS), torch.int8)


def _differ(proof: Proof, x_TK: Tensor, y_TN: Tensor) -> Tensor:
    return (modular_product(y_TN, proof.r) != modular_product(x_TK, proof.s)).any(1)


def _differ_by_much(proof: Proof, x_TK: Tensor, y_TN: Tensor) -> Tensor:
    """A row may be off by what rounding explains. Each value of it is rounded once, and where a GPU sums in parts, each part, which has the
    size that the terms have together; the sums themselves are made in float32."""
    assert proof.squares_KM is not None and proof.lengths_M is not None
    eps, least = torch.finfo(y_TN.dtype).eps, torch.finfo(y_TN.dtype).tiny
    least *= eps if y_TN.dtype is torch.float16 else x_TK.shape[1]  # the others' smaller terms may be taken for zero
    x_TK, y_TN = x_TK.double(), y_TN.double()
    values_TM = (y_TN.square() @ proof.r.square()).sqrt()
    parts_TM = (x_TK.square() @ proof.squares_KM).sqrt()
    sums_TM = torch.linalg.vector_norm(x_TK, dim=1, keepdim=True) * proof.lengths_M
    rounded_TM = eps * (values_TM + parts_TM) + least * torch.linalg.vector_norm(proof.r, dim=0)
    allowed_TM = ROUNDED * rounded_TM + SUMMED * min(eps, EPS_32) * sums_TM
    return ~((y_TN @ proof.r - x_TK @ proof.s).abs() <= allowed_TM).all(1) & x_TK.isfinite().all(1)
