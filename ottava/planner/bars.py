"""What takes memory, drawn: a bar of letters for terminals, HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from rich.text import Text

from .lifetimes import CATEGORIES

GIB = float(1 << 30)
COLOURS = dict(zip(CATEGORIES, ("blue", "cyan", "yellow", "green", "magenta", "red"), strict=True))
_HTML = dict(zip(CATEGORIES, ("#4c78a8", "#72b7b2", "#eeca3b", "#54a24b", "#b279a2", "#e45756"),
                 strict=True))  # fmt: skip
LETTERS = dict(zip(CATEGORIES, "WRGMAT", strict=True))


def bar(by_category: Mapping[str, int], room: float = 0.0, width: int = 60) -> Text:
    """One line: each category's share of `room` bytes (of the whole where it is 0 or too little), as
    coloured blocks with its letter; dots are what stays free."""
    total = sum(by_category.values())
    scale = width / max(total, room, 1)
    text, drawn, upto = Text(), 0, 0.0
    for category in CATEGORIES:
        upto += by_category[category] * scale
        cells = round(upto) - drawn
        text.append(LETTERS[category] * cells, style=f"{COLOURS[category]} reverse")
        drawn += cells
    text.append("." * (width - drawn), style="dim")
    if room:
        text.append(f" of {room / GIB:.1f} GiB")
    return text


def legend() -> Text:
    """Which letter is which category."""
    text = Text()
    for category in CATEGORIES:
        text.append(LETTERS[category], style=f"{COLOURS[category]} reverse")
        text.append(f" {category}  ")
    return text


def html_of(title: str, by_category: Mapping[str, int], below: str) -> str:
    """The same as HTML: a stacked bar, a table, a line."""
    total = max(sum(by_category.values()), 1)
    parts = "".join(
        f'<div title="{c} {n / GIB:.2f} GiB" style="width:{100 * n / total:.2f}%;'
        f'background:{_HTML[c]}"></div>'
        for c, n in by_category.items()
    )
    rows = "".join(
        f'<tr><td style="color:{_HTML[c]}">&#9632;</td><td>{c}</td>'
        f'<td style="text-align:right">{n / GIB:,.2f} GiB</td>'
        f'<td style="text-align:right">{n / total:.0%}</td></tr>'
        for c, n in by_category.items()
    )
    return (
        f'<div style="max-width:40em"><b>{escape(title)}</b>'
        f'<div style="display:flex;height:1.4em;margin:.4em 0">{parts}</div>'
        f'<table>{rows}</table><pre style="white-space:pre-wrap">{escape(below)}</pre></div>'
    )
