"""The demo's display: bars that move, or plain lines if the output is not a terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from symbiosis.cli.top import size_of
from symbiosis.demo.processes import Participant
from symbiosis.executor.observe.snapshot import Snapshot

PLAIN_EVERY_S = 5.0


class Display(Protocol):
    def show(self, children: list[Participant], executor: Snapshot) -> None: ...


@contextmanager
def display(console: Console, goals: dict[str, int]) -> Iterator[Display]:
    """Return the display that suits `console`, for clients with that many steps or tokens to go."""
    if not console.is_terminal:
        yield PlainView(console, goals)
        return
    bars = BarView(goals)
    with Live(get_renderable=bars.render, console=console, refresh_per_second=8):
        yield bars


class BarView:
    """Shows a bar and figures for each client, and the executor's figures and the newest text below."""

    def __init__(self, goals: dict[str, int]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
        )  # fmt: skip
        self._bars = {name: self._progress.add_task(name, total=goals[name], figures="starts") for name in goals}
        self._executor, self._text = Text(), Text()

    def show(self, children: list[Participant], executor: Snapshot) -> None:
        for child in children:
            done = child.state.get("done", 0)
            self._progress.update(self._bars[child.name], completed=done, figures=figures_of(child) or "starts")
            if "text" in child.state:
                self._text = Text(child.state["text"], style="dim")
        self._executor = Text(executor_figures(executor), style="bold")

    def render(self) -> Group:
        return Group(self._progress, self._executor, self._text)


class PlainView:
    """Prints one line for all clients every few seconds."""

    def __init__(self, console: Console, goals: dict[str, int]) -> None:
        self._console, self._goals = console, goals
        self._begun = self._next = time.monotonic()

    def show(self, children: list[Participant], executor: Snapshot) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PLAIN_EVERY_S
        parts = [f"{c.name} {c.state.get('done', 0)}/{self._goals[c.name]} {figures_of(c)}".rstrip() for c in children]
        line = " | ".join([f"{now - self._begun:3.0f} s", *parts, executor_figures(executor)])
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def figures_of(child: Participant) -> str:
    state, parts = child.state, []
    if "loss" in state:
        parts.append(f"loss {state['loss']:.3f}")
    if "tokens_per_s" in state:
        parts.append(f"{state['tokens_per_s']:.0f} tokens/s")
    if "rss_bytes" in state:
        parts.append(size_of(state["rss_bytes"]))
    return "  ".join(parts)


def executor_figures(executor: Snapshot) -> str:
    return (
        f"executor {size_of(executor.rss_bytes)}  {executor.calls} calls  mean batch {executor.mean_batch:.2f}  "
        f"queue {executor.queue_depth}"
    )
