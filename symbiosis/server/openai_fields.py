"""OpenAI's fields that this server does not act on: which of them are taken all the same, and why the others are refused. All others of OpenAI's
are honoured, and what nobody knows is refused."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from symbiosis.server.api_errors import wrong

# the default of what is kept as it is written: `Raw()` itself has no JSON schema
RAW: Any = msgspec.field(default_factory=msgspec.Raw)
Label = Annotated[
    str, msgspec.Meta(max_length=512)
]  # what says who asks, or what for: answers and stored responses repeat it
Metadata = dict[Annotated[str, msgspec.Meta(max_length=64)], Label]
HARMLESS = {  # taken: no answer depends on them
    "user": "who asks, for logs of a provider",
    "metadata": "labels, for logs of a provider",
    "safety_identifier": "who asks, for logs of a provider",
    "prompt_cache_key": "a hint: what prompts have in common is found without it",
    "prediction": "a guess at the answer, which makes it faster: with --speculate ngram:N drafts come from it, too",
}
OF_TEMPLATE = ("reasoning_effort", "verbosity")  # honoured if the chat template reads them, else refused
DEFAULTS: dict[str, tuple[tuple[Any, ...], str]] = {  # refused, but for values that mean what is done anyway
    "store": ((False,), "nothing is stored here"),
    "service_tier": (("auto", "default"), "all requests are served alike"),
    "prompt_cache_options": (({}, {"mode": "implicit"}), "the server finds by itself what prompts have in common"),
    "prompt_cache_retention": (("in_memory",), "what was computed of prompts is kept while there is memory"),
    "suffix": (("",), "the model completes at the end only"),
    "functions": (([],), "tools are its new name"),
    "function_call": (("none",), "tool_choice is its new name"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "moderation": ((), "nothing is moderated here"),
    "web_search_options": ((), "the model searches nothing"),
    "include_obfuscation": ((False,), "events are not obfuscated"),
    "use_beam_search": (
        (False,),
        "texts are drawn token by token: ask for n of them with logprobs, and choose yourself",
    ),
    "length_penalty": ((1.0,), "it is for beam search, which there is not"),
}
OF_RESPONSES: dict[str, tuple[tuple[Any, ...], str]] = {  # of /v1/responses, besides; in the same way
    "background": ((False,), "an answer comes to who has asked for it"),
    "context_management": (([],), "what does not fit is refused"),
    "conversation": ((), "previous_response_id goes on from a response"),
    "image": ((), "this server reads no images"),
    "include": (([],), "there is nothing more to tell; chats tell log probabilities"),
    "max_tool_calls": ((), "the server runs no tools"),
    "prompt": ((), "there are no stored prompts: send its text"),
    "reasoning": (
        ({}, {"effort": None}, {"effort": None, "summary": None}),
        "models think as their template says: chat_template_kwargs of a chat",
    ),
    "stream_options": (({}, {"include_obfuscation": False}), "events are not obfuscated, and usage comes at the end"),
    "top_logprobs": ((0,), "chats tell log probabilities"),
    "truncation": (("disabled",), "what does not fit is refused"),
    "access_programs": ((), "there are none"),
    "background_options": ((), "nothing runs in the background"),
}
LONGEST_DEFAULT = 100  # bytes of a value that means what is done anyway


def check_default(
    name: str, written: msgspec.Raw, fields: Mapping[str, tuple[tuple[Any, ...], str]] = DEFAULTS
) -> None:
    """Raise `ApiError` for a field of DEFAULTS, or of others, that asks for something else. It may be large: nothing is made of it.

    >>> check_default("store", msgspec.Raw(b"false"))
    >>> check_default("store", msgspec.Raw(b"true"))
    Traceback (most recent call last):
    symbiosis.server.api_errors.ApiError: store is not supported, but for false: nothing is stored here
    """
    if (given := bytes(written)) in (b"", b"null"):
        return
    defaults, reason = fields[name]
    if len(given) <= LONGEST_DEFAULT and msgspec.json.decode(given) in defaults:
        return
    but = f", but for {' or '.join(msgspec.json.encode(each).decode() for each in defaults)}" if defaults else ""
    raise wrong(f"{name} is not supported{but}: {reason}", name)
