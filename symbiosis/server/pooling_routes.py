"""Vectors, classes and scores of texts: `/v1/embeddings`, `/classify`, `/score` and `/rerank`, as OpenAI's and vLLM's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from symbiosis.base.fair_share import Lease
from symbiosis.server import pooling_reply
from symbiosis.server.api_errors import busy, too_many_at_once, wrong
from symbiosis.server.api_keys import Tenant
from symbiosis.server.body_readers import takes
from symbiosis.server.generation import Generation
from symbiosis.server.openai_protocol import check_parts
from symbiosis.server.pooling_protocol import (
    ClassifyBody,
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TextsBody,
    check_texts,
)
from symbiosis.server.pooling_reply import Parts, PoolingReply, Shape, numbers, similarities
from symbiosis.server.prompts import PromptCut, shortened, too_long
from symbiosis.server.request_record import this_request
from symbiosis.server.serving_state import ServingState
from symbiosis.serving.engine.detokenize import Text
from symbiosis.serving.request import Pooling, Sampling
from symbiosis.serving.request import Request as ForEngine

Prompt = Callable[[], tuple[int, ...]]  # makes its tokens
Tell = Callable[[list[float]], Parts]
NO_TOKENS = Sampling(max_tokens=0)
NO_CLASSES = "{!r} tells no classes apart: name an adapter that PEFT has trained with task_type SEQ_CLS"
NO_SCORE = "{!r} tells texts of {} classes apart: a score needs an adapter with one class, or one without a classification head"


@dataclass(frozen=True, slots=True)
class VectorsWanted:
    """What is to be made of texts: a vector of each prompt, and an answer of these."""

    body: PoolingBody
    size: int  # of the body
    adapter: str  # by the engine's name
    prompts: list[Prompt]
    field: str  # in which they are
    pooling: Pooling
    width: int  # of each vector
    shape: Shape


@takes(EmbeddingsBody)
async def embeddings(front: ServingState, request: Request, tenant: Tenant, body: EmbeddingsBody, size: int) -> ASGIApp:
    width = front.remote.welcome.width
    if body.dimensions not in (None, width):
        raise wrong(f"dimensions must be {width}: the model was not trained for shorter vectors", "dimensions")
    pooling = Pooling(front.options.pooling, body.use_activation is not False)
    shape = partial(pooling_reply.embeddings, _model(front, body), body.encoding_format == "base64")
    adapter = await front.adapter(tenant, _model(front, body))
    wanted = VectorsWanted(body, size, adapter, _of_texts(front, body), body.field, pooling, width, shape)
    return await _answered(front, request, tenant, wanted)


@takes(ClassifyBody)
async def classify(front: ServingState, request: Request, tenant: Tenant, body: ClassifyBody, size: int) -> ASGIApp:
    adapter, classes = await _classes(front, tenant, body)
    if not classes:
        raise wrong(NO_CLASSES.format(_model(front, body)), "model")
    pooling = Pooling("head", body.use_activation is not False)
    shape = partial(pooling_reply.classes, _model(front, body))
    wanted = VectorsWanted(body, size, adapter, _of_texts(front, body), body.field, pooling, classes, shape)
    return await _answered(front, request, tenant, wanted)


@takes(ScoreBody)
async def score(front: ServingState, request: Request, tenant: Tenant, body: ScoreBody, size: int) -> ASGIApp:
    return await _scored(front, request, tenant, body, size, partial(pooling_reply.scored, _model(front, body)))


@takes(RerankBody)
async def rerank(front: ServingState, request: Request, tenant: Tenant, body: RerankBody, size: int) -> ASGIApp:
    tell = partial(pooling_reply.reranked, _model(front, body), body)
    return await _scored(front, request, tenant, body, size, tell)


async def _scored(
    front: ServingState, request: Request, tenant: Tenant, body: ScoreBody | RerankBody, size: int, tell: Tell
) -> ASGIApp:
    """Answer with a score of each pair of texts: what a classifier of one class says of both as one prompt, else how alike their vectors are."""
    adapter, classes = await _classes(front, tenant, body)
    if classes > 1:
        raise wrong(NO_SCORE.format(_model(front, body), classes), "model")
    (name, field), (left, right) = body.names, body.pairs
    cut = front.prompts.cut(body)
    for each, texts in ((name, left), (field, right)):
        if not texts:
            raise wrong(f"{each} is empty", each)
        front.prompts.several(texts, each, cut)
    if classes:
        pairs = [(left[number if len(left) > 1 else 0], text) for number, text in enumerate(right)]
        prompts: list[Prompt] = [partial(front.prompts.of_pair, pair, cut) for pair in pairs]
        pooling = Pooling("head", body.use_activation is not False)
        shape: Shape = lambda vectors: tell([numbers(vector)[0] for vector in vectors])  # noqa: E731
    else:
        prompts = [partial(front.prompts.of_text, text, True, cut) for text in left + right]
        pooling, classes = Pooling(front.options.pooling), front.remote.welcome.width
        shape = lambda vectors: tell(similarities(vectors[: len(left)], vectors[len(left) :]))  # noqa: E731
    return await _answered(
        front, request, tenant, VectorsWanted(body, size, adapter, prompts, field, pooling, classes, shape)
    )


def _of_texts(front: ServingState, body: TextsBody) -> list[Prompt]:
    """Return what makes the prompts of a body of texts or a chat."""
    check_texts(body)
    cut = front.prompts.cut(body)
    if body.input is not None:
        special = body.add_special_tokens is not False
        several = front.prompts.several(body.input, "input", cut)
        return [partial(front.prompts.tokens, each, "input", cut, special) for each in several]
    if not body.messages:
        raise wrong("messages is empty", "messages")
    check_parts(body.messages)
    return [lambda: _of_chat(front, body, cut)]


def _of_chat(front: ServingState, body: TextsBody, cut: PromptCut | None) -> tuple[int, ...]:
    generates, continues = bool(body.add_generation_prompt), bool(body.continue_final_message)
    options = body.chat_template_kwargs or {}
    return shortened(front.prompts.of_chat(body.messages or [], options, None, generates, continues), cut)


def _model(front: ServingState, body: PoolingBody) -> str:
    return front.options.model if body.model is None else body.model


async def _classes(front: ServingState, tenant: Tenant, body: PoolingBody) -> tuple[str, int]:
    """Return the adapter by the engine's name, and how many classes it tells apart: 0 where it has no classification head."""
    name = _model(front, body)
    adapter = await front.adapter(tenant, name)
    if adapter == front.options.model:
        return adapter, 0
    return adapter, await front.remote.ask(int, "classes_of", adapter, tenant=tenant.name)


async def _answered(front: ServingState, request: Request, tenant: Tenant, wanted: VectorsWanted) -> ASGIApp:
    """Begin a request for each prompt, and return the answer, which ends them and what they were admitted with."""
    longest, count = front.remote.welcome.longest, len(wanted.prompts)
    with front.admitted(tenant, None, count, longest, wanted.field) as admission:
        room = Lease(front.vectors, tenant.name)
        admission.at_end.append(room.end)
        if count * wanted.width > front.vectors.alone:
            raise too_many_at_once(wanted.field, front.vectors.alone // wanted.width, count)
        if not room.take(count * wanted.width):
            raise busy("vectors of other texts are under way", "share_of_key")
        prompts = await front.made(request, tenant, wanted.size, count, lambda: [make() for make in wanted.prompts])
        if (length := max(map(len, prompts))) > longest:
            raise too_long(longest, f"{length} tokens", wanted.field)
        generation = _generation(front, tenant, wanted, prompts)
        admission.reserve(generation.prompt_tokens)
        generation.begin()
        return PoolingReply(generation, wanted.shape, admission.end)


def _generation(
    front: ServingState, tenant: Tenant, wanted: VectorsWanted, prompts: list[tuple[int, ...]]
) -> Generation:
    adapter = front.computed_by(_model(front, wanted.body), wanted.adapter, NO_TOKENS)
    record = this_request()
    requests = [
        ForEngine(
            id=next(front.remote.ids), prompt=prompt, sampling=NO_TOKENS, pooling=wanted.pooling, adapter=adapter, priority=wanted.body.priority or 0,
            tenant=tenant.name, external_id=record.id,
        )
        for prompt in prompts
    ]  # fmt: skip
    return Generation(front.remote, requests, partial(Text, front.tokenizer), lambda: {"prompt": wanted.field})


TABLE = [
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/classify", classify),
    *(("POST", path, score) for path in ("/score", "/v1/score")),
    *(("POST", path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]
