"""One self-contained report.html: tables and plots in a single file that opens anywhere, offline.

A page is made from the plain data that `compare` writes (compare.json) or from a run's run.jsonl;
nothing is measured here. Every string is escaped, the page holds no script, and its content policy
forbids loading anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..monitor.metrics import read_metrics
from ..planner.lifetimes import CATEGORIES
from .charts import Series, bars, lines, smooth, stacked_bars
from .page import facts, page, table
from .run_page import run_page

GIB = float(1 << 30)
MIB = float(1 << 20)
_SOURCE = {
    "tensors": "Memory is the exact sum of bytes alive in tensors (CPU).",
    "allocator": "Memory is the CUDA allocator's (torch.cuda.max_memory_allocated).",
}


def write_report(
    source: Mapping[str, Any] | str | Path,
    path: str | Path | None = None,
    *,
    beside: Sequence[str | Path] = (),
) -> Path:
    """Write report.html and return its path.

    `source`: a comparison as plain data, the path of a compare.json or its folder, or a run's
    folder; `beside`: folders of runs whose losses are drawn into the same plot. `path` defaults to
    report.html beside the source. Raises FileNotFoundError when there is neither, ValueError when
    compare.json cannot be read.
    """
    if isinstance(source, Mapping):
        target = Path(path or "report.html")
        return _write(target, compare_page(source))
    source = Path(source)
    folder = source if source.is_dir() else source.parent
    file = folder / "compare.json" if source.is_dir() else source
    target = Path(path or folder / "report.html")
    if file.suffix == ".json" and file.is_file() and not beside:
        try:
            return _write(target, compare_page(json.loads(file.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a comparison ({error})") from error
    for one in (folder, *map(Path, beside)):
        if not (one / "run.jsonl").is_file():
            raise FileNotFoundError(f"{one}: holds neither compare.json nor run.jsonl")
    others = [(_name(Path(one)), read_metrics(one)) for one in beside]
    return _write(target, run_page(read_metrics(folder), others))


def _name(folder: Path) -> str:
    """What a run's own file calls it, with its folder where that says more."""
    starts = read_metrics(folder).of("start")
    name = str(starts[-1].get("name", folder.name)) if starts else folder.name
    return name if name == folder.name else f"{name} ({folder.name})"


def _write(path: Path, page: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def compare_page(result: Mapping[str, Any]) -> str:
    """The page of a comparison (see compare.py for the data)."""
    done = [row for row in result["rows"] if row["status"] == "ok"]
    missing = [row for row in result["rows"] if row["status"] != "ok"]
    unit, scale = _memory_unit(done)
    charts = [_loss_chart(done), _gap_chart(done, result["baseline"])]
    memory = [(r["name"], {k: v / scale for k, v in _split(r).items()}) for r in done]
    charts += [
        stacked_bars(
            memory, (*CATEGORIES, "all"), title="Memory at the peak, by category", unit=unit
        ),
        bars(
            [(r["name"], _floats(r["tok_per_s_each"])) for r in done],
            title="Throughput (median; the line spans the repeats)",
            unit="tok/s",
        ),
    ]
    notes = [_SOURCE.get(str(result["memory_source"]), str(result["memory_source"]))]
    notes += [str(note) for note in result.get("notes", ())]
    notes += [f"{r['name']}: {r['status']}: {r.get('reason', '')}" for r in missing]
    body = [
        table(*_compare_table(done, result["baseline"], unit, scale)),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>",
        *charts,
        "<h2>How it was measured</h2>",
        facts({**result.get("machine", {}), **result.get("how", {})}),
    ]
    title = f"Comparison: {result['name']}"
    return page(title, _summary(result), body, result)


def _memory_unit(rows: Sequence[Mapping]) -> tuple[str, float]:
    most = max((row["peak_bytes"] for row in rows), default=0)
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB)


def _split(row: Mapping[str, Any]) -> dict[str, float]:
    """Bytes by category; a peer that nobody could look into has one bar for all."""
    return dict(row["memory"]) if row.get("memory") else {"all": float(row["peak_bytes"])}


def _floats(values: Sequence[Any]) -> list[float]:
    return [_float(v) for v in values]


def _float(value: Any) -> float:
    try:
        return math.nan if value is None else float(value)
    except ValueError:
        return math.nan


def _loss_chart(rows: Sequence[Mapping]) -> str:
    series = []
    for i, row in enumerate(rows):
        ys = _floats(row["losses"])
        xs = list(range(1, len(ys) + 1))
        series.append(Series(f"{row['name']}, each step", xs, ys, i, faint=True))
        series.append(Series(row["name"], xs, smooth(ys), i))
    return lines(series, title="Training loss (running average)", x_label="step", y_label="nats per token")  # fmt: skip


def _gap_chart(rows: Sequence[Mapping], baseline: str) -> str:
    base = next((_floats(r["losses"]) for r in rows if r["name"] == baseline), None)
    if base is None:
        return ""
    series = []
    for i, row in enumerate(rows):
        gaps = [y - b for y, b in zip(_floats(row["losses"]), base, strict=False)]
        if row["name"] != baseline and gaps:
            series.append(Series(row["name"], list(range(1, len(gaps) + 1)), smooth(gaps), i))
    title = f"Training loss minus {baseline}'s on the same batch (running average)"
    return lines(series, title=title, x_label="step", y_label="nats per token")


def _compare_table(rows: Sequence[Mapping], baseline: str, unit: str, scale: float):
    head = ["", f"peak {unit}", *(f"{c} {unit}" for c in CATEGORIES), "tok/s", "final loss",
            "validation loss", f"gap to {baseline}"]  # fmt: skip
    body = []
    for row in rows:
        split = row.get("memory") or {}
        body.append(
            [
                row["name"],
                f"{row['peak_bytes'] / scale:,.2f}",
                *(f"{split[c] / scale:,.2f}" if c in split else "-" for c in CATEGORIES),
                f"{_float(row['tok_per_s']):,.0f}",
                f"{_float(row['final_loss']):.4f}",
                _or_dash(row.get("validation_loss"), "{:.4f}"),
                _or_dash(row.get("gap"), "{:+.4f}"),
            ]
        )
    return head, body


def _or_dash(value: Any, form: str) -> str:
    x = _float(value)
    return form.format(x) if math.isfinite(x) else "-"


def _summary(result: Mapping[str, Any]) -> str:
    done = [r for r in result["rows"] if r["status"] == "ok"]
    base = next((r for r in done if r["name"] == result["baseline"]), None)
    least = min(done, key=lambda r: r["peak_bytes"], default=None)
    text = f"{result.get('model', '')}: {len(done)} of {len(result['rows'])} variants measured."
    if base and least and least is not base:
        share = least["peak_bytes"] / base["peak_bytes"]
        speed = _float(least["tok_per_s"]) / _float(base["tok_per_s"])
        text += (
            f" Least memory: {least['name']}, {share:.0%} of {base['name']} at {speed:.2f} times "
            "its speed."
        )
    return text
