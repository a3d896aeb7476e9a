"""Requests to an engine of this process, and the tokens that it answers with."""

from queue import SimpleQueue
from typing import Any, Protocol

from symbiosis.serving import Engine
from symbiosis.serving.request import Output, Request, Sampling, Token

LATEST_S = 300.0  # to wait for one output


class Asked(Protocol):
    """What is asked for: at most so many tokens."""

    adapter: str | None
    prompt: tuple[int, ...]
    most: int


def ask(engine: Engine, case: Asked, id: int, **how: Any) -> SimpleQueue[Output]:
    outputs: SimpleQueue[Output] = SimpleQueue()
    sampling = Sampling(max_tokens=case.most, logprobs=0, **how)
    engine.submit(Request(id=id, prompt=case.prompt, adapter=case.adapter, sampling=sampling), outputs.put)
    return outputs


def read(outputs: SimpleQueue[Output]) -> list[Token]:
    tokens: list[Token] = []
    while True:
        output = outputs.get(timeout=LATEST_S)
        if output.error is not None:
            raise RuntimeError(output.error)
        tokens += output.tokens
        if output.finish is not None:
            return tokens
