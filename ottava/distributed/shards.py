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
    share = -(-t.shape[0] // t.device_mesh.size())
    return _gathered(t._local_tensor, t.shape, share, t.device_mesh.size(), keep)


def shared(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor as `like` is: this rank's rows of it as a DTensor, or simply itself."""
    if not isinstance(like, DTensor):
        return value
    mesh = like.device_mesh
    share = -(-value.shape[0] // mesh.size())
    rows = value[mesh.get_local_rank() * share :][:share]
    return DTensor.from_local(
        rows.to(like.device, copy=True).contiguous(), mesh, like.placements, run_check=False,
        shape=value.shape, stride=value.stride(),
    )  # fmt: skip


def whole_state(name: str, p: torch.Tensor, value: Any, *, keep: bool) -> Any:
    """One value of `p`'s optimizer state, whole and on the CPU (None where not `keep`)."""
    units = _units(name, p, value)
    if units is None:
        return value
    rows, share = units
    shape = torch.Size((rows, *value.shape[1:]))
    return _gathered(value, shape, share, p.device_mesh.size(), keep)


def shared_state(name: str, p: torch.Tensor, value: Any) -> Any:
    """This rank's rows of one whole value of `p`'s optimizer state."""
    units = _units(name, p, value)
    if units is None:
        return value
    begin = p.device_mesh.get_local_rank() * units[1]
    return value[begin:][: units[1]]


def groups_end_with_shares(p: torch.Tensor) -> bool:
    """Whether the groups of 128 of `p`'s 8-bit moments are the same on its ranks as on one."""
    share = -(-p.shape[0] // p.device_mesh.size())
    return p.dim() == 3 or share * math.prod(p.shape[1:]) % GROUP == 0


def _units(name: str, p: torch.Tensor, value: Any) -> tuple[int, int] | None:
    """(rows of the whole, rows of a full share) of a value; None where it is not shared."""
    if not isinstance(p, DTensor) or not isinstance(value, torch.Tensor):
        return None
    if value.dim() == 0 or name == "skipped":
        return None
    share, size = -(-p.shape[0] // p.device_mesh.size()), math.prod(p.shape[1:])
    if name not in _GROUPED:
        return p.shape[0], share
    if p.dim() == 3:  # groups begin anew with each index
        groups = -(-size // GROUP)
        return p.shape[0] * groups, share * groups
    return -(-p.numel() // GROUP), share * size // GROUP


def _gathered(part: torch.Tensor, shape: torch.Size, share: int, world: int, keep: bool):
    """Rows of all ranks, as bytes on the way: not every backend knows 8-bit floats."""
    row_bytes = math.prod(shape[1:]) * part.element_size()
    padded = torch.zeros(share * row_bytes, dtype=torch.uint8, device=part.device)
    mine = part.detach().contiguous().reshape(-1).view(torch.uint8)
    padded[: mine.numel()] = mine
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    if not keep:
        return None
    data = torch.cat([p.cpu() for p in parts])[: shape[0] * row_bytes]
    return data.view(part.dtype).view(shape)
