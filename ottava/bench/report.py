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

from ..lifetimes import CATEGORIES
from ..monitor.metrics import Metrics, read_metrics
from .charts import NUM_COLORS, Series, bars, lines, number, smooth, stacked_bars

GIB = float(1 << 30)
MIB = float(1 << 20)
_SOURCE = {
    "tensors": "Memory is the exact sum of bytes alive in tensors (CPU).",
    "allocator": "Memory is the CUDA allocator's (torch.cuda.max_memory_allocated).",
}


def write_report(source: Mapping[str, Any] | str | Path, path: str | Path | None = None) -> Path:
    """Write report.html and return its path.

    `source`: a comparison as plain data, the path of a compare.json or its folder, or a run's
    folder. `path` defaults to report.html beside the source. Raises FileNotFoundError when there is
    neither, ValueError when compare.json cannot be read.
    """
    if isinstance(source, Mapping):
        target = Path(path or "report.html")
        return _write(target, compare_page(source))
    source = Path(source)
    folder = source if source.is_dir() else source.parent
    file = folder / "compare.json" if source.is_dir() else source
    target = Path(path or folder / "report.html")
    if file.suffix == ".json" and file.is_file():
        try:
            return _write(target, compare_page(json.loads(file.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a comparison ({error})") from error
    if not (folder / "run.jsonl").is_file():
        raise FileNotFoundError(f"{folder}: holds neither compare.json nor run.jsonl")
    return _write(target, run_page(read_metrics(folder)))


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
        _table(*_compare_table(done, result["baseline"], unit, scale)),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>",
        *charts,
        "<h2>How it was measured</h2>",
        _facts({**result.get("machine", {}), **result.get("how", {})}),
    ]
    title = f"Comparison: {result['name']}"
    return _page(title, _summary(result), body, result)


def run_page(metrics: Metrics) -> str:
    """The page of one training run, from what could be read of its run.jsonl."""
    start = (metrics.of("start") or [{}])[-1]
    end = (metrics.of("end") or [{}])[-1]
    steps, losses = metrics.series("step", "loss")
    evals, eval_losses = metrics.series("eval", "loss")
    loss = [
        Series("training loss, each step", steps, losses, 0, faint=True),
        Series("training loss", steps, smooth(losses), 0),
        Series("validation loss", evals, eval_losses, 1),
    ]
    body = [lines(loss, title="Loss", x_label="step", y_label="nats per token")]
    for name, title, label in (
        ("grad_norm", "Gradient norm", "norm"),
        ("lr", "Learning rate", "lr"),
        ("tok_per_s", "Throughput", "tok/s"),
        ("memory_gib", "Peak memory", "GiB"),
        ("scale", "Loss scale", "scale"),
    ):
        xs, ys = metrics.series("step", name)
        if xs:
            body.append(
                lines([Series(title, xs, ys, 2)], title=title, x_label="step", y_label=label)
            )
    skipped = [x for x in metrics.of("step") if x.get("stepped") is False]
    notes = [f"step {x['step']}: skipped: {x.get('cause', '')}" for x in skipped[-20:]]
    notes += [f"step {x['step']}: {x.get('text', '')}" for x in metrics.of("event")]
    notes += metrics.problems
    if notes:
        body.append("<ul>" + "".join(f"<li>{escape(str(n))}</li>" for n in notes) + "</ul>")
    body.append("<h2>The run</h2>")
    body.append(_facts({k: v for k, v in start.items() if k not in ("kind", "step", "config")}))
    if "config" in start:
        body.append(f"<pre>{escape(json.dumps(start['config'], indent=1, default=str))}</pre>")
    status = f"{end.get('status', 'not finished')} after {steps[-1] if steps else 0} steps"
    return _page(f"Run: {start.get('name', 'run')}", status, body, None)


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


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in body
    )
    return f'<div class="wide"><table><tr>{cells}</tr>{rows}</table></div>'


def _facts(facts: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, float):
            return number(value)
        return json.dumps(value) if isinstance(value, dict | list) else str(value)

    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(text(v))}</td></tr>" for k, v in facts.items()
    )
    return f'<table class="facts">{rows}</table>'


def _page(title: str, summary: str, body: Sequence[str], data: Mapping[str, Any] | None) -> str:
    raw = ""
    if data is not None:
        # "<" is escaped as JSON text, so no string in the data can end the block.
        text = json.dumps(data, default=str).replace("<", "\\u003c")
        raw = f'<script type="application/json" id="data">{text}</script>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(summary)}</p>{''.join(body)}{raw}</body></html>\n"
    )


def _colors() -> str:
    hues = ("#4269d0", "#e07a1f", "#3a9a4a", "#c9405e", "#8a5cc9", "#7f868f", "#1f9bb5", "#b59a1f")
    assert len(hues) == NUM_COLORS
    return "".join(
        f".s{i}{{stroke:{hue}}}.f{i}{{fill:{hue}}}.b{i}{{background:{hue}}}"
        for i, hue in enumerate(hues)
    )


_STYLE = (
    ":root{color-scheme:light dark;--ink:#1b1f24;--dim:#68707a;--rule:#d9dde2;--paper:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--dim:#98a1ab;--rule:#353b43;"
    "--paper:#14171b}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);"
    "max-width:940px;margin:32px auto;padding:0 18px}"
    "h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;"
    "font-variant-numeric:tabular-nums}"
    "td,th{padding:4px 9px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child,.facts td{text-align:left}.facts td{white-space:normal;"
    "overflow-wrap:anywhere}th{color:var(--dim);font-weight:500}"
    "figure{margin:28px 0}figcaption{font-weight:600;margin-bottom:6px}"
    "svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--ink)}"
    ".end{text-anchor:end}.mid{text-anchor:middle}svg .dim{fill:var(--dim)}"
    ".grid{stroke:var(--rule)}.line{fill:none;stroke-width:1.8}.faint{fill:none;stroke-width:.7;"
    "opacity:.28}.spread{stroke:var(--ink);stroke-width:1.5}"
    ".legend span{margin-right:14px;font-size:13px;white-space:nowrap}"
    ".legend i{display:inline-block;width:10px;height:10px;margin-right:5px;border-radius:2px}"
    "pre{font-size:12px;overflow-x:auto;border:1px solid var(--rule);padding:10px}" + _colors()
)
