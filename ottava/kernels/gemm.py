"""The FP8 matrix product: a_MK @ b_NK^T from codes and scales, on the FP8 unit where there is one.

Both operands are K-major, the only layout Hopper takes. Sizes that the unit refuses are padded with
zero codes (+0 in both formats), which change nothing. A device without an FP8 unit computes the
same thing from dequantized operands ("emulated"): FP32 on the CPU, BF16 on CUDA.
Granularities: tensor x tensor, row x row, group x block, group x group.
"""

from __future__ import annotations

import torch

from .cast import Quantized, _spread
from .op import operator

PAIRS = (("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group"))


def has_fp8_unit(device: torch.device | str) -> bool:
    """Whether `device` multiplies FP8 natively (CUDA compute capability 8.9 or newer)."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def ref_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_grain: str,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_grain: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    a_value, b_value = a.float(), b.float()
    if a_grain == "group":
        a_value = a_value * _spread(a_scale, a_grain, *a.shape)
        b_value = b_value * _spread(b_scale, b_grain, *b.shape)
        out = a_value @ b_value.t()
    else:
        # Scales after the product: the codes' products are exact in FP32.
        out = (a_value @ b_value.t()) * a_scale * b_scale.t()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _fake_gemm(a, a_scale, a_grain, b, b_scale, b_grain, bias, out_dtype, fast_accum):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


_gemm = operator(
    "gemm(Tensor a, Tensor a_scale, str a_grain, Tensor b, Tensor b_scale, str b_grain, "
    "Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=ref_gemm,
    fake=_fake_gemm,
)


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """a_MK @ b_NK^T as [M, N] in `out_dtype`, plus bias_N.

    Raises ValueError for e5m2 x e5m2 and for granularities or sizes that do not go together, on
    every device alike.
    """
    if a.codes.dtype is b.codes.dtype is torch.float8_e5m2:
        raise ValueError("gemm: e5m2 x e5m2 is refused by FP8 matrix units; cast one to e4m3")
    if (a.granularity, b.granularity) not in PAIRS:
        raise ValueError(
            f"gemm: {a.granularity} x {b.granularity} is not one of "
            + ", ".join(f"{p} x {q}" for p, q in PAIRS)
        )
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"gemm: K differs: {tuple(a.codes.shape)} @ {tuple(b.codes.shape)}^T")
    return _gemm(
        a.codes,
        a.scale,
        a.granularity,
        b.codes,
        b.scale,
        b.granularity,
        bias,
        out_dtype,
        fast_accum,
    )
