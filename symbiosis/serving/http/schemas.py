"""What clients may ask for, by the names of OpenAI and vLLM, and what it means to the engine."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from symbiosis.serving.engine.limits import LIMITS, Unfit, check_count, check_length, check_number, check_sampling
from symbiosis.serving.http.failures import ApiError, wrong
from symbiosis.serving.http.incoming.costs import check_cost
from symbiosis.serving.request import Sampling

BY_FORMAT = "Text by a JSON schema is asked for by response_format={'type': 'json_schema', ...}"
BodyType = TypeVar("BodyType", bound="Body")
Kind = TypeVar("Kind")
NO_OBJECT = re.compile("Expected `object.*`, got `[a-z]+`")  # without a field: it is the whole body


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: msgspec.Raw = msgspec.Raw()  # its text, which the engine's process reads
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None


class Continuation(msgspec.Struct, forbid_unknown_fields=True):
    """A stream that another server has begun, and that goes on here with the same draws. Ours alone: no other API has it. A request that has
    this field is answered with a comment before each event, which tells the tokens of that event, so that it can go on elsewhere in turn.
    """

    id: str  # of the answer
    created: int
    tokens: list[list[int]] = []  # of each choice, those that its events have told
    ended: list[int] = []  # choices
    opened: int = 0  # events that have told no tokens: those with which a chat begins

    def chosen(self, prompt: int, completions: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of a prompt's completions."""
        return tuple(map(tuple, self.tokens[prompt * completions : (prompt + 1) * completions]))

    def ended_of(self, completions: int) -> dict[int, tuple[int, ...]]:
        """Return which completions have ended, by prompt; prompts without any are not in it.

        >>> Continuation("cmpl-1", 0, ended=[0, 5, 4]).ended_of(2)
        {0: (0,), 2: (1, 0)}
        """
        ended: dict[int, list[int]] = {}
        for choice in self.ended:
            ended.setdefault(choice // completions, []).append(choice % completions)
        return {prompt: tuple(those) for prompt, those in ended.items()}


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both kinds of completions have."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    continuation: Continuation | None = None
    # Read and ignored: nothing here depends on them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> list[str]:
        """The strings that end a text. Empty ones end none."""
        return [each for each in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if each]

    @property
    def wanted(self) -> int | None:
        """How many tokens a completion may have; None: the default."""
        return self.max_tokens

    @property
    def completions(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def tells_usage(self) -> bool:
        """Whether each event of a stream is to tell the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)


class CompletionBody(Body, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatBody(Body, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None  # ignored, as are those of `Body`
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def read(kind: type[BodyType], data: bytes) -> BodyType:
    """Read a body of this kind. Raises an `ApiError` that says what is wrong with it."""
    check_cost(data)
    body = decoded(kind, data)
    _check(body)
    return body


def decoded(kind: type[Kind], data: bytes) -> Kind:
    """Decode a JSON object. Raises an `ApiError` that names the field that is wrong.

    >>> decoded(StreamOptions, b'{"include_usage": true}').include_usage
    True
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(error) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not JSON: {error}") from None


def _named(error: msgspec.ValidationError) -> ApiError:
    """Return an error that names the field."""
    text = str(error)
    if NO_OBJECT.fullmatch(text):
        return wrong("the body is not a JSON object")
    if found := re.search(r"unknown field `(.*?)`", text):
        hint = f". {BY_FORMAT}" if found[1].startswith(("guided_", "structured_outputs")) else ""
        return wrong(f"unrecognized request argument: {found[1][:100]}{hint}", found[1][:100])
    if found := re.search(r"missing required field `(.*?)`", text):
        return wrong(f"the argument {found[1]} is missing", found[1])
    found = re.search(r"at `\$\.([\w.\[\]]+)`", text)
    return wrong(f"wrong argument: {text}", found[1] if found else None)


AS_ASKED = {
    "stop_tokens": "stop_token_ids",
    "chosen": "continuation",
    "ended": "continuation",
    "id": "continuation",
    "schema": "response_format",
}  # what the API calls the engine's fields
AS_CHAT = {**AS_ASKED, "prompt": "messages"}
AS_CHECKED = {"max_completion_tokens": "max_tokens", "n": "completions", "top_logprobs": "logprobs"}


@contextmanager
def refusing(names: dict[str, str] = AS_ASKED) -> Iterator[None]:
    """Tell a client what the engine calls unfit, by the name that it has in the request."""
    try:
        yield
    except Unfit as unfit:
        name = names.get(unfit.param, unfit.param)
        raise wrong(f"{name} {unfit.problem}", name) from None


def _check(body: Body) -> None:
    for name in body.__struct_fields__:
        if (value := getattr(body, name)) is None:
            continue
        checked = AS_CHECKED.get(name, name)
        if checked in LIMITS and not isinstance(value, bool) and not (name == "top_k" and value == -1):
            with refusing({checked: name}):
                check_number(checked, value)
    with refusing():
        _check_sizes(body)
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options go with stream=true", "stream_options")
    if body.continuation is not None and not (body.stream and body.seed is not None):
        raise wrong("a continuation goes with stream=true and a seed", "continuation")
    if isinstance(body, CompletionBody):
        _check_completion(body)
    if isinstance(body, ChatBody):
        _check_chat(body)


def _check_sizes(body: Body) -> None:
    """Raise `Unfit` for more, or longer, than there may be. Nothing here depends on the sizes: it comes before all that does."""
    check_count("stop", len(body.stops))
    for stop in body.stops:
        check_length("stop", len(stop))
    check_count("stop_tokens", len(body.stop_token_ids or ()))
    check_count("logit_bias", len(body.logit_bias or ()))
    if body.response_format and body.response_format.json_schema:
        check_length("schema", len(str(bytes(body.response_format.json_schema.schema), errors="replace")))
    if body.continuation is not None:
        check_length("id", len(body.continuation.id))
    if isinstance(body, ChatBody):
        check_count("messages", sum(map(_parts, body.messages)))


def _parts(message: dict[str, Any]) -> int:
    return max(1, len(content)) if isinstance(content := message.get("content"), list) else 1


def _check_completion(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != body.completions:
        raise wrong("best_of is not supported beyond n: ask for n completions, and choose yourself", "best_of")
    if body.suffix:
        raise wrong("suffix is not supported: the model completes at the end only", "suffix")


def _check_chat(body: ChatBody) -> None:
    if body.tools:
        raise wrong("tools are not supported: describe them in a message, and ask for JSON by response_format", "tools")
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs go with logprobs=true", "top_logprobs")
    for name in ("max_completion_tokens", "max_tokens"):
        if getattr(body, name) == 0:
            raise wrong(f"{name} must be at least 1, not 0", name)
    if not body.messages:
        raise wrong("messages is empty", "messages")


def sampling_of(body: Body, max_tokens: int, logprobs: int | None, vocabulary: int) -> Sampling:
    """Return how the engine is to choose tokens."""
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(_given(body.top_k, 0), 0),
        min_p=_given(body.min_p, 0.0),
        seed=body.seed if body.seed is not None else secrets.randbits(63),
        stop_tokens=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        logit_bias=_bias(body.logit_bias or {}),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        schema=_schema(body.response_format),
    )
    with refusing():
        check_sampling(sampling, vocabulary)
    return sampling


Number = TypeVar("Number", int, float)


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _bias(given: dict[str, float]) -> dict[int, float]:
    for name in given:
        if not re.fullmatch(r"\d{1,9}", name):
            raise wrong(f"logit_bias: its keys are tokens by number, not {name[:50]!r}", "logit_bias")
    return {int(name): value for name, value in given.items()}


def _schema(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return '{"type":"object"}'
    if wanted.type != "json_schema":
        raise wrong(
            f"response_format: its type is text, json_object or json_schema, not {wanted.type[:50]!r}",
            "response_format",
        )
    schema = bytes(wanted.json_schema.schema) if wanted.json_schema else b""
    if not schema.startswith(b"{"):
        raise wrong("response_format: json_schema needs a schema, which is an object", "response_format")
    try:
        return schema.decode()
    except UnicodeDecodeError as error:
        raise wrong(f"response_format: the schema is no text: {error}", "response_format") from None
