"""A base is exchanged while it is served and trained on: the new one comes, the traffic moves, the old one ends when nobody uses it any more."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.cluster.controller.control_socket import send_order
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from tests.cluster import Running, cluster_at
from tests.serving_api import client, eventually, web

COMMON = "port: 0\nidle_s: 2\nfront_ends: 2\nmodels:\n"
MODEL = "  {name}: {{model: {path}, executor: {{batch-invariant: true}}, server: {{memory: 64MiB, max-batch: 16}}}}\n"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of other weights."""
    new = tmp_path_factory.mktemp("new") / "model"
    shutil.copytree(DEMO_MODEL, new, ignore=shutil.ignore_patterns("adapters"))
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    model.save_pretrained(new)
    return {"old": DEMO_MODEL, "new": new}


def text(versions: dict[str, Path], names: str, aliases: str) -> str:
    models = "".join(MODEL.format(name=name, path=versions[name]) for name in names.split())
    return f"{COMMON}{models}aliases: {aliases}\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Path]) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("exchange")
    with cluster_at(folder, text(versions, "old", "{chat: {old: 1}}"), forked=True) as found:
        yield found


def apply(running: Running, changed: str) -> str:
    file = Path(os.environ["XDG_RUNTIME_DIR"]) / "test.yaml"
    file.write_text(changed)
    return send_order("test", "apply", str(file))


def ask(api: openai.OpenAI, model: str = "chat", **fields: Any) -> Any:
    return api.completions.create(model=model, prompt="def f(", temperature=0, **{"max_tokens": 8, **fields})


def is_unknown(api: openai.OpenAI, model: str) -> bool:
    try:
        return not ask(api, model, max_tokens=1).choices
    except openai.NotFoundError:
        return True


def train(model: Any, steps: int, between: Any = None) -> list[torch.Tensor]:
    """Train an adapter, and return it."""
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for number in range(steps):
        ids = torch.arange(16)[None] + number
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if between is not None:
            between(number)
    return [each.detach().clone() for each in trained]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda versions: text(versions, "old", "{chat: {old: 1}}") + "frozen_s: 7\n", "frozen_s: only models"),
        (lambda versions: text(versions, "old", "{}").replace("16", "8"), "models.old: server differs"),
        (lambda versions: text(versions, "old", "{chat: {new: 1}}"), "there is no model 'new'"),
        (lambda versions: text({**versions, "new": Path("/nowhere")}, "old new", "{}"), "models.new: "),
    ],
)
def test_what_cannot_be_applied_is_said_and_changes_nothing(
    running: Running, versions: dict[str, Path], changed: Any, told: str
) -> None:
    before = running.told
    with pytest.raises(ConfigError, match=told):
        apply(running, changed(versions))
    assert running.told.members == before.members and running.told.aliases == before.aliases


def test_a_model_that_cannot_start_is_given_up(running: Running, versions: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(versions["new"], broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    before = running.told
    with pytest.raises(ConfigError, match="new"):
        apply(running, text({**versions, "new": broken}, "old new", "{chat: {old: 1}}"))
    eventually(lambda: running.told.members == before.members)
    assert ask(client(running.url)).model == "old"


@pytest.mark.fault
def test_a_front_end_that_is_killed_breaks_its_own_connections_only(running: Running) -> None:
    fronts = running.told.of_kind("front")
    one, other = (client(each.url) for each in fronts)
    fields = {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
    lost, kept = ask(one, **fields), ask(other, **fields)
    next(iter(lost)), next(iter(kept))
    os.kill(fronts[0].pid, signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.TransportError)):
        list(lost)
    assert ask(client(running.url)).model == "old"
    assert list(kept)[-1].choices[0].finish_reason == "length"
    eventually(lambda: len([each for each in running.told.of_kind("front") if each.state == "ready"]) == 2)
    assert fronts[0].pid not in {each.pid for each in running.told.members}


def test_a_base_is_exchanged_under_training_and_serving(running: Running, versions: dict[str, Path]) -> None:
    api, streamed = client(running.url), []
    wanted = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in versions.items()}
    adapter = train(wanted["old"], 6)
    old = {each.kind: each.pid for each in running.told.members}
    assert ask(api).model == "old"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("new")

    def exchange(step: int) -> None:
        """Between the steps of a trainer, and while a stream of the old base is read."""
        if step == 0:
            assert apply(running, text(versions, "old new", "{chat: {old: 1}}")) == "served now: new"
            assert ask(api).model == "old" and ask(api, "new").model == "new"
        if step == 1:
            send_order("test", "shift", "chat", shares={"old": 0.5, "new": 0.5})
            eventually(lambda: {ask(api, max_tokens=1).model for _ in range(10)} == {"old", "new"})
        if step == 2:
            stream = ask(api, "old", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
            streamed.append(next(iter(stream)))
            reading = threading.Thread(target=lambda: streamed.extend(stream))
            reading.start()
            told = apply(running, text(versions, "new", "{chat: {new: 1}}"))
            assert told == "ending when nobody uses them any more: old"
            reading.join(60)
            eventually(lambda: running.told.retiring == ("old",))
            fronts = [client(each.url) for each in running.told.of_kind("front")]  # each hears of it by itself
            eventually(lambda: all(is_unknown(front, "old") for front in fronts))
            assert ask(api, max_tokens=1).model == "new"
            with pytest.raises(ConfigError, match="this model retires"):
                symbiosis.from_executor("symbiosis://old")
            with pytest.raises(ConfigError, match="still retires"):
                apply(running, text(versions, "old new", "{chat: {new: 1}}"))
            eventually(lambda: not [each for each in running.told.of_kind("server") if each.model == "old"])
        assert old["executor"] in {each.pid for each in running.told.members}

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    symbiosis.wrap(model, "symbiosis://old")
    found = train(model, 6, exchange)
    assert all(torch.equal(one, other) for one, other in zip(found, adapter, strict=True))
    assert len("".join(choice.text for event in streamed for choice in event.choices)) > 0
    assert streamed[-1].choices[0].finish_reason == "length"
    symbiosis.unwrap(model, DEMO_MODEL)
    eventually(lambda: not running.told.retiring)
    assert {each.model for each in running.told.members if each.kind != "front"} == {"new"}
    assert not Path(f"/proc/{old['executor']}").exists()
    assert web.get(f"{running.url}/health").status_code == 200
