"""Finds out what is wrong with a cluster's file before anything is started, and says all of it at once."""

import importlib.util
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from symbiosis.base.folders import Use, user_folder
from symbiosis.base.hosts import listener_at
from symbiosis.base.logs import JsonLines
from symbiosis.base.memory import free_memory
from symbiosis.base.problems import problems_of, refuse
from symbiosis.cluster.plan import ModelPlan, Plan
from symbiosis.errors import ConfigError
from symbiosis.executor import preflight as of_executor
from symbiosis.executor.options import Options, load_as
from symbiosis.executor.preflight import free_gpu_memory
from symbiosis.server.launch import footprint
from symbiosis.server.launch import preflight as of_server
from symbiosis.server.launch.footprint import HOST, Footprint
from symbiosis.serving.serve_options import ServeOptions

WAIT_S = 600.0  # of a server, for its executor
NO_RAY = "backend: ray needs the package of an extra: pip install 'symbiosis-llm[ray]'"


def check(plan: Plan) -> socket.socket:
    """Return the bound port of the front end, or raise a `ConfigError` with a line for each thing that is wrong."""
    listeners = list[socket.socket]()

    def check_port(plan: Plan) -> None:
        listeners.append(of_server.bound(ServeOptions(host=plan.host, port=plan.port)))

    refuse(problems_of([check_models, check_decision_log, check_metrics_ports, check_ray, check_port], plan))
    return listeners[0]


def check_models(plan: Plan, names: Collection[str] | None = None) -> None:
    """Check these models of a plan, or all, beside all that runs already: first each, and then whether they fit together."""
    names, is_here = plan.models if names is None else names, plan.backend == "local"
    refuse(line for name in names for line in of_model(plan, name, is_here))
    if is_here:
        found = footprint_of(plan, names)
        refuse(footprint.lacking("all processes", found, free_memory_of(found)))


def check_ray(plan: Plan) -> None:
    if plan.backend == "ray" and not importlib.util.find_spec("ray"):
        raise ConfigError(NO_RAY)


def executor_options(plan: ModelPlan, name: str, **ours: Any) -> Options:
    given = {key.replace("-", "_"): value for key, value in plan.executor.items()}
    return load_as(Options, {**given, "model": plan.model or name, **ours}, None, "symbiosis-executor")


def server_options(plan: Plan, name: str, **ours: Any) -> ServeOptions:
    model = plan.models[name]
    given = {key.replace("-", "_"): value for key, value in model.server.items()}
    mine = {
        "model": model.model or name, "served_model_name": name, "drain_s": plan.drain_s, "port": 0, "wait_s": WAIT_S,
    }  # fmt: skip
    mine |= {"adapters": (model.adapters,)} if model.adapters else {}
    mine |= {"api_keys": plan.api_keys} if plan.api_keys else {}
    mine |= (
        {"train": True, "checkpoints": plan.checkpoints or str(user_folder(Use.STATE, "clusters", plan.name))}
        if model.train
        else {}
    )
    return load_as(ServeOptions, {**given, **mine, **ours}, None, "symbiosis serve")


def of_model(plan: Plan, name: str, is_here: bool) -> list[str]:
    """Return what is wrong with a model's options and, if its processes run on this host, with what they need of it."""
    model = plan.models[name]
    if model.gpus and plan.backend != "ray":
        return [f"models.{name}: gpus is for backend: ray. Here `executor: {{device: cuda:1}}` says which GPU"]

    def check_executor() -> None:
        options = executor_options(model, name)
        if is_here:
            of_executor.check(options)

    def check_server() -> None:
        options = server_options(plan, name, executor="local:///executor")
        refuse(problems_of(of_server.CHECKS if is_here else (), options))

    return [f"models.{name}: {line}" for line in problems_of([check_executor, check_server])]


def check_metrics_ports(plan: Plan) -> None:
    """Check that nothing else has the ports of the cluster's pages."""
    if not plan.metrics_port:
        return
    wanted = range(plan.metrics_port, plan.metrics_port + plan.most_processes)
    for port in wanted:
        if port == plan.port or not is_free("127.0.0.1", port):
            raise ConfigError(
                f"metrics_port: {port} is taken, and all ports from {wanted[0]} to {wanted[-1]} are needed"
            )


def is_free(host: str, port: int) -> bool:
    """Whether a port can be taken."""
    try:
        listener_at(host, port).close()
    except OSError:
        return False
    return True


def check_decision_log(plan: Plan) -> None:
    if plan.decision_log is None:
        return
    lines = JsonLines(Path(plan.decision_log), "decision")
    try:
        lines.open()
    except OSError as error:
        raise ConfigError(f"decision_log: cannot write to {plan.decision_log}: {error.strerror}") from None
    lines.close()


def footprint_of(
    plan: Plan, names: Collection[str], most: bool = False, free: Mapping[str, int] | None = None
) -> Footprint:
    """Return what these models of a plan take, with all pages in use that options name.

    Args:
        most: When as many servers run as may, and not as many as start at once.
        free: By place, what options may name a share of. Without it, only sizes count.
    """
    found = (
        footprint.of_host(plan.front_ends) if len(names) == len(plan.models) else Footprint()
    )  # else it is there already
    for name in names:
        model = plan.models[name]
        executor, server = executor_options(model, name), server_options(plan, name, executor="local:///executor")
        of_this = [(footprint.of_executor(executor), model.executors)]
        of_this += [(footprint.of_server(server, executor, free), model.most if most else model.least)]
        for each, count in of_this:
            found.update({key: count * nbytes for key, nbytes in each.items()})
    return found


def bundle_of(plan: Plan, name: str, executor: int) -> Footprint:
    """Return what an executor of a model, counted from 0, takes on its node of Ray, with the servers that have their place there."""
    model = plan.models[name]
    options, server = executor_options(model, name), server_options(plan, name, executor="local:///executor")
    found = footprint.of_executor(options)
    for _ in range(model.servers_of(executor)):
        found.update(footprint.of_server(server, options))
    return found


def free_memory_of(found: Footprint) -> dict[str, int]:
    """Return how much is free in each place of a footprint that this process can look at."""
    looked = {place: free_memory() if place == HOST else free_gpu_memory(place) for place in footprint.places(found)}
    return {place: free for place, free in looked.items() if free is not None}


def config_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.yaml"


def config_file(folder: Path, name: str, options: msgspec.Struct) -> Path:
    """Write options as a file for --config, only those that are no defaults."""
    told = {
        field.name.replace("_", "-"): value
        for field in msgspec.structs.fields(options)
        if (value := getattr(options, field.name)) != field.default
    }
    file = config_path(folder, name)
    file.write_bytes(msgspec.yaml.encode(told))
    return file
