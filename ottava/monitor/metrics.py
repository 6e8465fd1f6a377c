"""run.jsonl: what a run did, one JSON object a line, appended and flushed line by line.

Every line has `kind` and `step` (optimizer steps done when it was written; a step line's own step
counts). Kinds and their fields:

    start    version, name, preset, device, device_gib, params, vocab, fp8_modules, fp8_share (of the
             GEMM FLOPs), emulated (no FP8 unit), tokens_per_step, steps, config
    resume   from (checkpoint), notes (checkpoints passed over, settings that changed)
    step     loss (nats per token), grad_norm (null in a fused step), lr, tokens, tok_per_s, step_ms,
             percent (of the machine's speed, see speed.py), memory_gib (peak), stepped (bool),
             precision ("fp8" | "high"), scale (loss scale; null without), data_ms (waiting for
             batches), on several ranks comm_ms (in collectives; not on a GPU) and all_gather_mib,
             reduce_scatter_mib, all_reduce_mib, ... (what they carry, see distributed/traffic.py), cause (what is wrong with the step; "" if nothing), first_bad ([module or
             parameter, "weight" | "output" | "loss" | "grad_output" | "gradient"]: where numbers
             first were not finite; null where that is not so, or not known). With experts also
             load_cv (standard deviation over mean of their loads) and load_peak (largest over mean),
             each of the worst layer, and load_cold (share of all experts without a token): of the
             whole step, all ranks
    observe  one step looked into, every monitor.every steps (observe.py); numbers in four digits:
             rows: row -> operand ("input", "weight", "grad_output"; "output" has error_db alone) ->
               amax, scale (the largest), saturated (share clipped), underflowed (share not zero
               that became zero), error_db (signal over noise, higher is better; null: no error)
             parameters: name -> grad_norm, weight_norm, weight_amax (before the update), update
               (norm of the change over norm), m_zero, v_zero (share of moments that are zero)
             experts: module -> busiest (largest load over the mean), idle (share without a token)
             unseen: rows that ran inside another module, so that nothing passed by
    eval     loss (validation, nats per token), ema_loss (with the running average; null without)
    save     path
    memory   gib: the planner's category ("weights", "master", "moments") -> GiB held between steps,
             and "peak" so far; once, after two steps. Older logs said residuals (now master),
             optimizer and running average (both now moments), and are read as if they had not
    time     ms: part -> milliseconds ("data", "forward", "backward", "update", "other"), of the step
             before each one that is looked into; on a GPU the device's own
    profile  of `ottava train --profile`: groups (ms a step), rows (ms, slowest first), advice
    event    text (a switch of precision, a save that failed, micro-batches made smaller)
    heal     the run went back by itself: text, to (step), row (demoted, or null), lr (peak from now
             on), position (of the data), rollbacks (so far), high (all rows demoted). Step lines
             after it count from `to` again
    end      status ("done" | "stopped" | "failed"), reason, seconds

A non-finite number is written as the string "nan", "inf" or "-inf" (JSON has none) and read back as
a number. A resumed run drops the lines after the step it resumes from, so the step, eval and save
lines of an interrupted run equal those of an undisturbed one, times aside.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..numerics.display import html_table, rich_table, sparkline, svg_line
from .trackers import Tracker

VERSION = 1
FILE = "run.jsonl"
_OLDER = {"residuals": "master", "optimizer": "moments", "running average": "moments"}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXT = (
    "kind", "name", "preset", "device", "path", "from", "text", "status", "reason", "cause", "row",
)  # fmt: skip


class MetricsWriter:
    """Appends lines to `<folder>/run.jsonl`; the numbers of steps and evaluations go to `trackers` too.

    `after_step`: drop what is in the file beyond this step (a resumed run); None starts the file
    anew. A tracker that fails is dropped and the run goes on: an event line says so.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        after_step: int | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if after_step is None else _lines_until(self.path, after_step)
        _replace(self.path, kept)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (lives with the run)
        self._trackers = list(trackers)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line and flush it."""
        line = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
        self._file.flush()
        if self._trackers and kind in ("step", "eval"):
            numbers = {f"{kind}/{name}": float(value) for name, value in values.items()
                       if isinstance(value, int | float)}  # fmt: skip
            for tracker in tuple(self._trackers):
                self._told(tracker, step, lambda t: t.log(numbers, step))

    def sync(self) -> None:
        """Have every line on the disk, before a checkpoint that counts on it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; writing afterwards is an error."""
        for tracker in tuple(self._trackers):
            self._told(tracker, 0, lambda t: t.close())
        self._trackers = []
        self._file.close()

    def _told(self, tracker: Tracker, step: int, what: Callable[[Tracker], None]) -> None:
        try:
            what(tracker)
        except Exception as error:  # each library has its own kinds, and none is worth a run
            self._trackers.remove(tracker)
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            text = f"{tracker.name} failed and gets nothing more: {why}"
            print(f"ottava: {text}", file=sys.stderr)
            self.write("event", step, text=text)


@dataclass
class Metrics:
    """What could be read of a run. `problems` says what could not, one line each."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind, in order."""
        return [line for line in self.lines if line["kind"] == kind]

    def series(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a number over a kind's lines, leaving out the lines without it."""
        have = [x for x in self.of(kind) if isinstance(x.get(name), int | float)]
        return [x["step"] for x in have], [float(x[name]) for x in have]

    def _cells(self) -> tuple[list[list[str]], list[float]]:
        """(what the run was and where it stands, its finite losses)."""
        start = next(iter(self.of("start")), {})
        last = next(reversed(self.of("step")), {})
        rows = [[k, str(start[k])] for k in ("name", "preset", "device", "params") if k in start]
        for name, form in (
            ("step", "d"),
            ("loss", ".4f"),
            ("tok_per_s", ",.0f"),
            ("memory_gib", ".2f"),
        ):
            if isinstance(last.get(name), int | float):
                rows.append([name, format(last[name], form)])
        steps, losses = self.series("eval", "loss")
        if steps:
            rows.append([f"validation loss at step {steps[-1]}", f"{losses[-1]:.4f}"])
        end = next(reversed(self.of("end")), {})
        rows.append(["ended", f"{end.get('status', 'no')} {end.get('reason') or ''}".strip()])
        rows += [["problem", text] for text in self.problems]
        return rows, [x for x in self.series("step", "loss")[1] if math.isfinite(x)]

    def _repr_html_(self) -> str:
        rows, losses = self._cells()
        return html_table(["run", ""], rows) + svg_line(losses)

    def __rich__(self) -> Any:
        rows, losses = self._cells()
        curve = [["loss, step by step", sparkline(losses)]] if losses else []
        return rich_table(["run", ""], [*rows, *curve])


def read_metrics(folder: str | Path) -> Metrics:
    """Read a run folder's run.jsonl (or the file itself): whatever is readable, and what is not.

    A half-written last line, a broken line, a missing file, another version: said in `problems`.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() or path.suffix != ".jsonl" else path
    out = Metrics()
    if not path.exists():
        out.problems.append(f"{path}: there is no such file, so no metrics")
        return out
    rows = path.read_bytes().split(b"\n")
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        line = _parse(row)
        if line is None:
            last = number == len(rows)
            what = "half-written (the run was killed)" if last else "not a metrics line"
            out.problems.append(f"{path}:{number}: {what}; left out")
            continue
        if line["kind"] == "start" and line.get("version") != VERSION:
            out.problems.append(
                f"{path}:{number}: written by metrics version {line.get('version')}, this is "
                f"{VERSION}; fields may be missing"
            )
        out.lines.append(line)
    return out


def _parse(row: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(row)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    if not isinstance(line.get("step"), int):
        return None
    if line["kind"] == "memory" and isinstance(line.get("gib"), dict):
        line["gib"] = _in_todays_words(line["gib"])
    return {
        k: _NON_FINITE.get(v, v) if isinstance(v, str) and k not in _TEXT else v
        for k, v in line.items()
    }


def _in_todays_words(gib: dict[str, Any]) -> dict[str, Any]:
    """The "gib" of a memory line, also of an older one, by the categories of today."""
    out: dict[str, Any] = {}
    for name, size in gib.items():
        now = _OLDER.get(name, name)
        numbers = isinstance(size, int | float) and isinstance(out.get(now), int | float)
        out[now] = out[now] + size if numbers else size
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _lines_until(path: Path, step: int) -> list[bytes]:
    """The file's whole lines up to `step`; what is broken or later is left out.

    Up to the line that says `step` was saved, where there is one: a run that went back by itself
    has later steps before it, and they are its history.
    """
    if not path.exists():
        return []
    rows = [(row, _parse(row)) for row in path.read_bytes().split(b"\n")]
    whole = [(row, line) for row, line in rows if line is not None]
    saves = [n for n, (_, x) in enumerate(whole) if x["kind"] == "save" and x["step"] == step]
    if saves and any(x["kind"] == "heal" for _, x in whole):
        return [row for row, _ in whole[: saves[-1] + 1]]
    return [row for row, line in whole if line["step"] <= step]


def _replace(path: Path, rows: list[bytes]) -> None:
    partial = path.with_name(f".partial-{path.name}")
    with open(partial, "wb") as f:
        f.write(b"".join(row + b"\n" for row in rows))
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)
