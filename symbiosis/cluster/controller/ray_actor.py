"""One process of a cluster on a node of Ray: an actor there makes its files, starts it and watches it, as `cluster up` does on its own host."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from symbiosis.base.ownership import make_folder
from symbiosis.base.secret_files import create_secret
from symbiosis.cluster.controller import member_commands
from symbiosis.cluster.controller.local_process import LocalProcess
from symbiosis.cluster.controller.preflight import is_free
from symbiosis.cluster.plan import Plan
from symbiosis.protocol.cluster_state import folder_of

EXECUTOR_KEY, TENANT = "executor", "cluster"  # the names of the keys of a cluster


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor has to know of its process."""

    plan: Plan
    model: str
    number: int  # of an executor: among those of the model; of a server: in the cluster
    of_model: int = 0  # of a server: among those of the model
    executor: int = 0  # of a server: the number of the executor on its node; 0: this is an executor
    home: str = ""  # the node of `cluster up`, which reaches what runs there without the network
    secret: str = ""  # by which a server knows front ends
    keys: dict[str, str] = {}  # texts of files, for executors on other nodes: their pair, and who may come in

    @property
    def name(self) -> str:
        if not self.executor:
            return member_commands.executor_name(self.model, self.number)
        return member_commands.server_member(self.plan, self.model, self.number, self.of_model).name


class ActorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor tells of its process."""

    node: str = ""
    pid: int = 0
    status: int | None = None  # None: it runs
    is_ready: bool = False
    url: str = ""
    pages: str = ""
    silent_s: float = 0.0
    health: dict[str, object] = {}


class Hosted:
    """What the actor does. Whatever it is asked, it answers at once."""

    def __init__(self, task: Task) -> None:
        self._task, self._node, self._url = task, "", ""
        self._process: LocalProcess | None = None

    def begin(self, node: str, address: str, port: int) -> ActorReport:
        """Start the process.

        Args:
            node, address: Where this is, and how other nodes reach it.
            port: At which an executor was reached before.
        """
        self._node = node
        self._remove_files()
        make_folder(self._folder)
        host = "127.0.0.1" if node == self._task.home else address
        self._process = self._server(host) if self._task.executor else self._executor(host, port)
        self._process.start()
        return self.look()

    def _server(self, host: str) -> LocalProcess:
        task = self._task
        endpoint = member_commands.endpoint_of(self._folder, member_commands.executor_name(task.model, task.executor))
        return member_commands.server(
            task.plan, task.model, task.number, task.of_model, self._folder, endpoint, task.secret, host
        )

    def _executor(self, host: str, port: int) -> LocalProcess:
        task, beyond = self._task, None
        if self._node != task.home:
            beyond = self._beyond(host, port)
            self._url = beyond.url
        return member_commands.executor(task.plan, task.model, task.number, self._folder, beyond, host)

    def _beyond(self, host: str, port: int) -> member_commands.Beyond:
        """Write the keys, and return where trainers of other hosts come in."""
        tenants = self._keys / "tenants"
        make_folder(self._keys)
        make_folder(tenants)
        for name, text in self._task.keys.items():
            file = (tenants if name.endswith(".pub") else self._keys) / name
            with os.fdopen(create_secret(file), "w") as opened:
                opened.write(text)
        url = f"tcp://{host}:{port if port and is_free(host, port) else member_commands.free_port(host)}"
        return member_commands.Beyond(url, self._keys / f"{EXECUTOR_KEY}.key", tenants)

    def look(self) -> ActorReport:
        process = self._process
        assert process is not None
        return ActorReport(
            node=self._node, pid=process.pid, status=None if process.is_running else process.status,
            is_ready=process.ready.is_set(), url=self._url or process.member.url, pages=process.member.pages,
            silent_s=process.silent_s, health=process.health,
        )  # fmt: skip

    def stop(self) -> ActorReport:
        if self._process is not None:
            self._process.stop()
        return self.look()

    def kill(self) -> None:
        """End the process, if it runs, with all that it has started, and leave no file."""
        if self._process is not None:
            self._process.kill()
        self._remove_files()
        with suppress(OSError):
            self._folder.rmdir()  # if it was the last one

    @property
    def _folder(self) -> Path:
        """What processes of the cluster have on this node. No cluster of this host has such a name."""
        return folder_of(f"{self._task.plan.name}@ray")

    @property
    def _keys(self) -> Path:
        return self._folder / f"{self._task.name}.keys"

    def _remove_files(self) -> None:
        """Remove what this process has, or one of its name has left that was killed."""
        shutil.rmtree(self._keys, ignore_errors=True)
        for ending in ("yaml", "sock"):
            with suppress(OSError):
                (self._folder / f"{self._task.name}.{ending}").unlink()
