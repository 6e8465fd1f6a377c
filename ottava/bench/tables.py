"""A comparison as text: memory by category, then speed and loss. Rows stay in the order asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from ..lifetimes import CATEGORIES

GIB, MIB = float(1 << 30), float(1 << 20)
_SHORT = {"activations": "kept act.", "temporary": "temp."}
SOURCES = {
    "tensors": "memory: exact sum of bytes alive in tensors, at the peak (CPU)",
    "allocator": "memory: the CUDA allocator's, at the peak (max_memory_allocated)",
}


def comparison_tables(result: Mapping[str, Any]) -> Group:
    """What `ottava compare` prints, for `rich`."""
    done = [row for row in result["rows"] if row["status"] == "ok"]
    parts: list[Any] = [_memory(done), SOURCES[result["memory_source"]], "", _speed(result, done)]
    for row in result["rows"]:
        if row["status"] != "ok":
            parts.append(f"{row['name']}: {row['status']}: {row.get('reason', '')}")
    parts += [f"note: {note}" for note in result.get("notes", ())]
    if len(done) > 1:
        parts += ["", *_orders(done)]
    return Group(*parts)


def _memory(rows: Sequence[Mapping]) -> Table:
    most = max((row["peak_bytes"] for row in rows), default=0)
    unit, size = ("GiB", GIB) if most >= GIB else ("MiB", MIB)
    table = Table(f"peak, {unit}", box=None, pad_edge=False)
    for name in ("all", *(_SHORT.get(c, c) for c in CATEGORIES), "planned"):
        table.add_column(name, justify="right")
    for row in rows:
        split = row.get("memory") or {}
        planned = row.get("planned_bytes")
        table.add_row(
            row["name"],
            f"{row['peak_bytes'] / size:,.2f}",
            *(f"{split[c] / size:,.2f}" if c in split else "-" for c in CATEGORIES),
            f"{planned / row['peak_bytes'] - 1:+.1%}" if planned else "-",
        )
    return table


def _speed(result: Mapping[str, Any], rows: Sequence[Mapping]) -> Table:
    base = next((r for r in rows if r["name"] == result["baseline"]), None)
    table = Table(f"{result['steps']} steps", box=None, pad_edge=False)
    heads = ["tok/s", "of " + result["baseline"], "final loss", "validation", "gap"]
    floor = result.get("floor_tok_per_s")
    if floor:
        heads.insert(2, "of floor")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        cells = [
            f"{row['tok_per_s']:,.0f}",
            f"{row['tok_per_s'] / base['tok_per_s']:.2f} x" if base else "-",
            _loss(row.get("final_loss")),
            _loss(row.get("validation_loss")),
            _loss(row.get("gap"), sign=True),
        ]
        if floor:
            cells.insert(2, f"{row['tok_per_s'] / floor:.0%}")
        table.add_row(row["name"], *cells)
    return table


def _loss(value: Any, sign: bool = False) -> str:
    x = math.nan if value is None else float(value)
    if not math.isfinite(x):
        return "-"
    return f"{x:+.4f}" if sign else f"{x:.4f}"


def _orders(rows: Sequence[Mapping]) -> list[str]:
    memory = " < ".join(r["name"] for r in sorted(rows, key=lambda r: r["peak_bytes"]))
    speed = " > ".join(r["name"] for r in sorted(rows, key=lambda r: -r["tok_per_s"]))
    return [f"measured memory: {memory}", f"measured speed:  {speed}"]
