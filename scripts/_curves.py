"""Curves of a result: its figures `curve_AXIS_NUMBER_SERIES_UNIT`, drawn over their numbers, both logarithmic."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

NAME = re.compile(r"curve_([a-z]+)_(\d+)_(\w+)_(ms|tokens_per_s)")
LEFT, TOP, WIDTH, HEIGHT, RIGHT, BOTTOM = 80, 48, 480, 280, 160, 48
COLOURS = "#2b8a5e", "#4a6fa5", "#c4452f", "#8a6d2b"
Curves = dict[str, dict[int, float]]  # by series: what was measured, by the numbers on the axis


def curves_of(report: dict[str, Any]) -> dict[tuple[str, str], Curves]:
    """What is to be drawn, by axis and unit.

    >>> curves_of({"figures": {"curve_rows_64_engine_ms": 2.0, "curve_rows_128_engine_ms": 3.0, "other_ms": 1.0}})
    {('rows', 'ms'): {'engine': {64: 2.0, 128: 3.0}}}
    """
    found: dict[tuple[str, str], Curves] = {}
    for name, value in report["figures"].items():
        if told := NAME.fullmatch(name):
            axis, number, series, unit = told.groups()
            found.setdefault((axis, unit), {}).setdefault(series, {})[int(number)] = value
    return found


def svg(title: str, axis: str, unit: str, curves: Curves) -> str:
    numbers = sorted({number for each in curves.values() for number in each})
    values = [value for each in curves.values() for value in each.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    head = f"{title}: {unit.replace('_per_s', ' per second')} over {axis}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {TOP + HEIGHT + BOTTOM}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="12" y="24" font-size="14" font-weight="bold">{escape(head)}</text>',
            *_grid(numbers, low, high),
            *(
                line
                for n, (name, each) in enumerate(curves.items())
                for line in _curve(n, name, each, numbers, low, high)
            ),
            "</svg>\n",
        )
    )


def _grid(numbers: Sequence[int], low: int, high: int) -> Iterator[str]:
    for number in numbers:
        x = _x(number, numbers)
        yield f'<path d="M{x:.1f} {TOP}V{TOP + HEIGHT}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle" fill="#555">{number:,}</text>'
    for power in range(low, high + 1):
        y = _y(10.0**power, low, high)
        yield f'<path d="M{LEFT} {y:.1f}H{LEFT + WIDTH}" stroke="#ccc"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{10.0**power:,.10g}</text>'


def _curve(n: int, name: str, each: dict[int, float], numbers: Sequence[int], low: int, high: int) -> Iterator[str]:
    points = [(_x(number, numbers), _y(value, low, high)) for number, value in sorted(each.items())]
    colour = COLOURS[n % len(COLOURS)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    yield f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    yield f'<path d="M{LEFT + WIDTH + 12} {TOP + 20 * n + 8}h16" stroke="{colour}" stroke-width="2"/>'
    yield f'<text x="{LEFT + WIDTH + 34}" y="{TOP + 20 * n + 12}">{escape(name.replace("_", " "))}</text>'


def _x(number: int, numbers: Sequence[int]) -> float:
    span = math.log(numbers[-1] / numbers[0]) or 1.0
    return LEFT + WIDTH * math.log(number / numbers[0]) / span


def _y(value: float, low: int, high: int) -> float:
    return TOP + HEIGHT * (1 - (math.log10(value) - low) / max(1, high - low))
