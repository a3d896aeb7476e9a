"""Sessions whose rows never leave the client as they are. A level decides what is sent instead, and makes the answer of what comes back.

The levels are `Noise` (floating point), and `Split` and `Pads` (integers modulo 2^k). A level learns every layer before `wrap` gives the
weights away. Calls that would carry a client's values in another way are refused.
"""

import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from symbiosis.client.layers.groups import GroupMember
from symbiosis.client.privacy.fixed_point import INTEGERS, Quantum, to_floats, to_integers
from symbiosis.client.privacy.verify import Proofs
from symbiosis.client.requests import refuse_tracers, refuse_transforms, rows_call, unshared
from symbiosis.client.session import Session
from symbiosis.client.stats import Stats
from symbiosis.errors import CallError, CaptureError, Code, WrapError
from symbiosis.kernels.integers import quantise
from symbiosis.protocol import Call, Op, Priority, View, width
from symbiosis.transport import Connection
from symbiosis.transport.fingerprint import digest
from symbiosis.transport.tensors import DTYPE_NAME, TORCH_DTYPE, Shapes, cut

Group = tuple[GroupMember, ...]
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
CARRY_NOTHING = frozenset((Op.NORMS, Op.READ, Op.STATS))  # ops that tell an executor nothing but what it is asked for


class Level(Protocol):
    """A way to hide rows."""

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype in which it sends them, if that is not their own."""

    def open(self, session: "PrivateSession") -> None:
        """Check, after the session has joined, that its executor can do what this level needs."""
        ...

    def learn(self, number: int, v_KN: Tensor) -> None:
        """Learn the matrix by which layer `number` multiplies rows. Called for each layer before the first call."""
        ...

    def rows(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        """Return each member's product with the rows (on the CPU), without its bias."""
        ...

    def close(self) -> None: ...


class Privacy(Protocol):
    """What users pass as `privacy=`: a level and its options."""

    def level(self, proofs: Proofs | None) -> Level: ...


class Plain:
    """Sends rows as they are, for clients that only want their answers proved."""

    wire = None

    def __init__(self, proofs: Proofs | None = None) -> None:
        self.proofs = proofs

    def level(self, proofs: Proofs | None) -> "Plain":
        return Plain(proofs)

    def open(self, session: "PrivateSession") -> None:
        self._session = session

    def learn(self, number: int, v_KN: Tensor) -> None:
        if self.proofs is not None:
            self.proofs.learn_floats(number, v_KN)

    def rows(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        for layer in (self._session.manifest[member.layer] for member in group):
            if layer.packed and layer.dtype != DTYPE_NAME[x_TK.dtype]:
                raise CallError(
                    Code.BAD_DTYPE,
                    f"{layer.name}: packed weights are rounded to the dtype of the rows, and this client has learned them in {layer.dtype}, not "
                    f"{x_TK.dtype}: keep the model in {layer.dtype}",
                )
        call, shapes = rows_call(op, group, x_TK.dtype, x_TK.shape, priority)
        return asked(self._session, self.proofs, call, (x_TK,), shapes, x_TK)

    def close(self) -> None:
        pass


class Pinned(Session):
    """A session with the executors of one operator only."""

    operator: str | None = None
    keeps_secrets = True

    def _connected(self) -> Connection:
        connection = super()._connected()
        operator = connection.welcome.operator
        if self.operator not in (None, operator):
            self._disconnect()
            raise CallError(
                Code.NOT_ALLOWED,
                f"{self.endpoint} is now run by {operator!r}, and this session's share of the rows is for {self.operator!r} only",
            )
        self.operator = operator
        return connection

    def __reduce__(self) -> tuple[Any, ...]:
        raise WrapError("a private session keeps secrets of this process: wrap the model in each process separately")


class PrivateSession(Pinned):
    """A session that sends rows as its level masks them."""

    def __init__(
        self, endpoint: str | Sequence[str], privacy: Privacy, proofs: Proofs | None = None, **options: Any
    ) -> None:
        self.level, self.proofs = privacy.level(proofs), proofs
        self._norms: dict[int, Tensor] = {}
        self._digests: dict[int, str] = {}  # of what packed weights stand for
        super().__init__(endpoint, **options)
        self.others: list[Session] = []  # with other operators
        try:
            self.level.open(self)
        except BaseException:
            self.close()
            raise

    def beside(self, endpoint: str | Sequence[str]) -> Pinned:
        """Return a session with another operator's executors of the same model. It ends with this one."""
        told = self.welcome
        other = Pinned(
            endpoint, self.priority, told.fingerprint, patience=self.patience, timeout=self.timeout, wait=self.wait
        )
        self.others.append(other)
        return other

    def learn(self, layer: int, weight: Tensor) -> None:
        """Learn what the level needs of a layer, before `wrap` gives its weight away."""
        told = self.manifest[layer]
        outputs_first = told.kind == "linear"
        if told.packed:
            self._digests[layer] = digest(weight.to(TORCH_DTYPE[told.dtype]))
        rows = (weight if outputs_first else weight.t()).to(torch.promote_types(weight.dtype, torch.float32))
        self._norms[layer] = rows.square().sum(-1).cpu()
        self.level.learn(layer, weight.t() if outputs_first else weight)

    def rows(self, op: Op, group: Group, x: Tensor, priority: Priority) -> list[Tensor]:
        refuse_transforms(x)
        if x.is_meta:
            return super().rows(op, group, x, priority)
        if x.dtype not in FLOATS:
            raise CallError(
                Code.BAD_DTYPE,
                f"{self.name(group[0].layer)}: rows of {x.dtype} can be neither masked nor verified: give it floating-point rows",
            )
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "private calls are masked on the CPU, which a CUDA graph cannot capture: do not capture the step"
            )
        x_TK = x.detach().reshape(-1, x.shape[-1]).cpu()
        results = self.level.rows(op, group, x_TK, priority)
        return [unshared(y.to(x.device, x.dtype), (*x.shape[:-1], y.shape[-1])) for y in results]

    def call(self, op: Op, layer: int, x: Tensor | None = None, **words: Any) -> Tensor:
        """Make a call with masked rows, or one that carries nothing of the client's. Any other is refused."""
        if x is None:
            return self._told(op, layer, **words)
        if x.is_meta:
            return super().call(op, layer, x, **words)
        refuse_tracers()
        layers = (layer, *words.get("also", ()))
        if not op.traits.of_whole_layers or words.get("view") is not None or words.get("bias"):
            self._refuse(op, layer)
        for unknown in (number for number in layers if number not in self._norms):
            self._refuse(op, unknown)
        made = width(self.manifest[layer], op)
        parts = cut(x, tuple((len(x), width(self.manifest[n])) for n in layers)) if len(layers) > 1 else [x]
        priority = words.get("priority", Priority.PREFILL)
        results = [
            self.rows(op, (GroupMember(n, made, False),), part, priority)[0]
            for n, part in zip(layers, parts, strict=True)
        ]
        return torch.stack(results).sum(0) if len(results) > 1 else results[0]

    def _told(self, op: Op, layer: int, **words: Any) -> Tensor:
        """Return the answer to a call without rows. With `verify=`, only norms that the client knows and weights with the right digest
        are accepted."""
        if op is Op.NORMS and layer in self._norms:
            return self._norms[layer].to(words["dtype"])
        if op is Op.READ and self.proofs is not None:
            return self._read(layer, **words)
        if op not in CARRY_NOTHING or self.proofs is not None:
            self._refuse(op, layer)
        return super().call(op, layer, **words)

    def _read(self, layer: int, *, dtype: torch.dtype, view: View | None = None, **words: Any) -> Tensor:
        """Return a weight, or a view of it, if it is the one that `wrap` was told of and compared with the client's."""
        told = self.manifest[layer]
        weight = super().call(Op.READ, layer, dtype=TORCH_DTYPE[told.dtype], **words)
        if tuple(weight.shape) != told.shape or digest(weight) != self._digests.get(layer, told.digest):
            raise CallError(
                Code.WRONG_ANSWER,
                f"{self.endpoint} answered READ of {told.name} with other values than it served when this client joined. Do not use this "
                "executor, and tell its operator",
            )
        weight = weight.to(dtype)
        return weight if view is None else weight.as_strided(*view)

    def all_stats(self) -> Stats:
        """Return the figures of this session and of the sessions with other operators."""
        total = self.stats.copy()
        for other in self.others:
            total.add(other.stats)
        return total

    def _refuse(self, op: Op, layer: int) -> NoReturn:
        raise CallError(
            Code.NOT_ALLOWED,
            f"{self.name(layer)}: {op.name} would send rows that are not masked, or get an answer that is not verified. With privacy= or "
            "verify= a client can use methods that need a layer's output and gradient only; keep this layer on the client (wrap's "
            "layers=) for others",
        )

    def close(self, timeout: float = 1.0) -> None:
        self.level.close()
        end = time.monotonic() + timeout
        for session in self.others:
            session.close(max(0.0, end - time.monotonic()))
        super().close(max(0.0, end - time.monotonic()))


def asked(
    session: Pinned, proofs: Proofs | None, call: Call, sent: tuple[Tensor, ...], shapes: Shapes, rows: Tensor
) -> list[Tensor]:
    """Return the executor's answer, proved if that is wanted. `rows` are those that were sent, or those that the seed stands for."""
    results = session.send(call, sent, shapes)  # again, byte by byte the same, if no answer comes
    if proofs is not None:
        for layer, y_TN in zip(call.layers, results, strict=True):
            proofs.check(session, call.op, layer, rows, y_TN)
    return results


def must_be_two_operators(one: Pinned, two: Pinned) -> None:
    """Raise `WrapError` unless two sessions have different operators: splitting rows does not protect against one who runs both
    executors."""
    nameless = next((session for session in (one, two) if not _owner(session)), None)
    if nameless is not None:
        raise WrapError(
            f"{nameless.endpoint} does not say who runs it, so {one.endpoint} and {two.endpoint} may have the same operator: "
            "start it with --operator NAME"
        )
    if _owner(one) == _owner(two):
        raise WrapError(
            f"{one.endpoint} and {two.endpoint} are both run by {one.welcome.operator!r}, who would see everything: take the second "
            "executor from another owner"
        )


def _owner(session: Pinned) -> str:
    """Return the operator's name as it is compared: capitals and spaces at the ends do not count."""
    return session.welcome.operator.strip().casefold()


class IntegerLevel:
    """Rows as integers modulo 2^k. `masked` decides how they are hidden.

    The result of `masked` is the product of the integers with the executor's quantised weights: the masks leave nothing behind.
    """

    wire = None  # integers are made of weights in their layer's dtype

    def __init__(self, bits: int, proofs: Proofs | None) -> None:
        self.bits, self.dtype, self.proofs = bits, INTEGERS[bits], proofs
        self._layers: dict[int, Quantum] = {}
        # The largest, by the width of rows: how they are grouped must not matter.
        self._norms: dict[tuple[Op, int], float] = {}

    def learn(self, number: int, v_KN: Tensor) -> None:
        digits_DKN, unit_N = quantise(v_KN, self.bits)
        known = self._layers[number] = Quantum.of(digits_DKN, unit_N)
        for key, norm in (((Op.FORWARD, v_KN.shape[0]), known.column), ((Op.DGRAD, v_KN.shape[1]), known.row)):
            self._norms[key] = max(norm, self._norms.get(key, 1.0))
        if self.proofs is not None:
            self.proofs.learn_integers(number, digits_DKN)

    def rows(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        units: list[Tensor | None] = [self._layers[member.layer].unit_N for member in group]
        dtype = x_TK.dtype
        if op is Op.DGRAD:
            x_TK, units = x_TK * units[0], [None]  # type: ignore[operator]
        x_int, step_T1 = to_integers(x_TK, self._norms[op, x_TK.shape[1]], self.dtype)
        results = self.masked(op, group, x_int, priority)
        return [to_floats(y_TN, step_T1, unit_N, dtype) for y_TN, unit_N in zip(results, units, strict=True)]

    def masked(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        raise NotImplementedError

    def call_for(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> tuple[Call, Shapes]:
        return rows_call(op, group, self.dtype, x_TK.shape, priority)

    def needs(self, session: Pinned) -> None:
        """Check that the executor serves integers."""
        if self.bits not in session.welcome.integers:
            raise WrapError(
                f"{session.endpoint} does not serve integer products with {self.bits}-bit weights: its operator must start it with "
                f"--integers {self.bits}"
            )


def checked_bits(bits: int) -> None:
    if type(bits) is not int or bits not in INTEGERS:
        raise WrapError(f"weights are quantised to 8 or 16 bits, not to {bits!r:.80}")


def checked_count(what: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise WrapError(f"{what} is a whole number of at least {least}, not {value!r:.80}")
