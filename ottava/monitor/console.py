"""What a run shows while it runs: a start-up summary, a progress bar, one line per event.

On a terminal the bar is redrawn in place; elsewhere (a log file) a fixed-width line is printed
every few seconds. Text that comes from files is printed as text, never as markup.
"""

from __future__ import annotations

import time
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 5.0


def changed_options(section: Any, prefix: str = "") -> list[str]:
    """`section.key=value` for every option of a run that is not at its default."""
    out = []
    for f in fields(section):
        value, name = getattr(section, f.name), prefix + f.name
        if is_dataclass(value):
            out += changed_options(value, f"{name}.")
        elif f.default != value and (not callable(f.default_factory) or value):
            out.append(f"{name}={value}")
    return out


def status(line: dict[str, Any], speed_name: str) -> str:
    """One fixed-width line from a step's metrics (see metrics.py)."""
    norm = line["grad_norm"]
    parts = [
        f"loss {line['loss']:8.4f}",
        f"grad {norm:8.3g}" if norm is not None else "grad    fused",
        f"lr {line['lr']:.2e}",
        f"{line['tok_per_s']:>9,.0f} tok/s",
        f"{line['percent']:5.1f}% of {speed_name}",
        f"{line['memory_gib']:6.2f} GiB",
    ]
    if not line["stepped"]:
        parts.append(f"SKIPPED ({line['cause']})")
    return "  ".join(parts)


class RunConsole:
    """Context manager that shows one run of `steps` steps. `quiet` shows nothing."""

    def __init__(self, steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.steps = steps
        self._live = self.console.is_terminal and not quiet
        self._printed = 0.0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("train", total=steps, status="")

    def __enter__(self) -> RunConsole:
        self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        self.console.print(text, markup=False)

    def step(self, number: int, line: dict[str, Any], speed_name: str) -> None:
        """Show that step `number` is done. A step that was skipped is always printed."""
        text = status(line, speed_name)
        if self._live:
            self._bar.update(self._task, completed=number, status=text)
        now = time.monotonic()
        due = not self._live and (now - self._printed >= LINE_SECONDS or number == self.steps)
        if due or not line["stepped"]:
            self._printed = now
            self.say(f"step {number:>7}/{self.steps}  {text}")
