"""A `transformers.TrainerCallback` that adds to a Trainer's logs what its steps asked of the executor."""

import inspect
from copy import copy
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from symbiosis.client.stats import Stats
from symbiosis.client.wrap import stats


class SymbiosisCallback(TrainerCallback):
    """Adds to every log of training steps, over the steps since the log before:

    * `executor_calls`: calls per step,
    * `executor_round_trip_ms`: time per step that this client spent in calls,
    * `executor_wait_ms`: time per step that its calls waited in the executor's queue,
    * `executor_mean_batch`: how many calls ran as one product, as this client's calls met others,
    * `direct_products`: products per step that this client made itself, by weights that it has mapped.

    They are printed, kept in `trainer.state.log_history`, and told to whatever `report_to` names, such as TensorBoard.

    >>> import symbiosis
    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import Trainer, TrainingArguments
    >>> with symbiosis.Executor("demo") as executor:
    ...     model = get_peft_model(symbiosis.from_executor(executor.endpoint), LoraConfig(task_type="CAUSAL_LM"))
    ...     text = [{"input_ids": list(b"one base model"), "labels": list(b"one base model")}] * 2
    ...     options = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    ...     arguments = TrainingArguments("unused", disable_tqdm=True, **options)
    ...     trainer = Trainer(model, arguments, train_dataset=text, callbacks=[symbiosis.SymbiosisCallback()])
    ...     _ = trainer.train()  # doctest: +ELLIPSIS
    {'loss': ..., 'executor_calls': ..., 'executor_round_trip_ms': ..., 'executor_wait_ms': ..., 'executor_mean_batch': ..., 'direct_products': ...}
    ...
    >>> trainer.state.log_history[0]["executor_mean_batch"]
    1.0
    """

    def __init__(self) -> None:
        self._before = Stats()
        self._step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _put_first(self)
        self._mark(kwargs["model"], state)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        steps = state.global_step - self._step
        if steps > 0:  # else a log of an evaluation, or of the end
            figures = figures_per_step(self._before, stats(kwargs["model"]), steps)
            kwargs["logs"].update(figures)
            state.log_history[-1].update(figures)
        self._mark(kwargs["model"], state)

    def _mark(self, model: nn.Module, state: TrainerState) -> None:
        self._before, self._step = copy(stats(model)), state.global_step


def _put_first(callback: TrainerCallback) -> None:
    """Put the callback before a Trainer's reporters. The Trainer asks these before callbacks of the user's, whose additions to a log
    would come too late. A callback is not told which handler calls it, so the handler is looked for among the callers."""
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back


def figures_per_step(before: Stats, now: Stats, steps: int) -> dict[str, float]:
    """Return a client's figures between two moments, for each of `steps` steps."""
    calls = now.calls - before.calls
    return {
        "executor_calls": calls / steps,
        "executor_round_trip_ms": 1e3 * (now.round_trip_s - before.round_trip_s) / steps,
        "executor_wait_ms": 1e3 * (now.wait_s - before.wait_s) / steps,
        "executor_mean_batch": (now.batched_calls - before.batched_calls) / calls if calls else 0.0,
        "direct_products": (now.direct - before.direct) / steps,
    }
