"""A weight that is the codes of a checkpoint, as released: a byte a parameter, scales per 128 x 128.

It does not train. Its rows lie in the model's order. Where the checkpoint's blocks fall on other
rows (a fused qkv in released chunks), `position` says on which: row r of the weight is row
position[r] of a matrix whose blocks of 128 rows the scales belong to; `padded` makes that matrix
for the length of a product, with zero codes in the rows that nothing falls on.

Shapes: [N, K] under scale [n, k], or [E, N, K] under [E, n, k] (experts, blocks on every 128th row).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..numerics.recipe import Cast
from .cast import Quantized

BLOCK = 128


class FrozenParameter(nn.Parameter):
    """`.data`: e4m3 codes. `.scale`: FP32. `.position`: int64 [N], or None where row r is row r."""

    scale: torch.Tensor
    position: torch.Tensor | None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """code * scale, in FP32 and rounded once to `dtype`; the parameter's own rows."""
        if self.dim() == 3:
            return torch.stack(list(self.pieces(dtype)))
        values = self.padded().dequantize(dtype)
        return values if self.position is None else values[self.position]

    def pieces(self, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
        """The values, an expert at a time."""
        if self.dim() == 2:
            yield self.dequantize(dtype)
            return
        for codes, scale in zip(self.data, self.scale, strict=True):
            yield Quantized(codes, scale, "block").dequantize(dtype)

    def reads_as(self, cast: Cast) -> bool:
        """Whether a GEMM that casts its weight so can read the codes as they are."""
        return (cast.format, cast.granularity) == ("e4m3", "block")

    def padded(self) -> Quantized:
        """[n * 128, K] codes whose blocks of rows are the scale's, or [N, K] as they are."""
        codes = self.data
        if self.position is not None:
            rows = self.scale.shape[0] * BLOCK
            codes = torch.zeros(rows, codes.shape[1], dtype=torch.uint8, device=codes.device)
            codes[self.position] = self.data.view(torch.uint8)
            codes = codes.view(self.dtype)
        return Quantized(codes, self.scale, "block")

    def to_device(self, device: torch.device) -> FrozenParameter:
        """The same weight there."""
        position = None if self.position is None else self.position.to(device)
        return freeze(self.data.to(device), self.scale.to(device), position)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = _rebuild(*(None if t is None else t.clone() for t in _fields(self)))
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _rebuild, _fields(self)


def freeze(
    codes: torch.Tensor, scale: torch.Tensor, position: torch.Tensor | None = None
) -> FrozenParameter:
    """The parameter of e4m3 `codes` under FP32 `scale` (see the module docstring). No copy.

    Raises ValueError where scale and codes do not fit.
    """
    rows = scale.shape[-2] * BLOCK if position is not None else codes.shape[-2]
    grid = (*codes.shape[:-2], -(-rows // BLOCK), -(-codes.shape[-1] // BLOCK))
    if codes.dtype != torch.float8_e4m3fn or tuple(scale.shape) != grid:
        raise ValueError(
            f"freeze: codes {codes.dtype} {list(codes.shape)} need a scale {list(grid)}, not "
            f"{list(scale.shape)}"
        )
    p = nn.Parameter(codes, requires_grad=False)
    p.__class__ = FrozenParameter
    p.scale, p.position = scale, position
    return p


def thaw(p: FrozenParameter, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Turn `p`, in place, into a plain parameter of its values. Returns p."""
    p.data = p.dequantize(dtype)
    p.__dict__.pop("scale")
    p.__dict__.pop("position")
    p.__class__ = nn.Parameter
    return p


def _fields(p: FrozenParameter) -> tuple:
    return p.detach().view(torch.uint8), p.scale, p.position  # plain pickle does not know float8


def _rebuild(codes, scale, position) -> FrozenParameter:
    return freeze(codes.view(torch.float8_e4m3fn), scale, position)
