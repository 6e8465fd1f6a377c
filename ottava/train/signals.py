"""What a run does when it is told to stop.

Ctrl-C (SIGINT) once, SIGTERM, or SIGUSR1 (what schedulers send before a job's time is over): the
running step finishes, a checkpoint is saved, the run ends. Ctrl-C twice: the process exits at once;
the last checkpoint on the disk is whole (see checkpoint.py). Exit codes: 130 after Ctrl-C, 143 after
SIGTERM, 138 after SIGUSR1, as shells report them; the same command then continues the run.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from ..distributed.strategy import Strategy

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}


def agreed(requested: str | None, strategy: Strategy) -> str | None:
    """The signal that asked any rank to stop, the same on all ranks: they stop after one step."""
    names = [*EXIT_CODES, None]
    return names[strategy.first(names.index(requested))]


class StopRequest:
    """Context manager; `requested` names the signal that asked the run to stop, or is None.

    The handlers that were installed before come back on exit. Outside the main thread, where
    Python allows no handlers, it installs none.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in map(signal.Signals.__getitem__, EXIT_CODES):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested == name == "SIGINT":
            # not an exception: a kernel or a file being written must not delay it
            os.write(2, b"\nexiting at once\n")
            os._exit(EXIT_CODES[name])
        self.requested = name
        os.write(
            2,
            f"\n{name}: finishing this step, then saving (Ctrl-C again exits at once)\n".encode(),
        )
