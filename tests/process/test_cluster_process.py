"""A process of a cluster ends with all that it has started, however it ends."""

import os
import signal
import socket
import time
from pathlib import Path

from symbiosis.cluster.placement import State
from symbiosis.cluster.plan import ModelPlan, Plan
from symbiosis.clusters import Member
from symbiosis.tools.cluster.backend import Local
from symbiosis.tools.cluster.process import Process
from symbiosis.tools.cluster.up import Cluster
from tests.serving_api import eventually

CODE = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('x at http://127.0.0.1:1/', child.pid, flush=True)\n"
    "time.sleep(600)"
)


def test_a_frozen_child_of_a_process_that_was_killed_ends_too() -> None:
    process = Process(Member(name="x", kind="server"), ["-c", CODE])
    process.start()
    eventually(process.ready.is_set)
    eventually(lambda: process._family)
    (child,) = process._family
    os.kill(child, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) and Path(f"/proc/{child}").exists()
    process.kill()
    eventually(
        lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()
    )


def test_one_that_comes_back_is_not_missed() -> None:
    """Else another server would be started for one that is replaced, or waits for its executor."""
    process = Process(Member(name="x", kind="server"), ["-c", CODE])
    assert (process.state, process.to_come) == (None, State.STARTING)
    process.start()
    process.draining_since = 1.0
    assert (process.state, process.to_come) == (State.DRAINING, State.STARTING)
    process.comes_back = False
    assert process.to_come == State.DRAINING
    process.kill()
    assert process.to_come is None


class Short(Local):
    """Executors that are ready at once."""

    def executor(self, model: str, number: int) -> Process:
        member = Member(name=f"{model}-executor-{number}", kind="executor", model=model, url="local:///x")
        return Process(member, ["-c", CODE])


def test_a_server_starts_when_its_own_executor_is_ready(tmp_path: Path) -> None:
    """Another one of its model that is ready is of no use to it."""
    plan = Plan(name="lab", models={"demo": ModelPlan(executors=2, servers=2)})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = Cluster(plan, listener, Short(plan, tmp_path))
    cluster.add("demo")
    cluster.members["demo-executor-1"].start()
    eventually(cluster.members["demo-executor-1"].ready.is_set)
    may = {name: cluster._may_start(cluster.members[name], time.monotonic()) for name in ("demo-server-1", "demo-server-2")}  # fmt: skip
    assert may == {"demo-server-1": False, "demo-server-2": True}
    assert "wait-s: 600" in (tmp_path / "demo-server-1.yaml").read_text()
    cluster.members["demo-executor-1"].kill()
