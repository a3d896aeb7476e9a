"""A client of the demo that writes text with the base model while another trains on it."""

import argparse
import time

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

import symbiosis
from symbiosis.demo.events import EventOutput, base_bytes
from symbiosis.executor.model.load import DEMO_MODEL

PROMPT = "This method "
TOKENS_PER_TEXT, TOKENS_PER_EVENT = 160, 8


class TokenCount(BaseStreamer):
    """Counts tokens as `generate` makes them."""

    def __init__(self, events: EventOutput, tokenizer: PreTrainedTokenizerBase) -> None:
        self._events, self._tokenizer = events, tokenizer
        self._begun, self.done = time.perf_counter(), 0
        self._text: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if value.dim() > 1:  # the prompt
            self._text = value.flatten().tolist()
            return
        self._text += value.tolist()
        self.done += 1
        if self.done % TOKENS_PER_EVENT == 0:
            self.send()

    def end(self) -> None:
        self.send()

    def send(self) -> None:
        speed = self.done / (time.perf_counter() - self._begun)
        self._events.send(done=self.done, tokens_per_s=speed, text=self._tokenizer.decode(self._text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    events = EventOutput()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = symbiosis.from_executor(args.endpoint)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(model.device)
    events.wait_for_start(base_bytes=base_bytes(model))
    progress = TokenCount(events, tokenizer)
    while (left := args.tokens - progress.done) > 0:
        options = {"max_new_tokens": min(left, TOKENS_PER_TEXT), "do_sample": True, "temperature": 0.7}
        model.generate(**prompt, **options, streamer=progress)  # type: ignore[operator]
    stats = symbiosis.stats(model)
    events.send(calls=stats.calls, mean_batch=stats.mean_batch)


if __name__ == "__main__":
    main()
