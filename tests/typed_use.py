"""Code as users write it, for a type checker: `make types` says whether the public API checks.

Not a test: it is read, not run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import ottava
from ottava.config import Run, load_run
from ottava.train.trainer import Trainer


def own_loop(model: nn.Module, batch: torch.Tensor) -> dict[str, object]:
    plan = ottava.plan(model, recipe="tensor", keep=["*.o_proj"], first_last_high=True)
    converted: nn.Module = ottava.convert(model, plan, activations=torch.bfloat16)
    opt = ottava.AdamW(converted.parameters(), lr=1e-3, master="split16", states="8bit")
    average = ottava.EMA(converted, 0.999)
    scaler = ottava.GradScaler(init_scale=2.0**16, growth_interval=1000)
    with ottava.autocast(enabled=True):
        loss = converted(batch).square().mean()
    scaler.scale(loss).backward()
    ottava.clip_grad_norm_(converted.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    average.update()
    ottava.revert(converted)
    names: list[str] = [row.name for row in plan.rows]
    return {"fp8": plan.num_fp8, "names": names, "plan": plan.to_dict()}


def layers() -> nn.Module:
    return nn.Sequential(
        ottava.LayerNorm(64),
        ottava.Linear(64, 64, bias=False),
        ottava.RMSNorm(64),
        ottava.LayerNormLinear(64, 64),
        ottava.LayerNormMLP(64, 128),
    )


def policies() -> ottava.Policy:
    recipe = ottava.Recipe(name="mine", input=ottava.Cast(format="e4m3", granularity="row"))
    return ottava.Policy(name="mine", recipe=recipe, keep=("*.o_proj",))


def a_run() -> tuple[int, float]:
    run: Run = load_run("runs/demo.toml", ["train.steps=20"])
    result = Trainer(run).run(quiet=True)
    memory = ottava.estimate_memory(run, device="cpu")
    return result.step, memory.peak_gib


def check() -> int:
    """Pyright's verdict on this file and on the command line's options; 0 without errors."""
    root = Path(__file__).parents[1]
    command = [str(Path(sys.executable).with_name("pyright")), "--pythonpath", sys.executable]
    done = subprocess.run([*command, __file__], cwd=root, text=True, check=False)
    return done.returncode


if __name__ == "__main__" and "--check" in sys.argv:
    sys.exit(check())
