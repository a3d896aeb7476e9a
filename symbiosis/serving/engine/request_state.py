"""A request under way, with its completions, and what the one who asked is told of them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from symbiosis.base.logs import about_request
from symbiosis.serving.engine.prompt_vector import PromptVector
from symbiosis.serving.request import Finish, Output, Request, Token
from symbiosis.serving.sampling.grammar import Grammar
from symbiosis.serving.sampling.sampler import logprobs_of
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, Sequence

logger = logging.getLogger("symbiosis")


@dataclass(slots=True)
class RequestState:
    """The state of one request. Only the engine's thread touches it."""

    request: Request
    sequences: list[Sequence]
    grammars: list[Grammar]  # of each completion, if its text has to follow one
    on_output: Callable[[Output], None]
    prompt: dict[int, Token] = field(default_factory=dict)  # by position: log probabilities of the prompt's tokens
    vector: PromptVector | None = None  # of a request that wants one
    has_told: bool = False
    failure: str = ""  # why it cannot go on

    def tell(
        self,
        completion: int,
        tokens: tuple[Token, ...] = (),
        finish: Finish | None = None,
        error: str | None = None,
        vector: bytes = b"",
    ) -> bool:
        """Hand over an output. Return whether it was taken."""
        first = self.sequences[0]
        output = Output(
            request=self.request.id, completion=completion, tokens=tokens, finish=finish, error=error, vector=vector,
            model_version=first.version,
        )  # fmt: skip
        if not self.has_told:
            self.has_told = True
            output = msgspec.structs.replace(
                output,
                prompt_tokens=len(self.request.prompt),
                cached_tokens=min(max(0, first.cached - first.virtual), len(self.request.prompt)),
                prompt_logprobs=self._prompt_logprobs() if self.prompt else (),
                begun=first.began,
            )
        try:
            self.on_output(output)
        except Exception:  # of theirs; nobody else may suffer
            with about_request(self.request.external_id):
                logger.exception("request %d is dropped: its on_output failed", self.request.id)
            return False
        return True

    def read_prompt(self, segment: ScheduledRequest, logits: Tensor) -> None:
        """Note the log probabilities of a segment of the prompt, given the logits of all its rows."""
        tokens, start = segment.sequence.tokens, segment.sequence.virtual
        last = segment.sequence.prompt_length
        told = [place for place in range(segment.position, segment.end) if start <= place + 1 < last]
        if told:
            rows = logits[[place - segment.position for place in told]]
            found = logprobs_of(rows, [tokens[place + 1] for place in told], self.request.prompt_logprobs or 0)
            self.prompt |= {place + 1 - start: token for place, token in zip(told, found, strict=True)}

    def _prompt_logprobs(self) -> tuple[Token, ...]:
        return tuple(self.prompt.get(place, Token(token)) for place, token in enumerate(self.request.prompt))
