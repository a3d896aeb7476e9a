"""The socket at which a running cluster takes orders, and the other end of it. It lies in a folder that only the cluster's user may enter."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from symbiosis.cluster.controller.apply import apply
from symbiosis.cluster.controller.base_fingerprints import WHAT_TO_DO
from symbiosis.cluster.controller.controller import ClusterController
from symbiosis.cluster.placement import State
from symbiosis.cluster.plan import check_shares
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.protocol.cluster_state import folder_of, told_by

logger = logging.getLogger("symbiosis")

ORDER_S = 3600.0  # the longest wait for an order to be done
READY_S = 600.0  # ... for one process to be ready again
TAKEN_S = 10.0  # ... until the cluster says that it has an order: it does so before it does anything
IDLE_S = 2.0  # without requests, before a server has finished: its last page may be from before
KINDS = ("executor", "server", "front")  # in this order they are replaced


class Control:
    """Takes orders, each in a thread of its own, so that one that takes long does not keep others waiting."""

    def __init__(self, cluster: ClusterController, folder: Path) -> None:
        self._cluster, self._rolls = cluster, threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder / "control.sock"
        try:
            self._socket.bind(str(path))
        except OSError as error:
            raise ConfigError(f"{path}: {error}. Name another folder for sockets by XDG_RUNTIME_DIR") from None
        self._socket.listen()
        threading.Thread(target=self._run, name="cluster-control", daemon=True).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rw") as stream:

            def say(line: str) -> None:
                """Tell how far it is. Whoever has given the order may be gone: it is done all the same."""
                with suppress(OSError):
                    stream.write(json.dumps({"so far": line}) + "\n")
                    stream.flush()

            stream.write(json.dumps({"so far": ""}) + "\n")
            stream.flush()  # fails if nobody waits any more: what was said to be in vain is not done later
            try:
                order = json.loads(stream.readline())
                told = {"done": self._do(order, say)}
            except SymbiosisError as error:
                told = {"error": str(error)}
            except (ValueError, LookupError, TypeError) as error:
                told = {"error": f"no order: {error}"}
            except Exception as error:
                logger.exception("an order failed")
                told = {"error": f"it failed, as the log of the cluster says: {error!r:.300}"}
            stream.write(json.dumps(told) + "\n")

    def _do(self, order: dict[str, Any], say: Callable[[str], None]) -> str:
        verb, name = order["verb"], order.get("name", "")
        match verb:
            case "drain":
                return self._drain(name)
            case "roll":
                return self._roll(name, say)
            case "shift":
                return self._shift(name, order.get("shares", {}), order.get("new", False))
            case "apply":
                with self._alone():
                    return apply(self._cluster, Path(name))
            case "down":
                self._cluster.down()
                return "the cluster ends"
        raise ConfigError(f"there is no order {verb!r}")

    def _drain(self, name: str) -> str:
        process = self._cluster.members.get(name)
        if process is None:
            known = ", ".join(self._cluster.members)
            raise ConfigError(f"there is no process {name!r}: drain one of {known}")
        self._cluster.do(lambda: self._cluster.release(name))
        self._await(name, lambda: self._cluster.members[name].state is None)
        return f"{name} has ended"

    def _roll(self, name: str, say: Callable[[str], None]) -> str:
        """Replace all processes, or those of one model, or one, one after the other."""
        whole = [model for model in self._cluster.plan.models if name in ("", model)]
        with self._alone(), self._cluster.bases.rolled(whole):
            names = [
                process.name
                for kind in KINDS
                for process in self._cluster.members.values()
                if process.member.kind == kind
                and process.is_running
                and process.comes_back
                and name in ("", process.member.model, process.name)
            ]
            if not names:
                running = (process.name for process in self._cluster.members.values() if process.is_running)
                known = ", ".join([*self._cluster.plan.models, *running])
                raise ConfigError(f"no model or process {name!r:.80} runs: name one of {known}")
            for number, each in enumerate(names, 1):
                begun = time.monotonic()
                self._finish(each)
                before = self._cluster.members[each].pid
                self._cluster.order(lambda each=each: self._cluster.drain(each, "it is replaced", comes_back=True))  # type: ignore[misc]
                self._await(each, lambda each=each, before=before: self._is_new(each, before))  # type: ignore[misc]
                say(f"{number} of {len(names)}: {each} is replaced, after {time.monotonic() - begun:.0f} s")
            return "1 process was replaced" if len(names) == 1 else f"{len(names)} processes were replaced"

    def _finish(self, name: str) -> None:
        """Before a server gets another base, let it finish what it has, because no server of that base could go on with it."""
        process = self._cluster.members[name]
        needs, model = process.needs, process.member.model
        if needs is not None and needs.state is State.OTHER_BASE and not self._cluster.bases.may_change(model):
            raise ConfigError(f"{needs.name} serves another base: {WHAT_TO_DO.format(model)}")
        if process.member.kind != "server" or not self._cluster.bases.changes(model, self._cluster.of_model(model)):
            return
        process.takes_new, had = False, time.monotonic()

        def is_idle() -> bool:
            nonlocal had
            had = time.monotonic() if process.requests else had
            return not process.is_running or time.monotonic() - had > IDLE_S

        try:
            self._await(name, is_idle)
        except SymbiosisError:
            process.takes_new = True
            raise

    def _is_new(self, name: str, before: int) -> bool:
        process = self._cluster.members[name]
        if process.pid == before or process.state is not State.OTHER_BASE:
            return process.pid != before and process.state is State.READY
        if self._cluster.bases.may_change(process.member.model):
            return True
        raise SymbiosisError(f"{name} serves another base now: {WHAT_TO_DO.format(process.member.model)}")

    def _shift(self, name: str, shares: dict[str, float], is_new: bool) -> str:
        """Divide the requests for a name among models in another way, from the next one on."""
        check_shares(name, shares, self._cluster.plan.models)
        if name not in self._cluster.aliases and not is_new:
            known = ", ".join(self._cluster.aliases) or "none"
            raise ConfigError(f"there is no alias {name!r:.80} (there are: {known}): --new makes one of it")
        self._cluster.do(lambda: self._cluster.shift(name, shares))
        total = sum(shares.values())
        return f"{name}: {', '.join(f'{100 * share / total:g} % {model}' for model, share in shares.items())}"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Replace, add or remove processes while no other order does."""
        if not self._rolls.acquire(blocking=False):
            raise ConfigError("the cluster is being rolled or changed already: wait until that is done")
        try:
            yield
        finally:
            self._rolls.release()

    def _await(self, name: str, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not is_done():
            if time.monotonic() > deadline:
                raise SymbiosisError(f"{name}: not done within {READY_S:g} s")
            time.sleep(0.05)


def send_order(cluster: str, verb: str, name: str = "", **more: Any) -> str:
    """Have a running cluster do something, print what it says meanwhile, and return what it says when that is done."""
    told_by(cluster)
    try:
        told = _answer(cluster, {"verb": verb, "name": name, **more})
    except TimeoutError:
        raise SymbiosisError(
            f"the process of `symbiosis cluster up` for {cluster!r} says nothing: it is stopped, or its host is overloaded"
        ) from None
    except OSError as error:
        raise SymbiosisError(f"cannot reach the cluster {cluster!r}: {error.strerror or error}") from None
    if not told and verb == "down":
        return "the cluster has ended"
    if not told:
        raise SymbiosisError(f"the cluster {cluster!r} ended before it had done this")
    if "error" in told:
        raise ConfigError(told["error"])
    return str(told["done"])


def _answer(cluster: str, order: dict[str, Any]) -> dict[str, str]:
    """Send an order and return its end, nothing if the cluster ends before that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TAKEN_S)
        connection.connect(str(folder_of(cluster) / "control.sock"))
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(order) + "\n")
            stream.flush()
            told: dict[str, str] = json.loads(stream.readline() or "{}")
            connection.settimeout(ORDER_S)
            while "so far" in told:
                if told["so far"]:
                    print(told["so far"], flush=True)
                told = json.loads(stream.readline() or "{}")
    return told
