"""The checkpoint of a model is overwritten while a cluster serves it: no two bases answer under its name."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from symbiosis.executor.model.checkpoint import DEMO_MODEL
from tests.cluster import AS_FRONT, Running, cluster
from tests.processes import run
from tests.serving_api import client, eventually, web

FILE = """
port: 0
models:
  base:
    model: {model}
    servers: {servers}
    executor: {{batch-invariant: true, share-weights: {mapped}}}
    server: {{memory: 64MiB, max-batch: 4}}
"""
PROMPT = "def average(numbers):"
SOON_S = 100.0
pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture
def model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("up")))  # the paths of sockets are short
    folder = tmp_path / "model"
    folder.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def overwrite(model: Path) -> None:
    """Put another base of the same shape into the place of this one."""
    file = model / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    changed = {
        name: each + 0.5 * each.std() * torch.randn(each.shape, generator=generator) if "mlp" in name else each
        for name, each in load_file(file).items()
    }
    save_file(changed, file.with_suffix(".new"), {"format": "pt"})
    file.with_suffix(".new").replace(file)


def alone(model: Path, tokens: int) -> str:
    ids = torch.tensor([list(PROMPT.encode())])
    made: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.generation_config.eos_token_id = None
    told = made.generate(ids, max_new_tokens=tokens, do_sample=False)[0, len(PROMPT) :]
    return str(AutoTokenizer.from_pretrained(DEMO_MODEL).decode(told, skip_special_tokens=True))


def ask(url: str, tokens: int = 30, **fields: Any) -> Any:
    body = {"model": "base", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, **fields}
    return client(url).completions.create(**body, extra_body={"ignore_eos": True})


def states(running: Running) -> dict[str, str]:
    return {each.name: each.state for each in running.told.members if each.kind != "front"}


def kill(running: Running, *names: str) -> None:
    for each in running.told.members:
        if each.name in names:
            os.kill(each.pid, signal.SIGKILL)
    eventually(lambda: all(states(running)[name] != "ready" for name in names))


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[Running]:
    with cluster(tmp_path, FILE.format(model=model, servers=2, mapped="true"), forked=True) as found:
        yield found


def test_a_model_has_one_base_until_it_is_rolled(running: Running, model: Path, tmp_path: Path) -> None:
    old = alone(model, 250)
    overwrite(model)
    new = alone(model, 30)
    assert new != old[: len(new)]
    kill(running, "base-executor-1", "base-server-2")
    eventually(lambda: states(running)["base-executor-1"] == "other-base", SOON_S)
    time.sleep(1.0)
    assert states(running) == {
        "base-executor-1": "other-base", "base-server-1": "ready", "base-server-2": "starting",
    }  # fmt: skip
    assert all(old.startswith(ask(running.url).choices[0].text) for _ in range(3))
    shown = " ".join(run("cluster", "status", **os.environ).stdout.split())
    assert "base-executor-1" in shown and "symbiosis cluster roll --only base" in shown
    told = web.get(f"{running.url}/metrics").text
    assert re.search(r'^symbiosis_cluster_other_base{.*member="base-executor-1".*} 1.0$', told, re.MULTILINE)
    log = (tmp_path / "stderr").read_text()
    assert len(re.findall("base-executor-1 serves another base", log)) == 1
    refused = run("cluster", "roll", "--only", "base-server-1", **os.environ).stderr
    assert "base-executor-1 serves another base" in refused and "roll --only base`" in refused

    found: list[str] = ["", "", ""]

    def read(number: int) -> None:
        for event in ask(running.url, 250, stream=True):
            found[number] += event.choices[0].text

    reading = [threading.Thread(target=read, args=[number]) for number in range(len(found))]
    for thread in reading:
        thread.start()
    eventually(lambda: all(found))
    assert run("cluster", "roll", "--only", "base", seconds=200, **os.environ).returncode == 0
    for thread in reading:
        thread.join(60)
    assert found == [old] * len(found), "what was begun on the old base ends there"
    eventually(lambda: set(states(running).values()) == {"ready"}, SOON_S)
    assert {ask(each.url, extra_headers=AS_FRONT).choices[0].text for each in running.servers()} == {new}
    assert len({each.fingerprint for each in running.told.members if each.kind != "front"}) == 1


@pytest.mark.full
def test_a_server_that_cannot_go_on_gets_the_base_of_its_executor(model: Path, tmp_path: Path) -> None:
    """It has mapped no weights, and is the only one: nothing is left of the old base. A stream goes on with no other one."""
    old = alone(model, 400)
    with cluster(tmp_path, FILE.format(model=model, servers=1, mapped="false")) as running:
        overwrite(model)
        new, text = alone(model, 30), ""
        with pytest.raises(Exception, match="another base by now"):  # noqa: PT012
            for number, event in enumerate(ask(running.url, 400, stream=True)):
                text += event.choices[0].text
                if number == 3:
                    kill(running, "base-executor-1")
        assert text and old.startswith(text)
        eventually(lambda: set(states(running).values()) == {"ready"}, SOON_S)
        assert ask(running.url).choices[0].text == new
