"""The process of a front end. It is started with a socket that listens, which all front ends of a cluster share; a second one is its own."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import msgspec

from symbiosis.base import procs
from symbiosis.base.key_lines import part_of
from symbiosis.base.logs import JsonLines, write_lines
from symbiosis.base.threads import take_turns_often
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_options import RouterOptions
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.cluster.router.upstream import show_to_servers
from symbiosis.server import tracing
from symbiosis.server.connections import server_of


async def serve(started: RouterOptions, listener: socket.socket) -> None:
    """Serve until SIGTERM; what is under way then is finished for at most `drain_s`."""
    log = JsonLines(Path(started.decision_log), "decision") if started.decision_log else None
    limits = {tenant: part_of(most, started.front_ends) for tenant, most in started.limits.items()}
    view = ServerRegistry(started.cluster, limits, log)
    following = asyncio.create_task(view.follow())
    own = socket.create_server(("127.0.0.1", started.port), reuse_port=True)  # with a successor, while it ends itself
    spans = tracing.opened("symbiosis-front")
    front = RouterState(view, started.api_keys, started.host, started.allowed_hosts, spans, started.front_ends)
    print(f"{started.name} at http://127.0.0.1:{own.getsockname()[1]}", flush=True)
    await server_of(make_app(front), front.observer, [listener, own], started.drain_s).serve(sockets=[listener, own])
    following.cancel()


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # uvicorn raises it once more at its end: spans are sent then
    write_lines()
    take_turns_often()
    started = msgspec.json.decode(sys.argv[1], type=RouterOptions)
    show_to_servers(procs.heard)
    asyncio.run(serve(started, socket.socket(fileno=started.listener)))
