"""SymbiosisCallback: a Trainer's logs tell what its steps asked of the executor."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import symbiosis
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import WrapError

FIGURES = {"executor_calls", "executor_round_trip_ms", "executor_wait_ms", "executor_mean_batch", "direct_products"}
TEXT = [{"input_ids": [3, 4, 5, 6, 7], "labels": [3, 4, 5, 6, 7]}] * 4


class Recorder(TrainerCallback):
    """Keeps every log as it is when its turn comes."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


class Together(TrainerCallback):
    """Two trainers begin their steps at the same time."""

    def __init__(self, ready: threading.Barrier) -> None:
        self._ready = ready

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self._ready.wait(60)


def trainer(model: nn.Module, out: Path, callbacks: list[TrainerCallback], **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(out), per_device_train_batch_size=1, save_strategy="no", disable_tqdm=True,
        **{"report_to": "none", "use_cpu": True, "max_steps": 4, "logging_steps": 2, **options},
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=TEXT, eval_dataset=TEXT, callbacks=callbacks)


@pytest.fixture
def model(llama: nn.Module, serve: Callable) -> nn.Module:
    split = symbiosis.from_executor(serve(llama).endpoint)
    return get_peft_model(split, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.called
def test_logs_hold_the_calls_of_their_steps(model: nn.Module, tmp_path: Path) -> None:
    running = trainer(model, tmp_path, [symbiosis.SymbiosisCallback()])
    before = symbiosis.stats(model).calls
    running.train()
    first, second, end = running.state.log_history
    assert first.keys() >= FIGURES and second.keys() >= FIGURES
    assert not end.keys() & FIGURES
    calls = symbiosis.stats(model).calls - before
    assert 2 * first["executor_calls"] + 2 * second["executor_calls"] == calls > 0
    assert first["executor_mean_batch"] == 1.0
    assert 0 < first["executor_round_trip_ms"] < 60_000
    assert 0 <= first["executor_wait_ms"] <= first["executor_round_trip_ms"]


def test_calls_of_an_evaluation_are_no_steps(model: nn.Module, tmp_path: Path) -> None:
    running = trainer(model, tmp_path, [symbiosis.SymbiosisCallback()], eval_strategy="steps", eval_steps=2)
    model(torch.ones(1, 4, dtype=torch.long))  # which layers go together is known from now on
    running.train()
    training = [log for log in running.state.log_history if "loss" in log]
    evaluations = [log for log in running.state.log_history if "eval_loss" in log]
    assert len(training) == len(evaluations) == 2
    assert training[0]["executor_calls"] == training[1]["executor_calls"]
    assert not any(log.keys() & FIGURES for log in evaluations)


@pytest.mark.alone
def test_mean_batch_counts_the_others(llama: nn.Module, serve: Callable, tmp_path: Path) -> None:
    """Two clients in lockstep that make the same calls: two to a product, as soon as the executor waits for both. That is from the
    second step on: it waits for who has had an answer, and is not silent for longer than the heartbeat."""
    executor = serve(llama, policy="lockstep", heartbeat_s=20.0)
    sizes: dict[str, list[float]] = {}
    both_are_ready = threading.Barrier(2)

    def train(name: str, running: Trainer) -> None:
        running.train()
        next(remote_weights(running.model)).handle.session.close()  # or the other would wait for it
        sizes[name] = [log["executor_mean_batch"] for log in running.state.log_history if "loss" in log]

    threads = []
    for name in (
        "one",
        "two",
    ):  # in one thread: to make a Trainer is to write what accelerate keeps for the whole process
        split = symbiosis.from_executor(executor.endpoint)
        model = get_peft_model(split, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
        running = trainer(model, tmp_path / name, [symbiosis.SymbiosisCallback(), Together(both_are_ready)])
        threads.append(threading.Thread(target=train, args=(name, running)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert [len(logs) for logs in sizes.values()] == [2, 2]
    for _, of_steps_3_and_4 in sizes.values():
        assert 1.0 < of_steps_3_and_4 <= 2.0


@pytest.mark.parametrize("added", ["at once", "later"])
def test_reporters_are_told(model: nn.Module, tmp_path: Path, added: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that `report_to` names, which a Trainer asks before callbacks of the user's."""
    reporters: list[Recorder] = []

    class Reporter(Recorder):
        def __init__(self) -> None:
            super().__init__()
            reporters.append(self)

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "recorder", Reporter)
    callbacks: list[TrainerCallback] = [symbiosis.SymbiosisCallback(), Recorder()]
    running = trainer(model, tmp_path, callbacks if added == "at once" else callbacks[1:], report_to=["recorder"])
    if added == "later":
        running.add_callback(callbacks[0])
    running.train()
    for asked in (*reporters, callbacks[1]):
        assert [log.keys() >= FIGURES for log in asked.logs] == [True, True, False]  # type: ignore[attr-defined]
    assert len(reporters) == 1 and running.state.log_history[0].keys() >= FIGURES


def test_tensorboard_is_told(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(model, tmp_path, [symbiosis.SymbiosisCallback()], report_to=["tensorboard"]).train()
    told = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents.*"))))
    told.Reload()
    assert {f"train/{name}" for name in FIGURES} <= set(told.Tags()["scalars"])


def test_in_front_it_serves_reporters_too(model: nn.Module, tmp_path: Path) -> None:
    early, late = Recorder(), Recorder()
    running = trainer(model, tmp_path, [early])
    running.callback_handler.callbacks.insert(0, symbiosis.SymbiosisCallback())
    running.add_callback(late)
    running.train()
    assert early.logs[0].keys() >= FIGURES
    assert late.logs[0].keys() >= FIGURES


def test_a_model_that_is_not_wrapped_is_refused(llama: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(WrapError, match="not wrapped"):
        trainer(llama, tmp_path, [symbiosis.SymbiosisCallback()]).train()
