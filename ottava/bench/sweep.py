"""Learning rates compared on one's own model: short runs over the same batches, one for each rate.

In several presets it also answers whether the best rate in 8 bits is 0.5 to 1 times that of high
precision, as is often advised. Writes sweep.json and sweep.html into the run's folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config import ConfigError, Run
from ..monitor.metrics import read_metrics
from ..numerics.preset import PRESETS
from ..train.checkpoint import CheckpointError
from ..train.loop import TrainingError
from ..train.trainer import Trainer
from .charts import Series, lines, smooth
from .page import facts, page, table

_PATIENCE = 5  # bad steps in a row after which a rate is given up


def sweep(
    run: Run, rates: Sequence[float], presets: Sequence[str] = (), *, quiet: bool = False
) -> dict[str, Any]:
    """Train `run` once for each rate (and preset); returns the result as plain data.

    The same seed and data for all. A rate that diverges is a row like any other. Raises ConfigError
    for fewer than two rates, or one that cannot be, before anything runs.
    """
    rates = sorted(set(rates))
    if len(rates) < 2:
        raise ConfigError("sweep: give at least two learning rates, such as --lr 1e-4,3e-4,1e-3")
    names = list(presets) or [run.train.preset]
    variants = [(name, lr, variant(run, name, lr).check()) for name in names for lr in rates]
    rows = [_row(name, lr, one, quiet) for name, lr, one in variants]
    best = {name: _best([r for r in rows if r["preset"] == name]) for name in names}
    result = {
        "name": run.name,
        "model": run.model.name or run.model.path,
        "steps": run.train.steps,
        "seed": run.seed,
        "rows": rows,
        "best": best,
        "verdict": _verdict(best),
    }
    folder = Path(run.out)
    text = json.dumps(_plain(result), indent=1, allow_nan=False)
    (folder / "sweep.json").write_text(text, encoding="utf-8")
    (folder / "sweep.html").write_text(sweep_page(result), encoding="utf-8")
    return result


def variant(run: Run, preset: str, lr: float) -> Run:
    """`run` under a preset at one rate, in a folder of its own, without going back by itself."""
    run = run.with_preset(preset)
    train = replace(run.train, resume="never", checkpoint_every=0, keep_last=1)
    return replace(
        run,
        name=f"{run.name} {preset} lr={lr:g}",
        out=str(Path(run.out) / f"{preset}-lr-{lr:g}"),
        train=train,
        optimizer=replace(run.optimizer, lr=lr),
        precision=replace(run.precision, lr_scale=1.0),
        heal=replace(run.heal, after=_PATIENCE, rollbacks=0),
    )


def _row(preset: str, lr: float, run: Run, quiet: bool) -> dict[str, Any]:
    status, reason, validation = "ok", "", math.nan
    try:
        validation = Trainer(run).run(quiet=quiet).eval_loss
    except (TrainingError, CheckpointError) as error:
        status, reason = "failed", str(error)
    finally:
        shutil.rmtree(Path(run.out) / "checkpoints", ignore_errors=True)
    metrics = read_metrics(run.out)
    steps, losses = metrics.series("step", "loss")
    last = losses[-max(len(losses) // 10, 1) :]
    final = fmean(last) if last else math.nan
    if status == "ok" and not (math.isfinite(final) and final <= losses[0]):
        status, reason = "diverged", f"loss {losses[0]:.3f} at first, {final:.3f} at last"
    return {
        "preset": preset,
        "lr": lr,
        "status": status,
        "reason": reason,
        "final_loss": final,
        "validation_loss": validation,
        "skipped": sum(x.get("stepped") is False for x in metrics.of("step")),
        "steps": steps,
        "losses": losses,
    }


def _score(row: dict[str, Any]) -> float:
    """What rates are judged by: the validation loss, or without one the last tenth of training."""
    return row["validation_loss"] if math.isfinite(row["validation_loss"]) else row["final_loss"]


def _best(rows: list[dict[str, Any]]) -> float | None:
    good = [r for r in rows if r["status"] == "ok" and math.isfinite(_score(r))]
    return min(good, key=_score)["lr"] if good else None


def _verdict(best: dict[str, float | None]) -> str:
    """The best rates in words, 8 bits against high precision."""
    parts = [
        f"{name}: " + ("no rate converged" if lr is None else f"best lr {lr:g}")
        for name, lr in best.items()
    ]
    low = {n: lr for n, lr in best.items() if lr and PRESETS[n].compute == "fp8"}
    high = {n: lr for n, lr in best.items() if lr and PRESETS[n].compute != "fp8"}
    for name, lr in low.items():
        for other, base in high.items():
            ratio = lr / base
            fits = "within" if 0.5 <= ratio <= 1.0 else "outside"
            parts.append(f"{name} wants {ratio:.2g} times {other}'s rate ({fits} 0.5 to 1)")
    return "; ".join(parts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_HEAD = ("preset", "lr", "final loss", "validation loss", "skipped", "")


def sweep_cells(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of the table, as text; the best rate of each preset is marked."""
    rows = []
    for row in result["rows"]:
        best = result["best"][row["preset"]] == row["lr"]
        said = (
            "best" if best else "" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
        )
        rows.append(
            [
                row["preset"], f"{row['lr']:g}", f"{row['final_loss']:.4f}",
                f"{row['validation_loss']:.4f}", str(row["skipped"]), said,
            ]
        )  # fmt: skip
    return list(_HEAD), rows


def sweep_page(result: dict[str, Any]) -> str:
    """sweep.html: the table, the loss of every rate, and loss against rate."""
    curves = [
        Series(f"{r['preset']} lr={r['lr']:g}", r["steps"], smooth(r["losses"]), i)
        for i, r in enumerate(result["rows"])
    ]
    scores = []
    for number, name in enumerate(result["best"]):
        good = [r for r in result["rows"] if r["preset"] == name and math.isfinite(_score(r))]
        xs = [math.log10(r["lr"]) if r["lr"] > 0 else -12.0 for r in good]
        scores.append(Series(name, xs, [_score(r) for r in good], number))
    body = [
        table(*sweep_cells(result)),
        lines(curves, title="Training loss (running average)", x_label="step",
              y_label="nats per token"),
        lines(scores, title="Loss at the end against the learning rate", x_label="log10 of lr",
              y_label="nats per token"),
        "<h2>How it was measured</h2>",
        facts({k: result[k] for k in ("model", "steps", "seed")}),
    ]  # fmt: skip
    return page(f"Learning rates: {result['name']}", result["verdict"], body)
