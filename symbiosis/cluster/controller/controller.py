"""The process of `symbiosis cluster up`: it starts the others, starts again what dies or freezes, adds and releases servers, and ends all."""

import fcntl
import logging
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from symbiosis.base.ownership import make_folder
from symbiosis.base.procs import MOST_STARTS, when_told_to_end
from symbiosis.cluster.controller import member_commands
from symbiosis.cluster.controller.backend import Backend
from symbiosis.cluster.controller.base_fingerprints import Bases
from symbiosis.cluster.controller.member import MemberProcess
from symbiosis.cluster.controller.preflight import executor_options, server_options
from symbiosis.cluster.placement import PlacedServer, RoutingRequest, State
from symbiosis.cluster.plan import Plan
from symbiosis.cluster.scaling import consolidate, scale
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.protocol.cluster_state import Told, folder_of, tell
from symbiosis.server.launch.preflight import folder_of as adapters_folder

logger = logging.getLogger("symbiosis")

LOOK_EVERY_S, SCALE_EVERY_S = 0.1, 1.0
LEAVE_S = 0.5  # between telling that a server drains, and telling the server: its streams go elsewhere meanwhile
AGAIN_S = 5.0  # before one that could not start is started once more
STOP_S = 15.0
QUIET_S = 2.0  # a process that retires is idle for so long at least: its last page may be from before
OPEN = "anybody who can connect to %s may use this cluster, and send adapters: name a file of api_keys, and encrypt what others can read (a proxy with TLS)"


class ClusterController:
    """The processes of a cluster, by name. Only the thread that runs it starts and ends any."""

    def __init__(self, plan: Plan, listener: socket.socket, backend: Backend) -> None:
        self.plan, self._listener, self._backend = plan, listener, backend
        self.members: dict[str, MemberProcess] = {}
        self.aliases = dict(plan.aliases)
        self.retiring: tuple[str, ...] = ()  # models that take nothing new, and end when nobody uses them any more
        self._numbers = count(1)  # of servers
        self._leaving: list[MemberProcess] = []  # front ends that finish what they have, and have successors
        self._again: dict[str, float] = {}  # when to start one that could not
        self._worked: dict[str, float] = {}  # when a server was last seen at work
        self._ending = threading.Event()
        self._orders: list[Callable[[], None]] = []
        self._told: Told | None = None
        self._scaled = 0.0
        self._is_up = False
        self._is_untold = False  # what has changed last
        self._adapters: dict[str, str] = {}
        self.bases = Bases()

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `down`."""
        self._listener.listen(2048)
        when_told_to_end(self._ending.set)
        if self.plan.decision_log:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # each line goes to the file that lies there by then
        try:
            self._plan_members()
            while not self._ending.wait(LOOK_EVERY_S):
                self._look()
            logger.info("the cluster ends")
        finally:
            self._end()

    def order(self, do: Callable[[], None]) -> None:
        """Have this done by the thread that runs the cluster."""
        self._orders.append(do)

    def do(self, what: Callable[[], None]) -> None:
        """Have this done by the thread that runs the cluster, and wait until it is. Raises what it raises."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                what()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self.order(run)
        done.result()

    def down(self) -> None:
        self._ending.set()

    def shift(self, name: str, shares: dict[str, float]) -> None:
        self.aliases = {**self.aliases, name: shares}
        self._tell()
        logger.info("requests for %s are divided by %s", name, shares)

    def add(self, model: str) -> None:
        """Have the processes of a model of the plan, which `_look` starts."""
        of_model = self.plan.models[model]
        executors = [self._backend.executor(model, n) for n in range(1, of_model.executors + 1)]
        made = list(executors)
        for n in range(1, of_model.most + 1):
            server = self._backend.server(model, next(self._numbers), n, executors[n % len(executors)])
            server.comes_back, server.needs = n <= of_model.least, executors[n % len(executors)]
            made.append(server)
        self.members = {**self.members, **{each.name: each for each in made}}
        if (folder := adapters_folder(server_options(self.plan, model))) is not None:
            self._adapters[model] = str(folder)

    def enlarge(self, plan: Plan, models: Iterable[str]) -> None:
        """Start these models of a plan beside what runs. Raises `ConfigError` if there is no room. Any thread may call it."""
        self._backend.take(plan)

        def start_them() -> None:
            self.plan = plan
            for model in models:
                self.add(model)

        self.do(start_them)

    def take(self, plan: Plan) -> None:
        """Go on with another plan. Models that it has no more retire, those that it has besides are to be added, or are there."""
        self._begin_to_retire([model for model in self.plan.models if model not in plan.models])
        self.plan, self.aliases = plan, dict(plan.aliases)
        self._tell()

    def give_up(self, models: Collection[str]) -> None:
        """End the processes of models that were added in vain."""
        self.plan = replace(
            self.plan, models={name: each for name, each in self.plan.models.items() if name not in models}
        )
        self._begin_to_retire(models)
        for process in (process for model in models for process in self.of_model(model)):
            self.drain(process.name, "its model could not start")

    def of_model(self, model: str, kind: str = "") -> list[MemberProcess]:
        return [each for each in self.members.values() if each.member.model == model and kind in ("", each.member.kind)]

    def release(self, name: str) -> None:
        """Drain a process, since somebody wants it to end. Raises `ConfigError` if it would be missed: as the last of its kind, or by servers
        that start beside it only."""
        process, instead = self.members[name], f"`symbiosis cluster roll --only {name}` replaces it"
        if not process.is_running and not process.comes_back:
            raise ConfigError(f"{name} does not run")
        if self._is_last(process):
            raise ConfigError(
                f"{name} is the last of its kind, and nothing would start it again: {instead}; "
                "a model that the file has no more ends by `symbiosis cluster apply`"
            )
        if process.member.trains and process.member.model not in self.retiring:
            raise ConfigError(f"{name} has the sessions of those who train there: {instead}")
        users = [each.name for each in self.of_model(process.member.model, "server") if each.needs is process]
        if users and process.member.model not in self.retiring:
            raise ConfigError(f"without {name}, {' and '.join(users)} could not start again: {instead}")
        self.drain(name, "somebody told it to")

    def _is_last(self, process: MemberProcess) -> bool:
        member = process.member
        if not process.comes_back or member.model in self.retiring:
            return False
        return not any(each.comes_back for each in self.of_model(member.model, member.kind) if each is not process)

    def drain(self, name: str, why: str, comes_back: bool = False) -> None:
        """Let a process finish or hand over what it does, and end."""
        process = self.members[name]
        process.draining_since, process.comes_back = time.monotonic(), comes_back
        logger.info("%s drains: %s", name, why)
        if process.member.kind == "front" and comes_back:
            self._leaving.append(process)
            self.members[name] = member_commands.front(
                self.plan, int(name.rpartition("-")[2]), self._listener, self._backend.secret
            )
            process.stop()

    def _plan_members(self) -> None:
        for model in self.plan.models:
            self.add(model)
        for n in range(1, self.plan.front_ends + 1):
            front = member_commands.front(self.plan, n, self._listener, self._backend.secret)
            self.members[front.name] = front

    def _look(self) -> None:
        self._backend.check()
        while self._orders:
            self._orders.pop(0)()
        for process in self.members.values():
            self._look_at(process)
        self.bases.look(self.members.values())
        for process in self.members.values():
            self._look_at_base(process)
        self._leaving = [each for each in self._leaving if each.is_running]
        self._tell()
        if not self._is_up and self.are_ready(self.plan.models):
            self._is_up = True
            print(f"cluster {self.plan.name} at {self.url}/v1", flush=True)
            if not self.plan.is_for_this_machine and self.plan.api_keys is None:
                logger.warning(OPEN, self.url)
        if self._is_up and time.monotonic() - self._scaled > SCALE_EVERY_S:
            self._scaled = time.monotonic()
            for model in self.plan.models:
                self._scale(model)
            for model in self.retiring:
                self._retire(model)

    def are_ready(self, models: Collection[str]) -> bool:
        """Whether all are ready that are to run of these models, and front ends have seen all servers among them."""
        due = [each for each in list(self.members.values()) if each.comes_back]
        due = [each for each in due if each.member.kind == "front" or each.member.model in models]
        servers = {each.member.number for each in due if each.member.kind == "server"}
        fronts = [each.health.get("ready") for each in due if each.member.kind == "front"]
        known = all(isinstance(ready, list) and servers <= set(ready) for ready in fronts)
        return known and all(each.state is State.READY for each in due)

    def _look_at(self, process: MemberProcess) -> None:
        """Start one that is to run, end one that is to end, and end one that has frozen."""
        now = time.monotonic()
        if not process.is_running:
            if process.comes_back and self._may_start(process, now):
                self._start(process)
        elif process.draining_since is not None:
            drains_s = now - process.draining_since
            if drains_s > self.plan.drain_s + STOP_S:
                process.kill()
            elif drains_s > LEAVE_S or process.member.kind != "server":
                process.stop()
        elif process.silent_s > self.plan.frozen_s:
            logger.error("%s has said nothing for %.0f s and is killed", process.name, process.silent_s)
            process.kill()

    def _look_at_base(self, server: MemberProcess) -> None:
        """Replace a server that cannot go on: its executor has been started again with another base, and it has not mapped all weights."""
        executor, model = server.needs, server.member.model
        if (
            executor is None
            or model not in self.plan.models
            or server.draining_since is not None
            or not server.is_running
        ):
            return
        differs = executor.fingerprint and server.fingerprint not in ("", executor.fingerprint)
        options = executor_options(self.plan.models[model], model, listen=("local:///x",))
        if differs and not (options.shares_all_weights and executor.health.get("shares_weights")):
            self.drain(
                server.name, f"{executor.name} serves another base than it does by now", comes_back=server.comes_back
            )

    def _may_start(self, process: MemberProcess, now: float) -> bool:
        """Whether all that it needs is there, and it has not just failed."""
        if process.was_started and process.draining_since is None and process.name not in self._again:
            logger.error("%s ended (status %d)", process.name, process.status)
            process.kill()  # what it has started, if anything is left
            failed = not process.ready.is_set()
            self._again[process.name] = now + AGAIN_S * failed
            if failed and process.starts >= MOST_STARTS and not self._is_up:
                raise SymbiosisError(f"{process.name} could not start, as it says above")
        if process.needs is not None and not self._may_be_used(process.needs):
            return False
        return now >= self._again.get(process.name, 0.0)

    def _may_be_used(self, executor: MemberProcess) -> bool:
        may_change = self.bases.may_change(executor.member.model)
        return executor.state is State.READY or (executor.state is State.OTHER_BASE and may_change)

    def _start(self, process: MemberProcess) -> None:
        self._again.pop(process.name, None)
        self._worked[process.name] = time.monotonic()
        try:
            process.start()
        except OSError as error:  # a full disk ends nothing that runs
            if not self._is_up:
                raise
            logger.error("%s cannot be started, and will be tried again: %s", process.name, error)
            self._again[process.name] = time.monotonic() + AGAIN_S

    def _tell(self) -> None:
        """Tell of all that run, and of those that wait to be started: their models are served as soon as they are ready."""
        seen = [(process, process.state or process.to_come) for process in self.members.values()]
        seen += [(process, process.state) for process in self._leaving]
        members = []
        for process, state in seen:
            if state is not None:
                clients, pid = int(str(process.health.get("clients", 0))), process.pid if process.is_running else 0
                base = process.fingerprint
                members.append(replace(process.member, state=state.value, pid=pid, clients=clients, fingerprint=base))
        told = Told(
            name=self.plan.name, url=self.url, members=tuple(members), adapters=dict(self._adapters), aliases=self.aliases,
            retiring=self.retiring,
        )  # fmt: skip
        if told != self._told:
            try:
                tell(told)
                self._told, self._is_untold = told, False
            except OSError as error:  # as on a full disk: it is tried at each look
                if not self._is_up:
                    raise
                if not self._is_untold:
                    logger.error("front ends and programs do not hear of changes of the cluster: %s", error)
                self._is_untold = True

    def _scale(self, model: str) -> None:
        """Add servers of a model, or take one away: it drains, and its streams go on elsewhere."""
        plan = self.plan.models[model]
        servers = self.of_model(model, "server")
        snapshot = {p.member.number: p for p in servers}
        now = time.monotonic()
        found = [
            PlacedServer(number=number, model=model, batch=p.member.batch, running=p.requests, state=state)
            for number, p in snapshot.items()
            if (state := p.to_come) is not None
        ]
        for server in found:
            if server.running or server.state is not State.READY:
                self._worked[snapshot[server.number].name] = now
        if plan.least == plan.most:
            return
        idle = {number for number, p in snapshot.items() if now - self._worked.get(p.name, now) >= self.plan.idle_s}
        change = scale(found, self._waiting(model), plan.least, plan.most, idle)
        off = [p for p in servers if not p.is_running and not p.comes_back]
        for process in off[: change.start]:
            process.comes_back = True
            logger.info("%s is added: %s", process.name, change.why)
        for number in change.release:
            self.drain(snapshot[number].name, change.why)
        if not change.start and not change.release:
            self._consolidate(found, plan.least, snapshot)

    def _consolidate(self, found: list[PlacedServer], least: int, snapshot: dict[int, MemberProcess]) -> None:
        """Let the least busy server drain, if the others have room for what it does, and an idle one stays for what comes next."""
        live = [each for each in found if each.state is State.READY]
        requests = {each.number: dict.fromkeys(range(each.running), RoutingRequest(model=each.model)) for each in live}
        may = len(live) > least and any(not each.running for each in live)
        if may and (moves := consolidate(live, requests)) is not None:
            self.drain(snapshot[moves.server].name, "the others have room for all that it runs")

    def _begin_to_retire(self, models: Collection[str]) -> None:
        """From now on it is waited until nobody uses these: what was begun just before is on no page yet."""
        self.retiring += tuple(models)
        now = time.monotonic()
        self._worked |= {process.name: now for model in models for process in self.of_model(model)}

    def _retire(self, model: str) -> None:
        """End what nobody has used for `idle_s`: servers, and executors after all servers."""
        now, processes = time.monotonic(), self.of_model(model)
        has_servers = any(each.is_running for each in processes if each.member.kind == "server")
        for process in processes:
            clients = int(str(process.health.get("clients", 0)))
            is_ready = process.state in (State.READY, State.OTHER_BASE)
            if not is_ready or process.requests or clients or self._waiting(model):
                self._worked[process.name] = now
            is_idle = now - self._worked.get(process.name, now) >= max(QUIET_S, self.plan.idle_s)
            is_last = process.member.kind == "server" or not has_servers
            if is_idle and is_last and process.draining_since is None:
                self.drain(process.name, "nobody uses it any more")
        if not any(each.is_running or each.comes_back for each in processes):
            logger.info("%s has ended: nobody used it any more", model)
            self.members = {name: each for name, each in self.members.items() if each.member.model != model}
            self.retiring = tuple(each for each in self.retiring if each != model)
            self._adapters.pop(model, None)
            self._backend.take(self.plan)

    def _waiting(self, model: str) -> int:
        """How many sequences wait at the front ends for a server of this model."""
        fronts = (each.health.get("waiting") for each in self.members.values() if each.member.kind == "front")
        return sum(int(waiting.get(model, 0)) for waiting in fronts if isinstance(waiting, dict))

    def _end(self) -> None:
        """End front ends first, then servers, then executors, so that none misses another."""
        for kind in ("front", "server", "executor"):
            those = [each for each in (*self.members.values(), *self._leaving) if each.member.kind == kind]
            those = [each for each in those if each.is_running]
            for process in those:
                process.stop()
            ends = time.monotonic() + (self.plan.drain_s if kind != "executor" else 0.0) + STOP_S
            for process in those:
                if not process.wait(ends - time.monotonic()):
                    logger.warning("%s did not end and is killed", process.name)
                process.kill()


@contextmanager
def locked(plan: Plan) -> Iterator[Path]:
    """Have the cluster's folder for this process alone. It is gone at the end."""
    folder = folder_of(plan.name)
    make_folder(folder)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"a cluster {plan.name!r} runs already: symbiosis cluster status {plan.name}") from None
        for left in folder.iterdir():  # by one that was killed
            if left.name != "lock":
                with suppress(OSError):
                    left.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
