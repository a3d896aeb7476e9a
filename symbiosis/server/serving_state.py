"""What the routes share: the engine, the tokenizer, the keys, and what a request may ask for."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.base.folders import Use, user_folder
from symbiosis.server import metrics
from symbiosis.server.api_app import ApiState
from symbiosis.server.api_errors import ApiError, busy, too_many_at_once, unknown_model, wrong
from symbiosis.server.api_keys import Admission, Tenant
from symbiosis.server.generation import Generation
from symbiosis.server.ipc.engine_client import EngineClient
from symbiosis.server.ipc.engine_ipc import FrontOptions
from symbiosis.server.labelled_figures import Key
from symbiosis.server.openai_protocol import Body, ChatBody, Continuation, refused
from symbiosis.server.prompts import Prompts, too_long
from symbiosis.server.request_record import this_request
from symbiosis.server.response_store import ResponseStore
from symbiosis.server.tinker.checkpoint_store import PRIVATE, RUN
from symbiosis.server.tinker.tinker_messages import GetTotals, Resolve
from symbiosis.server.tinker.training_figures import TenantTraining
from symbiosis.server.tools import format_of
from symbiosis.server.tracing import Tracing
from symbiosis.serving.engine.detokenize import Stop, Text
from symbiosis.serving.engine.engine_stats import EngineStats
from symbiosis.serving.engine.limits import Unfit, check_chosen
from symbiosis.serving.request import MANY, Request, Sampling

MOST_PROMPT_LOGPROBS = 1 << 22  # log probabilities of prompts that answers under way have: each takes 16 bytes here
MOST_NUMBERS = 1 << 24  # of vectors that answers under way have: each takes 4 bytes
MOST_LOGPROBS = 1 << 21  # of tokens that wait for the readers of answers: each takes 100 bytes


OTHER_BASE = "the model has another base by now than the one that began this answer: ask again"


class ServingState(ApiState):
    """One engine, as clients see it."""

    def __init__(
        self, remote: EngineClient, tokenizer: Any, options: FrontOptions, tracing: Tracing | None = None
    ) -> None:
        super().__init__(options.api_keys, options.host, options.allowed_hosts, tracing)
        self.remote, self.tokenizer, self.options = remote, tokenizer, options
        self.cors, self.root_path = options.cors, options.root_path
        self.prompts = Prompts(tokenizer, remote.welcome.longest, remote.welcome.vocabulary, options.max_requests)
        self.tool_format = options.tool_parser or format_of(self.prompts.template)
        self.uploads = Path(options.uploads or user_folder(Use.TEMPORARY, make=True))  # for adapters that are sent
        self.responses = ResponseStore()
        self.started = int(time.time())
        self._prepared = self._prompts = (
            0  # completions that the engine has not been asked for yet, and of how many prompts
        )
        self._prompt_logprobs, self._logprobs = FairShare(MOST_PROMPT_LOGPROBS), FairShare(MOST_LOGPROBS)
        self.vectors = FairShare(MOST_NUMBERS)
        remote.places = FairShare(max(2, options.max_requests))
        self._metrics: asyncio.Task[bytes] | None = None  # that are being made

    @property
    def state(self) -> str:
        """The server's state in a word. It takes requests only while it is "serving"."""
        if not self.remote.is_there:
            return "the engine has ended"
        if self.remote.is_silent:
            return "the engine does not answer"
        return "ending" if self.remote.drained.is_set() else "serving"

    async def metrics(self) -> bytes:
        """Return the figures as Prometheus reads them. All who ask while they are made get the same ones: nobody needs a key for them."""
        if self._metrics is None or self._metrics.done():
            self._metrics = asyncio.create_task(self._made_metrics())
        return await asyncio.shield(self._metrics)

    async def _made_metrics(self) -> bytes:
        await asyncio.gather(*map(self._drop_if_gone, self.observer.adapters.named))
        training = (
            await self.remote.ask_training(dict[str, TenantTraining], "", GetTotals()) if self.options.trains else {}
        )
        return metrics.text(await self.figures(), self.observer, self.options.engine, training, self.keys)

    async def _drop_if_gone(self, key: Key) -> None:
        """Count no more what an adapter did that is gone."""
        if (name := key[-1]) != self.options.model:
            try:
                await self.remote.ask(type(None), "check_adapter", name)
            except ApiError as error:
                if error.status < 500:  # there is none, or none that can be served
                    self.observer.adapters.drop(key)

    async def figures(self) -> EngineStats:
        """Return the engine's figures. Of what was let in, all that is not in its batch waits, also what it has not heard of yet."""
        found = await self.remote.ask(EngineStats, "figures")
        in_flight = max(found.running + found.waiting, self._prepared + self.remote.completions)
        return msgspec.structs.replace(found, waiting=in_flight - found.running)

    @contextmanager
    def admitted(
        self, tenant: Tenant, body: Body | None, prompts: int, tokens: int, field: str = "n"
    ) -> Iterator[Admission]:
        """Let a request in, by what is cheap to know of it. If what follows fails, it has never been there.

        Args:
            body: What completions of the prompts may be; None if there are none.
            tokens: How many a completion may have at most, or a prompt without one.
            field: What says how many there are.
        """
        completions = prompts * (1 if body is None else body.n)
        if completions > self.options.max_requests:
            raise too_many_at_once(field, self.options.max_requests, completions)
        if body is not None and body.continuation is not None:
            if body.continuation.base not in ("", self.remote.welcome.fingerprint):
                raise ApiError(409, OTHER_BASE, "continuation")
            _check_continuation(body.continuation, completions, self.remote.welcome.longest)
        if tenant.is_limited:
            tenant.check_most(completions, field)
        self._check_room(tenant, prompts, completions, field)
        most = min(tokens, self.remote.welcome.most_tokens)
        admission = tenant.admit(completions, self.keys.clock(), completions * most)
        self._prepared, self._prompts = self._prepared + completions, self._prompts + prompts
        self.remote.places.take(tenant.name, completions)
        try:
            yield admission
        except BaseException:
            admission.end()
            raise
        finally:
            self._prepared, self._prompts = self._prepared - completions, self._prompts - prompts
            self.remote.places.give_back(tenant.name, completions)

    def _check_room(self, tenant: Tenant, prompts: int, completions: int, field: str) -> None:
        """Raise `ApiError` unless so many more may be under way. Where there are keys, none takes the last places from whoever comes next, nor
        has them back before the engine has ended what had them."""
        if self.keys.are_needed:
            if completions > (most := self.remote.places.alone):
                raise too_many_at_once(field, most, completions, " of one key")
            if not self.remote.places.has(tenant.name, completions):
                raise busy("this key has its part of what may be under way", "share_of_key")
        under_way = self._prompts + len(self.remote.requests)
        if under_way + prompts > self.options.max_requests:
            raise busy(f"{under_way} requests are under way", "overloaded")

    def hold(self, generation: Generation, admission: Admission) -> None:
        """Keep room for log probabilities until the admission ends: at once for those of prompts, and for those of tokens as they come, until
        they are read. Without room the generation fails. Raises `ApiError` if there is none for the prompts."""
        more, most = generation.prompt_logprobs, self._prompt_logprobs.alone
        if more > most:
            message = f"at most {most} log probabilities of prompts, and this would be {more}: send fewer prompts at once, or ask for fewer of each token"
            raise wrong(message, "prompt")
        held = Lease(self._prompt_logprobs, admission.tenant.name)
        if more and not held.take(more):
            raise busy("log probabilities of other prompts are under way", "share_of_key")
        generation.held = Lease(self._logprobs, admission.tenant.name)
        admission.at_end += [held.end, generation.held.end]

    def tokens_for(
        self, prompts: list[tuple[int, ...]], wanted: int | None, default: int | None, name: str, prompt: str = "prompt"
    ) -> int:
        """Return how many tokens a completion may have: `wanted` if they fit, else it is an error; by default as many as fit. (The engine
        knows what an adapter leaves of them.) `name` and `prompt` are the fields that say how many, and of what."""
        longest, length = self.remote.welcome.longest, max(map(len, prompts))
        left = longest - length
        is_full = left < (0 if wanted == 0 else 1)
        if is_full or (wanted or 0) > left:
            size = f"{length} of the prompt and {wanted or 1} more"
            raise too_long(longest, size, prompt if is_full else name, f", or {name}")
        fits = max(1, self.remote.welcome.most_tokens - length)
        return min(fits, default or fits) if wanted is None else wanted

    async def adapter(self, tenant: Tenant, model: str) -> str:
        """Return by which name the engine has what clients call so: a run that is trained here, or a checkpoint of one, is its owner's alone."""
        if model.startswith(PRIVATE):
            raise unknown_model(model, [self.options.model])
        if not self.options.trains or not (model.startswith("tinker://") or RUN.fullmatch(model)):
            return model
        return await self.remote.ask_training(str, tenant.name, Resolve(model_path=model))

    def computed_by(self, model: str, adapter: str, sampling: Sampling) -> str | None:
        """Note in the request's record by what it is computed, and return the adapter, by the engine's name; None for the base."""
        if not model or len(model) > 256:
            raise unknown_model(model, [self.options.model])
        record = this_request()
        record.model, record.adapter, record.sampling = self.options.model, model, sampling
        return None if adapter == self.options.model else adapter

    def generation(
        self,
        admission: Admission,
        body: Body,
        prompts: list[tuple[int, ...]],
        sampling: Sampling,
        may_be_shorter: bool,
        prompt_logprobs: int | None = None,
        adapter: str | None = None,
        special: bool = False,
    ) -> Generation:
        """Return a generation that has not begun. To go on with a long one takes long.

        Args:
            adapter: By the engine's name, if that is another.
            special: Whether special tokens are part of the text, whatever the body says.
        """
        before, record = body.continuation, this_request()
        adapter = self.computed_by(body.model, adapter or body.model, sampling)
        if before is not None and not before.tokens and not before.ended:
            before = None  # nothing of it has been told
        ended = before.ended_of(body.n) if before else {}
        prediction: tuple[int, ...] = ()
        if self.options.predicts and isinstance(body, ChatBody) and body.prediction is not None:
            prediction = self.prompts.predicted(body.prediction)
        requests = [
            Request(
                id=next(self.remote.ids), prompt=prompt, sampling=sampling, adapter=adapter, tenant=admission.tenant.name,
                completions=body.n, prompt_logprobs=prompt_logprobs, may_be_shorter=may_be_shorter, priority=body.priority or 0, prediction=prediction,
                chosen=before.chosen(number, body.n) if before else (), ended=ended.get(number, ()), external_id=record.id,
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        if before is not None:
            self._check_chosen(requests)
        text = self._text_of(body, sampling, special or body.skip_special_tokens is False)
        return Generation(self.remote, requests, text, partial(_names_of, body, sampling))

    def _check_chosen(self, requests: list[Request]) -> None:
        """Check the tokens that another server has chosen: text is made of them before the engine has seen them."""
        try:
            for request in [each for each in requests if each.under_way]:
                check_chosen(request, self.remote.welcome.vocabulary)
        except Unfit as unfit:
            raise refused(unfit) from None

    def _text_of(self, body: Body, sampling: Sampling, special: bool) -> Callable[[], Text]:
        """Return what makes an empty text for each completion."""
        stops, keeps = [Stop(each) for each in body.stops], bool(body.include_stop_str_in_output)
        silent = () if keeps else sampling.ending(self.remote.welcome.ends)
        return partial(Text, self.tokenizer, stops, sampling.min_tokens, special, keeps, silent)


def _names_of(body: Body, sampling: Sampling) -> dict[str, str]:
    """Return what the API calls fields of the engine's, by which it may refuse this request."""
    names = dict(body.names)
    if (guide := sampling.guide) is not None:
        tools = isinstance(body, ChatBody) and body.tool_use is not None
        names[guide.kind] = body.follows[0] if body.follows and not tools else "tools"
    return names


def _check_continuation(before: Continuation, completions: int, longest: int) -> None:
    """Check what is cheap to know: how much there is, and not yet what."""
    if before.tokens and len(before.tokens) != completions:
        raise wrong("continuation has a list of tokens for each choice", "continuation")
    if any(len(tokens) >= longest for tokens in before.tokens):
        raise too_long(longest, "more in the continuation", "continuation")
    ended = set(before.ended)
    if len(ended) < len(before.ended) or not all(0 <= choice < completions for choice in ended):
        message = f"continuation: ended names choices, each once, which are numbered from 0 to {completions - 1}"
        raise wrong(message, "continuation")
    if not (0 <= before.created < MANY**2 and 0 <= before.opened < MANY):
        raise wrong("continuation: created and opened are numbers that a stream has told", "continuation")
