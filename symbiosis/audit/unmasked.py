"""The integer model without masks and without executors, which masked results must equal bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis.audit.owner import Owner
from symbiosis.client.privacy.masked_session import Group, IntegerLevel, PrivateSession
from symbiosis.client.privacy.verify import Proofs
from symbiosis.kernels.integers import modular_product, quantise
from symbiosis.protocol import Op, Priority


@dataclass(frozen=True)
class Unmasked:
    """A level that sends nothing: it multiplies by the weights that `wrap` shows it."""

    bits: int = 8

    def level(self, proofs: Proofs | None) -> "UnmaskedLevel":
        return UnmaskedLevel(self.bits, proofs)


class UnmaskedLevel(IntegerLevel):
    """The fixed-point code of the masked levels, around a local product."""

    def open(self, session: PrivateSession) -> None:
        self._digits: dict[tuple[Op, int], Tensor] = {}

    def learn(self, number: int, v_KN: Tensor) -> None:
        super().learn(number, v_KN)
        digits_DKN, _ = quantise(v_KN, self.bits)
        self._digits[Op.FORWARD, number] = digits_DKN
        self._digits[Op.DGRAD, number] = digits_DKN.transpose(1, 2).contiguous()

    def masked(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        return [modular_product(x_TK, self._digits[op, member.layer]) for member in group]

    def close(self) -> None:
        pass


def unequal_values(one: Owner, other: Owner) -> int:
    """Count the values that differ in the trained adapters, which every product had a part in, and in the logits."""
    pairs = [(p, other.adapter[name]) for name, p in one.adapter.items()] + [(one.logits, other.logits)]
    return sum(int(torch.ne(a.view(torch.int32), b.view(torch.int32)).sum()) for a, b in pairs)
