"""`Noise`: noise is added to rows, and its known effect `n W` is subtracted from the answers. This is obfuscation, not secrecy.

Noise vectors are drawn once for each width, and the effects of all layers are computed from the weights before `wrap` gives them away. An
operator who logs enough rows finds the space of the vectors. One who was asked for the effects knows each vector.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symbiosis.base.keystream import keystream, new_key
from symbiosis.client import arguments
from symbiosis.client.privacy.masked_session import Group, Pinned, asked, checked_count, must_be_two_operators
from symbiosis.client.privacy.verify import Proofs
from symbiosis.client.requests import rows_call
from symbiosis.errors import WrapError
from symbiosis.protocol import Call, Op, Priority

if TYPE_CHECKING:
    from symbiosis.client.privacy.masked_session import PrivateSession

WIRE = torch.float32


@dataclass(frozen=True)
class Noise:
    """The scheme of the paper. It is cheap, and no protection against an operator who wants to know.

    Args:
        scale: Of the noise, in units of each row's own root mean square.
        pool: How many noise vectors there are for each width of rows.
        every: After so many rows the next vector is taken, in turn; 0: each row takes one by chance.
        effects: Where the noise's effects come from: None, this process (from the weights that the model has); an endpoint, an
            executor of another `--operator`; "same", the one that serves the rows.
        allow_known_noise: Must be said where the operator that serves the rows computes the effects, or may: that one knows the noise.

    >>> Noise(scale=64.0).pool
    16
    """

    scale: float = 16.0
    pool: int = 16
    every: int = 0
    effects: str | None = None
    allow_known_noise: bool = False

    def level(self, proofs: Proofs | None) -> "NoiseLevel":
        arguments.flag("Noise: allow_known_noise", self.allow_known_noise)
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float) or not 0 < self.scale < math.inf:
            raise WrapError(f"Noise: scale is a positive number, not {self.scale!r}")
        checked_count("Noise: pool", self.pool, 1)
        checked_count("Noise: every", self.every, 0)
        if not isinstance(self.effects, str | None):
            raise WrapError(f"Noise: effects is an endpoint or 'same', not {self.effects!r}")
        if self.effects == "same" and not self.allow_known_noise:
            raise WrapError(
                "an executor that computes the effects of the noise knows the noise, and with it every row. Leave out effects=, "
                "or name another operator's executor; allow_known_noise=True says that this is not meant to protect"
            )
        return NoiseLevel(self, proofs)


class NoiseLevel:
    """Adds noise to rows, and takes its effects away."""

    wire = WIRE

    def __init__(self, options: Noise, proofs: Proofs | None) -> None:
        self.options, self.proofs = options, proofs
        self._noise: dict[int, Tensor] = {}  # by width
        self._effects: dict[tuple[int, Op], Tensor] = {}
        self._sent = 0
        self._source: Pinned | None = None

    def open(self, session: "PrivateSession") -> None:
        self._session = session
        wanted = self.options.effects
        if wanted == "same":
            self._source = session
        elif wanted is not None:
            self._source = session.beside(wanted)
            if not self.options.allow_known_noise:
                must_be_two_operators(session, self._source)

    def learn(self, number: int, v_KN: Tensor) -> None:
        if self.proofs is not None:
            self.proofs.learn_floats(number, v_KN)
        for op, w in ((Op.FORWARD, v_KN), (Op.DGRAD, v_KN.t())):
            noise_PK = self._noise_of(w.shape[0])
            self._effects[number, op] = self._effect(op, number, noise_PK, w)

    def _noise_of(self, width: int) -> Tensor:
        if width not in self._noise:
            self._noise[width] = gaussian(self.options.pool, width)
        return self._noise[width]

    def _effect(self, op: Op, number: int, noise_PK: Tensor, w_KN: Tensor) -> Tensor:
        if self._source is None:
            return (noise_PK.double() @ w_KN.double().cpu()).to(WIRE)
        call = Call(op, number, "float32", tuple(noise_PK.shape))
        return asked(self._source, self.proofs, call, (noise_PK,), (), noise_PK)[0]

    def rows(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        x_TK = x_TK.to(WIRE)
        size_T1 = self.options.scale * x_TK.square().mean(1, keepdim=True).sqrt()
        chosen_T = self._choice(len(x_TK))
        call, shapes = rows_call(op, group, WIRE, x_TK.shape, priority)
        sent_TK = x_TK + size_T1 * self._noise_of(x_TK.shape[1])[chosen_T]
        results = asked(self._session, self.proofs, call, (sent_TK,), shapes, sent_TK)
        effects = [self._effects[member.layer, op] for member in group]
        return [y_TN - size_T1 * effect_PN[chosen_T] for y_TN, effect_PN in zip(results, effects, strict=True)]

    def _choice(self, rows: int) -> Tensor:
        """Choose the noise vector of each row."""
        pool, every = self.options.pool, self.options.every
        if not every:
            return keystream(new_key(), (rows, 1), torch.int64)[:, 0].remainder(pool)
        first, self._sent = self._sent, self._sent + rows
        return torch.arange(first, first + rows).div(every, rounding_mode="floor").remainder(pool)

    def close(self) -> None:
        pass


def gaussian(rows: int, width: int) -> Tensor:
    """Return normally distributed values that nobody can foretell (Box and Muller)."""
    half = -(-width // 2)
    uniform = keystream(new_key(), (2 * rows, half), torch.int64).double().div_(2.0**64).add_(0.5)
    radius, angle = uniform[:rows].clamp_min(2.0**-60).log().mul_(-2).sqrt_(), uniform[rows:] * (2 * torch.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :width].to(WIRE)
