"""Plots as inline SVG text: lines, stacked bars, bars. No script, no font, no file beside it.

Every label passes through `html.escape`; numbers that are not finite leave a gap, never a crash.
Colours are CSS classes (c0 .. c7), so that the page's style sheet also serves dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 38
NUM_COLORS = 8
MAX_POINTS = 400
MAX_ROWS, MAX_COLUMNS = 60, 100  # of a heat map


@dataclass(frozen=True)
class Series:
    """A line: `color` is the number of its CSS class; `faint` draws it thin, without legend."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    faint: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]."""
    span = (high - low) or abs(high) or 1.0
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(x: float) -> str:
    """A number as short as a plot or a table wants it."""
    if not math.isfinite(x):
        return "-"
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        return f"{x:,.4g}" if abs(x) < 1e4 else f"{x:,.0f}"
    return f"{x:.2e}"


def smooth(ys: Sequence[float], weight: float = 0.9) -> list[float]:
    """Running average, unbiased at the start; values that are not finite pass through."""
    out, total, norm = [], 0.0, 0.0
    for y in ys:
        if math.isfinite(y):
            total, norm = weight * total + y, weight * norm + 1.0
            out.append(total / norm)
        else:
            out.append(y)
    return out


def thin(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """At most MAX_POINTS points, first and last included."""
    n = len(xs)
    if n <= MAX_POINTS:
        return list(zip(xs, ys, strict=True))
    picked = sorted({round(i * (n - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)})
    return [(xs[i], ys[i]) for i in picked]


def lines(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """A line chart as an <svg> element. Series without a finite point are named as empty."""
    points = [[(x, y) for x, y in thin(s.xs, s.ys)] for s in series]
    finite = [(x, y) for p in points for x, y in p if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return _empty(title)
    x0, x1 = min(x for x, _ in finite), max(x for x, _ in finite)
    y0, y1 = min(y for _, y in finite), max(y for _, y in finite)
    pad = 0.05 * (y1 - y0) or 0.05 * abs(y1) or 1.0
    y0, y1 = y0 - pad, y1 + pad
    x1 = x1 if x1 > x0 else x0 + 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        px = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return px, TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(x0, x1, y0, y1, at)]
    for s, own in zip(series, points, strict=True):
        kind = "faint" if s.faint else "line"
        for path in _paths(own, at):
            name = escape(s.name)
            parts.append(
                f'<path class="{kind} s{s.color % NUM_COLORS}" d="{path}"><title>{name}</title></path>'
            )
    parts.append(_axis_labels(x_label, y_label))
    legend = [(s.name, s.color) for s in series if not s.faint]
    return _figure(title, HEIGHT, "".join(parts), legend)


def _paths(points: list[tuple[float, float]], at) -> list[str]:
    """SVG paths, broken where a value is not finite."""
    out: list[str] = []
    run: list[str] = []
    for x, y in [*points, (math.nan, math.nan)]:
        if math.isfinite(x) and math.isfinite(y):
            px, py = at(x, y)
            run.append(f"{px:.1f},{py:.1f}")
        elif run:
            out.append("M" + "L".join(run if len(run) > 1 else run * 2))
            run = []
    return out


def _grid(x0: float, x1: float, y0: float, y1: float, at) -> str:
    parts = []
    for y in ticks(y0, y1):
        _, py = at(x0, y)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>'
        )
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{py + 4:.1f}">{number(y)}</text>')
    for x in ticks(x0, x1):
        px, _ = at(x, y0)
        parts.append(
            f'<text class="mid" x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}">{number(x)}</text>'
        )
    return "".join(parts)


def _axis_labels(x_label: str, y_label: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="mid dim" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}">{escape(x_label)}</text>'
        f'<text class="mid dim" transform="translate(12 {middle}) rotate(-90)">{escape(y_label)}</text>'
    )


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], parts: Sequence[str], *, title: str, unit: str
) -> str:
    """Horizontal bars, each split into `parts` (in that order); the total stands at the end."""
    rows = [(label, split) for label, split in rows if split]
    most = max((sum(split.values()) for _, split in rows), default=0.0)
    if not most > 0:
        return _empty(title)
    left, room, step = 110, WIDTH - 110 - 90, 30
    out = []
    for i, (label, split) in enumerate(rows):
        y, x = 6 + i * step, float(left)
        out.append(f'<text class="end" x="{left - 8}" y="{y + 15}">{escape(label)}</text>')
        for color, part in enumerate(parts):
            value = split.get(part, 0.0)
            width = value / most * room
            if width > 0:
                tip = escape(f"{label}, {part}: {number(value)} {unit}")
                out.append(
                    f'<rect class="f{color % NUM_COLORS}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                    f'height="21"><title>{tip}</title></rect>'
                )
            x += width
        total = f"{number(sum(split.values()))} {unit}"
        out.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{escape(total)}</text>')
    legend = [(part, color) for color, part in enumerate(parts)]
    return _figure(title, 10 + len(rows) * step, "".join(out), legend)


def bars(rows: Sequence[tuple[str, Sequence[float]]], *, title: str, unit: str) -> str:
    """Horizontal bars at the median of each row's values, with a line from least to most."""
    rows = [(label, sorted(v for v in values if math.isfinite(v))) for label, values in rows]
    rows = [(label, values) for label, values in rows if values]
    most = max((values[-1] for _, values in rows), default=0.0)
    if not most > 0:
        return _empty(title)
    left, room, step = 110, WIDTH - 110 - 120, 30
    out = []
    for i, (label, values) in enumerate(rows):
        y, median = 6 + i * step, values[len(values) // 2]
        end = left + median / most * room
        low, high = (left + v / most * room for v in (values[0], values[-1]))
        tip = escape(f"{label}: {number(values[0])} to {number(values[-1])} {unit}")
        out.append(
            f'<text class="end" x="{left - 8}" y="{y + 15}">{escape(label)}</text>'
            f'<rect class="f{i % NUM_COLORS}" x="{left}" y="{y}" width="{end - left:.1f}" height="21">'
            f"<title>{tip}</title></rect>"
            f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 10.5}" y2="{y + 10.5}"/>'
            f'<text x="{max(end, high) + 6:.1f}" y="{y + 15}">{number(median)} {escape(unit)}</text>'
        )
    return _figure(title, 10 + len(rows) * step, "".join(out), [])


def heat(
    rows: Sequence[tuple[str, Mapping[int, float]]], *, title: str, least: float = 1e-4
) -> str:
    """A map of shares in [0, 1]: a line a row, a column a step, darker for more (logarithmic from
    `least`; what is below stays empty). At most MAX_ROWS rows, the worst ones, in their own order,
    and MAX_COLUMNS columns, each the largest of its steps."""
    steps = sorted({s for _, values in rows for s in values})
    if not steps:
        return _empty(title)
    worst = sorted(range(len(rows)), key=lambda i: -max(rows[i][1].values(), default=0.0))
    shown = [rows[i] for i in sorted(worst[:MAX_ROWS])]
    groups = [[s] for s in steps]
    if len(steps) > MAX_COLUMNS:
        cuts = [round(i * len(steps) / MAX_COLUMNS) for i in range(MAX_COLUMNS + 1)]
        groups = [steps[a:b] for a, b in pairwise(cuts)]
    left, line = 330, 15
    width = (WIDTH - left - 8) / len(groups)
    parts = []
    for n, (name, values) in enumerate(shown):
        y = 4 + n * line
        parts.append(
            f'<text class="end" x="{left - 6}" y="{y + 11}">{escape(name[-46:])}</text>'
            f'<line class="grid" x1="{left}" x2="{WIDTH - 8}" y1="{y + line}" y2="{y + line}"/>'
        )
        for column, group in enumerate(groups):
            share = max((values[s] for s in group if s in values), default=0.0)
            if not share >= least:  # also what is not a number
                continue
            depth = 1.0 - math.log10(min(share, 1.0)) / math.log10(least)
            tip = escape(f"{name}, step {group[0]}: {share:.2%}")
            parts.append(
                f'<rect class="cell f3" x="{left + column * width:.1f}" y="{y}" '
                f'width="{max(width, 1.0):.1f}" height="{line - 1}" fill-opacity="'
                f'{0.12 + 0.88 * depth:.2f}"><title>{tip}</title></rect>'
            )
    bottom = 4 + len(shown) * line
    for column in sorted({0, len(groups) // 2, len(groups) - 1}):
        x = left + (column + 0.5) * width
        parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 16}">{groups[column][0]}</text>')
    more = f" (the worst {len(shown)} of {len(rows)} rows)" if len(shown) < len(rows) else ""
    return _figure(title + more, bottom + 24, "".join(parts), [])


def _empty(title: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption><p>Nothing was measured.</p></figure>"


def _figure(title: str, height: int, body: str, legend: Sequence[tuple[str, int]]) -> str:
    entries = "".join(
        f'<span><i class="b{color % NUM_COLORS}"></i>{escape(name)}</span>'
        for name, color in legend
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{body}</svg>'
        f'<div class="legend">{entries}</div></figure>'
    )
