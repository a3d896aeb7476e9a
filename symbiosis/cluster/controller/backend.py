"""Where the executors and servers of a cluster run: on this host, or on the nodes of a Ray cluster. Front ends run on the host of `cluster up`."""

from itertools import count, repeat
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from symbiosis.cluster.controller import member_commands
from symbiosis.cluster.controller.member import MemberProcess
from symbiosis.cluster.plan import Plan


class Backend(Protocol):
    """Makes the processes of a cluster; `Cluster` says when they start and end."""

    secret: str  # by which its servers know its front ends

    def executor(self, model: str, number: int) -> MemberProcess: ...

    def server(self, model: str, number: int, of_model: int, executor: MemberProcess) -> MemberProcess:
        """Return a server that uses this executor. Its number is unique in the cluster; `of_model` counts those of the model."""
        ...

    def take(self, plan: Plan) -> None:
        """Go on with a plan of other models: have room for those that are new, and give back what those had that are gone. Raises
        `ConfigError` if there is no room."""

    def check(self) -> None:
        """Raise `SymbiosisError` if what it stands on is gone."""

    def close(self) -> None:
        """Give back what it has taken. All processes have ended, or were killed."""


class Local:
    """Processes of this host."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder, self.secret = plan, folder, member_commands.new_secret()
        self._ports = count(plan.metrics_port + plan.front_ends) if plan.metrics_port else repeat(0)

    def executor(self, model: str, number: int) -> MemberProcess:
        return member_commands.executor(self._plan, model, number, self._folder, port=next(self._ports))

    def server(self, model: str, number: int, of_model: int, executor: MemberProcess) -> MemberProcess:
        return member_commands.server(
            self._plan, model, number, of_model, self._folder, executor.member.url, self.secret, port=next(self._ports)
        )

    def take(self, plan: Plan) -> None:
        # Two threads call this. No plan takes away what the other one has brought.
        self._plan = replace(plan, models={**self._plan.models, **plan.models}, aliases={})

    def check(self) -> None: ...

    def close(self) -> None: ...


def open_backend(plan: Plan, folder: Path) -> Backend:
    """Return the backend that a cluster's file names. Raises `ConfigError` if it is not there, or has no room for the cluster."""
    if plan.backend == "ray":
        from symbiosis.cluster.controller.ray_backend import OnRay

        return OnRay(plan, folder)
    return Local(plan, folder)
