"""The tasks of the demo's two trainers, each with a PEFT method of its own."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from peft import LoraConfig, OFTConfig, PeftConfig
from transformers import PreTrainedTokenizerBase

from symbiosis.demo.data import python_text, shouting_text

PROMPT = "This method "
LENGTH, BATCH = 120, 2
HELD_OUT_EVERY, HELD_OUT = 10, 48

Example = dict[str, list[int]]


@dataclass(frozen=True)
class AdapterTask:
    """An adapter, its text, where passages of that text begin, and how fast it learns."""

    title: str
    text: Callable[[], str]
    beginning: str
    config: Callable[[], PeftConfig]
    learning_rate: float


TASKS = {
    "lora": AdapterTask(
        "LoRA learns Python",
        python_text,
        r"^[A-Z].*\ndef ",
        lambda: LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        learning_rate=3e-3,
    ),
    "oft": AdapterTask(
        "OFT learns to shout",
        shouting_text,
        r"^",
        lambda: OFTConfig(oft_block_size=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        learning_rate=1e-3,
    ),
}


def examples(task: AdapterTask, tokenizer: PreTrainedTokenizerBase, count: int) -> tuple[list[Example], list[Example]]:
    """Return random passages of the task's text, all of one length: `count` to train on, and some that are held out."""
    text = task.text()
    starts = [found.start() for found in re.finditer(task.beginning, text, re.MULTILINE)]
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
