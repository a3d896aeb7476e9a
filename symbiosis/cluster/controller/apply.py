"""Models come and go while a cluster runs: what its changed file has besides is started, and what it has no more ends when nobody uses it."""

import time
from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from symbiosis.base.procs import MOST_STARTS
from symbiosis.cluster.controller.controller import ClusterController
from symbiosis.cluster.controller.preflight import check_models
from symbiosis.cluster.placement import State
from symbiosis.cluster.plan import Plan, load
from symbiosis.errors import ConfigError, SymbiosisError

READY_S = 600.0  # for the processes of new models
CHANGING = ("models", "aliases")  # what a file may change while its cluster runs


def changes(now: Plan, then: Plan, retiring: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the models that come, and those that go. Raises `ConfigError` for what cannot change while a cluster runs.

    >>> from symbiosis.cluster.plan import ModelPlan
    >>> old = Plan(name="lab", models={"a": ModelPlan(), "b": ModelPlan()})
    >>> changes(old, Plan(name="lab", models={"b": ModelPlan(), "c": ModelPlan()}))
    (['c'], ['a'])
    """
    told = [
        name for name in now.__struct_fields__ if name not in CHANGING and getattr(now, name) != getattr(then, name)
    ]
    if told:
        raise ConfigError(f"{', '.join(told)}: only {' and '.join(CHANGING)} can change while a cluster runs")
    for name, model in then.models.items():
        if name in retiring:
            raise ConfigError(
                f"models.{name}: a model of this name still retires: choose another name, or wait until it has ended"
            )
        old = now.models.get(name, model)
        if differing := [field for field in model.__struct_fields__ if getattr(old, field) != getattr(model, field)]:
            raise ConfigError(
                f"models.{name}: {', '.join(differing)} differs, and processes keep what they were started with. Give the new "
                "version a name of its own, and move the traffic by an alias"
            )
    come = [name for name in then.models if name not in now.models]
    return come, [name for name in now.models if name not in then.models]


def apply(cluster: ClusterController, file: Path) -> str:
    """Let a cluster become what its changed file says, and return when all new models are served. To be called beside the thread that runs
    the cluster."""
    before = cluster.plan
    plan = replace(load(file), backend=before.backend)
    come, go = changes(before, plan, cluster.retiring)
    check_models(plan, come)
    both = replace(before, models={**before.models, **{name: plan.models[name] for name in come}})
    cluster.enlarge(both, come)
    try:
        _await(cluster, come)
    except BaseException:
        cluster.order(lambda: cluster.give_up(come))
        raise
    cluster.do(lambda: cluster.take(plan))
    told = [f"served now: {', '.join(come)}"] if come else []
    told += [f"ending when nobody uses them any more: {', '.join(go)}"] if go else []
    return "; ".join(told) or "the models are as they were"


def _await(cluster: ClusterController, models: Collection[str]) -> None:
    """Wait until front ends can send requests to all servers of these models."""
    deadline = time.monotonic() + READY_S
    while not cluster.are_ready(models):
        processes = [each for model in models for each in cluster.of_model(model)]
        for process in processes:
            if process.starts >= MOST_STARTS and process.state is not State.READY and not process.is_running:
                raise ConfigError(f"{process.name} could not start: the log of the cluster says why. All is as it was")
        if time.monotonic() > deadline:
            raise SymbiosisError(f"{', '.join(models)}: not ready within {READY_S:g} s. All is as it was")
        time.sleep(0.1)
