"""Reads an engine's answers in its own process: a whole completion, or its parts as they come, as text if there is a tokenizer."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Tokens
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.serving.engine.detokenize import Text, prompt_tokens
from symbiosis.serving.engine.limits import Unfit, check_count, check_length, check_types
from symbiosis.serving.request import Finish, Output, Pooling, Request, Sampling, Token

ENDS_WITH_ERROR = (Finish.ERROR, Finish.UNFIT, Finish.ABORTED)


class GenerationFailed(SymbiosisError, RuntimeError):
    """A request ended before its text did."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or a part of one."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Token, ...] = ()  # where they were asked for
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    model_version: int = 0  # of the adapter; 0: the base


class TakesRequests(Protocol):
    """An engine, as its readers see it."""

    tokenizer: Any

    @property
    def ends(self) -> frozenset[int]: ...
    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None: ...
    def cancel(self, id: int) -> None: ...
    def stop(self, id: int, completion: int = 0) -> None: ...
    def next_id(self) -> int: ...


def _strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    several = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    if not all(isinstance(each, str) for each in several):
        raise Unfit("stop", f"is a string, or several, and not {stop!r:.100}")
    check_count("stop", len(several))
    for each in several:
        check_length("stop", len(each))
    return several


class Reader:
    """Reads the answer to one request, whole or in parts. Either is done once."""

    def __init__(
        self,
        engine: TakesRequests,
        prompt: str | Tokens[int],
        adapter: str | None,
        tenant: str,
        stop: str | Iterable[str],
        sampling: dict[str, Any],
    ) -> None:
        if several := sorted(sampling.keys() & {"n", "completions"}):
            raise ConfigError(
                f"{several[0]}: one completion comes of this; ask again with another seed, or submit() a Request of several"
            )
        if unknown := sorted(set(sampling) - set(Sampling.__struct_fields__)):
            known = ", ".join(Sampling.__struct_fields__)
            raise ConfigError(f"there is no {unknown[0]} to choose tokens by: there are {known}")
        how, stops = Sampling(**sampling), _strings(stop)
        check_types(how)
        if stops and engine.tokenizer is None:
            raise ConfigError("stop strings need the model's tokenizer: give Engine(..., tokenizer=...)")
        self.engine, self.id = engine, engine.next_id()
        self._text = None
        if engine.tokenizer is not None:
            self._text = Text(engine.tokenizer, stops, how.min_tokens, silent=how.ending(engine.ends))
        tokens = prompt_tokens(engine.tokenizer, prompt)
        self.request = Request(id=self.id, prompt=tokens, sampling=how, adapter=adapter, tenant=tenant)

    def end(self) -> None:
        """End the request, of which nothing is read any more."""
        if self._text is not None and self._text.stopped:
            self.engine.stop(self.id)
        else:
            self.engine.cancel(self.id)

    def part(self, output: Output) -> Completion:
        """Return what an output adds. At a stop string the request is over, whatever the engine still computes."""
        if output.finish in ENDS_WITH_ERROR:
            raise GenerationFailed(output.error or "the first token could not come in time any more: try again later")
        finish, text, tokens = output.finish, "", output.tokens
        if self._text is not None:
            before = self._text.taken
            text = self._text.add([token.id for token in tokens])
            tokens = tokens[: self._text.taken - before]
            if self._text.stopped:
                finish = Finish.STOP
            elif finish is not None:
                text += self._text.end()
                finish = Finish.STOP if self._text.stopped else finish
        return Completion(
            text=text,
            tokens=tuple(token.id for token in tokens),
            logprobs=tokens if self.request.sampling.logprobs is not None else (),
            finish=finish,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            model_version=output.model_version,
        )

    def wait(self) -> Completion:
        """Wait for the whole completion."""
        outputs: SimpleQueue[Output] = SimpleQueue()
        self.engine.submit(self.request, outputs.put)
        parts: list[Completion] = []
        try:
            while not parts or parts[-1].finish is None:
                parts.append(self.part(outputs.get()))
        finally:
            self.end()
        return Completion(
            text="".join(part.text for part in parts),
            tokens=tuple(token for part in parts for token in part.tokens),
            logprobs=tuple(token for part in parts for token in part.logprobs),
            finish=parts[-1].finish,
            prompt_tokens=parts[0].prompt_tokens,
            cached_tokens=parts[0].cached_tokens,
            model_version=parts[0].model_version,
        )

    async def parts(self) -> AsyncIterator[Completion]:
        """Yield the parts of the completion as they come."""
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[Output]()

        def put(output: Output) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        self.engine.submit(self.request, put)
        finish = None
        try:
            while finish is None:
                part = self.part(await outputs.get())
                finish = part.finish
                yield part
        finally:
            self.end()


def vector_of(
    engine: TakesRequests, prompt: str | Tokens[int], adapter: str | None, tenant: str, pooling: Pooling
) -> list[float]:
    """Return the vector that pooling makes of a prompt."""
    request = Request(
        id=engine.next_id(), prompt=prompt_tokens(engine.tokenizer, prompt), sampling=Sampling(max_tokens=0), pooling=pooling,
        adapter=adapter, tenant=tenant,
    )  # fmt: skip
    outputs: SimpleQueue[Output] = SimpleQueue()
    engine.submit(request, outputs.put)
    try:
        told = outputs.get()
    finally:
        engine.cancel(request.id)
    if told.finish is not Finish.STOP:
        raise GenerationFailed(told.error or f"the request was {told.finish}: try again later")
    return array("f", told.vector).tolist()
