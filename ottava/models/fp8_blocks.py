"""FP8 weights under block, row or single scales as checkpoints hold them: value = code * scale, in FP32.

A scale's shape says its kind: one number, in whatever shape, is the whole tensor's ("tensor"), [rows, 1]
or [rows] each row's, anything else must be the grid of blocks. Scales of type e8m0 (or its bytes) are
powers of two. Columns of blocks count from 0; the last block of rows and of columns may be partial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.scale import scale_from_amax
from ..numerics.recipe import Cast
from .fp8_layout import Group, Stored

E4M3_MAX = 448.0
_POW2 = (torch.float8_e8m0fnu, torch.uint8)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, *_POW2)


def kind_of(shape: tuple[int, ...], stored: Stored, block: tuple[int, int]) -> str | None:
    """ "tensor", "row" or "block"; None where a scale of this shape fits none of them."""
    if shape == stored.scale_shape(block):
        return "block"
    if math.prod(shape) == 1 and len(shape) <= 2:
        return "tensor"
    rows = stored.shape[0]
    return "row" if shape in ((rows, 1), (rows,)) else None


def scale_values(raw: Tensor) -> Tensor:
    """FP32 values of a stored scale."""
    if raw.dtype == torch.uint8:  # e8m0 as bytes; 255 is its NaN
        raw = raw.view(torch.float8_e8m0fnu)
    return raw.float()


def store_scale(value: Tensor, like: Tensor | None, kind: str) -> Tensor:
    """FP32 scales in the dtype of the stored scale that they replace (None: as they are), and in
    its shape where that is free (one number, or one a row)."""
    if like is None:
        return value
    dtype = torch.float8_e8m0fnu if like.dtype == torch.uint8 else like.dtype
    value = value.to(dtype).view(like.dtype)
    return value if kind == "block" else value.view(like.shape)


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of one stored weight. grid: FP32 [n, k]; index: int64 [rows], the row of `grid` for
    each row of the weight; width: columns under one scale."""

    grid: Tensor
    index: Tensor
    width: int

    def dequantize(self, codes: Tensor) -> Tensor:
        """FP32 values of codes [rows, cols]."""
        return self._blocks(codes, lambda x: x.mul_(self.grid[self.index, :, None]))

    def encode(self, values: Tensor) -> Tensor:
        """The nearest codes of FP32 values, those beyond the largest code clipped to it."""
        safe = torch.where(self.grid > 0, self.grid, 1.0)
        x = self._blocks(values, lambda x: x.div_(safe[self.index, :, None]))
        return x.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def amax(self, values: Tensor) -> Tensor:
        """Largest magnitude under each scale, in the shape of `grid`; 0 where it covers none."""
        rows, cols = values.shape
        padded = F.pad(values.abs(), (0, self.grid.shape[1] * self.width - cols))
        top = padded.view(rows, -1, self.width).amax(2)
        index = self.index[:, None].expand_as(top)
        return torch.zeros_like(self.grid).scatter_reduce_(0, index, top, "amax")

    def _blocks(self, x: Tensor, change) -> Tensor:
        rows, cols = x.shape
        missing = self.grid.shape[1] * self.width - cols
        x = x.to(torch.float32, copy=True)
        x = F.pad(x, (0, missing)) if missing else x.contiguous()
        return change(x.view(rows, -1, self.width)).view(rows, -1)[:, :cols]


def group_scales(
    group: Group, values: list[Tensor], kinds: list[str], block: tuple[int, int], device
) -> list[Scales]:
    """The scales of each stored weight of a group from their FP32 values, in order.

    Tensors that share scales (`group.joint`) get one grid together; their kinds are all "block".
    """
    out, shared = [], None
    for stored, value, kind in zip(group.stored, values, kinds, strict=True):
        rows, cols = stored.shape
        value = value.to(device)
        if kind != "block":
            index = torch.arange(rows) if kind == "row" else torch.zeros(rows, dtype=torch.int64)
            out.append(Scales(value.reshape(-1, 1), index.to(device), cols))
            continue
        grid = stored.grid
        if group.joint:
            if shared is None:
                size = grid.chunks, grid.total(block[0]), value.shape[1]
                shared = torch.zeros(size, dtype=torch.float32, device=device)
            shared[:, grid.own(block[0])] = value.view(grid.chunks, -1, value.shape[1])
            value = shared.view(-1, shared.shape[2])
        out.append(Scales(value, grid.index(block[0]).to(device), block[1]))
    return out


def fresh_scales(
    group: Group,
    matrices: list[Tensor],
    kinds: list[str],
    block: tuple[int, int],
    like: list[Tensor | None],
) -> tuple[list[Scales], list[Tensor]]:
    """(scales for new values, those scales as they are stored): amax / 448 in FP32, as released.

    like: the stored scales that they replace, whose dtype they take (rounded up where that is a
    power of two).
    """
    device = matrices[0].device
    empty = [
        torch.zeros(_scale_shape(s, kind, block))
        for s, kind in zip(group.stored, kinds, strict=True)
    ]
    scales = group_scales(group, empty, kinds, block, device)
    tops = [s.amax(m) for s, m in zip(scales, matrices, strict=True)]
    if group.joint:
        tops = [torch.stack(tops).amax(0)] * len(tops)
    out, stored = [], []
    for number, (scale, top, kind) in enumerate(zip(scales, tops, kinds, strict=True)):
        pow2 = like[number] is not None and like[number].dtype in _POW2
        cast = Cast(granularity="block", scale_kind="pow2" if pow2 else "fp32")
        value = scale_from_amax(top, cast)
        own = value
        if group.joint and kind == "block":
            grid = group.stored[number].grid
            own = value.view(grid.chunks, -1, value.shape[1])[:, grid.own(block[0])].flatten(0, 1)
        own = store_scale(own.cpu().contiguous(), like[number], kind)
        if like[number] is not None and not pow2 and not group.joint:
            value = scale_values(own).to(device).view(value.shape)  # what the file's dtype kept
        out.append(Scales(value, scale.index, scale.width))
        stored.append(own)
    return out, stored


def _scale_shape(stored: Stored, kind: str, block: tuple[int, int]) -> tuple[int, ...]:
    if kind == "block":
        return stored.scale_shape(block)
    return (stored.shape[0], 1) if kind == "row" else (1,)
