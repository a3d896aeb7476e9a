"""An engine over two ranks: the answers of one process, adapters on all ranks or none, and ranks that are killed or freeze."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from peft import LoHaConfig, LoraConfig, PromptTuningConfig, get_peft_model

import symbiosis
from symbiosis.base import pulse
from symbiosis.errors import AdapterError, ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from symbiosis.serving.engine.reader import Completion
from symbiosis.serving.request import Output, Request, Sampling
from symbiosis.serving.tensor_parallel import leading_runner
from symbiosis.serving.tensor_parallel.leading_runner import LeadingRunner
from tests.serving_api import Command, client, eventually

pytestmark = [pytest.mark.full, pytest.mark.long, pytest.mark.timeout(400), pytest.mark.xdist_group("tensor_engine")]

PROMPT = b"def average(numbers):"
WAIT_S = 300.0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("tensor") / "executor.sock"
    with symbiosis.Executor("demo", listen=(f"local://{path}",)) as executor:
        yield executor.endpoint


@pytest.fixture(scope="module")
def alone(endpoint: str) -> Iterator[Engine]:
    with Engine(endpoint, adapters=DEMO_MODEL / "adapters", memory=1 << 23) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(endpoint: str) -> Iterator[Engine]:
    with Engine(endpoint, adapters=DEMO_MODEL / "adapters", memory=1 << 23, devices=("cpu", "cpu")) as engine:
        yield engine


def leading(engine: Engine) -> LeadingRunner:
    assert isinstance(engine._served, LeadingRunner)
    return engine._served


def answer(engine: Engine, adapter: str | None = None, **how: Any) -> Completion:
    return engine.generate(list(PROMPT), adapter=adapter, **({"max_tokens": 24, "temperature": 0.0} | how))


@pytest.mark.parametrize("adapter", [None, "python", "shout", "whisper"])
def test_the_answers_are_those_of_one_process(engine: Engine, alone: Engine, adapter: str | None) -> None:
    assert answer(engine, adapter).tokens == answer(alone, adapter).tokens
    assert (
        answer(engine, adapter, seed=5, temperature=1.0).tokens
        == answer(alone, adapter, seed=5, temperature=1.0).tokens
    )
    assert answer(engine, adapter).cached_tokens == answer(alone, adapter).cached_tokens > 0  # prefixes are found


def adapter_of(config: Any, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def test_an_adapter_may_be_replaced_and_removed(engine: Engine, alone: Engine, tmp_path: Path) -> None:
    first = adapter_of(
        LoraConfig(r=3, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM"), tmp_path / "a"
    )
    second = adapter_of(PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"), tmp_path / "b")
    for source in (first, second):
        for each in (engine, alone):
            each.add("mine", source)
        assert answer(engine, "mine").tokens == answer(alone, "mine").tokens
    for each in (engine, alone):
        each.remove("mine")
    with pytest.raises(AdapterError):
        answer(engine, "mine")
    answer(engine)  # with which ranks hear that nobody wants it
    assert len(leading(engine)._handed) == len(engine.adapters())


def test_what_ranks_cannot_compute_is_refused_by_name(engine: Engine, endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="LOHA is computed by PEFT's own layers"):
        engine.add("odd", adapter_of(LoHaConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), tmp_path / "a"))
    with pytest.raises(ConfigError, match="local://"):
        Engine("tcp://127.0.0.1:7000", devices=("cpu", "cpu"))


def test_an_adapter_that_one_rank_cannot_take_is_on_none(engine: Engine, tmp_path: Path) -> None:
    """The second rank is told of a piece that does not fit its layers."""
    served = leading(engine)
    before, names = len(served._handed), engine.adapter_names()
    load = served._followers.load

    def spoilt(pieces: Any, memories: Any) -> int:
        with open(f"/proc/self/fd/{memories[0]}", "wb") as file:  # noqa: PTH123
            file.write(b"nothing that could be read")
        return load(pieces, memories)

    served._followers.load = spoilt  # type: ignore[method-assign]
    folder = adapter_of(LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), tmp_path)
    try:
        with pytest.raises(AdapterError, match="rank 1 cannot take its piece"):
            engine.add("broken", folder)
    finally:
        del served._followers.load  # type: ignore[method-assign]
    assert len(served._handed) == before and engine.adapter_names() == names
    engine.add("broken", folder)  # nothing is left of the attempt
    assert answer(engine, "broken").tokens
    engine.remove("broken")


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_requests_go_on_when_a_rank_is_lost(
    engine: Engine, alone: Engine, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(pulse, "SILENT_S", 6.0)
    jobs: list[tuple[str | None, int | None]] = [(None, None), ("python", None), ("shout", 3), (None, 4)]
    how = {"max_tokens": 120, "ignore_eos": True}
    expected = [
        answer(alone, adapter, seed=seed, temperature=0.0 if seed is None else 1.0, **how).tokens
        for adapter, seed in jobs
    ]
    told: dict[int, list[int]] = {}
    ends: dict[int, Output] = {}

    def on_output(output: Output) -> None:
        told.setdefault(output.request, []).extend(token.id for token in output.tokens)
        if output.finish is not None:
            ends[output.request] = output

    ids = []
    for adapter, seed in jobs:
        sampling = Sampling(seed=seed, temperature=0.0 if seed is None else 1.0, max_tokens=120, ignore_eos=True)
        ids.append(engine.next_id())
        engine.submit(Request(id=ids[-1], prompt=tuple(PROMPT), adapter=adapter, sampling=sampling), on_output)
    eventually(lambda: all(len(told.get(id, ())) > 5 for id in ids), WAIT_S)
    began = time.monotonic()
    os.kill(leading(engine).rank_pids[0], number)
    eventually(lambda: len(ends) == len(ids), WAIT_S)
    assert time.monotonic() - began < WAIT_S
    assert [ends[id].error for id in ids] == [None] * len(ids)
    assert [tuple(told[id]) for id in ids] == expected
    assert answer(engine, "whisper").tokens == answer(alone, "whisper").tokens  # which was loaded before


@pytest.mark.fault
def test_a_rank_that_dies_while_ranks_meet_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one would wait for it for ten minutes."""
    runner, meet, met = leading(engine), leading_runner.rank_group, list[int]()

    def group(*words: Any) -> Any:
        if not met:
            os.kill(runner.rank_pids[0], signal.SIGKILL)
        met.append(1)
        return meet(*words)

    expected = answer(engine).tokens
    monkeypatch.setattr(leading_runner, "rank_group", group)
    began = time.monotonic()
    os.kill(runner.rank_pids[0], signal.SIGKILL)
    assert answer(engine).tokens == expected
    assert len(met) == 2 and time.monotonic() - began < 240


def test_a_server_over_two_ranks() -> None:
    """The command, over HTTP."""
    with (
        closing(Command("--devices", "cpu", "--ranks", "2", forked=True)) as server,
        closing(Command(forked=True)) as single,
    ):
        body: dict[str, Any] = {"prompt": PROMPT.decode(), "max_tokens": 16, "temperature": 0}
        for model in ("demo", "python"):
            texts = [
                client(each.url).completions.create(model=model, **body).choices[0].text for each in (server, single)
            ]
            assert texts[0] == texts[1] != ""


def test_ranks_that_die_again_and_again_are_given_up(endpoint: str) -> None:
    with Engine(endpoint, memory=1 << 23, devices=("cpu", "cpu")) as engine:
        leading(engine)._restarts.extend([time.monotonic()] * 5)
        os.kill(leading(engine).rank_pids[0], signal.SIGKILL)
        with pytest.raises(Exception, match="ranks were lost 5 times within 60 s"):
            answer(engine)
        assert engine.has_lost_ranks
