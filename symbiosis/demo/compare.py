"""Compares a split model, alone at its executor, with the unsplit one: logits, adapter gradients and tokens, bit for bit."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import symbiosis
from symbiosis.demo.writer import PROMPT
from symbiosis.executor.model.load import load_model

NEW_TOKENS = 32


@dataclass(frozen=True)
class Comparison:
    """One kind of result, from the split and from the unsplit model."""

    model: str
    what: str
    values: int
    identical: bool
    difference: float


@dataclass(frozen=True)
class Result:
    """The results of one model."""

    tensors: dict[str, list[Tensor]]
    text: str


def compare(endpoint: str, base: Path, adapter: Path) -> tuple[list[Comparison], dict[str, str]]:
    """Compute the base and the adapter in this folder both ways. Return the comparisons, and the texts that the split models wrote.

    Both sides have one thread, as the demo's executor has, because how a product is spread over threads may change its bits.
    """
    warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    comparisons: list[Comparison] = []
    texts: dict[str, str] = {}
    for name, folder in {"base": None, "lora": adapter}.items():
        unsplit = with_adapter(load_model(str(base)), folder)
        split = with_adapter(symbiosis.from_executor(endpoint), folder)
        expected, got = compute(unsplit, tokenizer), compute(split, tokenizer)
        comparisons += hold_against(name, expected, got)
        texts[name] = got.text
    return comparisons, texts


def with_adapter(model: nn.Module, folder: Path | None) -> nn.Module:
    return model if folder is None else PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def compute(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Result:
    """Return greedy text for the prompt, the logits of that text, and the adapter's gradients from a training step on it."""
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)  # type: ignore[operator]
    model.train(isinstance(model, PeftModel))
    output = model(input_ids=tokens, labels=tokens)
    tensors = {"logits": [output.logits.detach()], "tokens": [tokens]}
    if isinstance(model, PeftModel):
        output.loss.backward()
        tensors["gradients"] = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return Result(tensors, str(tokenizer.decode(tokens[0])))


def hold_against(name: str, expected: Result, got: Result) -> Iterator[Comparison]:
    for what, tensors in expected.tensors.items():
        pairs = list(zip(tensors, got.tensors[what], strict=True))
        yield Comparison(
            name, what,
            values=sum(tensor.numel() for tensor in tensors),
            identical=all(same_bits(a, b) for a, b in pairs),
            difference=max(greatest_difference(a, b) for a, b in pairs),
        )  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal. `torch.equal` takes 0.0 and -0.0 for the same."""
    return a.shape == b.shape and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def greatest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item() if a.shape == b.shape else float("inf")
