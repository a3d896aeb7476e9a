"""Traces by OpenTelemetry, where its package is installed and `OTEL_...` says where spans go. Attributes have vLLM's names."""

import logging
import os
import sys
import time
from importlib.metadata import entry_points
from typing import Any

from starlette.types import Scope

from symbiosis.server.request_record import RequestRecord
from symbiosis.serving.request import Sampling

logger = logging.getLogger("symbiosis")

WANTED = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
MISSING = "traces are off, which %s asks for: %s. The packages are those of an extra: pip install 'symbiosis-llm[otel]'"


def opened(service: str) -> "Tracing | None":
    """Return what follows the requests of this process; None if traces are not asked for. What keeps spans from being sent is logged.

    Args:
        service: What the process is called, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` say otherwise.
    """
    asked = [name for name in WANTED if os.environ.get(name, "none") != "none"]
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get(WANTED[0]) == "none":
        return None
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return Tracing(trace.get_tracer("symbiosis"))  # as `opentelemetry-instrument` has set it up
    if not asked:
        return None
    try:
        return Tracing(_provider(service).get_tracer("symbiosis"))
    except Exception as error:  # of a package of others, or since there is none
        logger.error(MISSING, asked[0], error)
        return None


def _provider(service: str) -> Any:
    """Return a provider with the exporters that the environment names. Its sampler and limits are set there, too."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    provider = TracerProvider(resource=resource)
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip())))
    return provider


def _exporter(name: str) -> Any:
    if name == "otlp":
        variables = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        protocol = next(filter(None, map(os.environ.get, variables)), "http/protobuf")
        name = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}.get(protocol, protocol)
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        return found.load()()
    raise LookupError(f"no package has the exporter {name!r}")


class Tracing:
    """Follows requests by spans of a tracer."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry import propagate, trace

        self._tracer, self._trace, self._propagate = tracer, trace, propagate

    def begin(self, record: RequestRecord, scope: Scope) -> Any:
        """Begin the span of a request, within the trace that its headers tell of. What is asked of others for it is within this span."""
        span = self._tracer.start_span(
            scope["method"], self._propagate.extract(record.trace_headers), self._trace.SpanKind.SERVER, start_time=_ns(record.came),
            attributes={"http.request.method": scope["method"], "url.path": scope["path"], "gen_ai.request.id": record.id},
        )  # fmt: skip
        record.trace_headers = {}
        self._propagate.inject(record.trace_headers, self._trace.set_span_in_context(span))
        return span

    def end(self, record: RequestRecord, span: Any, route: str) -> None:
        """End it, with spans of what has been done for it."""
        if record.sampling is not None and record.first:
            self._of_model(record, record.sampling, self._trace.set_span_in_context(span))
        span.update_name(f"{span.attributes['http.request.method']} {route}" if span.is_recording() else "")
        span.set_attributes(
            {"http.route": route, "http.response.status_code": record.status, "symbiosis.tenant": record.tenant}
        )
        if record.reason:
            span.set_attribute("error.type", record.reason)
            if record.status >= 500:
                span.set_status(self._trace.StatusCode.ERROR, record.message)
        span.end()

    def _of_model(self, record: RequestRecord, sampling: Sampling, context: Any) -> None:
        """Make the span of what the engine did, which is over, and those of its parts."""
        came, begun, first, last = record.came, record.begun or record.first, record.first, record.last
        attributes = {
            "request.id": record.id, "request.n": record.choices, "request.max_tokens": sampling.max_tokens,
            "request.temperature": sampling.temperature, "request.top_p": sampling.top_p, "response.model": record.adapter,
            "usage.prompt_tokens": record.prompt_tokens, "usage.completion_tokens": record.count, "usage.num_sequences": record.choices,
            "latency.time_in_queue": begun - came, "latency.time_to_first_token": first - came, "latency.e2e": last - came,
            "latency.time_in_model_prefill": first - begun, "latency.time_in_model_decode": last - first,
            "latency.time_in_model_inference": last - begun,
        }  # fmt: skip
        named = {f"gen_ai.{name}": value for name, value in attributes.items()}
        span = self._tracer.start_span("llm_request", context, start_time=_ns(came), attributes=named)
        within = self._trace.set_span_in_context(span)
        for name, start, end in (("queue", came, begun), ("prefill", begun, first), ("decode", first, last)):
            self._tracer.start_span(name, within, start_time=_ns(start)).end(_ns(end))
        span.end(_ns(last))


def _ns(moment: float) -> int:
    """Return when a moment of the monotonic clock was, in nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)
