"""What the routes share: the engine, the tokenizer, the keys, and what a request may ask for."""

import asyncio
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from symbiosis.errors import ConfigError
from symbiosis.serving.engine.detokenize import Text, chat_tokens, prompt_tokens
from symbiosis.serving.engine.limits import check_tokens
from symbiosis.serving.http.failures import ApiError, unknown_model, wrong
from symbiosis.serving.http.generation import Generation
from symbiosis.serving.http.incoming.bodies import Bodies
from symbiosis.serving.http.keys import Keys, Tenant
from symbiosis.serving.http.link.http_side import RemoteEngine
from symbiosis.serving.http.link.messages import FrontOptions
from symbiosis.serving.http.schemas import Body, refusing
from symbiosis.serving.request import Request, Sampling

Made = TypeVar("Made")
LONG_TEXT = 20_000  # characters: tokens of more are made in a thread, so that nobody waits for them
ROLES = ("system", "developer", "user", "assistant", "tool")


class Front:
    """One engine, as clients see it."""

    def __init__(self, remote: RemoteEngine, tokenizer: Any, options: FrontOptions) -> None:
        self.remote, self.tokenizer, self.options = remote, tokenizer, options
        self.keys = Keys(Path(options.api_keys) if options.api_keys else None)
        self.bodies = Bodies()
        self.answered: dict[tuple[str, int], int] = {}  # by path and status
        self.started = int(time.time())

    @property
    def state(self) -> str:
        """The server's state in a word. It takes requests only while it is "serving"."""
        if not self.remote.is_there:
            return "the engine has ended"
        if self.remote.is_silent:
            return "the engine does not answer"
        return "ending" if self.remote.drained.is_set() else "serving"

    def tenant(self, request: HttpRequest) -> Tenant:
        return self.keys.tenant(request.headers.get("authorization"))

    def administrator(self, request: HttpRequest) -> None:
        self.keys.administrator(request.headers.get("authorization"))

    def count(self, path: str, status: int) -> None:
        self.answered[path, status] = self.answered.get((path, status), 0) + 1

    async def body(self, request: HttpRequest) -> bytes:
        """Return the whole body of a request, if it is not too large and comes in time."""
        return await self.bodies.read(request, self.options.max_body_bytes)

    def adapter(self, model: str) -> str | None:
        """Return the engine's name for an adapter. None is the base."""
        if not model or len(model) > 256:
            raise unknown_model(model, self.options.model)
        return None if model == self.options.model else model

    async def prompts(self, given: str | list[str | int | list[int]]) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt: one text, tokens, or a list of either."""
        several: list[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(several) > self.options.max_requests:
            raise wrong(f"at most {self.options.max_requests} prompts", "prompt")
        size = sum(len(each) for each in several if isinstance(each, str | list))
        return await self._unless_long(size, lambda: [self._tokens(each) for each in several])

    def _tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return prompt_tokens(self.tokenizer, prompt)
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise wrong("a prompt is a text or a list of tokens; several are a list of them", "prompt")
        with refusing():
            check_tokens("prompt", prompt, self.remote.welcome.vocabulary)
        return tuple(prompt)

    async def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[int, ...]:
        if own := sorted({"messages", *signature(self.tokenizer.apply_chat_template).parameters} & options.keys()):
            raise wrong(f"chat_template_kwargs may not have {own[0]!r}, which is the server's", "chat_template_kwargs")
        plain = [_plain(message) for message in messages]
        size = sum(len(str(message.get("content"))) for message in plain)
        try:
            return await self._unless_long(size, lambda: chat_tokens(self.tokenizer, plain, **options))
        except ConfigError as error:
            raise wrong(str(error), "messages") from None

    async def _unless_long(self, size: int, make: Callable[[], Made]) -> Made:
        return await asyncio.to_thread(make) if size > LONG_TEXT else make()

    def room(self, prompts: list[tuple[int, ...]], wanted: int | None, default: int | None, name: str) -> int:
        """Return how many tokens a completion may have: `wanted` if they fit; else it is an error."""
        longest, length = self.remote.welcome.longest, max(map(len, prompts))
        left = longest - length
        if left < (0 if wanted == 0 else 1) or (wanted or 0) > left:
            raise wrong(
                f"the model takes {longest} tokens, and this would be {length} of the prompt and {wanted or 1} more: "
                f"shorten the prompt, or {name}",
                "messages" if name == "max_completion_tokens" else "prompt",
                "context_length_exceeded",
            )
        return min(left, default or left) if wanted is None else wanted

    def begin(
        self, tenant: Tenant, body: Body, prompts: list[tuple[int, ...]], sampling: Sampling, prompt_logprobs: bool
    ) -> tuple[Generation, Callable[[], None]]:
        """Begin a generation. Return it, and what to call at its end."""
        if (before := body.continuation) and before.tokens and len(before.tokens) != len(prompts) * body.completions:
            raise wrong("continuation has a list of tokens for each choice", "continuation")
        requests = [
            Request(
                id=self.remote.next_id(),
                prompt=prompt,
                sampling=sampling,
                adapter=self.adapter(body.model),
                tenant=tenant.name,
                completions=body.completions,
                prompt_logprobs=prompt_logprobs,
                chosen=before.chosen(number, body.completions) if before else (),
                ended=before.ended_of(number, body.completions) if before else (),
            )
            for number, prompt in enumerate(prompts)
        ]
        completions = len(requests) * body.completions
        if self.remote.drained.is_set():
            raise ApiError(503, "the server is ending: ask another one", retry_s=10.0)
        if self.remote.under_way + len(requests) > self.options.max_requests:
            raise ApiError(503, f"{self.remote.under_way} requests are under way: try again later", retry_s=1.0)
        tenant.admit(completions, self.keys.clock())
        tenant.spend(sum(map(len, prompts)))
        generation = Generation(self.remote, requests, lambda: self._text(body), tenant.spend)
        generation.begin()
        return generation, lambda: tenant.leave(completions)

    def _text(self, body: Body) -> Text:
        return Text(self.tokenizer, body.stops, body.min_tokens or 0, special=body.skip_special_tokens is False)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one text, as templates expect it."""
    content = message.get("content")
    if (role := message.get("role")) not in ROLES:
        raise wrong(f"each message has a role: {', '.join(ROLES)}, and not {str(role)[:100]!r}", "messages")
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise wrong("a message's content is text, or a list of parts", "messages")
        return message
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise wrong("messages may have parts of the type text only: this server reads no images or sound", "messages")
    return {**message, "content": "\n".join(map(str, parts))}
