"""What a request may ask for: one table, by which HTTP and the programs that use an engine are refused alike."""

from collections.abc import Sequence, Sized
from typing import NamedTuple

import msgspec

from symbiosis.errors import ConfigError
from symbiosis.serving.request import Request, Sampling


class Limit(NamedTuple):
    """From the least number to the most; `above`: the least itself is too little."""

    least: float
    most: float
    above: bool = False


MANY = 2**31
LIMITS = {  # by the fields of `Sampling` and `Request`
    "max_tokens": Limit(0, MANY),
    "min_tokens": Limit(0, MANY),
    "temperature": Limit(0, 100),
    "top_p": Limit(0, 1, above=True),
    "top_k": Limit(0, MANY),
    "min_p": Limit(0, 1),
    "repetition_penalty": Limit(0.01, 100),
    "presence_penalty": Limit(-2, 2),
    "frequency_penalty": Limit(-2, 2),
    "seed": Limit(-(2**63), 2**63 - 1),
    "logprobs": Limit(0, 20),
    "completions": Limit(1, 128),
}
BIAS = Limit(-100, 100)
COUNTS = {  # how many there may be
    "stop": 16,
    "stop_tokens": 128,
    "logit_bias": 1024,
    "messages": 16_384,  # and their parts
    "metadata": 16,
}
LENGTHS = {  # how many characters one may have
    "stop": 1024,
    "schema": 64 << 10,
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
    for name in ("stop_tokens", "logit_bias"):
        if isinstance(held := getattr(sampling, name), Sized):
            check_count(name, len(held))
    check_types(sampling)
    for name in Sampling.__struct_fields__:
        if name in LIMITS:
            check_number(name, getattr(sampling, name))
    if sampling.min_tokens > sampling.max_tokens:
        raise Unfit("min_tokens", f"are {sampling.min_tokens}, and max_tokens {sampling.max_tokens}")
    check_tokens("stop_tokens", sampling.stop_tokens, vocabulary)
    check_tokens("logit_bias", tuple(sampling.logit_bias), vocabulary)
    for value in sampling.logit_bias.values():
        check_number("logit_bias", value, BIAS)
    check_length("schema", len(sampling.schema or ""))


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
            raise Unfit(name, f"has the token {token!r:.50}, and the model's are numbered from 0 to {vocabulary - 1}")


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
