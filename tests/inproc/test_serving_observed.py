"""One request through a front end, a server and its engine: its id in every answer and line, its spans in one trace, and its figures."""

import asyncio
import logging
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

import symbiosis
from symbiosis.base.logs import TextFormatter
from symbiosis.cluster.router import app as of_cluster
from symbiosis.cluster.router.server_registry import Seen, ServerRegistry
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.protocol.cluster_state import Member, Told
from symbiosis.server.connections import HttpConnection
from symbiosis.server.http_process import tokenizer_of
from symbiosis.server.ipc.engine_client import EngineClient
from symbiosis.server.ipc.engine_ipc import EngineReady, FrontOptions
from symbiosis.server.ipc.engine_server import EngineServer
from symbiosis.server.openai_api import make_app
from symbiosis.server.serving_state import ServingState
from symbiosis.server.tracing import Tracing
from symbiosis.serving import Engine

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"X-Request-Id": "req-17", "traceparent": f"00-{TRACE}-{PARENT}-01"}
ASKED = {"prompt": "def f(", "max_tokens": 12, "temperature": 0.5, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters") / "adapters"
    shutil.copytree(DEMO_MODEL / "adapters", made)
    (made / "broken").mkdir()
    (made / "broken" / "adapter_config.json").write_text("{")
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, adapters=folder, memory=1 << 25) as made,
    ):
        yield made


class Spans:
    """What a process has told of, by name."""

    def __init__(self) -> None:
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider.get_tracer("test"))

    @property
    def by_name(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@asynccontextmanager
async def server(engine: Engine, tracing: Tracing | None = None) -> AsyncIterator[tuple[ServingState, str]]:
    """The server of an engine, with all of it in this process, and its URL."""
    ours, theirs = socket.socketpair()
    welcome = EngineReady(
        model="demo", longest=engine.longest, most_tokens=engine.most_tokens, vocabulary=engine.vocabulary
    )
    link = EngineServer(engine, ours, welcome)
    remote = await EngineClient.connect(theirs)
    options = FrontOptions(model="demo", folder=str(DEMO_MODEL))
    front = ServingState(remote, tokenizer_of(options), options, tracing)
    config = uvicorn.Config(make_app(front), http=HttpConnection, lifespan="off", log_config=None, access_log=False)
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        try:
            yield front, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            with suppress(asyncio.CancelledError):
                await serving
            remote.close()
            await asyncio.to_thread(link.close)


def front_end(url: str, tracing: Tracing | None = None) -> httpx.AsyncClient:
    """A front end of a cluster with this server, as a client sees it."""
    view = ServerRegistry("none", {})
    member = Member(name="s", kind="server", model="demo", number=1, batch=8, most=64, url=url, state="ready")
    view.told, view.seen = Told(name="none", url="", members=(member,)), {1: Seen(member)}
    view._put(view.seen[1])
    transport = httpx.ASGITransport(of_cluster.make_app(of_cluster.RouterState(view, None, tracing=tracing)))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30)


def samples(text: str) -> dict[tuple[str, ...], float]:
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in found}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_trace_from_the_client_to_the_engine(engine: Engine, stream: bool) -> None:
    at_front, at_server = Spans(), Spans()

    async def ask() -> httpx.Response:
        async with server(engine, at_server.tracing) as (_, url), front_end(url, at_front.tracing) as web:
            return await web.post(
                "/v1/completions", json={"model": "python", "stream": stream, **ASKED}, headers=HEADERS
            )

    answer = asyncio.run(ask())
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "req-17"
    assert '"id":"cmpl-req-17"' in answer.text, "as vLLM makes it"
    (front,), spans = at_front.by_name.values(), at_server.by_name
    assert spans.keys() == {"POST /v1/completions", "llm_request", "queue", "prefill", "decode"}
    http, request = spans["POST /v1/completions"], spans["llm_request"]
    assert f"{front.parent.span_id:016x}" == PARENT and http.parent.span_id == front.context.span_id
    assert request.parent.span_id == http.context.span_id
    assert {f"{span.context.trace_id:032x}" for span in (front, *spans.values())} == {TRACE}
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent.span_id for part in parts} == {request.context.span_id}
    times = [request.start_time, *(part.end_time for part in parts), http.end_time, front.end_time]
    assert times == sorted(times) and abs(request.start_time - http.start_time) < 1e7
    told = request.attributes
    wanted = {
        "request.id": "req-17", "response.model": "python", "request.n": 1, "request.max_tokens": 12, "request.temperature": 0.5,
        "usage.prompt_tokens": 6, "usage.completion_tokens": 12,
    }  # fmt: skip
    assert {name: told[f"gen_ai.{name}"] for name in wanted} == wanted
    latencies = [told[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")]  # fmt: skip
    assert min(latencies) > 0 and sum(latencies) == pytest.approx(told["gen_ai.latency.e2e"])


def test_without_traces_of_its_own_a_front_end_passes_the_clients_on(engine: Engine) -> None:
    at_server = Spans()

    async def ask() -> None:
        async with server(engine, at_server.tracing) as (_, url), front_end(url) as web:
            for parent in (HEADERS["traceparent"], "00-nonsense"):
                headers = {**HEADERS, "traceparent": parent, "tracestate": "vendor=1"}
                await web.post("/v1/completions", json={"model": "demo", **ASKED}, headers=headers)

    asyncio.run(ask())
    first, second = (span for span in at_server.exporter.get_finished_spans() if span.name.startswith("POST"))
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, PARENT)
    assert first.context.trace_state["vendor"] == "1" and second.parent is None


def test_a_refused_request_is_one_in_every_process(engine: Engine) -> None:
    """In the lines of the front end, of the server's HTTP and of its engine, and in the answer."""
    spans, lines = Spans(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(TextFormatter().format(record))  # type: ignore[method-assign]
    logging.getLogger("symbiosis").addHandler(handler)

    async def ask() -> list[httpx.Response]:
        async with server(engine, spans.tracing) as (_, url), front_end(url) as web:
            broken = await web.post("/v1/completions", json={"model": "broken", **ASKED}, headers=HEADERS)
            body = {"model": "demo", **ASKED, "temperature": -1}
            return [broken, await web.post("/v1/completions", json=body, headers={"X-Request-Id": "req-18"})]

    try:
        broken, wrong = asyncio.run(ask())
    finally:
        logging.getLogger("symbiosis").removeHandler(handler)
    assert broken.status_code == 500 and broken.headers["x-request-id"] == "req-17"
    assert wrong.status_code == 400 and wrong.headers["x-request-id"] == "req-18"
    of_broken = [line for line in lines if "req-17" in line]
    assert sum("request refused" in line for line in of_broken) >= 2, "at the server and at the front end"
    assert any("has no adapter_model.safetensors" in line and "refused" not in line for line in of_broken), (
        "in the engine"
    )
    assert sum("req-18" in line for line in lines) == 2
    failed = [span.attributes["error.type"] for span in spans.exporter.get_finished_spans()]
    assert set(failed) == {"failed", "invalid_request"}


def test_latencies_are_told_by_adapter_and_go_with_it(engine: Engine, folder: Path) -> None:
    shutil.copytree(folder / "python", folder / "passing")

    async def ask() -> tuple[Any, Any]:
        async with server(engine) as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as web:
            for name in ("passing", "demo"):
                assert (await web.post("/v1/completions", json={"model": name, "n": 2, **ASKED})).status_code == 200
            assert (await web.post("/v1/completions", json={"model": "no-such", **ASKED})).status_code == 404
            before = samples((await web.get("/metrics")).text)
            assert (await web.delete("/v1/adapters/passing")).status_code == 204
            return before, samples((await web.get("/metrics")).text)

    before, after = asyncio.run(ask())
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        of_adapters = {
            key[1:]: n for key, n in before.items() if key[0] == f"symbiosis_serve_adapter_{name}_seconds_count"
        }
        assert of_adapters == {("demo", "passing"): 1, ("demo", "demo"): 1}
        assert before[f"symbiosis_serve_tenant_{name}_seconds_count", ""] == 2
        assert 0 < before[f"symbiosis_serve_adapter_{name}_seconds_sum", "demo", "passing"] < 20
    assert before["symbiosis_serve_refused_requests_total", "", "404", "no_such_model"] == 1
    assert not any("passing" in key for key in after) and any("demo" in key for key in after)
