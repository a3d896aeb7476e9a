"""Completions in OpenAI's words: whole, or as a stream of events."""

import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec

from symbiosis.server.generation import Delta, Generation
from symbiosis.server.json_pieces import LongList, listed
from symbiosis.server.openai_protocol import Body, Continuation
from symbiosis.server.request_record import this_request
from symbiosis.server.tool_parsers import CallPart, ToolParser
from symbiosis.serving.engine.detokenize import bytes_of, special_tokens, text_of
from symbiosis.serving.request import Token

Fields = dict[str, Any]
_tokens, _token = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...]), msgspec.msgpack.Decoder(Token)


# what a whole answer has as null where it was not asked for, as vLLM's: of a completion in each choice, of a chat beside them
NOT_ASKED: Fields = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
NOT_ASKED_OF_CHAT: Fields = {"prompt_token_ids": None, "prompt_logprobs": None}


@dataclass(eq=False)
class Words:
    """What both kinds of completions have in common.

    Args:
        logprobs: Whether log probabilities were asked for.
    """

    kind, chunk_kind, prefix = "", "", ""
    of_whole = b""  # fields of the whole answer, and of the events with which a stream begins

    model: str
    tokenizer: Any
    logprobs: bool
    asked: Body = field(
        default_factory=Body, kw_only=True
    )  # what an answer tells besides its text, and what another server has told of it

    def head(self, kind: str) -> bytes:
        """Return how an answer begins, or each of its chunks.

        >>> CompletionWords("m", None, False, [], [], 1).head("text_completion")[-24:]
        b',"model":"m","choices":['
        """
        id, created = f"{self.prefix}-{this_request().id}", int(time.time())
        if (before := self.asked.continuation) is not None:
            id, created = before.id, before.created
        told = {"object": kind, "id": id, "created": created, "model": self.model}
        return msgspec.json.encode(told)[:-1] + b',"choices":['

    @property
    def opening(self) -> Fields | None:
        """With what each choice of a stream begins."""
        return None

    def choice(self, delta: Delta) -> Fields:
        raise NotImplementedError

    def beside(self, first: Delta) -> Fields:
        """Return what a whole answer tells beside its choices, of which this is the first."""
        return {}

    def part(self, delta: Delta) -> Fields:
        raise NotImplementedError

    def name(self, token: int) -> str:
        """Return how a token is shown beside its log probability."""
        return f"token_id:{token}" if self.asked.return_tokens_as_token_ids else text_of(self.tokenizer, token)

    def _told_prompt(self, prompt: Sequence[int], delta: Delta) -> LongList:
        """Return the log probabilities of a prompt's tokens, as vLLM tells them: the first token has none, because nothing comes before it."""
        return LongList(map(self._at_place, told_prompt(prompt, delta)))

    def _at_place(self, token: Token) -> dict[int, Fields] | None:
        if token.logprob is None:
            return None
        ranked = [(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top[: self.asked.prompt_logprobs], 1)]
        tokens = {id: (logprob, rank) for id, logprob, rank in [(token.id, token.logprob, token.rank), *ranked]}
        return {
            id: {"logprob": finite(logprob), "rank": rank, "decoded_token": self.name(id)}
            for id, (logprob, rank) in tokens.items()
        }


@dataclass(eq=False)
class ChatWords(Words):
    """Answers of POST /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    echo: str = ""  # what the answer continues
    prompt: Sequence[int] = ()
    _new_parser: Callable[[], ToolParser] | None = field(default=None, init=False)
    _parsers: dict[int, ToolParser] = field(default_factory=dict, init=False)  # by choice
    _is_chosen: bool = field(default=False, init=False)  # whether the client has said which tool is called

    @property
    def opening(self) -> Fields:
        delta = {"role": "assistant", "content": self.echo}
        return {"delta": delta, "logprobs": None, "finish_reason": None}

    def read_calls(self, new_parser: Callable[[], ToolParser], is_chosen: bool) -> None:
        """Read calls of tools out of all texts."""
        self._new_parser, self._is_chosen = new_parser, is_chosen

    def go_on(self, told: dict[int, str]) -> None:
        """Go on where another server has stopped, which has told these texts."""
        if self._new_parser is not None:
            for index, text in told.items():
                self._parser(index).add(text)

    def choice(self, delta: Delta) -> Fields:
        text, calls = self.read(delta)
        text = self.echo + text
        message: Fields = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": joined_calls(calls)}
        return {"index": delta.choice, "message": message, "token_ids": None, **self._ending(delta)}

    def beside(self, first: Delta) -> Fields:
        told = {"prompt_logprobs": None} if self.of_whole else dict(NOT_ASKED_OF_CHAT)
        return (
            told
            if self.asked.prompt_logprobs is None
            else told | {"prompt_logprobs": self._told_prompt(self.prompt, first)}
        )

    def part(self, delta: Delta) -> Fields:
        text, calls = self.read(delta)
        gained: Fields = {"content": text} if text else {}
        if calls:
            gained["tool_calls"] = calls
        return {"index": delta.choice, "delta": gained, **self._ending(delta)}

    def _parser(self, index: int) -> ToolParser:
        assert self._new_parser is not None
        if index not in self._parsers:
            self._parsers[index] = self._new_parser()
        return self._parsers[index]

    def read(self, delta: Delta) -> tuple[str, list[Fields]]:
        """Return what a text has gained: content, and parts of calls, as a stream tells them."""
        if self._new_parser is None:
            return delta.text, []
        parser = self._parser(delta.choice)
        text, parts = parser.add(delta.text)
        if delta.finish is not None:
            rest, more = parser.end()
            text, parts = text + rest, parts + more
        return text, [self._call(delta.choice, part) for part in parts]

    def _call(self, choice: int, part: CallPart) -> Fields:
        if not part.name:
            return {"index": part.call, "function": {"arguments": part.arguments}}
        answer = this_request().id if self.asked.continuation is None else self.asked.continuation.id
        id = call_id(f"{answer} {choice} {part.call}")
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.call, "id": id, "type": "function", "function": function}

    def _ending(self, delta: Delta) -> Fields:
        shown = {"content": listed(self._shown, delta.tokens)} if self.logprobs else None
        has_called = delta.choice in self._parsers and self._parsers[delta.choice].calls > 0 and not self._is_chosen
        tokens = {"token_ids": [token.id for token in delta.tokens]} if self.asked.return_token_ids else {}
        return {
            **tokens,
            "logprobs": shown,
            "finish_reason": "tool_calls" if has_called and delta.finish == "stop" else delta.finish,
        }

    def _shown(self, token: Token) -> Fields:
        top = [self._one(id, logprob) for id, logprob in token.top]
        one = self._one(token.id, token.logprob)
        if self.asked.logprob_token_ids and all(id != token.id for id, _ in token.top):
            top = [one, *top]
        return {**one, "top_logprobs": top}

    def _one(self, id: int, logprob: float | None) -> Fields:
        told = list(bytes_of(self.tokenizer, id))
        return {"token": self.name(id), "logprob": finite(logprob), "bytes": told}


def call_id(of: str) -> str:
    """Return the id of a call: the same for the same one, and in the form that templates of Mistral ask for.

    >>> len(call_id("chatcmpl-1 0 0"))
    9
    """
    return blake2b(of.encode(), digest_size=8).hexdigest()[:9]


def joined_calls(parts: Iterable[Fields]) -> list[Fields]:
    """Return whole calls, of the parts that a stream tells.

    >>> joined_calls([{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}, {"index": 0, "function": {"arguments": "}"}}])
    [{'id': 'a', 'function': {'name': 'f', 'arguments': '{}'}}]
    """
    calls: dict[int, Fields] = {}
    for part in parts:
        index = part["index"]
        if index not in calls:
            told = {name: value for name, value in part.items() if name != "index"}
            calls[index] = {**told, "function": dict(part["function"])}
        else:
            calls[index]["function"]["arguments"] += part["function"]["arguments"]
    return list(calls.values())


class Places:
    """Where tokens begin in the text that they make. A character may be several tokens: all of them begin where it does.

    >>> places = Places(10)
    >>> [places.of(token) for token in (b"a", b"\\xc3", b"\\xa9", b"b")]
    [10, 11, 11, 12]
    """

    def __init__(self, at: int) -> None:
        self.at, self._decoder = at, getincrementaldecoder("utf-8")("replace")

    def of(self, token: bytes) -> int:
        """Return the place of the next token, which has these bytes."""
        at = self.at
        self.at += len(self._decoder.decode(token))
        return at

    def end(self) -> int:
        """Return where the text ends, of which no more tokens come."""
        return self.at + len(self._decoder.decode(b"", final=True))


@dataclass(eq=False)
class CompletionWords(Words):
    """Answers of POST /v1/completions.

    Args:
        echoes: The text of each prompt, which comes first; empty if it was not asked for.
        completions: Of each prompt.
        skips: Whether special tokens are left out of what is generated.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    echoes: list[str]
    prompts: list[tuple[int, ...]]
    completions: int
    skips: bool = True
    _places: dict[int, Places] = field(default_factory=dict, init=False)  # by completion
    _begun: set[int] = field(default_factory=set, init=False)  # completions whose prompt was shown

    def go_on(self, before: Continuation) -> None:
        """Go on where another server has stopped."""
        ended = frozenset(before.ended)
        for index, tokens in enumerate(before.tokens):
            if tokens or index in ended:
                self._begun.add(index)
                if self.logprobs:
                    self._places_in(index, tokens)

    def choice(self, delta: Delta) -> Fields:
        told = self.part(delta)
        asked, prompt = self.asked.prompt_logprobs is not None, self.prompts[delta.choice // self.completions]
        return {**NOT_ASKED, **told, "prompt_logprobs": self._told_prompt(prompt, delta) if asked else None}

    def part(self, delta: Delta) -> Fields:
        index, text = delta.choice, delta.text
        places = self._places_in(index, [token.id for token in delta.tokens]) if self.logprobs else []
        shown = self._shown(delta.tokens, places) if self.logprobs else None
        tokens: Fields = {"token_ids": [token.id for token in delta.tokens]} if self.asked.return_token_ids else {}
        if self.asked.return_token_ids and index not in self._begun:
            tokens["prompt_token_ids"] = self.prompts[index // self.completions]
            if not self.echoes:
                self._begun.add(index)
        if self.echoes and index not in self._begun:
            text = self.echoes[index // self.completions] + text
            if shown is not None:
                before = self._shown_prompt(delta)
                shown = {name: LongList(chain(before[name], shown[name])) for name in shown}
            self._begun.add(index)
        return {"index": index, "text": text, **tokens, "logprobs": shown, "finish_reason": delta.finish}

    def _shown_prompt(self, delta: Delta) -> dict[str, Iterator[Any]]:
        """Return the log probabilities of the prompt's tokens. The first token has none, because nothing comes before it."""
        number = delta.choice // self.completions
        prompt = self.prompts[number]
        return {
            "tokens": map(self.name, prompt),
            "token_logprobs": (finite(token.logprob) for token in told_prompt(prompt, delta)),
            "top_logprobs": map(self._top, told_prompt(prompt, delta)),
            "text_offset": self._offsets(number),
        }

    def _offsets(self, number: int) -> Iterator[int]:
        """Yield where a prompt's tokens begin in its text."""
        places = Places(0)
        starts = [places.of(bytes_of(self.tokenizer, id)) for id in self.prompts[number]]
        unseen = places.end() - len(self.echoes[number])  # characters of what the tokenizer has put in front
        yield from (max(0, start - unseen) for start in starts)

    def _places_in(self, index: int, tokens: Sequence[int]) -> list[int]:
        """Return where these next tokens of a completion begin in its text."""
        if (places := self._places.get(index)) is None:
            echo = len(self.echoes[index // self.completions]) if self.echoes else 0
            places = self._places[index] = Places(echo)
        silent = special_tokens(self.tokenizer) if self.skips else ()
        return [places.of(b"" if token in silent else bytes_of(self.tokenizer, token)) for token in tokens]

    def _shown(self, tokens: list[Token], places: list[int]) -> Fields:
        return {
            "tokens": listed(lambda token: self.name(token.id), tokens),
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": listed(self._top, tokens),
            "text_offset": places,
        }

    def _top(self, token: Token) -> dict[str, float | None] | None:
        if token.logprob is None:
            return None
        pairs = ((token.id, token.logprob), *token.top)  # the chosen one is always there
        return {self.name(id): finite(logprob) for id, logprob in pairs}


def told_prompt(prompt: Sequence[int], delta: Delta) -> Iterator[Token]:
    """Yield a prompt's tokens with their log probabilities, as far as they are told."""
    told = _tokens.decode(delta.prompt_logprobs) if delta.prompt_logprobs else ()
    yield from map(Token, prompt[: len(prompt) - len(told)])
    yield from map(_token.decode, told)


def usage(generation: Generation) -> Fields:
    details = {"cached_tokens": generation.cached_tokens}
    return counted(generation.prompt_tokens, generation.completion_tokens) | {"prompt_tokens_details": details}


def counted(prompt: int, completion: int) -> Fields:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def finite(logprob: float | None) -> float | None:
    """Return a number that JSON has. It has no infinity; like OpenAI's API, this one returns -9999 instead.

    >>> finite(float("-inf"))
    -9999.0
    """
    return None if logprob is None else max(logprob, -9999.0)
