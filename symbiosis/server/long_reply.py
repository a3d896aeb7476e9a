"""The answer to a completion, which may take a while: whole, or as a stream of events. When its reader hangs up, so does the work for it."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from itertools import chain

import msgspec
from starlette.types import Receive, Scope, Send

from symbiosis.server.api_errors import ApiError
from symbiosis.server.bodies import until_hung_up
from symbiosis.server.generation import Delta, Generation, join
from symbiosis.server.json_pieces import json_pieces
from symbiosis.server.openai_protocol import Body
from symbiosis.server.response_format import Fields, Words, counted, usage
from symbiosis.server.sse import EVENTS, JSON, SseWriter

COUNT_EVERY_S = 0.1
FEW = 16  # choices, whose events are made together
DONE = b"data: [DONE]\n\n"
COUNTED = b": total_tokens "  # begins a comment in a stream, for a front end: what the answer takes by then


class GenerationReply:
    """An answer with all of a generation: whole, or as a stream of events.

    Args:
        done: Called at the end, whatever it is, with how many tokens were used.
    """

    def __init__(self, generation: Generation, is_stream: bool, done: Callable[[int], None]) -> None:
        self._generation, self._is_stream, self._done = generation, is_stream, done
        self._counts = False  # whether a front end is told in the stream what it takes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(until_hung_up(receive))
        watch.add_done_callback(lambda _: self._generation.end())
        writer = SseWriter(send, scope)
        self._counts = writer.counts
        writer.count(self._total)
        try:
            await (self._stream(writer) if self._is_stream else self._whole(writer))
        finally:
            watch.cancel()
            self._generation.end()
            self._done(self._total)

    @property
    def _total(self) -> int:
        """How many tokens it took."""
        return self._generation.total_tokens

    async def _deltas(self, writer: SseWriter) -> AsyncIterator[list[Delta]]:
        """Yield what comes for an answer that is given whole, and tell a front end now and then, and at the end, what it takes."""
        told = time.monotonic()
        async for deltas in self._generation.deltas():
            if (now := time.monotonic()) >= told + COUNT_EVERY_S:
                writer.count(self._total)
                told = now
            yield deltas
        writer.count(self._total)

    def _tally(self) -> tuple[bytes, ...]:
        """Return the comment that goes before events of a stream, if a front end is to be told what they take."""
        return (b"%b%d\n\n" % (COUNTED, self._total),) if self._counts else ()

    @abstractmethod
    async def _whole(self, writer: SseWriter) -> None:
        """Answer when all is there."""

    async def _stream(self, writer: SseWriter) -> None:
        """Answer with events, if this kind of answer has any. An error before the first one is an answer of its own; a later one is an event."""
        raise NotImplementedError


class LongReply(GenerationReply):
    """An answer with all choices of a completion.

    Args:
        body: Whether it is a stream, whose events may tell the usage of their choice so far, as vLLM's do; and what another server has told of it.
    """

    def __init__(self, generation: Generation, words: Words, body: Body, done: Callable[[int], None]) -> None:
        super().__init__(generation, bool(body.stream), done)
        self._words, self._body = words, body
        self._head = words.head(words.chunk_kind if body.stream else words.kind)
        options = body.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._tells_usage = bool(self._wants_usage and options and options.continuous_usage_stats)

    async def _whole(self, writer: SseWriter) -> None:
        """Answer with all choices, each by its number."""
        whole = [Delta(number) for number in range(self._generation.choices)]
        async for deltas in self._deltas(writer):
            for delta in deltas:
                join(whole[delta.choice], delta)
        if self._generation.is_whole:
            await writer.start(JSON)
            await writer.take(self._pieces(whole), more=False)

    def _pieces(self, whole: list[Delta]) -> Iterator[bytes]:
        """Yield the answer as JSON, each choice by itself: together they may be large."""
        yield self._head
        for number, delta in enumerate(whole):
            yield b"," * (number > 0)
            yield from json_pieces(self._words.choice(delta))
        yield b'],"usage":%b%b' % (msgspec.json.encode(usage(self._generation)), self._words.of_whole)
        for name, value in self._words.beside(whole[0]).items():
            yield b',"%b":' % name.encode()
            yield from json_pieces(value)
        yield b"}"

    async def _stream(self, writer: SseWriter) -> None:
        """Answer with an event for whatever a choice has gained since its last one."""
        is_light = not self._words.logprobs and self._generation.choices <= FEW
        try:
            async for deltas in self._generation.deltas():
                if not writer.has_begun:
                    await self._begin(writer)
                await writer.take(chain.from_iterable(map(self._told, deltas)))
                self._generation.hand_over = partial(self._hand_over, writer) if is_light else None
        except ApiError as error:
            if not writer.has_begun:
                raise
            error.note()
            await writer.take([b"data: %b\n\n" % msgspec.json.encode(error.body), DONE], more=False)
            return
        if not writer.has_begun:
            await self._begin(writer)
        ending = b""
        if self._wants_usage:
            ending = b'data: %b],"usage":%b}\n\n' % (self._head, msgspec.json.encode(usage(self._generation)))
        await writer.take([ending, DONE], more=False)

    def _hand_over(self, writer: SseWriter, read: Callable[[], list[Delta]]) -> bool:
        """Send what is new at once, if that makes nobody wait."""
        if writer.is_free:
            writer.put(b"".join(chain.from_iterable(map(self._told, read()))))
            return True
        return False

    async def _begin(self, writer: SseWriter) -> None:
        """Begin the stream with what comes before all tokens."""
        await writer.start(EVENTS)
        if (opening := self._words.opening) is not None:
            told = self._body.continuation.opened if self._body.continuation else 0
            choices = range(told, self._generation.choices)
            events = (self._event({"index": index, **opening}, 0, self._words.of_whole) for index in choices)
            await writer.take(chain.from_iterable(events))

    def _told(self, delta: Delta) -> Iterator[bytes]:
        """Yield the event of what a choice has gained."""
        if self._body.continuation is not None:
            yield told_tokens(delta)
        else:
            yield from self._tally()
        yield from self._event(self._words.part(delta), delta.so_far)
        if self._generation.held is not None:
            self._generation.let_go(delta)

    def _event(self, choice: Fields, so_far: int, more: bytes = b"") -> Iterable[bytes]:
        """Return the event of a choice that has so many tokens with it. If the usage is asked for, each event has that field."""
        after = b'],"usage":null%b}' % more if self._wants_usage else b"]%b}" % more
        if self._tells_usage:
            told = counted(self._generation.prompts_of[choice["index"]], so_far)
            after = b'],"usage":%b%b}' % (msgspec.json.encode(told), more)
        if not self._words.logprobs:
            return (b"data: %b%b%b\n\n" % (self._head, msgspec.json.encode(choice), after),)
        return chain((b"data: ", self._head), json_pieces(choice), (after, b"\n\n"))


def told_tokens(delta: Delta) -> bytes:
    r"""Return the comment that tells the tokens of an event: the choice's number, its new tokens, and, if it ends with them, a full stop.

    >>> from symbiosis.serving.request import Token
    >>> told_tokens(Delta(0, tokens=[Token(17), Token(4)], finish="stop"))
    b': 0 17 4 .\n'
    """
    words = [str(delta.choice), *(str(token.id) for token in delta.tokens), *(["."] if delta.finish else [])]
    return f": {' '.join(words)}\n".encode()
