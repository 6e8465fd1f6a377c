"""Files into which each rank writes the rows that it holds, and from which any rank reads rows.

    shard-00001-of-00002.safetensors     tensors by <section>/<name>: rank 0's rows of each

Plain safetensors. Its metadata says where in the whole tensor each piece begins, as PyTorch's
distributed checkpoints say it: `torch.distributed.checkpoint.load` with its HuggingFaceStorageReader
reads a checkpoint's folder on any number of ranks, as does what is here. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..distributed.shards import Rows
from ..kernels.split import unpack_split
from .serialize import DTYPE_OF, Entry, Sink, write_tensors

_OFFSETS = "DCP_SHARDING_INFO"  # the names that PyTorch gives them
_SAVED = "saved_offsets"


def file_name(rank: int, world: int) -> str:
    return f"shard-{rank + 1:05d}-of-{world:05d}.safetensors"


def write_rows(path: Path, rows: Mapping[str, Rows]) -> dict[str, int]:
    """Write this rank's rows, those that are none left out, to the disk; size and CRC-32 of the
    file. Raises OSError."""
    present = {name: r for name, r in rows.items() if r.values.numel()}
    begins = {n: {_SAVED: [r.begin] + [0] * (len(r.shape) - 1)} for n, r in present.items()}
    metadata = {_OFFSETS: json.dumps(begins), "DCP_VERSION": "1.0"}
    with open(path, "wb") as f:
        sink = Sink(f)
        write_tensors(sink, [Entry.of(n, r.values) for n, r in present.items()], metadata)
        f.flush()
        os.fsync(f.fileno())
    return {"bytes": sink.nbytes, "crc32": sink.crc32}


class Stored:
    """A tensor in files, whole or in pieces by rows. `t[a:b]` reads rows, `t[:]` all of it."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, Any]] = []  # begin, end, what reads a slice

    def add(self, begin: int, piece: Any) -> None:
        shape = piece.get_shape()
        self._pieces.append((begin, begin + (shape[0] if shape else 1), piece))
        self._pieces.sort(key=lambda p: p[0])
        end = self._pieces[-1][1]
        self.shape = torch.Size((end, *shape[1:]) if shape else ())
        self.dtype = DTYPE_OF[piece.get_dtype()]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        if not self.shape:
            return self._pieces[0][2][...]
        begin, end, _ = rows.indices(self.shape[0])
        found = [
            piece[max(begin - first, 0) : min(end, last) - first]
            for first, last, piece in self._pieces
            if first < end and begin < last
        ]
        if not found:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return found[0] if len(found) == 1 else torch.cat(found)


class StoredMaster:
    """The values, FP32, of a split master in files; read as a `Stored` is."""

    dtype = torch.float32

    def __init__(self, codes: Stored, residual: Stored, scale: Stored | None) -> None:
        self.codes, self.residual, self.scale = codes, residual, scale
        self.shape = codes.shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        scale = self.scale
        if scale is not None:
            scale = scale[rows] if len(scale.shape) == 3 else scale[:]
        return unpack_split(self.codes[rows], self.residual[rows], scale, torch.float32)


def stored_in(files: Iterable[Path], section: str) -> dict[str, Stored]:
    """Every tensor of a section in a checkpoint's files: its own, and shards. Raises SafetensorError.

    Of a split master in shards, "model" has the values too.
    """
    found: dict[str, Stored] = {}
    for file in sorted(files):
        own = file.stem == section
        if not own and not file.name.startswith("shard-"):
            continue
        handle = safe_open(file, framework="pt")
        begins = json.loads((handle.metadata() or {}).get(_OFFSETS, "{}"))
        for key in handle.keys():  # noqa: SIM118
            name = key if own else key.removeprefix(f"{section}/")
            if own or name != key:
                begin = begins.get(key, {}).get(_SAVED) or [0]
                found.setdefault(name, Stored()).add(begin[0], handle.get_slice(key))
    if section == "model":
        parts = stored_in([f for f in files if f.name.startswith("shard-")], "split")
        for key in parts:
            if key.endswith(".codes"):
                name = key.removesuffix(".codes")
                of = {k: parts.get(f"{name}.{k}") for k in ("residual", "scale")}
                found[name] = StoredMaster(parts[key], **of)
    return found
