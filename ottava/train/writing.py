"""Writing a checkpoint: everything that it holds is staged, then written under another name, checked,
flushed and renamed (see checkpoint.py for what is in it)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed.shards import Rows
from . import checkpoint
from .checkpoint import (
    PARTIAL,
    CheckpointError,
    checkpoints,
    manifest_crc,
    weight_entries,
)
from .serialize import Entry, Sink, flatten, write_tensors
from .shard_save import Shards


@dataclass(frozen=True)
class Staged:
    """A checkpoint that is about to be written: tensors and texts by file; `shards`: files that hold
    what ranks share, which are on the disk already."""

    tensors: Mapping[str, list[Entry]]
    texts: Mapping[str, bytes]
    shards: Shards | None = None

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for entries in self.tensors.values() for e in entries)


def stage(
    model: nn.Module,
    sections: Mapping[str, Any],
    *,
    whole: Mapping[str, Any] | None = None,
    shards: Shards | None = None,
    hold: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> Staged:
    """Everything that a checkpoint will hold. Of each tensor what `hold` gives is written: the
    tensor itself, or a copy where the run goes on meanwhile.

    `sections` maps a name to nested plain state (see `serialize.flatten`); `whole` what is written
    for weights that `model` holds in part; `shards` the files that hold what ranks share. Raises
    TypeError for state that cannot be stored.
    """
    plain, split, aliases = weight_entries(model, whole or {}, hold)
    files: dict[str, list[Entry]] = {"model": plain, "split": split}
    skeleton: dict[str, Any] = {"aliases": aliases}
    for name, value in sections.items():
        if name in files or name in skeleton:
            raise ValueError(f"section {name!r} is reserved")
        skeleton[name], tensors = flatten(value, name)
        # sorted: the order in which an optimizer met its parameters is no part of its state
        own = ((k, t) for k, t in sorted(tensors.items()) if not isinstance(t, Rows))
        files[name] = [Entry.of(k, hold(t)) for k, t in own]
    texts = {"state.json": json.dumps(skeleton, allow_nan=False).encode()}
    config = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        texts["config.json"] = config.to_json_string(use_diff=False).encode()
    return Staged(files, texts, shards)


def write(folder: str | Path, step: int, staged: Staged, *, keep_last: int = 2) -> Path:
    """Write the checkpoint of `step` and delete all but the last `keep_last`; returns its path.

    Raises CheckpointError when it cannot be written (disk full): the earlier checkpoints are then
    untouched and nothing of the new one is left.
    """
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    partial = folder / f"{PARTIAL}{final.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_partials(folder)
        partial.mkdir()
        _write_all(partial, step, staged)
        if final.exists():  # only after going back to an older checkpoint
            _discard(final)
        os.rename(partial, final)
        _sync_folder(folder)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_save(folder, step, e, staged.nbytes) from e
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for _, path in [c for c in checkpoints(folder) if c[0] <= step][keep_last:]:
        _discard(path)
    return final


def save(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module,
    sections: Mapping[str, Any],
    keep_last: int = 2,
    whole: Mapping[str, Any] | None = None,
    shards: Shards | None = None,
) -> Path:
    """`stage` and `write` in one: nothing is held twice in memory."""
    staged = stage(model, sections, whole=whole, shards=shards)
    return write(folder, step, staged, keep_last=keep_last)


def _write_all(folder: Path, step: int, staged: Staged) -> None:
    sums = staged.shards.move_to(folder) if staged.shards is not None else {}
    for name, entries in staged.tensors.items():
        if entries:
            with _file(folder / f"{name}.safetensors", sums) as sink:
                write_tensors(sink, entries)
    for name, text in staged.texts.items():
        with _file(folder / name, sums) as sink:
            sink.write(text)
    manifest = {"version": checkpoint.VERSION, "step": step, "files": sums}
    manifest["crc32"] = manifest_crc(manifest)
    with _file(folder / "manifest.json", {}) as sink:
        sink.write(json.dumps(manifest, indent=1).encode())
    _sync_folder(folder)


@contextmanager
def _file(path: Path, sums: dict[str, dict[str, int]]) -> Iterator[Sink]:
    """A file that is on the disk when the block ends, with its size and sum put into `sums`."""
    with open(path, "wb") as f:
        sink = Sink(f)
        yield sink
        f.flush()
        os.fsync(f.fileno())
    sums[path.name] = {"bytes": sink.nbytes, "crc32": sink.crc32}


def _sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(path: Path) -> None:
    """Delete a checkpoint so that a half-deleted one is never taken for one."""
    hidden = path.with_name(f"{PARTIAL}{path.name}-discarded-{os.getpid()}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_partials(folder: Path) -> None:
    for name in os.listdir(folder):
        if name.startswith(PARTIAL):
            shutil.rmtree(folder / name, ignore_errors=True)


def cannot_save(folder: Path, step: int, error: OSError, nbytes: int) -> CheckpointError:
    """The error that says why a checkpoint of `nbytes` is not written, and what is left."""
    earlier = [s for s, _ in checkpoints(folder)]
    intact = f"the checkpoint of step {earlier[0]} is intact" if earlier else "none exists yet"
    try:
        free = f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB free"
    except OSError:
        free = "the folder cannot be read"
    return CheckpointError(
        f"cannot save step {step} in {folder}: {error.strerror or error} ({free}; it takes "
        f"{nbytes / 2**30:.2f} GiB); {intact}"
    )
