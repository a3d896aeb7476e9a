"""`symbiosis cluster status` and `top`: the processes of a cluster and their load, once or live."""

import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from symbiosis.cluster.controller.base_fingerprints import WHAT_TO_DO
from symbiosis.cluster.controller.local_process import ANSWER_S, asked
from symbiosis.cluster.placement import State
from symbiosis.protocol.cluster_state import Member, Told, told_by
from symbiosis.text import shown

GENERATED = re.compile(r"^symbiosis_serve_generation_tokens_total (\S+)$", re.MULTILINE)
HEAD = ("name", "model", "state", "pid", "requests", "memory", "step, s", "tokens/s", "at")


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
    with ThreadPoolExecutor(max(1, len(pages))) as pool:
        health = dict(zip([each.name for each in pages], pool.map(_health, pages), strict=True))
        servers = [each for each in pages if each.kind == "server"]
        tokens = dict(zip([each.name for each in servers], pool.map(_generated, servers), strict=True))
    return Found(told, time.monotonic(), health, tokens)


def _health(member: Member) -> dict[str, Any]:
    return asked(f"{member.url}/health") or {}


def _generated(member: Member) -> float:
    with suppress(OSError), urllib.request.urlopen(f"{member.url}/metrics", timeout=ANSWER_S) as answer:
        if found := GENERATED.search(answer.read().decode()):
            return float(found[1])
    return 0.0


def table(found: Found, before: Found | None = None) -> Table:
    """Return a view; with one from before it has tokens per second."""
    fronts = [found.health.get(each.name, {}) for each in found.told.of_kind("front")]
    waiting = sum(sum(front.get("waiting", {}).values()) for front in fronts)
    moved = sum(front.get("moved", 0) for front in fronts)
    title = f"{found.told.name} at {found.told.url}/v1: {waiting} wait, {moved} have moved"
    view = Table(title=title, title_justify="left")
    for name in HEAD:
        view.add_column(name, justify="left" if name in ("name", "at") else "right", overflow="fold")
    for member in found.told.members:
        view.add_row(*(shown(cell, 120) for cell in _row(member, found, before)))
    others = [each for each in found.told.members if each.state == State.OTHER_BASE]
    view.caption = "\n".join(f"{each.name}: {WHAT_TO_DO.format(each.model)}" for each in others) or None
    view.caption_justify = "left"
    return view


def _row(member: Member, found: Found, before: Found | None) -> list[str]:
    health = found.health.get(member.name, {})
    load = str(health.get("requests", "")) + (f" of {member.batch}" if member.batch else "")
    if member.kind == "executor":
        load = f"{member.clients} client{'' if member.clients == 1 else 's'}"
    tokens = health.get("tokens")
    memory = f"{100 * (1 - health['room'] / tokens):.0f} %" if tokens else ""
    rate = ""
    if before is not None and member.name in found.tokens and member.name in before.tokens:
        made = max(0.0, found.tokens[member.name] - before.tokens[member.name])
        rate = f"{made / (found.at - before.at):.0f}"
    step = str(health.get("step_s", ""))
    at = member.url.partition("?")[0]
    return [member.name, member.model, member.state, str(member.pid or ""), load, memory, step, rate, at]


def show(name: str, once: bool, interval: float) -> None:
    """Show a cluster until interrupted, or until it ends; or one plain view of the next `interval` seconds."""

    console = Console(width=None if sys.stdout.isatty() else 160)
    before = look(told_by(name))
    try:
        if once or not console.is_terminal:
            time.sleep(interval)
            console.print(table(look(told_by(name)), before) if interval else table(before))
            return
        with Live(table(before), console=console, screen=True, auto_refresh=False) as live:
            for _ in count():
                time.sleep(interval)
                now = look(told_by(name))
                live.update(table(now, before), refresh=True)
                before = now
    except KeyboardInterrupt:
        pass
