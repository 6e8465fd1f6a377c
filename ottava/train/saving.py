"""Saving a trainer: at once, or behind the run's back.

With train.save=background everything that a checkpoint holds is copied to the host between two steps
and written by a thread while the run goes on: checksummed, flushed and renamed as ever, so a process
killed at any moment leaves the whole new checkpoint or the one before. The next save waits for the
last. What went wrong with a write is raised at the step after, and nothing older is deleted before a
newer one is whole. Costs the state once more in host memory. Files of what ranks hold in shares are
written at once, by all of them; the rest follows.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import resume, writing
from .checkpoint import whole_weights
from .shard_save import Shards, write_shards

if TYPE_CHECKING:
    from .trainer import Trainer


class Saver:
    """Writes checkpoints, one at a time. `pending`: one is being written; the same on all ranks."""

    def __init__(self, *, background: bool) -> None:
        self.background = background
        self.pending = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: list[torch.Tensor] = []  # pinned, kept between saves

    def save(self, trainer: Trainer) -> Path:
        """Write the checkpoint of a trainer between two steps, or begin to; its path. All ranks call
        it. Raises CheckpointError, also for the save before."""
        self.wait(trainer)
        sections = resume.collect(trainer)
        whole = whole_weights(trainer.model, trainer.strategy.whole)
        folder, step = trainer.checkpoints, trainer.step
        try:
            shards = write_shards(folder, step, trainer.strategy, sections, whole)
        except OSError as e:
            nbytes = sum(p.nbytes for p in trainer.model.parameters())
            raise writing.cannot_save(folder, step, e, nbytes) from e
        path = trainer.strategy.on_main(self._save, trainer, sections, whole, shards)
        self.pending = self.background
        return path

    def poll(self, trainer: Trainer) -> None:
        """Raise what went wrong with a write that has ended. All ranks call it, once a step."""
        if self.pending and trainer.strategy.on_main(self._ended):
            self.wait(trainer)

    def wait(self, trainer: Trainer) -> None:
        """Wait for the write that is under way. Raises CheckpointError where it failed."""
        if self.pending:
            self.pending = False
            trainer.strategy.on_main(self._join)

    def finish_alone(self) -> BaseException | None:
        """Wait for a write of this rank, whatever the others do; what went wrong with it."""
        self.pending = False
        try:
            self._join()
        except Exception as error:
            return error
        return None

    # ---- on the rank that writes ----

    def _save(self, trainer: Trainer, sections: dict, whole: dict, shards: Shards | None) -> Path:
        folder, step, keep = trainer.checkpoints, trainer.step, trainer.config.train.keep_last
        if not self.background:
            staged = writing.stage(trainer.model, sections, whole=whole, shards=shards)
            return writing.write(folder, step, staged, keep_last=keep)
        copies = _Copies(self._buffers)
        staged = writing.stage(
            trainer.model, sections, whole=whole, shards=shards, hold=copies.take
        )
        copied = copies.end(trainer.device)
        self._thread = threading.Thread(
            target=self._write, args=(folder, step, staged, keep, copied), name="checkpoint"
        )
        self._thread.start()
        return folder / f"step-{step:08d}"

    def _write(self, folder: Path, step: int, staged, keep: int, copied) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            writing.write(folder, step, staged, keep_last=keep)
        except BaseException as error:  # raised where the run notices it
            self._error = error

    def _ended(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error


class _Copies:
    """Host copies of tensors, each once; of a GPU's into pinned memory, without waiting: what the
    stream does next to a tensor comes after its copy."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.used = buffers, 0
        self._taken: dict[tuple, torch.Tensor] = {}

    def take(self, t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        key = (t.data_ptr(), t.dtype, tuple(t.shape), t.stride())
        if key not in self._taken or not t.numel():
            self._taken[key] = self._copy(t)
        return self._taken[key]

    def _copy(self, t: torch.Tensor) -> torch.Tensor:
        if t.device.type != "cuda":
            return torch.clone(t, memory_format=torch.contiguous_format)
        place = self.buffers[self.used] if self.used < len(self.buffers) else None
        if place is None or (place.shape, place.dtype) != (t.shape, t.dtype):
            place = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self.buffers[self.used : self.used + 1] = [place]
        self.used += 1
        return place.copy_(t, non_blocking=True)

    def end(self, device: torch.device) -> torch.cuda.Event | None:
        """What the writer waits for before it reads the copies."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event
