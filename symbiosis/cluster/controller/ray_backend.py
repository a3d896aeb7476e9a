"""The backend `ray`: an actor of Ray for each executor and server, and a placement group for each model. No tensor goes through Ray.

Each bundle of a model's group has an executor and the servers that use it, so they are on one node, and find each other as on one host.
The actors belong to the job of `cluster up`: Ray ends them, and with them what they have started, however that process ends.
"""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import chdir, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import replace
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from symbiosis.base.curve_keys import generate
from symbiosis.cluster.controller import member_commands, preflight
from symbiosis.cluster.controller.member import MemberProcess
from symbiosis.cluster.controller.ray_actor import EXECUTOR_KEY, TENANT, ActorReport, Hosted, Task
from symbiosis.cluster.plan import ModelPlan, Plan
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.executor.model.checkpoint import is_path
from symbiosis.protocol.cluster_state import Member
from symbiosis.protocol.endpoints import reaches_other_hosts
from symbiosis.server.launch.footprint import Footprint, lacking

logger = logging.getLogger("symbiosis")

LOOK_EVERY_S, ANSWER_S, KILL_S = 0.25, 2.0, 3.0
PLACE_S = 30.0  # for Ray to find room for a model
KNOWN_EVERY_S = 10
HEAD_S = 30.0  # the head of Ray may be away; it ends this process itself after a minute
END_S, AWAY_END_S = 20.0, 5.0  # for actors to end: while the head is there, and without it
HOW_TO_START = "Start it with: ray start --head (other nodes join by: ray start --address HEAD:6379)"
GENERATIONS = count(1)  # an actor's name is free some time after its end only


class Actor(Hosted):
    """A process of a cluster, where Ray has put it."""

    def start(self, port: int) -> ActorReport:
        return self.begin(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port)


@dataclass(eq=False)
class Life:
    """An actor from its start to its end."""

    seen: ActorReport = field(default_factory=ActorReport)
    changed: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    is_told = is_killed = False  # to end; at once


class Placed(MemberProcess):
    """A process on a node of Ray. A thread asks its actor how it is.

    Args:
        where: Options of Ray that say where it runs, and what it takes there.
    """

    def __init__(self, member: Member, task: Task, where: Callable[[], dict[str, Any]], keys: str = "") -> None:
        super().__init__(member)
        self._task, self._where, self._keys = task, where, keys
        self._life: Life | None = None

    @property
    def is_running(self) -> bool:
        return self._life is not None and not self._life.is_killed and not self._life.over.is_set()

    @property
    def pid(self) -> int:
        return self._life.seen.pid if self._life else 0

    @property
    def node(self) -> str:
        """Where it runs or ran, as Ray calls it."""
        return self._life.seen.node if self._life else ""

    @property
    def status(self) -> int:
        return (self._life.seen.status or 0) if self._life else 0

    def kill(self) -> None:
        if self._life is not None:
            self._life.is_killed = True
            self._life.changed.set()

    def wait(self, seconds: float) -> bool:
        return not self.is_running or (self._life is not None and self._life.over.wait(max(0.0, seconds)))

    def wait_for_actor(self, seconds: float) -> None:
        """Wait until nothing of it is left."""
        if self._life is not None:
            self._life.over.wait(max(0.0, seconds))

    def _start(self) -> None:
        self._life = Life()
        threading.Thread(target=self._run, args=[self._life, self.ready], daemon=True).start()

    def _stop(self) -> None:
        assert self._life is not None
        self._life.is_told = True
        self._life.is_killed |= not self._life.seen.pid  # Ray has not found a place, or does not answer
        self._life.changed.set()

    def _run(self, life: Life, ready: threading.Event) -> None:
        try:
            name = f"{self.name}.{next(GENERATIONS)}"
            actor = ray.remote(Actor).options(name=name, max_restarts=0, **self._where()).remote(self._task)
            try:
                self._follow(life, ready, actor)
            finally:
                _end(actor)
        except (RayError, ValueError) as error:
            life.seen = replace(life.seen, status=1)
            if not life.is_killed:
                logger.error("%s: Ray says: %s", self.name, str(error).strip())
        finally:
            life.over.set()

    def _follow(self, life: Life, ready: threading.Event, actor: Any) -> None:
        """Ask an actor how it is until its process has ended, or is to be killed."""
        asked, is_told, answered = actor.start.remote(self._port), False, time.monotonic()
        while not life.is_killed and life.seen.status is None:
            if (seen := _answer(asked)) is not None:
                answered = time.monotonic()
                self._take(seen, life, ready)
            elif life.seen.pid:
                self.silent_s = time.monotonic() - answered
            life.changed.wait(LOOK_EVERY_S)
            life.changed.clear()
            if life.is_told and not is_told:
                asked, is_told = actor.stop.remote(), True
            elif seen is not None or _has_failed(asked):
                asked = actor.look.remote()

    def _take(self, seen: ActorReport, life: Life, ready: threading.Event) -> None:
        life.seen = seen
        if life is not self._life:
            return
        self.silent_s, self.health = seen.silent_s, seen.health
        if seen.is_ready and not ready.is_set():
            url = seen.url + (self._keys if reaches_other_hosts(seen.url) else "")
            self.member = replace(self.member, url=url, pages=seen.pages)
            self.starts = 0
            ready.set()
            logger.info("%s is ready (pid %d of node %s)", self.name, seen.pid, seen.node[:8])

    @property
    def _port(self) -> int:
        """Where trainers look for an executor that was there before; 0: nowhere."""
        url = self.member.url.partition("?")[0]
        return int(url.rpartition(":")[2]) if reaches_other_hosts(url) else 0


def _answer(asked: Any) -> ActorReport | None:
    """Return what an actor tells, None if it says nothing now. Raises a `RayError` when it is dead."""
    try:
        return ray.get(asked, timeout=ANSWER_S)
    except (GetTimeoutError, ActorUnavailableError):
        return None


def _has_failed(asked: Any) -> bool:
    """Whether nothing will come any more of a question that had no answer."""
    return bool(ray.wait([asked], timeout=0)[0])


def _end(actor: Any) -> None:
    """End an actor with all that it has started."""
    with suppress(RayError):
        ray.get(actor.kill.remote(), timeout=KILL_S)
    with suppress(RayError, ValueError):
        ray.kill(actor)


class OnRay:
    """The nodes of the Ray cluster that this host belongs to. Raises `ConfigError` if there is none, or it has no room."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        connect(plan.name)
        _check_name(plan.name)
        context = ray.get_runtime_context()
        self._home, self._head = context.get_node_id(), Head(context.gcs_address)
        self._plan, self.secret = _with_whole_paths(plan), member_commands.new_secret()
        self._keys, self._query = _make_keys(folder)
        self._placed: list[Placed] = []
        self._groups: dict[str, PlacementGroup] = {}
        self._coming: set[str] = set()  # models that have room, and no processes yet
        try:
            self._place(plan.models)
        except BaseException:
            self.close()
            raise

    def _place(self, models: Iterable[str]) -> None:
        """Have Ray reserve what these models need at least, and have one node of each look at what is wrong there."""
        groups = {
            name: placement_group(self._plan.models[name].bundles, "SPREAD", f"{self._plan.name}/{name}")
            for name in models
        }
        self._groups |= groups
        deadline = time.monotonic() + PLACE_S
        waited = {name: group.wait(max(0.0, deadline - time.monotonic())) for name, group in groups.items()}
        if without := [name for name, has_room in waited.items() if not has_room]:
            raise ConfigError("\n".join(_no_room(name, self._plan.models[name]) for name in without))
        of_model = ray.remote(preflight.of_model)
        asked = [of_model.options(**self._in_bundle(name, 0)).remote(self._plan, name, is_here=True) for name in groups]
        try:
            problems = [line for lines in ray.get(asked) for line in lines] or self._without_memory(groups)
        except RayError as error:
            raise ConfigError(f"backend: ray: a node cannot check the models: {str(error).strip()}") from None
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems)))

    def _without_memory(self, names: Iterable[str]) -> list[str]:
        """Compare what Ray has placed on each node with what is free there."""
        room = ray.remote(_room)
        asked = [
            room.options(**self._in_bundle(name, index)).remote(self._plan, name, index)
            for name in names
            for index in range(self._plan.models[name].executors)
        ]
        needed, free = Footprint(), dict[str, int]()
        for found, has in ray.get(asked):
            needed.update(found)
            free |= has
        return list(lacking("all processes there", needed, free))

    def executor(self, model: str, number: int) -> MemberProcess:
        self._coming.discard(model)
        task = Task(plan=self._plan, model=model, number=number, home=self._home, keys=self._keys)
        member = Member(name=task.name, kind="executor", model=model)
        return self._add(Placed(member, task, lambda: self._in_bundle(model, number - 1), self._query))

    def server(self, model: str, number: int, of_model: int, executor: MemberProcess) -> MemberProcess:
        plan = self._plan.models[model]
        place = int(executor.name.rpartition("-")[2])
        task = Task(
            plan=self._plan, model=model, number=number, of_model=of_model, executor=place, home=self._home, secret=self.secret,
        )  # fmt: skip
        member = member_commands.server_member(self._plan, model, number, of_model)
        if of_model <= plan.reserved:
            return self._add(Placed(member, task, lambda: self._in_bundle(model, place - 1)))
        assert isinstance(executor, Placed)
        return self._add(Placed(member, task, lambda: {**_share(plan), **_beside(executor)}))

    def _add(self, placed: Placed) -> Placed:
        self._placed.append(placed)
        return placed

    def _in_bundle(self, model: str, index: int) -> dict[str, Any]:
        where = PlacementGroupSchedulingStrategy(self._groups[model], placement_group_bundle_index=index)
        return {**_share(self._plan.models[model]), "scheduling_strategy": where}

    def take(self, plan: Plan) -> None:
        come = [name for name in plan.models if name not in self._groups]
        self._coming |= set(come)
        self._plan = replace(self._plan, models={**self._plan.models, **_with_whole_paths(plan).models}, aliases={})
        try:
            self._place(come)
        except BaseException:
            self._leave(come)
            raise
        self._leave([name for name in self._groups if name not in plan.models and name not in self._coming])

    def _leave(self, models: Iterable[str]) -> None:
        """Give back what models had that have no processes any more."""
        groups = [group for name in models if (group := self._groups.pop(name, None)) is not None]
        self._coming -= set(models)
        self._plan = replace(
            self._plan, models={name: each for name, each in self._plan.models.items() if name in self._groups}
        )
        self._placed = [each for each in self._placed if each.member.model in self._groups]
        for group in groups:
            threading.Thread(target=_remove, args=[group], daemon=True).start()  # without a head this takes long

    def check(self) -> None:
        if reason := self._head.why_lost:
            raise SymbiosisError(
                f"the head of Ray at {self._head.address} {reason}: start this cluster again once Ray runs"
            )

    def close(self) -> None:
        deadline = time.monotonic() + (AWAY_END_S if self._head.is_away else END_S)
        for placed in self._placed:
            placed.kill()
        for placed in self._placed:
            placed.wait_for_actor(deadline - time.monotonic())
        self._head.close()
        if self._head.is_away:
            return  # Ray would wait for it, and has lost its groups anyhow
        for group in self._groups.values():
            _remove(group)
        ray.shutdown()


def _room(plan: Plan, name: str, executor: int) -> tuple[Footprint, dict[str, int]]:
    """Return what an executor and its servers take on the node where Ray runs this, and what is free there. Places are named by the node."""
    found, node = preflight.bundle_of(plan, name, executor), ray.get_runtime_context().get_node_id()[:8]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")

    def named(place: str) -> str:
        number = place.removeprefix("cuda:")
        if not number.isdecimal():
            return f"node {node}"
        return f"GPU {gpus[int(number)] if int(number) < len(gpus) and gpus[0] else number} of node {node}"

    here = Footprint()
    for (place, what), nbytes in found.items():
        here[named(place), what] += nbytes
    return here, {named(place): nbytes for place, nbytes in preflight.free_memory_of(found).items()}


def _remove(group: PlacementGroup) -> None:
    with suppress(RayError):
        remove_placement_group(group)


class Head:
    """Notices that the head of Ray does not answer any more, or is another one that knows nothing of this cluster."""

    def __init__(self, address: str) -> None:
        self.address, self._gone_since, self._is_new = address, 0.0, False
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_away(self) -> bool:
        return bool(self._gone_since) or self._is_new

    @property
    def why_lost(self) -> str | None:
        """None: it is there, or may come back."""
        if self._is_new:
            return "was started again, and has lost what it knew"
        away = time.monotonic() - self._gone_since if self._gone_since else 0.0
        return f"has been gone for {away:.0f} s" if away > HEAD_S else None

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        for seconds in count(1):
            if self._ended.wait(1.0):
                return
            if not listens(self.address):
                if not self._gone_since:
                    logger.error(
                        "the head of Ray at %s does not answer: nothing is started until it does", self.address
                    )
                    self._gone_since = time.monotonic()
            elif self._gone_since or not seconds % KNOWN_EVERY_S:
                self._gone_since = 0.0
                self._is_new |= not _knows_us()


def _knows_us() -> bool:
    """Whether the head takes what this process asks for its own: one without memory that was started again does not."""
    try:
        ray.util.list_named_actors()  # `ray.nodes()` would end this process
    except RayError:
        return False
    return True


def connect(name: str) -> None:
    """Join the Ray cluster of this host."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            "backend: ray: run `symbiosis cluster up` on a node of Ray: $RAY_ADDRESS is that of Ray's client"
        )
    if re.fullmatch(r"\S+:\d+", address) and not listens(address):  # Ray would try for minutes
        raise ConfigError(f"backend: ray: nothing listens at {address}, which $RAY_ADDRESS names\n{HOW_TO_START}")
    try:
        with chdir("/"):  # from where this is called, Ray has all workers import
            ray.init("auto", namespace=name, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        told = str(error).strip().partition("\n")[0]
        raise ConfigError(f"backend: ray: {told}\n{HOW_TO_START}") from None


def listens(address: str) -> bool:
    """Whether somebody accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _check_name(name: str) -> None:
    """Raise `ConfigError` if another `cluster up` has actors under this name; those of one that was killed end by themselves."""
    deadline = time.monotonic() + END_S
    while ray.util.list_named_actors():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"a cluster {name!r} runs already on this Ray, from another host: give this one another name"
            )
        time.sleep(0.2)


def _share(model: ModelPlan) -> dict[str, Any]:
    return {"num_cpus": model.threads, "num_gpus": model.gpus}


def _beside(executor: Placed) -> dict[str, Any]:
    """Where its executor is."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(executor.node, soft=False)}


def _no_room(name: str, model: ModelPlan) -> str:
    needed = "; ".join(", ".join(f"{amount:g} {what}" for what, amount in each.items()) for each in model.bundles)
    free = ray.available_resources()
    has = [
        f"{free.get(what, 0):g} of {amount:g} {what} free"
        for what, amount in ray.cluster_resources().items()
        if what in ("CPU", "GPU")
    ]
    return (
        f"models.{name}: Ray found no room within {PLACE_S:g} s. Each executor needs, on one node and with its servers: {needed}. "
        f"All {sum(node['Alive'] for node in ray.nodes())} nodes together have {', '.join(has) or 'none of it'}"
    )


def _with_whole_paths(plan: Plan) -> Plan:
    """Return a plan whose models are named as nodes find them, which have another working directory."""
    found = {name: each.model or name for name, each in plan.models.items()}
    whole = {name: str(Path(each).expanduser().resolve()) if is_path(each) else each for name, each in found.items()}
    return replace(plan, models={name: replace(each, model=whole[name]) for name, each in plan.models.items()})


def _make_keys(folder: Path) -> tuple[dict[str, str], str]:
    """Make the keys of this cluster's executors and of its trainers. Return the files for nodes, and how an endpoint names those of trainers."""
    secret, public = generate(EXECUTOR_KEY, folder)
    mine, others = generate(TENANT, folder)
    return {secret.name: secret.read_text(), others.name: others.read_text()}, f"?server={public}&key={mine}"
