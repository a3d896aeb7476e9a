"""The answers of `/generate` and `/generate_stream`, in the words of text-generation-inference and LoRAX."""

from collections.abc import Callable
from typing import Any

import msgspec

from symbiosis.server.api_errors import ApiError
from symbiosis.server.generate_protocol import Parameters
from symbiosis.server.generation import Delta, Generation
from symbiosis.server.json_pieces import LongList, json_pieces
from symbiosis.server.long_reply import GenerationReply
from symbiosis.server.response_format import Fields, finite, told_prompt
from symbiosis.server.sse import EVENTS, JSON, SseWriter
from symbiosis.serving.engine.detokenize import special_tokens, text_of
from symbiosis.serving.request import Token

COUNTS = (b"x-prompt-tokens", b"x-generated-tokens", b"x-total-tokens")  # headers, as LoRAX has them


class GenerateReply(GenerationReply):
    """An answer with one text.

    Args:
        told: What was asked for.
        prompt: Its text, where the answer begins with it.
        ends: Tokens that end the text.
        in_list: Whether the answer is a list of one, as that of POST / is.
    """

    def __init__(
        self, generation: Generation, tokenizer: Any, told: Parameters, prompt: str, ends: frozenset[int], is_stream: bool,
        in_list: bool, done: Callable[[int], None],
    ) -> None:  # fmt: skip
        super().__init__(generation, is_stream, done)
        self._tokenizer, self._told, self._ends, self._in_list = tokenizer, told, ends, in_list
        self._text = prompt if told.return_full_text else ""
        self._count, self._last = 0, -1

    async def _whole(self, writer: SseWriter) -> None:
        whole = Delta(0)
        async for deltas in self._deltas(writer):
            for delta in deltas:
                self._read(delta)
                whole.tokens.extend(delta.tokens)
                whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
                whole.finish = delta.finish
        if not self._generation.is_whole:
            return
        answer: Fields = {"generated_text": self._text}
        if self._told.details or self._told.decoder_input_details:
            shown = LongList(self._shown(token, text_of(self._tokenizer, token.id)) for token in whole.tokens)
            prompt = told_prompt((), whole) if self._told.decoder_input_details else ()
            prefill = LongList(map(self._one, prompt))
            answer["details"] = {**self._ending(whole), "skipped_tokens": 0, "prefill": prefill, "tokens": shown}
        counts = self._generation.prompt_tokens, self._count
        headers = zip(COUNTS, (*counts, sum(counts)), strict=True)
        await writer.start([*JSON, *((name, str(count).encode()) for name, count in headers)])
        await writer.take(json_pieces([answer] if self._in_list else answer), more=False)

    async def _stream(self, writer: SseWriter) -> None:
        """Answer with an event for each token. An error before the first one is an answer of its own; a later one is an event."""
        try:
            async for deltas in self._generation.deltas():
                if not writer.has_begun:
                    await writer.start(EVENTS)
                for delta in deltas:
                    await writer.take([*self._tally(), *map(self._event, self._parts(delta))])
                    if self._generation.held is not None:
                        self._generation.let_go(delta)
        except ApiError as error:
            if not writer.has_begun:
                raise
            error.note()
            told = error.body["error"]
            await writer.take([self._event({"error": told["message"], "error_type": told["type"]})])
        await writer.take([], more=False)

    def _parts(self, delta: Delta) -> list[Fields]:
        """Return the events of what the text has gained: its characters come with the last of its tokens."""
        self._read(delta)
        texts = [""] * (len(delta.tokens) - 1) + [delta.text]
        parts: list[Fields] = [
            {"token": self._shown(token, text), "generated_text": None, "details": None}
            for token, text in zip(delta.tokens, texts, strict=False)
        ]
        if delta.finish is not None:
            if not parts:
                parts = [{"token": self._shown(Token(max(0, self._last), 0.0), delta.text)}]
            parts[-1] |= {"generated_text": self._text, "details": self._ending(delta)}
        return parts

    def _read(self, delta: Delta) -> None:
        self._text += delta.text
        self._count += len(delta.tokens)
        self._last = delta.tokens[-1].id if delta.tokens else self._last

    def _event(self, part: Fields) -> bytes:
        return b"data:%b\n\n" % msgspec.json.encode(part)

    def _ending(self, delta: Delta) -> Fields:
        reason = delta.finish
        if reason == "stop":
            reason = "eos_token" if self._last in self._ends else "stop_sequence"
        seed = self._generation.requests[0].sampling.seed if self._told.samples else None
        counts = {"prompt_tokens": self._generation.prompt_tokens, "generated_tokens": self._count}
        return {"finish_reason": reason, **counts, "seed": seed}

    def _shown(self, token: Token, text: str) -> Fields:
        alternatives = [self._one(Token(id, logprob)) for id, logprob in token.top]
        more = {"alternative_tokens": alternatives} if self._told.alternatives else {}
        is_special = token.id in special_tokens(self._tokenizer)
        return {**self._one(token), "text": text, "special": is_special, "skipped": False, **more}

    def _one(self, token: Token) -> Fields:
        return {"id": token.id, "text": text_of(self._tokenizer, token.id), "logprob": finite(token.logprob)}
