"""What PyTorch's memory viewer (pytorch.org/memory_viz) reads: who allocated what, on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

FILE = "memory.pickle"  # the viewer's format; nothing of ours reads it
_ALLOCATIONS = 200_000


def begin_history() -> None:
    """Remember allocations, with where they were made, from now on."""
    torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)


def end_history(folder: Path) -> Path:
    """Write what was remembered into `folder`, and forget it."""
    path = folder / FILE
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    return path
