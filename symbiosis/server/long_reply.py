"""Answers that may take a while. When the reader hangs up, they end, and so does the work for them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from symbiosis.server.api_errors import ApiError
from symbiosis.server.bodies import until_hung_up
from symbiosis.server.generation import Delta, Generation
from symbiosis.server.openai_protocol import Continuation, StreamOptions
from symbiosis.server.response_format import Words, counted, usage
from symbiosis.server.sse import EVENTS, JSON, SseWriter

FEW = 16  # choices, whose events are made together


class LongReply:
    """An answer with the whole of a generation.

    Args:
        done: Called at the end, whatever it is.
    """

    def __init__(self, generation: Generation, words: Words, done: Callable[[], None]) -> None:
        self._generation, self._words, self._done = generation, words, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(until_hung_up(receive))
        watch.add_done_callback(lambda _: self._generation.end())
        try:
            await self._answer(SseWriter(send, scope))
        finally:
            watch.cancel()
            self._generation.end()
            self._done()

    async def _answer(self, outlet: SseWriter) -> None:
        """Return all choices, each by its number."""
        whole = [Delta(number) for number in range(self._generation.choices)]
        async for deltas in self._generation.deltas():
            for delta in deltas:
                _join(whole[delta.choice], delta)
        if not self._generation.is_whole:
            return
        await outlet.start(JSON)
        await outlet.take_all(self._words.whole(self._generation, whole), more=False)


class Stream(LongReply):
    """An answer as events, one for whatever a choice has gained since the last one.

    Args:
        options: Whether the usage is told at the end, and in each event that of its choice so far, as vLLM does.
        before: What another server has told of it.
    """

    def __init__(
        self, generation: Generation, words: Words, done: Callable[[], None], options: StreamOptions | None = None,
        before: Continuation | None = None,
    ) -> None:  # fmt: skip
        super().__init__(generation, words, done)
        self._wants_usage = bool(options and options.include_usage)
        self._tells_usage = bool(self._wants_usage and options and options.continuous_usage_stats)
        self._begun = False
        self._tells_tokens, self._opened = before is not None, before.opened if before else 0
        self._frame = words.frame(self._wants_usage)
        self._is_light = not words.logprobs and generation.choices <= FEW

    async def _answer(self, outlet: SseWriter) -> None:
        """Answer. An error before the first event is an answer of its own; a later one is an event."""
        try:
            async for deltas in self._generation.deltas():
                await self._begin(outlet)
                await outlet.take_all(map(self._told, deltas))
                self._generation.hand_over = partial(self._hand_over, outlet) if self._is_light else None
        except ApiError as error:
            if not self._begun:
                raise
            error.note()
            await outlet.take(_event(error.body) + b"data: [DONE]\n\n", more=False)
            return
        await self._begin(outlet)
        ending = b""
        if self._wants_usage:
            ending = _event(self._words.chunk([], usage(self._generation), is_asked=True))
        await outlet.take(ending + b"data: [DONE]\n\n", more=False)

    def _hand_over(self, outlet: SseWriter, read: Callable[[], list[Delta]]) -> bool:
        """Send what is new at once, if that makes nobody wait."""
        if outlet.is_free:
            outlet.put(b"".join(map(self._told, read())))
            return True
        return False

    async def _begin(self, outlet: SseWriter) -> None:
        """Begin the stream with what comes before all tokens."""
        if not self._begun:
            self._begun = True
            await outlet.start(EVENTS)
            if first := list(self._words.first(self._generation.choices))[self._opened :]:
                await outlet.take_all(self._event(choice, 0) for choice in first)

    def _told(self, delta: Delta) -> bytes:
        """Return the event of what a choice has gained."""
        tokens = told_tokens(delta) if self._tells_tokens else b""
        told = tokens + self._event(self._words.part(delta), delta.so_far)
        if self._generation.held is not None:
            self._generation.let_go(delta)
        return told

    def _event(self, choice: dict[str, Any], so_far: int) -> bytes:
        """Return the event of a choice that has so many tokens with it."""
        before, after = self._frame
        if self._tells_usage:
            told = counted(self._generation.prompts_of[choice["index"]], so_far)
            after = b'],"usage":%b}' % msgspec.json.encode(told)
        return b"data: %b%b%b\n\n" % (before, msgspec.json.encode(choice), after)


def _join(whole: Delta, more: Delta) -> None:
    whole.text += more.text
    whole.tokens.extend(more.tokens)
    whole.prompt_logprobs = whole.prompt_logprobs or more.prompt_logprobs
    whole.finish = more.finish


def _event(value: object) -> bytes:
    """Return a server-sent event.

    >>> _event({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def told_tokens(delta: Delta) -> bytes:
    r"""Return the comment that tells the tokens of an event: the choice's number, its new tokens, and, if it ends with them, a full stop.

    >>> from symbiosis.serving.request import Token
    >>> told_tokens(Delta(0, tokens=[Token(17), Token(4)], finish="stop"))
    b': 0 17 4 .\n'
    """
    words = [str(delta.choice), *(str(token.id) for token in delta.tokens), *(["."] if delta.finish else [])]
    return f": {' '.join(words)}\n".encode()
