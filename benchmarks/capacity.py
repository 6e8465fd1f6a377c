"""What fits on one GPU: whole training steps of large models, under a limit of memory.

    python benchmarks/capacity.py [CASE ...] [--json FILE]     # every case if none

Each case trains a few steps of random tokens in a process of its own, with the allocator held to the
case's limit, and prints the planner's peak beside the measured one. Exit code 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

GB = 1e9
STEPS = 4


@dataclass(frozen=True)
class Case:
    """One model and one step's shape. `limit`: GB that PyTorch's allocator may hold (0: all)."""

    model: str
    preset: str = "fp8-lean"
    batch: int = 1
    length: int = 4096
    recompute: str = "layer"
    moments_on: str = "device"
    limit: float = 0.0
    steps: int = STEPS


CASES = {
    "32b": Case("qwen2.5-32b"),
    "7b in 40 GB": Case("qwen2.5-7b", limit=40),
    "7b in 24 GB": Case("qwen2.5-7b", limit=24, moments_on="host"),
    "7b, 64k tokens": Case("qwen2.5-7b", length=65_536, steps=2),
    "7b, 64k tokens, bf16": Case("qwen2.5-7b", preset="bf16", length=65_536, steps=2),
    "7b, 128k tokens": Case("qwen2.5-7b", length=131_072, steps=2),
}


def run_of(case: Case):
    """The case as a run: AdamW, constant lr 1e-4, no clipping, launched steps."""
    from ottava.config import Data, Model, Monitor, Optimizer, Run, Train

    return Run(
        name="capacity",
        device="cuda",
        model=Model(name=case.model, overrides={"max_position_embeddings": max(32_768, case.length)}),
        data=Data(source="random", sequence_length=case.length, document_mask=False),
        train=Train(
            preset=case.preset, steps=1000, micro_batch=case.batch, recompute=case.recompute,
            eval_batches=0, resume="never", graph="off",
        ),
        optimizer=Optimizer(lr=1e-4, schedule="constant", moments_on=case.moments_on),
        monitor=Monitor(every=0),
    ).check()  # fmt: skip


def measure(case: Case) -> dict:
    """Train the case in this process: planned and measured peaks, seconds a step, losses."""
    import torch

    from ottava.planner.memory import estimate_memory
    from ottava.train.trainer import Trainer

    run = run_of(case)
    planned = estimate_memory(run, device="cuda").peak_bytes
    total = torch.cuda.get_device_properties(0).total_memory
    if case.limit:
        torch.cuda.set_per_process_memory_fraction(case.limit * GB / total)
    begun = time.perf_counter()
    trainer = Trainer(run, device="cuda")
    torch.cuda.synchronize()
    out = {"planned_gb": planned / GB, "build_s": time.perf_counter() - begun,
           "build_peak_gb": torch.cuda.max_memory_allocated() / GB}  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for _ in range(case.steps):
        begun = time.perf_counter()
        losses.append(trainer.step_once().loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated()
    return {
        **out,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "peak_gb": peak / GB,
        "reserved_gb": torch.cuda.max_memory_reserved() / GB,
        "planned_off": planned / peak - 1,
        "step_s": min(seconds[1:]),
        "tok_per_s": case.batch * case.length / min(seconds[1:]),
        "losses": losses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(CASES[options.child])))
        return 0
    if unknown := set(options.names) - set(CASES):
        parser.error(f"{min(unknown)!r} is not one of {', '.join(CASES)}")
    rows, bad = {}, 0
    for name in options.names or CASES:
        command = [sys.executable, __file__, "--child", name]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            bad += 1
            why = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
            rows[name] = {"failed": why}
            print(f"{name:24} FAILED: {why}", flush=True)
            continue
        row = rows[name] = json.loads(lines[-1])
        print(
            f"{name:24} {row['parameters'] / 1e9:6.2f} B  planned {row['planned_gb']:7.2f} GB  "
            f"peak {row['peak_gb']:7.2f} GB ({row['planned_off']:+.1%})  reserved "
            f"{row['reserved_gb']:7.2f}  {row['step_s']:6.2f} s/step  {row['tok_per_s']:8,.0f} tok/s  "
            f"loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
