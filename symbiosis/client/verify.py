"""Freivalds' test of an executor's answers: `y R == x (W R)` for a secret random R, known before the first call.

`W R` is as narrow as R, so the test costs a small part of the product. A wrong answer passes with a probability of at most 2^-24 with
integers (24 columns, because modulo 2^k half of the columns may miss a wrong highest bit). With floating point an answer must be
wrong by more than rounding explains.
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
ROUNDING = 16.0  # how many times its expected size an error of rounding may have


class Proof(NamedTuple):
    """For one layer and direction: R, and W R, as integers' digits or as they are; and the largest norm of W's columns."""

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
        for op, w_KN in ((Op.FORWARD, v_KN), (Op.DGRAD, v_KN.t())):
            r_NM = _random_bytes(w_KN.shape[1]).double() / 128
            norm = torch.linalg.vector_norm(w_KN.double(), dim=0).max().item()
            self._known[number, op] = Proof(r_NM, w_KN.double().cpu() @ r_NM, norm)

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
    """Every value of a row may be off by what rounding K products and one result explains."""
    x_TK, eps = x_TK.double(), torch.finfo(y_TN.dtype).eps
    norms_T1 = torch.linalg.vector_norm(x_TK, dim=1, keepdim=True) * proof.norm
    length = torch.linalg.vector_norm(proof.r, dim=0).max()
    allowed = ROUNDING * eps * norms_T1 * length
    return ~((y_TN.double() @ proof.r - x_TK @ proof.s).abs() <= allowed).all(1) & x_TK.isfinite().all(1)
