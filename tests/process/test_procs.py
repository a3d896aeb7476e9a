"""A child ends when its parent says so, or is gone; what an operator's signals mean does not depend on either."""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

import symbiosis
from symbiosis.base.procs import SAME_S, Child
from tests.serving_api import eventually

# Notes what it is told; ends when it is told to end at once.
CHILD = """
import os, sys, time
from pathlib import Path
from symbiosis.base import procs

notes = Path(sys.argv[1])

def note(what):
    with notes.open("a") as file:
        file.write(what + "\\n")

def at_once():
    note("at once")
    os._exit(3)

procs.while_needed(lambda: notes.with_name("needed").exists())
procs.when_told_to_end(lambda: note("end"), at_once)
procs.follow_parent(float(sys.argv[2]))
note("ready")
while not notes.with_name("over").exists():
    time.sleep(0.01)
"""
# Has many threads, each of which dies by itself when the process is killed.
PARENT = """
import sys, threading, time
from symbiosis.base.procs import Child

for _ in range(50):
    threading.Thread(target=time.sleep, args=[600], daemon=True).start()
child = Child(sys.argv[1:])
print(child.pid, flush=True)
time.sleep(600)
"""


class Pair:
    """A child, and the process that has started it."""

    def __init__(self, folder: Path, most_s: float = 0.0) -> None:
        self._folder = folder
        words = ["-c", CHILD, str(folder / "notes"), str(most_s)]
        self.parent = subprocess.Popen([sys.executable, "-c", PARENT, *words], stdout=subprocess.PIPE, text=True)
        assert self.parent.stdout
        self.child = int(self.parent.stdout.readline())
        eventually(lambda: self.told == ["ready"])

    @property
    def told(self) -> list[str]:
        notes = self._folder / "notes"
        return notes.read_text().split("\n")[:-1] if notes.exists() else []

    def orphan(self) -> None:
        self.parent.kill()
        self.parent.wait()

    def close(self) -> None:
        (self._folder / "over").touch()
        self.orphan()
        eventually(lambda: not Path(f"/proc/{self.child}").exists() or "\nState:\tZ" in Path(f"/proc/{self.child}/status").read_text())  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_a_parent_s_death_is_said_once_though_it_has_many_threads(pair: Pair) -> None:
    pair.orphan()
    eventually(lambda: len(pair.told) > 1)
    time.sleep(0.5)
    assert pair.told == ["ready", "end"]


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        ([], ["end"]),
        ([signal.SIGTERM, signal.SIGTERM], ["end", "at once"]),
        ([signal.SIGINT, signal.SIGTERM], ["end", "at once"]),
        ([signal.SIGTERM], ["end"]),
    ],
    ids=["none", "two", "ctrl-C first", "one"],
)
def test_a_parent_s_death_is_no_second_signal(pair: Pair, signals: list[int], told: list[str]) -> None:
    for number in signals[:1]:
        os.kill(pair.child, number)
        eventually(lambda: len(pair.told) == 2)
    time.sleep(2 * SAME_S)
    pair.orphan()
    time.sleep(2 * SAME_S)
    for number in signals[1:]:
        os.kill(pair.child, number)
    eventually(lambda: pair.told[1:] == told)
    time.sleep(2 * SAME_S)
    assert pair.told[1:] == told


def test_signals_that_come_together_are_one(pair: Pair) -> None:
    """As `timeout 5 symbiosis serve demo` sends them."""
    os.kill(pair.child, signal.SIGTERM)
    eventually(lambda: len(pair.told) == 2)
    os.kill(pair.child, signal.SIGTERM)
    time.sleep(2 * SAME_S)
    assert pair.told == ["ready", "end"]


def test_an_orphan_goes_on_while_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "needed").touch()
    pair = Pair(tmp_path, most_s=60.0)
    try:
        pair.orphan()
        time.sleep(0.5)
        assert pair.told == ["ready"]
        (tmp_path / "needed").unlink()
        eventually(lambda: pair.told == ["ready", "end"])
    finally:
        pair.close()


def test_an_orphan_goes_on_for_so_long_at_most(tmp_path: Path) -> None:
    (tmp_path / "needed").touch()
    pair = Pair(tmp_path, most_s=0.5)
    try:
        pair.orphan()
        eventually(lambda: pair.told == ["ready", "end"], 10)
    finally:
        pair.close()


def test_a_child_is_told_to_end_and_killed_if_it_does_not(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    child = Child(["-c", CHILD, str(notes), "0"])
    eventually(lambda: notes.exists() and notes.read_text() == "ready\n")
    child.end()
    child.end()
    eventually(lambda: notes.read_text() == "ready\nend\n")
    assert child.status is None
    child.stop(0.3)
    assert child.status == -signal.SIGKILL
    child.end()
    child.kill()


def test_a_child_imports_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others may write, as in /tmp, they could put a module there."""
    (tmp_path / "msgspec.py").write_text("print('planted')")
    monkeypatch.chdir(tmp_path)
    for words in (["-c", "import msgspec; print(msgspec.__file__)"], ["-m", "msgspec"]):
        child = Child(words, stdout=PIPE)
        assert b"planted" not in child.stdout.read()
        assert child.wait(60)


def test_children_of_a_checkout_that_is_not_installed_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m symbiosis` finds it in the working directory, which its children pass by."""
    checkout = str(Path(symbiosis.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(sys, "argv", ["symbiosis", "version"])
    monkeypatch.setattr(sys, "path", [checkout, *sys.path])
    with pytest.raises(SystemExit):
        runpy.run_module("symbiosis", run_name="__main__")
    assert os.environ["PYTHONPATH"] == f"{checkout}{os.pathsep}before"


def test_a_child_whose_parent_died_before_it_could_ask_ends(tmp_path: Path) -> None:
    """There is no moment at which a parent's death is not seen."""
    (tmp_path / "over").touch()
    code = f"import os; from symbiosis.base.procs import Child; print(Child(['-c', {CHILD!r}, {str(tmp_path / 'notes')!r}, '0']).pid, flush=True); os._exit(1)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert int(done.stdout)
    (tmp_path / "over").unlink()
    eventually(lambda: (tmp_path / "notes").exists() and "end" in (tmp_path / "notes").read_text())
    (tmp_path / "over").touch()
