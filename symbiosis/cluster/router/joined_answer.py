"""An answer that is no stream, made of the events of one, so that it can go on at another server like a stream."""

from collections.abc import Iterator
from typing import Any

import msgspec

from symbiosis.server.response_format import NOT_ASKED, NOT_ASKED_OF_CHAT, joined_calls


class _Part(msgspec.Struct):
    """What one choice has gained with an event."""

    index: int
    text: str = ""
    delta: dict[str, Any] = {}
    logprobs: dict[str, msgspec.Raw] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    model: str = ""
    choices: list[_Part] = []
    usage: msgspec.Raw = msgspec.Raw(b"null")


class _Choice:
    """What one choice has gained so far."""

    def __init__(self) -> None:
        self.texts = list[str]()
        self.finish: str | None = None
        self.calls = list[dict[str, Any]]()  # parts of calls of tools
        self.logprobs: dict[str, list[bytes]] | None = None

    def add(self, part: _Part) -> None:
        self.texts.append(part.text or part.delta.get("content") or "")
        self.calls += part.delta.get("tool_calls") or ()
        self.finish = part.finish_reason or self.finish
        if part.logprobs is not None:
            self.logprobs = {} if self.logprobs is None else self.logprobs
            for name, shown in part.logprobs.items():
                self.logprobs.setdefault(name, []).append(bytes(shown).strip()[1:-1])

    def shown(self) -> msgspec.Raw:
        """Return its log probabilities: lists, of which each event had a part."""
        if self.logprobs is None:
            return msgspec.Raw(b"null")
        lists = {name: b"[" + b",".join(filter(None, parts)) + b"]" for name, parts in self.logprobs.items()}
        return msgspec.Raw(b"{" + b",".join(b'"%s":%s' % (name.encode(), each) for name, each in lists.items()) + b"}")


class JoinedAnswer:
    r"""The answer to a completion of so many choices.

    >>> whole = JoinedAnswer(False, 1, "cmpl-1", 7)
    >>> whole.take(b'data: {"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}')
    >>> whole.take(b'data: {"model":"m","choices":[{"index":0,"text":"b","logprobs":null,"finish_reason":"stop"}]}')
    >>> msgspec.json.decode(b"".join(whole.pieces()))["choices"][0]["text"]
    'ab'
    """

    def __init__(self, is_chat: bool, choices: int, id: str, created: int) -> None:
        self._is_chat, self._count, self._choices = is_chat, choices, list[_Choice]()
        self._head: dict[str, Any] = {
            "object": "chat.completion" if is_chat else "text_completion", "id": id, "created": created, "model": "",
        }  # fmt: skip
        self._usage = b"null"

    def take(self, event: bytes) -> None:
        """Take over what an event tells."""
        told = msgspec.json.decode(event.removeprefix(b"data: "), type=_Event)
        self._head["model"] = told.model
        self._usage = bytes(told.usage) if not told.choices else self._usage
        if not self._choices:  # they are not made before a server has let them in
            self._choices = [_Choice() for _ in range(self._count)]
        for part in told.choices:
            self._choices[part.index].add(part)

    def pieces(self) -> Iterator[bytes]:
        """Yield the answer as JSON, each choice by itself: together they may be large."""
        yield msgspec.json.encode(self._head)[:-1] + b',"choices":['
        for index, choice in enumerate(self._choices):
            yield b"," * (index > 0) + msgspec.json.encode(self._shown(index, choice))
        yield b'],"usage":' + self._usage
        if self._is_chat:
            yield b"," + msgspec.json.encode(NOT_ASKED_OF_CHAT)[1:-1]
        yield b"}"

    def _shown(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, ending = "".join(choice.texts), {"logprobs": choice.shown(), "finish_reason": choice.finish}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                message |= {"content": text or None, "tool_calls": joined_calls(choice.calls)}
            return {"index": index, "message": message, "token_ids": None, **ending}
        # who asks for tokens by number, or log probabilities of prompts, is answered by one server
        return {"index": index, "text": text, **ending, **NOT_ASKED}
