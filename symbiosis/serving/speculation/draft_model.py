"""Drafts tokens by a smaller model, which has keys and values of its own for each text."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from symbiosis.errors import ConfigError
from symbiosis.serving.request import Token
from symbiosis.serving.runner.model_runner import ModelRunner, bytes_of
from symbiosis.serving.runner.paged_runner import CannotBatch, PagedRunner
from symbiosis.serving.sampling.sampler import begin_choice
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence
from symbiosis.serving.speculation.speculation import Drafted, agreeing

SHARE = 0.125  # of the engine's memory, for keys and values of the draft model
PIECE = 256  # tokens of a text that it computes at a time, before it drafts


@dataclass(slots=True, eq=False)
class DraftText:
    """A text as the draft model knows it."""

    of: Sequence
    own: Sequence  # with the model's own blocks
    drafts: tuple[int, ...] = ()


class DraftModelProposer:
    """Draws drafts as the tokens themselves are drawn, with the same random numbers: the more the models agree, the more of them are chosen.

    Args:
        checkpoint: A causal language model in a directory, or a hub id.
        served: The model whose texts it drafts.
        memory: Of the engine; the draft model gets a share of it besides.
    """

    def __init__(self, checkpoint: str, served: ModelRunner, memory: int | float | None) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=served.dtype).eval()
        try:
            self._runner = PagedRunner(model, max(1 << 20, int(SHARE * bytes_of(memory, served.device))))
        except CannotBatch as why:
            raise ConfigError(f"the draft model {checkpoint} cannot be used: {why}") from None
        if self._runner.vocabulary != served.vocabulary:
            raise ConfigError(
                f"the draft model {checkpoint} has {self._runner.vocabulary} tokens, and the served one {served.vocabulary}: "
                "give a draft model with the same tokenizer"
            )
        self._texts: dict[Sequence, DraftText] = {}

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Return up to so many tokens for each sequence. One whose text is not computed yet, or for which there is no memory, has none."""
        texts = [text for each, count in wanted.items() if (text := self._text(each, count)) is not None]
        behind = [text for text in texts if text.own.uncomputed > PIECE]
        if behind:
            self._compute(behind, PIECE)
        ready = [text for text in texts if text not in behind]
        while drafting := [text for text in ready if len(text.drafts) < wanted[text.of]]:
            for text, token in zip(drafting, self._compute(drafting), strict=True):
                if token is None:
                    ready.remove(text)
                    continue
                text.drafts += (token.id,)
                text.own.tokens.append(token.id)
        return {text.of: text.drafts for text in ready if text.drafts}

    def forget(self, sequence: Sequence) -> None:
        """Free what was computed of a text."""
        if (text := self._texts.pop(sequence, None)) is not None:
            self._runner.release(text.own)

    def _text(self, sequence: Sequence, count: int) -> DraftText | None:
        """Return a text with the tokens that it has by now, and with blocks for so many drafts, if there are any."""
        tokens = sequence.tokens[sequence.virtual :]
        if (text := self._texts.get(sequence)) is None:
            text = self._texts[sequence] = DraftText(
                sequence, Sequence(sequence.request, sequence.completion, tokens, None, 0.0)
            )
        own = text.own
        first = len(own.tokens) - len(text.drafts)
        agreed = first + agreeing(text.drafts, tokens[first:])
        own.tokens, own.computed, text.drafts = tokens, min(own.computed, agreed, len(tokens) - 1), ()
        if len(tokens) + count > self._runner.longest or not self._runner.blocks.grow(own, len(tokens) + count):
            return None
        return text

    @torch.inference_mode()
    def _compute(self, texts: list[DraftText], most: int | None = None) -> list[Token | None]:
        """Compute what is not computed of texts, up to so many tokens of each, and return what comes next in them."""
        segments, first = list[ScheduledRequest](), 0
        for text in texts:
            rows = min(text.own.uncomputed, most or text.own.uncomputed)
            segments.append(ScheduledRequest(text.own, first, rows, text.own.computed, True))
            text.own.computed += rows
            first += rows
        logits = self._runner.forward(SchedulerOutput(tuple(segments)))
        return begin_choice(logits, [Drafted(text.of, text.drafts) for text in texts], self._runner.ends).tokens()
