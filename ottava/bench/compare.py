"""The same model, seed, batches and steps under several presets: memory, speed and loss, measured.

On the CPU all presets train together, a slice of steps each in turn, so that a busy machine slows
all of them alike; each has its own random state, and its losses are those of `ottava train`. On a
GPU one preset is there at a time (the allocator's peak is then its own) and timing comes back to
each preset in further rounds. Memory is measured in the first two steps, which are not timed.

The result is plain data (written as compare.json; report.py draws it):

    name, model, baseline, memory_source ("tensors" | "allocator"), steps, tokens_per_step, repeats,
    machine, how (command, commit, time, versions), run, notes, seconds, rows: for every preset
        name, status ("ok" | "failed" | "not run"), reason, peak_bytes, peak_phase,
        memory (bytes by category, adding up to peak_bytes; null where notes say why), notes,
        reserved_bytes, planned_bytes,
        tok_per_s (median of tok_per_s_each), tok_per_s_each, step_ms, losses (each step),
        final_loss (mean of the last tenth), validation_loss, gap (to the baseline's validation loss;
        to its final loss where nothing is held out), skipped, fp8_modules, fp8_share

A number that is not finite is written as "nan", "inf" or "-inf".
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config import PRESETS, Run, run_to_dict
from ..planner.memory import Measured, estimate_memory, measure_memory
from ..train import resume
from ..train.trainer import Trainer
from .machine import describe_how, describe_machine
from .report import write_report

BASELINE = "amp"
MEASURED_STEPS = 2  # run under the tracker, not timed
FILE = "compare.json"


@dataclass
class Contestant:
    """One preset's trainer with its own random state, and what was seen of it."""

    name: str
    run: Run
    trainer: Trainer
    memory: Measured | None = None
    losses: list[float] = field(default_factory=list)
    tok_per_s: list[float] = field(default_factory=list)
    validation_loss: float = math.nan

    def __post_init__(self) -> None:
        self._pause()  # the trainer has just seeded every generator

    def take(self, steps: int, after_step: Callable[[], None], *, timed: bool) -> None:
        """Train `steps` steps; the first of a timed slice warms caches and is not counted."""
        self._resume()
        seconds = []
        for i in range(steps):
            result = self.trainer.step_once()
            self.losses.append(result.loss)
            if timed and (i > 0 or steps == 1):
                seconds.append(result.seconds)
            after_step()
        if seconds:
            self.tok_per_s.append(_tokens_per_step(self.run) / statistics.median(seconds))
        self._pause()

    def measure(self, after_step: Callable[[], None]) -> None:
        """Train the first two steps under the memory tracker."""
        self._resume()

        def step() -> None:
            self.losses.append(self.trainer.step_once().loss)
            after_step()

        trainer = self.trainer
        self.memory = measure_memory(step, trainer.model, trainer.optimizer, trainer.ema)
        self._pause()

    def _resume(self) -> None:
        resume.set_random_state(self._state)

    def _pause(self) -> None:
        self._state = resume.random_state()


def presets_for(device: str) -> tuple[str, ...]:
    """The presets that a comparison covers unless told: FP16 autocast only on a GPU."""
    return tuple(name for name in PRESETS if name != "amp-fp16" or device == "cuda")


def compare(
    run: Run,
    presets: Sequence[str] | None = None,
    *,
    repeats: int = 3,
    out: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Compare `presets` (all that apply unless given) on `run`; writes compare.json and report.html.

    `repeats`: timed slices of each preset. `out`: folder, the run's unless given. A preset that
    cannot run here, or breaks, is reported in its row and does not stop the others. Raises
    ConfigError for an unknown preset, ValueError for too few steps, before anything runs.
    """
    device = run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    names = tuple(dict.fromkeys(presets or presets_for(device)))
    runs = {name: _run_of(run, name, device) for name in names}
    if run.train.steps < MEASURED_STEPS + 2:
        raise ValueError(
            f"train.steps: {run.train.steps} is too few to compare: {MEASURED_STEPS} steps measure "
            f"memory and at least 2 are timed; use {MEASURED_STEPS + 2} or more"
        )
    begun = time.perf_counter()
    rows: dict[str, dict[str, Any]] = {}
    stderr = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("steps"), TimeRemainingColumn(), console=stderr, disable=quiet,
    )  # fmt: skip
    with bar:
        task = bar.add_task("compare", total=len(names) * run.train.steps)
        progress = _Advance(bar, task)
        train = _one_by_one if device == "cuda" else _together
        train(runs, rows, repeats, progress)
    result = {
        "name": run.name,
        "model": run.model.name or run.model.path,
        "baseline": baseline_of(rows.values()),
        "memory_source": "allocator" if device == "cuda" else "tensors",
        "steps": run.train.steps,
        "tokens_per_step": _tokens_per_step(run),
        "repeats": repeats,
        "machine": describe_machine(),
        "how": describe_how(),
        "run": run_to_dict(run),
        "notes": sorted({note for r in runs.values() for note in r.notes}),
        "rows": [rows[name] for name in names],
        "seconds": time.perf_counter() - begun,
    }
    add_gaps(result)
    write_comparison(result, Path(out or run.out))
    return result


class _Advance:
    def __init__(self, bar: Progress, task) -> None:
        self.bar, self.task = bar, task

    def done(self, row: Mapping[str, Any]) -> None:
        """A line for a preset that has ended, above the bar or in a log file."""
        said = row.get("reason") or f"peak {row['peak_bytes'] / 1e9:.3f} GB, {_rate(row)} tok/s"
        self.bar.console.print(f"{row['name']}: {said}", highlight=False)

    def of(self, name: str) -> Callable[[], None]:
        """What to call after each step of a preset."""
        return lambda: self.bar.update(self.task, advance=1, description=name)


def _rate(row: Mapping[str, Any]) -> str:
    return f"{statistics.median(row['tok_per_s_each']):,.0f}" if row["tok_per_s_each"] else "no"


def _run_of(run: Run, preset: str, device: str) -> Run:
    run = run.with_preset(preset)
    train = replace(run.train, resume="never", eval_every=0)
    monitor = replace(run.monitor, every=0)  # nobody looks into steps that are timed
    out = f"{run.out}/{preset}"
    return replace(run, device=device, train=train, monitor=monitor, out=out).check()


def _tokens_per_step(run: Run) -> int:
    return run.train.micro_batch * run.train.accumulate * run.data.sequence_length


def _attempt(name: str, rows: dict[str, dict], what: Callable[[], None]) -> bool:
    """Whether `what` went through; a failure becomes the preset's row."""
    try:
        what()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        rows[name] = {"name": name, "status": "failed", "reason": lines[0]}
        return False
    return True


def _build(name: str, run: Run, into: dict[str, Contestant]) -> None:
    into[name] = Contestant(name, run, Trainer(run))


def _together(runs: dict[str, Run], rows: dict, repeats: int, progress: _Advance) -> None:
    """All presets at once, in turns (CPU)."""
    field_: dict[str, Contestant] = {}
    for name, run in runs.items():
        if _attempt(name, rows, lambda name=name, run=run: _build(name, run, field_)):
            one = field_[name]
            _attempt(name, rows, lambda one=one: one.measure(progress.of(one.name)))
    steps = next(iter(runs.values())).train.steps
    for size in _slices(steps - MEASURED_STEPS, repeats):
        for name, one in field_.items():
            if name not in rows:
                after = progress.of(name)
                _attempt(name, rows, lambda one=one, after=after: one.take(size, after, timed=True))  # noqa: B023
    for name, one in field_.items():
        if name not in rows and _attempt(name, rows, lambda one=one: _finish(one)):
            rows[name] = _row(one)


def _one_by_one(runs: dict[str, Run], rows: dict, repeats: int, progress: _Advance) -> None:
    """One preset on the GPU at a time; every further round rebuilds each and times it again."""
    for name, run in runs.items():
        _attempt(name, rows, lambda name=name, run=run: _whole(name, run, rows, progress.of(name)))
        progress.done(rows[name])
        _release()
    for _ in range(repeats - 1):
        for name, run in runs.items():
            if rows[name]["status"] != "ok":
                continue
            _attempt(name, rows, lambda name=name, run=run: _time_again(name, run, rows))
            _release()
    for row in rows.values():
        if row["status"] == "ok":
            _set_speed(row)


def _whole(name: str, run: Run, rows: dict, after: Callable[[], None]) -> None:
    one = Contestant(name, run, Trainer(run))
    one.measure(after)
    one.take(run.train.steps - MEASURED_STEPS, after, timed=True)
    _finish(one)
    rows[name] = _row(one)


def _time_again(name: str, run: Run, rows: dict) -> None:
    one = Contestant(name, run, Trainer(run))
    one.take(MEASURED_STEPS + 1, lambda: None, timed=False)
    one.take(min(10, run.train.steps), lambda: None, timed=True)
    rows[name]["tok_per_s_each"] += one.tok_per_s


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _slices(steps: int, count: int) -> list[int]:
    """`steps` cut into about `count` slices of at least two steps."""
    count = max(1, min(count, steps // 2))
    return [steps // count + (i < steps % count) for i in range(count)]


def _finish(one: Contestant) -> None:
    one._resume()
    one.validation_loss = one.trainer.evaluate()


def _row(one: Contestant) -> dict[str, Any]:
    memory, trainer = one.memory, one.trainer
    assert memory is not None  # measured before anything else
    last = one.losses[-max(1, len(one.losses) // 10) :]
    device = trainer.device.type
    row = {
        "name": one.name,
        "status": "ok",
        "peak_bytes": memory.peak.bytes,
        "peak_phase": memory.peak.phase,
        "memory": dict(memory.peak.by_category) or None,
        "notes": [memory.problem] if memory.problem else [],
        "reserved_bytes": memory.reserved_bytes,
        "planned_bytes": estimate_memory(one.run, device=device).peak_bytes,
        "tok_per_s_each": one.tok_per_s,
        "losses": one.losses,
        "final_loss": sum(last) / len(last),
        "validation_loss": one.validation_loss,
        "skipped": trainer.skipped,
        "fp8_modules": trainer.plan.num_fp8 if trainer.plan else 0,
        "fp8_share": trainer.plan.share_flops if trainer.plan else 0.0,
        "tokens_per_step": _tokens_per_step(one.run),
    }
    return _set_speed(row)


def _set_speed(row: dict[str, Any]) -> dict[str, Any]:
    row["tok_per_s"] = statistics.median(row["tok_per_s_each"])
    row["step_ms"] = 1e3 * row["tokens_per_step"] / row["tok_per_s"]
    return row


def baseline_of(rows: Iterable[dict[str, Any]]) -> str:
    """What gaps are measured from: amp where it was asked for, else the first preset that ran."""
    rows = list(rows)
    ran = [row["name"] for row in rows if row["status"] == "ok"]
    asked = BASELINE in (row["name"] for row in rows)
    return BASELINE if asked or not ran else ran[0]


def add_gaps(result: dict[str, Any]) -> None:
    """Fill in every row's gap to the baseline, in nats per token."""
    done = [row for row in result["rows"] if row["status"] == "ok"]
    base = next((row for row in done if row["name"] == result["baseline"]), None)
    for row in done:
        row["gap"] = math.nan
        if base is not None:
            held_out = math.isfinite(base["validation_loss"])
            key = "validation_loss" if held_out else "final_loss"
            row["gap"] = row[key] - base[key]


def write_comparison(result: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write compare.json and report.html into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    plain = strict(result)
    text = json.dumps(plain, indent=1, allow_nan=False)
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
    return path, write_report(plain, folder / "report.html")


def strict(value: Any) -> Any:
    """The same data as strict JSON can hold it: numbers that are not finite become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return value
