"""Workloads against each other: one process per variant, interleaved, medians of the repeats.

    python -m ottava.bench.contest W1 --peers [--repeats 3] [--only NAME ...] [--out DIR]

First the kernels are checked; if one disagrees with its reference no speed is printed. Then, repeat
by repeat, each variant gets a process of its own: it says before allocating whether it can fit,
warms up, measures memory by category in one step, and times STEPS more. A variant whose package is
missing is named as not run; one that crashes is reported and does not stop the others. Each prints a
line when it is done, and finished pieces are kept in DIR/raw: a comparison that was stopped goes on
where it was, and one that runs out of --seconds compares what there is.

The result has the form of compare.py's, plus `workload`, `floor_tok_per_s` (counted) and a row's
`notes`; report.py draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..planner.memory import GIB, MemoryReport, estimate_memory, measure_memory
from .compare import add_gaps, baseline_of, write_comparison
from .kernels import KernelsRed, require_green, verify
from .machine import describe_how, describe_machine
from .peers import OURS, PEERS, VARIANTS, Built, Variant
from .table import comparison_table
from .workloads import WORKLOADS, Workload, counted_floor

WARMUP, STEPS = 3, 6
TIMEOUT_S = 900
SAME = 0.01  # by which the peak of the timed steps may differ from the step that was looked into


# ---- in the process of one variant ----


def planned_for(variant: Variant, workload: Workload) -> MemoryReport:
    """What the planner says of one of our own variants on a GPU."""
    run = workload.run(
        variant.preset, steps=1, recompute=variant.recompute, recipe=variant.recipe
    )  # fmt: skip
    return estimate_memory(run, device="cuda")


def measure_variant(
    variant: Variant, workload: Workload, seed: int = 0, look: bool = True
) -> dict[str, Any]:
    """One repeat of one variant, in this process: a row without medians and gap.

    `look`: also ask the planner, and look into one step for its memory by category. That tells the
    same every time, so one repeat is enough.
    """
    begun = time.perf_counter()
    row: dict[str, Any] = {"name": variant.name, "status": "not run"}
    if reason := _why_not(variant, workload):
        return {**row, "reason": reason}
    if variant.preset and look:
        planned = planned_for(variant, workload)
        row["planned_bytes"] = planned.peak_bytes
        free, total = torch.cuda.mem_get_info()
        if not planned.fits(free / GIB):
            reason = f"needs {planned.peak_gib:.1f} GiB; {free / GIB:.1f} of {total / GIB:.1f} free"
            return {**row, "reason": reason}
    spent = {"plan": time.perf_counter() - begun}
    built = variant.build(workload, seed)
    spent["build"] = time.perf_counter() - begun
    notes = variant.wrong_versions()
    losses = [built.step() for _ in range(WARMUP)]
    spent["warm-up"] = time.perf_counter() - begun
    memory: dict[str, int] | None = None
    if look:
        seen: list[float] = []
        measured = measure_memory(lambda: seen.append(built.step()), built.model, built.optimizer)
        losses += seen
        memory = dict(measured.peak.by_category) or None
        notes += [measured.problem] if measured.problem else []
        row["peak_phase"] = measured.peak.phase
    times, peak, later = _time_steps(built)
    if memory is not None and abs(sum(memory.values()) - peak) > SAME * peak:
        notes.append(
            f"the step that was looked into peaked at {sum(memory.values()) / GIB:.2f} GiB, the "
            f"timed ones at {peak / GIB:.2f}: no split by category"
        )
        memory = None
    return {
        **row,
        "status": "ok",
        "reason": "",
        "notes": notes,
        "peak_bytes": peak,
        "memory": memory,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "step_ms_each": [1e3 * t for t in times],
        "tok_per_s_each": [workload.tokens / statistics.median(times)],
        "losses": losses + later,
        "seconds": {**spent, "all": time.perf_counter() - begun},
    }


def _why_not(variant: Variant, workload: Workload) -> str:
    """Why this variant cannot run on this workload here; empty where it can."""
    dense = counted_floor(workload) is not None
    if variant.dense and not dense:
        return f"{workload.model} is not a dense model"
    if variant.moe and dense:
        return f"{workload.model} is a dense model"
    return variant.missing()


def _time_steps(built: Built) -> tuple[list[float], int, list[float]]:
    """(seconds of each of STEPS steps, peak bytes, losses)."""
    # A CUDA graph is captured in the step after this line. That step allocates as every step does;
    # a replay allocates nothing that the allocator counts.
    torch.cuda.reset_peak_memory_stats()
    losses, times = [built.step()], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        losses.append(built.step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times, torch.cuda.max_memory_allocated(), losses


def _child(name: str, workload: Workload, out: Path, look: bool) -> int:
    try:
        row = measure_variant(VARIANTS[name], workload, look=look)
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        row = {"name": name, "status": "failed", "reason": reason}
    out.write_text(json.dumps(row), encoding="utf-8")
    return 0


# ---- in the process that compares ----


def contest(
    workload: Workload,
    variants: Sequence[Variant],
    *,
    repeats: int = 3,
    out: Path,
    seconds: float = math.inf,
    commit: str = "",
) -> dict[str, Any]:
    """Run what is not there yet in `out`/raw, and compare what is; nothing is started after
    `seconds`, and what is missing then is a row "not run".

    Raises KernelsRed before anything is timed. `commit` names the code where there is no git.
    """
    begun = time.monotonic()
    checked = verify()
    require_green(checked)
    _say(f"{len(checked)} kernels agree with their references [{time.monotonic() - begun:.0f} s]")
    raw = out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for repeat in range(repeats):
        for variant in variants:
            path = raw / f"{workload.name}-{_slug(variant.name)}-{repeat}.json"
            if not path.is_file() and time.monotonic() - begun <= seconds:
                _run_child(variant, workload, path, look=repeat == 0)
                row = json.loads(path.read_text("utf-8"))
                _say(f"{workload.name} {variant.name} ({repeat + 1} of {repeats}): {_brief(row)}")
    rows = [_merged(_read(raw, workload, v, repeats)) for v in variants]
    result = {
        "name": workload.name,
        "model": f"{workload.model}: {workload.summary}",
        "workload": {"batch": workload.batch, "length": workload.length},
        "baseline": baseline_of(rows),
        "memory_source": "allocator",
        "steps": STEPS,
        "tokens_per_step": workload.tokens,
        "repeats": repeats,
        "floor_tok_per_s": counted_floor(workload),
        "machine": describe_machine(),
        "how": {**describe_how(), **({"commit": commit} if commit else {})},
        "notes": [],
        "rows": rows,
        "seconds": time.monotonic() - begun,
    }
    add_gaps(result)
    write_comparison(result, out)
    return result


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _run_child(variant: Variant, workload: Workload, path: Path, look: bool) -> None:
    command = [sys.executable, "-m", "ottava.bench.contest", workload.name,
               "--child", variant.name, "--raw", str(path)]  # fmt: skip
    command += ["--look"] if look else []
    log = path.with_suffix(".log")
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                command, stdout=stream, stderr=stream, timeout=TIMEOUT_S, check=False
            ).returncode
            reason = f"its process ended with {code}; see {log.name}"
        except subprocess.TimeoutExpired:
            reason = f"took more than {TIMEOUT_S} s"
    if not path.is_file():
        row = {"name": variant.name, "status": "failed", "reason": reason}
        path.write_text(json.dumps(row), encoding="utf-8")


def _read(raw: Path, workload: Workload, variant: Variant, repeats: int) -> list[dict[str, Any]]:
    paths = [raw / f"{workload.name}-{_slug(variant.name)}-{r}.json" for r in range(repeats)]
    pieces = [json.loads(path.read_text("utf-8")) for path in paths if path.is_file()]
    missing = {"name": variant.name, "status": "not run", "reason": "the time was over"}
    return pieces or [missing]


def _brief(row: Mapping[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    speed = statistics.median(row["tok_per_s_each"])
    took = row.get("seconds", {}).get("all", math.nan)
    return f"{speed:,.0f} tok/s, peak {row['peak_bytes'] / 1e9:.2f} GB [{took:.0f} s]"


def _say(line: str) -> None:
    """Progress, a line at a time: these runs are long and often end up in a log file."""
    print(line, file=sys.stderr, flush=True)


def _merged(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row from a variant's repeats; a repeat that failed makes the whole row failed."""
    bad = [p for p in pieces if p["status"] != "ok"]
    if bad:
        return bad[0]
    row = dict(pieces[0])
    row["tok_per_s_each"] = [rate for p in pieces for rate in p["tok_per_s_each"]]
    row["tok_per_s"] = statistics.median(row["tok_per_s_each"])
    row["step_ms"] = statistics.median(ms for p in pieces for ms in p["step_ms_each"])
    row["peak_bytes"] = max(p["peak_bytes"] for p in pieces)
    row["notes"] = list(dict.fromkeys(note for p in pieces for note in p["notes"]))
    row |= {"final_loss": row["losses"][-1], "validation_loss": math.nan, "skipped": 0}
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """The command in the module docstring; 0 done, 1 failed or unfinished, 2 a wrong request."""
    parser = argparse.ArgumentParser(prog="python -m ottava.bench.contest")
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--peers", action="store_true", help="also run the other systems")
    parser.add_argument("--only", nargs="*", default=[], help="names of variants, or parts of them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this")
    parser.add_argument("--out", type=Path, help="folder; out/<workload> unless given")
    parser.add_argument("--commit", default="", help="names the code where there is no git")
    parser.add_argument("--child", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return _child(options.child, WORKLOADS[options.workload], options.raw, options.look)
    try:
        variants = choose(options.peers, options.only)
        workload = the_workload(options.workload)
        result = contest(
            workload, variants, repeats=options.repeats, seconds=options.seconds,
            out=options.out or Path("out") / workload.name, commit=options.commit,
        )  # fmt: skip
    except (ValueError, KernelsRed) as error:
        print(f"ottava: {error}", file=sys.stderr)
        return 1 if isinstance(error, KernelsRed) else 2
    Console(width=150).print(comparison_table(result))
    late = [row["name"] for row in result["rows"] if row.get("reason") == "the time was over"]
    if late:
        _say(f"ottava: not run, the time was over: {', '.join(late)}; the same command goes on")
    return 1 if late or any(row["status"] == "failed" for row in result["rows"]) else 0


def the_workload(name: str) -> Workload:
    """The workload called `name`. Raises ValueError for an unknown one, and without a GPU."""
    if name not in WORKLOADS:
        raise ValueError(f"workload: {name!r} is not one of {', '.join(WORKLOADS)}")
    if not torch.cuda.is_available():
        raise ValueError("workload: it is for a GPU, and torch finds none here")
    return WORKLOADS[name]


def choose(peers: bool, only: Sequence[str]) -> list[Variant]:
    """Our presets, and the peers if asked for, whose names hold one of `only` (all if empty).

    Raises ValueError when nothing is left.
    """
    pool = [*OURS, *(PEERS if peers else ())]
    chosen = [v for v in pool if not only or any(part in v.name for part in only)]
    if not chosen:
        names = ", ".join(v.name for v in pool)
        raise ValueError(f"--only: nothing is called {', '.join(only)}; choose from {names}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
