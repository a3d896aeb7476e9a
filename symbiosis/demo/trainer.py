"""A client of the demo that fine-tunes an adapter: an ordinary program of transformers' `Trainer` and PEFT."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import symbiosis
from symbiosis.demo.events import EventOutput, base_bytes
from symbiosis.demo.tasks import BATCH, LENGTH, TASKS, examples
from symbiosis.executor.model.load import DEMO_MODEL


class LossReport(TrainerCallback):
    """Sends the loss of every step."""

    def __init__(self, events: EventOutput) -> None:
        self._events, self._begun = events, time.perf_counter()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begun = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            tokens = state.global_step * BATCH * LENGTH
            speed = tokens / (time.perf_counter() - self._begun)
            self._events.send(done=state.global_step, loss=float(logs["loss"]), tokens_per_s=speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    args = parser.parse_args()
    events = EventOutput()
    torch.manual_seed(0)
    task = TASKS[args.task]
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    train, held_out = examples(task, tokenizer, args.steps * BATCH)
    model = get_peft_model(symbiosis.from_executor(args.endpoint), task.config())
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.out), max_steps=args.steps, per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH, learning_rate=task.learning_rate, warmup_steps=args.steps // 20,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        callbacks=[symbiosis.SymbiosisCallback(), LossReport(events)],
    )  # fmt: skip
    events.wait_for_start(base_bytes=base_bytes(model))
    events.send(held_out_before=trainer.evaluate()["eval_loss"])
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    model.save_pretrained(args.out)
    stats = symbiosis.stats(model)
    events.send(held_out_after=after, calls=stats.calls, mean_batch=stats.mean_batch)


if __name__ == "__main__":
    main()
