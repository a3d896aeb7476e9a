"""Programs under `symbiosis run`: as they are, in processes of their own, compared with themselves without it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.processes import Executor, killed_at_the_end, save_tiny_llama

TRAIN = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.manual_seed(3)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"))
rows = torch.randint(3, 100, (16, 12), generator=torch.Generator().manual_seed(7)).tolist()
options = dict(max_steps=3, learning_rate=1e-2, seed=11, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
Trainer(model, TrainingArguments(sys.argv[2], **options), train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
model.save_pretrained(sys.argv[2])
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def endpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an executor whose weights programs map."""
    folder = tmp_path_factory.mktemp("executor")
    with killed_at_the_end() as processes:
        where = f"--listen=local://{folder}/executor.sock"
        executor = Executor(checkpoint, where, "--share-weights", log=folder / "log")
        processes.append(executor)
        yield executor.endpoint


def run(*command: object, folder: Path, options: tuple[str, ...] | None = (), **environment: str) -> Any:
    """A program to its end, under `symbiosis run OPTIONS`; with `options=None` without it."""
    launcher = [] if options is None else [sys.executable, "-m", "symbiosis", "run", *options, "--"]
    return subprocess.run(
        [*launcher, *map(str, command)], env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip


def adapter_of(folder: Path) -> dict[str, Any]:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def test_a_program_trains_the_adapter_that_it_trains_alone(checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = (sys.executable, "train.py", checkpoint)
    alone = run(*command, "alone", folder=tmp_path, options=None)
    assert alone.returncode == 0 and "symbiosis" not in alone.stderr, alone.stderr
    split = run(*command, "split", folder=tmp_path, options=("--endpoint", endpoint, "--require"))
    assert split.returncode == 0, split.stderr
    assert f"{checkpoint.name}: 14 of 15 layers from {endpoint}" in split.stderr
    expected, got = adapter_of(tmp_path / "alone"), adapter_of(tmp_path / "split")
    assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in expected)
