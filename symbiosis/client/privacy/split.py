"""`Split`: each row becomes two shares, for two executors of different owners, each of whom sees nothing but random integers.

One executor gets `x + r` modulo 2^k, the other a seed that stands for `r`. Each multiplies what it has, and the client subtracts. `r` is
new for each call: its key comes from the operating system and is never used again. So each share alone is uniform, whatever x is; both
together are x. Nothing that was sent to one operator ever goes to the other: their names are compared at each join.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.base.forks import look_for_fork
from symbiosis.base.keystream import keystream, new_key
from symbiosis.client.privacy.masked_session import (
    Group,
    IntegerLevel,
    PrivateSession,
    asked,
    checked_bits,
    must_be_two_operators,
)
from symbiosis.client.privacy.verify import Proofs
from symbiosis.errors import WrapError
from symbiosis.protocol import Op, Priority


@dataclass(frozen=True)
class Split:
    """Perfect against each of two operators alone, up to AES; nothing against both together.

    Args:
        other: The endpoint of the second executor, which gets the seeds (or those of its replicas). It must serve the same model,
            be started with `--integers` and have another `--operator` than the one that `wrap` names.
        bits: Of the quantised weights: 8 (closer to float32 than bfloat16 is), or 16 (closer still, at twice the bytes).

    >>> import symbiosis
    >>> from transformers import AutoModelForCausalLM
    >>> from symbiosis.executor.model.load import DEMO_MODEL
    >>> options = {"integers": [8]}
    >>> one, two = (symbiosis.Executor("demo", operator=name, **options) for name in ("here", "elsewhere"))
    >>> model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    >>> model = symbiosis.wrap(model, one.endpoint, privacy=symbiosis.Split(two.endpoint))
    >>> model(torch.tensor([[72, 105]])).logits.shape
    torch.Size([1, 2, 258])
    >>> one.close(), two.close()
    (None, None)
    """

    other: str | tuple[str, ...]
    bits: int = 8

    def level(self, proofs: Proofs | None) -> "SplitLevel":
        checked_bits(self.bits)
        endpoints = (self.other,) if isinstance(self.other, str) else self.other
        if not isinstance(endpoints, tuple | list) or not all(isinstance(endpoint, str) for endpoint in endpoints):
            raise WrapError(f"Split({self.other!r}): write the endpoint of the second executor")
        return SplitLevel(self, proofs)


class SplitLevel(IntegerLevel):
    """Makes both halves of every call."""

    def __init__(self, options: Split, proofs: Proofs | None) -> None:
        super().__init__(options.bits, proofs)
        self._other_endpoint = options.other
        self._pool: tuple[int, ThreadPoolExecutor] = -1, None  # type: ignore[assignment]

    def open(self, session: PrivateSession) -> None:
        self.needs(session)  # joins
        self._first = session
        self._second = session.beside(self._other_endpoint)
        self.needs(self._second)
        self._two_operators()

    def _two_operators(self) -> None:
        must_be_two_operators(self._first, self._second)

    def masked(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        call, shapes = self.call_for(op, group, x_TK, priority)
        key = new_key()
        r_TK = keystream(key, call.shape, self.dtype)  # type: ignore[arg-type]
        seed = torch.frombuffer(bytearray(key), dtype=torch.uint8)
        second = self._thread().submit(
            asked, self._second, self.proofs, replace(call, seeded=True), (seed,), shapes, r_TK
        )
        sent_TK = x_TK + r_TK
        try:
            first = asked(self._first, self.proofs, call, (sent_TK,), shapes, sent_TK)
        finally:
            other = second.result()
        return [mine - theirs for mine, theirs in zip(first, other, strict=True)]

    def _thread(self) -> ThreadPoolExecutor:
        """Return the thread that calls for the second half. A forked child gets its own."""
        fork, pool = self._pool
        if fork != (now := look_for_fork()):
            pool = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-share")
            self._pool = now, pool
        return pool

    def close(self) -> None:
        if self._pool[0] == look_for_fork():
            self._pool[1].shutdown(wait=False)
            self._pool = -1, None  # type: ignore[assignment]
