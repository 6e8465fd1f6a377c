"""`ottava train --profile`: a few steps in full view, then the run goes on as ever.

Writes into <run>/profile: trace.json (torch.profiler, for Perfetto or chrome://tracing), breakdown.json
and breakdown.txt (time by group, slowest rows, what to do), and on a GPU what PyTorch's memory viewer
reads. Under `nsys profile` the rows are NVTX ranges.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..monitor.breakdown import Breakdown, breakdown
from ..monitor.ranges import PART, RowRanges
from ..monitor.snapshot import begin_history, end_history

if TYPE_CHECKING:
    from .trainer import Trainer

WARMUP = 3  # steps before: states are made, kernels compiled
STEPS = 3


class Profile:
    """Profiles STEPS steps of a trainer after WARMUP. `made`: what came of it, once it is there."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.folder = trainer.strategy.folder(trainer.config.out) / "profile"
        left = trainer.config.train.steps - trainer.step
        self.steps = min(STEPS, max(left - WARMUP, 1))
        self.begin_at = trainer.step + min(WARMUP, max(left - self.steps, 0))
        self.made: Breakdown | None = None
        self._profiler: profile | None = None
        self._seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around every step of the run."""
        if self.made is None and self._profiler is None and self.trainer.step >= self.begin_at:
            self._begin()
        if self._profiler is None:
            yield
            return
        begun = time.perf_counter()
        with record_function(f"{PART}other"):
            yield
        self._wait()
        self._seconds.append(time.perf_counter() - begun)
        if len(self._seconds) == self.steps:
            self._end()

    def _wait(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)

    def _begin(self) -> None:
        t, on_gpu = self.trainer, self.trainer.device.type == "cuda"
        self._ranges = RowRanges(t.model, t.plan, nvtx=on_gpu)
        self._put_back = [
            _in_range(t._drawer, "draw", "data"),
            _in_range(t, "loss_of", "forward"),
            _in_range(t.strategy, "backward", "backward", self._ranges.end_backward),
            _in_range(t.strategy, "step", "update"),
        ]
        if on_gpu:
            begin_history()
        self._wait()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=kinds, profile_memory=True)
        self._profiler.start()

    def _end(self) -> None:
        t, profiler = self.trainer, self._profiler
        profiler.stop()
        self._profiler = None
        for put_back in self._put_back:
            put_back()
        self._ranges.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json"))
        if t.device.type == "cuda":
            end_history(self.folder)
        train = t.config.train
        self.made = breakdown(
            profiler.events(), t.switches.plan_at(t.step - 1), steps=self.steps,
            step_ms=1e3 * sum(self._seconds) / self.steps, device=t.device.type,
            settings={"micro_batch": train.micro_batch, "accumulate": train.accumulate,
                      "recompute": train.recompute, "graph": train.graph,
                      "shuffle": t.config.data.shuffle},
        )  # fmt: skip
        text = json.dumps(self.made.to_dict(), indent=1)
        (self.folder / "breakdown.json").write_text(text + "\n", encoding="utf-8")
        (self.folder / "breakdown.txt").write_text("\n".join(self.lines()) + "\n", encoding="utf-8")

    def lines(self) -> list[str]:
        """What to say when it is done."""
        files = sorted(p.name for p in self.folder.iterdir())
        return [*self.made.lines(), f"profile: {self.folder} ({', '.join(files)})"]


def _in_range(owner: Any, name: str, part: str, then: Any = None) -> Any:
    """Run a method in a range "part:<part>"; what puts it back as it was."""
    method = getattr(owner, name)

    @wraps(method)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(PART + part):
            result = method(*args, **kwargs)
        if then is not None:
            then()
        return result

    had = vars(owner).get(name)
    setattr(owner, name, ranged)
    return lambda: setattr(owner, name, had) if had is not None else delattr(owner, name)
