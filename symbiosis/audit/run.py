"""`symbiosis audit`: the owner works at one level, its operators attack, and a table says what they learned."""

import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import symbiosis
from symbiosis.audit import adapter_attacks, attacks, broken_masks
from symbiosis.audit.operator_view import Claim, OperatorView
from symbiosis.audit.owner import BYTES, FULL, QUICK, TRAIN_BATCH, Owner, Size, Work, own
from symbiosis.audit.public_knowledge import PublicKnowledge
from symbiosis.audit.recorder import Recorder
from symbiosis.audit.unmasked import Unmasked, unequal_values
from symbiosis.base.folders import temporary_folder
from symbiosis.base.procs import exit_at
from symbiosis.base.reporting import Report, print_table
from symbiosis.cli.pad_files import make
from symbiosis.client.privacy.masked_session import Privacy, checked_bits

Level = Literal["none", "noise", "split", "pads"]
SUCCESS = 0.95  # of what an attack can reach
ANY = -1.0, 1.0  # of a cosine
COSINE, POINT = 0.02, 0.01
MOST_COPIED = 0.05  # of the adapter's effect
CHI_SQUARE = (150.0, 380.0)  # of 256 equally likely values: 255, with a standard deviation of 22.6
ENOUGH = 100  # times each value must be expected, or nothing is said
NO_LABEL = -1

Scores = dict[str, float | None]
TOKENS, COPY = "tokens, from activations", "adapter, copied by distillation"
HEAD, LABELS = "labels, from the head's gradients", "labels, from the last layer's gradients"
ROWS: dict[str, Callable[[OperatorView], list[Claim]]] = {
    "rows, noise matched": attacks.rows_themselves,
    "rows, from both halves of a call": attacks.both_halves,
    "rows, averaged over repeats": attacks.averaged_over_repeats,
    "rows, averaged over retries": attacks.averaged_over_retries,
    "difference of two rows of a call": attacks.neighbours,
    "difference of two requests": attacks.two_requests,
    "difference of two layers": attacks.two_layers,
}
SUBSPACE = "rows, outside the log's subspace"
BROKEN: dict[str, Callable[[OperatorView], OperatorView]] = {
    "rows, noise matched": broken_masks.known_noise,
    "rows, from both halves of a call": broken_masks.both_at_one,
    "rows, averaged over repeats": broken_masks.too_small,
    "rows, averaged over retries": broken_masks.too_small,
    "difference of two rows of a call": broken_masks.one_for_all,
    "difference of two requests": broken_masks.one_for_all,
    "difference of two layers": broken_masks.one_for_all,
    SUBSPACE: broken_masks.few,
}  # masks on which an attack on masks must succeed: where there are none, it has nothing to do


class Setup(NamedTuple):
    """Executors that record, and how the owner's rows reach them."""

    endpoint: str
    privacy: Privacy | None
    recorders: list[Recorder]


@dataclass(frozen=True)
class Row:
    """One attack: what it reached without protection, on broken masks (`control`) and with protection, and the bounds for the last."""

    attack: str
    operator: str
    plain: float | None
    value: float | None  # None: nothing was sent that could be attacked so
    least: float
    most: float
    control: float | None = None

    @property
    def verdict(self) -> str:
        if any(score is not None and score < SUCCESS for score in (self.plain, self.control)):
            return "VOID"  # an attack that cannot succeed shows nothing
        if (self.least, self.most) == ANY and self.value is not None and self.value < SUCCESS:
            return "failed (allowed)"
        return "yes" if self.value is None or self.least <= self.value <= self.most else "NO"

    @property
    def limits(self) -> str:
        """The bounds, in words."""
        if self.value is None:
            return "not sent"
        if (self.least, self.most) == ANY:
            return "any"
        if self.least == -self.most:
            return f"+-{self.most:g}" if self.most else "0"
        if self.least <= 0.0:
            return f"<= {self.most:.3f}"
        return f">= {self.least:g}" if self.most == 1.0 else f"{self.least:g} - {self.most:g}"


def run(level: Level, quick: bool, bits: int = 8, tcp: bool = False, tokens: int | None = None) -> int:
    """Run the whole audit. Return 0 if every row holds. Weights are quantised to `bits`; `tokens` more are sent for the equations of the
    adapter."""
    exit_at(signal.SIGTERM)  # the folder of pads may have gigabytes
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers
    checked_bits(bits)
    if (
        "OMP_NUM_THREADS" not in os.environ
    ):  # the owner and executors are threads of one process, and each has threads of its own
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    size = QUICK if quick else FULL
    if tokens is not None or level == "pads":  # whose file would be gigabytes
        size = replace(size, tokens=tokens or 0)
    public = PublicKnowledge(bits)
    work = Work.of(public.tokenizer, size)
    rows = audit(level, size, work, public, tcp)
    show(level, rows)
    return report(level, rows).finish(table=False)


def audit(level: Level, size: Size, work: Work, public: PublicKnowledge, tcp: bool = False) -> list[Row]:
    with temporary_folder("symbiosis-audit-") as folder:
        say("the owner works without protection, and everything is attacked: this shows what attacks can do")
        with setup("none", size, work, folder, public.bits, tcp) as plain:
            scores, controls = unprotected(plain, size, work, public)
        if level == "none":
            return [
                Row(attack, "", score, score, SUCCESS, 1.0, controls.get(attack)) for attack, score in scores.items()
            ]
        say(f"the owner works again, at level {level}")
        with setup(level, size, work, folder, public.bits, tcp) as protected:
            owner = own(*protected, work, size)
            rows = judged(level, protected, owner, scores, size, work, public)
            return [replace(row, control=controls.get(row.attack)) for row in rows]


def say(stage: str) -> None:
    """Say on stderr what the next minute or so is for. Only the table goes to stdout."""
    print(f"audit: {stage} ...", file=sys.stderr, flush=True)


@contextmanager
def setup(level: Level, size: Size, work: Work, folder: Path, bits: int = 8, tcp: bool = False) -> Iterator[Setup]:
    """Start the executors of one level, and prepare the owner's side of it."""
    privacy: Privacy | None = None

    def record(operator: str, **options: Any) -> Recorder:
        return Recorder("demo", operator=operator, **options, listen=["tcp://127.0.0.1:0"] if tcp else [])

    if level == "none":
        recorders = [record("one", serve=["*"])]
    elif level == "noise":
        recorders = [record("one")]
        privacy = symbiosis.Noise(effects="same", allow_known_noise=True)
    elif level == "split":
        recorders = [record(name, integers=[bits]) for name in ("one", "two")]
        privacy = symbiosis.Split(recorders[1].endpoint, bits)
    else:
        make("demo", rows_needed(size, work), folder / "pads", bits, training=True)
        recorders, privacy = [record("one", integers=[bits])], symbiosis.Pads(folder / "pads")
    try:
        yield Setup(recorders[0].endpoint, privacy, recorders)
    finally:
        for recorder in recorders:
            recorder.close()


def rows_needed(size: Size, work: Work) -> int:
    """Return how many rows each layer is given, with those that are lost because pads are taken from the disk by the dozen."""
    asked = work.training.numel() + work.known.numel() + size.repeats * work.prompt.numel() + work.held_out.numel()
    return asked + 2 * size.tokens + size.first * BYTES + 3 * TRAIN_BATCH * work.known.shape[1] + 1024


def judged(
    level: Level, protected: Setup, owner: Owner, plain: Scores, size: Size, work: Work, public: PublicKnowledge
) -> list[Row]:
    """Run every operator's attacks. For integers, also check that they are uniform, and that results are exact."""
    rows: list[Row] = []
    for recorder in protected.recorders:
        view = OperatorView(recorder)
        say(f"operator {view.operator} attacks")
        scores = attacked(view, owner, size, work, public)
        limits = limits_of_noise(scores) if level == "noise" else limits_for(scores, owner)
        rows += [Row(attack, view.operator, plain[attack], scores[attack], *limits[attack]) for attack in plain]
        if view.integers:
            rows += uniformity(view)
    if level != "noise":
        for recorder in protected.recorders:
            recorder.server.dispatch.log.clear()
        say("results are compared with those of the same work without masks")
        reference = own(protected.endpoint, Unmasked(public.bits), [], work, size)
        rows.append(Row("values that masks have changed", "", None, unequal_values(owner, reference), 0, 0))
    return rows


def unprotected(plain: Setup, size: Size, work: Work, public: PublicKnowledge) -> tuple[Scores, Scores]:
    """Return what all attacks reach without masks, and what attacks on masks reach if these are broken."""
    owner = own(*plain, work, size)
    view = OperatorView(plain.recorders[0])
    plain.recorders[0].server.dispatch.log.clear()  # the view has it: there may be gigabytes
    return attacked(view, owner, size, work, public), {name: control(name, view, owner, public) for name in BROKEN}


def control(name: str, plain: OperatorView, owner: Owner, public: PublicKnowledge) -> float:
    """Return what an attack on masks reaches if these are broken."""
    torch.manual_seed(0)
    view = BROKEN[name](plain)
    if name == SUBSPACE:
        claims = attacks.outside_the_subspace(view, public)
    else:
        claims = ROWS[name](attacks.without_noise(view, public))
    return view.cosine(claims, view.truth(owner, public), public)


def attacked(view: OperatorView, owner: Owner, size: Size, work: Work, public: PublicKnowledge) -> Scores:
    """Run all attacks of one operator, and score them against the truth."""
    seen = attacks.without_noise(view, public)
    scores: Scores = {
        TOKENS: share_of(attacks.tokens(seen, public), true_tokens(owner)),
        HEAD: share_of(attacks.labels_from_head(seen, public), true_labels(owner)),
        LABELS: share_of(attacks.labels_from_gradients(seen, public), true_labels(owner)),
    }
    scores |= cosines(view, seen, owner, public)
    for layer, attack in adapter_attacks.MATRICES.items():
        scores[f"adapter, {layer.rpartition('.')[2]}"] = adapter_attacks.cosine(
            layer, attack(seen, public), owner, public
        )
    student = adapter_attacks.distilled(seen, public, owner.tokens["known"], size.distil_steps)
    scores[COPY] = adapter_attacks.stolen(student, work.held_out, owner, public)
    return scores


def cosines(view: OperatorView, seen: OperatorView, owner: Owner, public: PublicKnowledge) -> Scores:
    """Score the attacks that claim rows. `seen` is the log without noise."""
    truth = view.truth(owner, public)
    claims = {name: attack(seen) for name, attack in ROWS.items()}
    claims[SUBSPACE] = attacks.outside_the_subspace(view, public)
    return {name: view.cosine(claimed, truth, public) for name, claimed in claims.items()}


def true_tokens(owner: Owner) -> Tensor:
    return torch.cat([batch.flatten() for phase in attacks.PHASES for batch in owner.tokens[phase]])


def true_labels(owner: Owner) -> Tensor:
    """Return the label of each row of the logged training. The last token of a sequence has none."""
    return torch.cat([F.pad(batch[:, 1:], (0, 1), value=NO_LABEL).flatten() for batch in owner.tokens["train"]])


def share_of(guessed: list[Tensor], true: Tensor) -> float | None:
    """Return the share of right guesses among those that could be right; None if nothing was sent that shows any."""
    return (torch.cat(guessed) == true)[true != NO_LABEL].double().mean().item() if guessed else None


def commonest(true: Tensor) -> float:
    """Return what guessing always the same label achieves."""
    counts = torch.bincount(true[true != NO_LABEL])
    return (counts.max() / counts.sum()).item()


def limits_for(scores: Scores, owner: Owner) -> dict[str, tuple[float, float]]:
    """Return the bounds of each score under a level that promises that attacks learn nothing."""
    limits = dict.fromkeys(scores, (-COSINE, COSINE))
    limits[TOKENS] = 0.0, commonest(true_tokens(owner)) + POINT
    limits[LABELS] = limits[HEAD] = 0.0, commonest(true_labels(owner)) + POINT
    limits[COPY] = -math.inf, MOST_COPIED
    return limits


def limits_of_noise(scores: Scores) -> dict[str, tuple[float, float]]:
    """Return the bounds for noise: every attack succeeds, but for two matrices the equations may be too inexact with what is left of the
    noise."""
    limits = dict.fromkeys(scores, (SUCCESS, 1.0))
    for layer in ("gate_proj", "down_proj"):
        limits[f"adapter, {layer}"] = ANY
    return limits


def uniformity(view: OperatorView) -> Iterator[Row]:
    """Yield the chi-square of the bytes that this operator saw, of integers and of seeds."""
    for kind, seen in (("integers", view.bytes[False]), ("seeds", view.bytes[True])):
        for place, counts in (("top", seen.top), ("low", seen.low)) if kind == "integers" else (("any", seen.top),):
            if (total := int(counts.sum())) >= ENOUGH * len(counts):
                name = f"chi-square, {place} byte of {total:,} {kind if kind == 'integers' else 'bytes of seeds'}"
                yield Row(name, view.operator, None, chi_square(counts), *CHI_SQUARE)


def chi_square(counts: Tensor) -> float:
    expected = counts.double().mean()
    return ((counts - expected).square() / expected).sum().item()


def show(level: Level, rows: list[Row]) -> None:
    print_table(
        ("attack", "operator", "plain", "broken", level, "may be", "holds"),
        [(r.attack, r.operator, said(r.plain), said(r.control), said(r.value), r.limits, r.verdict) for r in rows],
        f"What operators learn at level {level}: shares of tokens and labels, cosines with the mean removed, copied effect",
    )


def said(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) > 1 else f"{value:.3f}"


def report(level: Level, rows: list[Row]) -> Report:
    """Return all figures and bars, for programs."""
    found = Report("audit")
    found.figure("level", level)
    for row in rows:
        name = f"{row.attack}, {row.operator}" if row.operator else row.attack
        if row.plain is not None:
            found.bar(f"{name}, plain", row.plain, ">=", SUCCESS)
        if row.control is not None:
            found.bar(f"{name}, broken", row.control, ">=", SUCCESS)
        if row.value is None:
            found.figure(name, None)
            continue
        if row.least > -math.inf:
            found.bar(name, row.value, ">=", row.least)
        if row.most < math.inf:
            found.bar(name, row.value, "<=", row.most)
    return found
