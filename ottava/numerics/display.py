"""Tables that show themselves in a notebook (HTML) and in a terminal (rich)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    faint: Sequence[bool] = (),
) -> str:
    """A table of texts, all of them escaped. `faint`: rows to show so."""
    cells = "".join(f'<th style="text-align:left">{escape(h)}</th>' for h in head)
    body = []
    for number, row in enumerate(rows):
        style = ' style="opacity:.6"' if number < len(faint) and faint[number] else ""
        own = "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row)
        body.append(f"<tr{style}>{own}</tr>")
    said = f"<caption style='text-align:left'>{escape(caption)}</caption>" if caption else ""
    return f"<table>{said}<thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def rich_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    faint: Sequence[bool] = (),
) -> Table:
    """The same for a terminal; texts are taken as they are, without markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, caption=Text(caption), caption_justify="left")
    for title in head:
        table.add_column(title, overflow="fold")
    for number, row in enumerate(rows):
        dim = "dim" if number < len(faint) and faint[number] else ""
        table.add_row(*(Text(cell) for cell in row), style=dim)
    return table


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Finite numbers as one line of blocks, the largest highest; the mean of each stretch."""
    if not values:
        return ""
    size = min(width, len(values))
    edges = [len(values) * i // size for i in range(size + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[round(7 * (m - low) / span) if span else 0] for m in means)


def svg_line(values: Sequence[float], width: int = 360, height: int = 90) -> str:
    """Finite numbers as a curve."""
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    step = width / (len(values) - 1)
    points = " ".join(
        f"{i * step:.1f},{4 + (height - 8) * (1 - (v - low) / span):.1f}"
        for i, v in enumerate(values)
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f'<polyline points="{points}" fill="none" stroke="#4269d0" stroke-width="1.5"/></svg>'
    )
