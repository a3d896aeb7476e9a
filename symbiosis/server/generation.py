"""The completions of one call of the API. Tokens become text as they come, however slowly the client reads."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from symbiosis.base.fair_share import Lease
from symbiosis.base.logs import about_request
from symbiosis.server.api_errors import ApiError, failed, renamed, unknown_model
from symbiosis.server.ipc.engine_client import EngineClient
from symbiosis.server.ipc.engine_ipc import ReceivedOutput
from symbiosis.server.request_record import this_request
from symbiosis.serving.engine.detokenize import Text
from symbiosis.serving.request import Finish, Output, Request, Token

logger = logging.getLogger("symbiosis")

NO_ROOM = (
    "too many log probabilities wait for the reader of this answer, beside those of others: ask for fewer tokens, or for a "
    "stream, and read it as it comes"
)
FAILURES = {
    Finish.ABORTED: (503, "the server is too busy to begin in time: try again later", "overloaded"),
    Finish.CANCELLED: (503, "the request was cancelled by the server", "cancelled"),
    Finish.ERROR: (500, "the request failed", "failed"),
    Finish.UNFIT: (400, "the schema or grammar cannot be followed", "invalid_request"),
}


class Delta(msgspec.Struct, gc=False):
    """What one completion has gained since it was last read."""

    choice: int
    text: str = ""
    tokens: list[Token] = []
    finish: str | None = None
    so_far: int = 0  # tokens that the choice has with these
    vector: bytes = b""  # of a prompt of which one is wanted
    prompt_logprobs: bytes = b""  # packed: they wait for those of all other prompts, and take little room so


def join(whole: Delta, more: Delta) -> None:
    """Add to what a completion has gained what it has gained since."""
    whole.text += more.text
    whole.tokens.extend(more.tokens)
    whole.prompt_logprobs = whole.prompt_logprobs or more.prompt_logprobs
    whole.finish = more.finish


HandOver = Callable[[Callable[[], list[Delta]]], bool]  # gets what reads what is new; whether it has read it


@dataclass(slots=True)
class Choice:
    """One completion under way."""

    text: Text
    delta: Delta
    told: int  # tokens
    finish: str | None = None

    def add(self, output: Output) -> tuple[Token, ...]:
        """Add tokens, and return those that are part of the text: of several, those up to the end of a stop string."""
        delta, before = self.delta, self.text.taken
        new = self.text.add([token.id for token in output.tokens])
        tokens = output.tokens[: self.text.taken - before]
        if self.text.stopped:
            self.finish = "stop"
        elif output.finish is not None:
            new += self.text.end()
            self.finish = "stop" if self.text.stopped else output.finish.value
        delta.text += new
        delta.tokens.extend(tokens)
        delta.finish = self.finish
        return tokens


class Generation:
    """Requests that are answered together, one for each prompt.

    Args:
        new_text: Makes the text of a completion.
        names: Returns what the API calls fields of the engine's, by which it may refuse.
    """

    def __init__(
        self,
        remote: EngineClient,
        requests: Sequence[Request],
        new_text: Callable[[], Text],
        names: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._remote, self._names = remote, names
        self._record = this_request()
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.cached_tokens = 0
        self.completion_tokens = sum(len(tokens) for request in requests for tokens in request.chosen)
        self._failure: ApiError | None = None
        self._is_left = False  # ended before it was over
        self._is_refused = False  # nothing was computed of it
        self._new: dict[int, Choice] = {}
        self._event, self._is_awaited = asyncio.Event(), False
        self.hand_over: HandOver | None = None
        self.held: Lease | None = None  # room for the log probabilities of tokens that wait for their reader
        self._open: dict[int, dict[int, Choice]] = {}  # completions under way, by request
        self.choices = self.completions = self.most_tokens = 0  # completions: those under way
        self.prompts_of: list[int] = []  # tokens of each choice's prompt
        self.told_before: dict[int, str] = {}  # the text of choices that another server has told
        for request in requests:
            under_way = dict[int, Choice]()
            for number in request.under_way:
                choice = under_way[number] = Choice(new_text(), Delta(self.choices + number), 0)
                if request.chosen:  # which was handed out elsewhere
                    self.told_before[self.choices + number] = choice.text.add(request.chosen[number])
                    choice.told = len(request.chosen[number])
            if under_way:
                self._open[request.id] = under_way
            self.prompts_of += [len(request.prompt)] * request.completions
            self.choices += request.completions
            self.completions += len(under_way)
            self.most_tokens += request.sampling.max_tokens * len(under_way)
        self._record.choices, self._record.prompt_tokens = max(1, self.completions), self.prompt_tokens
        self.requests = [request for request in requests if request.id in self._open]

    @property
    def prompt_logprobs(self) -> int:
        """How many log probabilities of prompts are told."""
        return sum(map(_prompt_logprobs, self.requests))

    def begin(self) -> None:
        """Begin all requests, or none."""
        try:
            for request in self.requests:
                self._remote.submit(request, self._take)
        except BaseException:
            self.end()
            raise

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield what has come since the last time, until all completions are finished. Raises the error that ended them.

        To wake a task for each token costs more than to make its text. So while the task waits here, what comes is given to `hand_over`, if
        there is one, at once, and is yielded only if that returns False.
        """
        while self._open or self._new or self._failure:
            self._is_awaited = True
            await self._event.wait()
            self._event.clear()
            self._is_awaited = False
            if self._failure:
                raise self._failure
            if self._new:
                yield self._read()

    @property
    def total_tokens(self) -> int:
        """How many tokens it took so far."""
        return 0 if self._is_refused else self.prompt_tokens + self.completion_tokens

    @property
    def is_whole(self) -> bool:
        """Whether all completions have finished. Nothing is made of the others, whose reader has hung up."""
        return not self._is_left

    def end(self) -> None:
        """End the generation, because nobody reads any more: what is still under way is cancelled."""
        self._is_left = self._is_left or bool(self._open)
        for id in list(self._open):
            self._remote.cancel(id)
        self._open.clear()
        self.hand_over = None
        self._event.set()

    def _tell(self) -> None:
        """Hand over what is new, or have it yielded."""
        try:
            is_read = self.hand_over is not None and self._is_awaited and self.hand_over(self._read)
        except Exception as error:  # a mistake of ours, which ends this answer and no other
            with about_request(self._record.id):
                logger.error("tokens could not be handed over", exc_info=error)
            self._fail(failed(error))
            return
        if not is_read or not self._open:
            self._event.set()

    def _read(self) -> list[Delta]:
        new, self._new = self._new, {}
        deltas = [choice.delta for choice in new.values()]
        for choice in new.values():
            choice.told += len(choice.delta.tokens)
            choice.delta.so_far = choice.told
            choice.delta = Delta(choice.delta.choice)
        return deltas

    def _take(self, output: ReceivedOutput | ApiError) -> None:
        if isinstance(output, ApiError):
            self._refused(output)
            return
        if (choice := self._open.get(output.request, {}).get(output.completion)) is None:
            return  # a stop string has ended it here, whatever becomes of it there
        if output.finish in FAILURES:
            status, message, reason = FAILURES[output.finish]
            retry_s = 1.0 if status == 503 else 0.0
            self._is_refused = status == 400 and not self.completion_tokens
            self._fail(ApiError(status, output.error or message, retry_s=retry_s, reason=reason))
            return
        tokens = choice.add(output)
        self.cached_tokens += output.cached_tokens
        self.completion_tokens += len(tokens)
        self._record.tokens(len(tokens), output.begun)
        if self.held is not None and not self.held.take(_logprobs(tokens)):
            self._fail(ApiError(503, NO_ROOM, retry_s=1.0, reason="share_of_key"))
            return
        if output.vector:
            choice.delta.vector = output.vector
            self._record.vector(output.begun)
        if packed := bytes(output.prompt_logprobs):  # they come once, with the first output of a request
            for each in self._open[output.request].values():
                each.delta.prompt_logprobs = packed
        if choice.delta.text or choice.finish:
            is_first = not self._new
            self._new[choice.delta.choice] = choice
            if is_first:
                self._remote.at_pause.append(self._tell)
        if choice.finish is not None:
            if output.finish is None:  # a stop string has ended it, of which the engine does not know
                self._remote.stop(output.request, output.completion)
            of_request = self._open[output.request]
            del of_request[output.completion]
            if not of_request:
                del self._open[output.request]
            self._record.is_whole = not self._open

    def let_go(self, delta: Delta) -> None:
        """Give back the room of log probabilities that wait no more."""
        assert self.held is not None
        self.held.give_back(_logprobs(delta.tokens))

    def _refused(self, error: ApiError) -> None:
        """The engine has not begun a request."""
        self._is_refused = not self.completion_tokens
        is_unknown = error.status == HTTPStatus.NOT_FOUND
        unknown = unknown_model(self.requests[0].adapter or "", [self._remote.welcome.model])
        self._fail(unknown if is_unknown else renamed(error, self._names()))

    def _fail(self, failure: ApiError) -> None:
        self._failure = failure
        self.end()


def _logprobs(tokens: Sequence[Token]) -> int:
    return sum(1 + len(token.top) for token in tokens)


def _prompt_logprobs(request: Request) -> int:
    """Return how many log probabilities of its prompt a request is told. Who goes on with completions elsewhere was told them there."""
    others = request.prompt_logprobs
    if others is None or all(map(request.chosen_of, request.under_way)):
        return 0
    return len(request.prompt) * (1 + max(0, others))
