"""The owner of an adapter: trains it and uses it through executors, and keeps the truth that attacks are scored against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import symbiosis
from symbiosis.audit.recorder import Recorder
from symbiosis.base.layer_names import modules_in_base
from symbiosis.client.layers.layer_plan import base_model
from symbiosis.client.privacy.masked_session import Privacy
from symbiosis.demo.data import blocks, shouting_text
from symbiosis.executor.model.load import load_model
from symbiosis.protocol import Op

TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj")
RANK = 8
LENGTH, TRAIN_BATCH = 48, 4
BYTES = 256  # tokens of the demo model that stand for something
HELD_OUT = 32
AT_ONCE = 12 * BYTES  # tokens of which there are many
GATED = frozenset(f"model.layers.0.mlp.{name}" for name in ("gate_proj", "down_proj"))
ATTENDED = frozenset({"model.layers.0.self_attn.o_proj"})


@dataclass(frozen=True)
class Size:
    """How much the owner does. Every token is sent `first` times as the first of a sequence, and one prompt `repeats` times. For the equations
    of the adapter, `tokens` more are sent, of known text and as first ones."""

    steps: int
    logged_steps: int
    known: int
    first: int
    distil_steps: int
    tokens: int = 0
    repeats: int = 24


FULL = Size(steps=40, logged_steps=12, known=64, first=12, distil_steps=160, tokens=1 << 15)
QUICK = Size(steps=16, logged_steps=8, known=40, first=6, distil_steps=100)


class Truth:
    """The rows that a model's layers were given, forward and backward, in order, by the names of the layers."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.rows: dict[tuple[Op, str], list[Tensor]] = {}
        self.keeps = False
        for _, name, module in modules_in_base(base_model(model)):
            if name in layers and isinstance(module, nn.Linear):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def given(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            self._keep(Op.FORWARD, name, inputs[0])
            if y.requires_grad:
                y.register_hook(lambda dy: self._keep(Op.DGRAD, name, dy))

        return given

    def _keep(self, op: Op, name: str, rows: Tensor) -> None:
        if self.keeps:
            kept = rows.detach().reshape(-1, rows.shape[-1]).clone()
            self.rows.setdefault((op, name), []).append(kept)


def linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


@dataclass
class Work:
    """The data that the client trains on and asks for. Every level gets the same."""

    training: Tensor
    known: Tensor
    prompt: Tensor
    held_out: Tensor
    more: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, size: Size) -> "Work":
        counts = (TRAIN_BATCH * (size.steps + size.logged_steps), size.known, 1, HELD_OUT, -(-size.tokens // LENGTH))
        examples = torch.tensor(blocks(shouting_text(), tokenizer, LENGTH, sum(counts), seed=1))
        return cls(*examples.split(counts))


@dataclass
class Owner:
    """A trained model with its adapter, the truth about its rows, and what it made of held-out text."""

    model: Any
    truth: Truth
    tokens: dict[str, list[Tensor]]  # of each call of the model, by phase
    logits: Tensor

    @property
    def adapter(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}


def own(endpoint: str, privacy: Privacy | None, recorders: Sequence[Recorder], work: Work, size: Size) -> Owner:
    """Wrap, train and ask, as an ordinary program would. The `recorders` note the phase."""

    def begin(phase: str | None) -> None:
        truth.keeps = phase is not None
        for recorder in recorders:
            recorder.server.dispatch.phase = phase

    for recorder in recorders:
        recorder.server.dispatch.phase = "join"
    torch.manual_seed(0)
    model = symbiosis.wrap(load_model("demo"), endpoint, privacy=privacy)
    layers = linear_layers(model)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, config)  # type: ignore[arg-type]
    truth, tokens = Truth(adapted, layers), {}  # type: ignore[var-annotated]
    begin(None)
    tokens["train"] = train(adapted, work.training, size, lambda: begin("train"))

    def ask(phase: str | None, ids: list[Tensor]) -> list[Tensor]:
        begin(phase)
        with torch.no_grad():
            answers = [adapted(input_ids=one).logits for one in ids]
        if phase:
            tokens[phase] = ids
        return answers

    adapted.eval()
    ask("known", list(work.known.split(8)))
    ask("repeat", [work.prompt] * size.repeats)
    ask("first", [torch.arange(BYTES)[:, None]] * size.first)
    begin(None)
    if recorders and size.tokens:
        many_tokens(adapted, recorders, work, size)
    for recorder in recorders:
        recorder.server.dispatch.lose = 8
    ask("retry", [work.known[:4]])
    logits = torch.cat(ask(None, [work.held_out]))
    return Owner(adapted, truth, tokens, logits)


def many_tokens(model: Any, recorders: Sequence[Recorder], work: Work, size: Size) -> None:
    """Send known text, and tokens that are the first of a sequence. Only what shows the adapter is written down."""
    firsts = torch.arange(BYTES)[:, None].repeat(-(-size.tokens // BYTES), 1)
    for phase, layers, ids in (("more known", GATED, work.more), ("more first", ATTENDED, firsts)):
        for recorder in recorders:
            recorder.server.dispatch.phase, recorder.server.dispatch.only = phase, layers
        for some in ids.split(AT_ONCE // ids.shape[1]):
            with torch.no_grad():
                model(input_ids=some)
    for recorder in recorders:
        recorder.server.dispatch.only = None


def train(model: Any, ids: Tensor, size: Size, log: Callable[[], None]) -> list[Tensor]:
    """Train step after step. Then compute and log the gradients of more batches without steps between them, and return their tokens."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    batches = list(ids.split(TRAIN_BATCH))
    model.train()
    for number, batch in enumerate(batches):
        if number == size.steps:
            log()
        model(input_ids=batch, labels=batch).loss.backward()
        if number < size.steps:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()
    return batches[size.steps :]
