"""What clients may ask for, by the names of OpenAI and vLLM, and what it means to the engine."""

import re
import secrets
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Optional, TypeVar, get_args, get_origin

import msgspec

from symbiosis.server.api_errors import ApiError, wrong
from symbiosis.server.guides import ResponseFormat, StructuredOutputs, guide_of
from symbiosis.server.json_costs import Most
from symbiosis.server.openai_fields import DEFAULTS, OF_TEMPLATE, RAW, Label, Metadata, check_default
from symbiosis.server.tools import Choice, Tool, ToolUse, tool_use
from symbiosis.serving.engine.limits import COUNTS, LIMITS, Unfit, check_count, check_length
from symbiosis.serving.request import MANY, Guide, Sampling

Kind = TypeVar("Kind")
MOST_PROMPTS = 1 << 16  # of a request, and completions that go on
NO_OBJECT = re.compile("Expected `object.*`, got `[a-z]+`")  # without a field: it is the whole body


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: msgspec.Raw = RAW  # of DEFAULTS


class PredictedPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """What a client thinks that an answer will be.

    >>> Prediction("content", [PredictedPart("text", "ab"), PredictedPart("text", "cd")]).text
    'abcd'
    """

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Continuation(msgspec.Struct, forbid_unknown_fields=True):
    """A stream that another server has begun, and that goes on here with the same draws. Ours alone: no other API has it. A request that has
    this field is answered with a comment before each event, which tells the tokens of that event, so that it can go on elsewhere in turn.
    """

    id: str  # of the answer
    created: int
    tokens: list[list[int]] = []  # of each choice, those that its events have told
    ended: list[int] = []  # choices
    opened: int = 0  # events that have told no tokens: those with which a chat begins
    base: str = ""  # the fingerprint of the model that made the tokens

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


Whole = Annotated[
    int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)
]  # as it travels to the engine, which knows what it may be
# the numbers by which a request is counted before the engine has seen it
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MANY)]
Completions = Annotated[int, msgspec.Meta(ge=1, le=int(LIMITS["completions"].most))]


Truncation = Annotated[int, msgspec.Meta(ge=-1, le=MANY)]  # tokens that are left of a prompt; -1: what the model takes


class DrawnBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions, chats and responses have by the same names: how tokens are drawn, and what they are for."""

    model: str = ""  # then the route puts the base there
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: Whole | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    # HARMLESS
    user: Label | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    # DEFAULTS
    service_tier: msgspec.Raw = RAW
    prompt_cache_options: msgspec.Raw = RAW
    prompt_cache_retention: msgspec.Raw = RAW


class Body(DrawnBody, kw_only=True):
    """The fields that both kinds of completions have."""

    max_tokens: Tokens | None = None
    min_tokens: Whole | None = None
    n: Completions = 1
    stop_token_ids: list[Whole] | None = None
    allowed_token_ids: list[Whole] | None = None
    bad_words: list[str] | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Whole | None = None
    logprob_token_ids: list[Whole] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = RAW
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    continuation: Continuation | None = None
    # DEFAULTS
    store: msgspec.Raw = RAW
    use_beam_search: msgspec.Raw = RAW
    length_penalty: msgspec.Raw = RAW

    @property
    def names(self) -> Mapping[str, str]:
        """What the API calls the engine's fields."""
        return AS_ASKED

    @property
    def follows(self) -> tuple[str, Guide] | None:
        """What the text must follow, and the field that says so."""
        outputs = {} if self.structured_outputs is None else {"structured_outputs": self.structured_outputs}
        for kind in ("json", "regex", "choice", "grammar"):
            if (given := getattr(self, f"guided_{kind}")) not in (None, msgspec.Raw()):
                outputs[f"guided_{kind}"] = StructuredOutputs(**{kind: given})
        return guide_of(self.response_format, outputs) if outputs or self.response_format is not None else None

    @property
    def stops(self) -> list[str]:
        """The strings that end a text. Empty ones end none."""
        return [each for each in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if each]


class CompletionBody(Body, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: msgspec.Raw = RAW  # of DEFAULTS


class ChatBody(Body, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # of a final message that is continued
    # OF_TEMPLATE
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    # HARMLESS
    prediction: Prediction | None = None
    # DEFAULTS
    functions: msgspec.Raw = RAW
    function_call: msgspec.Raw = RAW
    modalities: msgspec.Raw = RAW
    audio: msgspec.Raw = RAW
    moderation: msgspec.Raw = RAW
    web_search_options: msgspec.Raw = RAW

    @property
    def names(self) -> Mapping[str, str]:
        most = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return AS_CHAT | most

    @property
    def wanted(self) -> int | None:
        """How many tokens a completion may have; None: the default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tool_use(self) -> ToolUse | None:
        """What the model may do with tools; None: nothing."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        asked = {name: getattr(self, name) for name in OF_TEMPLATE if getattr(self, name) is not None}
        return {**asked, **(self.chat_template_kwargs or {})}


NULL = msgspec.Raw(b"null")
MOST_VALUES = 1 << 22
LITTLE = 1024  # bytes of a field of which anything may be made
TOLD = 8  # of what is wrong, in a message
SHORT = 1 << 18  # bytes of fields that hold few short texts, however these are written
MOST = {  # what fields hold at most: it is counted before anything is made of them
    "stop": Most(COUNTS["stop"], 1, COUNTS["stop"], SHORT),
    "allowed_token_ids": Most(COUNTS["allowed_tokens"], 1, COUNTS["allowed_tokens"], SHORT),
    "bad_words": Most(COUNTS["bad_words"], 1, COUNTS["bad_words"], SHORT),
    "logprob_token_ids": Most(COUNTS["logprob_tokens"], 1, COUNTS["logprob_tokens"], SHORT),
    "tokens": Most(1, 1, MOST_VALUES),
    "stop_token_ids": Most(COUNTS["stop_tokens"], 1, COUNTS["stop_tokens"], SHORT),
    "logit_bias": Most(COUNTS["logit_bias"], 1, COUNTS["logit_bias"], SHORT),
    "metadata": Most(2 * COUNTS["metadata"], 1, COUNTS["metadata"], SHORT),
    "prediction": Most(1 << 13, 1 << 11, 1 << 12, SHORT),
    "chat_template_kwargs": Most(1024, 256, 1024, SHORT),
    "structured_outputs": Most(1 << 16, 1 << 16, 1 << 16, SHORT),
    "guided_choice": Most(1 << 16, 1, 1 << 16, SHORT),
    "tools": Most(1 << 16, 1 << 16, 1 << 16, 1 << 20),
    "tool_choice": Most(16, 4, 16, LITTLE),
    "text": Most(1 << 16, 1 << 16, 1 << 16, SHORT),
    "input": Most(8 * COUNTS["messages"], 4 * COUNTS["messages"], 16 * COUNTS["messages"]),
    "messages": Most(8 * COUNTS["messages"], 4 * COUNTS["messages"], 16 * COUNTS["messages"]),
    "prompt": Most(MOST_PROMPTS, 1 + MOST_PROMPTS, MOST_VALUES),
    "continuation": Most(16, 3 + MOST_PROMPTS, MOST_VALUES),
}


def read(kind: type[Kind], data: bytes) -> Kind:
    """Read a body of this kind, in which null is as if it were not there. Raises an `ApiError` that says what is wrong with it."""
    as_written, large = _as_written(kind)  # type: ignore[arg-type]
    told = msgspec.structs.asdict(decoded(as_written, data))
    bounds = MOST | getattr(kind, "most", {})
    fields = {name: value for name, value in told.items() if value not in (None, NULL) or name in large}
    for name, its_kind in large.items():
        if not (given := bytes(fields.pop(name))):
            continue
        if len(given) > LITTLE and not bounds[name].holds(given):
            raise wrong(f"{name} holds too much: at most {bounds[name]}", name)
        fields[name] = decoded(its_kind, given, name)
    body = kind(**fields)
    if isinstance(body, Body):
        check(body)
    return body


@cache
def _as_written(kind: Any) -> tuple[type[msgspec.Struct], dict[str, Any]]:
    """Return a kind of body whose large fields are as they are written: nothing is made of them. And those fields' kinds, by name."""
    there = msgspec.structs.fields(kind)
    large = {each.name: each.type for each in there if each.name in MOST | getattr(kind, "most", {})}
    fields: list[Any] = []
    for each in there:
        if each.required:
            fields.append((each.name, msgspec.Raw if each.name in large else each.type))
        elif each.name in large or each.type is msgspec.Raw:
            fields.append((each.name, msgspec.Raw, msgspec.Raw()))
        else:
            fields.append((each.name, Optional[each.type], None))  # noqa: UP045
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=True), large


def decoded(kind: type[Kind], data: bytes, field: str = "") -> Kind:
    """Decode a JSON object, or a field of it. Raises an `ApiError` that names the field that is wrong.

    >>> decoded(StreamOptions, b'{"include_usage": true}').include_usage
    True
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), field, kind) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not JSON: {error}") from None


def choices(kind: Any, path: str) -> list[str]:
    """Return the texts that a field of a body may be, if it is one of few.

    >>> choices(Body, "truncation_side"), choices(ChatBody, "tools.type"), choices(Body, "model")
    (['left', 'right'], ['function'], [])
    """
    if is_struct(kind):
        name, _, rest = path.partition(".")
        return [text for each in msgspec.structs.fields(kind) if each.name == name for text in choices(each.type, rest)]
    if get_origin(kind) is Literal:
        return [] if path else [each for each in get_args(kind) if isinstance(each, str)]
    return [text for part in get_args(kind) for text in choices(part, path)]


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _named(text: str, field: str, kind: Any) -> ApiError:
    """Return an error that names the field."""
    if not field and NO_OBJECT.fullmatch(text):
        return wrong("the body is not a JSON object")
    if found := re.search(r"unknown field `(.*?)`(?: - at `\$\.?([\w.\[\]]+)`)?", text):
        name = ".".join(filter(None, [field, found[2], found[1][:100]])).replace(".[", "[")
        return wrong(f"unrecognized request argument: {name}", name)
    if found := re.search(r"missing required field `(.*?)`", text):
        return wrong(f"{field and f'{field}: '}the argument {found[1]} is missing", field or found[1])
    found = re.search(r"at `\$\.?([\w.\[\]]+)`", text)
    where = ".".join(filter(None, [field, found[1] if found else ""])).replace(".[", "[")
    if value := re.match(r"Invalid enum value (.*?)(?: - at|$)", text):
        path = re.sub(r"\[.*?\]", "", found[1]).removeprefix(".") if found else ""
        known = ", ".join(map(repr, choices(kind, path)))
        return wrong(f"{where} {value[1][:100]} is not supported{known and f': it may be {known}'}", where or None)
    if bound := re.match(r"Expected `\w+` (>=|<=) (-?\d+)", text):
        return wrong(f"{where} must be at {'least' if bound[1] == '>=' else 'most'} {bound[2]}", where or None)
    if bound := re.match(r"Expected `str` of length <= (\d+)", text):
        what = f"a key of {where}" if "at `key` in" in text else where
        return wrong(f"{what} may have {bound[1]} characters, and has more", where or None)
    return wrong(f"wrong argument{field and f' {field}'}: {text}", where or None)


AS_ASKED = {
    "stop_tokens": "stop_token_ids",
    "allowed_tokens": "allowed_token_ids",
    "bad_sequences": "bad_words",
    "logprob_tokens": "logprob_token_ids",
    "chosen": "continuation",
    "ended": "continuation",
    "id": "continuation",
    "completions": "n",
}  # what the API calls the engine's fields
AS_CHAT = {**AS_ASKED, "prompt": "messages", "logprobs": "top_logprobs"}


def refused(unfit: Unfit, names: Mapping[str, str] = AS_ASKED) -> ApiError:
    """Return what a client is told of what the engine calls unfit, by the name that it has in the request."""
    name = names.get(unfit.param, unfit.param)
    return wrong(f"{name} {unfit.problem}", name)


def check(body: Body) -> None:
    """Check the shape of a body: what belongs together, and how much there is. What numbers mean is the engine's to check."""
    for name in DEFAULTS:
        if given := getattr(body, name, None):
            check_default(name, given)
    try:
        _check_counts(body)
    except Unfit as unfit:
        raise refused(unfit) from None
    if (found := body.follows) is not None:
        field, guide = found
        try:
            check_length(guide.kind, len(guide.text))
        except Unfit as unfit:
            raise refused(unfit, {guide.kind: field}) from None
    if body.stream_options is not None:
        _check_stream(body, body.stream_options)
    if body.continuation is not None and not (body.stream and body.seed is not None):
        raise wrong("a continuation goes with stream=true and a seed", "continuation")
    if body.prompt_logprobs is not None and body.stream:
        raise wrong("prompt_logprobs come with a whole answer: leave stream out", "prompt_logprobs")
    if isinstance(body, ChatBody):
        _check_chat(body)
    elif isinstance(body, CompletionBody) and body.best_of is not None and body.best_of != body.n:
        raise wrong("best_of is not supported beyond n: ask for n completions, and choose yourself", "best_of")


def _check_stream(body: Body, options: StreamOptions) -> None:
    if not body.stream:
        raise wrong("stream_options go with stream=true", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise wrong("continuous_usage_stats go with include_usage=true", "stream_options")
    check_default("include_obfuscation", options.include_obfuscation)


def _check_counts(body: Body) -> None:
    """Raise `Unfit` for more, or longer, than there may be. Nothing here depends on the sizes: it comes before all that does."""
    if body.stop:
        check_count("stop", len(body.stops))
        for stop in body.stops:
            check_length("stop", len(stop))
    for name in ("logit_bias", "metadata"):
        if given := getattr(body, name):
            check_count(name, len(given))
    if body.stop_token_ids:
        check_count("stop_tokens", len(body.stop_token_ids))
    if body.allowed_token_ids is not None:
        check_count("allowed_tokens", len(body.allowed_token_ids))
        if not body.allowed_token_ids:
            raise Unfit("allowed_tokens", "is empty, and no token could come: leave it out to allow all")
    if body.logprob_token_ids:
        check_count("logprob_tokens", len(body.logprob_token_ids))
    if body.bad_words:
        check_count("bad_words", len(body.bad_words))
        for word in body.bad_words:
            check_length("bad_words", len(word))
    if body.continuation is not None:
        check_length("id", len(body.continuation.id))
    if isinstance(body, ChatBody):
        check_count("messages", sum(map(_parts, body.messages)))


def check_parts(messages: list[dict[str, Any]]) -> None:
    """Raise `ApiError` for more messages, and parts of them, than there may be."""
    try:
        check_count("messages", sum(map(_parts, messages)))
    except Unfit as unfit:
        raise refused(unfit) from None


def _parts(message: dict[str, Any]) -> int:
    return max(1, len(content)) if isinstance(content := message.get("content"), list) else 1


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs go with logprobs=true", "top_logprobs")
    for name in ("max_completion_tokens", "max_tokens"):
        if getattr(body, name) == 0:
            raise wrong(f"{name} must be at least 1, not 0", name)
    if None is not body.max_tokens != body.max_completion_tokens is not None:
        raise wrong("max_tokens is the old name of max_completion_tokens: give one of them", "max_tokens")
    for name in OF_TEMPLATE:
        if getattr(body, name) is not None and name in (body.chat_template_kwargs or {}):
            raise wrong(f"{name} is in chat_template_kwargs, too: give it once", name)
    _check_final_message(body)
    if not body.messages:
        raise wrong("messages is empty", "messages")
    _ = body.tool_use  # is checked


def _check_final_message(body: ChatBody) -> None:
    if body.continue_final_message and body.add_generation_prompt is not False:
        raise wrong("continue_final_message goes with add_generation_prompt=false", "continue_final_message")
    if body.echo and not body.continue_final_message:
        raise wrong("echo goes with continue_final_message: the answer begins with what it continues", "echo")


Sequences = tuple[tuple[int, ...], ...]
SAME = tuple(
    name for name in Sampling.__struct_fields__ if name in Body.__struct_fields__
)  # by one name here and in the engine


def sampling_of(
    body: Body, max_tokens: int, logprobs: int | None, guide: Guide | None = None, bad: Sequences = ()
) -> Sampling:
    """Return how the engine is to choose tokens. It checks what is asked for.

    Args:
        guide: What the text must follow.
        bad: Tokens of the words that it does not have.
    """
    told = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if told.get("top_k") == -1:
        told["top_k"] = 0
    if body.logit_bias:
        told["logit_bias"] = _bias(body.logit_bias)
    if body.allowed_token_ids:
        told["allowed_tokens"] = tuple(dict.fromkeys(body.allowed_token_ids))
    if body.stop_token_ids:
        told["stop_tokens"] = tuple(dict.fromkeys(body.stop_token_ids))
    if body.logprob_token_ids:
        told["logprob_tokens"] = tuple(dict.fromkeys(body.logprob_token_ids))
    told.setdefault("seed", secrets.randbits(63))
    guided = {} if guide is None else {guide.kind: guide.text}
    return Sampling(**{**told, **guided, "bad_sequences": bad, "max_tokens": max_tokens, "logprobs": logprobs})


def _bias(given: dict[str, float]) -> dict[int, float]:
    if others := [name[:50] for name in given if not re.fullmatch(r"\d{1,9}", name)]:
        told = ", ".join(map(repr, others[:TOLD]))
        raise wrong(f"logit_bias: its keys are tokens by number, not {told}", "logit_bias")
    return {int(name): value for name, value in given.items()}
