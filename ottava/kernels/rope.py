"""Rotary position embedding (NeoX halves) on the first R of D head dims, in one pass.

With i < R/2 and the angles of a position:
    y_i         = x_i cos_i - x_{i+R/2} sin_i
    y_{i+R/2}   = x_{i+R/2} cos_{i+R/2} + x_i sin_{i+R/2}
Dims R..D-1 pass unchanged. The inverse (and so the backward, a rotation being orthogonal) is the
same with -sin. Arithmetic in FP32, rounded once to x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .op import operator


def ref_rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Reference of `rope`."""
    rotary, dtype = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)  # heads broadcast
    turned = x[..., :rotary].to(dtype)
    low, high = turned.chunk(2, -1)
    half = torch.cat((high, -low) if inverse else (-high, low), -1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :rotary] = turned * cos + half * sin
    out[..., rotary:] = x[..., rotary:]
    return out


def _fake_rope(x, cos, sin, inverse):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rope = operator(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    reference=ref_rope,
    fake=_fake_rope,
)


def rope(x_BTHD: Tensor, cos_TR: Tensor, sin_TR: Tensor, inverse: bool = False) -> Tensor:
    """x rotated (out of place, contiguous). cos, sin: [T, R] or [B or 1, T, R], R even, R <= D.

    As Hugging Face makes them: cos and sin of all R dims, the second half repeating the first.
    Raises ValueError on shapes that do not fit.
    """
    b, t, _, d = x_BTHD.shape
    rotary = cos_TR.shape[-1]
    if cos_TR.shape != sin_TR.shape or rotary % 2 or not 0 < rotary <= d:
        raise ValueError(
            f"rope: cos {tuple(cos_TR.shape)}, sin {tuple(sin_TR.shape)} do not fit head dim {d}"
        )
    if cos_TR.dim() not in (2, 3) or cos_TR.shape[-2] != t or cos_TR.shape[:-2] not in (
        (), (1,), (b,)
    ):  # fmt: skip
        raise ValueError(f"rope: angles {tuple(cos_TR.shape)} do not fit x {tuple(x_BTHD.shape)}")
    return _rope(x_BTHD, cos_TR, sin_TR, inverse)
