"""One operator's view: its log as rows, and beside them the owner's true rows, by which attacks are scored."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from symbiosis.audit.owner import Owner
from symbiosis.audit.public_knowledge import SHORTEST, Key, PublicKnowledge
from symbiosis.audit.recorder import Recorder
from symbiosis.protocol import Op

VALUES = 1 << 20  # on which a cosine is measured, at most
MORE = ("more known", "more first")  # phases in which only what shows the adapter was written down
NOTHING = 1e-3  # of the usual length: a true row that is shorter says nothing


@dataclass(frozen=True)
class SeenCall:
    """A call with rows as the operator sees it. Its first layer stands for all layers that take the same rows."""

    op: Op
    layers: tuple[str, ...]
    rows: Tensor
    phase: str
    seeded: bool
    lost: bool

    @property
    def key(self) -> Key:
        return self.op, self.layers[0]


@dataclass(frozen=True)
class Claim:
    """An attack's result. But for scale and mean, `rows` are the true rows of entry `of` from `start` on, less those of entry `less`
    from `less_start` on."""

    rows: Tensor
    of: int
    start: int = 0
    less: int | None = None
    less_start: int = 0


class OperatorView:
    """One operator's log."""

    def __init__(self, recorder: Recorder) -> None:
        self.operator = recorder.server.options.operator
        self.bytes = recorder.server.dispatch.bytes
        names = [layer.name for layer in recorder.server.store.manifest]
        entries = [
            SeenCall(
                sent.call.op,
                tuple(names[n] for n in sent.call.layers),
                sent.rows,
                sent.phase,
                sent.call.seeded,
                sent.lost,
            )
            for sent in recorder.server.dispatch.log
        ]
        self.at_join = [entry for entry in entries if entry.phase == "join"]
        self.more = [entry for entry in entries if entry.phase in MORE]
        self.entries = [entry for entry in entries if entry.phase not in ("join", *MORE)]
        self.integers = not any(entry.rows.is_floating_point() for entry in self.entries)

    def with_rows(self, known: Callable[[SeenCall], Tensor]) -> "OperatorView":
        """Return this view with `known` in place of the rows, as an operator sees it who knows more about them."""
        other = copy(self)
        other.entries, other.more = (
            [replace(entry, rows=known(entry)) for entry in entries] for entries in (self.entries, self.more)
        )
        return other

    @property
    def shares(self) -> list[int]:
        """Return the numbers of the entries with rows rather than a seed; of all, if there are only seeds."""
        answered = [n for n, entry in enumerate(self.entries) if not entry.lost]
        return [n for n in answered if not self.entries[n].seeded] or answered

    def rows(self, op: Op, layer: str, *phases: str) -> list[Tensor]:
        """Return the rows of each call of this layer in these phases."""
        answered = [entry for entry in (*self.entries, *self.more) if not entry.lost]
        entries = [entry for entry in answered if not entry.seeded] or answered
        return [e.rows for e in entries if e.op is op and layer in e.layers and e.phase in phases]

    def floats(self, op: Op, layer: str, *phases: str, public: PublicKnowledge) -> Iterator[Tensor]:
        """Return the rows of each call of this layer in these phases, as floats. Integers are scaled to the usual size of the layer's
        rows."""
        for rows in self.rows(op, layer, *phases):
            rows = rows.double()
            yield rows * (public.size((op, layer)) / rows.square().mean().sqrt()) if self.integers else rows

    def truth(self, owner: Owner, public: PublicKnowledge) -> list[Tensor]:
        """Return the owner's rows for each entry, as the level took them."""
        passed: Counter[tuple[Op, str, bool]] = Counter()
        found = []
        for entry in self.entries:
            number = passed[*entry.key, entry.seeded]
            found.append(public.taken(entry.key, owner.truth.rows[entry.key][number], self.integers))
            if not entry.lost:
                passed.update((entry.op, layer, entry.seeded) for layer in entry.layers)
        return found

    def cosine(self, claims: Sequence[Claim], truth: Sequence[Tensor], public: PublicKnowledge) -> float:
        """Return the mean cosine of claimed and true rows, both without the public mean. (The scale of integers is not known, so claims
        lose their own mean.)"""
        cosines = []
        for (key, less), together in _alike(self.entries, _some(claims)).items():
            claimed = torch.cat([claim.rows.double() for claim in together])
            true = torch.cat([_true(claim, truth) for claim in together])
            mean = public.mean(key, self.integers)
            mean = mean if less is None else mean - public.mean(less, self.integers)
            claimed, true = claimed - (claimed.mean(0) if self.integers else mean), true - mean
            length = torch.linalg.vector_norm(true, dim=1)
            cosine = F.cosine_similarity(claimed, true, dim=1, eps=SHORTEST)
            cosines.append(cosine[length > NOTHING * length.max()])
        return min(1.0, torch.cat(cosines).mean().item())  # rounding can exceed it


def _alike(entries: list[SeenCall], claims: Iterable[Claim]) -> dict[tuple[Key, Key | None], list[Claim]]:
    """Group claims about the same layers, whose rows have the same mean."""
    groups: dict[tuple[Key, Key | None], list[Claim]] = {}
    for claim in claims:
        less = None if claim.less is None else entries[claim.less].key
        groups.setdefault((entries[claim.of].key, less), []).append(claim)
    return groups


def _some(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims from all over the log, as many as have `VALUES` values."""
    left, chosen = VALUES, []
    for n in torch.randperm(len(claims), generator=torch.Generator().manual_seed(0)).tolist():
        chosen.append(claims[n])
        left -= claims[n].rows.numel()
        if left <= 0:
            break
    return chosen


def _true(claim: Claim, truth: Sequence[Tensor]) -> Tensor:
    rows = truth[claim.of][claim.start :][: len(claim.rows)]
    return rows if claim.less is None else rows - truth[claim.less][claim.less_start :][: len(claim.rows)]
