"""The commands of `symbiosis cluster`."""

import time
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec.structs import replace

from symbiosis.cluster.controller.preflight import check
from symbiosis.cluster.plan import load
from symbiosis.errors import ConfigError
from symbiosis.protocol.cluster_state import Told, running, told_by

DOWN_S = 120.0


def up(file: Path, backend: str | None = None) -> None:
    """Run a cluster until it is told to end. `backend` goes before what the file says."""
    plan = load(file)
    plan = replace(plan, backend=backend) if backend else plan
    listener = check(plan)
    from symbiosis.base.logs import name_process, set_up_logging
    from symbiosis.cluster.controller.backend import open_backend
    from symbiosis.cluster.controller.control_socket import Control
    from symbiosis.cluster.controller.controller import ClusterController, locked

    name_process("cluster")
    set_up_logging("text")
    with locked(plan) as folder, listener, closing(open_backend(plan, folder)) as opened:
        cluster = ClusterController(plan, listener, opened)
        Control(cluster, folder)
        cluster.run()


def named(cluster: str | None) -> Told:
    """Return the cluster of this name; without a name the only one that runs."""
    if cluster is not None:
        return told_by(cluster)
    found = list(running())
    if len(found) != 1:
        names = ", ".join(each.name for each in found)
        raise ConfigError(
            f"several clusters run: name one of {names}" if found else "no cluster of yours runs on this host"
        )
    return found[0]


def status(cluster: str | None, as_json: bool) -> None:
    """Print all processes of a cluster, and what they say of themselves."""
    from symbiosis.cluster.controller.cluster_top import look, show

    told = named(cluster)
    if not as_json:
        show(told.name, once=True, interval=0.0)
        return
    found = look(told)
    members = [{**msgspec.structs.asdict(each), **found.health.get(each.name, {})} for each in told.members]
    print(msgspec.json.encode({"name": told.name, "url": told.url, "members": members}).decode())


def top(cluster: str | None, once: bool, interval: float) -> None:
    from symbiosis.cluster.controller.cluster_top import show

    show(named(cluster).name, once, interval)


def order(cluster: str | None, verb: str, name: str = "") -> None:
    from symbiosis.cluster.controller.control_socket import send_order

    print(send_order(named(cluster).name, verb, name, say=lambda line: print(line, flush=True)))


def apply(file: Path) -> None:
    """Let the running cluster of a file take over its models and aliases."""
    from symbiosis.cluster.controller.control_socket import send_order

    plan = load(file)
    print(send_order(plan.name, "apply", str(file.resolve())))


def shift(cluster: str | None, name: str, given: list[str], new: bool) -> None:
    """Divide the requests for a name by words such as `demo-2=0.1`. With `new`, the name need not be an alias yet."""
    from symbiosis.cluster.controller.control_socket import send_order

    shares = {}
    for word in given:
        model, _, share = word.rpartition("=")
        try:
            shares[model] = float(share)
        except ValueError:
            raise ConfigError(f"{word!r:.80}: write MODEL=SHARE, as demo-2=0.1") from None
    print(send_order(named(cluster).name, "shift", name, shares=shares, new=new))


def down(cluster: str | None) -> None:
    """End a cluster, and return when it has ended."""
    name = named(cluster).name
    order(name, "down")
    deadline = time.monotonic() + DOWN_S
    while any(each.name == name for each in running()):
        if time.monotonic() > deadline:
            raise ConfigError(f"the cluster {name} has not ended within {DOWN_S:g} s")
        time.sleep(0.1)
