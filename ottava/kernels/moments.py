"""8-bit (and BF16) optimizer moments: one byte an element, a few bytes per group of 128.

m: e4m3 codes, one BF16 scale a group (the first BF16 above amax / 448), rounded to FP16 at 1/256 of
the scale and from there stochastically; zero stays zero. v: a logarithmic code. Code 0 is exactly 0;
codes 1..255 stand for 2**(lo + (code - 1) * step), with lo and hi = lo + 254 * step kept per group
as int16 in units of 1/128 of a binade, rounded outward, at least a binade apart. Rounding is
stochastic in v itself, between the two neighbouring codes, so that a slow average neither freezes
nor drifts; v >= 2**-126 never becomes 0, and less is 0.
A group with a non-finite m or v reads back as NaN (its scale, or lo = -32768): it is not hidden.

Tensors are [G, 128] here: G groups. random: 16-bit integers an element.
"""

from __future__ import annotations

import math

import torch

from .op import tl, triton

GROUP = 128
M_MAX = 448.0
TINY = 2.0**-126
BROKEN = -32768  # lo of a group with a non-finite v
UNIT = 128.0  # steps of lo and hi per binade
LOWEST = -126.0 * UNIT  # hardware exp2 flushes subnormals
LEAST_SCALE = 2.0**-100


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
    # e4m3's exponents fall on FP16's lowest ones, and its subnormals on FP16's: no case for them.
    h = (m * (1.0 / scale * 2.0**-8).unsqueeze(1)).half().view(torch.int16).to(torch.int32)
    h = h + ((random.to(torch.int32) >> 1) & 0x7F)
    code = ((h >> 7) & 0x7F) | ((h >> 8) & 0x80)
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
    z = torch.log2(v) * per_code.unsqueeze(1) + (1.0 - lo / UNIT * per_code).unsqueeze(1)
    # Rounded up with a probability of f, the place between two codes, would be unbiased in log v.
    # Between codes v is convex: its share is f - curve f (1 - f) + O(step^2), so that is how
    # likely z + rho, rounded down, must pass the next code.
    curve = ((hi - lo) * (math.log(2.0) / 2.0 / 254.0 / UNIT)).unsqueeze(1)
    rho = (random & 0x7FFF).float() * 2.0**-15
    z = rho * (curve * rho + (1.0 - curve)) + z
    code = torch.where(v < TINY, 0.0, z.floor()).clamp(0.0, 255.0)
    broken = ~(top < torch.inf)
    code = torch.where(broken.unsqueeze(1), 0.0, code)
    lo, hi = torch.where(broken, BROKEN, lo), torch.where(broken, 0.0, hi)
    return code.to(torch.uint8), torch.stack([lo, hi], 1).to(torch.int16)


def ref_decode_v(codes: torch.Tensor, v_range: torch.Tensor, fade: float = 1.0) -> torch.Tensor:
    """FP32 v times `fade`."""
    lo, hi = v_range[:, :1].float(), v_range[:, 1:].float()
    step = (hi - lo).clamp(min=UNIT) * (1.0 / (254.0 * UNIT))
    base = lo * (1.0 / UNIT) - step + (math.log2(fade) if fade else -torch.inf)
    v = torch.exp2(codes.float() * step + base)
    return torch.where(lo == BROKEN, torch.nan, torch.where(codes == 0, 0.0, v))


# ---- Triton device functions, twins of the above on [G, 128] tiles ----
# FAST: one hardware instruction, subnormals flushed; the interpreter has none. PACKED: several
# elements in one register, on Hopper and later; tests run that assembly against the reference.


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
def _pack_m(x, random, PACKED: tl.constexpr):
    """Codes uint8 of FP32 x = m / scale / 256, |x| <= 1.75; random: uint16, bits 1-7."""
    if PACKED:
        code = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, r, s, t;
            cvt.rn.f16x2.f32 a, $2, $1;       cvt.rn.f16x2.f32 b, $4, $3;
            and.b32 r, $5, 0x00fe00fe;        and.b32 s, $6, 0x00fe00fe;
            and.b32 t, a, 0x7fff7fff;         add.u32 a, a, t;
            and.b32 t, b, 0x7fff7fff;         add.u32 b, b, t;
            add.u32 a, a, r;                  add.u32 b, b, s;
            prmt.b32 $0, a, b, 0x7531; }""",
            "=r,r,r,r,r,r,r",
            [x, random],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        h = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) + (
            (random.to(tl.int32) >> 1) & 0x7F
        )
        code = (((h >> 7) & 0x7F) | ((h >> 8) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def encode_m(m, unit, random, FAST: tl.constexpr, PACKED: tl.constexpr):
    """(codes uint8 [G, 128]; scale FP32 [G], exact in BF16) of m * unit; random: uint16, bits 1-7."""
    if PACKED:
        amax = tl.reduce(tl.abs(m), 1, _larger)
    else:  # as bits: NaN above everything
        amax = tl.max(m.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    amax = amax * unit
    q = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    scale = ((q & -0x10000) + 0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(amax < float("inf"), tl.maximum(scale, 2.0**-100), float("nan"))
    inverse = fast_inverse(scale, FAST) * (2.0**-8 * unit)
    return _pack_m(m * inverse[:, None], random, PACKED), scale


@triton.jit
def decode_m(codes, PACKED: tl.constexpr):
    """FP32 m / scale of codes uint8; 0x7f, which no m has, reads as NaN or 480."""
    if PACKED:
        m = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        f = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000
        m = f.to(tl.float32, bitcast=True) * 2.0**120
    return m


@triton.jit
def _pack_v(z, square, linear, random, PACKED: tl.constexpr):
    """Codes uint8: z + linear r + square r^2 - 256 rounded down, r = 2 + 2 rho; 0 where z is -inf."""
    if PACKED:
        # 2 + 2 rho from two bytes; whole numbers are bits 15-22 of 256 to 512. (Of -inf: 0.)
        code = tl.inline_asm_elementwise(
            """{ .reg .f32 p, q, r, s, a, b, c, d; .reg .b32 t, u, v;
            and.b32 u, $9, 0x7fff7fff;             and.b32 v, $10, 0x7fff7fff;
            prmt.b32 t, u, 0x40000000, 0x7104;     mov.b32 p, t;
            prmt.b32 t, u, 0x40000000, 0x7324;     mov.b32 q, t;
            prmt.b32 t, v, 0x40000000, 0x7104;     mov.b32 r, t;
            prmt.b32 t, v, 0x40000000, 0x7324;     mov.b32 s, t;
            fma.rn.f32 a, $5, p, $11;      fma.rn.f32 b, $6, q, $12;
            fma.rn.f32 c, $7, r, $13;      fma.rn.f32 d, $8, s, $14;
            fma.rn.f32 a, a, p, $1;        fma.rn.f32 b, b, q, $2;
            fma.rn.f32 c, c, r, $3;        fma.rn.f32 d, d, s, $4;
            prmt.b32 t, a, b, 0x6521;      prmt.b32 u, c, d, 0x6521;
            add.u32 t, t, t;               add.u32 u, u, u;
            prmt.b32 $0, t, u, 0x7531; }""",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [z, square, random, linear],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        rho = ((random.to(tl.int32) & 0x7FFF) | 0x8000).to(tl.float32) * 2.0**-14
        z = rho * (square * rho + linear) + z
        code = (z.to(tl.int32, bitcast=True) >> 15).to(tl.uint8)
    return code


@triton.jit
def encode_v(v, unit, random, FAST: tl.constexpr, PACKED: tl.constexpr):
    """(codes uint8 [G, 128]; lo, hi FP32 [G], whole) of v * unit; random: uint16, bits 0-14."""
    bits = v.to(tl.int32, bitcast=True)
    top = tl.max(bits, 1)
    # As unsigned numbers less one, zero is the largest.
    bottom = (tl.min((bits - 1).to(tl.uint32, bitcast=True), 1) + 1).to(tl.float32, bitcast=True)
    largest = top.to(tl.float32, bitcast=True) * unit
    fits = (top >= 0) & (largest < float("inf"))
    hi = tl.ceil(fast_log2(largest, FAST) * 128.0) + 1.0
    lo = tl.floor(fast_log2(bottom * unit, FAST) * 128.0) - 1.0
    lo = tl.where(top > 0, tl.maximum(lo, -16128.0), 0.0)
    hi = tl.maximum(tl.where(top > 0, hi, 0.0), lo + 128.0)
    per_code = 32512.0 * fast_inverse(hi - lo, FAST)
    curve = (hi - lo) * (0.6931471805599453 / 2.0 / 32512.0)
    # 256 + 1 + rho (1 - curve + curve rho), in terms of r
    offset = 256.0 + 2.0 * curve + (fast_log2(unit, FAST) - lo * (1.0 / 128.0)) * per_code
    z = fast_log2(v, FAST) * per_code[:, None] + offset[:, None]
    square, linear = 0.25 * curve, 0.5 - 1.5 * curve
    code = _pack_v(z, square[:, None], linear[:, None], random, PACKED)
    return code, tl.where(fits, lo, -32768.0), tl.where(fits, hi, 0.0)


@triton.jit
def _spread_v(codes, PACKED: tl.constexpr):
    """FP32 of uint8 codes; of 0 so low a number that 2**(it * step + base) is 0."""
    if PACKED:
        # From bytes, as FP16; a code of 0 gets -65504, as relu(1025 - (1024 + code)) is 1.
        c = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s, t, low, more, minus, less; .reg .b16 p, q;
            mov.b32 less, 0xe400e400;
            mov.b32 low, 0xfbfffbff;   mov.b32 more, 0x64016401;   mov.b32 minus, 0xbc00bc00;
            prmt.b32 a, $4, 0x64646464, 0x4140;        prmt.b32 b, $4, 0x64646464, 0x4342;
            fma.rn.relu.f16x2 s, a, minus, more;       fma.rn.relu.f16x2 t, b, minus, more;
            add.rn.f16x2 a, a, less;                   add.rn.f16x2 b, b, less;
            fma.rn.f16x2 a, s, low, a;                 fma.rn.f16x2 b, t, low, b;
            mov.b32 {p, q}, a;   cvt.f32.f16 $0, p;    cvt.f32.f16 $1, q;
            mov.b32 {p, q}, b;   cvt.f32.f16 $2, p;    cvt.f32.f16 $3, q; }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        c = tl.where(codes == 0, -float("inf"), codes.to(tl.float32))
    return c


@triton.jit
def decode_v(codes, lo, hi, log_fade, FAST: tl.constexpr, PACKED: tl.constexpr):
    """FP32 v * 2**log_fade of codes uint8 [G, 128], lo and hi int16 [G]."""
    low = lo.to(tl.float32)
    step = tl.maximum(hi.to(tl.float32) - low, 128.0) * (1.0 / 32512.0)  # at first lo = hi = 0
    base = tl.where(lo == -32768, float("nan"), low * (1.0 / 128.0) - step + log_fade)
    return fast_exp2(_spread_v(codes, PACKED) * step[:, None] + base[:, None], FAST)
