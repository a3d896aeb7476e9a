"""`symbiosis top`: what an executor is doing, by its own figures (executor/observe/latest_figures.py), live or once."""

import math
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from symbiosis.cli.doctor import socket_problem
from symbiosis.errors import Code, ExecutorUnavailable, ProtocolError
from symbiosis.executor.observe.snapshot import LayerFigures, Snapshot, mean_size, of_service
from symbiosis.protocol import Op
from symbiosis.protocol.cluster_state import SCHEME, executors_at
from symbiosis.protocol.endpoints import how_to_start_one, of_rank, parts_of
from symbiosis.text import shown

if TYPE_CHECKING:
    from symbiosis.client.session import Session

BUSIEST = 12
MOST = 1e30  # of any figure
LONGEST_NAME = 256  # characters
BAR = 40
AWAY_S = 0.5  # how long a rank may be away before it is left out of a view


def run(endpoint: str, once: bool, interval: float) -> None:
    """Show the executor at `endpoint` until interrupted, or one plain view of the next `interval` seconds."""
    endpoint = executors_at(endpoint)[0] if endpoint.startswith(SCHEME) else endpoint
    parts_of(endpoint)
    if problem := socket_problem(endpoint):
        raise ExecutorUnavailable(f"no executor at {endpoint} ({problem}). {how_to_start_one(endpoint)}")
    print(f"connecting to {shown(endpoint, LONGEST_NAME)} ...", file=sys.stderr, flush=True)
    from symbiosis.client.session import Session  # torch comes with it

    first = Session(endpoint, observer=True, patience=10.0)
    here = first.welcome.rank
    others = {
        rank: of_rank(endpoint, rank, here, first.welcome.hosts) for rank in range(first.welcome.ranks) if rank != here
    }
    each = {here: first, **{rank: Session(url, observer=True, patience=AWAY_S) for rank, url in others.items()}}
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        views = watch(each, interval)
        if once or not console.is_terminal:
            for view in islice(views, 1 if once else None):
                console.print(view)
            return
        with Live(next(views), console=console, screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(view, refresh=True)
    except KeyboardInterrupt:
        pass
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
        yield Group(*_ranks(each, then, now), render(of_service(sorted(then.items())), of_service(sorted(now.items()))))
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


def _ranks(each: "dict[int, Session]", before: dict[int, Snapshot], now: dict[int, Snapshot]) -> list[Table]:
    """Show what each rank of a service does; nothing of an executor that is alone."""
    if len(each) == 1:
        return []
    table = _table(f"{len(each)} ranks", "rank")
    for name in ("calls/s", "rows/s", "queue", "sessions", "memory", "weights", "up"):
        table.add_column(name, justify="right")
    for rank in sorted(each):
        if rank not in now:
            table.add_row(str(rank), "does not answer")
            continue
        told, then = now[rank], before[rank]
        seconds = max(told.uptime_s - then.uptime_s, 1e-9) if told is not then else math.inf
        table.add_row(
            str(rank), f"{max(0, told.calls - then.calls) / seconds:.0f}", f"{max(0, told.rows - then.rows) / seconds:.0f}",
            str(told.queue_depth), str(sum(not session.observer for session in told.sessions)),
            size_of(told.rss_bytes), size_of(told.weights_bytes), duration(told.uptime_s),
        )  # fmt: skip
    return [table]


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


def render(before: Snapshot, now: Snapshot) -> Group:
    """Return everything on one screen. Rates are over the time between the two snapshots."""
    seconds = now.uptime_s - before.uptime_s
    if seconds <= 0:  # restarted meanwhile
        before, seconds = _nothing(now), now.uptime_s
    return Group(
        _head(before, now, seconds), _sessions(before, now, seconds), *_tenants(before, now, seconds),
        _layers(before, now, seconds), _sizes(now),
    )  # fmt: skip


def _nothing(now: Snapshot) -> Snapshot:
    return msgspec.structs.replace(now, uptime_s=0.0, bytes={}, batch_sizes={}, sessions=[], layers=[], tenants={})


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
    clients = [session for session in now.sessions if not session.observer]
    observers = len(now.sessions) - len(clients)
    several = any(session.rank for session in now.sessions)
    table = _table(
        f"{len(clients)} session{'' if len(clients) == 1 else 's'}, {observers} observing",
        *["rank"][:several],
        "no",
        "client",
        "way",
    )
    for name in ("calls/s", "rows/s", "direct rows/s", "calls", "received", "open", "silent", "joined"):
        table.add_column(name, justify="right")
    earlier = {(session.rank, session.number): session for session in before.sessions}
    for session in sorted(clients, key=lambda s: -s.rows):
        then = earlier.get((session.rank, session.number))
        calls, rows, direct = (
            getattr(session, name) - (getattr(then, name) if then else 0) for name in ("calls", "rows", "direct_rows")
        )
        table.add_row(
            *[str(session.rank)][:several], str(session.number), Text(session.client), Text(session.transport),
            f"{calls / seconds:.0f}", f"{rows / seconds:.0f}", f"{direct / seconds:.0f}", str(session.calls), size_of(session.bytes),
            str(session.in_flight), f"{session.idle_s:.1f} s", duration(session.joined_s),
        )  # fmt: skip
    return table


def _tenants(before: Snapshot, now: Snapshot, seconds: float) -> list[Table]:
    """Show what each tenant has used since the start, and its recent share of the executor's time; nothing without keys."""
    if not any(now.tenants):
        return []
    table = _table(f"{len(now.tenants)} tenants", "tenant")
    for name in ("busy", "calls", "rows", "multiplications", "bytes", "seconds"):
        table.add_column(name, justify="right")
    for tenant, used in sorted(now.tenants.items(), key=lambda named: -named[1].seconds):
        then = before.tenants[tenant].seconds if tenant in before.tenants else 0.0
        table.add_row(
            Text(tenant), f"{(used.seconds - then) / seconds:.1%}", str(used.calls), str(used.rows),
            f"{used.multiplications:.3g}", size_of(used.bytes), f"{used.seconds:.1f}",
        )  # fmt: skip
    return [table]


def _layers(before: Snapshot, now: Snapshot, seconds: float) -> Table:
    """Return the layers by the time that they took since `before`."""
    table = _table("busiest layers", "layer", "op")
    for name in ("busy", "calls/s", "rows", "batch", "us run", "us wait"):
        table.add_column(name, justify="right")
    earlier = {(then.layer, then.op): then for then in before.layers}
    recent = [_since(earlier.get((each.layer, each.op)), each) for each in now.layers]
    for each in sorted((each for each in recent if each.calls), key=lambda each: -each.compute_s)[:BUSIEST]:
        table.add_row(
            Text(each.layer or "-"), Text(each.op), f"{each.compute_s / seconds:.1%}", f"{each.calls / seconds:.0f}",
            f"{each.rows / each.calls:.0f}", f"{each.calls / max(1, each.batches):.2f}",
            f"{1e6 * each.compute_s / max(1, each.batches):.0f}", f"{1e6 * each.wait_s / each.calls:.0f}",
        )  # fmt: skip
    return table


def _since(then: LayerFigures | None, now: LayerFigures) -> LayerFigures:
    if then is None:
        return now
    return LayerFigures(
        now.layer, now.op, now.calls - then.calls, now.rows - then.rows, now.batches - then.batches,
        now.wait_s - then.wait_s, now.compute_s - then.compute_s,
    )  # fmt: skip


def _sizes(now: Snapshot) -> Table:
    """Show how many calls ran as one product, since the start."""
    table = _table("calls per product", "calls", "products", "")
    most = max(now.batch_sizes.values(), default=1)
    for size, count in sorted(now.batch_sizes.items()):
        table.add_row(str(size), str(count), "█" * max(1, round(BAR * count / most)))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


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
