"""Casts to 8-bit codes and back: amax, scales, rounding, both orders, and int8 storage.

value = codes * scale, always. scale = amax / format.max * 2**margin ("pow2": rounded up to a power
of two), finite and positive; a zero or non-finite amax gives 1, a tiny one 2**-126. A code is
x * (1 / scale) in FP32, clamped to +-format.max, rounded to nearest even or stochastically; the
random bits of element (m, k) come from (key, m * K + k), in both orders. NaN stays NaN (code 0x7f);
an infinity becomes NaN in e4m3, which has none, and stays one in e5m2: never a large number.
Kernels read and write codes as bytes.

Shapes: x_MK any strides. Granularity "tensor": scale (1,); "row": [M, 1]; "group": [M, ceil(K/128)];
"block": [ceil(M/128), ceil(K/128)].
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..numerics.formats import BLOCK, FORMATS, INT8_MAX, Format, format_of
from ..numerics.recipe import Cast
from .op import operator, tl, triton
from .random import random_bits, ref_random_bits

TINY = 2.0**-126  # least scale: itself and its inverse are normal FP32 numbers
HUGE = 2.0**126


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes and the scale that gives the value back; see the module docstring for shapes."""

    codes: torch.Tensor  # [M, K] float8, contiguous
    scale: torch.Tensor  # fp32
    granularity: str

    @property
    def format(self) -> Format:
        return format_of(self.codes.dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """codes * scale, computed in FP32 and rounded to `dtype`."""
        return _dequantize(self.codes, self.scale, self.granularity, dtype)


# ---- reference: the specification, and the CPU path ----


def ref_amax(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().float().reshape(1)


def ref_scale_from_amax(amax: torch.Tensor, format: str, pow2: bool, margin: int) -> torch.Tensor:
    fmt = FORMATS[format]
    usable = (amax > 0) & (amax < torch.inf)
    if pow2:
        # max = 1.75 * 2**e in both formats, so a mantissa above 1.75 needs the next exponent.
        # (exact: no division whose rounding could clip)
        max_exponent = 8 if format == "e4m3" else 15
        exponent = ((amax.view(torch.int32) + 0x1FFFFF) >> 23) - max_exponent + margin
        scale = (exponent.clamp(1, 253) << 23).view(torch.float32)
    else:
        scale = (amax / fmt.max * 2.0**margin).clamp(TINY, HUGE)
    return torch.where(usable, scale, 1.0)


def _spread(scale: torch.Tensor, granularity: str, rows: int, cols: int) -> torch.Tensor:
    """A scale as a tensor that broadcasts against [rows, cols]."""
    if granularity == "group":
        return scale.repeat_interleave(BLOCK, 1)[:, :cols]
    if granularity == "block":
        return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return scale


def _grain_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    rows, cols = x.shape
    if granularity == "tensor":
        return ref_amax(x)
    if x.numel() == 0:
        return x.new_zeros(_scale_shape(rows, cols, granularity), dtype=torch.float32)
    a = x.abs()
    if granularity == "row":
        return a.amax(1, keepdim=True).float()
    a = torch.nn.functional.pad(a, (0, -cols % BLOCK)).unflatten(1, (-1, BLOCK)).amax(2)
    if granularity == "block":
        a = torch.nn.functional.pad(a, (0, 0, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1)
    return a.float()


def _scale_shape(rows: int, cols: int, granularity: str) -> tuple[int, ...]:
    if granularity == "tensor":
        return (1,)
    if granularity == "row":
        return (rows, 1)
    k = -(-cols // BLOCK)
    return (rows, k) if granularity == "group" else (-(-rows // BLOCK), k)


def ref_encode(v: torch.Tensor, format: str, random: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of FP32 `v` (already divided by the scale). random: 32 bits an element (int64)."""
    fmt = FORMATS[format]
    clamped = v.clamp(-fmt.max, fmt.max)
    if random is None:
        codes = clamped.to(fmt.dtype).view(torch.uint8)
    else:
        codes = _ref_stochastic(clamped, fmt, random)
    special = ~v.isfinite()
    if special.any():
        code = torch.full_like(codes, 0x7F)
        if fmt.has_inf:
            code = torch.where(v.isinf(), 0x7C + 0x80 * (v < 0), code).to(torch.uint8)
        codes = torch.where(special, code, codes)
    return codes.view(fmt.dtype)


def _ref_stochastic(v: torch.Tensor, fmt: Format, random: torch.Tensor) -> torch.Tensor:
    """Mantissa plus random bits below the kept ones, truncated; subnormals shift further."""
    bits = v.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0) << 23)
    least = 121 if fmt.mantissa_bits == 3 else 113  # FP32 exponent field of the smallest normal
    above = exponent.clamp(min=least)
    shift = 23 - fmt.mantissa_bits + above - exponent.clamp(min=1)
    mantissa = mantissa >> (shift - 31).clamp(0, 31)
    shift = shift.clamp(max=31)
    kept = (mantissa + (random & ((1 << shift) - 1))) >> shift
    return (sign | (kept + ((above - least) << fmt.mantissa_bits))).to(torch.uint8)


def ref_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    format: str,
    granularity: str,
    pow2: bool,
    margin: int,
    stochastic: bool,
    key: int,
    both: bool,
) -> list[torch.Tensor]:
    rows, cols = x.shape
    random = None
    if stochastic:
        index = torch.arange(rows * cols, device=x.device).view(rows, cols)
        random = ref_random_bits(index, key)
    if amax_out is not None:
        amax_out.copy_(torch.maximum(amax_out, ref_amax(x)))

    def cast(x, random, scale):
        if scale is None:
            grain_amax = amax if amax is not None else _grain_amax(x, granularity)
            scale = ref_scale_from_amax(grain_amax, format, pow2, margin)
        else:
            scale = scale.clone()
        v = x.float() * _spread(1.0 / scale, granularity, *x.shape)
        return ref_encode(v, format, random), scale

    codes, scale = cast(x, random, scale)
    out = [codes.contiguous(), scale]
    if both and granularity in ("tensor", "block"):
        out.append(codes.view(torch.uint8).t().contiguous().view(codes.dtype))
        if granularity == "block":
            out.append(scale.t().contiguous())
    elif both:
        out += cast(x.t().contiguous(), None if random is None else random.t(), None)
    return out


def ref_transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).transpose(-2, -1).contiguous().view(codes.dtype)


def ref_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype
) -> torch.Tensor:
    return (codes.float() * _spread(scale, granularity, *codes.shape)).to(dtype)


def ref_quantize_int8(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    rows, cols = x.shape
    k = -(-cols // group)
    if x.numel() == 0:
        return [x.new_zeros(rows, cols, dtype=torch.int8), x.new_zeros(rows, k, dtype=torch.bfloat16)]
    v = torch.nn.functional.pad(x.float(), (0, -cols % group)).unflatten(1, (k, group))
    amax = v.abs().amax(2)
    # Rounded up to BF16, so that the largest element does not clip; NaN marks a non-finite group.
    bits = ((amax / INT8_MAX).clamp(min=TINY).view(torch.int32) + 0xFFFF) & -0x10000
    scale = torch.where(amax < torch.inf, bits.view(torch.float32), torch.nan)
    inverse = torch.where(amax < torch.inf, 1.0 / scale, 0.0)
    codes = torch.nan_to_num(v * inverse.unsqueeze(2)).clamp(-INT8_MAX, INT8_MAX).round()
    return [codes.to(torch.int8).flatten(1)[:, :cols].contiguous(), scale.bfloat16()]


def ref_dequantize_int8(
    codes: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    spread = scale.float().repeat_interleave(group, 1)[:, : codes.shape[1]]
    return (codes.float() * spread).to(dtype)


# ---- Triton ----


@triton.jit
def _finish(code, bits, E4M3: tl.constexpr):
    """Sign, NaN and infinity put on the code of a clamped magnitude."""
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 24) & 0x80
    code = code | sign
    if E4M3:
        code = tl.where(magnitude >= 0x7F800000, 0x7F, code)
    else:
        code = tl.where(magnitude == 0x7F800000, 0x7C | sign, code)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code.to(tl.uint8)


@triton.jit
def encode(v, E4M3: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes (uint8) of FP32 `v`, nearest even; twin of `ref_encode`."""
    if HARDWARE:
        infinite = tl.abs(v) == float("inf")
        if E4M3:
            v = tl.where(infinite, float("nan"), v)
            code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
            code = tl.where(infinite, tl.where(v < 0, 0xFC, 0x7C).to(tl.uint8), code)
    else:
        DROP: tl.constexpr = 20 if E4M3 else 21  # mantissa bits below the kept ones
        LEAST: tl.constexpr = 121 if E4M3 else 113  # FP32 exponent field of the smallest normal
        MAX: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000  # FP32 bits of format.max
        # Adding MAGIC leaves the subnormal code in the lowest bits, rounded by the addition.
        MAGIC: tl.constexpr = 16384.0 if E4M3 else 128.0
        MAGIC_BITS: tl.constexpr = 0x46800000 if E4M3 else 0x43000000
        bits = v.to(tl.int32, bitcast=True)
        m = tl.minimum(bits & 0x7FFFFFFF, MAX)
        normal = (m + ((1 << (DROP - 1)) - 1) + ((m >> DROP) & 1)) >> DROP
        normal = normal - ((LEAST - 1) << (23 - DROP))
        subnormal = (m.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
        code = _finish(tl.where(m < (LEAST << 23), subnormal, normal), bits, E4M3)
    return code


@triton.jit
def encode_stochastic(v, random, E4M3: tl.constexpr):
    """Codes (uint8) of FP32 `v` with 32 random bits (uint32) an element."""
    DROP: tl.constexpr = 20 if E4M3 else 21
    LEAST: tl.constexpr = 121 if E4M3 else 113
    MAX: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000
    bits = v.to(tl.int32, bitcast=True)
    m = tl.minimum(bits & 0x7FFFFFFF, MAX)
    exponent = m >> 23
    mantissa = (m & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)
    above = tl.maximum(exponent, LEAST)
    shift = DROP + above - tl.maximum(exponent, 1)
    mantissa = mantissa >> tl.minimum(tl.maximum(shift - 31, 0), 31)
    shift = tl.minimum(shift, 31).to(tl.uint32)
    below = (tl.full(v.shape, 1, tl.uint32) << shift) - 1
    kept = ((mantissa.to(tl.uint32) + (random & below)) >> shift).to(tl.int32)
    code = kept + ((above - LEAST) << (23 - DROP))
    return _finish(code, bits, E4M3)


@triton.jit
def decode(codes, E4M3: tl.constexpr):
    """FP32 values of uint8 codes, exact: both formats are shifted FP16 with fewer bits."""
    c = codes.to(tl.int32)
    if E4M3:
        half = ((c & 0x80) << 8) | ((c & 0x7F) << 7)
        v = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        v = tl.where((c & 0x7F) == 0x7F, float("nan"), v)
    else:
        v = (c << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return v


@triton.jit
def magnitude_bits(v):
    """FP32 magnitudes as int32, whose order is the same; NaN is above inf is above all numbers."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr):
    """Scale for an amax given as `magnitude_bits`; twin of `ref_scale_from_amax`."""
    if POW2:
        exponent = ((bits + 0x1FFFFF) >> 23) + (MARGIN - (8 if E4M3 else 15))
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        FORMAT_MAX: tl.constexpr = 448.0 if E4M3 else 57344.0
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), FORMAT_MAX) * (2.0**MARGIN)
        scale = tl.minimum(tl.maximum(scale, 2.0**-126), 2.0**126)
    return tl.where((bits > 0) & (bits < 0x7F800000), scale, 1.0)


@triton.jit
def _amax_kernel(x, out, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    left = n - start
    offs = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        here = step * BLOCK + offs
        v = tl.load(x + start + here, mask=here < left, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude_bits(v))
    tl.atomic_max(out, tl.max(top, 0), sem="relaxed")


@triton.jit
def _amax_lines_kernel(
    x, rows, cols, M, K, stride_m, stride_k, COLS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """Amax of each row, and with COLS of each column, into zeroed int32 vectors."""
    tiles_k = tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    m, k = pid_m * BM + tl.arange(0, BM), pid_k * BK + tl.arange(0, BK)
    base = x + pid_m.to(tl.int64) * BM * stride_m + pid_k.to(tl.int64) * BK * stride_k
    offs = tl.arange(0, BM)[:, None] * stride_m + tl.arange(0, BK)[None, :] * stride_k
    v = tl.load(base + offs, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    bits = magnitude_bits(v.to(tl.float32))
    tl.atomic_max(rows + m, tl.max(bits, 1), mask=m < M, sem="relaxed")
    if COLS:
        tl.atomic_max(cols + k, tl.max(bits, 0), mask=k < K, sem="relaxed")


@triton.jit
def _scale_kernel(
    amax, scale, n, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, B: tl.constexpr
):
    i = tl.program_id(0) * B + tl.arange(0, B)
    bits = tl.load(amax + i, mask=i < n, other=0.0).to(tl.int32, bitcast=True)
    tl.store(scale + i, scale_of(bits, E4M3, POW2, MARGIN), mask=i < n)


@triton.jit(do_not_specialize=["key"])
def _cast_kernel(
    x, given, amax, amax_cols, amax_out, codes, scale, codes_t, scale_t,
    M, K, stride_m, stride_k, key,
    GRAIN: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr, HARDWARE: tl.constexpr, BOTH: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile: scales, codes, and with BOTH the transposed codes (and their own scales).

    given: scales to use. amax, amax_cols: int32 magnitudes per tensor, or per row and column, for
    GRAIN "tensor" and "row"; groups and blocks find theirs inside the tile.
    """
    tiles_m, tiles_k = tl.cdiv(M, BM), tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    m, k = pid_m * BM + i, pid_k * BK + j
    in_m, in_k = m < M, k < K
    inside = in_m[:, None] & in_k[None, :]
    base = x + pid_m.to(tl.int64) * BM * stride_m + pid_k.to(tl.int64) * BK * stride_k
    v = tl.load(base + i[:, None] * stride_m + j[None, :] * stride_k, mask=inside, other=0.0)
    v = v.to(tl.float32)
    bits = magnitude_bits(v)
    if amax_out is not None:
        tl.atomic_max(amax_out, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    v_cols = v
    if GRAIN == "tensor":
        if given is not None:
            s = tl.load(given)
        else:
            s = scale_of(tl.load(amax), E4M3, POW2, MARGIN)
        tl.store(scale, s, mask=tl.program_id(0) == 0)
        v = v * tl.div_rn(1.0, s)
    elif GRAIN == "block":
        at = pid_m * tiles_k + pid_k
        if given is not None:
            s = tl.load(given + at)
        else:
            s = scale_of(tl.max(tl.max(bits, 1), 0), E4M3, POW2, MARGIN)
        tl.store(scale + at, s)
        if BOTH:
            tl.store(scale_t + pid_k * tiles_m + pid_m, s)
        v = v * tl.div_rn(1.0, s)
    else:
        at = m if GRAIN == "row" else m * tiles_k + pid_k
        if given is not None:
            s = tl.load(given + at, mask=in_m, other=1.0)
        elif GRAIN == "row":
            s = scale_of(tl.load(amax + m, mask=in_m, other=0), E4M3, POW2, MARGIN)
        else:
            s = scale_of(tl.max(bits, 1), E4M3, POW2, MARGIN)
        if GRAIN == "group":
            tl.store(scale + at, s, mask=in_m)
        elif pid_k == 0:
            tl.store(scale + at, s, mask=in_m)
        v = v * tl.div_rn(1.0, s)[:, None]
    if STOCHASTIC:
        index = m.to(tl.int64)[:, None] * K + k[None, :]
        random = random_bits(index, key)
        c = encode_stochastic(v, random, E4M3)
    else:
        c = encode(v, E4M3, HARDWARE)
    out = codes + pid_m.to(tl.int64) * BM * K + pid_k * BK
    tl.store(out + i[:, None] * K + j[None, :], c, mask=inside)
    if BOTH:
        if GRAIN == "row" or GRAIN == "group":
            if GRAIN == "row":
                s = scale_of(tl.load(amax_cols + k, mask=in_k, other=0), E4M3, POW2, MARGIN)
                if pid_m == 0:
                    tl.store(scale_t + k, s, mask=in_k)
            else:
                s = scale_of(tl.max(bits, 0), E4M3, POW2, MARGIN)
                tl.store(scale_t + k * tiles_m + pid_m, s, mask=in_k)
            v_cols = v_cols * tl.div_rn(1.0, s)[None, :]
            if STOCHASTIC:
                c = encode_stochastic(v_cols, random, E4M3)
            else:
                c = encode(v_cols, E4M3, HARDWARE)
        out = codes_t + pid_k.to(tl.int64) * BK * M + pid_m * BM
        inside_t = in_k[:, None] & in_m[None, :]
        tl.store(out + j[:, None] * M + i[None, :], tl.trans(c), mask=inside_t)


@triton.jit(do_not_specialize=["key"])
def _cast_rows_kernel(
    x, amax_out, codes, scale, K, stride_m, key,
    E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row with its own scale; the second read of the row comes from the cache."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BK)
    top = tl.zeros([BK], tl.int32)
    for start in range(0, K, BK):
        k = start + offs
        v = tl.load(x + row * stride_m + k, mask=k < K, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude_bits(v))
    bits = tl.max(top, 0)
    if amax_out is not None:
        tl.atomic_max(amax_out, bits, sem="relaxed")
    s = scale_of(bits, E4M3, POW2, MARGIN)
    tl.store(scale + row, s)
    inverse = tl.div_rn(1.0, s)
    for start in range(0, K, BK):
        k = start + offs
        v = tl.load(x + row * stride_m + k, mask=k < K, other=0.0).to(tl.float32) * inverse
        if STOCHASTIC:
            c = encode_stochastic(v, random_bits(row * K + k, key), E4M3)
        else:
            c = encode(v, E4M3, HARDWARE)
        tl.store(codes + row * K + k, c, mask=k < K)


@triton.jit
def _transpose_kernel(codes, out, M, K, BM: tl.constexpr, BK: tl.constexpr):
    tiles_k = tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    in_m, in_k = pid_m * BM + i < M, pid_k * BK + j < K
    batch = tl.program_id(1).to(tl.int64) * M * K
    base = codes + batch + pid_m.to(tl.int64) * BM * K + pid_k * BK
    c = tl.load(base + i[:, None] * K + j[None, :], mask=in_m[:, None] & in_k[None, :], other=0)
    base = out + batch + pid_k.to(tl.int64) * BK * M + pid_m * BM
    tl.store(base + j[:, None] * M + i[None, :], tl.trans(c), mask=in_k[:, None] & in_m[None, :])


@triton.jit
def _dequantize_kernel(
    codes, scale, out, M, K,
    GRAIN: tl.constexpr, E4M3: tl.constexpr, SIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    m = pid_m * BM + i
    inside = (m < M)[:, None] & (pid_k * BK + j < K)[None, :]
    base = pid_m.to(tl.int64) * BM * K + pid_k * BK
    offs = i[:, None] * K + j[None, :]
    v = decode(tl.load(codes + base + offs, mask=inside, other=0), E4M3)
    if GRAIN == "tensor":
        v = v * tl.load(scale)
    elif GRAIN == "row":
        v = v * tl.load(scale + m, mask=m < M, other=0.0)[:, None]
    elif GRAIN == "group":
        v = v * tl.load(scale + m * tiles_k + pid_k, mask=m < M, other=0.0)[:, None]
    else:
        v = v * tl.load(scale + (m // SIDE) * tiles_k + pid_k, mask=m < M, other=0.0)[:, None]
    tl.store(out + base + offs, v.to(out.dtype.element_ty), mask=inside)


@triton.jit
def int8_scale(top):
    """FP32 scale of a group whose largest magnitude has bits `top`: a BF16 number, rounded up."""
    s = tl.maximum(tl.div_rn(top.to(tl.float32, bitcast=True), 127.0), 2.0**-126)
    s = ((s.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(top < 0x7F800000, s, float("nan"))


@triton.jit
def int8_encode(v):
    """int8 of FP32 `v` rounded to nearest even and clamped to +-127; NaN gives 0."""
    v = tl.where(v == v, v, 0.0)
    v = tl.minimum(tl.maximum(v, -127.0), 127.0)
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


@functools.cache
def _hardware(device: torch.device) -> bool:
    """Whether the device has the FP8 conversion instruction (nearest even, saturating)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _tiles(rows: int, cols: int, high: int, wide: int) -> tuple[int]:
    return (-(-rows // high) * -(-cols // wide),)


def triton_amax(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    n = x.numel()
    if n:
        if not x.is_contiguous() and not (x.dim() == 2 and x.t().is_contiguous()):
            x = x.contiguous()
        _amax_kernel[(-(-n // 32768),)](x, out.view(torch.int32), n, BLOCK=4096, STEPS=8)
    return out


def triton_scale_from_amax(
    amax: torch.Tensor, format: str, pow2: bool, margin: int
) -> torch.Tensor:
    amax = amax.contiguous()
    scale, n = torch.empty_like(amax), amax.numel()
    if n:
        _scale_kernel[(-(-n // 512),)](
            amax, scale, n, E4M3=format == "e4m3", POW2=pow2, MARGIN=margin, B=512
        )
    return scale


def _triton_rows(x, amax_out, format, pow2, margin, stochastic, key):
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _cast_rows_kernel[(rows,)](
        x,
        amax_out,
        codes,
        scale,
        cols,
        x.stride(0),
        key,
        E4M3=format == "e4m3",
        POW2=pow2,
        MARGIN=margin,
        STOCHASTIC=stochastic,
        HARDWARE=_hardware(x.device),
        BK=1024 if cols <= 1024 else 2048,
    )
    return [codes.view(FORMATS[format].dtype), scale]


def _triton_amax_lines(x: torch.Tensor, both: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int32 magnitudes of each row, and with `both` of each column."""
    rows, cols = x.shape
    out = torch.zeros(rows + cols if both else rows, dtype=torch.int32, device=x.device)
    row_amax, col_amax = out[:rows], out[rows:] if both else None
    _amax_lines_kernel[_tiles(rows, cols, 128, 128)](
        x, row_amax, col_amax, rows, cols, *x.stride(), COLS=both, BM=128, BK=128, num_warps=8
    )
    return row_amax, col_amax


def triton_quantize(
    x, scale, amax, amax_out, format, granularity, pow2, margin, stochastic, key, both
) -> list[torch.Tensor]:
    rows, cols = x.shape
    device = x.device
    if x.numel() == 0:
        return ref_quantize(
            x, scale, amax, amax_out, format, granularity, pow2, margin, stochastic, key, both
        )
    if amax_out is not None:
        amax_out = amax_out.view(torch.int32)
    col_amax = codes_t = scale_t = None
    if scale is not None:
        amax = None
    elif granularity == "row":
        if not both and x.stride(1) == 1:
            return _triton_rows(x, amax_out, format, pow2, margin, stochastic, key)
        amax, col_amax = _triton_amax_lines(x, both)
    elif granularity == "tensor":
        amax = (triton_amax(x) if amax is None else amax).view(torch.int32)
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=device)
    out_scale = torch.empty(_scale_shape(rows, cols, granularity), device=device)
    if both:
        codes_t = torch.empty(cols, rows, dtype=torch.uint8, device=device)
        if granularity != "tensor":
            scale_t = torch.empty(_scale_shape(cols, rows, granularity), device=device)
    # Groups and blocks live inside one tile; both orders want square ones for wide stores.
    large = both or granularity == "block" or x.stride(1) != 1
    high = 128 if large else 32
    _cast_kernel[_tiles(rows, cols, high, 128)](
        x,
        scale,
        amax,
        col_amax,
        amax_out,
        codes,
        out_scale,
        codes_t,
        scale_t,
        rows,
        cols,
        *x.stride(),
        key,
        GRAIN=granularity,
        E4M3=format == "e4m3",
        POW2=pow2,
        MARGIN=margin,
        STOCHASTIC=stochastic,
        HARDWARE=_hardware(device),
        BOTH=both,
        BM=high,
        BK=128,
        num_warps=8 if large else 4,
    )
    dtype = FORMATS[format].dtype
    out = [codes.view(dtype), out_scale]
    if both:
        out.append(codes_t.view(dtype))
        if scale_t is not None:
            out.append(scale_t)
    return out


def triton_transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    *batch, rows, cols = codes.shape
    out = torch.empty(*batch, cols, rows, dtype=torch.uint8, device=codes.device)
    if out.numel():
        grid = (*_tiles(rows, cols, 128, 128), math.prod(batch))
        bytes_in = codes.contiguous().view(torch.uint8)
        _transpose_kernel[grid](bytes_in, out, rows, cols, BM=128, BK=128, num_warps=8)
    return out.view(codes.dtype)


def triton_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype
) -> torch.Tensor:
    rows, cols = codes.shape
    out = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    if out.numel():
        _dequantize_kernel[_tiles(rows, cols, 32, BLOCK)](
            codes.contiguous().view(torch.uint8),
            scale.contiguous(),
            out,
            rows,
            cols,
            GRAIN=granularity,
            E4M3=codes.dtype is torch.float8_e4m3fn,
            SIDE=BLOCK,
            BM=32,
            BK=BLOCK,
        )
    return out


def triton_quantize_int8(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, -(-cols // group), dtype=torch.bfloat16, device=x.device)
    if x.numel():
        wide = max(16, triton.next_power_of_2(group))
        high = max(1, 4096 // wide)
        _int8_kernel[_tiles(rows, cols, high, group)](
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
        _int8_back_kernel[_tiles(rows, cols, high, group)](
            codes.contiguous(), scale.contiguous(), out, rows, cols, GROUP=group, BM=high, BK=wide
        )
    return out


# ---- operators ----


def _fake_quantize(x, scale, amax, amax_out, format, granularity, pow2, margin, stochastic, key, both):
    rows, cols = x.shape
    dtype = FORMATS[format].dtype
    out = [x.new_empty(rows, cols, dtype=dtype)]
    out.append(x.new_empty(_scale_shape(rows, cols, granularity), dtype=torch.float32))
    if both:
        out.append(x.new_empty(cols, rows, dtype=dtype))
        if granularity != "tensor":
            out.append(x.new_empty(_scale_shape(cols, rows, granularity), dtype=torch.float32))
    return out


def _fake_quantize_int8(x, group):
    rows, cols = x.shape
    scale = x.new_empty(rows, -(-cols // group), dtype=torch.bfloat16)
    return [x.new_empty(rows, cols, dtype=torch.int8), scale]


_amax = operator(
    "amax(Tensor x) -> Tensor",
    reference=ref_amax,
    cuda=triton_amax,
    fake=lambda x: x.new_empty(1, dtype=torch.float32),
)
_scale_from_amax = operator(
    "scale_from_amax(Tensor amax, str format, bool pow2, int margin) -> Tensor",
    reference=ref_scale_from_amax,
    cuda=triton_scale_from_amax,
    fake=lambda amax, format, pow2, margin: torch.empty_like(amax),
)
_quantize = operator(
    "quantize(Tensor x, Tensor? scale, Tensor? amax, Tensor(a!)? amax_out, str format, "
    "str granularity, bool pow2, int margin, bool stochastic, int key, bool both) -> Tensor[]",
    reference=ref_quantize,
    cuda=triton_quantize,
    fake=_fake_quantize,
)
_transpose_codes = operator(
    "transpose_codes(Tensor codes) -> Tensor",
    reference=ref_transpose_codes,
    cuda=triton_transpose_codes,
    fake=lambda codes: codes.new_empty(*codes.shape[:-2], codes.shape[-1], codes.shape[-2]),
)
_dequantize = operator(
    "dequantize(Tensor codes, Tensor scale, str granularity, ScalarType dtype) -> Tensor",
    reference=ref_dequantize,
    cuda=triton_dequantize,
    fake=lambda codes, scale, granularity, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
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


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as an FP32 tensor of shape (1,); NaN and inf propagate; 0 when empty."""
    return _amax(x.detach())


def scale_from_amax(amax: torch.Tensor, cast: Cast) -> torch.Tensor:
    """The scale for each FP32 amax: same shape, finite, positive."""
    return _scale_from_amax(amax, cast.format, cast.scale_kind == "pow2", cast.margin)


def _run(x, cast, scale, amax, amax_out, key, both):
    if x.dim() != 2:
        raise ValueError(f"quantize: x has {x.dim()} dimensions; flatten it to two")
    return _quantize(
        x.detach(),
        scale,
        amax,
        amax_out,
        cast.format,
        cast.granularity,
        cast.scale_kind == "pow2",
        cast.margin,
        cast.rounding == "stochastic",
        key,
        both,
    )


def quantize(
    x: torch.Tensor,
    cast: Cast,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    key: int = 0,
) -> Quantized:
    """x_MK as codes with the scale `cast` asks for.

    scale: use this one (delayed scaling). amax: fp32 (1,), known already, "tensor" only: saves the
    pass that finds it. amax_out: fp32 (1,), receives the amax of x from the same pass as the cast.
    """
    codes, scale = _run(x, cast, scale, amax, amax_out, key, False)
    return Quantized(codes, scale, cast.granularity)


def quantize_both(
    x: torch.Tensor,
    cast: Cast,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    key: int = 0,
) -> tuple[Quantized, Quantized]:
    """x_MK as codes, and x^T as codes [K, M]: the casts read x once. Arguments as `quantize`."""
    out = _run(x, cast, scale, amax, amax_out, key, True)
    grain = cast.granularity
    return Quantized(out[0], out[1], grain), Quantized(out[2], out[-1 if len(out) > 3 else 1], grain)


def transpose(q: Quantized) -> Quantized:
    """The transposed value, exactly. Raises ValueError for "row" and "group" (new scales needed)."""
    if q.granularity == "tensor":
        return Quantized(_transpose_codes(q.codes), q.scale, "tensor")
    if q.granularity == "block":
        return Quantized(_transpose_codes(q.codes), q.scale.t().contiguous(), "block")
    raise ValueError(
        f"transpose: {q.granularity!r} scales run along K only; use quantize_both on the values"
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
