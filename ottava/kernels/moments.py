"""8-bit (and BF16) optimizer moments: one byte an element, a few bytes per group of 128.

m: e4m3 codes, one BF16 scale a group (the first BF16 above amax / 448), stochastic rounding; zero
stays zero. v: a logarithmic code. Code 0 is exactly 0; codes 1..255 stand for
2**(lo + (code - 1) * step), with lo and hi = lo + 254 * step kept per group as int16 in units of
1/128 of a binade, rounded outward, at least a binade apart. Rounding is stochastic in v itself,
between the two neighbouring codes, so that a slow average neither freezes nor drifts; v > 0 never
becomes 0 (below 2**-126 it is kept as 2**-126).
A group with a non-finite m or v reads back as NaN (its scale, or lo = -32768) wherever it is not
zero: it is not hidden.

Tensors are [G, 128] here: G groups. random: 10-bit integers an element.
"""

from __future__ import annotations

import math

import torch

from .op import tl, triton

GROUP = 128
M_MAX = 448.0
BROKEN = -32768  # lo of a group with a non-finite v
UNIT = 128.0  # steps of lo and hi per binade
LOWEST = -126.0 * UNIT  # hardware exp2 flushes subnormals
LEAST_SCALE = 2.0**-100
# A position among the 255 codes as FP32 8192 + position: 8 bits of code, 10 of fraction.
POSITION_BITS = 10


def leads_of(weight: torch.Tensor) -> tuple[int, int]:
    """(leads, elements each): experts for a 3-D weight, else the whole as one."""
    leads = weight.shape[0] if weight.dim() == 3 and weight.numel() else 1
    return leads, weight.numel() // leads


def init_moments(weight: torch.Tensor, states: str) -> dict[str, torch.Tensor]:
    """Zero moments for `weight` (a master: its shape counts, 3-D means one lead per index).

    "fp32", "bf16": m, v of that dtype and the shape of the weight. "8bit": m float8_e4m3fn and v
    uint8 of that shape, m_scale BF16 [G], v_range int16 [G, 2]; G = leads * ceil(lead size / 128).
    """
    if states != "8bit":
        dtype = torch.float32 if states == "fp32" else torch.bfloat16
        return {k: torch.zeros_like(weight, dtype=dtype) for k in ("m", "v")}
    leads, size = leads_of(weight)
    groups = leads * -(-size // GROUP)

    def zeros(shape, dtype):
        return torch.zeros(shape, dtype=dtype, device=weight.device)

    return {
        "m": zeros(weight.shape, torch.float8_e4m3fn),
        "v": zeros(weight.shape, torch.uint8),
        "m_scale": zeros(groups, torch.bfloat16),
        "v_range": zeros((groups, 2), torch.int16),
    }


# ---- reference ----


def ref_round_bf16(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """FP32 to BF16, rounded up where 16 random bits carry."""
    bits = x.contiguous().view(torch.int32)
    carried = bits + random.to(torch.int32)
    bits = torch.where(bits & 0x7F800000 == 0x7F800000, bits, carried)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def ref_encode_m(m: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [G, 128] float8_e4m3fn, scale [G] BF16) of FP32 m."""
    amax = m.abs().amax(1)
    bits = ((amax * (1.0 / M_MAX)).view(torch.int32) & -0x10000) + 0x10000
    scale = bits.view(torch.float32).clamp(min=LEAST_SCALE)
    scale = torch.where(amax < torch.inf, scale, torch.nan)
    # e4m3's exponents fall on FP32's lowest ones, and its subnormals on FP32's: no case for them.
    f = (m * (1.0 / scale).unsqueeze(1) * 2.0**-120).view(torch.int32)
    # 10 random bits atop the 20 dropped ones, and a one below them so that the mean is right.
    f = f + ((random.to(torch.int32) << 10) | 0x200)
    code = ((f >> 20) & 0x7F) | ((f >> 24) & 0x80)
    return code.to(torch.uint8).view(torch.float8_e4m3fn), scale.bfloat16()


def ref_decode_m(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale.float().unsqueeze(1)


def ref_encode_v(v: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [G, 128], range int16 [G, 2]) of FP32 v >= 0."""
    top = v.amax(1)
    bottom = torch.where(v > 0, v, torch.inf).amin(1)
    hi = torch.ceil(torch.log2(top) * UNIT) + 1.0
    lo = torch.floor(torch.log2(bottom) * UNIT) - 1.0
    lo = torch.where(top > 0, lo.clamp(min=LOWEST), 0.0)
    hi = torch.maximum(torch.where(top > 0, hi, 0.0), lo + UNIT)
    per_code = (254.0 * UNIT) / (hi - lo)
    offset = 8192.0 - lo * (1.0 / UNIT) * per_code
    z = torch.log2(v) * per_code.unsqueeze(1) + offset.unsqueeze(1)
    z = z.clamp(min=8192.0)
    f = z - (z.view(torch.int32) & -(1 << POSITION_BITS)).view(torch.float32)
    # Between codes v is convex in the position f: the share of v is f - curve f (1 - f) + O(step^2).
    curve = ((hi - lo) * (math.log(2.0) / 2.0 / 254.0 / UNIT)).unsqueeze(1)
    z = z - curve * (f - f * f)
    code = z.view(torch.int32) + (random.to(torch.int32) | 0x400)
    code = torch.where(v != 0, (code >> POSITION_BITS) & 0xFF, 0)
    broken = ~(top < torch.inf)
    lo, hi = torch.where(broken, BROKEN, lo), torch.where(broken, 0.0, hi)
    return code.to(torch.uint8), torch.stack([lo, hi], 1).to(torch.int16)


def ref_decode_v(codes: torch.Tensor, v_range: torch.Tensor) -> torch.Tensor:
    lo, hi = v_range[:, :1].float(), v_range[:, 1:].float()
    step = (hi - lo) * (1.0 / (254.0 * UNIT))
    base = torch.where(lo == BROKEN, torch.nan, lo * (1.0 / UNIT) - step)
    return torch.where(codes == 0, 0.0, torch.exp2(codes.float() * step + base))


# ---- Triton device functions, twins of the above on [G, 128] tiles ----
# FAST: one hardware instruction, subnormals flushed; the interpreter has none.


@triton.jit
def fast_log2(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def fast_sqrt(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.sqrt(x)
    return y


@triton.jit
def fast_inverse(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def round_bf16(x, random):
    """BF16 bits (int16) of FP32 x; random: int32 in [0, 65536)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7F800000) == 0x7F800000, bits, bits + random)
    return (bits >> 16).to(tl.int16)


@triton.jit
def from_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode_m(m, random):
    """(codes int32 [G, 128], low 8 bits; scale FP32 [G], exact in BF16); random: int32, bits 10-19."""
    amax = tl.max(m.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # bits: NaN above everything
    q = (amax.to(tl.float32, bitcast=True) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    scale = ((q & -0x10000) + 0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(amax < 0x7F800000, tl.maximum(scale, 2.0**-100), float("nan"))
    f = (m * (1.0 / scale)[:, None] * 2.0**-120).to(tl.int32, bitcast=True)
    f = f + ((random & 0xFFC00) | 0x200)
    return ((f >> 20) & 0x7F) | ((f >> 24) & 0x80), scale


@triton.jit
def decode_m(codes, scale):
    f = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000
    return f.to(tl.float32, bitcast=True) * 2.0**120 * scale.to(tl.float32)[:, None]


@triton.jit
def encode_v(v, random, FAST: tl.constexpr):
    """(codes int32 [G, 128], low 8 bits; lo, hi FP32 [G], whole); random: int32, bits 0-9."""
    bits = v.to(tl.int32, bitcast=True)
    top = tl.max(bits, 1)
    # As unsigned numbers less one, zero is the largest.
    bottom = (tl.min((bits - 1).to(tl.uint32, bitcast=True), 1) + 1).to(tl.float32, bitcast=True)
    fits = (top >= 0) & (top < 0x7F800000)
    hi = tl.ceil(fast_log2(top.to(tl.float32, bitcast=True), FAST) * 128.0) + 1.0
    lo = tl.floor(fast_log2(bottom, FAST) * 128.0) - 1.0
    lo = tl.where(top > 0, tl.maximum(lo, -16128.0), 0.0)
    hi = tl.maximum(tl.where(top > 0, hi, 0.0), lo + 128.0)
    per_code = 32512.0 / (hi - lo)
    offset = 8192.0 - lo * (1.0 / 128.0) * per_code
    z = fast_log2(v, FAST) * per_code[:, None] + offset[:, None]
    z = tl.maximum(z, 8192.0)
    f = z - (z.to(tl.int32, bitcast=True) & -1024).to(tl.float32, bitcast=True)
    curve = (hi - lo) * (0.6931471805599453 / 2.0 / 32512.0)
    z = z - curve[:, None] * (f - f * f)
    code = z.to(tl.int32, bitcast=True) + ((random & 0x3FF) | 0x400)
    code = tl.where(bits != 0, code >> 10, 0)
    return code, tl.where(fits, lo, -32768.0), tl.where(fits, hi, 0.0)


@triton.jit
def decode_v(codes, lo, hi, FAST: tl.constexpr):
    """FP32 v of codes uint8 [G, 128], lo and hi int16 [G]."""
    low = lo.to(tl.float32)
    step = (hi.to(tl.float32) - low) * (1.0 / 32512.0)
    base = tl.where(lo == -32768, float("nan"), low * (1.0 / 128.0) - step)
    v = fast_exp2(codes.to(tl.float32) * step[:, None] + base[:, None], FAST)
    return tl.where(codes == 0, 0.0, v)
