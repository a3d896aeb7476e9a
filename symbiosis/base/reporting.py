"""Reports of scripts and `symbiosis demo`: a table for people and, as the last line, one JSON object for programs."""

import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from symbiosis.build import build

PACKAGES = ("torch", "transformers", "peft", "accelerate", "numpy", "pyzmq", "msgspec")


@dataclass
class Bar:
    """A figure and what it must reach."""

    name: str
    value: float
    relation: Literal["<=", ">="]
    bar: float

    @property
    def holds(self) -> bool:
        return self.value <= self.bar if self.relation == "<=" else self.value >= self.bar

    def told(self) -> dict[str, Any]:
        """Return the figure for the JSON object."""
        return {"name": self.name, "value": self.value, "bar": self.bar, "holds": self.holds}


@dataclass
class Report:
    """Figures and bars of one run.

    >>> report = Report("bench_example")
    >>> report.figure("latency_us", 12.5)
    >>> report.bar("ratio", 1.02, "<=", 1.10)
    >>> report.holds
    True
    """

    script: str
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def figure(self, name: str, value: Any) -> None:
        self.figures[name] = value

    def bar(self, name: str, value: float, relation: Literal["<=", ">="], bar: float) -> None:
        """Add a figure that must reach `bar`."""
        self.figures[name] = value
        self.bars.append(Bar(name, value, relation, bar))

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)

    def finish(self, table: bool = True) -> int:
        """Print the bars, unless the caller's own table shows them, and the JSON line. Return the exit status, which is 0 only if every
        bar holds."""
        if table and self.bars:
            print_table(
                ("bar", "value", "must be", "holds"),
                [
                    (b.name, f"{b.value:.4g}", f"{b.relation} {b.bar:.4g}", "yes" if b.holds else "NO")
                    for b in self.bars
                ],
            )
        print(json.dumps(self.told()), flush=True)
        return 0 if self.holds else 1

    def told(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        bars = [bar.told() for bar in self.bars]
        return {"script": self.script, "figures": self.figures, "bars": bars, "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which results depend, and the kind of machine."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "symbiosis": build()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> None:
    """Print a table, in plain columns if stdout is no terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for position, name in enumerate(head):
        table.add_column(name, justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
