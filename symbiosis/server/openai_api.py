"""The routes: OpenAI's, vLLM's for adapters, and those for operators."""

import os
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from symbiosis.base.folders import temporary_folder
from symbiosis.build import build
from symbiosis.server import api_app, generate_routes, openai_protocol, openapi, page, pooling_routes
from symbiosis.server.api_app import Api, json_response
from symbiosis.server.api_errors import ApiError, in_terms_of, storing, unknown_model, wrong
from symbiosis.server.api_keys import Admission, Tenant
from symbiosis.server.body_readers import takes
from symbiosis.server.generation import Generation
from symbiosis.server.ipc.engine_ipc import AdapterInfo
from symbiosis.server.long_reply import LongReply
from symbiosis.server.prompts import PromptCut, content_of, shortened
from symbiosis.server.response_format import ChatWords, CompletionWords, Fields, Words
from symbiosis.server.responses_protocol import AS_RESPONSE, ResponsesBody
from symbiosis.server.responses_reply import ResponsesReply, messages_after
from symbiosis.server.serving_state import ServingState
from symbiosis.server.sse import StoredReply
from symbiosis.server.tinker.checkpoint_store import PRIVATE
from symbiosis.server.tinker.tinker_messages import GetFigures
from symbiosis.server.tinker.training_figures import RunFigures
from symbiosis.server.token_routes import detokenize, tokenize
from symbiosis.server.tool_parsers import PARSERS
from symbiosis.server.tools import ToolUse, call_format, check_use, grammar_of
from symbiosis.serving.lora.adapter import IS_THE_BASE
from symbiosis.serving.request import Guide

Reply = Callable[[ServingState, Admission, openai_protocol.Body, Words, Generation], ASGIApp]
SEND_IT = "put it there, or send the adapter itself with PUT /v1/adapters/NAME"


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of vLLM's POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of vLLM's POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


def make_app(front: ServingState) -> ASGIApp:
    table: list[tuple[str, str, Any]] = [
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/responses", responses),
        ("GET", "/v1/responses/{id}", one_response),
        ("DELETE", "/v1/responses/{id}", delete_response),
        ("POST", "/tokenize", tokenize),
        ("POST", "/detokenize", detokenize),
        ("POST", "/generate", generate_routes.generate),
        ("POST", "/generate_stream", generate_routes.generate_stream),
        ("POST", "/", generate_routes.either),
        *pooling_routes.TABLE,
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", model),
        ("POST", "/v1/load_lora_adapter", load_adapter),
        ("POST", "/v1/unload_lora_adapter", unload_adapter),
        ("PUT", "/v1/adapters/{name:path}", put_adapter),
        ("DELETE", "/v1/adapters/{name:path}", delete_adapter),
        ("GET", "/health", health),
        ("GET", "/ping", health),
        ("POST", "/ping", health),
        ("GET", "/load", load),
        ("GET", "/version", api_app.version),
        ("GET", "/metrics", told_metrics),
        ("GET", "/figures", figures),
        ("GET", "/", api_app.shown_page),
    ]
    described = openapi.document(table, front.keys.are_needed, front.options.root_path)
    table.append(("GET", "/openapi.json", partial(_described, msgspec.json.encode(described))))
    if not front.options.trains:
        return Api(front, table, front.remote.welcome.secret)
    from symbiosis.server.tinker.routes import Tinker

    return Api(front, [*table, *Tinker(front).table], front.remote.welcome.secret)


async def _described(document: bytes, front: ServingState, request: Request) -> ASGIApp:
    return Response(document, media_type="application/json")


@takes(openai_protocol.CompletionBody)
async def completions(
    front: ServingState, request: Request, tenant: Tenant, body: openai_protocol.CompletionBody, size: int
) -> ASGIApp:
    if body.max_tokens == 0 and not body.echo:
        raise wrong("max_tokens=0 goes with echo=true", "max_tokens")
    cut = front.prompts.cut(body)
    given, adapter = front.prompts.several(body.prompt, cut=cut), await front.adapter(tenant, body.model)
    most = 16 if body.max_tokens is None else body.max_tokens
    with front.admitted(tenant, body, len(given), most, "n" if body.n > 1 else "prompt") as admission:
        choices = len(given) * body.n
        made = await front.made(
            request, tenant, size, choices, lambda: _completion(front, admission, body, given, cut, adapter)
        )
        return _reply(front, admission, body, *made)


def _completion(
    front: ServingState,
    admission: Admission,
    body: openai_protocol.CompletionBody,
    given: list[str | list[int]],
    cut: PromptCut | None,
    adapter: str,
) -> tuple[Words, Generation]:
    prompts = [front.prompts.tokens(each, cut=cut) for each in given]
    most = front.tokens_for(prompts, body.max_tokens, 16, "max_tokens")
    guide = body.follows[1] if body.follows else None
    bad = front.prompts.sequences(body.bad_words) if body.bad_words else ()
    sampling = openai_protocol.sampling_of(body, most, body.logprobs, guide, bad)
    tops = _echoed_tops(body, most) if body.echo else body.prompt_logprobs
    generation = front.generation(admission, body, prompts, sampling, body.max_tokens is None, tops, adapter)
    echoes = []
    if body.echo:  # a text as it was given: its tokens may begin with one that the tokenizer has put there
        both = zip(given, prompts, strict=True)
        echoes = [
            each if isinstance(each, str) and cut is None else front.tokenizer.decode(prompt) for each, prompt in both
        ]
    skips = body.skip_special_tokens is not False
    before, has_logprobs = body.continuation, body.logprobs is not None
    words = CompletionWords(body.model, front.tokenizer, has_logprobs, echoes, prompts, body.n, skips, asked=body)
    if before is not None and before.tokens:
        words.go_on(before)
    return words, generation


def _echoed_tops(body: openai_protocol.CompletionBody, most: int) -> int | None:
    """Return how many of the most likely tokens are told at each place of a prompt that is shown, beside its own; None: no log probabilities of it
    are. Where no token is to be made, they are computed all the same."""
    echoed = body.logprobs or 0 if body.logprobs is not None or most == 0 else None
    asked = [each for each in (body.prompt_logprobs, echoed) if each is not None]
    return max(asked, default=None)


@takes(openai_protocol.ChatBody)
async def chat(
    front: ServingState, request: Request, tenant: Tenant, body: openai_protocol.ChatBody, size: int
) -> ASGIApp:
    return await _answered(front, request, tenant, body, size, _reply)


async def _answered(
    front: ServingState, request: Request, tenant: Tenant, body: openai_protocol.ChatBody, size: int, reply: Reply
) -> ASGIApp:
    """Answer a chat whose body was so large."""
    most = front.remote.welcome.most_tokens if body.wanted is None else body.wanted
    adapter = await front.adapter(tenant, body.model)
    with front.admitted(tenant, body, 1, most) as admission:
        made = await front.made(request, tenant, size, body.n, lambda: _chat(front, admission, body, adapter))
        return reply(front, admission, body, *made)


def _chat(
    front: ServingState, admission: Admission, body: openai_protocol.ChatBody, adapter: str
) -> tuple[Words, Generation]:
    use = body.tool_use
    shown, opens = use.shown if use else None, body.add_generation_prompt is not False
    tokens = front.prompts.of_chat(
        body.messages, body.template_options, shown, opens, bool(body.continue_final_message)
    )
    prompts = [shortened(tokens, front.prompts.cut(body))]
    guide = _chat_guide(front, body, use)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most = front.tokens_for(prompts, body.wanted, None, field, "messages")
    tops = (body.top_logprobs or 0) if body.logprobs else None
    bad = front.prompts.sequences(body.bad_words) if body.bad_words else ()
    sampling = openai_protocol.sampling_of(body, most, tops, guide, bad)
    echo = content_of(body.messages[-1]) if body.echo else ""
    words = ChatWords(body.model, front.tokenizer, bool(body.logprobs), echo, asked=body)
    words.prompt = prompts[0]
    if body.return_token_ids:
        words.of_whole = b',"prompt_token_ids":%b' % msgspec.json.encode(prompts[0])
    if use is not None:
        parser = PARSERS[call_format(use, front.tool_format)]
        words.read_calls(partial(parser, use.most), is_chosen=use.name is not None)
    special = use is not None and parser.needs_special
    generation = front.generation(
        admission, body, prompts, sampling, body.wanted is None, body.prompt_logprobs, adapter, special
    )
    words.go_on(generation.told_before)
    return words, generation


def _chat_guide(front: ServingState, body: openai_protocol.ChatBody, use: ToolUse | None) -> Guide | None:
    """Return what an answer must follow, for its own sake or for that of tools."""
    follows = body.follows[1] if body.follows else None
    if use is None:
        return follows
    check_use(use, front.tool_format, follows.kind if follows else None)
    grammar = grammar_of(use, call_format(use, front.tool_format), follows.text if follows else None)
    return None if grammar is None else Guide("grammar", grammar)


def _reply(
    front: ServingState, admission: Admission, body: openai_protocol.Body, words: Words, generation: Generation
) -> ASGIApp:
    """Begin a generation, and return the answer, which ends it and what it was admitted with."""
    if words.logprobs or body.prompt_logprobs is not None:
        front.hold(generation, admission)
    admission.reserve(generation.prompt_tokens + generation.completion_tokens + generation.most_tokens)
    generation.begin()
    return LongReply(generation, words, body, admission.end)


@takes(ResponsesBody)
async def responses(front: ServingState, request: Request, tenant: Tenant, body: ResponsesBody, size: int) -> ASGIApp:
    id = body.previous_response_id
    before = front.responses.messages(tenant.name, id) if id is not None else []

    def keep(response: Fields) -> None:
        if body.store is not False:
            messages = messages_after(body, before, response["output"])
            front.responses.put(tenant.name, response["id"], response, messages)

    def reply(
        front: ServingState, admission: Admission, chat: openai_protocol.Body, words: Words, generation: Generation
    ) -> ASGIApp:
        admission.reserve(generation.prompt_tokens + generation.completion_tokens + generation.most_tokens)
        generation.begin()
        assert isinstance(words, ChatWords)
        return ResponsesReply(generation, words, body, keep, admission.end, front.options.server)

    with in_terms_of(AS_RESPONSE):
        return await _answered(front, request, tenant, body.chat(before), size, reply)


async def one_response(front: ServingState, request: Request) -> ASGIApp:
    tenant = front.tenant(request)
    return StoredReply(front.responses.response(tenant.name, request.path_params["id"]))


async def delete_response(front: ServingState, request: Request) -> ASGIApp:
    tenant, id = front.tenant(request), request.path_params["id"]
    front.responses.remove(tenant.name, id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def models(front: ServingState, request: Request) -> ASGIApp:
    front.tenant(request)
    adapters = [_adapter(front, name) for name in await _names(front)]
    return json_response({"object": "list", "data": [_base(front), *adapters]})


async def model(front: ServingState, request: Request) -> ASGIApp:
    front.tenant(request)
    name = request.path_params["name"]
    if name == front.options.model:
        return json_response(_base(front))
    if name.startswith(PRIVATE):
        raise unknown_model(name, [front.options.model])
    try:
        await front.remote.ask(type(None), "check_adapter", name)
    except ApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise unknown_model(name, [front.options.model]) from None
        is_refused = error.status == HTTPStatus.BAD_REQUEST
        not_found = ApiError(HTTPStatus.NOT_FOUND, str(error), "model", "model_not_found", reason="no_such_model")
        raise not_found if is_refused else error from None
    return json_response(_adapter(front, name))


def _base(front: ServingState) -> dict[str, Any]:
    return {**_told(front, front.options.model), "parent": None, "max_model_len": front.remote.welcome.longest}


def _adapter(front: ServingState, name: str) -> dict[str, Any]:
    return {**_told(front, name), "parent": front.options.model}


def _told(front: ServingState, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": front.started, "owned_by": "symbiosis", "root": name}


@takes(LoadBody, of_administrators=True)
async def load_adapter(front: ServingState, request: Request, tenant: Tenant, body: LoadBody, size: int) -> ASGIApp:
    if body.lora_name == front.options.model:
        raise wrong(IS_THE_BASE.format(body.lora_name), "lora_name")
    path = _within(front, body.lora_path)
    if not body.load_inplace:
        await _check_new(front, body.lora_name)
    await front.remote.ask(AdapterInfo, "add", body.lora_name, str(path))
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@takes(UnloadBody, of_administrators=True)
async def unload_adapter(front: ServingState, request: Request, tenant: Tenant, body: UnloadBody, size: int) -> ASGIApp:
    await front.remote.ask(type(None), "remove", body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def put_adapter(front: ServingState, request: Request) -> ASGIApp:
    """Add a new version of this name, from the bytes of a safetensors file that has the configuration in its metadata."""
    front.administrator(request)
    _check_base(front, request)
    name = request.path_params["name"]
    with (
        storing("the server's folder for adapters that are sent", front.uploads),
        temporary_folder("symbiosis-adapter-", front.uploads) as folder,
    ):
        with (folder / "adapter").open("wb") as file:
            await front.bodies.read(request, front.options.max_adapter_bytes, file)
        return json_response(await front.remote.ask(AdapterInfo, "add", name, file.name))


async def delete_adapter(front: ServingState, request: Request) -> ASGIApp:
    front.administrator(request)
    _check_base(front, request)
    await front.remote.ask(type(None), "remove", request.path_params["name"])
    return Response(status_code=204)


def _check_base(front: ServingState, request: Request) -> None:
    """Refuse a request for another base than this server's, as `?model=` names it to a cluster."""
    base = request.query_params.get("model")
    if base not in (None, front.options.model):
        raise unknown_model(base, [front.options.model])


async def health(front: ServingState, request: Request) -> ASGIApp:
    """Answer 200 while requests are taken."""
    state = front.state
    remote = front.remote
    told: dict[str, object] = {
        "status": state,
        "requests": len(remote.requests),
        "step_s": round(remote.step_s, 3),
        "build": build(),
        "fingerprint": remote.welcome.fingerprint,
    }
    if remote.tokens:
        told |= {"room": remote.room, "tokens": remote.tokens, "longest": remote.welcome.longest}
    if front.options.trains:
        told["clients"] = remote.sessions
    return json_response(told, 200 if state == "serving" else 503)


async def load(front: ServingState, request: Request) -> ASGIApp:
    """Answer as vLLM does how many requests are under way."""
    front.tenant(request)
    return json_response({"server_load": len(front.remote.requests)})


async def told_metrics(front: ServingState, request: Request) -> ASGIApp:
    return Response(await front.metrics(), media_type="text/plain; version=0.0.4")


async def figures(front: ServingState, request: Request) -> ASGIApp:
    """Return what the page shows."""
    tenant = front.tenant(request)
    found = await front.figures()
    loaded = {each.name: each for each in await front.remote.ask(list[AdapterInfo], "adapters")}
    names = await _names(front)
    adapters = [loaded.get(name) or AdapterInfo(name=name) for name in names]
    template = getattr(front.tokenizer, "chat_template", None)
    kind = page.kind_of(front.options.folder, template)
    told = {"model": front.options.model, "chat": template is not None, "kind": kind}
    runs = (
        await front.remote.ask_training(list[RunFigures], tenant.name, GetFigures()) if front.options.trains else None
    )
    return json_response({**told, "figures": found, "adapters": adapters, "runs": runs})


async def _names(front: ServingState) -> list[str]:
    """Return the adapters that anybody may know of."""
    return [name for name in await front.remote.ask(list[str], "adapter_names") if not name.startswith(PRIVATE)]


async def _check_new(front: ServingState, name: str) -> None:
    """Refuse a name that is there already, as vLLM does."""
    loaded = {each.name for each in await front.remote.ask(list[AdapterInfo], "adapters")}
    if name in loaded:
        raise wrong(f"adapter {name!r} has already been loaded: give load_inplace=true to replace it", "lora_name")


def _within(front: ServingState, path: str) -> Path:
    """Return a path that a client names, if it lies in the folder of adapters. Nothing else is read."""
    if front.options.adapters is None:
        raise wrong(f"the server was started without a folder of --adapters to load from: {SEND_IT}", "lora_path")
    folder = Path(os.path.realpath(front.options.adapters))
    try:
        found = Path(os.path.realpath(folder / path))
    except (OSError, ValueError):  # such as a zero in its name
        found = folder
    if not found.is_relative_to(folder) or found == folder or not found.exists():
        message = f"{path[:200]!r} does not lie in the folder of --adapters: {SEND_IT}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, "lora_path")
    return found
