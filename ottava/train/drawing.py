"""Batches, drawn with a limit on how long that may take, so that a hung loader is named."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from .forward import Batch


class LoaderHangs(RuntimeError):
    """The data loader did not come back. Carries one line."""


class Drawer:
    """Draws from `batches` in a thread of its own, only when asked to; the thread is left behind
    where it hangs. `seconds`: the limit for one batch."""

    def __init__(self, batches: Iterator[Batch], seconds: float, source: str) -> None:
        self.batches, self.seconds, self.source = batches, seconds, source
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._drawn: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def draw(self) -> Batch:
        """The next batch. Raises what the loader raises, and LoaderHangs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
            self._thread.start()
        self._asked.put(True)
        try:
            drawn = self._drawn.get(timeout=self.seconds)
        except queue.Empty:
            raise LoaderHangs(
                f"the data loader gave no batch for {self.seconds:g} s ({self.source}): its disk or "
                "its network does not answer; the same command continues from the newest "
                "checkpoint; train.data_timeout_s allows more"
            ) from None
        if isinstance(drawn, BaseException):
            raise drawn
        return drawn

    def _work(self) -> None:
        while self._asked.get():
            try:
                self._drawn.put(next(self.batches))
            except BaseException as error:
                self._drawn.put(error)
