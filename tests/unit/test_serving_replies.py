"""Answers, as their readers get them: nobody's timer runs for each piece."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.forward import Forward
from symbiosis.server.api_errors import ApiError
from symbiosis.server.connections import COUNT
from symbiosis.server.generation import Choice, Delta, Generation
from symbiosis.server.ipc.engine_ipc import ReceivedOutput
from symbiosis.server.json_pieces import json_pieces
from symbiosis.server.long_reply import LongReply
from symbiosis.server.openai_protocol import CompletionBody, StreamOptions
from symbiosis.server.response_format import ChatWords, CompletionWords, Fields, Words, counted
from symbiosis.server.responses_protocol import FunctionTool, ResponsesBody, TextConfig, TextFormat
from symbiosis.server.responses_reply import ResponsesReply
from symbiosis.serving.engine.detokenize import Text
from symbiosis.serving.engine.reader import Reader
from symbiosis.serving.request import Finish, Output, Request, Sampling, Token
from tests.unit.test_serving_detokenize import bytes_tokenizer

TOKENS = 5
USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)


class AtOnce(list[Callable[[], None]]):
    """Calls that are not put off."""

    def append(self, call: Callable[[], None]) -> None:
        call()


class Remote:
    """An engine's link that gives nothing by itself."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.stopped: list[tuple[int, int]] = []
        self.take: Callable[[Output], None]
        self.at_pause = AtOnce()

    def submit(self, request: Request, take: Any) -> None:
        self.take = take

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)

    def stop(self, id: int, completion: int) -> None:
        self.stopped.append((id, completion))


def asked_for(options: StreamOptions | None = None) -> CompletionBody:
    return CompletionBody(model="m", prompt="", stream=True, stream_options=options)


async def streamed(take_s: Callable[[int], float]) -> tuple[Remote, list[bytes]]:
    """Stream some tokens to a reader that takes so long for each piece."""
    remote, taken, tokenizer = Remote(), list[bytes](), bytes_tokenizer()
    requests = [Request(id=1, prompt=(65,), sampling=Sampling(max_tokens=TOKENS))]
    generation = Generation(remote, requests, lambda: Text(tokenizer))  # type: ignore[arg-type]
    generation.begin()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(take_s(len(taken)))
            taken.append(message["body"])

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    words = CompletionWords("demo", tokenizer, False, [], [(65,)], 1)
    answer = asyncio.create_task(
        LongReply(generation, words, asked_for(), lambda used: None)({"type": "http"}, receive, send)
    )
    for number in range(TOKENS):
        finish = Finish.LENGTH if number == TOKENS - 1 else None
        remote.take(Output(request=1, tokens=(Token(66 + number),), finish=finish))
        await asyncio.sleep(0)
        while len(taken) <= number and not answer.done():
            await asyncio.sleep(0.01)
    await asyncio.wait_for(answer, 30)
    return remote, taken


def test_no_timer_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    later = asyncio.BaseEventLoop.call_at

    def counted(self: Any, when: float, *args: Any, **more: Any) -> Any:
        timers.append(when - self.time())
        return later(self, when, *args, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", counted)
    asyncio.run(streamed(lambda piece: 0.0))
    assert len([after for after in timers if 1 < after < 3000]) == 1, "the one of this test"


@pytest.mark.parametrize(
    "words", [ChatWords("m", bytes_tokenizer(), False), CompletionWords("m", bytes_tokenizer(), False, [], [], 2)]
)
def test_each_event_counts_its_own_choice_and_prompt(words: Words) -> None:
    """As vLLM does: nothing where a chat begins, then the tokens of that choice, and all only at the end."""

    async def test() -> list[dict[str, Any]]:
        remote, tokenizer, taken = Remote(), bytes_tokenizer(), list[bytes]()
        asked = [
            Request(
                id=number, prompt=(65,) * number, sampling=Sampling(max_tokens=9), completions=2, chosen=((70, 71), ())
            )
            for number in (1, 2)
        ]
        generation = Generation(remote, asked, lambda: Text(tokenizer))  # type: ignore[arg-type]
        generation.begin()

        async def send(message: Any) -> None:
            taken.append(message.get("body", b""))

        answer = LongReply(generation, words, asked_for(USAGE), lambda used: None)
        task = asyncio.create_task(answer({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        for tokens, finish in ((b"a", None), (b"bc", None), (b"d", Finish.LENGTH)):
            for number, completion in ((1, 0), (1, 1), (2, 0), (2, 1)):
                output = Output(request=number, completion=completion, tokens=tuple(map(Token, tokens)), finish=finish)
                remote.take(output)
                await asyncio.sleep(0)
        await asyncio.wait_for(task, 30)
        events = b"".join(taken).split(b"\n\n")
        return [msgspec.json.decode(each.removeprefix(b"data: ")) for each in events[:-2]]

    *events, last = asyncio.run(test())
    so_far = [0, 0, 0, 0] if isinstance(words, ChatWords) else [2, 0, 2, 0]
    begun = set[int]()
    for event in events:
        (choice,) = event["choices"]
        index, text = choice["index"], choice.get("text") or choice["delta"].get("content", "")
        if index not in begun and isinstance(words, ChatWords):
            begun.add(index)
            assert event["usage"]["completion_tokens"] == 0 and not text
            so_far[index] = [2, 0][index % 2]
            continue
        so_far[index] += len(text)
        assert event["usage"] == counted(1 + index // 2, so_far[index])
    assert so_far == [6, 4, 6, 4] and last["usage"]["completion_tokens"] == 20 and last["usage"]["prompt_tokens"] == 3


def test_each_completion_shows_its_prompt() -> None:
    words = CompletionWords("demo", bytes_tokenizer(), True, ["AB", "CD"], [(65, 66), (67, 68)], 2)
    for choice in (0, 2, 1, 3):
        prompt = (Token(65), Token(66, -0.5)) if choice < 2 else (Token(67), Token(68, -0.25))
        shown = written(words.choice(Delta(choice, prompt_logprobs=msgspec.msgpack.encode(prompt))))["logprobs"]
        assert (shown["tokens"], shown["token_logprobs"]) == (
            list("AB" if choice < 2 else "CD"),
            [None, prompt[1].logprob],
        )


def written(choice: Any) -> Any:
    return msgspec.json.decode(b"".join(json_pieces(choice)))


@pytest.mark.parametrize("kind", ["completion", "echo", "chat", "answer"])
def test_long_tables_of_log_probabilities_are_made_in_pieces(kind: str) -> None:
    """A server answers others while it makes them: none of them is made at once."""
    places, remote, tokenizer, sent = 3000, Remote(), bytes_tokenizer(), list[bytes]()
    prompt = (65,) * (1 if kind == "answer" else places)
    table = tuple(Token(65, -1.0, tuple((66 + n, -2.0 - n) for n in range(20)), 1) for _ in range(places))
    is_long = kind == "answer"
    asked = CompletionBody(model="m", prompt="", prompt_logprobs=None if is_long or kind == "echo" else 20)
    words: Words = CompletionWords(
        "m", tokenizer, is_long or kind == "echo", ["A" * places] * (kind == "echo"), [prompt], 1
    )
    if kind == "chat":
        words = ChatWords("m", tokenizer, False)
        words.prompt = prompt
    words.asked = asked

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        requests = [Request(id=1, prompt=prompt, sampling=Sampling(max_tokens=places))]
        generation = Generation(remote, requests, lambda: Text(tokenizer))  # type: ignore[arg-type]
        generation.begin()
        packed = msgspec.Raw(b"" if is_long else msgspec.msgpack.encode(table))
        tokens = table if is_long else (Token(65, -1.0),)
        remote.take(ReceivedOutput(request=1, tokens=tokens, finish=Finish.LENGTH, prompt_logprobs=packed))
        await LongReply(generation, words, asked, lambda used: None)({}, asyncio.Future, send)

    asyncio.run(asyncio.wait_for(run(), 60))
    whole = msgspec.json.decode(b"".join(sent))
    [choice] = whole["choices"]
    shown = (
        (whole if kind == "chat" else choice)["prompt_logprobs"]
        if asked.prompt_logprobs
        else choice["logprobs"]["top_logprobs"]
    )
    assert len(shown) == places + (kind == "echo") and len(shown[0]) == len(shown[places - 1]) == 21
    assert len(sent) > 5 and max(map(len, sent)) < sum(map(len, sent)) / 5


@pytest.mark.parametrize("streams", [True, False])
def test_a_front_end_counts_what_the_server_tells(streams: bool) -> None:
    """Of a stream, however it is cut, in comments that its reader does not see; and nothing that a client has written."""
    tokenizer, sent, kept = bytes_tokenizer(), list[bytes](), list[Fields]()
    like_usage = {"usage": {"total_tokens": 0}}
    schema = msgspec.Raw(msgspec.json.format(msgspec.json.encode(like_usage), indent=2).replace(b"{", b"{\n\n"))
    schema = msgspec.Raw(bytes(schema).replace(b"0", b'"\\n\\n: total_tokens 99\\n\\n"'))
    body = ResponsesBody(
        model="m", input="x", user="u" * 512, stream=streams, tools=[FunctionTool("function", "f", like_usage)],
        text=TextConfig(TextFormat("json_schema", schema, "n")),
    )  # fmt: skip

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        remote, requests = Remote(), [Request(id=1, prompt=(65, 66), sampling=Sampling(max_tokens=3))]
        generation = Generation(remote, requests, lambda: Text(tokenizer))  # type: ignore[arg-type]
        generation.begin()
        remote.take(Output(request=1, tokens=(Token(65),) * 3, finish=Finish.LENGTH))
        words = ChatWords("m", tokenizer, False)
        scope = {"headers": [(COUNT, b"?")]}
        await ResponsesReply(generation, words, body, kept.append, lambda used: None)(scope, asyncio.Future, send)

    asyncio.run(asyncio.wait_for(run(), 60))
    answer = b"".join(sent)
    assert kept[0]["user"] == body.user and answer.count(b"\n\n: total_tokens 5\n\n") == streams
    for size in (1, 2, 7, len(answer)):
        counts = list[int]()
        forward = Forward(None, None, RoutingRequest(model="m"), counts.append, counts.append)  # type: ignore[arg-type]
        pieces = [b"".join(forward._counted(answer[at : at + size])) for at in range(0, len(answer), size)]
        assert counts == [5] * streams
        assert b"".join(pieces) == answer.replace(b": total_tokens 5\n\n", b"", streams)


async def _stopped() -> Remote:
    """Two completions, of which a stop string ends the second, and their greatest length the first."""
    remote, tokenizer = Remote(), bytes_tokenizer()
    requests = [Request(id=7, prompt=(65,), sampling=Sampling(max_tokens=TOKENS), completions=2)]
    generation = Generation(remote, requests, lambda: Text(tokenizer, ["XY"]))  # type: ignore[arg-type]
    generation.begin()
    for completion, text in ((0, "a"), (1, "X"), (0, "b")):
        remote.take(Output(request=7, completion=completion, tokens=tuple(map(Token, text.encode()))))
    assert not remote.stopped
    for completion, text in ((1, "Y"), (0, "c"), (1, "more that is on its way")):
        remote.take(Output(request=7, completion=completion, tokens=tuple(map(Token, text.encode()))))
        assert remote.stopped == [(7, 1)]
    remote.take(Output(request=7, completion=1, finish=Finish.ERROR, error="after its end"))  # concerns nobody
    remote.take(Output(request=7, completion=0, tokens=(Token(100),), finish=Finish.LENGTH))
    deltas = [delta async for part in generation.deltas() for delta in part]
    assert {delta.choice: (delta.text, delta.finish) for delta in deltas} == {0: ("abcd", "length"), 1: ("", "stop")}
    assert generation.completion_tokens == 6, "what was computed in vain is nobody's"
    return remote


def test_a_completion_whose_text_has_stopped_is_ended_and_the_others_go_on() -> None:
    remote = asyncio.run(_stopped())
    assert remote.stopped == [(7, 1)] and not remote.cancelled


def ends_within_a_character() -> Any:
    """A tokenizer of GPT-2's kind, whose token 1 is a space and the first byte of a character."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "\u0120\u00e2": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("stop", [" ", "b"])
def test_a_stop_string_that_the_end_completes_is_why_the_text_ends(stop: str) -> None:
    finish, text = ("stop", "a") if stop == " " else ("length", "a \ufffd")
    outputs = Output(request=-1, tokens=(Token(0),)), Output(request=-1, tokens=(Token(1),), finish=Finish.LENGTH)
    choice = Choice(Text(ends_within_a_character(), [stop]), Delta(0), 0)
    for output in outputs:
        choice.add(output)
    assert (choice.delta.text, choice.delta.finish) == (text, finish)

    class Remote:
        tokenizer, ends = ends_within_a_character(), frozenset[int]()

        def next_id(self) -> int:
            return -1

        def submit(self, request: Request, take: Callable[[Output], None]) -> None:
            for output in outputs:
                take(output)

        def cancel(self, id: int) -> None: ...
        def stop(self, id: int, completion: int = 0) -> None: ...

    whole = Reader(Remote(), [0], None, "", stop, {}).wait()
    assert (whole.text, whole.finish) == (text, finish)


@pytest.mark.parametrize("finish", [None, Finish.LENGTH])
def test_tokens_behind_a_stop_string_are_no_part_of_an_answer_though_they_come_with_it(finish: Finish | None) -> None:
    """As draft tokens do."""

    async def test() -> None:
        remote, tokenizer = Remote(), bytes_tokenizer()
        asked = [Request(id=7, prompt=(65,), sampling=Sampling(max_tokens=TOKENS, logprobs=0))]
        generation = Generation(remote, asked, lambda: Text(tokenizer, ["XY"]))  # type: ignore[arg-type]
        generation.held = Lease(FairShare(16), "eve")
        generation.begin()
        remote.take(Output(request=7, tokens=tuple(Token(token, -0.5) for token in b"abXYcd"), finish=finish))
        (delta,) = [delta async for part in generation.deltas() for delta in part]
        assert (delta.text, bytes(token.id for token in delta.tokens), delta.finish) == ("ab", b"abXY", "stop")
        assert generation.completion_tokens == generation.held.size == 4

    asyncio.run(test())


def test_log_probabilities_that_find_no_room_end_their_own_answer() -> None:
    async def test() -> None:
        remote, tokenizer, room = Remote(), bytes_tokenizer(), FairShare(16)
        held = Lease(room, "eve")
        asked = [Request(id=7, prompt=(65,), sampling=Sampling(max_tokens=TOKENS, logprobs=1))]
        generation = Generation(remote, asked, lambda: Text(tokenizer))  # type: ignore[arg-type]
        generation.held = held
        generation.begin()
        tokens = tuple(Token(token, -0.5, ((66, -0.5),)) for token in b"abcd")
        remote.take(Output(request=7, tokens=tokens))
        assert held.size == 8 and not remote.cancelled
        remote.take(Output(request=7, tokens=tokens[:1]))
        assert remote.cancelled == [7]
        with pytest.raises(ApiError, match="too many") as error:
            [_ async for _ in generation.deltas()]
        assert error.value.status == 503 and held.size == 8

    asyncio.run(test())


@pytest.mark.parametrize("reads", [True, False])
def test_log_probabilities_wait_for_the_reader_of_a_stream_as_far_as_there_is_room(reads: bool) -> None:
    async def test() -> bytes:
        remote, tokenizer, taken = Remote(), bytes_tokenizer(), list[bytes]()
        held = Lease(FairShare(16), "eve")  # for four tokens
        asked = [Request(id=7, prompt=(65,), sampling=Sampling(max_tokens=100, logprobs=1))]
        generation = Generation(remote, asked, lambda: Text(tokenizer))  # type: ignore[arg-type]
        generation.held = held
        generation.begin()
        gate = asyncio.Event()

        async def send(message: Any) -> None:
            taken.append(message.get("body", b""))
            await gate.wait()

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        if reads:
            gate.set()
        words = CompletionWords("demo", tokenizer, True, [], [(65,)], 1)
        answer = asyncio.create_task(
            LongReply(generation, words, asked_for(), lambda used: None)({"type": "http"}, receive, send)
        )
        for number in range(20):
            finish = Finish.LENGTH if number == 19 else None
            remote.take(Output(request=7, tokens=(Token(66, -0.5, ((67, -0.5),)),), finish=finish))
            for _ in range(5):
                await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(answer, 30)
        assert held.size == 0 if reads else remote.cancelled == [7]
        return b"".join(taken)

    told = asyncio.run(test())
    assert told.endswith(b"data: [DONE]\n\n")
    assert (told.count(b'"text":"B"') == 20) is reads
    assert (b"too many log probabilities" in told) is not reads


def test_text_offsets_are_those_of_the_text_that_is_shown() -> None:
    """Behind a prompt that ends within a character, and behind tokens that are left out of the text."""
    tokenizer = bytes_tokenizer()
    special = tokenizer.eos_token_id
    prompt = (97, 98, 0xC3)
    words = CompletionWords("demo", tokenizer, True, [tokenizer.decode(prompt)], [prompt], 1)
    told = msgspec.msgpack.encode(tuple(Token(id, -1.0) for id in prompt[1:]))
    tokens = [Token(id, -1.0) for id in (120, special, 121)]
    shown = words.part(Delta(0, text="xy", tokens=tokens, prompt_logprobs=told))
    assert written(shown)["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4]
    whole = CompletionWords("demo", tokenizer, True, [], [()], 1, skips=False)
    shown = whole.part(Delta(0, text="x<|end|>y", tokens=tokens))["logprobs"]
    assert shown["text_offset"] == [0, 1, 8]
