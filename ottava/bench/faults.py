"""Every fault that a run must survive, injected into a real one: `python -m ottava.bench.faults`.

    make faults          writes benchmarks/faults.md and benchmarks/raw/faults.json

Each line of the table is a run on the CPU that was started, harmed and, where that ended it, started
again by the same command. Its columns are read from what it left: what `ottava diagnose` said in the
meantime, how it ended, the steps that had to be computed again or went for nothing, and the
validation loss at the end beside that of the undisturbed run on the same data.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch

from .fault_list import Fault, faults
from .fault_outside import undisturbed_ranks
from .fault_runs import SAVE_EVERY, Case, make_run, write_data
from .machine import describe_machine

STEPS = 60
_LONG = 150  # steps of a run that is killed again and again
_OF_ITS_OWN = {  # settings of the undisturbed runs
    "undisturbed": {}, "long": {}, "two-ranks": {}, "delayed": {"precision": {"recipe": "delayed"}},
    "crowded": {"train": {"micro_batch": 64, "checkpoint_every": 2}},
}  # fmt: skip
_STEPS = {"long": _LONG, "crowded": 6}
_WORDS = {0: "done", 1: "ended with an error", 2: "refused", 143: "saved and stopped (143)",
          138: "saved and stopped (138)", -9: "killed"}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured line. `wrong`: what did not hold, or ""."""

    fault: str
    injected: str
    detected: str
    outcome: str
    lost: int
    loss: float | None
    undisturbed: float
    wrong: str
    seconds: float


def _references(folder: Path, needed: set[str]) -> dict[str, Case]:
    """The undisturbed runs that others are held against."""
    made = {}
    for name in sorted(needed):
        case = _case(folder, name, _STEPS.get(name, STEPS))
        case.change(**_OF_ITS_OWN[name])
        if name == "two-ranks":
            undisturbed_ranks(case)
        else:
            case.attempt()
        if case.loss is None or case.lost:
            raise RuntimeError(f"the undisturbed run {name!r} did not end well: {case.said}")
        made[name] = case
    return made


def _case(folder: Path, name: str, steps: int) -> Case:
    own = folder / name
    own.mkdir(parents=True)
    write_data(own / "data.jsonl")
    return Case(own, make_run(own, name, steps), random.Random(name))


def measure(fault: Fault, folder: Path, reference: Case) -> Row:
    """Inject one fault and read off what came of it."""
    begun = time.monotonic()
    case = _case(folder, fault.name, reference.run.train.steps)
    fault.act(case)
    same = case.weights() is not None and case.weights() == reference.weights()
    rules = [r for r in case.rules if r not in reference.rules]
    said = [s[:110] for s in dict.fromkeys(case.said)]
    return Row(
        fault=fault.name,
        injected=fault.injected,
        detected="; ".join([*rules, *said]),
        outcome=_outcome(case, same),
        lost=case.lost,
        loss=case.loss,
        undisturbed=reference.loss or math.nan,
        wrong=_wrong(fault, case, reference, same, bool(rules or said)),
        seconds=round(time.monotonic() - begun, 1),
    )


def _outcome(case: Case, same: bool) -> str:
    """How it went, in words, from exit codes and run.jsonl."""
    parts = []
    for code, group in groupby(case.codes):
        number = len(list(group))
        word = _WORDS.get(code, f"exit {code}")
        parts.append(word if number == 1 else f"{word} x{number}")
    text = [", ".join(parts)]
    if case.interrupted:
        text.append(f"{case.interrupted} of the kills left a half-written checkpoint")
    skipped = sum(x.get("stepped") is False for x in case.lines("step"))
    if skipped:
        text.append(f"{skipped} bad step{'s' * (skipped > 1)} changed nothing")
    for line, number in Counter(_healed(x) for x in case.lines("heal")).items():
        text.append(line + (f" (x{number})" if number > 1 else ""))
    notes = [n for x in case.lines("resume") for n in x.get("notes") or ()]
    text += ["an older checkpoint was taken"] if any("passed over" in n for n in notes) else []
    text += [x["text"] for x in case.lines("event")]
    return "; ".join(text) + ("; same bits as undisturbed" if same else "")


def _healed(line: dict) -> str:
    what = str(line.get("text", "")).rpartition("; ")[2]
    return f"went back from step {line['step']} to {line['to']}, {what}"


def _wrong(fault: Fault, case: Case, reference: Case, same: bool, noticed: bool) -> str:
    wrong = []
    if case.loss is None:
        return "the run did not get to its end"
    gap = case.loss / reference.loss - 1.0  # type: ignore[operator]
    if not gap <= fault.within:
        wrong.append(f"the loss is {gap:+.1%} off")
    if case.lost > fault.lost:
        wrong.append(f"{case.lost} steps lost, {fault.lost} allowed")
    if fault.same_bits and not same:
        wrong.append("the weights differ from the undisturbed run's")
    if fault.detected and not noticed:
        wrong.append("nobody noticed")
    return "; ".join(wrong)


def run_faults(names: set[str] | None, *, quick: bool, folder: Path) -> list[Row]:
    """Measure the faults named (all without), in `folder`; each row is printed when it is there."""
    chosen = [
        f
        for f in faults(4 if quick else 20)
        if (f.name in names if names else f.quick or not quick)
    ]
    references = _references(folder, {f.beside for f in chosen})
    rows = []
    for fault in chosen:
        row = measure(fault, folder, references[fault.beside])
        rows.append(row)
        gap = math.nan if row.loss is None else row.loss - row.undisturbed
        print(f"{row.fault:18}{row.lost:5} lost {gap:+8.4f}  {row.outcome[:90]}", flush=True)
        if row.wrong:
            print(f"    WRONG: {row.wrong} | {row.detected}", flush=True)
    return rows


def page(rows: list[Row], machine: dict, seconds: float) -> str:
    """The table as Markdown."""
    said = ", ".join(f"{k} {v}" for k, v in machine.items() if isinstance(v, str | int | float))
    lines = [
        "# Faults, injected and survived", "",
        "Written by `make faults`; nothing here is typed by hand. Each row is a run of "
        f"{STEPS} steps of a small MiMo-V2 (`fp8`; every 8-bit mechanism, about 50 thousand "
        f"parameters), saved every {SAVE_EVERY} steps, on the CPU.", "",
        "*Detected by*: rules of `ottava diagnose` that spoke, then the line that the run ended with. "
        "*Lost*: steps computed that are not part of the finished run, skipped ones included. "
        "*Loss*: validation loss after the last step, and beside it that of the run without a fault.",
        "", "| injected | detected by | outcome | steps lost | loss | undisturbed |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        loss = "none" if r.loss is None else f"{r.loss:.4f}"
        outcome = r.outcome + (f" **WRONG: {r.wrong}**" if r.wrong else "")
        cells = (r.injected, r.detected or "nobody, nothing to see", outcome, str(r.lost), loss)
        cells = tuple(c.replace("|", "\\|") for c in cells)
        lines.append(f"| {' | '.join(cells)} | {r.undisturbed:.4f} |")
    lines += ["", f"{len(rows)} faults in {seconds:.0f} s. {said}", ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m ottava.bench.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to inject; all unless given")
    parser.add_argument("--quick", action="store_true", help="a few of them, few kills")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="where to write")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {f.name for f in faults(1)}
    if unknown:
        known = ", ".join(f.name for f in faults(1))
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {known}")
    torch.set_num_threads(1)  # before anything forks
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="ottava-faults-"))
    try:
        rows = run_faults(set(options.names), quick=options.quick, folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - begun
    machine = describe_machine()
    (options.out / "raw").mkdir(parents=True, exist_ok=True)
    raw = {"machine": machine, "seconds": seconds, "rows": [asdict(r) for r in rows]}
    (options.out / "raw" / "faults.json").write_text(json.dumps(raw, indent=1, default=str) + "\n")
    (options.out / "faults.md").write_text(page(rows, machine, seconds))
    return int(any(r.wrong for r in rows))


if __name__ == "__main__":
    sys.exit(main())
