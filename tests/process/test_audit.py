"""`symbiosis audit`: its attacks succeed where nothing is hidden, fail where all is, and find what is broken on purpose."""

import dataclasses
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

import symbiosis
from symbiosis.audit import recorder as recorder_module
from symbiosis.audit import run as audit_module
from symbiosis.audit.adapter_attacks import MLP, cosine, gate_projection
from symbiosis.audit.attacks import rows_themselves
from symbiosis.audit.operator_view import OperatorView
from symbiosis.audit.owner import ATTENDED, GATED, Owner, Size, Work, own
from symbiosis.audit.public_knowledge import PublicKnowledge
from symbiosis.audit.recorder import Recorder
from symbiosis.audit.run import (
    ANY,
    BROKEN,
    CHI_SQUARE,
    COPY,
    COSINE,
    HEAD,
    LABELS,
    ROWS,
    SUBSPACE,
    SUCCESS,
    TOKENS,
    Row,
    Setup,
    chi_square,
    control,
    setup,
    uniformity,
)
from symbiosis.base.keystream import keystream, new_key
from symbiosis.cli.pad_files import make
from symbiosis.client.connection import reconnect
from symbiosis.client.layers.groups import GroupMember
from symbiosis.client.privacy import split as split_module
from symbiosis.client.privacy.masked_session import Group, PrivateSession, asked
from symbiosis.client.privacy.pads import PadFile
from symbiosis.client.privacy.split import Split, SplitLevel
from symbiosis.client.privacy.verify import Proofs
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.executor.compute import slices as slices_module
from symbiosis.executor.model.load import load_model
from symbiosis.protocol import Op, Priority, width
from tests.processes import Process, run, until

NEIGHBOURS = "difference of two rows of a call"
ADAPTED = ("v_proj", "gate_proj", "down_proj")
SMALL = Size(steps=1, logged_steps=3, known=24, first=1, distil_steps=1)  # enough for attacks on rows
FEW = dataclasses.replace(SMALL, logged_steps=2, known=8, repeats=4)  # ... but not for what only shows over many calls

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def public() -> PublicKnowledge:
    return PublicKnowledge()


@pytest.fixture(autouse=True)
def lost_calls_are_sent_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner loses some on purpose."""
    monkeypatch.setattr(reconnect, "LONGEST_PAUSE_S", reconnect.FIRST_PAUSE_S)


@pytest.mark.soak
@pytest.mark.parametrize("level", ["none", "noise", "split", "pads"])
def test_a_level_holds_what_it_promises(level: str) -> None:
    """As a user asks for it. Without protection all attacks succeed, else nothing would be shown."""
    done = run("audit", "--quick", "--level", level, seconds=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(told_of(level, done.stdout).values())


@pytest.mark.full
def test_two_operators_learn_nothing_in_a_small_audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of `symbiosis audit`, but its owner works too little for attacks other than on rows to succeed without protection."""
    monkeypatch.setattr(audit_module, "QUICK", SMALL)
    monkeypatch.setattr(audit_module, "exit_at", lambda *_: None)
    audit_module.run("split", quick=True)
    bars = told_of("split", capsys.readouterr().out)
    assert all(holds or name.endswith(", plain") for name, holds in bars.items())
    assert all(bars[f"{attack}, {operator}, plain"] for attack in (*ROWS, SUBSPACE) for operator in ("one", "two"))


def told_of(level: str, output: str) -> dict[str, bool]:
    """Return which bars of an audit hold. There are figures of all attacks, and a bar for each without protection."""
    line = json.loads(output.splitlines()[-1])
    assert line["script"] == "audit" and line["figures"]["level"] == level
    attacks = {*ROWS, SUBSPACE, TOKENS, HEAD, LABELS, COPY, *(f"adapter, {name}" for name in ADAPTED)}
    operators = {"none": [], "noise": ["one"], "split": ["one", "two"], "pads": ["one"]}[level]
    wanted = {f"{attack}, {operator}" for attack in attacks for operator in operators} or attacks
    assert wanted <= line["figures"].keys()
    for operator in operators if level in ("split", "pads") else ():
        assert any(name.startswith("chi-square, ") and name.endswith(f", {operator}") for name in line["figures"])
    for attack in BROKEN:
        assert attack in line["figures"] or all(
            f"{attack}, {operator}, broken" in line["figures"] for operator in operators
        )
    plain = {bar["name"] for bar in line["bars"] if bar["bar"] == SUCCESS}
    assert plain >= ({f"{name}, plain" for name in wanted} if operators else attacks)
    return {bar["name"]: bar["holds"] for bar in line["bars"]}


def audit_in(folder: Path) -> None:
    """An audit whose owner works for a minute."""
    tempfile.tempdir = str(folder)
    audit_module.PublicKnowledge = audit_module.Work = Mock()  # type: ignore[misc, assignment]
    audit_module.PublicKnowledge.return_value.bits = 8
    audit_module.unprotected = lambda *_: time.sleep(60)  # type: ignore[assignment, return-value]
    audit_module.run("pads", quick=True)


@pytest.mark.full
def test_sigterm_leaves_no_folder(tmp_path: Path, processes: list) -> None:
    processes.append(Process(audit_in, tmp_path))
    until(lambda: any(tmp_path.glob("symbiosis-audit-*")), "a folder")
    processes[0].signal(signal.SIGTERM)
    assert processes[0].wait() == 143
    assert not any(tmp_path.glob("symbiosis-audit-*"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("level", ["none", "split"])
def test_a_million_known_tokens_do_not_show_the_adapter(level: str) -> None:
    done = run("audit", "--quick", "--level", level, "--tokens", str(10**6), seconds=7000)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- the attacks themselves


@pytest.fixture(scope="module")
def plain(public: PublicKnowledge, tmp_path_factory: pytest.TempPathFactory) -> tuple[OperatorView, Owner]:
    """An operator's log of rows as they are, and their owner."""
    with setup("none", SMALL, small_work(public), tmp_path_factory.mktemp("plain")) as plain:
        owner = own(*plain, small_work(public), SMALL)
        return OperatorView(plain.recorders[0]), owner


@pytest.mark.parametrize("name", BROKEN)
def test_broken_masks_hide_rows_only_from_who_does_not_attack(
    name: str, plain: tuple[OperatorView, Owner], public: PublicKnowledge
) -> None:
    view, owner = plain
    broken = BROKEN[name](view)
    as_it_is = broken.cosine(rows_themselves(broken), broken.truth(owner, public), public)
    assert as_it_is < SUCCESS <= control(name, view, owner, public)


def test_an_attack_that_finds_nothing_in_broken_masks_is_void() -> None:
    row = Row("rows", "one", plain=1.0, value=0.0, least=-COSINE, most=COSINE, control=1.0)
    assert row.verdict == "yes"
    assert dataclasses.replace(row, control=0.5).verdict == dataclasses.replace(row, plain=0.5).verdict == "VOID"


def test_an_attack_that_may_fail_and_does_is_not_said_to_hold() -> None:
    row = Row("adapter", "one", plain=1.0, value=0.01, least=ANY[0], most=ANY[1])
    assert row.verdict == "failed (allowed)"
    assert dataclasses.replace(row, value=0.99).verdict == "yes"


@pytest.mark.full
def test_more_tokens_give_better_equations_of_the_adapter(public: PublicKnowledge, tmp_path: Path) -> None:
    """They are among the known ones; of their calls, no more is written down than shows the adapter."""
    found = []
    for tokens in (0, 3000):
        size = dataclasses.replace(SMALL, tokens=tokens)
        work = dataclasses.replace(Work.of(public.tokenizer, size), held_out=small_work(public).held_out)
        with setup("none", size, work, tmp_path) as plain:
            owner = own(*plain, work, size)
            view = OperatorView(plain.recorders[0])
        assert {layer for entry in view.more for layer in entry.layers} <= {*GATED, *ATTENDED, f"{MLP}.up_proj"}
        assert sum(entry.rows.shape[0] for entry in view.more if not GATED.isdisjoint(entry.layers)) >= 2 * tokens
        found.append(cosine(f"{MLP}.gate_proj", gate_projection(view, public), owner, public))
    assert found[0] < found[1] - 0.05 and found[1] > 0.9


# ---------------------------------------------------------------- what is broken must be found


@dataclasses.dataclass(frozen=True)
class Broken(Split):
    """`Split` with another level."""

    kind: type[SplitLevel] = SplitLevel

    def level(self, proofs: Proofs | None) -> SplitLevel:
        return self.kind(self, proofs)


class Trusting(SplitLevel):
    """Does not ask who runs the second executor."""

    def _two_operators(self) -> None:
        pass


def flagged(protected: Setup, public: PublicKnowledge, size: Size = FEW) -> set[str]:
    """The attacks on rows that got more than they may, and the bytes that are not uniform."""
    owner = own(*protected, small_work(public, size), size)
    found = set()
    for recorder in protected.recorders:
        view = OperatorView(recorder)
        truth = view.truth(owner, public)
        for name, attack in ROWS.items():
            if not abs(view.cosine(attack(view), truth, public)) <= COSINE:
                found.add(name)
        found |= uneven(view)
    return found


def uneven(view: OperatorView) -> set[str]:
    """The bytes that are not uniform."""
    return {" ".join(row.attack.split()[:3]) for row in uniformity(view) if row.verdict != "yes"}


@cache
def small_work(public: PublicKnowledge, size: Size = SMALL) -> Work:
    """No attack on rows asks what the owner makes of held-out text."""
    work = Work.of(public.tokenizer, size)
    return dataclasses.replace(work, held_out=work.held_out[:1])


def everywhere(monkeypatch: pytest.MonkeyPatch, pads: Callable[..., Tensor]) -> None:
    """Instead of the keystream, on both sides, so that the results stay right."""
    for module in (split_module, slices_module, recorder_module):
        monkeypatch.setattr(module, "keystream", pads)


def half_range(*arguments: Any, **more: Any) -> Tensor:
    return keystream(*arguments, **more) & 0x7FFFFFFF


def of_24_bits(*arguments: Any, **more: Any) -> Tensor:
    return keystream(*arguments, **more) & 0xFFFFFF


def one_for_all_rows(key: bytes, shape: tuple[int, int], dtype: torch.dtype, start: int = 0) -> Tensor:
    return keystream(key, (1, shape[1]), dtype).expand(shape).contiguous()


@pytest.mark.parametrize(("pads", "uniform"), [(keystream, True), (half_range, False), (of_24_bits, False)])
def test_pads_that_are_not_uniform_are_found(
    pads: Callable[..., Tensor], uniform: bool, public: PublicKnowledge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everywhere(monkeypatch, pads)
    work = small_work(public)
    with setup("split", SMALL, work, tmp_path) as protected:
        model = symbiosis.wrap(load_model("demo"), protected.endpoint, privacy=protected.privacy)
        with torch.no_grad():
            model(input_ids=work.known)
        found = uneven(OperatorView(protected.recorders[0]))
    assert ("chi-square, top byte" in found) is not uniform
    assert uniform is (found == set())


@pytest.mark.parametrize(("pads", "findings"), [(keystream, set()), (one_for_all_rows, {NEIGHBOURS})])
def test_one_pad_for_all_rows_is_found(
    pads: Callable[..., Tensor],
    findings: set[str],
    public: PublicKnowledge,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    everywhere(monkeypatch, pads)
    with setup("split", FEW, small_work(public, FEW), tmp_path) as protected:
        found = flagged(protected, public)
    assert findings <= found if findings else found == set()


def test_pads_that_are_used_again_are_found(
    public: PublicKnowledge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(split_module, "new_key", lambda: bytes(32))
    with setup("split", SMALL, small_work(public), tmp_path) as protected:
        found = flagged(protected, public, SMALL)
    assert {"difference of two requests", "difference of two layers", "chi-square, any byte"} <= found


@pytest.mark.parametrize("burned", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_pad_file_that_gives_pads_out_again_is_found(
    burned: bool, public: PublicKnowledge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not burned:
        monkeypatch.setattr(PadFile, "take", lambda self, stream, rows: 0)
    with setup("pads", FEW, small_work(public, FEW), tmp_path) as protected:
        found = flagged(protected, public)
    assert ("difference of two requests" in found) is not burned
    assert burned is (found == set())


def test_two_halves_at_one_operator_are_found(public: PublicKnowledge) -> None:
    with Recorder("demo", operator="one", integers=[8]) as one:
        protected = Setup(one.endpoint, Broken(one.endpoint, kind=Trusting), [one])
        assert "rows, from both halves of a call" in flagged(protected, public)


# ---------------------------------------------------------------- forks


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Recorder]]:
    """Executors that a forked child reaches, too."""
    executors = [
        Recorder("demo", operator=name, integers=[8], listen=[f"local://{tmp_path}/{name}.sock"]) for name in ("a", "b")
    ]
    for executor in executors:
        executor.server.dispatch.phase = "both"
    yield executors
    for executor in executors:
        executor.close()


def seen_of_parent_and_child(two: list[Recorder]) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens that a parent and its forked child ask about, and what the first operator saw of both in the first layer."""
    model = symbiosis.wrap(load_model("demo"), two[0].endpoint, privacy=Split(two[1].endpoint))
    ids = list(torch.randint(0, 256, (2, 8, 48), generator=torch.Generator().manual_seed(1)))

    def ask(which: int) -> None:
        with torch.inference_mode():  # no groups: every layer makes calls of its own
            model(input_ids=ids[which])

    ask(0)
    two[0].server.dispatch.log.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        ask(1)
        os._exit(0)
    torch.set_num_threads(threads)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ask(0)
    first: dict[int, Tensor] = {}
    for sent in two[0].server.dispatch.log:
        first.setdefault(sent.session, sent.rows)
    childs, parents = first.values()
    return ids, [parents, childs]


@pytest.mark.parametrize("safe", [True, False])
def test_a_forked_child_has_pads_of_its_own(
    safe: bool, two: list[Recorder], public: PublicKnowledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both draw from one state, their rows' difference is that of what they asked."""
    state = random.Random(0)
    if not safe:
        monkeypatch.setattr(split_module, "new_key", lambda: state.randbytes(32))
    ids, (parents, childs) = seen_of_parent_and_child(two)
    x = F.normalize(public.dictionary().double(), dim=1)
    true = x[ids[0].flatten()] - x[ids[1].flatten()]
    different = true.norm(dim=1) > 0
    cosine = F.cosine_similarity((parents - childs).double(), true)[different].mean().item()
    assert abs(cosine) <= COSINE if safe else cosine > 0.99


# ---------------------------------------------------------------- sums that wrap


class Saturating(SplitLevel):
    """Adds without the modulus."""

    def masked(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        call, shapes = self.call_for(op, group, x_TK, priority)
        key, range_ = new_key(), torch.iinfo(self.dtype)
        r_TK = split_module.keystream(key, call.shape, self.dtype)  # type: ignore[arg-type]
        seed = torch.frombuffer(bytearray(key), dtype=torch.uint8)
        sent_TK = (x_TK.double() + r_TK.double()).clamp(range_.min, range_.max).to(self.dtype)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asked, self._second, None, replace(call, seeded=True), (seed,), shapes, r_TK)
            return asked(self._first, None, call, (sent_TK,), shapes, sent_TK)


def extremes(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and pads of the numbers at whose sums a modulus shows."""
    range_ = torch.iinfo(dtype)
    numbers = torch.tensor([0, -1, 1, range_.max, range_.min], dtype=dtype)  # -1 is 2^k - 1
    pairs = torch.cartesian_prod(numbers, numbers).repeat(-(-rows * width // 25), 1)[: rows * width]
    return pairs[:, 0].reshape(rows, width).contiguous(), pairs[:, 1].reshape(rows, width).contiguous()


def wrapped_sums(x_TK: Tensor, r_TK: Tensor) -> Tensor:
    """In Python's integers."""
    k = 8 * x_TK.element_size()
    half, size = 1 << (k - 1), 1 << k
    sums = [(x + r + half) % size - half for x, r in zip(x_TK.flatten().tolist(), r_TK.flatten().tolist(), strict=True)]
    return torch.tensor(sums, dtype=x_TK.dtype).view_as(x_TK)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", [SplitLevel, Saturating])
def test_masked_rows_are_sums_modulo_two_to_the_k(
    kind: type[SplitLevel], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Recorder("demo", operator=name, integers=[bits]) for name in ("one", "two"))
    with one, other:
        model = symbiosis.wrap(load_model("demo"), one.endpoint, privacy=Broken(other.endpoint, bits, kind))
        session: PrivateSession = next(remote_weights(model)).handle.session  # type: ignore[assignment]
        level: SplitLevel = session.level  # type: ignore[assignment]
        layer = next(n for n, told in enumerate(session.manifest) if told.name.endswith("q_proj"))
        x_TK, r_TK = extremes(3, width(session.manifest[layer], Op.DGRAD), level.dtype)
        monkeypatch.setattr(split_module, "keystream", lambda *_: r_TK)
        one.server.dispatch.phase = "now"
        level.masked(Op.FORWARD, (GroupMember(layer, width(session.manifest[layer]), False),), x_TK, Priority.PREFILL)
        (sent,) = one.server.dispatch.log
    assert torch.equal(sent.rows, wrapped_sums(x_TK, r_TK)) is (kind is SplitLevel)


def test_masked_rows_of_a_pad_file_are_sums_modulo_two_to_the_k(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make("demo", 64, tmp_path / "pads")
    with Recorder("demo", integers=[8]) as one:
        model = symbiosis.wrap(load_model("demo"), one.endpoint, privacy=symbiosis.Pads(tmp_path / "pads"))
        session: PrivateSession = next(remote_weights(model)).handle.session  # type: ignore[assignment]
        layer = next(n for n, told in enumerate(session.manifest) if told.name.endswith("o_proj"))
        x_TK, r_TK = extremes(3, width(session.manifest[layer], Op.DGRAD), torch.int32)
        monkeypatch.setattr(PadFile, "pads", lambda *_: r_TK)
        one.server.dispatch.phase = "now"
        member = GroupMember(layer, width(session.manifest[layer]), False)
        session.level.masked(Op.FORWARD, (member,), x_TK, Priority.PREFILL)  # type: ignore[attr-defined]
        (sent,) = one.server.dispatch.log
    assert torch.equal(sent.rows, wrapped_sums(x_TK, r_TK))


# ---------------------------------------------------------------- the measure itself


def test_chi_square_of_uniform_bytes_and_of_others() -> None:
    bytes_N = keystream(new_key(), (1, 1 << 20), torch.uint8)[0]
    assert CHI_SQUARE[0] <= chi_square(torch.bincount(bytes_N, minlength=256)) <= CHI_SQUARE[1]
    bytes_N[: 1 << 16] //= 2
    assert chi_square(torch.bincount(bytes_N, minlength=256)) > CHI_SQUARE[1]
    assert chi_square(torch.full((256,), 4096)) < CHI_SQUARE[0]  # too even is no chance, either
