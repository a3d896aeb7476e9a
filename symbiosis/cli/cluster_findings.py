"""What `symbiosis doctor --cluster FILE.yaml` finds: whether a cluster's file could be started here, or how its processes are."""

import resource
from collections.abc import Iterator
from pathlib import Path

from symbiosis.base.cgroups import usable_cores
from symbiosis.base.problems import Finding
from symbiosis.cluster.controller.base_fingerprints import WHAT_TO_DO
from symbiosis.cluster.controller.preflight import (
    bundle_of,
    check,
    footprint_of,
    free_memory_of,
    server_options,
)
from symbiosis.cluster.plan import Plan, load
from symbiosis.errors import ConfigError
from symbiosis.protocol.cluster_state import Told, running
from symbiosis.server.launch.footprint import HOST, lacking, places, told

OWN_DESCRIPTORS = 64  # of a process that does nothing


def findings(file: Path) -> Iterator[Finding]:
    """Yield what is wrong with a cluster's file on this machine, one by one. Of a cluster that runs, yield how its processes are."""
    try:
        plan = load(file)
        if (found := next((each for each in running() if each.name == plan.name), None)) is not None:
            yield _running(found)
            return
        check(plan).close()
    except ConfigError as error:
        for line in str(error).splitlines():
            yield Finding("FAIL", "cluster", line)
        return
    if plan.backend == "local":
        yield from _limits(plan)
    yield Finding("ok", "cluster", f"{file}: {_told(plan)} can be started{_memory(plan)}")


def _told(plan: Plan) -> str:
    executors = sum(model.executors for model in plan.models.values())
    return f"{executors} executors and {sum(model.least for model in plan.models.values())} servers of {', '.join(plan.models)}"


def _memory(plan: Plan) -> str:
    """Tell what the cluster takes when it starts and, where it may be any node, of a node."""
    if plan.backend == "local":
        found = footprint_of(plan, plan.models)
        return ", and takes " + " and ".join(f"{told(found, place)} of {place}" for place in places(found))
    parts = [f"{name} {told(bundle_of(plan, name, 0), HOST)}" for name in plan.models]
    return f", as far as can be seen from here. The node of an executor and its servers gives: {', '.join(parts)}"


def _limits(plan: Plan) -> Iterator[Finding]:
    """Yield what may run out while the cluster works, though it can be started."""
    free = free_memory_of(footprint_of(plan, plan.models))
    full = footprint_of(plan, plan.models, most=True, free=free)
    for line in lacking("all servers that may run, with all their pages in use,", full, free):
        yield Finding("warn", "cluster", line)
    threads = max(model.threads for model in plan.models.values())
    if threads > (cores := usable_cores()):
        yield Finding(
            "warn",
            "cluster",
            f"{threads} threads of a process have the time of {cores:g} cores",
            "Give its model fewer `threads`",
        )
    sequences = sum(model.most * server_options(plan, name).max_batch for name, model in plan.models.items())
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 2 * sequences + OWN_DESCRIPTORS > descriptors:
        yield Finding(
            "warn", "cluster", f"a front end may have {descriptors} file descriptors, and two for each of {sequences} sequences that run at once",
            "Raise the hard limit: ulimit -Hn, LimitNOFILE of systemd, or --ulimit nofile of docker",
        )  # fmt: skip


def _running(of: Told) -> Finding:
    due = [each for each in of.members if each.state != "draining"]
    late = [f"{each.name} is {each.state}" for each in due if each.state != "ready"]
    text = f"{of.name} runs at {of.url}/v1: {len(due) - len(late)} of {len(due)} processes are ready"
    if others := [each for each in due if each.state == "other-base"]:
        return Finding(
            "FAIL", "cluster", f"{text}; {', '.join(late)}", f"{others[0].name}: {WHAT_TO_DO.format(others[0].model)}"
        )
    if late:
        return Finding("warn", "cluster", f"{text}; {', '.join(late)}", "The log of `symbiosis cluster up` says why")
    return Finding("ok", "cluster", text)
