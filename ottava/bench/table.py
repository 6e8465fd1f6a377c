"""A comparison as a table for the terminal: 80 columns, memory by category, speed, loss, gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..planner.lifetimes import CATEGORIES

_SHORT = {"gradients": "grads", "activations": "kept", "temporary": "temp"}
_KIND = {"tensors": "bytes alive in tensors", "allocator": "the CUDA allocator's"}


def comparison_table(result: Mapping[str, Any]) -> Group:
    """The result of `compare` (see compare.py), a row per variant that ran, then what else to know.

    "kept" is what is kept for backward. The loss is on held-out text where there is any. With a
    counted floor (workloads) speed is also shown as a share of it.
    """
    rows = [row for row in result["rows"] if row["status"] == "ok"]
    top = max((row["peak_bytes"] for row in rows), default=0)
    unit, size = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20)
    floor = result.get("floor_tok_per_s")
    heads = ["preset", "peak", *(_SHORT.get(c, c) for c in CATEGORIES), "tok/s"]
    heads += ["of floor"] if floor else []
    table = Table(*heads, "loss", "gap", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        split = row["memory"] or {}
        loss = row["validation_loss"]
        table.add_row(
            row["name"],
            f"{row['peak_bytes'] / size:,.1f}",
            *(f"{split[c] / size:,.1f}" if c in split else "-" for c in CATEGORIES),
            f"{row['tok_per_s']:,.0f}",
            *([f"{row['tok_per_s'] / floor:.0%}"] if floor else []),
            f"{loss if math.isfinite(loss) else row['final_loss']:.4f}",
            f"{row['gap']:+.4f}" if math.isfinite(row["gap"]) else "-",
        )
    lines = [f"{r['name']}: {r['status']}: {r['reason']}" for r in result["rows"] if r not in rows]
    lines += [f"{r['name']}: {note}" for r in rows for note in r.get("notes", ())]
    lines += [f"note: {note}" for note in result["notes"]]
    head = (
        f"{result['name']}: {result['model']}, {result['steps']} steps of "
        f"{result['tokens_per_step']:,} tokens\n"
        f"peak memory in {unit} ({_KIND[result['memory_source']]}); "
        f"gap to {result['baseline']} in nats per token"
    )
    return Group(head, table, *lines, *_planned(rows), *_orders(rows))


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Texts in columns; the first is the label."""
    table = Table(*head, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:-1]:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _planned(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the planner was off, where it was asked."""
    off = {
        r["name"]: r["planned_bytes"] / r["peak_bytes"] - 1 for r in rows if "planned_bytes" in r
    }
    if not off:
        return []
    return ["planner off by: " + ", ".join(f"{name} {share:+.1%}" for name, share in off.items())]


def _orders(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came out first, as measured."""
    if len(rows) < 2:
        return []
    memory = " < ".join(r["name"] for r in sorted(rows, key=lambda r: r["peak_bytes"]))
    speed = " > ".join(r["name"] for r in sorted(rows, key=lambda r: -r["tok_per_s"]))
    return [f"memory: {memory}", f"speed: {speed}"]
