"""Tensors of which every rank holds some rows: which ones, and the way back to whole tensors.

Rows are shared as `torch.chunk` does: ceil(rows / ranks) for each rank until none are left. So the
shares, one after the other, are the whole, under any number of ranks: what a checkpoint holds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..kernels.moments import GROUP

_GROUPED = ("m_scale", "v_range")  # optimizer state with a row for each group of 128 elements


def whole(t: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """A sharded DTensor as one tensor on the CPU (None where not `keep`; every rank calls it); any
    other tensor as it is."""
    if not isinstance(t, DTensor):
        return t
    return _gathered(t._local_tensor, t.shape, _share(t), t, keep)


def shared(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor as `like` is: this rank's rows of it as a DTensor, or simply itself."""
    if not isinstance(like, DTensor):
        return value
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


def whole_state(name: str, p: torch.Tensor, value: Any, *, keep: bool) -> Any:
    """One value of `p`'s optimizer state, whole and on the CPU (None where not `keep`)."""
    units = _units(name, p, value)
    if units is None:
        return value
    rows, share = units
    shape = torch.Size((rows, *value.shape[1:]))
    return _gathered(value, shape, share, p, keep)


def shared_state(name: str, p: torch.Tensor, value: Any) -> Any:
    """This rank's rows of one whole value of `p`'s optimizer state."""
    units = _units(name, p, value)
    if units is None:
        return value
    begin = cut(p)[1] * units[1]
    return value[begin : begin + units[1]]


def groups_end_with_shares(p: torch.Tensor) -> bool:
    """Whether the groups of 128 of `p`'s 8-bit moments are the same on its ranks as on one."""
    return p.dim() == 3 or _share(p) * math.prod(p.shape[1:]) % GROUP == 0


def _units(name: str, p: torch.Tensor, value: Any) -> tuple[int, int] | None:
    """(rows of the whole, rows of a full share) of a value; None where it is not shared."""
    if not isinstance(p, DTensor) or not isinstance(value, torch.Tensor):
        return None
    if value.dim() == 0 or name == "skipped":
        return None
    share, size = _share(p), math.prod(p.shape[1:])
    if name not in _GROUPED:
        return p.shape[0], share
    if p.dim() == 3:  # groups begin anew with each index
        groups = -(-size // GROUP)
        return p.shape[0] * groups, share * groups
    return -(-p.numel() // GROUP), share * size // GROUP


def _gathered(part: torch.Tensor, shape: torch.Size, share: int, like: DTensor, keep: bool):
    """Rows of all ranks, as bytes on the way: not every backend knows 8-bit floats."""
    mesh = like.device_mesh
    row_bytes = math.prod(shape[1:]) * part.element_size()
    padded = torch.zeros(share * row_bytes, dtype=torch.uint8, device=part.device)
    mine = part.detach().contiguous().reshape(-1).view(torch.uint8)
    padded[: mine.numel()] = mine
    parts = [torch.empty_like(padded) for _ in range(cut(like)[0])]
    dist.all_gather(parts, padded, group=mesh.get_group(mesh.ndim - 1))
    if not keep:
        return None
    data = torch.cat([p.cpu() for p in parts])[: shape[0] * row_bytes]
    return data.view(part.dtype).view(shape)
