"""The check of a request before it is queued, by the limits of its fields and by what the server holds. One that cannot be served is told why."""

from bisect import bisect_right
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, get_type_hints

import msgspec

from symbiosis.errors import ConfigError
from symbiosis.serving.request import MANY, MOST_TOPS, Count, Limit, Pooling, Request, Sampling

if TYPE_CHECKING:  # it imports torch, and the process that speaks HTTP does without
    from symbiosis.serving.runner.model_runner import ModelRunner


FIELDS = get_type_hints(Sampling, include_extras=True)
OF_SAMPLING = {name: each for name, hint in FIELDS.items() for each in getattr(hint, "__metadata__", ())}
# by the fields of `Sampling` and `Request`
LIMITS = {name: each for name, each in OF_SAMPLING.items() if isinstance(each, Limit)} | {
    "completions": Limit(1, 128),
    "prompt_logprobs": Limit(0, MOST_TOPS),
    "priority": Limit(-MANY, MANY - 1),
}
BIAS = Limit(-100, 100)
COUNTS = {name: each.most for name, each in OF_SAMPLING.items() if isinstance(each, Count)} | {
    "stop": 16,
    "messages": 16_384,  # and their parts
    "tools": 128,
    "bad_words": 128,
    "metadata": 16,
}
LENGTHS = {  # how many characters one may have
    "stop": 1024,
    "schema": 64 << 10,
    "regex": 64 << 10,
    "grammar": 64 << 10,
    "bad_words": 256,
    "id": 256,  # of an answer that goes on
}


class Unfit(ConfigError):
    """Something in a request is not what it may be: `param`, a field of `Sampling` or `Request`, with which the message begins."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param, self.problem = param, problem


def check_number(name: str, value: float | None, limit: Limit | None = None) -> None:
    """Raise `Unfit` for a number beyond its limit, by default that of LIMITS.

    >>> check_number("top_p", 0.0)
    Traceback (most recent call last):
    symbiosis.serving.engine.limits.Unfit: top_p must be above 0 and at most 1, not 0.0
    >>> check_number("max_tokens", -1)
    Traceback (most recent call last):
    symbiosis.serving.engine.limits.Unfit: max_tokens must be from 0 to 2147483648, not -1
    """
    least, most, above = limit or LIMITS[name]
    if value is None or (least <= value <= most and not (above and value == least)):
        return
    bounds = f"above {least} and at most {most}" if above else f"from {least} to {most}"
    raise Unfit(name, f"must be {bounds}, not {value}")


def check_types(sampling: Sampling) -> None:
    """Raise `Unfit` for a field that is of another type."""
    try:
        msgspec.convert(msgspec.to_builtins(sampling), Sampling)
    except (msgspec.ValidationError, TypeError) as error:
        raise Unfit("sampling", f"has a wrong type: {error}") from None


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise `Unfit` for what no engine does."""
    for name, limit in OF_SAMPLING.items():
        held = getattr(sampling, name)
        if isinstance(limit, Count) and isinstance(held, Sized) and held:
            check_count(name, len(held))
    check_types(sampling)
    for name, limit in OF_SAMPLING.items():
        if isinstance(limit, Limit):
            check_number(name, getattr(sampling, name), limit)
    if sampling.min_tokens > sampling.max_tokens:
        raise Unfit("min_tokens", f"are {sampling.min_tokens}, and max_tokens {sampling.max_tokens}")
    check_tokens("stop_tokens", sampling.stop_tokens, vocabulary)
    check_tokens("allowed_tokens", sampling.allowed_tokens, vocabulary)
    check_tokens("logprob_tokens", sampling.logprob_tokens, vocabulary)
    if sampling.logprob_tokens and sampling.logprobs is None:
        raise Unfit("logprob_tokens", "go with logprobs: ask for both")
    for sequence in sampling.bad_sequences:
        check_tokens("bad_sequences", sequence, vocabulary)
    check_tokens("logit_bias", tuple(sampling.logit_bias), vocabulary)
    for value in sampling.logit_bias.values():
        check_number("logit_bias", value, BIAS)
    if (guide := sampling.guide) is not None:
        check_length(guide.kind, len(guide.text))
        if others := [
            kind for kind in ("regex", "grammar") if kind != guide.kind and getattr(sampling, kind) is not None
        ]:
            raise Unfit(others[0], f"goes with no {guide.kind}: a text follows one of them")


def check_count(name: str, count: int) -> None:
    """Raise `Unfit` for more than COUNTS allows."""
    if count > COUNTS[name]:
        raise Unfit(name, f"may have {COUNTS[name]}, and has {count}")


def check_length(name: str, length: int) -> None:
    """Raise `Unfit` for a text that is longer than LENGTHS allows.

    >>> check_length("stop", 2000)
    Traceback (most recent call last):
    symbiosis.serving.engine.limits.Unfit: stop may have 1024 characters, and has 2000
    """
    if length > LENGTHS[name]:
        raise Unfit(name, f"may have {LENGTHS[name]} characters, and has {length}")


def check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise `Unfit` for what is no token of the model."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise Unfit(
                name,
                f"has the token {token!r:.50}, out of vocabulary: the model's are numbered from 0 to {vocabulary - 1}",
            )


def check_chosen(request: Request, vocabulary: int) -> None:
    """Raise `Unfit` if the request cannot go on where another server is said to have left it."""
    if request.chosen and len(request.chosen) != request.completions:
        raise Unfit("chosen", f"has tokens of {len(request.chosen)} completions, and there are {request.completions}")
    if not request.under_way:
        raise Unfit("ended", "names all completions: there is nothing to go on with")
    for number in request.under_way:
        if (have := len(request.chosen_of(number))) and have >= request.sampling.max_tokens:
            raise Unfit("chosen", f"has {have} tokens of a completion, and max_tokens={request.sampling.max_tokens}")
    for number in request.under_way:
        check_tokens("chosen", request.chosen_of(number), vocabulary)


def check_pooling(pooling: Pooling | None, has_head: bool, why_not: str) -> None:
    """Raise `ConfigError` for a vector, or a text, that the model with this adapter does not make.

    Args:
        has_head: Whether the adapter classifies.
        why_not: Why the model makes no vectors, if so.
    """
    if pooling is None and has_head:
        raise Unfit(
            "model", "is an adapter that classifies texts, and writes none: ask POST /classify, or Engine.classify"
        )
    if pooling is None:
        return
    if why_not:
        raise Unfit("model", f"makes none: {why_not}")
    if pooling.kind == "head" and not has_head:
        raise Unfit("model", "has no classification head: name an adapter that PEFT has trained with task_type SEQ_CLS")


def most_tokens(served: "ModelRunner", piece: int | None, adapter_pages: int = 0) -> int:
    """Return how many tokens a prompt and its answer may have together, beside an adapter of so many pages."""
    pages = served.arena.pool.total - adapter_pages
    counts = range(served.longest + 1)
    return bisect_right(counts, pages, key=lambda count: served.blocks.needed(count, piece)) - 1


def fitted(request: Request, virtual: int, adapter_pages: int, served: "ModelRunner", piece: int | None) -> Request:
    """Return a request that may be shorter than it says with as many tokens as fit. The arguments are those of `check`."""
    left = most_tokens(served, piece, adapter_pages) - virtual - len(request.prompt)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max(1, min(request.sampling.max_tokens, left)))
    return msgspec.structs.replace(request, sampling=sampling)


def check(request: Request, virtual: int, adapter_pages: int, served: "ModelRunner", piece: int | None) -> None:
    """Raise `ConfigError` if this server cannot do what is asked.

    Args:
        virtual: How many tokens the adapter puts in front.
        adapter_pages: How many pages of the pool the adapter needs.
        piece: Tokens of a prompt that are computed at a time; None if all are.
    """
    check_sampling(request.sampling, served.vocabulary)
    for name in ("completions", "prompt_logprobs", "priority"):
        check_number(name, getattr(request, name))
    if not virtual + len(request.prompt):
        raise Unfit("prompt", "is empty: give at least one token")
    check_tokens("prompt", request.prompt, served.vocabulary)
    check_tokens("prediction", request.prediction, served.vocabulary)
    if request.chosen or request.ended:
        check_chosen(request, served.vocabulary)
    sampling, whole = request.sampling, virtual + len(request.prompt) + request.sampling.max_tokens
    if request.pooling is not None and (
        sampling.max_tokens or request.completions > 1 or request.prompt_logprobs is not None
    ):
        raise Unfit(
            "pooling", "is of the prompt alone: it goes with max_tokens=0, one completion, and no prompt_logprobs"
        )
    if sampling.max_tokens < 1 and request.prompt_logprobs is None and request.pooling is None:
        raise Unfit("max_tokens", "must be at least 1, not 0")
    if whole > served.longest:
        raise Unfit(
            "prompt",
            f"of {virtual + len(request.prompt)} tokens and max_tokens={sampling.max_tokens} are {whole} together, and the model "
            f"takes {served.longest}: shorten the prompt, or ask for fewer tokens",
        )
    pages = served.blocks.needed(whole, piece) + adapter_pages
    if pages > served.arena.pool.total:
        raise Unfit(
            "prompt",
            f"and its answer, {whole} tokens, take {pages} pages of the server's memory, which has {served.arena.pool.total}: ask for fewer "
            "tokens, or give the server more memory",
        )
