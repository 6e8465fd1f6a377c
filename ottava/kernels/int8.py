"""int8 storage: codes and one BF16 scale for each group of a row; kept, never a GEMM operand.

value = codes * scale. The scale is amax / 127 rounded up to BF16, so that nothing clips; about a
third of e4m3's error on bell-shaped data. A group with a non-finite element gets scale NaN: all of
it comes back as NaN, and its codes mean nothing.
"""

from __future__ import annotations

import torch

from ..numerics.formats import BLOCK, INT8_MAX
from .codes import TINY, magnitude_bits
from .op import operator, tl, triton
from .scale import tiles

# ---- reference: the specification, and the CPU path ----


def ref_quantize_int8(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    rows, cols = x.shape
    k = -(-cols // group)
    if x.numel() == 0:
        return [
            x.new_zeros(rows, cols, dtype=torch.int8),
            x.new_zeros(rows, k, dtype=torch.bfloat16),
        ]
    v = torch.nn.functional.pad(x.float(), (0, -cols % group)).unflatten(1, (k, group))
    amax = v.abs().amax(2)
    # Rounded up to BF16, so that the largest element does not clip; NaN marks a non-finite group.
    bits = ((amax / INT8_MAX).clamp(min=TINY).view(torch.int32) + 0xFFFF) & -0x10000
    scale = torch.where(amax < torch.inf, bits.view(torch.float32), torch.nan)
    codes = (v * (1.0 / scale).unsqueeze(2)).round().nan_to_num(0.0)
    return [codes.to(torch.int8).flatten(1)[:, :cols].contiguous(), scale.bfloat16()]


def ref_dequantize_int8(
    codes: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    spread = scale.float().repeat_interleave(group, 1)[:, : codes.shape[1]]
    return (codes.float() * spread).to(dtype)


# ---- Triton ----


@triton.jit
def int8_scale(top):
    """FP32 scale of a group whose largest magnitude has bits `top`: a BF16 number, rounded up."""
    s = tl.maximum(tl.div_rn(top.to(tl.float32, bitcast=True), 127.0), 2.0**-126)
    s = ((s.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(top < 0x7F800000, s, float("nan"))


@triton.jit
def int8_encode(v):
    """int8 of FP32 `v`, nearest even; |v| <= 127 up to rounding, which the scale sees to."""
    # The addition leaves the rounded integer in the lowest bits.
    return (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _int8_kernel(x, codes, scale, M, K, stride_m, stride_k, GROUP: tl.constexpr, BM: tl.constexpr,
                 BK: tl.constexpr):  # fmt: skip
    groups = tl.cdiv(K, GROUP)
    pid_m, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    m, k = pid_m * BM + i, g * GROUP + j
    inside = (m < M)[:, None] & ((j < GROUP) & (k < K))[None, :]
    base = x + pid_m.to(tl.int64) * BM * stride_m + g.to(tl.int64) * GROUP * stride_k
    v = tl.load(base + i[:, None] * stride_m + j[None, :] * stride_k, mask=inside, other=0.0)
    v = v.to(tl.float32)
    s = int8_scale(tl.max(magnitude_bits(v), 1))
    tl.store(scale + m * groups + g, s.to(tl.bfloat16), mask=m < M)
    c = int8_encode(v * tl.div_rn(1.0, s)[:, None])
    out = codes + pid_m.to(tl.int64) * BM * K + g * GROUP
    tl.store(out + i[:, None] * K + j[None, :], c, mask=inside)


@triton.jit
def _int8_back_kernel(codes, scale, out, M, K, GROUP: tl.constexpr, BM: tl.constexpr,
                      BK: tl.constexpr):  # fmt: skip
    groups = tl.cdiv(K, GROUP)
    pid_m, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    m = pid_m * BM + i
    inside = (m < M)[:, None] & ((j < GROUP) & (g * GROUP + j < K))[None, :]
    base = pid_m.to(tl.int64) * BM * K + g * GROUP
    offs = i[:, None] * K + j[None, :]
    s = tl.load(scale + m * groups + g, mask=m < M, other=0.0).to(tl.float32)
    v = tl.load(codes + base + offs, mask=inside, other=0).to(tl.float32) * s[:, None]
    tl.store(out + base + offs, v.to(out.dtype.element_ty), mask=inside)


# ---- Triton wrappers: same arguments and results as the references ----


def triton_quantize_int8(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, -(-cols // group), dtype=torch.bfloat16, device=x.device)
    if x.numel():
        wide = max(16, triton.next_power_of_2(group))
        high = max(1, 4096 // wide)
        _int8_kernel[tiles(rows, cols, high, group)](
            x, codes, scale, rows, cols, *x.stride(), GROUP=group, BM=high, BK=wide
        )
    return [codes, scale]


def triton_dequantize_int8(
    codes: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    rows, cols = codes.shape
    out = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    if out.numel():
        wide = max(16, triton.next_power_of_2(group))
        high = max(1, 4096 // wide)
        _int8_back_kernel[tiles(rows, cols, high, group)](
            codes.contiguous(), scale.contiguous(), out, rows, cols, GROUP=group, BM=high, BK=wide
        )
    return out


# ---- operators ----


def _fake_quantize_int8(x, group):
    rows, cols = x.shape
    scale = x.new_empty(rows, -(-cols // group), dtype=torch.bfloat16)
    return [x.new_empty(rows, cols, dtype=torch.int8), scale]


_quantize_int8 = operator(
    "quantize_int8(Tensor x, int group) -> Tensor[]",
    reference=ref_quantize_int8,
    cuda=triton_quantize_int8,
    fake=_fake_quantize_int8,
)

_dequantize_int8 = operator(
    "dequantize_int8(Tensor codes, Tensor scale, int group, ScalarType dtype) -> Tensor",
    reference=ref_dequantize_int8,
    cuda=triton_dequantize_int8,
    fake=lambda codes, scale, group, dtype: codes.new_empty(codes.shape, dtype=dtype),
)


def quantize_int8(x: torch.Tensor, group: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """x_MK as int8 codes [M, K] and BF16 scales [M, ceil(K/group)]: storage, never a GEMM operand.

    A group with a non-finite element gets scale NaN: all of it comes back as NaN.
    """
    codes, scale = _quantize_int8(x.detach(), group)
    return codes, scale


def dequantize_int8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """codes * scale, computed in FP32 and rounded to `dtype`."""
    return _dequantize_int8(codes, scale, group, dtype)
