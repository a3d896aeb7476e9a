"""Sequences under way, and the step that runs rows of several of them as one flat batch."""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Request

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 16  # tokens


@dataclass(slots=True, eq=False)
class Block:
    """The keys and values of 16 tokens, in one page for each layer."""

    pages: tuple[int, ...]
    users: int = 1  # sequences
    key: bytes = b""  # by which it may be found, once it is full
    # layers whose page was given back, since it lies behind their window: 0 stands in its place
    gone: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One completion under way. Its tokens are those of the prompt, behind the adapter's virtual ones, and those that were chosen since."""

    request: Request
    completion: int
    tokens: list[int]
    adapter: Adapter | None  # the version that was there when the request came; kept to the end
    arrived: float
    blocks: list[Block] = field(default_factory=list)
    # by window: how many of the blocks were looked at for pages to give back
    behind: dict[int, int] = field(default_factory=dict)
    computed: int = 0  # of its tokens, those whose keys and values lie in the blocks
    cached: int = 0  # of its prompt, those whose keys and values were there when it began
    began: float = 0.0  # when it joined the batch
    overtaken: int = 0  # by so many later ones, since there was no room for it, or since it gave way
    owed: float = 0.0  # rows of its prompt, since shorter ones were computed before it
    told_at: float = 0.0  # when its last token was chosen
    has_ended: bool = False
    order: tuple[float, int, int] = field(init=False)  # in which sequences have come
    tenant: str = field(init=False)
    priority: int = field(init=False)
    version: int = 0  # of its adapter; 0 is the base
    # tokens that the adapter puts in front of the prompt; what stands for them in `tokens` means nothing
    virtual: int = 0
    prompt_length: int = field(init=False)  # with those
    brought: int = field(init=False)  # tokens that it came with: also those that another server is said to have chosen
    is_guided: bool = field(init=False)  # its text has to follow something
    is_first: bool = field(init=False)  # it computes its prompt for all completions of the request
    scores_prompt: bool = field(init=False)  # ... and the log probabilities of the prompt's tokens
    # ... and something of each of its rows, which nobody has kept of what is found
    reads_prompt: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.tenant, self.priority = request.tenant, request.priority
        self.order = self.arrived, request.id, self.completion
        if self.adapter is not None:
            self.version, self.virtual = self.adapter.version, self.adapter.virtual
        self.prompt_length = self.virtual + len(request.prompt)
        self.brought = self.prompt_length + (len(request.chosen[self.completion]) if request.chosen else 0)
        self.is_first = self.completion == (request.under_way[0] if request.ended else 0)
        self.is_guided = request.sampling.guide is not None
        self.scores_prompt = request.prompt_logprobs is not None and self.is_first
        self.reads_prompt = self.scores_prompt or (request.pooling is not None and request.pooling.kind == "mean")

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def has_begun(self) -> bool:
        """Whether tokens of its request were handed out already, or are about to be."""
        return self.produced > 0 or not self.is_first

    @property
    def may_wait_again(self) -> bool:
        """Whether it loses nothing when it gives up its blocks: nothing was told, and what was computed is found again."""
        return not self.has_begun and not (self.computed and self.reads_prompt)

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True, frozen=True)
class ScheduledRequest:
    """Rows of one sequence in a step: its tokens from `position` on."""

    sequence: Sequence
    first: int  # row of the step
    rows: int
    position: int
    chooses: bool  # whether the last row's logits are wanted, and those of the rows before each draft token
    drafts: tuple[int, ...] = ()  # tokens that may be chosen next, whose rows are the last ones

    @property
    def end(self) -> int:
        return self.position + self.rows

    @property
    def tokens(self) -> list[int]:
        """The tokens of its rows."""
        known = self.sequence.tokens[self.position : self.end - len(self.drafts)]
        return [*known, *self.drafts] if self.drafts else known

    @property
    def choices(self) -> range:
        """The rows of the step whose logits choose tokens."""
        end = self.first + self.rows
        return range(end - 1 - len(self.drafts), end) if self.chooses else range(0)


@dataclass(slots=True, frozen=True)
class Fed:
    """Rows of a step whose tokens only the device knows yet: the step before it has chosen them."""

    rows: list[int]
    sources: list[int]  # which of the chosen each row has
    chosen: "Tensor"  # by the step before; int64, below 0 where there is none


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """What one forward pass computes: segments, one after another."""

    segments: tuple[ScheduledRequest, ...]
    fed: Fed | None = None
    began: float = 0.0

    @property
    def rows(self) -> int:
        last = self.segments[-1]
        return last.first + last.rows

    @property
    def choices(self) -> list[int]:
        """The rows whose logits choose tokens."""
        return [row for segment in self.segments for row in segment.choices]

    @property
    def has_prompts(self) -> bool:
        return any(each.rows > 1 + len(each.drafts) for each in self.segments)

    def without(self, unknown: Container[Sequence]) -> "SchedulerOutput":
        """Return what was computed of the step for good if these sequences choose no token: all but the last row of each."""
        segments, first = list[ScheduledRequest](), 0
        for each in self.segments:
            rows, chooses = (each.rows - 1, False) if each.sequence in unknown else (each.rows, each.chooses)
            if rows:
                segments.append(replace(each, first=first, rows=rows, chooses=chooses))
                first += rows
        return replace(self, segments=tuple(segments))
