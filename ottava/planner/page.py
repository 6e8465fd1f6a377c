"""Plans as a person reads them: a bar of what takes memory, tables, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .lifetimes import CATEGORIES
from .ranks import Layout
from .several import RankPlan

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


def layout_in_words(layout: Layout) -> str:
    """ "fsdp2 on 64 GPUs, 8 nodes"."""
    words = f"{layout.strategy} on {layout.gpus} GPU{'s' * (layout.gpus > 1)}"
    if layout.nodes > 1:
        words += f", {layout.nodes} nodes"
    if layout.experts_over > 1:
        words += f", a layer's experts over {layout.experts_over}"
    return words


def rank_page(plan: RankPlan, room_gib: float, card: str) -> Group:
    """A plan for several GPUs."""
    memory, time = plan.memory, plan.time
    verdict = "fits" if memory.fits(room_gib) else "does not fit"
    sent = Table("sent by each GPU in a step", "GB", "s on the links", box=None, pad_edge=False)
    sent.columns[1].justify = sent.columns[2].justify = "right"
    for kind, nbytes in time.sent.nbytes.items():
        if nbytes:
            sent.add_row(kind, f"{nbytes / 1e9:,.2f}", f"{time.sent.seconds[kind]:.3f}")
    lines = [
        f"PREDICTED: {time.seconds:.3f} s a step, {time.tok_per_s:,.0f} tokens/s of all GPUs; the GPU "
        f"computes {time.compute:.3f} s and waits {time.exposed:.3f} s ({time.apart:.3f} s a step if "
        "nothing overlapped)"
    ]
    parts = [memory, Text(f"each rank {verdict} into {room_gib:.1f} GiB ({card})", style="bold")]
    parts.append(Text(f"\n{layout_in_words(plan.layout)}", style="bold"))
    parts += [sent] if sent.row_count else []
    return Group(*parts, *lines, *(f"note: {note}" for note in plan.notes))


def rank_dict(plan: RankPlan, room_gib: float) -> dict:
    """The same as plain data."""
    time = plan.time
    return {
        "memory": plan.memory.to_dict(),
        "gib": room_gib,
        "fits": plan.memory.fits(room_gib),
        "layout": {
            "strategy": plan.layout.strategy,
            "gpus": plan.layout.gpus,
            "nodes": plan.layout.nodes,
            "experts_over": plan.layout.experts_over,
        },
        "predicted": {
            "step_s": time.seconds,
            "compute_s": time.compute,
            "exposed_s": time.exposed,
            "without_overlap_s": time.apart,
            "tok_per_s": time.tok_per_s,
            "launches": time.launches,
            "sent_bytes": time.sent.nbytes,
            "sent_s": time.sent.seconds,
        },
        "notes": list(plan.notes),
    }
