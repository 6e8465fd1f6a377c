"""All ranks write what they hold of a checkpoint at once; no rank ever holds the whole.

Every rank writes a file of its rows beside the checkpoints; when all are on the disk, rank 0 takes
them into the checkpoint that it writes, whose manifest lists them with size and sum. So this needs a
folder that all ranks see, and a run killed at any moment leaves the checkpoint whole or none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..distributed.shards import Rows
from ..distributed.strategy import Strategy
from .serialize import flatten
from .shard_files import file_name, write_rows

_WAITING = ".shards-"  # written by the ranks, in no checkpoint yet


@dataclass(frozen=True)
class Shards:
    """Files that wait for a checkpoint: where, and of each its size and CRC-32."""

    folder: Path
    sums: Mapping[str, Mapping[str, int]]

    def move_to(self, folder: Path) -> dict[str, dict[str, int]]:
        """Put the files into a checkpoint's folder; their sums. Raises OSError."""
        for name in self.sums:
            os.rename(self.folder / name, folder / name)
        self.folder.rmdir()
        return {name: dict(facts) for name, facts in self.sums.items()}


def write_shards(
    folder: Path, step: int, strategy: Strategy, sections: Mapping[str, Any], weights: Mapping
) -> Shards | None:
    """What ranks hold in part, of the sections and the weights, on the disk; None if nothing is.

    Every rank calls it. Raises OSError on all of them where one cannot write.
    """
    if not strategy.shares:
        return None
    rows = {}
    for name, value in sections.items():
        tensors = flatten(value, name)[1]
        rows |= {f"{name}/{k}": t for k, t in sorted(tensors.items()) if isinstance(t, Rows)}
    for name, w in weights.items():
        if isinstance(w, Rows):
            rows[f"model/{name}"] = w
        elif isinstance(w, Mapping):  # a split master
            rows |= {f"split/{name}.{k}": part for k, part in w.items()}
    place = strategy.on_main(_begin, folder, step)
    name, outcome = file_name(strategy.rank, strategy.world), None
    try:
        outcome = write_rows(place / name, rows)
    except OSError as e:
        outcome = e
    outcomes = strategy.collect(outcome)
    for failed in outcomes:
        if isinstance(failed, OSError):
            strategy.on_main(shutil.rmtree, place, ignore_errors=True)
            raise failed
    names = (file_name(rank, strategy.world) for rank in range(strategy.world))
    return Shards(place, dict(zip(names, outcomes, strict=True)))


def _begin(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{_WAITING}*"):
        shutil.rmtree(old, ignore_errors=True)
    place = folder / f"{_WAITING}{step:08d}"
    place.mkdir()
    return place
