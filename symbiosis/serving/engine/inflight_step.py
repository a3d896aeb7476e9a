"""A step under way: launched, and not told of yet. The next one may be launched behind it, though its tokens are known on the device only."""

from dataclasses import replace
from typing import NamedTuple

from symbiosis.serving.sampling.sampler import Chosen, depends_on_tokens
from symbiosis.serving.scheduler.scheduler_output import Fed, SchedulerOutput, Sequence


class InflightStep(NamedTuple):
    """A step, what it chooses, and for each sequence that chooses, where in its tokens that comes."""

    step: SchedulerOutput
    chosen: Chosen
    places: dict[Sequence, int]

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
