"""The processes of a cluster, as a plan has them, on the host where they are started: the existing commands, and front ends."""

import secrets
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from symbiosis.base.hosts import listener_at
from symbiosis.base.procs import program
from symbiosis.cluster.controller.local_process import LocalProcess
from symbiosis.cluster.controller.preflight import config_file, config_path, executor_options, is_free, server_options
from symbiosis.cluster.plan import Plan
from symbiosis.cluster.router.router_options import RouterOptions
from symbiosis.protocol.cluster_state import Member

LET_GO_S = 1.0  # for a process that was killed to let go of its port


class Beyond(NamedTuple):
    """How other hosts reach an executor: its second endpoint, and its keys."""

    url: str
    key: Path
    tenants: Path


def executor(
    plan: Plan,
    model: str,
    number: int,
    folder: Path,
    beyond: Beyond | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> LocalProcess:
    """Return an executor. Its pages are at `host`, and at `port` if that is free; 0: wherever there is one."""
    name = executor_name(model, number)
    endpoint = endpoint_of(folder, name)
    ours: dict[str, Any] = {"listen": (endpoint,)}
    if beyond is not None:
        ours = {"listen": (endpoint, beyond.url), "key": str(beyond.key), "tenants": str(beyond.tenants)}

    def placed(before: str) -> str:
        at = kept_port(port, before, host) or free_port(host)
        options = executor_options(plan.models[model], model, metrics_port=at, metrics_host=host, **ours)
        config_file(folder, name, options)
        return url_of(host, at)

    file = str(config_path(folder, name))
    words = program(
        "symbiosis.cli.main:executor_main", "--config", file, name=name, most_s=3 * plan.drain_s, hears=True
    )
    member = Member(name=name, kind="executor", model=model, url=endpoint, pages=url_of(host, port) if port else "")
    return LocalProcess(member, words, plan.models[model].threads, placed)


def server(
    plan: Plan,
    model: str,
    number: int,
    of_model: int,
    folder: Path,
    executor: str,
    secret: str,
    host: str = "127.0.0.1",
    port: int = 0,
) -> LocalProcess:
    """Return a server, which answers whoever knows the secret. Its number is unique in the cluster; `of_model` counts those of the model.
    `port`: as of an executor."""
    member = server_member(plan, model, number, of_model)
    member = replace(member, pages=url_of(host, port) if port else "")

    def placed(before: str) -> str:
        at = kept_port(port, before, host)
        ours = {"executor": executor, "host": host, "port": at, "server_name": member.name}
        config_file(folder, member.name, server_options(plan, model, **ours))
        return url_of(host, at) if at else ""

    file = str(config_path(folder, member.name))
    words = program(
        "symbiosis.cli.main:main", "serve", "--config", file, name=member.name, most_s=plan.drain_s, hears=True
    )
    return LocalProcess(member, words, plan.models[model].threads, placed, secret=secret)


def executor_name(model: str, number: int) -> str:
    return f"{model}-executor-{number}"


def endpoint_of(folder: Path, name: str) -> str:
    """Return where processes of the same host find an executor."""
    return f"local://{folder}/{name}.sock"


def server_member(plan: Plan, model: str, number: int, of_model: int) -> Member:
    options = server_options(plan, model)
    return Member(
        name=f"{model}-server-{of_model}", kind="server", model=model, number=number, batch=options.max_batch,
        share=options.of_tenant or 0, most=options.max_requests, trains=options.train,
    )  # fmt: skip


def front(plan: Plan, number: int, listener: socket.socket, secret: str) -> LocalProcess:
    name = f"front-{number}"
    started = RouterOptions(
        cluster=plan.name, listener=listener.fileno(), host=plan.host, allowed_hosts=plan.allowed_hosts, api_keys=plan.api_keys, limits=plan.limits,
        decision_log=plan.decision_log, drain_s=plan.drain_s, name=name, front_ends=plan.front_ends,
        port=plan.metrics_port + number - 1 if plan.metrics_port else 0,
    )  # fmt: skip
    told = msgspec.json.encode(started).decode()
    words = program("symbiosis.cluster.router.router_process:main", told, name=name, hears=True)
    return LocalProcess(Member(name=name, kind="front"), words, descriptors=(listener.fileno(),), secret=secret)


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def kept_port(port: int, before: str, host: str) -> int:
    """Return the port that a plan names, or at which the pages were before. 0: there is none, or another program has it."""
    wanted, deadline = port or urlsplit(before).port or 0, time.monotonic() + LET_GO_S
    while wanted and not is_free(host, wanted):
        if time.monotonic() > deadline:
            return 0
        time.sleep(0.02)
    return wanted


def new_secret() -> str:
    """Return what the front ends and servers of one run of a cluster share."""
    return secrets.token_hex(32)


def free_port(host: str = "127.0.0.1") -> int:
    with listener_at(host, 0) as found:
        return int(found.getsockname()[1])
