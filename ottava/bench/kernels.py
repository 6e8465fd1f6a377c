"""Each kernel on its own: right first, then how fast, and how much of what the card can do.

A case is checked by the same public call on the GPU and on the CPU (the reference) with the same
inputs, at a small odd size. If any case disagrees no speed is printed. Then it is timed at W1's
sizes: L2 flushed before every call, median of REPEATS. Ceilings (copy bandwidth, BF16 and FP8 GEMM)
are measured in the same process.

    python -m ottava.bench.kernels [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..numerics.formats import error_db
from .kernel_cases import CASES, Case, Tensors
from .machine import describe_how, describe_machine

REPEATS = 20
FLUSH_BYTES = 512 << 20
GOAL = 0.85  # of copy bandwidth, for kernels that only move bytes


@dataclass(frozen=True)
class Checked:
    """One case against its reference. `db`: the worst output's signal-to-noise ratio."""

    name: str
    db: float
    limit: float
    error: str = ""

    @property
    def green(self) -> bool:
        """Whether the case may be timed."""
        return not self.error and self.db >= self.limit


class KernelsRed(RuntimeError):
    """A kernel disagrees with its reference; no speed may be printed."""


def verify(cases: Sequence[Case] = CASES, device: str = "cuda") -> list[Checked]:
    """Check every case on `device` against the CPU reference."""
    return [_check(case, device) for case in cases]


def require_green(checked: Sequence[Checked]) -> None:
    """Raise KernelsRed naming what disagrees."""
    red = [c for c in checked if not c.green]
    if red:
        what = "; ".join(
            f"{c.name}: {c.error or f'{c.db:.1f} dB, at least {c.limit:.0f} wanted'}" for c in red
        )
        raise KernelsRed(
            f"{len(red)} of {len(checked)} kernels disagree with the reference: {what}"
        )


def _check(case: Case, device: str) -> Checked:
    inputs = case.make(case.small, torch.Generator().manual_seed(0))
    there = {k: v.to(device, copy=True) for k, v in inputs.items()}
    try:
        want = case.call(inputs)
        got = case.call(there)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Checked(case.name, 0.0, case.limit_db, f"{type(error).__name__}: {lines[0]}")
    if len(want) != len(got):
        return Checked(case.name, 0.0, case.limit_db, "another number of outputs")
    worst = float("inf")
    for one, other in zip(want, got, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return Checked(case.name, 0.0, case.limit_db, "another shape or dtype")
        worst = min(worst, error_db(one.float(), other.cpu().float()))
    return Checked(case.name, worst, case.limit_db)


class Clock:
    """Times calls on the GPU with a cold L2."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def median_us(self, call: Callable[[], Any]) -> float:
        """Median over REPEATS, in microseconds of GPU time."""
        for _ in range(3):
            call()
        times = []
        for _ in range(REPEATS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The flush also keeps the GPU busy while the CPU submits the call.
            self._flush.zero_()
            self._flush.zero_()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop))
        return statistics.median(times)


def ceilings(clock: Clock) -> dict[str, float]:
    """Measured rates of this card: "copy" in bytes/s, "bf16" and "fp8" in FLOP/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / clock.median_us(lambda: target.copy_(source)) * 1e6
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    flops = 2.0 * n**3
    rates = {"copy": copy, "bf16": flops / clock.median_us(lambda: a @ a.t()) * 1e6}
    if torch.cuda.get_device_capability() >= (8, 9):
        codes, one = a.to(torch.float8_e4m3fn), torch.ones(1, device="cuda")

        def multiply():
            return torch._scaled_mm(
                codes, codes.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        rates["fp8"] = flops / clock.median_us(multiply) * 1e6
    return rates


def time_case(case: Case, clock: Clock, rates: dict[str, float]) -> dict[str, Any]:
    """One row: microseconds, rate, and share of the ceiling that bounds the case."""
    inputs: Tensors = {
        k: v.to("cuda") for k, v in case.make(case.large, torch.Generator().manual_seed(0)).items()
    }
    us = clock.median_us(lambda: case.call(inputs))
    work = case.work(case.large)
    rate = work / us * 1e6
    ceiling = rates.get(case.bound)
    return {
        "name": case.name,
        "size": "x".join(map(str, case.large)),
        "us": us,
        "bound": case.bound,
        "rate": rate / 1e12,
        "unit": "TB/s" if case.bound == "copy" else "TFLOP/s",
        "share": rate / ceiling if ceiling else None,
        "note": case.note,
    }


def run(only: Sequence[str] = ()) -> dict[str, Any]:
    """Check, then time. Raises KernelsRed, or RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("kernels: nothing to time without a GPU (the tests check them on a CPU)")
    cases = [c for c in CASES if not only or any(part in c.name for part in only)]
    if not cases:
        raise ValueError(f"kernels: none is called {', '.join(only)}")
    checked = verify(cases)
    require_green(checked)
    clock = Clock()
    rates = ceilings(clock)
    rows = []
    for case, check in zip(cases, checked, strict=True):
        rows.append({**time_case(case, clock, rates), "db": min(check.db, 999.0)})
        torch.cuda.empty_cache()
    measured = {k: v / 1e12 for k, v in rates.items()}
    return {
        "rows": rows,
        "ceilings": measured,
        "machine": describe_machine(),
        "how": describe_how(),
    }


def kernel_table(result: dict[str, Any]) -> Table:
    """What is printed."""
    rates = ", ".join(f"{k} {v:.2f}" for k, v in result["ceilings"].items())
    table = Table(title=f"ceilings (T/s): {rates}", title_justify="left", box=None, pad_edge=False)
    for name in ("kernel", "size", "us", "rate", "of ceiling", "dB", "note"):
        table.add_column(name, justify="left" if name in ("kernel", "note") else "right")
    for row in result["rows"]:
        share = row["share"]
        text = "-" if share is None else f"{share:.0%}"
        if share is not None and row["bound"] == "copy" and share < GOAL:
            text += " (below)"
        table.add_row(
            row["name"], row["size"], f"{row['us']:.1f}", f"{row['rate']:.2f} {row['unit']}", text,
            "exact" if row["db"] >= 999 else f"{row['db']:.0f}", row["note"],
        )  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """The command in the module docstring; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ottava.bench.kernels")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of names")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args(arguments)
    try:
        result = run(options.only)
    except (RuntimeError, ValueError) as error:
        print(f"ottava: {error}", file=sys.stderr)
        return 1 if isinstance(error, KernelsRed) else 2
    Console(width=130).print(kernel_table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
