"""One number and its 8-bit code: the scale for an amax, encoding, decoding; bit by bit.

scale = amax / format.max * 2**margin ("pow2": rounded up to a power of two, so that nothing clips),
always finite and positive; a zero or non-finite amax gives 1, a tiny one 2**-126, so that the
inverse is a normal number too. A code is v = x * (1 / scale) in FP32, clamped to +-format.max and
rounded to nearest even, or stochastically: random bits are added below the kept ones, subnormals
included. NaN is code 0x7f; an infinity becomes NaN in e4m3, which has none, and stays one in e5m2:
never a large number. The Triton functions here work on registers; kernels load and store bytes.
"""

from __future__ import annotations

import functools

import torch

from ..numerics.formats import FORMATS, Format
from .op import INTERPRETED, tl, triton

TINY = 2.0**-126
HUGE = 2.0**126


# ---- reference: the specification, and the CPU path ----


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


def ref_encode(v: torch.Tensor, format: str, random: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of FP32 `v` (already divided by the scale). random: 32 bits an element (int64)."""
    fmt = FORMATS[format]
    clamped = v.clamp(-fmt.max, fmt.max)
    if random is None:
        codes = clamped.to(fmt.dtype).view(torch.uint8)
    else:
        codes = _ref_stochastic(clamped, fmt, random)
    if v.numel() and not all(map(torch.isfinite, v.aminmax())):
        special = ~v.isfinite()
        code = torch.full_like(codes, 0x7F)
        if fmt.has_inf:
            code = torch.where(v.isinf(), 0x7C + 0x80 * (v < 0), code).to(torch.uint8)
        codes = torch.where(special, code, codes)
    return codes.view(fmt.dtype)


# torch's own conversion from e4m3 is several times slower than looking the value up.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def ref_decode(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of float8 codes."""
    if codes.dtype is torch.float8_e4m3fn and codes.device.type == "cpu":
        index = codes.view(torch.uint8).int().flatten()
        return _E4M3_VALUES.index_select(0, index).view(codes.shape)
    return codes.float()


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


# ---- Triton ----


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the device has the FP8 conversion instruction (nearest even, saturating)."""
    if device.type != "cuda" or INTERPRETED:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


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
def encode(v, E4M3: tl.constexpr, HARDWARE: tl.constexpr = False):
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
def decode(codes, E4M3: tl.constexpr, HARDWARE: tl.constexpr = False):
    """FP32 values of uint8 codes, exact: both formats are shifted FP16 with fewer bits."""
    c = codes.to(tl.int32)
    if HARDWARE and E4M3:
        v = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif E4M3:
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
