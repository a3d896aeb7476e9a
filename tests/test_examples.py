"""The examples run as they stand in the repository, each as a program of its own against a real executor."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = f"local://{tmp_path_factory.mktemp('executor')}/executor.sock"
    command = [sys.executable, "-c", "from symbiosis.cli import executor_main as m; m()", "demo", "--listen", url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout and "ready" in process.stdout.readline()
    yield url
    process.terminate()
    assert process.wait(timeout=20) == 0


def run(name: str, endpoint: str, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "SYMBIOSIS_ENDPOINT": endpoint, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_finetune_then_generate(endpoint: str, tmp_path: Path) -> None:
    output = run("finetune.py", endpoint, tmp_path)
    assert "wrapped 35/36 (kept: lm_head, not served)" in output
    plain = run("generate.py", endpoint, tmp_path)
    adapted = run("generate.py", endpoint, tmp_path, "adapters/shouting")
    assert plain.startswith("The return value is")
    assert adapted.partition("Stats(")[0] != plain.partition("Stats(")[0]


@pytest.mark.parametrize("name", ["finetune_trl.py", "embedded.py"])
def test_example(name: str, endpoint: str, tmp_path: Path) -> None:
    if "trl" in name:
        pytest.importorskip("trl")
    run(name, endpoint, tmp_path)


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "embedded.py",
        "finetune.py",
        "finetune_trl.py",
        "generate.py",
    }
