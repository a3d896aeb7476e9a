"""The `symbiosis-executor` process: loads a model, serves it, drains on SIGTERM."""

import gc
import logging
import signal

from symbiosis.config import Options, default_endpoint
from symbiosis.errors import ConfigError
from symbiosis.executor.load import load_model
from symbiosis.executor.log import log, set_up_logging
from symbiosis.executor.metrics import PrometheusCollector
from symbiosis.executor.server import Server
from symbiosis.executor.store import Store


def serve(model_name: str, options: Options) -> None:
    """Serve until SIGTERM or SIGINT; what has come by then is still answered."""
    set_up_logging(options.log_format)
    store = Store(load_model(model_name, options.dtype, options.device), options.serve)
    gc.collect()
    server = Server(store, options)
    server.listen(options.listen or (default_endpoint(),))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.drain())
    if options.metrics_port is not None:
        serve_metrics(server, options.metrics_port)
    endpoints = " ".join(listener.url for listener in server.listeners)
    served = len(store.served())
    print(
        f"symbiosis-executor ready: {model_name} ({served} layers, {store.nbytes / 2**20:.0f} MiB) at {endpoints}",
        flush=True,
    )
    server.run()
    log(logging.INFO, "stopped", calls=sum(line.calls for line in server.figures.lines.values()))


def serve_metrics(server: Server, port: int) -> None:
    """Prometheus metrics at http://127.0.0.1:PORT/metrics."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(PrometheusCollector(server))
    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics at 127.0.0.1:{port}: {error}") from None
