"""A client of the demo that fine-tunes a LoRA: an ordinary program of transformers' `Trainer` and PEFT."""

import argparse
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)  # fmt: skip

import symbiosis
from symbiosis.demo.data import python_text
from symbiosis.demo.events import EventOutput, base_bytes
from symbiosis.executor.model.load import DEMO_MODEL

LENGTH, BATCH = 120, 1
HELD_OUT_EVERY, HELD_OUT = 10, 8
BEGINNING = r"^[A-Z].*\ndef "  # of a passage

Example = dict[str, list[int]]


def examples(tokenizer: PreTrainedTokenizerBase, count: int) -> tuple[list[Example], list[Example]]:
    """Return random passages of documented Python, all of one length: `count` to train on, and some that are held out."""
    text = python_text()
    starts = [found.start() for found in re.finditer(BEGINNING, text, re.MULTILINE)]
    passages = list(dict.fromkeys(text[start : start + LENGTH] for start in starts if start + LENGTH <= len(text)))
    held_out = passages[::HELD_OUT_EVERY]
    del passages[::HELD_OUT_EVERY]
    rng = random.Random(0)
    return (
        _tokenized(rng.choices(passages, k=count), tokenizer),
        _tokenized(rng.sample(held_out, HELD_OUT), tokenizer),
    )


def _tokenized(passages: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    return [{"input_ids": ids, "labels": ids} for ids in tokenizer(passages)["input_ids"]]  # a token is a byte


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
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    args = parser.parse_args()
    events = EventOutput()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    train, held_out = examples(tokenizer, args.steps * BATCH)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(symbiosis.from_executor(args.endpoint), adapter)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.out), max_steps=args.steps, per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=HELD_OUT, learning_rate=3e-3, warmup_steps=args.steps // 20,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        callbacks=[symbiosis.SymbiosisCallback(), LossReport(events)],
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    events.wait_for_start(base_bytes=base_bytes(model), held_out_before=before)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    model.save_pretrained(args.out)
    stats = symbiosis.stats(model)
    events.send(held_out_after=after, calls=stats.calls, mean_batch=stats.mean_batch)


if __name__ == "__main__":
    main()
