"""The README's programs run as they stand, one after the other, against executors with the keys and files that they name."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, TrainerCallback

import symbiosis
from symbiosis.base import curve_keys
from symbiosis.cli import pad_files
from symbiosis.executor.model.load import DEMO_MODEL, load_model
from tests.docs.test_readme import PROGRAMS

Dataset = pytest.importorskip("datasets").Dataset
TOKENS = 64


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the README leaves to its reader: a folder with keys and pads, a checkpoint, a tokenizer, data; and two executors."""
    monkeypatch.chdir(tmp_path)
    curve_keys.generate("executor", tmp_path)
    curve_keys.generate("alice", tmp_path / "tenants")
    (tmp_path / "tenants/alice.key").rename(tmp_path / "alice.key")
    own = {"key": "executor.key", "tenants": "tenants", "integers": [8]}
    north = {"listen": [f"local://{tmp_path}/x.sock", "tcp://127.0.0.1:0"], "operator": "north", **own}
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = "The return value is a string. It is an error to do that."
    ids = [tokenizer(text[start : start + 24])["input_ids"] for start in range(8)]
    with ExitStack() as stack:
        one = stack.enter_context(symbiosis.Executor("demo", **north))
        other = stack.enter_context(symbiosis.Executor("demo", operator="south", integers=[8]))
        monkeypatch.setenv("SYMBIOSIS_ENDPOINT", one.endpoint)
        yield {
            "symbiosis": symbiosis, "checkpoint": DEMO_MODEL, "tokenizer": tokenizer, "tcp": one.endpoints[1].partition("://")[2],
            "data": Dataset.from_list([{"input_ids": row, "labels": row} for row in ids]),
            "endpoint": one.endpoint, "other_endpoint": other.endpoint,
        }  # fmt: skip


def test_programs_run_one_after_the_other(scope: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    fine_tune, trl, generate, serving, _ = PROGRAMS
    trl = re.sub(r"tcp://[\d.]+:\d+", f"tcp://{scope['tcp']}", trl)
    assert "Trainer(" in fine_tune and "SFTTrainer(" in trl and "generate(" in generate
    assert "openai.OpenAI(" in serving  # which tests/process/test_serve_api.py runs
    for program in (fine_tune, trl, generate):
        exec(compile(program, "README.md", "exec"), scope)
    assert isinstance(scope["trainer"].callback_handler.callbacks[0], TrainerCallback)
    assert Path("adapter/adapter_model.safetensors").is_file()
    printed = capsys.readouterr().out
    assert "The return value is" in printed and "Stats(calls=" in printed


def test_each_way_to_hide_or_prove_runs(scope: dict[str, Any]) -> None:
    (program,) = [program for program in PROGRAMS if "privacy=" in program]
    pad_files.make("demo", TOKENS, Path("alice.pads"))
    statements = program.strip().splitlines()
    assert len(statements) == 3
    unsplit, ids = load_model("demo"), scope["tokenizer"]("The return value is", return_tensors="pt").input_ids
    for statement in statements:
        scope["model"] = load_model("demo")
        exec(compile(statement, "README.md", "exec"), scope)
        difference = (scope["model"](input_ids=ids).logits - unsplit(input_ids=ids).logits).abs().max()
        assert difference < (1e-3 if "verify" in statement else 0.5), statement


def test_the_program_with_an_engine_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    (program,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "serving.Engine(" in each]
    exec(compile(program, "docs/serving.md", "exec"), {})
    assert "length ['python', 'shout', 'whisper']" in capsys.readouterr().out


def test_the_program_that_trains_many_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    program, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for other in others:
        exec(compile(other, "docs/training.md", "exec"), {})
    capsys.readouterr()
    exec(compile(program, "docs/training.md", "exec"), {})
    losses = [list(map(float, line.split())) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3 and all(a > b for a, b in zip(losses[0], losses[2], strict=True))
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
