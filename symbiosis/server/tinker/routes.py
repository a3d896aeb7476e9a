"""Tinker's routes, as its SDK and its command line ask for them. What is trained is asked of the engine's process; what is sampled goes the way of
OpenAI's completions, with the same limits."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from symbiosis.server.api_app import URL_HEADER, json_response
from symbiosis.server.api_errors import ApiError, wrong
from symbiosis.server.api_keys import Tenant
from symbiosis.server.openai_fields import RAW
from symbiosis.server.openai_protocol import decoded
from symbiosis.server.request_record import this_request
from symbiosis.server.serving_state import ServingState
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker import wire
from symbiosis.server.tinker.samples import Samples

HOLD_S = 30.0  # so long a promise is waited for; the SDK asks again
KEPT_S = 60.0  # what has come and nobody has fetched
MOST_COMMAND = 64 << 10  # bytes of a body without data or a prompt: what it tells is kept with a session or a run
PROTOBUF = "application/x-protobuf"
Kind = TypeVar("Kind", bound=m.Asked)
Awaited = tuple[str, str]  # tenant and request
Handler = Callable[[ServingState, Request], Coroutine[Any, Any, ASGIApp]]


class Sdk(msgspec.Struct):
    sdk_version: str = ""


class Tinker:
    """The routes of one server, and the promises that wait in this process."""

    def __init__(self, front: ServingState) -> None:
        wire.messages()
        self._samples = Samples(front)
        self._awaited: dict[Awaited, asyncio.Task[m.PromiseOutcome]] = {}  # promises of the engine
        self._came: dict[Awaited, asyncio.TimerHandle] = {}  # those that nobody has fetched, until they are forgotten

    @property
    def table(self) -> list[tuple[str, str, Handler]]:
        run, checkpoint = "/training_runs/{run}", "/training_runs/{run}/checkpoints/{kind}/{name}"
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/client/config", self.client_config),
            ("POST", "/client/dynamic_config", self.client_config),
            ("POST", "/telemetry", self.telemetry),
            ("GET", "/healthz", self.healthz),
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/create_session", self.create_session),
            ("POST", "/session_heartbeat", asked(m.Heartbeat)),
            ("POST", "/create_model", promised(m.CreateModel)),
            ("POST", "/forward_backward", self.forward_backward),
            ("POST", "/optim_step", promised(m.OptimStep)),
            ("POST", "/save_weights", promised(m.SaveWeights)),
            ("POST", "/save_weights_external", promised(m.SaveWeights, kind="external")),
            ("POST", "/save_weights_for_sampler", promised(m.SaveForSampler)),
            ("POST", "/load_weights", promised(m.LoadWeights)),
            ("POST", "/get_info", asked(m.GetInfo)),
            ("POST", "/weights_info", asked(m.WeightsInfo)),
            ("POST", "/create_sampling_session", asked(m.CreateSampler)),
            ("POST", "/asample", self.asample),
            ("POST", "/retrieve_future", self.retrieve_future),
            ("GET", "/samplers/{id}", self.sampler),
            ("GET", "/sessions", self.sessions),
            ("GET", "/sessions/{id}", self.session),
            ("POST", "/sessions/{id}/finish", self.finish),
            ("GET", "/training_runs", self.runs),
            ("GET", run, self.run),
            ("GET", f"{run}/checkpoints", self.checkpoints_of_run),
            ("GET", "/checkpoints", self.checkpoints),
            ("DELETE", checkpoint, self.delete),
            ("POST", f"{checkpoint}/publish", self.publish),
            ("DELETE", f"{checkpoint}/publish", self.unpublish),
            ("PUT", f"{checkpoint}/ttl", self.ttl),
            ("GET", f"{checkpoint}/external_weights_urls", self.urls),
            ("GET", f"{checkpoint}/files/{{file}}", self.file),
        ]
        every: list[tuple[str, str, Handler]] = [
            ("GET", "/{rest:path}", self.unknown),
            ("POST", "/{rest:path}", self.unknown),
        ]
        return [(method, f"/api/v1{path}", handler) for method, path, handler in table + every]

    async def client_config(self, front: ServingState, request: Request) -> ASGIApp:
        front.trainer(request)
        version = decoded(Sdk, await body_of(front, request, MOST_COMMAND) or b"{}").sdk_version
        if version:
            _check_sdk(version)
        return json_response({
            "parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": wire.MOST_DATA, "fwdbwd_max_chunk_bytes_count": wire.MOST_BYTES,
            "refresh_interval_sec": 300, "sample_cancel_enabled": False,
        })  # fmt: skip

    async def telemetry(self, front: ServingState, request: Request) -> ASGIApp:
        """Take what the SDK tells of its program, and drop it."""
        front.trainer(request)
        await body_of(front, request)
        return json_response({"status": "accepted"})

    async def healthz(self, front: ServingState, request: Request) -> ASGIApp:
        return json_response({"status": "ok"}, 200 if front.state == "serving" else 503)

    async def capabilities(self, front: ServingState, request: Request) -> ASGIApp:
        front.trainer(request)
        longest = front.remote.welcome.longest
        model = {
            "model_name": front.options.model,
            "max_context_length": longest,
            "trainable": True,
            "sampleable": True,
        }
        return json_response({"supported_models": [model]})

    async def create_session(self, front: ServingState, request: Request) -> ASGIApp:
        tenant = front.trainer(request)
        told = command_of(m.CreateSession, await body_of(front, request, MOST_COMMAND))
        _check_sdk(told.sdk_version)
        return json_response(await front.remote.ask_training(dict[str, Any], tenant.name, told))

    async def forward_backward(self, front: ServingState, request: Request) -> ASGIApp:
        tenant = front.trainer(request)
        if request.headers.get("content-type", "").partition(";")[0] != PROTOBUF:
            raise wrong(f"forward_backward takes {PROTOBUF}: the SDK {wire.SDKS[-1]} sends it")
        data = await body_of(front, request)
        told = await front.made(request, tenant, len(data), 1, lambda: _read_pass(data))
        return json_response(await front.remote.ask_training(m.Promise, tenant.name, told))

    async def asample(self, front: ServingState, request: Request) -> ASGIApp:
        tenant = front.trainer(request)
        data = await body_of(front, request)
        ask = await front.made(request, tenant, len(data), 1, lambda: self._samples.read(data))
        return json_response(await self._samples.begin(tenant, ask))

    async def retrieve_future(self, front: ServingState, request: Request) -> ASGIApp:
        """Answer with the outcome of a promise, or after a while that it is to be asked for again."""
        tenant = front.trainer(request)
        id = decoded(m.Retrieve, await body_of(front, request, MOST_COMMAND)).request_id
        task = self._samples.task(tenant, id) or self._of_engine(front, tenant, id)
        done, _ = await asyncio.wait({task}, timeout=HOLD_S)
        if not done:
            return json_response({"type": "try_again", "request_id": id, "queue_state": "active"})
        self._forget((tenant.name, id))  # the engine's process has what has come
        self._samples.was_told(tenant, id)
        found = task.result()
        if isinstance(found, m.PromiseOutcome):
            data, media = wire.outcome_bytes(found)
            return Response(data, media_type=media)
        return Response(found, media_type=PROTOBUF)

    def _of_engine(self, front: ServingState, tenant: Tenant, id: str) -> "asyncio.Task[Any]":
        """Return the one task that waits for a promise of the engine, however often it is asked for."""
        if len(id) > m.LONGEST_ID:
            raise ApiError(HTTPStatus.GONE, m.UNKNOWN)
        key = tenant.name, id
        if (task := self._awaited.get(key)) is None:
            task = asyncio.create_task(
                front.remote.ask_training(m.PromiseOutcome, tenant.name, m.Retrieve(request_id=id))
            )
            self._awaited[key] = task
            task.add_done_callback(partial(self._has_come, key))
        return task

    def _has_come(self, key: Awaited, task: "asyncio.Task[m.PromiseOutcome]") -> None:
        """Keep for a while what has come; what is unknown is not kept."""
        if task.cancelled() or task.exception() is not None:
            self._forget(key)
        else:
            self._came[key] = asyncio.get_running_loop().call_later(KEPT_S, self._forget, key)

    def _forget(self, key: Awaited) -> None:
        self._awaited.pop(key, None)
        if (timer := self._came.pop(key, None)) is not None:
            timer.cancel()

    async def sampler(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.GetSampler(sampler_id=request.path_params["id"]))

    async def sessions(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.ListSessions(**_page(request, 20)))

    async def session(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.GetSession(session_id=request.path_params["id"]))

    async def finish(self, front: ServingState, request: Request) -> ASGIApp:
        await body_of(front, request, MOST_COMMAND)
        return await told(front, request, m.FinishSession(session_id=request.path_params["id"]))

    async def runs(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.ListRuns(**_page(request, 20)))

    async def run(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.GetRun(run_id=request.path_params["run"]))

    async def checkpoints_of_run(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.ListCheckpoints(run_id=request.path_params["run"]))

    async def checkpoints(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.ListCheckpoints(**_page(request, 100)))

    async def delete(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.DeleteCheckpoint(**_checkpoint(request)))

    async def publish(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.ChangeCheckpoint(**_checkpoint(request), public=True))

    async def unpublish(self, front: ServingState, request: Request) -> ASGIApp:
        return await told(front, request, m.ChangeCheckpoint(**_checkpoint(request), public=False))

    async def ttl(self, front: ServingState, request: Request) -> ASGIApp:
        seconds = decoded(Ttl, await body_of(front, request, MOST_COMMAND)).ttl_seconds
        return await told(front, request, m.ChangeCheckpoint(**_checkpoint(request), ttl_seconds=seconds or 0))

    async def urls(self, front: ServingState, request: Request) -> ASGIApp:
        tenant = front.trainer(request)
        found = await front.remote.ask_training(Signed, tenant.name, m.CheckpointFiles(**_checkpoint(request)))
        base = _asked_at(front, request).removesuffix("/external_weights_urls")
        urls = {
            name: f"{base}/files/{quote(name)}?{urlencode({'expires': found.at, 'signature': signature})}"
            for name, signature in found.names.items()
        }
        return json_response({"urls": urls, "expires": found.expires})

    async def file(self, front: ServingState, request: Request) -> ASGIApp:
        """Send a file to whoever has its signature: it is fetched without a key."""
        query = request.query_params
        signed = m.SignedFile(
            **_checkpoint(request), name=request.path_params["file"], expires=_whole(query.get("expires"), 0), signature=query.get("signature", ""),
        )  # fmt: skip
        return FileResponse(await front.remote.ask_training(str, "", signed), media_type="application/octet-stream")

    async def unknown(self, front: ServingState, request: Request) -> ASGIApp:
        front.trainer(request)
        path = request.path_params["rest"][:200]
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"{request.method} /api/v1/{path}: this server has no such route",
            reason="no_such_path",
        )


class Ttl(msgspec.Struct):
    ttl_seconds: int | None = None


class UserMetadata(msgspec.Struct):
    user_metadata: msgspec.Raw = RAW


class Signed(msgspec.Struct):
    expires: str
    at: int
    names: dict[str, str]


async def body_of(front: ServingState, request: Request, most: int | None = None) -> bytes:
    return await front.bodies.read(request, most or front.options.max_body_bytes)


def asked(kind: type[m.Asked], /) -> Handler:
    """Return the handler of a verb that is answered at once."""

    async def handle(front: ServingState, request: Request) -> ASGIApp:
        tenant = front.trainer(request)
        body: Any = decoded(kind, await body_of(front, request, MOST_COMMAND))
        return json_response(await front.remote.ask_training(dict[str, Any], tenant.name, body))

    return handle


def promised(kind: type[m.Asked], /, **fields: Any) -> Handler:
    """Return the handler of a verb that is answered with a promise."""

    async def handle(front: ServingState, request: Request) -> ASGIApp:
        tenant = front.trainer(request)
        data = await body_of(front, request, MOST_COMMAND)
        try:
            body: Any = command_of(kind, data)
            body = msgspec.structs.replace(body, **fields) if fields else body
        except ApiError as wrong:
            body = _refused(data, wrong)
        return json_response(await front.remote.ask_training(m.Promise, tenant.name, body))

    return handle


async def told(front: ServingState, request: Request, body: Any) -> ASGIApp:
    """Answer with what the service tells, which may be JSON; with nothing if that is nothing."""
    found = await front.remote.ask_training(Any, front.trainer(request).name, body)  # type: ignore[arg-type]
    if isinstance(found, bytes):
        return Response(found, media_type="application/json")
    return Response(status_code=204) if found is None else json_response(found)


def command_of(kind: type[Kind], data: bytes) -> Kind:
    """Return what a body asks for. Its metadata stay as they are written.

    >>> command_of(m.CreateSession, b'{"user_metadata": {"a": [{}, {}]}}').metadata
    b'{"a": [{}, {}]}'
    """
    body = decoded(kind, data)
    if not isinstance(body, m.WithMetadata):
        return body
    metadata = bytes(decoded(UserMetadata, data).user_metadata)
    if metadata in (b"", b"null"):
        return msgspec.structs.replace(body, metadata=b"")
    if not metadata.startswith(b"{"):
        raise wrong("user_metadata is an object, or null", "user_metadata")
    return msgspec.structs.replace(body, metadata=metadata)


def _refused(data: bytes, wrong: ApiError) -> m.RefusedRequest:
    """Return what uses up the number of a request that is wrong. Raises what is wrong if it has none."""
    try:
        numbered = msgspec.json.decode(data, type=m.RefusedRequest)
    except (msgspec.MsgspecError, RecursionError):
        raise wrong from None
    return msgspec.structs.replace(numbered, refusal=str(wrong))


def _read_pass(data: bytes) -> m.Pass | m.RefusedRequest:
    try:
        return wire.read_pass(data)
    except m.TinkerRefusal as refusal:
        raise ApiError(refusal.status, str(refusal)) from None


def _check_sdk(version: str) -> None:
    try:
        wire.check_sdk(version)
    except m.TinkerRefusal as refusal:
        this_request().model = ""
        raise ApiError(refusal.status, str(refusal), reason="other_sdk") from None


def _checkpoint(request: Request) -> dict[str, Any]:
    found = request.path_params
    return {"run_id": found["run"], "checkpoint_id": f"{found['kind']}/{found['name']}"}


def _asked_at(front: ServingState, request: Request) -> str:
    """Return the address that the client has asked; a front end of a cluster tells its own."""
    return (front.options.server and request.headers.get(URL_HEADER)) or str(request.url)


def _page(request: Request, most: int) -> dict[str, Any]:
    query = request.query_params
    return {"limit": min(1000, _whole(query.get("limit"), most)), "offset": _whole(query.get("offset"), 0)}


def _whole(given: str | None, default: int) -> int:
    return int(given) if given and given.isdecimal() and len(given) < 12 else default
