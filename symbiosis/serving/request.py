"""Requests and answers of the server, as plain data that crosses processes."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

import msgspec

MANY = 2**31
MOST_TOPS = 20  # of other tokens, whose log probabilities are told beside that of one


class Limit(NamedTuple):
    """From the least number to the most; `above`: the least itself is too little."""

    least: float
    most: float
    above: bool = False


class Count(NamedTuple):
    """How many there may be."""

    most: int


class Guide(NamedTuple):
    """What a text must follow."""

    kind: str  # a field of `Sampling`
    text: str


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence token, a stop string, or the end of what a grammar allows
    LENGTH = "length"
    ABORTED = "aborted"  # it could no longer meet its deadline
    CANCELLED = "cancelled"
    ERROR = "error"
    UNFIT = "unfit"  # its own schema or grammar cannot be followed


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a completion are chosen. An engine refuses what is beyond a field's limit (`serving/engine/limits.py`).

    >>> Sampling(temperature=0.0).max_tokens
    16
    """

    max_tokens: Annotated[int, Limit(0, MANY)] = 16
    min_tokens: Annotated[int, Limit(0, MANY)] = 0
    temperature: Annotated[float, Limit(0, 100)] = 1.0
    top_p: Annotated[float, Limit(0, 1, above=True)] = 1.0
    top_k: Annotated[int, Limit(0, MANY)] = 0
    min_p: Annotated[float, Limit(0, 1)] = 0.0
    seed: Annotated[int | None, Limit(-(2**63), 2**63 - 1)] = None
    stop_tokens: Annotated[tuple[int, ...], Count(128)] = ()  # besides the model's own ends
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Limit(0, MOST_TOPS)] = None  # of so many other tokens, too
    logprob_tokens: Annotated[tuple[int, ...], Count(128)] = ()  # with logprobs: of these, instead of the most likely
    scaled_logprobs: bool = (
        False  # of the scores over the temperature, as they are drawn by, instead of the model's own
    )
    logit_bias: Annotated[dict[int, float], Count(1024)] = {}
    presence_penalty: Annotated[float, Limit(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Limit(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Limit(0.01, 100)] = 1.0
    allowed_tokens: Annotated[tuple[int, ...], Count(1024)] = ()  # no others come; none: all may
    bad_sequences: Annotated[tuple[tuple[int, ...], ...], Count(256)] = ()  # of tokens, which the text does not have
    # what the text must follow: one of them
    schema: str | None = None  # JSON schema
    regex: str | None = None
    grammar: str | None = None  # Lark, or GBNF

    @property
    def guide(self) -> "Guide | None":
        """What the text must follow.

        >>> Sampling(regex="a+").guide
        Guide(kind='regex', text='a+')
        """
        for kind in ("schema", "regex", "grammar"):
            if (text := getattr(self, kind)) is not None:
                return Guide(kind, text)
        return None

    def ending(self, ends: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end a completion of a model which has these `ends`.

        >>> sorted(Sampling(stop_tokens=(7,)).ending([2])), sorted(Sampling(stop_tokens=(7,), ignore_eos=True).ending([2]))
        ([2, 7], [7])
        """
        return frozenset([*self.stop_tokens, *(() if self.ignore_eos else ends)])


PoolingKind = Literal["last", "mean", "head"]


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """One vector of a prompt, instead of a completion.

    Args:
        kind: "last": the last hidden state of its last token. "mean": the mean of those of all its tokens. "head": what the adapter's
            classification head makes of the last one.
        activates: Whether the vector is made of length 1; or, by a head, the probabilities of its classes: by a sigmoid of one, else by a softmax.
    """

    kind: PoolingKind = "last"
    activates: bool = True


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for completions of one prompt, or for a vector of it. `adapter` is a name; None is the base."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    adapter: str | None = None
    tenant: str = ""
    completions: int = 1
    prompt_logprobs: int | None = None  # also of the prompt's tokens, and so many others at each place
    pooling: Pooling | None = None  # no token is chosen then
    prediction: tuple[int, ...] = ()  # how the answer may read: drafts by n-grams come from it, too
    priority: int = 0  # among the waiting requests of its tenant: lower ones first
    may_be_shorter: bool = False  # where fewer than `max_tokens` fit, it has those
    chosen: tuple[tuple[int, ...], ...] = ()  # of each completion: the tokens that another server has chosen already
    ended: tuple[int, ...] = ()  # completions that have ended there
    external_id: str = ""  # by which whoever sent it knows it: logs name it

    @property
    def under_way(self) -> list[int]:
        """The completions that are to be computed, by number.

        >>> Request(id=1, prompt=(0,), completions=3, ended=(1,)).under_way
        [0, 2]
        """
        ended = frozenset(self.ended)
        return [number for number in range(self.completions) if number not in ended]

    def chosen_of(self, completion: int) -> tuple[int, ...]:
        return self.chosen[completion] if self.chosen else ()


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token that was chosen, with its log probability and those of the most likely tokens if they were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # of a prompt's token, among all: 1 is the most likely; 0: not told


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step added to one completion of a request."""

    request: int
    completion: int = 0
    tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
    error: str | None = None  # with Finish.ERROR and UNFIT: what to do about it
    prompt_tokens: int = 0  # with the first output of a request
    cached_tokens: int = 0  # of the prompt, those whose keys and values were there already
    prompt_logprobs: tuple[Token, ...] = ()
    vector: bytes = b""  # that pooling makes, float32
    model_version: int = 0  # of the adapter by which it is computed; 0: the base
    begun: float = 0.0  # with the first output: when it joined the batch, by this host's monotonic clock
