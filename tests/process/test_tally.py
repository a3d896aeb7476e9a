"""`pytest -m fault` says in its last line what its tests did, and fails if something was lost; other runs say nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tally
from tests.processes import Executor

TESTS = """
import pytest
from tests import tally

@pytest.fixture(scope="module")
def executor():
    yield
    tally.done[tally.EXECUTORS] += 1  # at the end of a module, too

@pytest.mark.fault
@pytest.mark.parametrize("kills", [2, 3])
def test_kills(executor, kills):
    tally.done[tally.CLIENTS] += kills

@pytest.mark.soak
def test_loses():
    tally.done[tally.LOST] += 1

@pytest.mark.fault
@pytest.mark.gpu
def test_fails():
    tally.done[tally.PARSED] += 7
    raise AssertionError

def test_ordinary():
    tally.done[tally.CLIENTS] += 100
"""


@pytest.fixture
def lines(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """What such a run writes, and its exit status."""
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = some\nmarkers =\n  fault:\n  soak:\n  gpu:\n")
    words = [] if request.param == "fault" else [str(tmp_path / "some")]  # of all tests, or of those in a place
    words += ["-m", request.param] if request.param else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.tally", "-p", "no:cacheprovider", *words]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | environment)
    return [*done.stdout.splitlines(), str(done.returncode)]


@pytest.mark.parametrize("lines", ["fault and not gpu"], indirect=True)
def test_the_last_line_counts_what_the_tests_did(lines: list[str]) -> None:
    line, status = json.loads(lines[-2]), lines[-1]
    assert (line["script"], status) == ("pytest -m fault and not gpu", "0")
    assert line["figures"]["tests"] == 2
    assert line["figures"]["clients_killed"] == 5
    assert line["figures"]["executors_killed"] == 1
    assert {bar["name"]: bar["holds"] for bar in line["bars"]} == {"lost": True, "duplicated": True, "crashes": True}
    assert line["versions"]["symbiosis"]


@pytest.mark.parametrize("lines", ["soak"], indirect=True)
def test_what_is_lost_fails_the_run(lines: list[str]) -> None:
    line, status = json.loads(lines[-2]), lines[-1]
    assert (line["figures"]["lost"], status) == (1, "1")
    assert not line["bars"][0]["holds"]


@pytest.mark.parametrize("lines", ["fault"], indirect=True)
def test_a_run_of_all_that_fails_is_counted_too_and_says_how_much_was_to_be_done(lines: list[str]) -> None:
    line, status = json.loads(lines[-2]), lines[-1]
    assert (line["figures"]["failed"], line["figures"]["frames_fuzzed_on_the_parser"], status) == (1, 7, "1")
    assert {"name": "executors_killed", "value": 1, "bar": 200, "holds": False} in line["bars"]


@pytest.mark.parametrize("lines", ["", "not gpu and not soak"], indirect=True)
def test_other_runs_say_nothing(lines: list[str]) -> None:
    assert not [line for line in lines if line.startswith("{")]


def test_an_executor_that_goes_by_itself_has_crashed(model: Path, tmp_path: Path) -> None:
    before = tally.done.copy()
    for signal_, name in ((signal.SIGSEGV, tally.CRASHES), (signal.SIGTERM, ""), (signal.SIGKILL, tally.EXECUTORS)):
        executor = Executor(model, f"--listen=local://{tmp_path}/x.sock", log=tmp_path / "log")
        if signal_ is signal.SIGKILL:
            executor.kill()
        else:
            executor.signal(signal_)
            executor.wait()
        executor.end()
        counted, before = tally.done - before, tally.done.copy()
        assert counted == ({name: 1} if name else {})
