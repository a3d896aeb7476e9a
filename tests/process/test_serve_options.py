"""Options of `symbiosis serve`, by the command: what each says is what the server does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.processes import run
from tests.secret_files import write_secret
from tests.serving_api import WAIT_S, Command, client, eventually, web

ADAPTERS = DEMO_MODEL / "adapters"
PROMPT = "def average(numbers):"
MANY = 12


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[symbiosis.Executor]:
    with symbiosis.Executor("demo", listen=f"local://{tmp_path_factory.mktemp('x')}/e.sock") as executor:
        yield executor


@pytest.fixture(scope="module")
def command(executor: symbiosis.Executor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    write_secret(keys, "many key-of-many\nfew key-of-few\n")
    command = Command(
        "--executor", executor.endpoint, "--adapters", f"loud={ADAPTERS / 'shout'}", "--adapters", f"code={ADAPTERS / 'python'}",
        "--policy", "vtc", "--api-keys", str(keys), "--max-batch", "2", "--max-tenant-batch", "2", "--adapters-in-batch", "1",
        "--prefill-tokens", "8", forked=True,
    )  # fmt: skip
    with closing(command):
        yield command


def complete(command: Command, key: str = "few", **fields: Any) -> str:
    how = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, **fields}
    text: str = client(command.url, f"key-of-{key}").completions.create(**how).choices[0].text
    return text


def metric(command: Command, name: str) -> float:
    lines = web.get(f"{command.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"symbiosis_serve_{name}"))


def test_a_server_over_an_executor_with_adapters_by_name(command: Command, executor: symbiosis.Executor) -> None:
    assert command.executor == executor.endpoint
    with pytest.raises(StopIteration):
        command.child("executor_main")
    assert [each.id for each in client(command.url, "key-of-few").models.list()] == ["demo", "code", "loud"]
    with pytest.raises(openai.AuthenticationError):
        complete(command, key="nobody")
    with Engine(executor.endpoint, DEMO_MODEL, adapters=ADAPTERS, memory=1 << 24) as engine:
        names = {"demo": None, "code": "python", "loud": "shout"}
        wanted = {
            model: engine.generate(PROMPT, adapter=name, max_tokens=40, temperature=0.0).text
            for model, name in names.items()
        }
    with ThreadPoolExecutor(6) as pool:  # all at once, of which the batch holds one adapter at a time
        asked = [(model, pool.submit(complete, command, model=model)) for model in [*names] * 2]
        assert all(text.result(WAIT_S) == wanted[model] for model, text in asked)


def test_prompts_come_in_pieces_of_so_many_tokens(command: Command) -> None:
    before = metric(command, "steps_total")
    complete(command, prompt="x" * 80, max_tokens=1)
    assert metric(command, "steps_total") - before == 80 / 8


def test_the_key_that_has_got_the_fewest_tokens_is_next(command: Command) -> None:
    with ThreadPoolExecutor(MANY) as pool:
        many = [
            pool.submit(complete, command, "many", max_tokens=60, extra_body={"ignore_eos": True}) for _ in range(MANY)
        ]
        eventually(lambda: metric(command, "num_requests_waiting") > MANY // 2)
        complete(command, "few", max_tokens=2)
        done = sum(each.done() for each in many)
        assert all(len(each.result(WAIT_S)) > 0 for each in many)
    assert done < MANY - 4


def test_options_of_a_file_hold_unless_the_command_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"served-model-name: base\nadapters: [{ADAPTERS}]\nmax-requests: 3\nadapters-in-batch: 2\nprefill-tokens: 16\n"
    )
    with closing(Command("--config", str(file), "--prefill-tokens", "40", forked=True)) as command:
        assert [each.id for each in client(command.url).models.list()] == ["base", "python", "shout", "whisper"]
        with pytest.raises(openai.BadRequestError, match="at most 3 completions, and this would be 4"):
            complete(command, model="base", n=4)
        before = metric(command, "steps_total")
        assert len(complete(command, model="base", prompt="x" * 80, max_tokens=1)) == 1
        assert metric(command, "steps_total") - before == 2


def test_no_server_starts_over_an_executor_of_another_model(executor: symbiosis.Executor, tmp_path: Path) -> None:
    """It would put one model's tokens into another."""
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_text((DEMO_MODEL / file).read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    arguments = ["serve", str(tmp_path), "--executor", executor.endpoint, "--port", "0", "--memory", "33554432"]
    done = run(*arguments, seconds=120)
    assert (
        done.returncode == 2
        and f"{executor.endpoint} serves another model than {tmp_path} (num_hidden_layers" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_an_executor_that_does_not_come_up(tmp_path: Path) -> None:
    """What is said to wait for longer is what decides."""
    done = run("serve", "demo", "--port", "0", "--executor", f"local://{tmp_path}/never.sock", "--wait-s", "0.2")
    assert done.returncode == 2 and "(wait=, --wait-s waits for longer)" in done.stderr


@pytest.mark.full
def test_an_executor_that_does_not_come_up_for_whom_the_environment_decides(tmp_path: Path) -> None:
    """It is read when the process starts."""
    never = f"local://{tmp_path}/never.sock"
    command = [sys.executable, "-m", "symbiosis", "serve", "demo", "--port", "0", "--executor", never]
    environment = os.environ | {"SYMBIOSIS_PATIENCE_S": "0.1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "(patience=, $SYMBIOSIS_PATIENCE_S waits for longer)" in done.stderr


def test_no_server_starts_with_an_adapter_of_the_bases_name() -> None:
    arguments = ["serve", "demo", "--port", "0", "--memory", "33554432", "--adapters", f"demo={ADAPTERS / 'python'}"]
    done = run(*arguments)
    assert done.returncode == 2 and "an adapter cannot be named 'demo', which is the base's name" in done.stderr
    assert "Traceback" not in done.stderr
