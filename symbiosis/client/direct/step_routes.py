"""Which way a captured step takes: by mapped weights or by calls. It cannot decide product by product, so what is advised when the
step begins holds for all of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from symbiosis.client.connection.lifetime import sessions
from symbiosis.client.direct.mapped import DirectFigures, Mapped
from symbiosis.transport.base import Advice, Tokens


class Way(NamedTuple):
    """What one session is advised, as far as that makes a difference, and since which join its weights are mapped."""

    session: int
    join: int
    others: int | None
    give_way: bool | None


class Multiplied(NamedTuple):
    """What a step multiplies by the mapped weights of one session."""

    mapped: Mapped
    figures: DirectFigures
    tokens: Tokens

    def happens(self, times: int = 1) -> None:
        """Book the step so many times: when it runs again; or -1 times, when it was captured and did not run."""
        self.mapped.count(*(times * figure for figure in self.figures))
        if times > 0:
            self.mapped.made(self.tokens)


def advised() -> tuple[Way, ...]:
    """Return what the sessions with mapped weights on GPUs are advised now."""
    found = []
    for session in sessions():
        if (mapped := session.mapped) is not None and mapped.device.type == "cuda":
            advice = mapped.advice()
            found.append(Way(session.number, mapped.joins, min(advice.others, 1), advice.give_way))
    return tuple(found)


def narrowed(chosen: tuple[Way, ...], asked: dict[int, tuple[bool, bool]]) -> tuple[Way, ...]:
    """Return these ways without the advice that makes no difference to a step. That is known once the step has run: `asked` says for each
    session whether the step asked about tokens, and about training."""

    def one(way: Way) -> Way:
        tokens, training = asked.get(way.session, (True, True))
        return way._replace(others=way.others if tokens else None, give_way=way.give_way if training else None)

    return tuple(map(one, chosen))


@contextmanager
def following(chosen: tuple[Way, ...], asked: dict[int, tuple[bool, bool]]) -> Iterator[list[Multiplied]]:
    """Let products in the block go these ways. Afterwards `asked` has what was asked, and what was yielded has what was multiplied."""
    by_number = {session.number: session.mapped for session in sessions()}
    used = [(way, mapped) for way in chosen if (mapped := by_number.get(way.session)) is not None]
    before = [mapped.figures for _, mapped in used]
    for way, mapped in used:
        mapped.asked_for_tokens = mapped.asked_for_training = False
        mapped.tokens = Tokens.NONE
        mapped.fixed = Advice(way.others or 0, way.give_way or False)
    parts: list[Multiplied] = []
    try:
        yield parts
    finally:
        for (way, mapped), then in zip(used, before, strict=True):
            mapped.fixed = None
            tokens, training = asked.get(way.session, (False, False))
            asked[way.session] = tokens or mapped.asked_for_tokens, training or mapped.asked_for_training
            figures = mapped.figures.since(then)
            if figures.calls or mapped.tokens:
                parts.append(Multiplied(mapped, figures, mapped.tokens))
