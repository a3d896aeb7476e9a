"""Samples for Tinker's SDK: each request is a completion like any other, whose tokens wait here until they are fetched."""

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import Headers

from symbiosis.server import openai_protocol
from symbiosis.server.api_errors import ApiError, busy, failed, wrong
from symbiosis.server.api_keys import OF_DAY, Tenant
from symbiosis.server.generation import Delta, join
from symbiosis.server.openai_fields import RAW
from symbiosis.server.openai_protocol import CompletionBody, Whole, decoded
from symbiosis.server.request_record import begin
from symbiosis.server.response_format import told_prompt
from symbiosis.server.server_marks import new_session_id
from symbiosis.server.serving_state import ServingState
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker import wire
from symbiosis.server.tinker.kept_samples import KeptSamples

QUEUE_S = 0.2  # between two looks whether there is room
KEPT_S = 120.0  # samples that are done
KEPT_BYTES = 64 << 20  # of one key: the SDK asks anew for what has given way
LOADS = 3  # times that an adapter is loaded again for one request
BUSY = (429, 503)  # what passes by itself: it is waited for here, and not by the client
TOKEN_BYTES = 12  # of a token, as JSON has it
REST_BYTES = 1 << 16  # of a body, besides its tokens
FEW_NUMBERS = 1024  # log probabilities of an answer: one with more is written in a thread, so that nobody waits for it
MOST_TOKENS = 1 << 22  # of prompts of one key that wait here, or are sampled from


class Chunk(msgspec.Struct):
    type: str = "encoded_text"
    tokens: list[int] = []


class SamplePrompt(msgspec.Struct):
    chunks: list[Chunk]


class Params(msgspec.Struct):
    """Of one: `stop` None ends with the model's own ends, a list with nothing else than what is in it."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(msgspec.Struct):
    """The body of asample."""

    prompt: SamplePrompt
    sampling_params: Params
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Whole | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: msgspec.Raw = RAW
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None  # which only the hosted service's own loss reads

    @property
    def size(self) -> int:
        """How many tokens the prompt has."""
        return sum(len(chunk.tokens) for chunk in self.prompt.chunks)

    @property
    def untold(self) -> int:
        """At how many of the prompt's tokens no log probability is told. At the first there is none."""
        return 1 if self.prompt_logprobs_last_n is None else self.size - self.prompt_logprobs_last_n

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def completion(self, model: str) -> CompletionBody:
        """Return what OpenAI's API would be asked for."""
        params, stop = self.sampling_params, self.sampling_params.stop
        ids = [each for each in stop if isinstance(each, int)] if isinstance(stop, list) else []
        texts = [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]
        most = 0 if self.prompt_logprobs else None
        return CompletionBody(
            model=model, prompt=[*self.tokens], n=self.num_samples, max_tokens=params.max_tokens if params.max_tokens is not None else most,
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, seed=None if params.seed is None else params.seed % 2**63,
            stop=texts or None, stop_token_ids=ids or None, ignore_eos=stop is not None or None,
            logprobs=max(self.topk_prompt_logprobs, self.topk_sample_logprobs, 0),
        )  # fmt: skip


class Samples:
    """The samples under way, and those that wait to be fetched."""

    def __init__(self, front: ServingState) -> None:
        self._front = front
        self._tasks: dict[tuple[str, str], asyncio.Task[bytes | m.PromiseOutcome]] = {}  # by tenant and request
        self._kept: dict[str, KeptSamples] = {}  # of each tenant: those that are done
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}  # until they are forgotten
        self._under_way, self._tokens = (
            Counter[str](),
            Counter[str](),
        )  # of each tenant: requests, and tokens of their prompts

    async def begin(self, tenant: Tenant, ask: SampleRequest) -> dict[str, Any]:
        """Begin sampling, and return a promise. The same request of a session is begun once."""
        adapter = await self._adapter(tenant, ask)
        numbered = ask.sampling_session_id is not None and ask.seq_id is not None
        id = (
            f"{ask.sampling_session_id}/sample-{ask.seq_id}"
            if numbered
            else f"sample-{new_session_id(self._front.options.server)}"
        )
        key = tenant.name, id
        if key not in self._tasks:
            body = ask.completion(adapter or self._front.options.model)
            openai_protocol.check(body)
            self._begin(tenant, key, ask, body)
        return {"request_id": id, "sample_sequence_ids": [f"{id}/{number}" for number in range(ask.num_samples)]}

    async def _adapter(self, tenant: Tenant, ask: SampleRequest) -> str:
        """Return the adapter that answers, which is loaded then; nothing for the base."""
        which = m.Resolve(sampler_id=ask.sampling_session_id, model_path=ask.model_path, base_model=ask.base_model)
        return await self._front.remote.ask_training(str, tenant.name, which)

    def _begin(self, tenant: Tenant, key: tuple[str, str], ask: SampleRequest, body: CompletionBody) -> None:
        name, tokens = tenant.name, ask.size
        if self._under_way[name] >= self._front.options.max_requests or self._tokens[name] + tokens > MOST_TOKENS:
            raise busy("so many samples of this key wait already: send it again when some have come", "share_of_key")
        task = self._tasks[key] = asyncio.create_task(self._run(tenant, ask, body))
        self._under_way[name] += 1
        self._tokens[name] += tokens

        def end(task: "asyncio.Task[bytes | m.PromiseOutcome]") -> None:
            for count, less in ((self._under_way, 1), (self._tokens, tokens)):
                count[name] -= less
                if not count[name]:
                    del count[name]
            self._keep(key, task)

        task.add_done_callback(end)

    def _keep(self, key: tuple[str, str], task: "asyncio.Task[bytes | m.PromiseOutcome]") -> None:
        """Keep a sample that is done for a while. Others of its key give way to it."""
        name, id = key
        self._timers[key] = asyncio.get_running_loop().call_later(KEPT_S, self._forget, key)
        for gone in self._kept.setdefault(name, KeptSamples(KEPT_BYTES)).add(id, _size_of(task)):
            self._forget((name, gone))

    def _forget(self, key: tuple[str, str]) -> None:
        name, id = key
        self._tasks.pop(key, None)
        self._timers.pop(key).cancel()
        self._kept[name].drop(id)
        if not self._kept[name]:
            del self._kept[name]

    def was_told(self, tenant: Tenant, id: str) -> None:
        """Note that a client has had a sample."""
        if (kept := self._kept.get(tenant.name)) is not None:
            kept.tell(id)

    def read(self, data: bytes) -> SampleRequest:
        """Read a body. What can never be sampled is refused before anything is made of its sizes."""
        most, longest = self._front.options.max_requests, self._front.remote.welcome.longest
        if len(data) > longest * TOKEN_BYTES + REST_BYTES:
            raise wrong(
                f"the model takes {longest} tokens, and a body of {len(data)} bytes has more: shorten the prompt",
                "prompt",
            )
        ask = decoded(SampleRequest, data)
        _check(ask)
        if ask.num_samples > most:
            raise wrong(f"num_samples is at most {most}, and not {ask.num_samples}", "num_samples")
        if ask.size > longest:
            raise wrong(f"the model takes {longest} tokens, and the prompt has {ask.size}: shorten it", "prompt")
        return ask

    def task(self, tenant: Tenant, id: str) -> "asyncio.Task[Any] | None":
        return self._tasks.get((tenant.name, id))

    async def _run(self, tenant: Tenant, ask: SampleRequest, body: CompletionBody) -> bytes | m.PromiseOutcome:
        """Sample when there is room, and return what is to be told."""
        record = begin(Headers())
        record.tenant, loads = tenant.name, LOADS
        try:
            while True:
                try:
                    return await self._sampled(tenant, ask, body)
                except ApiError as error:
                    if error.status == 404 and loads:  # others have taken its adapter's memory since it was loaded
                        loads -= 1
                        await self._adapter(tenant, ask)
                        continue
                    is_over = error.reason == OF_DAY and error.retry_s > 1.0  # else what is reserved may come back
                    if error.status not in BUSY or is_over or self._front.state != "serving":
                        raise
                    await asyncio.sleep(max(QUEUE_S, min(error.retry_s, 1.0)))
        except ApiError as error:
            record.refuse(error.status, error.reason, str(error))
            if error.status >= 500 and self._front.state != "serving":
                raise  # the client asks for it again, and the server that comes next draws the same
            return m.PromiseOutcome(error=str(error), category="server" if error.status >= 500 else "user")
        except Exception as error:
            return m.PromiseOutcome(error=str(failed(error)), category="server")
        finally:
            self._front.observer.end(record, "/api/v1/asample")

    async def _sampled(self, tenant: Tenant, ask: SampleRequest, body: CompletionBody) -> bytes:
        front = self._front
        prompt = tuple(ask.tokens)
        wanted = body.max_tokens
        with front.admitted(
            tenant, body, 1, front.remote.welcome.most_tokens if wanted is None else wanted
        ) as admission:
            most = front.tokens_for([prompt], wanted, None, "max_tokens")
            sampling = openai_protocol.sampling_of(body, most, body.logprobs)
            scored = bool(ask.prompt_logprobs or ask.topk_prompt_logprobs)
            tops = body.logprobs if scored else None
            generation = front.generation(admission, body, [prompt], sampling, wanted is None, tops, body.model)
            front.hold(generation, admission)
            admission.reserve(generation.prompt_tokens + generation.most_tokens)
            generation.begin()
        whole = [Delta(number) for number in range(generation.choices)]
        try:
            async for deltas in generation.deltas():
                for delta in deltas:
                    join(whole[delta.choice], delta)
                    generation.let_go(delta)
            of_prompt = told_prompt((), whole[0]) if scored else None
            make = partial(
                wire.sample_bytes, [(each.finish or "", each.tokens) for each in whole], of_prompt, ask.topk_prompt_logprobs, ask.topk_sample_logprobs,
                ask.untold, generation.cached_tokens,
            )  # fmt: skip
            numbers = generation.prompt_logprobs + generation.completion_tokens * (1 + ask.topk_sample_logprobs)
            if numbers <= FEW_NUMBERS:
                return make()
            return await asyncio.wrap_future(front.threads.submit(tenant.name, make))
        finally:
            generation.end()
            admission.end(generation.prompt_tokens + generation.completion_tokens)


def _size_of(task: "asyncio.Task[bytes | m.PromiseOutcome]") -> int:
    """Return the bytes of what a task has returned; of errors nothing, since they are short."""
    made = None if task.cancelled() or task.exception() is not None else task.result()
    return len(made) if isinstance(made, bytes) else 0


def _check(ask: SampleRequest) -> None:
    if kinds := [chunk.type for chunk in ask.prompt.chunks if chunk.type != "encoded_text"]:
        raise wrong(f"the prompt has a chunk of the kind {kinds[0][:50]}: this model reads text only", "prompt")
    if not ask.size:
        raise wrong("the prompt is empty: give at least one token", "prompt")
    if bytes(ask.target_prompt_logprobs) not in (b"", b"null") or ask.prompt_alt_tokens_k:
        name = "prompt_alt_tokens_k" if ask.prompt_alt_tokens_k else "target_prompt_logprobs"
        raise wrong(f"{name} is not supported here: topk_prompt_logprobs gives the most likely tokens", name)
    if ask.num_samples < 1:
        raise wrong("num_samples must be at least 1", "num_samples")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(ask, name) < 0:
            raise wrong(f"{name} is a number from 0 on, and not {getattr(ask, name)}", name)
    last = ask.prompt_logprobs_last_n
    if last is not None and not (ask.prompt_logprobs and 1 <= last < ask.size):
        raise wrong(
            "prompt_logprobs_last_n goes with prompt_logprobs, and is from 1 to the prompt's length less 1",
            "prompt_logprobs_last_n",
        )
