"""Tokens that are sent at once, without a task that waits for them: the same bytes as those that a task sends, for quick and slow readers."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.base.key_lines import KeyLine
from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.completion_fields import CompletionFields
from symbiosis.cluster.router.relay import Relay
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.cluster.router.upstream import Lost, Upstream
from symbiosis.server.api_keys import Tenant
from symbiosis.server.connections import HttpConnection
from symbiosis.server.generation import Generation
from symbiosis.server.long_reply import LongReply
from symbiosis.server.openai_protocol import CompletionBody
from symbiosis.server.response_format import CompletionWords
from symbiosis.server.sse import SseWriter, StoredReply
from symbiosis.serving.engine.detokenize import Text
from symbiosis.serving.request import Finish, Output, Request, Sampling, Token
from tests.unit.test_serving_detokenize import bytes_tokenizer

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Remote:
    """An engine's link. What it is told between two pauses is handed on together."""

    def __init__(self) -> None:
        self.take: Callable[[Output], None]
        self.at_pause: list[Callable[[], None]] = []

    def submit(self, request: Request, take: Any) -> None:
        self.take = take

    def cancel(self, id: int) -> None:
        pass

    def pause(self) -> None:
        calls, self.at_pause = self.at_pause, []
        for call in calls:
            call()


@asynccontextmanager
async def served(app: ASGIApp, buffer: int = 0) -> AsyncIterator[asyncio.StreamReader]:
    """Serve one request with an app, and yield what reads the answer."""
    config = uvicorn.Config(app, http=HttpConnection, ws="none", lifespan="off", log_config=None, access_log=False)
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    serving, ours = asyncio.create_task(server.serve(sockets=[listener])), socket.socket()
    if buffer:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    ours.connect(listener.getsockname())
    reader, writer = await asyncio.open_connection(sock=ours, limit=buffer or 1 << 16)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    try:
        async with asyncio.timeout(60):
            yield reader
    finally:
        writer.close()
        server.should_exit = True
        await serving


def body_of(answer: bytes) -> bytes:
    """The body of an answer in chunks."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def texts_of(body: bytes, choices: int) -> list[str]:
    texts = [""] * choices
    *events, done, end = body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    for event in events:
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    return texts


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What a task has sent."""
    pieces, take = list[bytes](), SseWriter.take

    async def noted(self: SseWriter, given: Iterable[bytes], more: bool = True) -> None:
        several = list(given)
        pieces.append(b"".join(several))
        await take(self, several, more)

    monkeypatch.setattr(SseWriter, "take", noted)
    return pieces


def streaming(remote: Remote, tokens: int, choices: int = 1, knows_connection: bool = True) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        tokenizer = bytes_tokenizer()
        requests = [Request(id=1, prompt=(65,), sampling=Sampling(max_tokens=tokens), completions=choices)]
        generation = Generation(remote, requests, lambda: Text(tokenizer))  # type: ignore[arg-type]
        generation.begin()
        words = CompletionWords("demo", tokenizer, False, [], [(65,)], choices)
        body = CompletionBody(model="m", prompt="", stream=True)
        if not knows_connection:
            del scope["state"]["connection"]
        await LongReply(generation, words, body, lambda used: None)(scope, receive, send)

    return app


async def streamed(tokens: int, choices: int, knows_connection: bool) -> bytes:
    """The body of a stream to a reader who takes it as it comes."""
    remote = Remote()
    async with served(streaming(remote, tokens, choices, knows_connection)) as reader:
        while not hasattr(remote, "take"):
            await asyncio.sleep(0.001)
        for number in range(tokens):
            for choice in range(choices):
                finish = Finish.LENGTH if number == tokens - 1 else None
                token = Token(65 + (number + choice) % 26)
                remote.take(Output(request=1, completion=choice, tokens=(token,), finish=finish))
            remote.pause()
            await asyncio.sleep(0)
        return body_of(await reader.read())


@pytest.mark.parametrize("choices", [1, 3, 20])
def test_pieces_that_are_sent_at_once_are_those_that_a_task_sends(choices: int, taken: list[bytes]) -> None:
    tokens = 100
    at_once = asyncio.run(streamed(tokens, choices, True))
    count = len(taken)
    by_task = asyncio.run(streamed(tokens, choices, False))
    letters = [chr(65 + number % 26) for number in range(tokens + choices)]
    assert texts_of(at_once, choices) == ["".join(letters[choice : choice + tokens]) for choice in range(choices)]
    assert texts_of(by_task, choices) == texts_of(at_once, choices)
    assert (count < 10) == (choices <= 16), "many choices are made by a task, which lets others run between them"
    assert len(taken) - count > tokens / 2


def test_a_reader_who_takes_nothing_for_a_while_gets_it_all(taken: list[bytes]) -> None:
    """... and while it takes nothing, what comes is kept in one place, and not written."""
    tokens, remote = 60_000, Remote()

    async def slow() -> str:
        async with served(streaming(remote, tokens), buffer=4096) as reader:
            while not hasattr(remote, "take"):
                await asyncio.sleep(0.001)
            for number in range(tokens):
                finish = Finish.LENGTH if number == tokens - 1 else None
                remote.take(Output(request=1, tokens=(Token(65 + number % 26),), finish=finish))
                remote.pause()
                if number % 100 == 0:
                    await asyncio.sleep(0)
            return texts_of(body_of(await reader.read()), 1)[0]

    assert asyncio.run(slow()) == "".join(chr(65 + number % 26) for number in range(tokens))
    assert max(map(len, taken)) > 10_000, "the reader was behind, and got all that was missing with one event"


def test_of_what_its_reader_does_not_take_there_is_no_copy() -> None:
    stored = bytes(range(256)) * (1 << 16)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StoredReply(stored)(scope, receive, send)

    async def run() -> tuple[int, bytes]:
        async with served(app, buffer=4096) as reader:
            tracemalloc.start()
            head = await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.1)
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            return held, head + await reader.read()

    held, answer = asyncio.run(run())
    assert answer.endswith(stored) and b"content-length: %d\r\n" % len(stored) in answer
    assert held < len(stored) / 8


def relaying(answer: Upstream, view: ServerRegistry, lost: list[str]) -> tuple[Relay, ASGIApp]:
    asked = CompletionFields(b'{"stream": true}')
    held, admission = Lease(FairShare(1 << 20), "eve"), Tenant(KeyLine("eve")).admit(1, 0.0)
    relay = Relay(view, "/", {}, asked, RoutingRequest(model="m"), held, admission)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        outlet = SseWriter(send, scope)
        try:
            await relay._stream(answer, outlet)
        except Lost as error:
            lost.append(str(error))
            await outlet.take([], more=False)

    return relay, app


def event(number: int) -> bytes:
    return b': 0 %d\ndata: {"choices":[{"index":0,"text":"%d"}]}\n\n' % (number, number)


ERROR = b'data: {"error":{"message":"no"}}\n\n'
PLAIN = b"".join(map(event, range(40)))


@pytest.mark.parametrize("size", [1, 7, 60, 1000])
@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (PLAIN + b"data: [DONE]\n\n", b"data: [DONE]\n\n"),
        (PLAIN + ERROR + b"data: [DONE]\n\n", b""),
        (PLAIN, b""),
    ],
    ids=["done", "error", "broken off"],
)
def test_a_front_end_hands_events_on_however_they_come(
    size: int, told: bytes, shown: bytes, taken: list[bytes]
) -> None:
    lost, answer = list[str](), Upstream("http://x", b"")

    async def run() -> tuple[bytes, Relay]:
        answer.data_received(HEAD)
        relay, app = relaying(answer, ServerRegistry("none", {}), lost)
        async with served(app) as reader:
            for begin in range(0, len(told), size):
                piece = told[begin : begin + size]
                answer.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0)
            answer.data_received(b"0\r\n\r\n")
            return body_of(await reader.read()), relay

    body, relay = asyncio.run(run())
    without = b"".join(event(number).partition(b"\n")[2] for number in range(40))
    assert body == without + shown and relay._progress.told.tokens == [list(range(40))]
    assert lost == ([] if shown else ["the server failed" if ERROR in told else "the stream ended too early"])
    assert size == 1000 or len(taken) < 10


def test_a_mistake_in_a_piece_ends_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    part = CompletionWords.part

    def mistaken(self: CompletionWords, delta: Any) -> dict[str, Any]:
        if "F" in delta.text:
            raise IndexError
        return part(self, delta)

    monkeypatch.setattr(CompletionWords, "part", mistaken)
    *events, error, done, _ = asyncio.run(streamed(20, 1, True)).split(b"\n\n")
    assert len(events) == 5 and b"the server failed: IndexError" in error and done == b"data: [DONE]"
