"""The body of `/generate`, by the names of text-generation-inference and LoRAX, and what it means as a completion."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from symbiosis.server.api_errors import wrong
from symbiosis.server.guides import ANY_OBJECT
from symbiosis.server.openai_fields import RAW, check_default
from symbiosis.server.openai_protocol import AS_ASKED, CompletionBody, Tokens, Whole, check
from symbiosis.serving.request import Guide

OF_GENERATE: dict[str, tuple[tuple[Any, ...], str]] = {  # refused, but for values that mean what is done anyway
    "adapter_source": (("local",), "adapters are those that GET /v1/models lists"),
    "merged_adapters": ((), "merge them with PEFT, and serve the result"),
    "api_token": ((), "adapters are loaded from here"),
    "best_of": ((1,), "ask again with another seed, and choose yourself"),
    "typical_p": ((1, 1.0), "top_p and min_p are there instead"),
    "watermark": ((False,), "texts have no watermarks"),
}
NAMES = {
    "max_tokens": "max_new_tokens",
    "logprobs": "top_n_tokens",
    "ignore_eos": "ignore_eos_token",
    "prompt": "inputs",
}


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """LoRAX's `response_format`."""

    type: Literal["json_object"]
    schema: msgspec.Raw = RAW


class GenerateGrammar(msgspec.Struct, forbid_unknown_fields=True):
    """TGI's `grammar`."""

    type: Literal["json", "regex"]
    value: msgspec.Raw


class Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is asked for of a text."""

    adapter_id: str | None = None
    max_new_tokens: Tokens | None = None  # None: as many as fit
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Whole | None = None
    stop: list[str] | None = None
    ignore_eos_token: bool | None = None
    truncate: Tokens | None = None  # the prompt, to its last tokens
    apply_chat_template: bool | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Whole | None = None  # TGI's name, and LoRAX's
    return_k_alternatives: Whole | None = None
    response_format: SchemaFormat | None = None
    grammar: GenerateGrammar | None = None
    # OF_GENERATE
    adapter_source: msgspec.Raw = RAW
    merged_adapters: msgspec.Raw = RAW
    api_token: msgspec.Raw = RAW
    best_of: msgspec.Raw = RAW
    typical_p: msgspec.Raw = RAW
    watermark: msgspec.Raw = RAW

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn. Else each is the most likely one."""
        warps = self.temperature not in (None, 1.0) or self.top_k or self.top_p not in (None, 1.0)
        return bool((self.do_sample or warps) and self.temperature != 0)

    @property
    def alternatives(self) -> int | None:
        return self.top_n_tokens if self.return_k_alternatives is None else self.return_k_alternatives


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /generate, /generate_stream and /."""

    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    stream: bool | None = None  # only of POST /


class GenerateCompletion(CompletionBody, kw_only=True):
    """What `/generate` asks for, as a completion: errors name its own fields."""

    follows_by: str = ""  # the field that says what the text must follow

    @property
    def follows(self) -> tuple[str, Guide] | None:
        found = super().follows
        return None if found is None else (self.follows_by, found[1])

    @property
    def names(self) -> Mapping[str, str]:
        return AS_ASKED | NAMES


def as_completion(body: GenerateBody, base: str, is_stream: bool) -> GenerateCompletion:
    """Return what `/generate` asks for as a completion of the model `base`. Raises `ApiError` for what is not done here."""
    told = body.parameters
    for name in OF_GENERATE:
        check_default(name, getattr(told, name), OF_GENERATE)
    if is_stream and told.decoder_input_details:
        raise wrong("decoder_input_details go with /generate, and not with a stream", "decoder_input_details")
    shows = is_stream or told.details or told.decoder_input_details or told.alternatives is not None
    made = GenerateCompletion(
        model=told.adapter_id or base, prompt=body.inputs, max_tokens=told.max_new_tokens, seed=told.seed, stop=told.stop,
        temperature=(1.0 if told.temperature is None else told.temperature) if told.samples else 0.0,
        top_k=told.top_k, top_p=told.top_p, repetition_penalty=told.repetition_penalty, frequency_penalty=told.frequency_penalty,
        ignore_eos=told.ignore_eos_token, include_stop_str_in_output=True, stream=is_stream,
        logprobs=(told.alternatives or 0) if shows else None, **_follows(told),
    )  # fmt: skip
    if made.max_tokens == 0:
        raise wrong("max_new_tokens must be at least 1, not 0", "max_new_tokens")
    check(made)
    return made


def _follows(told: Parameters) -> dict[str, Any]:
    """Return what the text must follow, as vLLM's `guided_json` or `guided_regex`."""
    if told.response_format is not None and told.grammar is not None:
        raise wrong("response_format and grammar: a text follows one of them, so give one", "grammar")
    if told.response_format is not None:
        schema = told.response_format.schema or msgspec.Raw(ANY_OBJECT.encode())
        return {"guided_json": schema, "follows_by": "response_format"}
    if told.grammar is None:
        return {}
    if told.grammar.type == "json":
        return {"guided_json": told.grammar.value, "follows_by": "grammar"}
    try:
        return {"guided_regex": msgspec.json.decode(told.grammar.value, type=str), "follows_by": "grammar"}
    except msgspec.MsgspecError:
        raise wrong("grammar: the value of a regex is a text", "grammar") from None
