"""The file of a cluster: which models, how many executors and servers of each, and what they are started with."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import yaml

from symbiosis.base.hosts import check_hosts
from symbiosis.base.yaml_file import read_yaml
from symbiosis.errors import ConfigError
from symbiosis.protocol.endpoints import LAST_PORT, is_loopback

NAME = re.compile(r"[\w][\w.-]{0,63}")
LEAST_FROZEN_S = 1.0  # processes are asked how they are every half second
MOST_EXECUTORS, MOST_SERVERS, MOST_FRONT_ENDS = 1 << 20, 4096, 256  # of one model; in all
BACKENDS = ("local", "ray")  # this host; the nodes of a Ray cluster
OURS = {  # options that the cluster gives itself
    "executor": {"listen", "model", "config", "metrics-port", "metrics-host"},
    "server": {
        "executor", "model", "config", "served-model-name", "adapters", "host", "port", "allowed-hosts", "api-keys", "drain-s", "wait-s",
        "train", "checkpoints", "server-name",
    },
}  # fmt: skip


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: its name for clients is its key in the file."""

    model: str | None = None  # a directory, a hub id, or `demo`; None: the name
    executors: int = 1
    servers: int | tuple[int, int] = 1  # so many, or from so many to so many
    adapters: str | None = None  # a folder
    train: bool = False  # by Tinker's API
    threads: int = 1  # of each process
    gpus: float = 0  # of each process: its share of the GPU on which it is with the others of its executor, on Ray
    executor: dict[str, Any] = {}  # options of symbiosis-executor
    server: dict[str, Any] = {}  # options of symbiosis serve

    @property
    def least(self) -> int:
        return self.servers if isinstance(self.servers, int) else self.servers[0]

    @property
    def most(self) -> int:
        return self.servers if isinstance(self.servers, int) else self.servers[1]

    @property
    def reserved(self) -> int:
        """For how many servers there is room from the start. On a GPU it is for all: they must be on that of their executor."""
        return self.most if self.gpus else self.least

    def servers_of(self, executor: int) -> int:
        """How many servers there is room for beside an executor, which are counted from 0."""
        return len(range(executor or self.executors, self.reserved + 1, self.executors))

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What each executor needs, on one node, together with its servers.

        >>> ModelPlan(executors=2, servers=(3, 5), threads=2).bundles
        [{'CPU': 4.0}, {'CPU': 6.0}]
        """
        counts = [1 + self.servers_of(place) for place in range(self.executors)]
        gpus = [{"GPU": round(self.gpus * count, 4)} if self.gpus else {} for count in counts]
        return [{"CPU": float(self.threads * count), **gpu} for count, gpu in zip(counts, gpus, strict=True)]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster.

    >>> Plan(name="lab", models={"demo": ModelPlan(servers=(1, 4))}).models["demo"].most
    4
    """

    models: dict[str, ModelPlan] = {}
    name: str = ""  # default: that of the file
    backend: str = "local"
    host: str = "127.0.0.1"
    port: int = 8000
    front_ends: int = 1
    metrics_port: int = 0  # of the first front end's pages; those of the others and of all processes come behind it. 0: any that are free
    allowed_hosts: tuple[str, ...] = ()  # as of `symbiosis serve`
    api_keys: str | None = None
    checkpoints: str | None = None  # a folder for all that is trained
    aliases: dict[str, dict[str, float]] = {}  # names for several models, versions for example: with the share of each
    limits: dict[str, int] = {}  # by tenant: sequences in the whole cluster; what is beyond waits
    decision_log: str | None = None  # a file
    frozen_s: float = 10.0  # a process that says nothing for so long is started again
    idle_s: float = 60.0  # a server that has nothing to do for so long may be released
    drain_s: float = 30.0  # the longest wait for what cannot go elsewhere

    @property
    def is_for_this_machine(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(f"{self.host}:{self.port}")

    @property
    def most_processes(self) -> int:
        """How many executors, servers and front ends there may be."""
        return self.front_ends + sum(model.executors + model.most for model in self.models.values())

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        """Yield a line for each thing that is wrong, whatever there is on this host."""
        if self.backend not in BACKENDS:
            yield f"backend: write {' or '.join(BACKENDS)}, not {self.backend!r:.50}"
        for name in (self.name or "cluster", *self.models):
            if not NAME.fullmatch(name):
                yield f"{name!r:.80} is no name: letters, digits, dots, hyphens and underscores, at most 64"
        if not self.models:
            yield "models: name at least one"
        if not 1 <= self.front_ends <= MOST_FRONT_ENDS or not 0 <= self.port <= 65535:
            yield f"front_ends must be from 1 to {MOST_FRONT_ENDS}, and port from 0 to 65535"
        try:
            check_hosts(self.allowed_hosts)
        except ConfigError as error:
            yield str(error)
        if self.metrics_port and not 1024 <= self.metrics_port <= LAST_PORT + 1 - self.most_processes:
            yield f"metrics_port: from 1024 to {LAST_PORT + 1 - self.most_processes}, since {self.most_processes} processes have theirs one behind another"
        if self.metrics_port and self.backend != "local":
            yield "metrics_port is for backend: local. On Ray, /cluster/targets tells where the pages are"
        for field, least in (("frozen_s", LEAST_FROZEN_S), ("idle_s", 0.0), ("drain_s", 0.1)):
            if not least <= (seconds := getattr(self, field)) < math.inf:
                yield f"{field}: a number of seconds, at least {least:g}, not {seconds}"
        for tenant, most in self.limits.items():
            if most < 1:
                yield f"limits.{tenant[:80]}: at least 1 sequence, not {most}"
        for name, plan in self.models.items():
            yield from _problems_of(name, plan)
        for name, shares in self.aliases.items():
            try:
                check_shares(name, shares, self.models)
            except ConfigError as error:
                yield str(error)


def _problems_of(name: str, plan: ModelPlan) -> Iterator[str]:
    for kind, given in (("executor", plan.executor), ("server", plan.server)):
        if mine := OURS[kind] & {each.replace("_", "-") for each in given}:
            yield f"models.{name}.{kind}: {sorted(mine)[0]} is given by the cluster itself"
    if plan.executors < 1 or not 0 <= plan.least <= plan.most or plan.threads < 1:
        yield f"models.{name}: at least one executor and thread, and servers: NUMBER or [LEAST, MOST]"
    elif plan.train and plan.least != plan.most:
        yield f"models.{name}: sessions live on the servers of a model that trains, so it has the same ones all the time: servers: NUMBER"
    elif plan.executors > MOST_EXECUTORS or plan.most > MOST_SERVERS:
        yield f"models.{name}: at most {MOST_EXECUTORS} executors and {MOST_SERVERS} servers"
    elif not 0 <= plan.gpus <= 1 or round(plan.gpus, 4) != plan.gpus:
        yield f"models.{name}: gpus is a share of one GPU for each process: from 0 to 1, with four decimals"
    elif (most := max(each.get("GPU", 0.0) for each in plan.bundles)) > 1:
        yield f"models.{name}: an executor and its servers share one GPU, and gpus gives them {most:g}"


def check_shares(name: str, shares: Mapping[str, float], models: Collection[str]) -> None:
    """Raise `ConfigError` unless `shares` divide the requests for `name` among models."""
    if name in models or not NAME.fullmatch(name):
        raise ConfigError(f"aliases: {name!r:.80} is the name of a model, or none at all")
    if unknown := sorted(set(shares) - set(models)):
        raise ConfigError(f"aliases.{name}: there is no model {unknown[0]!r:.80}: write some of {', '.join(models)}")
    if not all(0 <= share < math.inf for share in shares.values()) or not sum(shares.values()):
        raise ConfigError(f"aliases.{name}: shares are numbers that are not negative, and not all 0")


def load(file: Path) -> Plan:
    """Read a cluster's file. Raises a `ConfigError` that names what is wrong, and where."""
    try:
        told = read_yaml(file)
        if told is None:
            raise ConfigError(f"{file} is empty: write at least `models: {{NAME: {{}}}}`")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if problems := list(_misread(told, Plan)):
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems))
    try:
        plan = msgspec.convert(told, Plan)
    except msgspec.ValidationError as error:
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in str(error).splitlines())) from None
    if plan.checkpoints and not any(each.train for each in plan.models.values()):
        raise ConfigError(f"{file}: checkpoints is for a model that trains: write `train: true` for it")
    paths = {name: _resolved(file, plan.adapters) for name, plan in plan.models.items()}
    models = {name: msgspec.structs.replace(each, adapters=paths[name]) for name, each in plan.models.items()}
    keys, log, checkpoints = (_resolved(file, each) for each in (plan.api_keys, plan.decision_log, plan.checkpoints))
    return msgspec.structs.replace(
        plan, name=plan.name or file.stem, models=models, api_keys=keys, decision_log=log, checkpoints=checkpoints
    )


def _misread(told: Any, kind: type[Plan | ModelPlan], place: str = "") -> Iterator[str]:
    """Yield a line for each key that there is not, and for each value of another kind than its key takes."""
    if not isinstance(told, dict):
        yield f"{place or 'a cluster'}: write keys and values, or {{}}, not {told!r:.50}"
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in told.items():
        here = f"{place}.{key}".lstrip(".")[:150]
        if key not in fields:
            meant = get_close_matches(str(key).replace("-", "_"), fields, 1, 0.8)
            hint = f". Did you mean {meant[0]}?" if meant else ""
            yield f"{here}: there is no such key: there are {', '.join(fields)}{hint}"
        elif key == "models" and isinstance(value, dict):
            for name, plan in value.items():
                yield from _misread(plan, ModelPlan, f"models.{name}"[:80])
                if not isinstance(name, str):
                    yield f"models.{name}: a name is text: write '{name}'"[:150]
        else:
            try:
                msgspec.convert(value, fields[key])
            except msgspec.ValidationError as error:
                yield f"{here}: {str(error).partition(' - at ')[0]}"


def _resolved(file: Path, path: str | None) -> str | None:
    """Return a path in a file, which is relative to the folder of the file."""
    return None if path is None else str((file.parent / Path(path).expanduser()).resolve())
