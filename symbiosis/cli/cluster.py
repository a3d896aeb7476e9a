"""The commands of `symbiosis cluster`. Importing this loads nothing that `--help` does not need."""

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from symbiosis.cli.commands import InLines
from symbiosis.errors import ConfigError
from symbiosis.protocol.cluster_state import Told, running, told_by

DOWN_S = 120.0
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run many servers and executors as one: start, watch and end them.",
)
Default = Annotated[str | None, typer.Argument(metavar="[CLUSTER]", help="Default: the only one of yours that runs on this host.")]  # fmt: skip


@app.command(cls=InLines)
def up(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Models, and how many executors and servers of each.")],
    backend: Annotated[str | None, typer.Option(
        help="Where executors and servers run: local, on this host, or ray, on the nodes of the Ray cluster that this host belongs to. "
        "Default: as the file says, else local.")] = None,
) -> None:  # fmt: skip
    """Start a cluster and watch over it until it is told to end."""
    from symbiosis.cluster.controller.preflight import check
    from symbiosis.cluster.plan import load

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


@app.command(cls=InLines)
def status(cluster: Default = None, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:  # fmt: skip
    """Print the processes of a cluster and their load."""
    from symbiosis.cli.top import look, show, watch_cluster

    told = named(cluster)
    if not as_json:
        show(watch_cluster(told.name, 0.0), once=True)
        return
    found = look(told)
    members = [{**msgspec.structs.asdict(each), **found.health.get(each.name, {})} for each in told.members]
    print(msgspec.json.encode({"name": told.name, "url": told.url, "members": members}).decode())


@app.command(cls=InLines)
def top(
    cluster: Default = None,
    once: Annotated[bool, typer.Option("--once", help="Print one plain view and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two views.")] = 1.0,
) -> None:  # fmt: skip
    """Watch a cluster: the load, the memory and the pace of each server, and what waits."""
    from symbiosis.cli.top import show, watch_cluster

    show(watch_cluster(named(cluster).name, interval), once)


@app.command(cls=InLines)
def drain(name: Annotated[str, typer.Argument(metavar="NAME", help="A process, as status names it.")], cluster: Default = None) -> None:  # fmt: skip
    """Let one process hand over what it does, and end."""
    order(named(cluster).name, "drain", name)


@app.command(cls=InLines)
def roll(cluster: Default = None, only: Annotated[str, typer.Option(metavar="NAME", help="Only the processes of this model, or this process.")] = "") -> None:  # fmt: skip
    """Replace all processes one after the other, without an answer or a call lost."""
    order(named(cluster).name, "roll", only)


@app.command(cls=InLines)
def apply(file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The file of a running cluster, with other models or aliases.")]) -> None:  # fmt: skip
    """Let a running cluster serve the models that its file has now: new ones start, others end when nobody uses them any more."""
    from symbiosis.cluster.plan import load

    order(load(file).name, "apply", str(file.resolve()))


@app.command(cls=InLines)
def shift(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What clients ask for.")],
    shares: Annotated[list[str], typer.Argument(metavar="MODEL=SHARE ...", help="The models that answer, and how much of the requests each gets, in proportion.")],
    new: Annotated[bool, typer.Option("--new", help="NAME may be one that is no alias yet.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Default: the only one of yours that runs on this host.")] = None,
) -> None:  # fmt: skip
    """Divide the requests for a name among models, for example versions of one, from the next request on."""
    divided = {}
    for word in shares:
        model, _, share = word.rpartition("=")
        try:
            divided[model] = float(share)
        except ValueError:
            raise ConfigError(f"{word!r:.80}: write MODEL=SHARE, as demo-2=0.1") from None
    order(named(cluster).name, "shift", name, shares=divided, new=new)


@app.command(cls=InLines)
def down(cluster: Default = None) -> None:
    """End a cluster, and return when it has ended."""
    name = named(cluster).name
    order(name, "down")
    deadline = time.monotonic() + DOWN_S
    while any(each.name == name for each in running()):
        if time.monotonic() > deadline:
            raise ConfigError(f"the cluster {name} has not ended within {DOWN_S:g} s")
        time.sleep(0.1)


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


def order(cluster: str, verb: str, name: str = "", **more: Any) -> None:
    """Have a cluster do something, and print what it says of it."""
    from symbiosis.cluster.controller.control_socket import send_order

    print(send_order(cluster, verb, name, **more))
