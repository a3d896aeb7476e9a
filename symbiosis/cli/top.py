"""`symbiosis top` and `symbiosis cluster top`: what an executor or a cluster does, by its own figures, once or live."""

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from symbiosis.cli.doctor import socket_problem
from symbiosis.cluster.controller.base_fingerprints import WHAT_TO_DO
from symbiosis.cluster.controller.local_process import health_at
from symbiosis.cluster.placement import State
from symbiosis.errors import Code, ExecutorUnavailable, ProtocolError
from symbiosis.executor.observe.pages import read_page
from symbiosis.executor.observe.snapshot import LayerFigures, SessionFigures, Snapshot, mean_size, of_service
from symbiosis.protocol import Op
from symbiosis.protocol.cluster_state import SCHEME, Member, Told, executors_at, told_by
from symbiosis.protocol.endpoints import how_to_start_one, of_rank, parts_of
from symbiosis.text import shown

if TYPE_CHECKING:
    from symbiosis.client.session import Session

BUSIEST = 12
MOST = 1e30  # of any figure
LONGEST_NAME = 256  # characters
BAR = 40
AWAY_S = 0.5  # how long a rank may be away before it is left out of a view
GENERATED = re.compile(r"^symbiosis_serve_generation_tokens_total (\S+)$", re.MULTILINE)


def show(views: Iterator[RenderableType], once: bool) -> None:
    """Show views one after another until interrupted, or one plainly."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    with suppress(KeyboardInterrupt):
        if once or not console.is_terminal:
            for view in islice(views, 1 if once else None):
                console.print(view)
            return
        with Live(next(views), console=console, screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(view, refresh=True)


def table(title: str, rows: Iterable[Any], words: int, columns: Mapping[str, Callable[[Any], object]]) -> Table:
    """Return a table with a line for each row. The first columns, so many, hold words; the others figures."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < words else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(value(row))) for value in columns.values()))
    return made


# ---------------------------------------------------------------- executors


def run(endpoint: str, once: bool, interval: float) -> None:
    """Show the executor at `endpoint` until interrupted, or one plain view of the next `interval` seconds."""
    endpoint = executors_at(endpoint)[0] if endpoint.startswith(SCHEME) else endpoint
    parts_of(endpoint)
    if problem := socket_problem(endpoint):
        raise ExecutorUnavailable(f"no executor at {endpoint} ({problem}). {how_to_start_one(endpoint)}")
    print(f"connecting to {shown(endpoint, LONGEST_NAME)} ...", file=sys.stderr, flush=True)
    from symbiosis.client.session import Session  # torch comes with it

    first = Session(endpoint, observer=True, patience=10.0)
    told, each = first.welcome, {first.welcome.rank: first}
    for rank in range(told.ranks):
        if rank != told.rank:
            each[rank] = Session(of_rank(endpoint, rank, told.rank, told.hosts), observer=True, patience=AWAY_S)
    try:
        show(watch(each, interval), once)
    finally:
        for session in each.values():
            session.close()


def watch(each: "dict[int, Session]", interval: float) -> Iterator[Group]:
    """Show the figures of all ranks, or of the one executor, anew every `interval` seconds."""
    before = snapshots(each)
    while True:
        time.sleep(interval)
        now = snapshots(each)
        both = before.keys() & now.keys()  # of a rank that was away before, no rates are known yet
        then = before if both == now.keys() else now
        whole = render(of_service(sorted(then.items())), of_service(sorted(now.items())))
        yield Group(*[_ranks(each, then, now)][: len(each) > 1], whole)
        before = now


def snapshots(each: "dict[int, Session]") -> dict[int, Snapshot]:
    """Return the figures of the ranks that answer. Raise `ExecutorUnavailable` if none does."""
    found, cause = {}, None
    for rank, session in each.items():
        try:
            found[rank] = snapshot(session)
        except ExecutorUnavailable as error:
            cause = error
    if cause is not None and not found:
        raise cause
    return found


def snapshot(session: "Session") -> Snapshot:
    """Return the executor's figures at this moment."""
    figures = session.call(Op.STATS, 0)
    try:
        told = msgspec.msgpack.decode(figures.numpy().data)
        return msgspec.convert(_fit_to_show(told), Snapshot)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ProtocolError(
            Code.BAD_FRAME, f"{session.endpoint} does not send its figures in a form that this release knows: {error}"
        ) from None


def _fit_to_show(told: object) -> object:
    """Return a snapshot that cannot write on this terminal: names come from clients, and everything from an executor."""
    if isinstance(told, str):
        return shown(told, LONGEST_NAME)
    if isinstance(told, list):
        return [_fit_to_show(one) for one in told]
    if isinstance(told, dict):
        return {_fit_to_show(key): _fit_to_show(value) for key, value in told.items()}
    if isinstance(told, int | float) and not 0 <= told < MOST:
        raise ValueError(f"{told} is not a figure")
    return told


def _ranks(each: "dict[int, Session]", before: dict[int, Snapshot], now: dict[int, Snapshot]) -> Table:
    """Show what each rank of a service does."""

    def rate(rank: int, name: str) -> str:
        if rank not in now:
            return "does not answer" if name == "calls" else ""
        then, told = before[rank], now[rank]
        seconds = max(told.uptime_s - then.uptime_s, 1e-9) if told is not then else math.inf
        return f"{max(0, getattr(told, name) - getattr(then, name)) / seconds:.0f}"

    def of(figure: Callable[[Snapshot], object]) -> Callable[[int], object]:
        return lambda rank: figure(now[rank]) if rank in now else ""

    return table(f"{len(each)} ranks", sorted(each), 1, {
        "rank": str, "calls/s": lambda rank: rate(rank, "calls"), "rows/s": lambda rank: rate(rank, "rows"),
        "queue": of(lambda told: told.queue_depth), "sessions": of(lambda told: len(told.clients)),
        "memory": of(lambda told: size_of(told.rss_bytes)), "weights": of(lambda told: size_of(told.weights_bytes)),
        "up": of(lambda told: duration(told.uptime_s)),
    })  # fmt: skip


def render(before: Snapshot, now: Snapshot) -> Group:
    """Return everything on one screen. Rates are over the time between the two snapshots."""
    seconds = now.uptime_s - before.uptime_s
    if seconds <= 0:  # restarted meanwhile
        seconds = now.uptime_s
        before = msgspec.structs.replace(
            now, uptime_s=0.0, bytes={}, batch_sizes={}, sessions=[], layers=[], tenants={}
        )
    tenants = [_tenants(before, now, seconds)] if any(now.tenants) else []  # nothing without keys
    return Group(_head(before, now, seconds), _sessions(before, now, seconds), *tenants, _layers(before, now, seconds), _sizes(now))  # fmt: skip


def _head(before: Snapshot, now: Snapshot, seconds: float) -> Text:
    recent = {size: n - before.batch_sizes.get(size, 0) for size, n in now.batch_sizes.items()}
    lines = [
        f"executor at {' '.join(now.endpoints)}, policy {now.policy}, up {duration(now.uptime_s)}",
        f"{(now.calls - before.calls) / seconds:.0f} calls/s   {(now.rows - before.rows) / seconds:.0f} rows/s   "
        f"{max(0, now.direct_rows - before.direct_rows) / seconds:.0f} direct rows/s   "
        f"mean batch {mean_size(recent):.2f} ({now.mean_batch:.2f} since the start)   queue {now.queue_depth}",
        f"memory {size_of(now.rss_bytes)} (weights {size_of(now.weights_bytes)})   "
        + "   ".join(
            f"{name} {size_of((total - before.bytes.get(name, 0)) / seconds)}/s" for name, total in now.bytes.items()
        ),
    ]
    if now.errors or now.dropped:
        refused = ", ".join(f"{code} {count}" for code, count in sorted(now.errors.items()))
        lines.append(f"refused: {refused or 'none'}   dropped sessions: {now.dropped}")
    return Text("\n".join(lines) + "\n")


def _sessions(before: Snapshot, now: Snapshot, seconds: float) -> Table:
    clients = now.clients
    earlier = {(session.rank, session.number): session for session in before.sessions}

    def rate(name: str) -> Callable[[SessionFigures], str]:
        def recent(now: SessionFigures) -> str:
            then = earlier.get((now.rank, now.number))
            return f"{(getattr(now, name) - (getattr(then, name) if then else 0)) / seconds:.0f}"

        return recent

    columns: dict[str, Callable[[SessionFigures], object]] = {
        "rank": lambda one: one.rank, "no": lambda one: one.number, "client": lambda one: one.client, "way": lambda one: one.transport,
        "calls/s": rate("calls"), "rows/s": rate("rows"), "direct rows/s": rate("direct_rows"), "calls": lambda one: one.calls,
        "received": lambda one: size_of(one.bytes), "open": lambda one: one.in_flight, "silent": lambda one: f"{one.idle_s:.1f} s",
        "joined": lambda one: duration(one.joined_s),
    }  # fmt: skip
    if not any(session.rank for session in now.sessions):
        del columns["rank"]
    title = f"{len(clients)} session{'' if len(clients) == 1 else 's'}, {len(now.sessions) - len(clients)} observing"
    return table(title, sorted(clients, key=lambda one: -one.rows), len(columns) - 8, columns)


def _tenants(before: Snapshot, now: Snapshot, seconds: float) -> Table:
    """Show what each tenant has used since the start, and its recent share of the executor's time."""
    used, then = now.tenants, {name: each.seconds for name, each in before.tenants.items()}
    return table(f"{len(used)} tenants", sorted(used, key=lambda name: -used[name].seconds), 1, {
        "tenant": str, "busy": lambda name: f"{(used[name].seconds - then.get(name, 0.0)) / seconds:.1%}",
        "calls": lambda name: used[name].calls, "rows": lambda name: used[name].rows,
        "multiplications": lambda name: f"{used[name].multiplications:.3g}", "bytes": lambda name: size_of(used[name].bytes),
        "seconds": lambda name: f"{used[name].seconds:.1f}",
    })  # fmt: skip


def _layers(before: Snapshot, now: Snapshot, seconds: float) -> Table:
    """Return the layers by the time that they took since `before`."""
    earlier = {(then.layer, then.op): then for then in before.layers}
    recent = [_since(earlier.get((each.layer, each.op)), each) for each in now.layers]
    busiest = sorted((each for each in recent if each.calls), key=lambda each: -each.compute_s)[:BUSIEST]
    return table("busiest layers", busiest, 2, {
        "layer": lambda one: one.layer or "-", "op": lambda one: one.op, "busy": lambda one: f"{one.compute_s / seconds:.1%}",
        "calls/s": lambda one: f"{one.calls / seconds:.0f}", "rows": lambda one: f"{one.rows / one.calls:.0f}",
        "batch": lambda one: f"{one.calls / max(1, one.batches):.2f}", "us run": lambda one: f"{1e6 * one.compute_s / max(1, one.batches):.0f}",
        "us wait": lambda one: f"{1e6 * one.wait_s / one.calls:.0f}",
    })  # fmt: skip


def _since(then: LayerFigures | None, now: LayerFigures) -> LayerFigures:
    if then is None:
        return now
    layer, op, *figures = msgspec.structs.astuple(now)
    return LayerFigures(layer, op, *(a - b for a, b in zip(figures, msgspec.structs.astuple(then)[2:], strict=True)))


def _sizes(now: Snapshot) -> Table:
    """Show how many calls ran as one product, since the start."""
    sizes = now.batch_sizes
    most = max(sizes.values(), default=1)
    return table("calls per product", sorted(sizes), 3, {
        "calls": str, "products": lambda size: sizes[size], "": lambda size: "█" * max(1, round(BAR * sizes[size] / most)),
    })  # fmt: skip


# ---------------------------------------------------------------- clusters


@dataclass
class Found:
    """What the processes of a cluster say of themselves at one moment."""

    told: Told
    at: float
    health: dict[str, dict[str, Any]]  # by name
    tokens: dict[str, float]  # that servers have generated


def look(told: Told) -> Found:
    """Ask all processes, at the same time."""
    pages = [each for each in told.members if each.url.startswith("http://")]
    servers = [each for each in pages if each.kind == "server"]
    with ThreadPoolExecutor(max(1, len(pages))) as pool:
        health = pool.map(lambda each: health_at(each.url) or {}, pages)
        tokens = pool.map(_generated, servers)
        return Found(
            told, time.monotonic(), dict(zip([each.name for each in pages], health, strict=True)),
            dict(zip([each.name for each in servers], tokens, strict=True)),
        )  # fmt: skip


def _generated(member: Member) -> float:
    found = GENERATED.search(read_page(f"{member.url}/metrics") or "")
    return float(found[1]) if found else 0.0


def watch_cluster(name: str, interval: float) -> Iterator[Table]:
    """Show a cluster anew every `interval` seconds, until it ends; at once and without rates if that is 0."""
    before = look(told_by(name))
    while True:
        time.sleep(interval)
        now = look(told_by(name)) if interval else before
        yield render_cluster(now, before)
        before = now


def render_cluster(now: Found, before: Found) -> Table:
    """Return the processes of a cluster, with the tokens per second that servers have generated between two looks."""
    fronts = [now.health.get(each.name, {}) for each in now.told.of_kind("front")]
    waiting = sum(sum(front.get("waiting", {}).values()) for front in fronts)
    moved = sum(front.get("moved", 0) for front in fronts)

    def load(one: Member) -> str:
        if one.kind == "executor":
            return f"{one.clients} client{'' if one.clients == 1 else 's'}"
        return str(now.health.get(one.name, {}).get("requests", "")) + (f" of {one.batch}" if one.batch else "")

    def memory(one: Member) -> str:
        health = now.health.get(one.name, {})
        return f"{100 * (1 - health['room'] / health['tokens']):.0f} %" if health.get("tokens") else ""

    def rate(one: Member) -> str:
        if now is before or one.name not in now.tokens or one.name not in before.tokens:
            return ""
        return f"{max(0.0, now.tokens[one.name] - before.tokens[one.name]) / (now.at - before.at):.0f}"

    view = table(f"{now.told.name} at {now.told.url}/v1: {waiting} wait, {moved} have moved", now.told.members, 1, {
        "name": lambda one: shown(one.name, 120), "model": lambda one: shown(one.model, 120), "state": lambda one: one.state,
        "pid": lambda one: one.pid or "", "requests": load, "memory": memory,
        "step, s": lambda one: now.health.get(one.name, {}).get("step_s", ""), "tokens/s": rate,
        "at": lambda one: shown(one.url.partition("?")[0], 120),
    })  # fmt: skip
    view.columns[-1].justify = "left"
    others = [each for each in now.told.members if each.state == State.OTHER_BASE]
    view.caption = "\n".join(f"{each.name}: {WHAT_TO_DO.format(each.model)}" for each in others) or None
    view.caption_justify = "left"
    return view


def size_of(nbytes: float) -> str:
    """Return bytes as people read them.

    >>> size_of(3 << 20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> duration(3725)
    '1:02:05'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
