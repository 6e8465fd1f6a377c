"""What a cast did to an operand, on the whole of it: amax, scale, shares lost, error.

All numbers stay on the device, as 0-dim tensors, until someone reads them. Work goes through pieces
of a few million elements, so that looking takes a bounded amount of memory.

Shapes: x_MK as the GEMM's cast sees it (scales along K).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import cast as cast_kernels
from ..kernels.frozen import FrozenParameter
from ..kernels.split import SplitParameter, unpack_split
from ..layers.delayed import AmaxHistory
from ..numerics.formats import BLOCK, FORMATS
from ..numerics.recipe import Cast
from ..optim.adamw import local

PIECE = 1 << 22  # elements looked at in one go
# amax, largest scale, values clipped, values rounded to zero, their number, noise and signal power
FIELDS = ("amax", "scale", "saturated", "underflowed", "count", "noise", "signal")


@torch.no_grad()
def operand_numbers(x_MK: Tensor, cast: Cast, scale: Tensor | None = None) -> list[Tensor]:
    """FIELDS of x_MK under `cast`, FP64 0-dim each.

    scale: fp32 (1,) in force (delayed scaling, a split master); otherwise it follows from x itself.
    Saturated: beyond the largest code by more than rounding. Underflowed: not zero, but its code is.
    """
    x_MK = x_MK.detach()
    top = torch.linalg.vector_norm(x_MK, torch.inf) if x_MK.numel() else x_MK.new_zeros(())
    current = replace(cast, scaling="current", rounding="nearest")
    if cast.granularity == "tensor" and scale is None:
        scale = cast_kernels.scale_from_amax(top.float().reshape(1), current)
    zero = torch.zeros((), dtype=torch.float64, device=x_MK.device)
    largest, clipped, lost, noise, signal = (zero.clone() for _ in range(5))
    form = FORMATS[cast.format]
    half_step = 2.0 ** (math.floor(math.log2(form.max)) - form.mantissa_bits - 1)
    for piece in _pieces(x_MK):
        q = cast_kernels.quantize(piece, current, scale=scale)
        back, wide = q.dequantize(), piece.float()
        zeros = q.codes.view(torch.uint8) & 0x7F == 0
        lost += (zeros & (piece != 0)).sum()
        if scale is not None:
            clipped += (wide.abs() > (form.max + half_step) * q.scale).sum()
        # scale 1 stands for a row of zeros, where each has its own
        scales = q.scale if scale is not None else torch.where(q.scale == 1.0, 0.0, q.scale)
        largest = torch.maximum(largest, scales.max().double())
        noise += (back - wide).square().sum(dtype=torch.float64)
        signal += wide.square().sum(dtype=torch.float64)
    count = torch.full_like(zero, x_MK.numel())
    return [top.double(), largest, clipped, lost, count, noise, signal]


def _pieces(x_MK: Tensor) -> Iterator[Tensor]:
    """Rows of x in whole blocks, about PIECE elements at a time."""
    step = max(PIECE // max(x_MK.shape[1], 1) // BLOCK, 1) * BLOCK
    for begin in range(0, x_MK.shape[0], step):
        yield x_MK[begin : begin + step]


def scale_in_force(history: AmaxHistory | None, operand: str, cast: Cast) -> Tensor | None:
    """The scale that delayed scaling gives an operand ("input", "grad_output") now; None where it
    comes from the operand itself."""
    if cast.scaling != "delayed" or history is None or not history.knows(operand):
        return None
    past = history.past(operand, cast, history.pending)
    return cast_kernels.scale_from_amax(past, cast)


@torch.no_grad()
def weight_pieces(p: Tensor, rows: int = 0) -> Iterator[Tensor]:
    """The values of a parameter, FP32, along its first dim in pieces (of `rows`, where given); also
    of a split master and, whole or by expert, of frozen codes."""
    p = local(p)
    if isinstance(p, FrozenParameter):
        for piece in p.pieces():
            yield piece if p.dim() == 2 else piece[None]
        return
    count = p.shape[0] if p.dim() else 1
    each = rows or max(PIECE // max(p.numel() // max(count, 1), 1), 1)
    for begin in range(0, count, each):
        part = slice(begin, begin + each)
        if not isinstance(p, SplitParameter):
            yield p.detach()[part].float() if p.dim() else p.detach().float()
            continue
        if not p.residual.numel():  # codes alone, gathered for a sharded layer
            yield p.dequantize()[part]
            continue
        per_row = p.scale is not None and p.scale.dim() > 1
        yield unpack_split(p.data[part], p.residual[part], p.scale[part] if per_row else p.scale)


def sample_of(p: Tensor, most: int) -> Tensor:
    """About `most` evenly spaced values of a parameter, FP32."""
    step = max(p.numel() // most, 1)
    picked = []
    offset = 0
    for piece in weight_pieces(p):
        flat = piece.flatten()
        picked.append(flat[(-offset) % step :: step].clone())
        offset += flat.numel()
    return torch.cat(picked)


@torch.no_grad()
def zero_share(moment: Tensor) -> Tensor:
    """Share of a moment's elements that are exactly zero (codes of 8-bit moments too), FP64 0-dim."""
    moment = getattr(moment, "_local_tensor", moment)
    codes = moment.view(torch.uint8) if moment.element_size() == 1 else moment
    total = torch.zeros((), dtype=torch.float64, device=moment.device)
    for piece in codes.flatten().split(8 * PIECE):
        signed = moment.dtype == torch.float8_e4m3fn
        total += ((piece & 0x7F if signed else piece) == 0).sum()
    return total / max(moment.numel(), 1)
