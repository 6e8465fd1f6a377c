"""8-bit optimizer moments: one byte an element, a few bytes per group of 128.

m: e4m3 codes, one BF16 scale a group (amax / 448 rounded up), stochastic rounding; zero stays zero.
v: a logarithmic code. Code 0 is exactly 0; codes 1..255 stand for 2**(lo + (code - 1) * step), with
lo and hi = lo + 254 * step kept per group as int16 in units of 1/128 of a binade, rounded outward.
Rounding is stochastic in v itself, between the two neighbouring codes, so that a slow average
neither freezes nor drifts; v > 0 never becomes 0.
A group that holds a non-finite v reads back as NaN (lo = -32768): it is not hidden.

Tensors are [G, 128] here: G groups. random: 10-bit integers an element.
"""

from __future__ import annotations

import torch

from .cast import decode
from .op import tl, triton

GROUP = 128
M_MAX = 448.0
BROKEN = -32768  # lo of a group with a non-finite v
UNIT = 128.0  # steps of lo and hi per binade
LEAST_V = 2.0**-126  # a smaller v > 0 is kept as this: hardware exp2 flushes subnormals
RANDOM_BITS = 10


# ---- reference ----


def ref_encode_m(m: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [G, 128] float8_e4m3fn, scale [G] BF16) of FP32 m."""
    amax = m.abs().amax(1)
    fits = amax < torch.inf
    bits = ((amax * (1.0 / M_MAX)).view(torch.int32) + 0xFFFF) & -0x10000
    scale = torch.where(fits, bits.view(torch.float32).clamp(min=2.0**-126), 1.0)
    y = m.abs() * (1.0 / scale).unsqueeze(1)
    small = y < 2.0**-6
    f = torch.where(small, y + 2.0**-6, y).view(torch.int32)
    # 10 random bits atop the 20 dropped ones, and a one below them so that the mean is right.
    f = f + ((random.to(torch.int32) << 10) | 0x200)
    code = (f >> 20) - (120 << 3) - small.int() * 8
    code = torch.where(m.isfinite(), code.clamp(0, 0x7E), 0x7F)
    code = code | (torch.signbit(m).int() << 7)
    return code.to(torch.uint8).view(torch.float8_e4m3fn), scale.bfloat16()


def ref_decode_m(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale.float().unsqueeze(1)


def ref_encode_v(v: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [G, 128], range int16 [G, 2]) of FP32 v >= 0."""
    positive = v > 0
    log = torch.log2(v.clamp(min=LEAST_V)) * UNIT
    top = torch.where(positive, log, -16384.0).amax(1)
    bottom = torch.where(positive, log, 16384.0).amin(1)
    hi = torch.ceil(top).clamp(max=16384.0)
    lo = torch.minimum(torch.floor(bottom), hi - 1.0)
    step = (hi - lo) * (1.0 / 254.0)  # in units of 1/128 binade
    position = ((log - lo.unsqueeze(1)) * (1.0 / step).unsqueeze(1)).clamp(0.0, 254.0)
    below = torch.floor(position).clamp(max=253.0)
    binade = (step * (1.0 / UNIT)).unsqueeze(1)
    # v lies at the share (2**(f * binade) - 1) / (2**binade - 1) of the way to the next code.
    share = torch.exp2((position - below) * binade) - 1.0
    up = (random.float() + 0.5) * 2.0**-RANDOM_BITS * (torch.exp2(binade) - 1.0) < share
    code = torch.where(positive, below.int() + up.int() + 1, 0)
    broken = ~(v.amax(1) < torch.inf)
    code = torch.where(broken.unsqueeze(1), 255, code)
    lo = torch.where(broken, float(BROKEN), lo)
    return code.to(torch.uint8), torch.stack([lo, torch.where(broken, 0.0, hi)], 1).to(torch.int16)


def ref_decode_v(codes: torch.Tensor, v_range: torch.Tensor) -> torch.Tensor:
    lo, hi = v_range[:, :1].float(), v_range[:, 1:].float()
    c = codes.float()
    v = torch.exp2((lo + (c - 1.0) * ((hi - lo) * (1.0 / 254.0))) * (1.0 / UNIT))
    v = torch.where(codes == 0, 0.0, v)
    return torch.where(lo == BROKEN, torch.nan, v)


# ---- Triton device functions, twins of the above on [G, 128] tiles ----


@triton.jit
def encode_m(m, random):
    """(codes uint8 [G, 128], scale BF16 [G]); random: int32 in [0, 1024)."""
    a = tl.abs(m)
    amax = tl.max(a.to(tl.int32, bitcast=True), 1)  # as bits: a NaN is above everything
    bits = ((amax.to(tl.float32, bitcast=True) * (1.0 / 448.0)).to(tl.int32, bitcast=True)) + 0xFFFF
    scale = (bits & -0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(amax < 0x7F800000, tl.maximum(scale, 2.0**-126), 1.0)
    y = a * (1.0 / scale)[:, None]
    small = y < 0.015625
    f = tl.where(small, y + 0.015625, y).to(tl.int32, bitcast=True)
    f = f + ((random << 10) | 0x200)
    code = (f >> 20) - tl.where(small, 968, 960)
    code = tl.minimum(tl.maximum(code, 0), 0x7E)
    code = tl.where(a.to(tl.int32, bitcast=True) >= 0x7F800000, 0x7F, code)
    code = code | ((m.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8), scale.to(tl.bfloat16)


@triton.jit
def decode_m(codes, scale):
    return decode(codes, True) * scale.to(tl.float32)[:, None]


@triton.jit
def encode_v(v, random):
    """(codes uint8 [G, 128], lo int16 [G], hi int16 [G]); random: int32 in [0, 1024)."""
    positive = v > 0
    log = tl.log2(tl.maximum(v, 2.0**-126)) * 128.0
    top = tl.max(tl.where(positive, log, -16384.0), 1)
    bottom = tl.min(tl.where(positive, log, 16384.0), 1)
    largest = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    fits = largest < 0x7F800000
    hi = tl.minimum(tl.ceil(top), 16384.0)
    lo = tl.minimum(tl.floor(bottom), hi - 1.0)
    step = (hi - lo) * (1.0 / 254.0)
    position = (log - lo[:, None]) * (1.0 / step)[:, None]
    position = tl.minimum(tl.maximum(position, 0.0), 254.0)
    below = tl.minimum(tl.floor(position), 253.0)
    binade = step * (1.0 / 128.0)
    share = tl.exp2((position - below) * binade[:, None]) - 1.0
    up = (random.to(tl.float32) + 0.5) * 0.0009765625 * (tl.exp2(binade) - 1.0)[:, None] < share
    code = tl.where(positive, below.to(tl.int32) + up.to(tl.int32) + 1, 0)
    code = tl.where(fits[:, None], code, 255)
    lo = tl.where(fits, lo, -32768.0)
    hi = tl.where(fits, hi, 0.0)
    return code.to(tl.uint8), lo.to(tl.int16), hi.to(tl.int16)


@triton.jit
def decode_v(codes, lo, hi):
    low = lo.to(tl.float32)
    step = (hi.to(tl.float32) - low) * (1.0 / (254.0 * 128.0))
    v = tl.exp2((low * (1.0 / 128.0))[:, None] + (codes.to(tl.float32) - 1.0) * step[:, None])
    v = tl.where(codes == 0, 0.0, v)
    return tl.where(lo[:, None] == -32768, float("nan"), v)
