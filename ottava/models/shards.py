"""Sharded safetensors files: every header checked before a byte of data is read, every byte read once.

The library's own reader maps whole files into memory; this one reads the tensor asked for and no
more, so that a checkpoint larger than the host's memory can pass through it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_MAX_HEADER = 1 << 28


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file. `offset`: bytes from the file's start."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shards:
    """The tensors of a folder by name. `entries`, `metadata` of the headers, `config` (config.json).

    Raises ValueError, one line: no such files, a file missing or truncated, a damaged header, an
    index that disagrees with the files, a tensor in two files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self._open: tuple[str, BinaryIO] | None = None
        if not self.folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        index = self.folder / INDEX
        listed = read_json(index).get("weight_map") if index.exists() else None
        if listed is not None and not isinstance(listed, dict):
            raise ValueError(f"{index}: weight_map is damaged")
        found = sorted(p.name for p in self.folder.glob("*.safetensors"))
        files = found if listed is None else sorted(set(listed.values()))
        if not files:
            raise ValueError(f"{folder}: holds no safetensors files")
        for file in files:
            self._read_header(file)
        for name in listed or ():
            if name not in self.entries or self.entries[name].file != listed[name]:
                raise ValueError(f"{folder}: the index puts {name!r} into {listed[name]}, wrongly")
        for name in self.entries if listed is not None else ():
            if name not in listed:
                raise ValueError(
                    f"{folder}: {name!r} in {self.entries[name].file} is not in the index"
                )
        config = self.folder / "config.json"
        self.config: dict[str, Any] = read_json(config) if config.exists() else {}

    def _read_header(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            raise ValueError(f"{self.folder}: shard {file} is missing")
        size = path.stat().st_size
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise ValueError(f"{path}: is truncated, or no safetensors file")
            try:
                header = json.loads(f.read(length))
                self.metadata |= header.pop("__metadata__", {})
                entries = {n: _entry(file, h, 8 + length) for n, h in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}: its header is damaged ({error})") from None
        end = max((e.offset + e.nbytes for e in entries.values()), default=8 + length)
        if size != end:
            what = "is truncated" if size < end else "has bytes that no tensor owns"
            raise ValueError(f"{path}: {what}: {size:,} bytes, its header says {end:,}")
        for name in entries:
            if name in self.entries:
                raise ValueError(
                    f"{self.folder}: {name!r} is in {self.entries[name].file} and in {file}"
                )
        self.entries |= entries

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU, in memory of its own. ValueError when the file has become shorter."""
        e = self.entries[name]
        if self._open is None or self._open[0] != e.file:
            self.close()
            self._open = e.file, (self.folder / e.file).open("rb")
        raw = torch.empty(e.nbytes, dtype=torch.uint8)
        if e.nbytes:
            file = self._open[1]
            file.seek(e.offset)
            if file.readinto(memoryview(raw.numpy())) != e.nbytes:
                raise ValueError(f"{self.folder / e.file}: is truncated in {name!r}")
        return raw.view(e.dtype).view(e.shape)

    def close(self) -> None:
        """Close the file read last."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _entry(file: str, header: Mapping[str, Any], base: int) -> Entry:
    start, stop = header["data_offsets"]
    entry = Entry(file, DTYPES[header["dtype"]], tuple(header["shape"]), base + start)
    if start < 0 or stop - start != entry.nbytes:
        raise ValueError("a tensor's size is not that of its shape")
    return entry


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, one line."""
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return value


class ShardWriter:
    """Writes tensors into the files they are assigned to, one whole file at a time, and the index."""

    def __init__(self, folder: Path, metadata: dict[str, str]) -> None:
        self.folder, self.metadata = folder, {"format": "pt", **metadata}
        self.weight_map: dict[str, str] = {}
        self.total_bytes = 0

    def write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write one shard. Raises OSError as the disk does."""
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, self.folder / file, self.metadata
        )
        self.weight_map |= dict.fromkeys(tensors, file)
        self.total_bytes += sum(t.nbytes for t in tensors.values())

    def finish(self) -> None:
        """Write the index, as `save_pretrained` does, where there is more than one file."""
        if len(set(self.weight_map.values())) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(self.weight_map.items())),
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
