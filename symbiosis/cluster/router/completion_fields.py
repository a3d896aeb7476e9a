"""What a front end reads of a completion: what placement needs, and nothing that takes long, however the body is made.

A body is not decoded. What is long in it is skipped and counted by its characters, at memory's speed, and it is sent on as it came, with what the
front end adds at its end: of a field that a JSON object has twice, the last one holds.
"""

from typing import Any

import msgspec

from symbiosis.server.api_errors import wrong
from symbiosis.server.json_costs import without_texts
from symbiosis.server.openai_protocol import MOST, Completions, Continuation, Tokens, Whole, decoded

MOST_PROMPTS = 4096  # of a request
MOST_CONTINUATION = 1 << 20  # bytes
BYTES_PER_TOKEN = 4  # of a text, about; the server counts itself
SHORT_ANSWER, LONG_ANSWER = 16, 256  # tokens of a completion and of a chat that say nothing of their length


class _Fields(msgspec.Struct):
    """Of a body, what is read here. All else is skipped. Whatever is null is as if it were not there."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    n: Completions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw = msgspec.Raw()
    seed: Whole | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    continuation: msgspec.Raw = msgspec.Raw()

    def raw(self, name: str) -> bytes:
        """Return a field as it is written; nothing if it is null."""
        found = bytes(getattr(self, name))
        return b"" if found == b"null" else found


class CompletionFields:
    """One body.

    >>> asked = CompletionFields(b'{"model": "m", "prompt": ["one", "two, \\\\"three\\\\""], "n": 2}')
    >>> asked.model, asked.sequences
    ('m', 4)
    >>> asked.body(seed=7)
    b'{"model": "m", "prompt": ["one", "two, \\\\"three\\\\""], "n": 2,"seed":7}'
    """

    def __init__(self, data: bytes, is_chat: bool = False) -> None:
        fields = decoded(_Fields, data)
        self.model, self.seed, self.is_stream = fields.model, fields.seed, bool(fields.stream)
        self.is_chat = is_chat
        chat = 1, len(fields.raw("messages")) // BYTES_PER_TOKEN
        prompts, tokens = chat if is_chat else counts(fields.raw("prompt"))
        self.sequences = prompts * (fields.n or 1)
        self.tokens = tokens  # of all prompts
        wanted = (
            (fields.max_completion_tokens, fields.max_tokens, LONG_ANSWER)
            if is_chat
            else (fields.max_tokens, SHORT_ANSWER)
        )
        self.longest = next(each for each in wanted if each is not None)  # tokens of a completion
        self.most_tokens = self.sequences * self.longest
        before = fields.raw("continuation")
        self.continuation = _continuation(before) if before else None
        told_whole = fields.return_token_ids or fields.raw("prompt_logprobs")  # what streams do not tell
        is_plain = not fields.raw("stream_options") and not told_whole and self.continuation is None
        self.may_be_streamed = not self.is_stream and is_plain
        self._data = data
        self.size = len(data)  # bytes

    def body(self, **more: Any) -> bytes:
        """Return it with these fields, whether it has them or not."""
        return with_fields(self._data, more)


def with_fields(body: bytes, more: dict[str, Any]) -> bytes:
    """Return an object of JSON with these fields, whether it has them or not.

    >>> with_fields(b'{"n": 1}', {"seed": 7}), with_fields(b"{}", {"seed": 7})
    (b'{"n": 1,"seed":7}', b'{"seed":7}')
    """
    begin = body.rstrip()[:-1].rstrip()
    return begin + (b"," if more and not begin.endswith(b"{") else b"") + msgspec.json.encode(more)[1:]


def counts(prompt: bytes, field: str = "prompt") -> tuple[int, int]:
    """Return how many prompts there are in a field, and about how many tokens they are together.

    >>> counts(b'"a text, of course"'), counts(b"[1, 2, 3]"), counts(b'["a", [1, 2]]'), counts(b"[]")
    ((1, 4), (1, 3), (2, 3), (1, 1))
    """
    if prompt[:1] != b"[":
        return 1, len(prompt) // BYTES_PER_TOKEN
    if (outside := without_texts(prompt, MOST_PROMPTS)) is None:
        raise _too_many(field)
    tokens = outside.count(b",") + 1 + (len(prompt) - len(outside)) // BYTES_PER_TOKEN
    if outside[1:].lstrip()[:1] not in (b'"', b"["):
        return 1, tokens
    if outside.count(b"[") > MOST_PROMPTS:
        raise _too_many(field)
    return outside.count(b'"') + outside.count(b"[") - 1, tokens


def _too_many(field: str) -> Exception:
    return wrong(f"at most {MOST_PROMPTS} texts: send fewer at once in {field}", field)


def _continuation(given: bytes) -> Continuation:
    """Return how far another front end has come with it."""
    if len(given) > MOST_CONTINUATION:
        raise wrong(f"a continuation has at most {MOST_CONTINUATION} bytes", "continuation")
    if not MOST["continuation"].holds(given):
        raise wrong(f"continuation holds too much: at most {MOST['continuation']}", "continuation")
    return decoded(Continuation, given, "continuation")
