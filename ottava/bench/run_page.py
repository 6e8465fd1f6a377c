"""The page of one run, beside others where asked: loss, casts row by row, memory and time, faults."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from statistics import median
from typing import Any

from ..distributed.traffic import KINDS
from ..monitor.diagnose import findings
from ..monitor.facts import Facts
from ..monitor.metrics import Metrics
from .charts import Series, heat, lines, smooth, stacked_bars
from .page import facts, page, table

_CURVES = (
    ("grad_norm", "Gradient norm", "norm"),
    ("lr", "Learning rate", "lr"),
    ("tok_per_s", "Throughput", "tok/s"),
    ("memory_gib", "Peak memory", "GiB"),
    ("scale", "Loss scale", "scale"),
    ("load_cv", "Expert load: standard deviation over mean, worst layer", "CV"),
    ("load_peak", "Expert load: largest over mean, worst layer", "times the mean"),
    ("load_cold", "Cold experts: share without a token", "share"),
)
_LOST = -(10**6)  # the bin of norms that have no power of ten
_SHARES = (
    ("saturated", "Saturated: share of an operand that its 8-bit cast clipped"),
    ("underflowed", "Underflowed: share of an operand that its 8-bit cast made zero"),
)


def run_page(metrics: Metrics, others: Sequence[tuple[str, Metrics]] = ()) -> str:
    """The page of a run from what could be read of its run.jsonl. `others`: (name, metrics) of runs
    whose losses are drawn beside it."""
    run = Facts(metrics)
    start, end = run.start, (metrics.of("end") or [{}])[-1]
    name = str(start.get("name", "run"))
    body = [_losses(name, run, [(n, Facts(m)) for n, m in others])]
    body += _curves(run)
    body += [_heat(run, field, title) for field, title in _SHARES if run.observed]
    body += [
        _norm_histogram(run),
        _memory(run),
        _time(run),
        _profile(run),
        _sent(run),
        _gradients(run),
    ]
    body += ["<h2>What diagnose says</h2>", _diagnosis(run)]
    notes = _notes(metrics)
    if notes:
        body.append("<h2>What happened</h2>")
        body.append("<ul>" + "".join(f"<li>{escape(n)}</li>" for n in notes) + "</ul>")
    body.append("<h2>The run</h2>")
    body.append(facts({k: v for k, v in start.items() if k not in ("kind", "step", "config")}))
    if "config" in start:
        body.append(f"<pre>{escape(json.dumps(start['config'], indent=1, default=str))}</pre>")
    last = run.steps[-1]["step"] if run.steps else 0
    return page(f"Run: {name}", f"{end.get('status', 'not finished')} after {last} steps", body)


def _losses(name: str, run: Facts, others: Sequence[tuple[str, Facts]]) -> str:
    series = []
    for number, (label, one) in enumerate([(name, run), *others]):
        steps, losses = _numbers(one, "loss")
        color = 2 * number
        kind = "training loss" if not others else label
        series.append(Series(f"{kind}, each step", steps, losses, color, faint=True))
        series.append(Series(kind, steps, smooth(losses), color))
        evals = {x["step"]: x["loss"] for x in one.metrics.of("eval") if _is_number(x.get("loss"))}
        if evals:
            said = "validation loss" if not others else f"{label}, validation"
            series.append(Series(said, list(evals), list(evals.values()), color + 1))
    return lines(series, title="Loss", x_label="step", y_label="nats per token")


def _numbers(run: Facts, name: str) -> tuple[list[float], list[float]]:
    found = run.numbers(name)
    return [s for s, _ in found], [v for _, v in found]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float)


def _curves(run: Facts) -> list[str]:
    out = []
    for name, title, label in _CURVES:
        xs, ys = _numbers(run, name)
        if xs:
            out.append(
                lines([Series(title, xs, ys, 2)], title=title, x_label="step", y_label=label)
            )
    return out


def _heat(run: Facts, field: str, title: str) -> str:
    rows: dict[str, dict[int, float]] = {}
    for line in run.observed:
        for row, operands in (line.get("rows") or {}).items():
            for operand, values in operands.items():
                if _is_number(values.get(field)):
                    rows.setdefault(f"{row} {operand}", {})[line["step"]] = float(values[field])
    return heat(list(rows.items()), title=title)


def _memory(run: Facts) -> str:
    held = (run.metrics.of("memory") or [{}])[-1].get("gib")
    if not isinstance(held, dict):
        return ""
    split = {str(k): float(v) for k, v in held.items() if k != "peak" and _is_number(v)}
    peak = held.get("peak")
    rows = [("between steps", split)]
    if _is_number(peak):
        rows.append(
            ("at the peak", {**split, "within a step": max(peak - sum(split.values()), 0.0)})
        )
    return stacked_bars(rows, [*split, "within a step"], title="Memory", unit="GiB")


def _time(run: Facts) -> str:
    whole = [v for _, v in run.numbers("step_ms")]
    if not whole:
        return ""
    split = {"compute": median(whole)}
    for name, label in (("data_ms", "waiting for data"), ("comm_ms", "waiting for other ranks")):
        values = [v for _, v in run.numbers(name)]
        if values:
            split[label] = median(values)
            split["compute"] = max(split["compute"] - split[label], 0.0)
    rows, names = [("a step", split)], list(split)
    timed = [x["ms"] for x in run.metrics.of("time") if isinstance(x.get("ms"), dict)]
    if timed:
        parts = dict.fromkeys(str(n) for ms in timed for n in ms)
        rows.append(("by its parts", {
            n: median([float(ms[n]) for ms in timed if _is_number(ms.get(n))] or [0.0]) for n in parts
        }))  # fmt: skip
        names += [n for n in parts if n not in names]
    return stacked_bars(rows, names, title="Time of a step (median)", unit="ms")


def _sent(run: Facts) -> str:
    """What ranks sent each other in a step, by kind."""
    split = {}
    for kind in KINDS:
        values = [v for _, v in run.numbers(f"{kind}_mib")]
        if values:
            split[kind.replace("_", "-")] = median(values)
    if not split:
        return ""
    return stacked_bars(
        [("a step", split)], list(split), title="Carried by collectives (median)", unit="MiB"
    )


def _norm_histogram(run: Facts) -> str:
    """How the gradient norms of all parameters spread over powers of ten, look by look."""
    bins: dict[int, dict[int, float]] = {}
    for line in run.observed:
        parameters = (line.get("parameters") or {}).values()
        found = [v.get("grad_norm") for v in parameters]
        # inside a line a number that is not finite is text (metrics.py)
        norms = [x if _is_number(x) else math.nan for x in found if x is not None]
        for norm in norms:
            power = math.floor(math.log10(norm)) if 0 < norm < math.inf else None
            place = bins.setdefault(_LOST if power is None else power, {})
            place[line["step"]] = place.get(line["step"], 0.0) + 1.0 / len(norms)
    if not bins:
        return ""
    rows = [("zero, or not finite" if n == _LOST else f"1e{n} to 1e{n + 1}", bins[n])
            for n in sorted(bins, reverse=True)]  # fmt: skip
    return heat(rows, title="Gradient norms: share of the parameters in each power of ten",
                least=1e-3)  # fmt: skip


def _profile(run: Facts) -> str:
    """Where the time of the profiled steps went, where there are any."""
    line = (run.metrics.of("profile") or [{}])[-1]
    groups, rows = line.get("groups"), line.get("rows")
    if not isinstance(groups, dict) or not isinstance(rows, list):
        return ""
    split = {str(k): float(v) for k, v in groups.items() if _is_number(v)}
    out = stacked_bars(
        [("a step", split)], list(split), title="Time by group (profiled)", unit="ms"
    )
    head = ["row", "kind", "computes in", "forward ms", "backward ms"]
    names = ("row", "kind", "recipe", "forward_ms", "backward_ms")
    body = [
        [f"{r[k]:.3g}" if _is_number(r.get(k)) else str(r.get(k, "-")) for k in names]
        for r in rows[:20]
        if isinstance(r, dict)
    ]
    advice = line.get("advice") or []
    texts = [f"{a[0]}: {a[1]}" for a in advice if isinstance(a, list) and len(a) == 2]
    items = "".join(f"<li>{escape(t)}</li>" for t in texts)
    return f"{out}{table(head, body)}<ul>{items}</ul>"


def _gradients(run: Facts) -> str:
    """The parameters whose gradient norm, update or largest weight stand out, at the last look."""
    if not run.observed:
        return ""
    last = run.observed[-1]
    seen = (last.get("parameters") or {}).items()
    head = ["parameter", "gradient norm", "weight norm", "largest weight", "update / weight",
            "zeros of m", "zeros of v"]  # fmt: skip
    names = ("grad_norm", "weight_norm", "weight_amax", "update", "m_zero", "v_zero")
    rows = [[n, *(f"{v[k]:.3g}" if _is_number(v.get(k)) else "-" for k in names)] for n, v in seen]
    if not rows:
        return ""
    title = escape(f"Weights and gradients at step {last['step']}")
    return f"<details><summary>{title}</summary>{table(head, rows)}</details>"


def _diagnosis(run: Facts) -> str:
    found = findings(run)
    if not found:
        return "<p>Nothing found.</p>"
    head = ["", "symptom", "evidence", "cause", "try"]
    return table(
        head, [[f.level, f.symptom, f.evidence, f.cause, f.setting] for f in found], prose=True
    )


def _notes(metrics: Metrics) -> list[str]:
    skipped = [x for x in metrics.of("step") if x.get("stepped") is False]
    notes = [f"step {x['step']}: skipped: {x.get('cause', '')}" for x in skipped[-20:]]
    notes += [str(x.get("text", "")) for x in metrics.of("heal")]
    notes += [f"step {x['step']}: {x.get('text', '')}" for x in metrics.of("event")]
    return [*notes, *metrics.problems]
