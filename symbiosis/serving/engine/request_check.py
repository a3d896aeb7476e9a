"""Refuses requests that cannot be served before they are queued, and says why."""

from bisect import bisect_right

import msgspec

from symbiosis.serving.engine.limits import Unfit, check_chosen, check_number, check_sampling, check_tokens
from symbiosis.serving.request import Request
from symbiosis.serving.runner.model_runner import ModelRunner


def most_tokens(served: ModelRunner, piece: int | None, adapter_pages: int = 0) -> int:
    """Return how many tokens a prompt and its answer may have together, beside an adapter of so many pages."""
    pages = served.arena.pool.total - adapter_pages
    counts = range(served.longest + 1)
    return bisect_right(counts, pages, key=lambda count: served.blocks.needed_at_once(count, piece)) - 1


def fitted(request: Request, virtual: int, adapter_pages: int, served: ModelRunner, piece: int | None) -> Request:
    """Return the request with as many tokens as fit, if it may be shorter than it says. The arguments are those of `check`."""
    if not request.may_be_shorter:
        return request
    left = most_tokens(served, piece, adapter_pages) - virtual - len(request.prompt)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max(1, min(request.sampling.max_tokens, left)))
    return msgspec.structs.replace(request, sampling=sampling)


def check(request: Request, virtual: int, adapter_pages: int, served: ModelRunner, piece: int | None) -> None:
    """Raise `ConfigError` if this server cannot do what is asked.

    Args:
        virtual: How many tokens the adapter puts in front.
        adapter_pages: How many pages of the pool the adapter needs.
        piece: Tokens of a prompt that are computed at a time; None if all are.
    """
    check_sampling(request.sampling, served.vocabulary)
    check_number("completions", request.completions)
    if not virtual + len(request.prompt):
        raise Unfit("prompt", "is empty: give at least one token")
    check_tokens("prompt", request.prompt, served.vocabulary)
    check_chosen(request, served.vocabulary)
    sampling, whole = request.sampling, virtual + len(request.prompt) + request.sampling.max_tokens
    if sampling.max_tokens < 1 and not request.prompt_logprobs:
        raise Unfit("max_tokens", "must be at least 1, not 0")
    if whole > served.longest:
        raise Unfit(
            "prompt",
            f"of {virtual + len(request.prompt)} tokens and max_tokens={sampling.max_tokens} are {whole} together, and the model "
            f"takes {served.longest}: shorten the prompt, or ask for fewer tokens",
        )
    pages = served.blocks.needed_at_once(whole, piece) + adapter_pages
    if pages > served.arena.pool.total:
        raise Unfit(
            "prompt",
            f"and its answer, {whole} tokens, take {pages} pages of the server's memory, which has {served.arena.pool.total}: ask for fewer "
            "tokens, or give the server more memory",
        )
