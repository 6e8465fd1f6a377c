"""Where a step's time went: data, forward, backward, update.

On a GPU the marks are events in its stream, so a lap is what the device took for it, waits for
Python included. Only a step that is timed has them: reading them waits for the device once.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Laps:
    """`begin`, a `lap(name)` behind each part (again and again in a step), `finish` once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timed = False
        self._marks: list[tuple[str, Any]] = []

    def begin(self, *, timed: bool) -> None:
        """Start a step that is timed, or one that is not and costs nothing."""
        self.timed, self._marks = timed, []
        self.lap("")

    def lap(self, name: str) -> None:
        """What ran since the last mark was `name`."""
        if not self.timed:
            return
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((name, mark))

    def finish(self) -> dict[str, float] | None:
        """Milliseconds by name; None for a step that was not timed. Waits for the device."""
        if not self.timed:
            return None
        self.lap("other")
        if self.device.type == "cuda":
            self._marks[-1][1].synchronize()
        out: dict[str, float] = {}
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            ms = (
                before.elapsed_time(after) if self.device.type == "cuda" else 1e3 * (after - before)
            )
            out[name] = out.get(name, 0.0) + ms
        self.timed = False  # what runs again after the step is no part of it
        return {name: float(f"{ms:.4g}") for name, ms in out.items()}
