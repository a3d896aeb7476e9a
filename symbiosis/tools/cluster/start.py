"""The processes of a cluster on this host, as a plan has them: the existing commands, and front ends."""

import socket
from pathlib import Path

import msgspec

from symbiosis.cluster.front.started import Started
from symbiosis.cluster.plan import Plan
from symbiosis.clusters import Member
from symbiosis.tools.cluster.preflight import config_file, executor_options, server_options
from symbiosis.tools.cluster.process import Process

COMMAND = (
    "from symbiosis.tools.serve.executor import end_with_parent; end_with_parent(); "
    "from symbiosis.logs import name_process; name_process({name!r}); "
)
EXECUTOR = "import sys; sys.argv = ['symbiosis-executor', '--config', {file!r}]; from symbiosis.cli import executor_main; executor_main()"
SERVER = "import sys; sys.argv = ['symbiosis', 'serve', '--config', {file!r}]; from symbiosis.cli import main; main()"
FRONT = "from symbiosis.cluster.front.process import main; main({started!r})"


def executor(plan: Plan, model: str, number: int, folder: Path) -> Process:
    name = f"{model}-executor-{number}"
    port = free_port()
    endpoint = f"local://{folder}/{name}.sock"
    options = executor_options(plan.models[model], model, listen=(endpoint,), metrics_port=port)
    code = COMMAND.format(name=name) + EXECUTOR.format(file=str(config_file(folder, name, options)))
    member = Member(name=name, kind="executor", model=model, url=endpoint)
    return Process(member, ["-c", code], plan.models[model].threads, f"http://127.0.0.1:{port}/health")


def server(plan: Plan, model: str, number: int, of_model: int, folder: Path, executor: str) -> Process:
    """Return a server. Its number is unique in the cluster; `of_model` counts those of the model."""
    name = f"{model}-server-{of_model}"
    options = server_options(plan, model, executor=executor)
    code = COMMAND.format(name=name) + SERVER.format(file=str(config_file(folder, name, options)))
    member = Member(name=name, kind="server", model=model, number=number, batch=options.max_batch)
    return Process(member, ["-c", code], plan.models[model].threads)


def front(plan: Plan, number: int, listener: socket.socket) -> Process:
    name = f"front-{number}"
    started = Started(
        cluster=plan.name, listener=listener.fileno(), api_keys=plan.api_keys, limits=plan.limits,
        decision_log=plan.decision_log, drain_s=plan.drain_s, name=name,
    )  # fmt: skip
    code = COMMAND.format(name=name) + FRONT.format(started=msgspec.json.encode(started).decode())
    return Process(Member(name=name, kind="front"), ["-c", code], descriptors=(listener.fileno(),))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
