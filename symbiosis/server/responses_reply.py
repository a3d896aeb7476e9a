"""The answer of `/v1/responses`: whole, or as events. What it says is one item, and each call of a tool is one."""

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec

from symbiosis.server.api_errors import ApiError
from symbiosis.server.generation import Delta, Generation
from symbiosis.server.long_reply import GenerationReply
from symbiosis.server.request_record import this_request
from symbiosis.server.response_format import ChatWords, Fields
from symbiosis.server.responses_protocol import Message, ResponsesBody, messages_of
from symbiosis.server.server_marks import response_id
from symbiosis.server.sse import EVENTS, JSON, SseWriter


class OutputItems:
    """The items of an answer, as they come. Each method yields the events that tell of it: their type, and their fields.

    >>> items = OutputItems("1")
    >>> [kind for kind, _ in items.say("Hi")]
    ['response.output_item.added', 'response.content_part.added', 'response.output_text.delta']
    """

    def __init__(self, id: str) -> None:
        self._id, self.items = id, list[Fields]()
        self._is_open = False  # the last one

    def say(self, text: str) -> Iterator[tuple[str, Fields]]:
        """Go on with what is said, or begin to say something."""
        if not self._is_open or self.items[-1]["type"] != "message":
            yield from self.end()
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin(
                {"id": f"msg_{self._id}_{len(self.items)}", "type": "message", "role": "assistant", "content": []}
            )
            self.items[-1]["content"].append(dict(part))
            yield "response.content_part.added", {**self._place, "content_index": 0, "part": part}
        self.items[-1]["content"][0]["text"] += text
        yield "response.output_text.delta", {**self._place, "content_index": 0, "delta": text, "logprobs": []}

    def call(self, part: Fields) -> Iterator[tuple[str, Fields]]:
        """Go on with a call, or begin one, by a part as streams of chats tell it."""
        function = part["function"]
        if "name" in function:
            yield from self.end()
            item = {
                "id": f"fc_{self._id}_{len(self.items)}",
                "type": "function_call",
                "call_id": part["id"],
                "name": function["name"],
            }
            yield from self._begin({**item, "arguments": ""})
        self.items[-1]["arguments"] += function["arguments"]
        yield "response.function_call_arguments.delta", {**self._place, "delta": function["arguments"]}

    def end(self, status: str = "completed") -> Iterator[tuple[str, Fields]]:
        """End the last item, if it is open."""
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield "response.output_text.done", {**self._place, "content_index": 0, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**self._place, "content_index": 0, "part": part}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._place, **done}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    @property
    def _place(self) -> Fields:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: Fields) -> Iterator[tuple[str, Fields]]:
        self._is_open = True
        self.items.append({**item, "status": "in_progress"})
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": self.items[-1]}


class ResponsesReply(GenerationReply):
    """An answer with the items of a response.

    Args:
        keep: Gets the response when it is whole, to store it.
        server: Its name in a cluster, which the id tells.
    """

    def __init__(
        self, generation: Generation, words: ChatWords, body: ResponsesBody, keep: Callable[[Fields], None], done: Callable[[int], None],
        server: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(generation, bool(body.stream), done)
        self._words, self._body, self._keep = words, body, keep
        self._id = response_id(server, this_request().id)
        self._items, self._created, self._count = OutputItems(this_request().id), int(time.time()), 0

    async def _whole(self, writer: SseWriter) -> None:
        finish = None
        async for deltas in self._deltas(writer):
            for delta in deltas:
                finish = delta.finish
                for _ in self._events(delta):
                    pass
        if self._generation.is_whole:
            await writer.start(JSON)
            await writer.take([msgspec.json.encode(self._ended(finish))], more=False)

    async def _stream(self, writer: SseWriter) -> None:
        finish = None
        try:
            async for deltas in self._generation.deltas():
                if not writer.has_begun:
                    await self._begin(writer)
                for delta in deltas:
                    finish = delta.finish
                    told = (self._written(kind, fields) for kind, fields in self._events(delta))
                    await writer.take(chain(self._tally(), told))
        except ApiError as error:
            if not writer.has_begun:
                raise
            error.note()
            failed = {name: error.body["error"][name] for name in ("code", "message", "param")}
            await writer.take([self._written("error", failed)], more=False)
            return
        if not self._generation.is_whole:
            return
        if not writer.has_begun:
            await self._begin(writer)
        response = self._ended(finish)
        await writer.take([self._written(f"response.{response['status']}", {"response": response})], more=False)

    async def _begin(self, writer: SseWriter) -> None:
        await writer.start(EVENTS)
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        await writer.take(self._written(kind, {"response": response}) for kind in kinds)

    def _written(self, kind: str, fields: Fields) -> bytes:
        self._count += 1
        told = msgspec.json.encode({"type": kind, "sequence_number": self._count - 1, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), told)

    def _events(self, delta: Delta) -> Iterator[tuple[str, Fields]]:
        text, calls = self._words.read(delta)
        if text:
            yield from self._items.say(text)
        for part in calls:
            yield from self._items.call(part)
        if delta.finish is not None:
            if not self._items.items:
                yield from self._items.say("")
            yield from self._items.end("incomplete" if delta.finish == "length" else "completed")

    def _ended(self, finish: str | None) -> Fields:
        """Return the whole response, which is stored."""
        response = self._response("incomplete" if finish == "length" else "completed")
        cached, read, written = (
            self._generation.cached_tokens,
            self._generation.prompt_tokens,
            self._generation.completion_tokens,
        )
        response["usage"] = {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0}, "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written,
        }  # fmt: skip
        self._keep(response)
        return response

    def _response(self, status: str) -> Fields:
        body = self._body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tools: list[Any] = msgspec.to_builtins(body.tools or [])
        choice = body.tool_choice or "auto"
        format: Fields = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            given = msgspec.structs.asdict(body.text.format)
            format = {name: value for name, value in given.items() if value not in (None, msgspec.Raw())}
            if "schema" in format:  # events are lines
                format["schema"] = msgspec.Raw(msgspec.json.format(bytes(format["schema"]), indent=-1))
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "background": False, "error": None,
            "incomplete_details": reason, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "model": body.model, "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": body.previous_response_id,
            "store": body.store is not False, "temperature": 1.0 if body.temperature is None else body.temperature, "text": {"format": format, "verbosity": body.text.verbosity if body.text else None},
            "tool_choice": choice if isinstance(choice, str) else msgspec.to_builtins(choice), "tools": tools,
            "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled", "user": body.user,
            "usage": None,
        }  # fmt: skip


def messages_after(body: ResponsesBody, before: list[Message], output: list[Fields]) -> list[Message]:
    """Return a chat up to the end of a response, without instructions: those of a later one hold instead."""
    return [*before, *body.messages(), *messages_of(output)]
