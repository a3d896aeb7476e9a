"""The routes of a front end: those of `symbiosis serve`, and what is told of the cluster."""

import asyncio
import os
import random
import shutil
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.cluster.placement import RoutingRequest, State, version_of
from symbiosis.cluster.router import adapter_uploads
from symbiosis.cluster.router.cluster_page import ClusterPage
from symbiosis.cluster.router.completion_fields import CompletionFields
from symbiosis.cluster.router.relay import Relay
from symbiosis.cluster.router.scrape_targets import METRICS, metrics_of, targets
from symbiosis.cluster.router.server_registry import ServerRegistry, answer_of
from symbiosis.cluster.router.upstream import Lost
from symbiosis.executor.observe.process_figures import process_figures
from symbiosis.server import api_app
from symbiosis.server.api_app import Api, ApiState, json_response
from symbiosis.server.api_errors import ApiError, busy, storing, unknown_model, wrong
from symbiosis.server.api_keys import Tenant
from symbiosis.server.metrics import Labelled, families, observed
from symbiosis.server.request_record import this_request
from symbiosis.server.tracing import Tracing
from symbiosis.server.uploads import received

MOST_BYTES = 16 << 20  # of a body
MOST_HELD = 1 << 30  # bytes of bodies whose answers are not over, and of answers that are not whole
LONGEST_NAME = 256
PREFIX = "symbiosis_cluster_"


class RouterState(ApiState):
    """What the routes share."""

    def __init__(
        self, view: ServerRegistry, api_keys: str | None, host: str = "127.0.0.1", allowed_hosts: Sequence[str] = (),
        tracing: Tracing | None = None, processes: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(api_keys, host, allowed_hosts, tracing, processes, threads=2)
        self.view, self.shown = view, ClusterPage(view)
        self._held = FairShare(MOST_HELD)  # bytes

    def model_of(self, name: str) -> tuple[str, str | None]:
        """Return the model that serves this name, and the adapter, None for the model itself."""
        models = self.view.told.models
        if name in models:
            return name, None
        if len(name) > LONGEST_NAME:
            raise unknown_model(name, self.view.told.names)
        for model in models:
            folder = self.view.told.adapters.get(model)
            if folder and "/" not in name and os.path.isfile(f"{folder}/{name}/adapter_config.json"):  # noqa: PTH113
                return model, name
        if len(models) == 1:
            return models[0], name  # the server knows
        raise unknown_model(name, self.view.told.names)

    def is_of(self, name: str, model: str) -> bool:
        """Whether requests for this name go to this model, and to no other."""
        try:
            return name not in self.view.told.aliases and self.model_of(name)[0] == model
        except ApiError:
            return False

    def check_room(self, tenant: Tenant, sequences: int) -> None:
        """Raise `ApiError` if too many requests wait."""
        if not self.view.room.has(tenant.name, sequences):
            raise busy("too many requests wait for a server", "share_of_key")

    def relay(self, request: Request, tenant: Tenant, asked: CompletionFields) -> Relay:
        """Return the answer to a completion, if the tenant may have so many."""
        self.view.look()  # `shift` and `apply` hold from the next request on
        shares = self.view.told.aliases.get(asked.model)
        model, adapter = self.model_of(version_of(shares, random.random()) if shares else asked.model)
        sequences, longest = self.view.most(model)
        for most in (self.view.limits.get(tenant.name, sequences), sequences):
            if asked.sequences > most:
                raise wrong(f"at most {most} completions, and this would be {asked.sequences}", "n")
        self.check_room(tenant, asked.sequences)
        tokens, is_vain = asked.tokens + asked.most_tokens, asked.longest > longest
        wish = RoutingRequest(
            model=model, adapter=adapter, sequences=asked.sequences, pages=0 if is_vain else tokens, tenant=tenant.name, is_vain=is_vain,
        )  # fmt: skip
        admission, held = tenant.admit(asked.sequences, self.keys.clock(), tokens), Lease(self._held, tenant.name)
        admission.at_end.append(held.end)
        if not held.take(asked.size):
            admission.end()
            raise busy("what waits and runs is too large together", "share_of_key")
        record = this_request()
        record.model, record.adapter, record.choices = model, adapter or model, asked.sequences
        return Relay(self.view, request.url.path, _passed_on(request), asked, wish, held, admission)

    def drop_what_is_gone(self) -> None:
        """Count no more what adapters did that are gone."""
        for model, name in self.observer.adapters.named:
            if name != model and not self.is_of(name, model):
                self.observer.adapters.drop((model, name))


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
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", one_model),
        ("PUT", "/v1/adapters/{name:path}", put_adapter),
        ("DELETE", "/v1/adapters/{name:path}", delete_adapter),
        ("GET", "/health", health),
        ("GET", "/cluster", cluster),
        ("GET", "/cluster/targets", told_targets),
        ("GET", f"{METRICS}/{{name}}", relayed_metrics),
        ("GET", "/version", api_app.version),
        ("GET", "/metrics", metrics),
        ("GET", "/figures", figures),
        ("GET", "/", api_app.shown_page),
    ]
    return Api(front, table)


async def completion(front: RouterState, request: Request) -> ASGIApp:
    tenant = front.tenant(request)
    tenant.check(1, front.keys.clock())
    front.check_room(tenant, 1)
    data, is_chat = await front.bodies.read(request, MOST_BYTES), request.url.path.endswith("/chat/completions")
    front.view.unread += 1
    try:
        asked = await front.made(request, tenant, len(data), 1, lambda: CompletionFields(data, is_chat))
    finally:
        front.view.unread -= 1
    return front.relay(request, tenant, asked)


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
                    answer = await answer_of(seen.member.url, "/v1/models", _passed_on(request))
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
                front.view, model or front.view.told.models[0], folder, name, sent, _passed_on(request)
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


def _passed_on(request: Request) -> dict[str, str]:
    """Return the headers of what a server is asked for this request: who asks, and what it is called in logs and traces."""
    record, authorization = this_request(), request.headers.get("authorization")
    told = {"X-Request-Id": record.id, **record.trace_headers}
    return {**told, "Authorization": authorization} if authorization else told


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
    return json_response(await front.shown.figures(_passed_on(request), tenant.may_change_adapters))


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
        gauges: list[Labelled] = [
            ("running", "Sequences by server.", of_server, {key: each.told().running for key, each in seen.items()}),
            ("ready", "1 if a server takes requests.", of_server, {key: each.state is State.READY for key, each in seen.items()}),
            ("member_ready", "1 if a process works that is to.", of_member, {key: state == State.READY for key, state in states.items()}),
            (
                "other_base", "1 if a process serves another base than its model has.", of_member,
                {key: state == State.OTHER_BASE for key, state in states.items()},
            ),
            ("waiting", "Sequences that wait for a server.", ["model"], view.waiting),
        ]  # fmt: skip
        counters: list[Labelled] = [
            ("moved", "Requests that left a server, by why.", ["why"], view.moved),
            ("completions", "By model and tenant.", of_tenant, observer.completions),
            ("tokens", "By model and tenant.", of_tenant, observer.tokens),
        ]
        told = [*families(GaugeMetricFamily, PREFIX, gauges), *families(CounterMetricFamily, PREFIX, counters)]
        return [*told, *observed(PREFIX, observer), *process_figures()]
