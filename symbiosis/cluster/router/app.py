"""The routes of a front end: those of `symbiosis serve`, and what is told of the cluster."""

import asyncio
import shutil
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from symbiosis.cluster.placement import State
from symbiosis.cluster.router import adapter_uploads, training_requests
from symbiosis.cluster.router.completion_fields import CompletionFields, with_fields
from symbiosis.cluster.router.generate_requests import GenerateFields
from symbiosis.cluster.router.pooling_requests import PoolingFields
from symbiosis.cluster.router.response_requests import ResponseFields
from symbiosis.cluster.router.router_state import RouterState, passed_on
from symbiosis.cluster.router.scrape_targets import METRICS, metrics_of, targets
from symbiosis.cluster.router.server_registry import Seen, answer_of
from symbiosis.cluster.router.training_requests import HEARTBEAT, ids_of, of_other_base, server_of
from symbiosis.cluster.router.upstream import Lost
from symbiosis.executor.observe.process_figures import process_figures
from symbiosis.server import api_app, pooling_routes
from symbiosis.server.api_app import Api, json_response
from symbiosis.server.api_errors import ApiError, storing, unknown_model
from symbiosis.server.api_keys import Tenant
from symbiosis.server.metrics import FamilyFigures, families, observed
from symbiosis.server.openai_protocol import decoded
from symbiosis.server.server_marks import mark_in, mark_in_response
from symbiosis.server.uploads import received

MOST_BYTES = 16 << 20  # of a body
SIGNED_FILE = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/files/{file}"
PREFIX = "symbiosis_cluster_"


class NamedModel(msgspec.Struct):
    """Of a body, what is read here. All else is skipped."""

    model: str | None = None


class ListedModel(msgspec.Struct):
    """What a front end has to know of a model or an adapter. Servers say more."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """What a server lists."""

    data: list[ListedModel]


def make_app(front: RouterState) -> ASGIApp:
    table = [
        ("POST", "/v1/completions", completion),
        ("POST", "/v1/chat/completions", completion),
        ("POST", "/v1/responses", responses),
        ("GET", "/v1/responses/{id}", one_response),
        ("DELETE", "/v1/responses/{id}", one_response),
        *(("POST", path, generated) for path in ("/generate", "/generate_stream", "/")),
        *((method, path, pooled) for method, path, _ in pooling_routes.TABLE),
        ("POST", "/tokenize", tokens),
        ("POST", "/detokenize", tokens),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", one_model),
        ("PUT", "/v1/adapters/{name:path}", put_adapter),
        ("DELETE", "/v1/adapters/{name:path}", delete_adapter),
        ("GET", "/health", health),
        ("GET", "/cluster", cluster),
        ("GET", "/cluster/targets", told_targets),
        ("GET", f"{METRICS}/{{name}}", relayed_metrics),
        ("GET", "/api/v1/sessions", sessions),
        ("GET", "/api/v1/get_server_capabilities", capabilities),
        ("POST", "/api/v1/sessions/{id}/finish", finish),
        ("GET", SIGNED_FILE, signed_file),
        *((method, "/api/v1/{rest:path}", training) for method in ("GET", "POST", "PUT", "DELETE")),
        ("GET", "/version", api_app.version),
        ("GET", "/metrics", metrics),
        ("GET", "/figures", figures),
        ("GET", "/", api_app.shown_page),
    ]
    return Api(front, table)


async def _asked_text(front: RouterState, request: Request) -> tuple[Tenant, bytes]:
    """Return who asks for texts, and the body, if there is room for one more."""
    tenant = front.payer(request)
    front.check_room(tenant, 1)
    return tenant, await front.bodies.read(request, MOST_BYTES)


def _server_of_run(front: RouterState, model: str | None) -> Seen | None:
    """Return the server that has the run of this name, None if it is no name of a run."""
    if model is None or not training_requests.names_a_run(model):
        return None
    front.view.look()
    return server_of(front.view, mark_in(model))


async def completion(front: RouterState, request: Request) -> ASGIApp:
    tenant, data = await _asked_text(front, request)
    is_chat = request.url.path.endswith("/chat/completions")
    front.view.unread += 1
    try:
        asked = await front.made(request, tenant, len(data), 1, lambda: CompletionFields(data, is_chat))
    finally:
        front.view.unread -= 1
    if at := _server_of_run(front, asked.model):
        return front.complete_at(at, request, tenant, asked)
    return front.relay(request, tenant, asked)


async def responses(front: RouterState, request: Request) -> ASGIApp:
    tenant, data = await _asked_text(front, request)
    asked = await front.made(request, tenant, len(data), 1, lambda: decoded(ResponseFields, data))
    return front.respond(request, tenant, asked, data, _server_of_run(front, asked.model))


async def generated(front: RouterState, request: Request) -> ASGIApp:
    """Answer `/generate` of text-generation-inference and LoRAX."""
    tenant, data = await _asked_text(front, request)
    asked = await front.made(request, tenant, len(data), 1, lambda: GenerateFields(data))
    return front.generate(request, tenant, asked, data, _server_of_run(front, asked.model))


async def one_response(front: RouterState, request: Request) -> ASGIApp:
    """Tell or remove a response, at the server that has it."""
    tenant, id = front.tenant(request), request.path_params["id"]
    front.view.look()
    if (seen := front.view.marked(mark_in_response(id))) is None:
        raise ApiError(404, f"there is no response {id[:100]!r}: its server is gone, or it is of another cluster")
    return front.forward(request, tenant.name, seen, b"")


async def pooled(front: RouterState, request: Request) -> ASGIApp:
    """Tell vectors, classes or scores of texts."""
    tenant, data = await _asked_text(front, request)
    asked = await front.made(request, tenant, len(data), 1, lambda: PoolingFields(data))
    return front.pool(request, tenant, asked, data, _server_of_run(front, asked.model))


async def tokens(front: RouterState, request: Request) -> ASGIApp:
    """Tell tokens of texts, or texts of tokens."""
    tenant = front.payer(request)
    data = await front.bodies.read(request, MOST_BYTES)
    asked = await front.made(request, tenant, len(data), 1, lambda: decoded(NamedModel, data))
    return front.tokens(request, tenant, asked.model, data)


async def training(front: RouterState, request: Request) -> ASGIApp:
    """Answer a request of Tinker's API at the server that has its session."""
    path, tenant = request.url.path, front.trainer(request)
    data = await front.bodies.read(request, MOST_BYTES)
    media = request.headers.get("content-type", "").partition(";")[0]
    ids = await front.made(request, tenant, len(data), 1, lambda: ids_of(data, media))
    front.view.look()
    if path == training_requests.NEW:
        return front.forward(request, tenant.name, training_requests.for_new_session(front.view), data)
    seen = server_of(front.view, mark_in(path) or ids.mark, ids.base_model)
    if path in training_requests.OF_A_BASE and (other := of_other_base(front.view, seen, ids)) is not None:
        id = await training_requests.session_at(other, str(ids.session_id), request)
        return front.forward(request, tenant.name, other, with_fields(data, {"session_id": id}))
    if path == HEARTBEAT:
        await training_requests.tell_others(front.view, seen, str(ids.session_id), request)
    return front.forward(request, tenant.name, seen, data)


async def finish(front: RouterState, request: Request) -> ASGIApp:
    front.trainer(request)
    id = request.path_params["id"]
    front.view.look()
    await training_requests.tell_others(front.view, server_of(front.view, mark_in(id)), id, request)
    return await training(front, request)


async def capabilities(front: RouterState, request: Request) -> ASGIApp:
    front.trainer(request)
    front.view.look()
    found = await training_requests.capabilities(front.view, request)
    return json_response({"supported_models": found}) if found else await training(front, request)


async def signed_file(front: RouterState, request: Request) -> ASGIApp:
    """Answer with a file of a checkpoint: it is asked for without a key, by a signature."""
    front.view.look()
    return front.forward(request, "", server_of(front.view, mark_in(request.url.path)), b"")


async def sessions(front: RouterState, request: Request) -> ASGIApp:
    front.trainer(request)
    front.view.look()
    return json_response({"sessions": await training_requests.sessions(front.view, request)})


async def models(front: RouterState, request: Request) -> ASGIApp:
    return json_response({"object": "list", "data": await _models(front, request)})


async def one_model(front: RouterState, request: Request) -> ASGIApp:
    name = request.path_params["name"]
    for each in await _models(front, request):
        if each["id"] == name:
            return json_response(each)
    raise unknown_model(name, front.view.told.names)


async def _models(front: RouterState, request: Request) -> list[dict[str, Any]]:
    """Return what one server of each model lists, as far as it can be asked for here. Adapters of two models may have one name."""
    front.tenant(request)
    front.view.look()
    found: list[dict[str, Any]] = []
    for model in front.view.told.models:
        for seen in front.view.seen.values():
            if seen.member.model == model and seen.state is State.READY:
                try:
                    answer = await answer_of(seen.member.url, "/v1/models", passed_on(request))
                    msgspec.convert(answer, Models)
                    found += [each for each in answer["data"] if front.is_of(each["id"], model)]
                    break
                except (Lost, msgspec.ValidationError):  # another one may do better
                    continue
    longest = {each["id"]: each["max_model_len"] for each in found if each.get("max_model_len")}
    return [*found, *(_alias(name, shares, longest) for name, shares in front.view.told.aliases.items())]


def _alias(name: str, shares: dict[str, float], longest: dict[str, int]) -> dict[str, Any]:
    """Return what is listed of a name for several models: as many tokens as each of them takes."""
    told: dict[str, Any] = {
        "id": name, "object": "model", "created": 0, "owned_by": "symbiosis", "root": name, "parent": None,
    }  # fmt: skip
    known = [longest[model] for model, share in shares.items() if share and model in longest]
    return told | ({"max_model_len": min(known)} if known else {})


async def put_adapter(front: RouterState, request: Request) -> ASGIApp:
    """Take an adapter for all servers of a model."""
    front.administrator(request)
    name, model = request.path_params["name"], request.query_params.get("model")
    front.view.look()
    adapter_uploads.check_new(front.view.told, model, name)
    folder = adapter_uploads.folder_for(front.view, model, name)
    with storing(adapter_uploads.FOLDER.format(model or front.view.told.models[0]), folder):
        sent = adapter_uploads.new_folder(folder)
        try:
            await received(front.bodies, adapter_uploads.MOST_BYTES, request, sent)
            await adapter_uploads.install(
                front.view, model or front.view.told.models[0], folder, name, sent, passed_on(request)
            )
        except BaseException:
            shutil.rmtree(sent, ignore_errors=True)
            raise
    return json_response({"name": name})


async def delete_adapter(front: RouterState, request: Request) -> ASGIApp:
    front.administrator(request)
    name = request.path_params["name"]
    front.view.look()
    folder = adapter_uploads.folder_for(front.view, request.query_params.get("model"), name)
    with storing(adapter_uploads.FOLDER.format("a model"), folder):  # what others have put there is moved aside first
        was_there = await asyncio.to_thread(adapter_uploads.remove, folder, name)
    if not was_there:
        raise unknown_model(name, front.view.told.names)
    return Response(status_code=204)


async def health(front: RouterState, request: Request) -> ASGIApp:
    """Answer 200 if each model has a server that takes requests."""
    seen = front.view.seen.values()
    serving = {each.member.model for each in seen if each.state is State.READY}
    missing = [model for model in front.view.told.models if model not in serving] or ([] if seen else ["any model"])
    told = {
        "status": f"no server of {missing[0]} is ready" if missing else "serving",
        "requests": sum(each.mine for each in seen),
        "waiting": front.view.waiting,
        "running": {str(number): each.mine for number, each in front.view.seen.items()},
        "ready": [number for number, each in front.view.seen.items() if each.state is State.READY],
        "moved": front.view.moved.total(),
    }
    return json_response(told, 503 if missing else 200)


async def cluster(front: RouterState, request: Request) -> ASGIApp:
    """Tell of all processes and their load, to whoever may change adapters: it is about all tenants."""
    front.administrator(request)
    return json_response(front.shown.cluster())


async def told_targets(front: RouterState, request: Request) -> ASGIApp:
    """Tell Prometheus where the figures of all processes are, or, with `?relayed`, that they are here."""
    front.administrator(request)
    front.view.look()
    return json_response(
        targets(front.view.told, request.headers.get("host") if "relayed" in request.query_params else None)
    )


async def relayed_metrics(front: RouterState, request: Request) -> ASGIApp:
    """Answer with the figures of one process, which are about all tenants."""
    front.administrator(request)
    front.view.look()
    status, text = await metrics_of(front.view.told, request.path_params["name"])
    return Response(text, status, media_type="text/plain; version=0.0.4")


async def figures(front: RouterState, request: Request) -> ASGIApp:
    """Return what the page shows."""
    tenant = front.tenant(request)
    told = await front.shown.figures(passed_on(request), tenant.line.may_change_adapters)
    if any(each.member.trains for each in front.view.seen.values()):
        told["runs"] = await training_requests.of_all(front.view, "/figures", "runs", request)
    return json_response(told)


async def metrics(front: RouterState, request: Request) -> ASGIApp:
    front.drop_what_is_gone()
    registry = CollectorRegistry()
    registry.register(_Collected(front))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _Collected:
    """The figures of one front end for Prometheus."""

    def __init__(self, front: RouterState) -> None:
        self._front = front

    def collect(self) -> list[Metric]:
        view, observer = self._front.view, self._front.observer
        seen = {(each.member.model, each.member.name): each for each in view.seen.values()}
        states = {(each.kind, each.model, each.name): each.state for each in view.told.members}
        of_server, of_member, of_tenant = ["model", "server"], ["kind", "model", "member"], ["model", "tenant"]
        gauges: list[FamilyFigures] = [
            ("running", "Sequences by server.", of_server, {key: each.told().running for key, each in seen.items()}),
            ("ready", "1 if a server takes requests.", of_server, {key: each.state is State.READY for key, each in seen.items()}),
            ("member_ready", "1 if a process works that is to.", of_member, {key: state == State.READY for key, state in states.items()}),
            (
                "other_base", "1 if a process serves another base than its model has.", of_member,
                {key: state == State.OTHER_BASE for key, state in states.items()},
            ),
            ("waiting", "Sequences that wait for a server.", ["model"], view.waiting),
        ]  # fmt: skip
        counters: list[FamilyFigures] = [
            ("moved", "Requests that left a server, by why.", ["why"], view.moved),
            ("completions", "By model and tenant.", of_tenant, observer.completions),
            ("tokens", "By model and tenant.", of_tenant, observer.tokens),
        ]
        told = [*families(GaugeMetricFamily, PREFIX, gauges), *families(CounterMetricFamily, PREFIX, counters)]
        return [*told, *observed(PREFIX, observer, self._front.keys), *process_figures()]
