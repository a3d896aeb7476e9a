"""Guesses that a text goes on as it did where its last tokens stood before ("prompt lookup")."""

from array import array
from collections.abc import Mapping

from symbiosis.serving.scheduler.scheduler_output import Sequence

LONGEST, SHORTEST = 4, 2  # tokens at the end of a text that are looked for before
BYTES = array("i").itemsize


class NgramProposer:
    """Looks in each text, a prediction, the prompt and what was chosen, for the last place at which its end stands, too."""

    def __init__(self) -> None:
        self._texts: dict[Sequence, bytearray] = {}

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Return up to so many tokens for each sequence."""
        return {each: found for each, count in wanted.items() if (found := continued(self._text(each), count))}

    def forget(self, sequence: Sequence) -> None:
        """Free a text."""
        self._texts.pop(sequence, None)

    def _text(self, sequence: Sequence) -> bytearray:
        """Return a sequence's tokens in memory that is searched quickly, without what stands for an adapter's, and behind what is predicted."""
        prediction = sequence.request.prediction
        if (text := self._texts.get(sequence)) is None:
            text = self._texts[sequence] = bytearray(array("i", prediction).tobytes())
        known = len(text) // BYTES - len(prediction)
        text += array("i", sequence.tokens[sequence.virtual + known :]).tobytes()
        return text


def continued(text: bytearray, count: int) -> tuple[int, ...]:
    """Return so many tokens with which a text may go on: those behind the last place where its end stands already. What comes up to its end goes on
    with what is guessed itself.

    >>> continued(bytearray(array("i", [1, 2, 3, 4, 9, 2, 3]).tobytes()), 3)
    (4, 9, 2)
    >>> continued(bytearray(array("i", [7, 1, 2, 1, 2]).tobytes()), 5), continued(bytearray(array("i", [1, 2, 3]).tobytes()), 5)
    ((1, 2, 1, 2, 1), ())
    """
    for length in range(LONGEST, SHORTEST - 1, -1):
        if (place := _last_place(text, length)) is not None:
            tokens = array("i", bytes(text[place + BYTES * length :]))
            known = len(tokens)
            for number in range(known, count):
                tokens.append(tokens[number - known])
            return tuple(tokens[:count])
    return ()


def _last_place(text: bytearray, length: int) -> int | None:
    """Return at which byte the last so many tokens of a text stand before their own place."""
    size = BYTES * length
    if len(text) <= size:
        return None
    end, wanted = len(text) - BYTES, bytes(text[-size:])
    while (place := text.rfind(wanted, 0, end)) >= 0:
        if place % BYTES == 0:
            return place
        end = place + size - 1
    return None
