"""A disk that is full, by a small file system of its own: who could not write is told, nothing half written stays, and runs go on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from symbiosis.errors import AdapterError
from symbiosis.training import Engine, Run, checkpoints
from tests.conftest import tiny_llama
from tests.inproc.test_training import batch, lora

pytestmark = pytest.mark.fault
FILLER = "filler"


def test_checkpoints_and_logs_on_a_full_disk(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that whoever may not mount there is skipped."""
    (tmp_path / "small").mkdir()
    mount = f"mount -t tmpfs -o size=1m small {tmp_path}/small && exec"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", f"{mount} true"]).returncode:
        pytest.skip("needs a file system of its own")
    child = [sys.executable, "-m", "tests.fault.test_training_disk_full", str(tmp_path / "small")]
    done = subprocess.run(["unshare", "-rm", "sh", "-c", f'{mount} "$@"', "sh", *child], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def fill(folder: Path) -> Path:
    with (folder / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return folder / FILLER


def stepped(run: Run, seed: int) -> None:
    run.forward_backward(batch(seed)).result(60)
    run.step(1e-2).result(60)


def main(folder: Path) -> None:
    large = lora(r=64, target_modules="all-linear")  # whose checkpoint does not fit
    with Engine(tiny_llama()) as engine:
        run, expected = engine.create(large, seed=1), engine.create(large, seed=1)
        for each in (run, expected):
            stepped(each, 1)
        kept = fill(folder)
        kept.write_bytes(bytes(900_000))
        with pytest.raises(OSError, match="make room and try again") as told:
            run.save(folder / "checkpoint")
        assert "No space left" in str(told.value), told.value
        assert [each.name for each in folder.iterdir()] == [FILLER] and not checkpoints(folder)
        kept.unlink()
        for each in (run, expected):
            stepped(each, 2)
        assert are_equal(run, expected)
        with pytest.raises(AdapterError):
            engine.load(folder / "checkpoint")
    with Engine(tiny_llama(), state=folder / "runs") as engine, Engine(tiny_llama()) as undisturbed:
        run, expected = engine.create(lora(), seed=1, name="mine"), undisturbed.create(lora(), seed=1)
        for each in (run, expected):
            stepped(each, 1)
        filler = fill(folder)
        with pytest.raises(OSError, match="make room"):
            run.forward_backward(batch(2, rows=100)).result(60)
        with pytest.raises(OSError, match="make room"):
            engine.create(lora(), name="other")
        filler.unlink()
        assert engine.names == ["mine"] and run.steps == 1
        for each in (run, expected):
            stepped(each, 2)
        assert are_equal(run, expected) and engine.create(lora(), name="other").steps == 0


def are_equal(run: Run, other: Run) -> bool:
    pairs = zip(run.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
