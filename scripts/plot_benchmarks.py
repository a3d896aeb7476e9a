"""Draw each benchmark's result beside its JSON file: a chart of its bars, or of its times or ratios where it has no bars.

What was measured over rows or runs is drawn as curves, in a file of its own. A bar's figure is drawn as a part of what it must be, so that the bar is one line for all; what is more than twice that is cut off.
The files are what the scripts' last lines are.

    python scripts/plot_benchmarks.py                       # all of docs/benchmarks
    python scripts/plot_benchmarks.py docs/benchmarks/2026-11-21-h200-many.json
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import _curves

from symbiosis.base.reporting import Report, print_table

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks"
ROW, TOP, BOTTOM, LEFT, WIDTH, RIGHT = 24, 48, 34, 300, 320, 180  # pixels; WIDTH is that of the chart itself
LONGEST = 2.0  # of a figure, as a part of its bar
HOLDS, FAILS, NEUTRAL = "#2b8a5e", "#c4452f", "#4a6fa5"
UNITS = {"_us": "µs", "_ms": "ms", "_ratio": "ratios"}  # of figures that are plotted where there are no bars


class Row(NamedTuple):
    """One figure: how long it is drawn, from 0 to 1, whether that is all of it, and what stands behind it."""

    name: str
    length: float
    cut: bool
    text: str
    colour: str


class Chart(NamedTuple):
    """Rows, and lines across them with what stands below."""

    title: str
    rows: list[Row]
    lines: list[tuple[float, str]]


def chart_of(title: str, report: dict[str, Any]) -> Chart | None:
    """The chart of a result; None if there is nothing to draw."""
    if report["bars"]:
        rows = [row_of(bar) for bar in report["bars"]]
        return Chart(f"{title}: figures over their bars", rows, [(0.0, "0"), (0.5, "bar"), (1.0, "2 × bar")])
    for suffix, unit in UNITS.items():
        if times := {name: value for name, value in report["figures"].items() if name.endswith(suffix)}:
            return chart_of_times(f"{title}: {unit}, logarithmic", times, suffix)
    return None


def row_of(bar: dict[str, Any]) -> Row:
    """A figure as a part of its bar. Which way the bar is meant follows from whether it holds."""
    value, wanted = bar["value"], bar["bar"]
    share = value / wanted if wanted else (math.inf if value > 0 else 0.0)
    relation = "=" if value == wanted else "≤" if bar["holds"] == (value < wanted) else "≥"
    text = f"{value:.3g} ({relation} {wanted:g})" if value < 1000 else f"{value:,.0f} ({relation} {wanted:,.0f})"
    length = max(0.0, min(share, LONGEST)) / LONGEST
    return Row(bar["name"], length, share > LONGEST, text, HOLDS if bar["holds"] else FAILS)


def chart_of_times(title: str, times: dict[str, float], suffix: str) -> Chart:
    low, high = min(0, math.floor(math.log10(min(times.values())))), math.ceil(math.log10(max(times.values())))
    span = max(1, high - low)
    rows = [
        Row(
            name.removesuffix(suffix),
            (math.log10(value) - low) / span,
            False,
            f"{value:,.{2 if value < 10 else 1}f}",
            NEUTRAL,
        )
        for name, value in times.items()
    ]
    return Chart(title, rows, [((power - low) / span, f"{10.0**power:,.10g}") for power in range(low, low + span + 1)])


def svg(chart: Chart) -> str:
    height, bottom = TOP + ROW * len(chart.rows) + BOTTOM, TOP + ROW * len(chart.rows)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="12" y="24" font-size="14" font-weight="bold">{escape(chart.title)}</text>',
            *(line for at, text in chart.lines for line in drawn_line(LEFT + at * WIDTH, bottom, text)),
            *(line for n, row in enumerate(chart.rows) for line in drawn_row(TOP + n * ROW, row)),
            "</svg>\n",
        )
    )


def drawn_line(x: float, bottom: int, text: str) -> Iterator[str]:
    dark = text == "bar"
    yield f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="{"#222" if dark else "#ccc"}" stroke-width="{2 if dark else 1}"/>'
    yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555">{escape(text)}</text>'


def drawn_row(y: int, row: Row) -> Iterator[str]:
    end = LEFT + row.length * WIDTH
    yield f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row.name.replace("_", " "))}</text>'
    yield f'<rect x="{LEFT}" y="{y + 3}" width="{row.length * WIDTH:.1f}" height="{ROW - 8}" fill="{row.colour}" fill-opacity="0.8"/>'
    if row.cut:  # it goes on
        yield f'<path d="M{end - 12:.1f} {y + ROW - 4}l5 -18m3 18l5 -18" stroke="white" stroke-width="2"/>'
    yield f'<text x="{LEFT + WIDTH + 8}" y="{y + 15}">{escape(row.text)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of results; else all in docs/benchmarks")
    files: list[Path] = parser.parse_args().files or sorted(RESULTS.glob("*.json"))
    report, rows = Report("plot_benchmarks"), []
    for file in files:
        told = json.loads(file.read_text())
        chart = chart_of(file.stem, told)
        drawn = file.with_suffix(".svg")
        if chart is not None:
            drawn.write_text(svg(chart))
        for (axis, unit), curves in _curves.curves_of(told).items():
            file.with_name(f"{file.stem}-{unit}-over-{axis}.svg").write_text(_curves.svg(file.stem, axis, unit, curves))
        report.figure(file.name, len(chart.rows) if chart else 0)
        rows.append((file.name, len(chart.rows) if chart else 0, drawn.name if chart else "nothing to draw"))
    print_table(("result", "rows", "plot"), rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
