"""OpenAI's fields that this server does not act on: which of them are taken all the same, and why the others are refused. All others of OpenAI's
are honoured, and what nobody knows is refused."""

from typing import Any

import msgspec

from symbiosis.server.api_errors import wrong

HARMLESS = {  # taken: no answer depends on them
    "user": "who asks, for logs of a provider",
    "metadata": "labels, for logs of a provider",
    "safety_identifier": "who asks, for logs of a provider",
    "prompt_cache_key": "a hint: what prompts have in common is found without it",
    "prediction": "a guess at the answer, which makes it faster elsewhere",
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
}
LONGEST_DEFAULT = 100  # bytes of a value that means what is done anyway


def check_default(name: str, written: msgspec.Raw) -> None:
    """Raise `ApiError` for a field of DEFAULTS that asks for something else. It may be large: nothing is made of it.

    >>> check_default("store", msgspec.Raw(b"false"))
    >>> check_default("store", msgspec.Raw(b"true"))
    Traceback (most recent call last):
    symbiosis.server.api_errors.ApiError: store is not supported, but for false: nothing is stored here
    """
    if (given := bytes(written)) in (b"", b"null"):
        return
    defaults, reason = DEFAULTS[name]
    if len(given) <= LONGEST_DEFAULT and msgspec.json.decode(given) in defaults:
        return
    but = f", but for {' or '.join(msgspec.json.encode(each).decode() for each in defaults)}" if defaults else ""
    raise wrong(f"{name} is not supported{but}: {reason}", name)
