"""`ottava.quantize`: one call from a tensor to codes, scale, and back."""

from __future__ import annotations

from typing import Any

import torch

from .kernels import cast as cast_kernels
from .kernels.cast import Quantized
from .numerics.recipe import Cast


def quantize(
    x: torch.Tensor, format: str = "e4m3", granularity: str = "tensor", **cast: Any
) -> Quantized:
    """x [..., K], any float dtype, as codes [M, K] (M: all leading dims) with FP32 scales.

    Further keywords are those of `Cast`: scale_kind, rounding, margin. The result has `codes`,
    `scale` (multiply back) and `dequantize()`. Raises ValueError for an unknown format or grain.
    """
    settings = Cast(format=format, granularity=granularity, **cast)
    return cast_kernels.quantize(x.reshape(-1, x.shape[-1] if x.dim() else 1), settings)
