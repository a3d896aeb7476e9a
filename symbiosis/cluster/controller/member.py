"""What a cluster knows of one of its processes, wherever it runs: whether it is to run, whether it does, and what it says of itself."""

import threading
from abc import ABC, abstractmethod

from symbiosis.cluster.placement import State
from symbiosis.protocol.cluster_state import Member

LOST_S = 3.0  # one that says nothing for so long is taken for lost: its requests go elsewhere


class MemberProcess(ABC):
    """One member of a cluster. A backend says how it is started and ended."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.ready = threading.Event()
        self.silent_s = 0.0
        self.starts, self.was_started = 0, False  # since it was ready last; at all
        self.health: dict[str, object] = {}  # what its page told last
        self.needs: MemberProcess | None = None  # what has to be ready before it starts
        self.draining_since: float | None = None
        self.comes_back, self._is_told = True, False  # when it ends; that it is to end
        self.base = ""  # the fingerprint that its model has
        self.takes_new = True  # requests

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def state(self) -> State | None:
        """None: it does not run."""
        if not self.is_running:
            return None
        if self.draining_since is not None:
            return State.DRAINING
        if not self.ready.is_set() or not self._is_known:
            return State.STARTING
        if self.silent_s > LOST_S:
            return State.LOST
        return State.READY if self.takes_new and self.fingerprint == self.base else State.OTHER_BASE

    @property
    def fingerprint(self) -> str:
        """Of the base that it serves, as it says; nothing while it has not."""
        return str(self.health.get("fingerprint", ""))

    @property
    def _is_known(self) -> bool:
        """Whether it can be told which base it has. A front end has none."""
        return self.member.kind == "front" or bool(self.fingerprint and self.base)

    @property
    def to_come(self) -> State | None:
        """Its state to those who decide how many there should be: one that ends and comes back, or waits to be started again, is starting."""
        return State.STARTING if self.comes_back and self.state in (None, State.DRAINING) else self.state

    @property
    def requests(self) -> int:
        """Under way when it was last asked."""
        return int(str(self.health.get("requests", 0)))

    def start(self) -> None:
        """Start it, and return before it is ready."""
        self.ready, self.silent_s, self.health = threading.Event(), 0.0, {}
        self.draining_since, self.comes_back, self._is_told, self.takes_new = None, True, False, True
        self.starts, self.was_started = self.starts + 1, True
        self._start()

    def stop(self) -> None:
        """Tell it to end, once: a second signal would not let it finish what it does."""
        if self.is_running and not self._is_told:
            self._is_told = True
            self._stop()

    @property
    @abstractmethod
    def is_running(self) -> bool: ...

    @property
    @abstractmethod
    def pid(self) -> int:
        """0: it has no process yet."""

    @property
    @abstractmethod
    def status(self) -> int:
        """With which it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, with all that it has started, which may be frozen as well."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...
