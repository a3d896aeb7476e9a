"""What `symbiosis doctor --cluster FILE.yaml` finds: whether a cluster's file could be started here, or how its processes are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from symbiosis.cluster.plan import Plan, load
from symbiosis.clusters import Told, running
from symbiosis.errors import ConfigError
from symbiosis.tools.cluster.preflight import check

Finding = tuple[Literal["ok", "warn", "FAIL"], str, str]  # state, text, remedy


def findings(file: Path) -> Iterator[Finding]:
    """Yield what is wrong with a cluster's file on this machine, one by one. Of a cluster that runs, yield how its processes are."""
    try:
        plan = load(file)
        if (told := next((each for each in running() if each.name == plan.name), None)) is not None:
            yield _running(told)
            return
        check(plan).close()
    except ConfigError as error:
        for line in str(error).splitlines():
            yield "FAIL", line, ""
        return
    yield "ok", f"{file}: {_told(plan)} can be started", ""


def _told(plan: Plan) -> str:
    executors = sum(model.executors for model in plan.models.values())
    return f"{executors} executors and {sum(model.least for model in plan.models.values())} servers of {', '.join(plan.models)}"


def _running(told: Told) -> Finding:
    due = [each for each in told.members if each.state != "draining"]
    late = [f"{each.name} is {each.state}" for each in due if each.state != "ready"]
    text = f"{told.name} runs at {told.url}/v1: {len(due) - len(late)} of {len(due)} processes are ready"
    if late:
        return "warn", f"{text}; {', '.join(late)}", "The log of `symbiosis cluster up` says why"
    return "ok", text, ""
