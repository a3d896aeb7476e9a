"""A step under way: launched, and not told of yet. The next one may be launched behind it, though its tokens are known on the device only."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from symbiosis.serving.request import Token
from symbiosis.serving.sampling.sampler import Chosen, depends_on_tokens
from symbiosis.serving.scheduler.scheduler_output import Fed, SchedulerOutput, Sequence

UNKNOWN = 0  # stands for a token that is on its way


@dataclass(slots=True, frozen=True)
class InflightStep:
    """A step, what it chooses, and for each sequence that chooses, where in its tokens that comes."""

    step: SchedulerOutput
    chosen: Chosen
    places: dict[Sequence, int]

    @classmethod
    def of(cls, step: SchedulerOutput, chosen: Chosen) -> "InflightStep":
        """Make the sequences longer by what they choose."""
        places = {}
        for segment in step.segments:
            if segment.chooses:
                places[segment.sequence] = len(segment.sequence.tokens)
                segment.sequence.tokens.append(UNKNOWN)
        return cls(step, chosen, places)

    @property
    def may_be_followed(self) -> bool:
        """Whether the next tokens can be chosen before these are known."""
        return not any(depends_on_tokens(sequence.request.sampling) for sequence in self.places)

    def feed(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return the step after this one with the tokens that this one chooses."""
        rows, sources = [], []
        numbers = {sequence: number for number, sequence in enumerate(self.places)}
        for segment in step.segments:
            if (number := numbers.get(segment.sequence)) is not None:
                rows.append(segment.first)
                sources.append(number)
        return replace(step, fed=Fed(rows, sources, self.chosen.ids)) if rows else step

    def tokens(self) -> Iterator[tuple[Sequence, int, Token | None]]:
        """Wait for the tokens, give them to the sequences, and return each with its place."""
        found = list(zip(self.places.items(), self.chosen.tokens(), strict=True))
        for (sequence, place), token in found:
            if token is not None:
                sequence.tokens[place] = token.id
        return ((sequence, place, token) for (sequence, place), token in found)
