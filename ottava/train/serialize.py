"""Training state as JSON and safetensors: nothing is pickled, so nothing can be executed on load.

`flatten` splits nested state (an optimizer's `state_dict()`, random states, counters) into a JSON
skeleton and named tensors; `unflatten` puts it back, every type and bit as it was. Tensors are
written one at a time, so saving needs no second copy of the model in memory, and what is dequantized
for the file exists for one tensor at a time only.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy
import torch

from ..distributed.shards import Rows

# The safetensors names of the types that training state can hold.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `fetch()` returns it (any device) when its turn to be written comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """An entry for a tensor that exists already."""
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class Sink:
    """A file being written: counts its bytes and keeps their CRC-32."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.nbytes = 0
        self.crc32 = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`. Raises OSError, as the file does (ENOSPC when the disk is full)."""
        self.file.write(data)
        self.nbytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def write_tensors(
    sink: Sink, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises TypeError for a dtype the format has no name for."""
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for e in entries:
        if e.dtype not in _DTYPES:
            raise TypeError(f"{e.name}: {e.dtype} has no safetensors name")
        header[e.name] = {
            "dtype": _DTYPES[e.dtype],
            "shape": list(e.shape),
            "data_offsets": [offset, offset + e.nbytes],
        }
        offset += e.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    sink.write(struct.pack("<Q", len(text)) + text)
    for e in entries:
        tensor = e.fetch()
        if tensor.dtype != e.dtype or tuple(tensor.shape) != e.shape:
            raise TypeError(f"{e.name}: announced {e.dtype} {e.shape}, got {tensor.dtype}")
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            sink.write(memoryview(flat.cpu().numpy()))


def flatten(value: Any, name: str) -> tuple[Any, dict[str, torch.Tensor | Rows]]:
    """(JSON skeleton, tensors by path under `name`) of nested state.

    Takes dicts with any plain keys, lists, tuples, tensors, `Rows` of one (this rank's; the
    skeleton is that of the whole), dtypes, None, bool, int, float, str.
    Raises TypeError naming the path of anything else.
    """
    tensors: dict[str, torch.Tensor | Rows] = {}

    def walk(v: Any, path: str) -> Any:
        if isinstance(v, torch.Tensor | Rows):
            tensors[path] = v
            return {"$tensor": path}
        if isinstance(v, numpy.generic):
            v = v.item()
        if v is None or isinstance(v, bool | int | str):
            return v
        if isinstance(v, float):
            # JSON has no NaN or infinity
            return v if abs(v) < float("inf") else {"$float": repr(v)}
        if isinstance(v, torch.dtype):
            return {"$dtype": str(v).removeprefix("torch.")}
        if isinstance(v, tuple):
            return {"$tuple": [walk(x, f"{path}.{i}") for i, x in enumerate(v)]}
        if isinstance(v, list):
            return [walk(x, f"{path}.{i}") for i, x in enumerate(v)]
        if isinstance(v, dict):
            if all(isinstance(k, str) and not k.startswith("$") for k in v):
                return {k: walk(x, f"{path}.{k}") for k, x in v.items()}
            return {"$dict": [[walk(k, path), walk(x, f"{path}.{k}")] for k, x in v.items()]}
        raise TypeError(f"{path}: a {type(v).__name__} cannot be stored in a checkpoint")

    return walk(value, name), tensors


def unflatten(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state that `flatten` took apart. Raises KeyError when a tensor is missing."""
    if isinstance(skeleton, list):
        return [unflatten(x, tensors) for x in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        ((key, value),) = skeleton.items()
        if key == "$tensor":
            return tensors[value]
        if key == "$float":
            return float(value)
        if key == "$dtype":
            return getattr(torch, value)
        if key == "$tuple":
            return tuple(unflatten(x, tensors) for x in value)
        if key == "$dict":
            return {unflatten(k, tensors): unflatten(x, tensors) for k, x in value}
    return {k: unflatten(x, tensors) for k, x in skeleton.items()}
