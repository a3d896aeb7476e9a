"""A process of a cluster ends with all that it has started, however it ends."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from symbiosis.cluster.controller import member_commands
from symbiosis.cluster.controller.backend import Local
from symbiosis.cluster.controller.control_socket import Control, send_order
from symbiosis.cluster.controller.controller import ClusterController, locked
from symbiosis.cluster.controller.local_process import LocalProcess
from symbiosis.cluster.placement import State
from symbiosis.cluster.plan import ModelPlan, Plan
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.executor.options import read_config_file
from symbiosis.protocol.cluster_state import Member, folder_of, told_by
from tests.serving_api import eventually

CODE = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('x at http://127.0.0.1:1/', child.pid, flush=True)\n"
    "time.sleep(600)"
)


def test_a_frozen_child_of_a_process_that_was_killed_ends_too() -> None:
    process = LocalProcess(Member(name="x", kind="server"), ["-c", CODE])
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


def test_one_that_is_stopped_while_it_starts_is_found() -> None:
    """It will never say that it is ready, and never end."""
    process = LocalProcess(Member(name="x", kind="server"), ["-c", "import time; time.sleep(600)"])
    process.start()
    try:
        time.sleep(1.0)
        assert process.silent_s == 0.0
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: process.silent_s > 1.0)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: process.silent_s == 0.0)
    finally:
        process.kill()


def test_an_executor_whose_port_was_taken_meanwhile_starts_at_another_one(tmp_path: Path) -> None:
    executor = member_commands.executor(Plan(name="lab", models={"demo": ModelPlan()}), "demo", 1, tmp_path)
    file = tmp_path / "demo-executor-1.yaml"
    executor._code = ["-c", CODE]
    executor.start()
    port = port_in(file)
    executor.kill()
    with socket.create_server(("127.0.0.1", port)):
        executor.start()
        assert port_in(file) != port and executor.member.pages == f"http://127.0.0.1:{port_in(file)}"
        executor.kill()


def test_pages_have_the_ports_that_the_plan_names_unless_another_program_has_them(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        base = found.getsockname()[1] - 3
        plan = Plan(name="lab", front_ends=2, metrics_port=base, models={"demo": ModelPlan(executors=2, servers=2)})
        backend = Local(plan, tmp_path)
        executors = [backend.executor("demo", n) for n in (1, 2)]
        server = backend.server("demo", 1, 1, executors[0])
        assert [urlsplit(each.member.pages).port for each in (*executors, server)] == [base + 2, base + 3, base + 4]
        assert urlsplit(server._place("http://127.0.0.1:1")).port == base + 4  # type: ignore[attr-defined]
        assert urlsplit(executors[1]._place(executors[1].member.pages)).port != base + 3  # type: ignore[attr-defined]
    assert urlsplit(executors[1]._place("http://127.0.0.1:1")).port == base + 3  # type: ignore[attr-defined]


def port_in(file: Path) -> int:
    return int(read_config_file(file)["metrics_port"])  # type: ignore[call-overload,no-any-return]


def test_one_that_comes_back_is_not_missed() -> None:
    """Else another server would be started for one that is replaced, or waits for its executor."""
    process = LocalProcess(Member(name="x", kind="server"), ["-c", CODE])
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

    def executor(self, model: str, number: int) -> LocalProcess:
        member = Member(name=f"{model}-executor-{number}", kind="executor", model=model, url="local:///x")
        return LocalProcess(member, ["-c", CODE])


def test_a_server_starts_when_its_own_executor_is_ready(tmp_path: Path) -> None:
    """Another one of its model that is ready is of no use to it."""
    plan = Plan(name="lab", models={"demo": ModelPlan(executors=2, servers=2)})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = ClusterController(plan, listener, Short(plan, tmp_path))
    cluster.add("demo")
    first = cluster.members["demo-executor-1"]
    first.start()
    eventually(first.ready.is_set)
    first.health["fingerprint"] = "a base"
    cluster.bases.look(cluster.members.values())
    may = {name: cluster._may_start(cluster.members[name], time.monotonic()) for name in ("demo-server-1", "demo-server-2")}  # fmt: skip
    assert may == {"demo-server-1": False, "demo-server-2": True}
    cluster.members["demo-server-1"]._place("")  # as its start does
    assert "wait-s: 600" in (tmp_path / "demo-server-1.yaml").read_text()
    cluster.members["demo-executor-1"].kill()


@pytest.mark.parametrize("shares", [True, False])
def test_a_server_that_maps_no_weights_is_replaced_when_its_base_has_changed(shares: bool, tmp_path: Path) -> None:
    """Whatever the options say: weights that are packed on a GPU are not mapped."""
    plan = Plan(name="lab", models={"demo": ModelPlan(servers=1)})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = ClusterController(plan, listener, Short(plan, tmp_path))
    cluster.add("demo")
    executor = cluster.members["demo-executor-1"]
    member = cluster.members["demo-server-1"].member
    server = cluster.members[member.name] = LocalProcess(member, ["-c", CODE])
    server.needs = executor
    server.start()
    try:
        server.health["fingerprint"] = "a base"
        for base, differs in (("a base", False), ("another one", True)):
            executor.health |= {"fingerprint": base, "shares_weights": shares}
            cluster._look_at_base(server)
            assert (server.draining_since is not None) == (differs and not shares)
    finally:
        server.kill()


@pytest.fixture
def unstarted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClusterController]:
    """A cluster of one executor, and one or two servers, none of which has been started."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("up")))  # the paths of sockets are short
    plan = Plan(name="lab", models={"demo": ModelPlan(servers=[1, 2])})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = ClusterController(plan, listener, Short(plan, tmp_path))
        cluster.add("demo")
        with locked(plan):
            cluster._tell()
            yield cluster


def test_a_full_disk_ends_no_cluster(
    unstarted: ClusterController, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unstarted._is_up = True
    unstarted.aliases = {"name": {"demo": 1.0}}
    executor = member_commands.executor(unstarted.plan, "demo", 9, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        for _ in range(3):
            unstarted._tell()
        unstarted._start(executor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("do not hear of changes") == 1 and not told_by("lab").aliases
    assert caplog.text.count("cannot be started") == 1 and not executor.is_running
    unstarted._tell()
    assert told_by("lab").aliases == {"name": {"demo": 1.0}}


def test_a_model_is_known_while_its_processes_wait_to_be_started(unstarted: ClusterController) -> None:
    """Else requests for it would be refused, and `doctor` would find nothing wrong, while all of them start again."""
    told = told_by("lab")
    assert told.models == ["demo"]
    assert [(each.name, each.state, each.pid) for each in told.members] == [
        ("demo-executor-1", "starting", 0),
        ("demo-server-1", "starting", 0),
    ]


def test_the_last_of_a_kind_is_not_drained(unstarted: ClusterController) -> None:
    """Nothing would start it again, and the last server of a model would take the model along."""
    for name in ("demo-executor-1", "demo-server-1"):
        with pytest.raises(ConfigError, match=f"symbiosis cluster roll --only {name}"):
            unstarted.release(name)
    unstarted.members["demo-server-2"].comes_back = True  # as when it is added
    unstarted.release("demo-server-1")
    assert unstarted.members["demo-server-1"].draining_since is not None
    with pytest.raises(ConfigError, match="demo-server-2 is the last"):
        unstarted.release("demo-server-2")
    unstarted.retiring = ("demo",)
    for name in ("demo-executor-1", "demo-server-2"):
        unstarted.release(name)
        assert not unstarted.members[name].comes_back
        with pytest.raises(ConfigError, match=f"{name} does not run"):
            unstarted.release(name)


def test_an_executor_is_not_drained_whose_servers_could_not_start_again(tmp_path: Path) -> None:
    """A server that has ended would wait for it for ever, and its model with it."""
    plan = Plan(name="lab", models={"demo": ModelPlan(executors=3, servers=[1, 2])})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = ClusterController(plan, listener, Short(plan, tmp_path))
    cluster.add("demo")
    for executor, server in ((2, 1), (3, 2)):  # also of one that may be added
        message = (
            f"without demo-executor-{executor}, demo-server-{server} could not.*roll --only demo-executor-{executor}"
        )
        with pytest.raises(ConfigError, match=message):
            cluster.release(f"demo-executor-{executor}")
    cluster.release("demo-executor-1")  # of clients only
    assert not cluster.members["demo-executor-1"].comes_back


def test_an_order_that_fails_for_a_reason_of_ours_is_no_success(
    unstarted: ClusterController, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(do: object) -> None:
        raise RecursionError("too deep")

    Control(unstarted, folder_of("lab"))
    monkeypatch.setattr(unstarted, "order", fail)
    with pytest.raises(ConfigError, match="it failed, .*too deep"):
        send_order("lab", "shift", "chat", shares={"demo": 1.0}, new=True)


class Gone:
    """A cluster that takes an order, and ends or says nothing more."""

    def __init__(self, says: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(folder_of("lab") / "control.sock"))
        self._socket.listen()
        self._says = says
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._socket.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(self._says)


def test_only_down_is_done_when_the_cluster_ends(unstarted: ClusterController) -> None:
    for verb, told in (("roll", "ended before"), ("drain", "ended before"), ("down", "")):
        gone = Gone(b'{"so far": ""}\n')
        if told:
            with pytest.raises(SymbiosisError, match=told):
                send_order("lab", verb)
        else:
            assert send_order("lab", verb) == "the cluster has ended"
        gone._socket.close()
        (folder_of("lab") / "control.sock").unlink()


def test_a_cluster_that_is_stopped_is_not_waited_for(
    unstarted: ClusterController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("symbiosis.cluster.controller.control_socket.TAKEN_S", 0.2)
    path = str(folder_of("lab") / "control.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with pytest.raises(SymbiosisError, match="cannot reach the cluster"):
            send_order("lab", "down")
        listener.bind(path)
        listener.listen()
        with pytest.raises(SymbiosisError, match="says nothing"):
            send_order("lab", "down")


def test_an_order_that_nobody_waits_for_when_it_is_read_is_not_done(unstarted: ClusterController) -> None:
    """It has been said to be in vain, while the cluster was stopped."""
    control = Control(unstarted, folder_of("lab"))
    for is_gone in (True, False):
        ours, theirs = socket.socketpair()
        theirs.sendall(b'{"verb": "down"}\n')
        if is_gone:
            theirs.close()
        control._serve(ours)
        theirs.close()
        assert unstarted._ending.is_set() is not is_gone
