"""A comparison as a table for the terminal: 80 columns, memory by category, speed, loss, gap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from ..lifetimes import CATEGORIES

_SHORT = {"gradients": "grads", "activations": "kept", "temporary": "temp"}
_KIND = {"tensors": "bytes alive in tensors", "allocator": "the CUDA allocator's"}


def comparison_table(result: Mapping[str, Any]) -> Group:
    """The result of `compare` (see compare.py), a row per preset that ran, then what else to know.

    "kept" is what is kept for backward. The loss is on held-out text where there is any.
    """
    rows = [row for row in result["rows"] if row["status"] == "ok"]
    top = max((row["peak_bytes"] for row in rows), default=0)
    unit, size = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20)
    heads = ["preset", "peak", *(_SHORT.get(c, c) for c in CATEGORIES), "tok/s", "loss", "gap"]
    table = Table(*heads, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        loss = row["validation_loss"]
        table.add_row(
            row["name"],
            f"{row['peak_bytes'] / size:,.1f}",
            *(f"{row['memory'][c] / size:,.1f}" for c in CATEGORIES),
            f"{row['tok_per_s']:,.0f}",
            f"{loss if math.isfinite(loss) else row['final_loss']:.4f}",
            f"{row['gap']:+.4f}",
        )
    lines = [f"{r['name']}: {r['status']}: {r['reason']}" for r in result["rows"] if r not in rows]
    lines += [f"note: {note}" for note in result["notes"]]
    head = (
        f"{result['name']}: {result['model']}, {result['steps']} steps of "
        f"{result['tokens_per_step']:,} tokens\n"
        f"peak memory in {unit} ({_KIND[result['memory_source']]}); "
        f"gap to {result['baseline']} in nats per token"
    )
    return Group(head, table, *lines)
