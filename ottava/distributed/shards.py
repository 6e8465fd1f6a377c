"""Tensors of which every rank holds some rows: which ones, and the way back to whole tensors.

Rows are shared as `torch.chunk` does: ceil(rows / ranks) for each rank until none are left. So the
shares, one after the other, are the whole, under any number of ranks: what a checkpoint holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..kernels.moments import GROUP

_GROUPED = ("m_scale", "v_range")  # optimizer state with a row for each group of 128 elements


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a tensor of which ranks hold some each: from `begin` on, out of `shape`."""

    values: torch.Tensor
    begin: int
    shape: torch.Size


def rows_of(t: torch.Tensor) -> Rows:
    """This rank's rows of a sharded DTensor. Of what all ranks hold the first one has all rows, and
    the others none; so have replicas of a rank."""
    if not isinstance(t, DTensor):
        return Rows(t if dist.get_rank() == 0 else t[:0], 0, t.shape)
    begin = cut(t)[1] * _share(t)
    return Rows(t._local_tensor if writes(t) else t._local_tensor[:0], begin, t.shape)


def writes(t: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same rows."""
    mesh = t.device_mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def rows_of_state(name: str, p: torch.Tensor, value: Any) -> Any:
    """One value of `p`'s optimizer state as `Rows`; itself where it is not shared out."""
    units = _units(name, p, value)
    if units is None:
        return value
    rows, share = units
    shape = torch.Size((rows, *value.shape[1:]))
    return Rows(value if writes(p) else value[:0], cut(p)[1] * share, shape)


def shared(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, or one in files, as `like` is: this rank's rows of it as a DTensor, or itself."""
    if not isinstance(like, DTensor):
        return value if isinstance(value, torch.Tensor) else value[:]
    share, (_, rank) = _share(like), cut(like)
    rows = value[rank * share : (rank + 1) * share]
    return from_rows(rows.to(like.device, copy=True).contiguous(), like)


def from_rows(rows: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's rows of something with as many rows as `like`, shared out as that is."""
    shape = torch.Size((like.shape[0], *rows.shape[1:]))
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=shape, stride=tuple(stride)
    )


def cut(p: DTensor) -> tuple[int, int]:
    """(into how many shares `p` is cut, which one this rank holds): a mesh's last dimension."""
    last = p.device_mesh.ndim - 1
    return p.device_mesh.size(last), p.device_mesh.get_local_rank(last)


def _share(p: DTensor) -> int:
    return -(-p.shape[0] // cut(p)[0])


def shared_state(name: str, p: torch.Tensor, value: Any) -> Any:
    """This rank's rows of one whole value of `p`'s optimizer state, or of one in files."""
    units = _units(name, p, value)
    if units is None:
        in_files = hasattr(value, "shape") and not isinstance(value, torch.Tensor)
        return value[:] if in_files else value
    begin = cut(p)[1] * units[1]
    return value[begin : begin + units[1]]


def groups_end_with_shares(p: torch.Tensor) -> bool:
    """Whether the groups of 128 of `p`'s 8-bit moments are the same on its ranks as on one."""
    return p.dim() == 3 or _share(p) * math.prod(p.shape[1:]) % GROUP == 0


def _units(name: str, p: torch.Tensor, value: Any) -> tuple[int, int] | None:
    """(rows of the whole, rows of a full share) of a value; None where it is not shared."""
    if not isinstance(p, DTensor) or not getattr(value, "shape", None) or name == "skipped":
        return None
    share, size = _share(p), math.prod(p.shape[1:])
    if name not in _GROUPED:
        return p.shape[0], share
    if p.dim() == 3:  # groups begin anew with each index
        groups = -(-size // GROUP)
        return p.shape[0] * groups, share * groups
    return -(-p.numel() // GROUP), share * size // GROUP
