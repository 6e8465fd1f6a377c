"""Rotary position embedding (NeoX halves) on the first R of D head dims, in one pass.

With i < R/2 and the angles of a position:
    y_i         = x_i cos_i - x_{i+R/2} sin_i
    y_{i+R/2}   = x_{i+R/2} cos_{i+R/2} + x_i sin_{i+R/2}
Dims R..D-1 pass unchanged. The inverse (and so the backward, a rotation being orthogonal) is the
same with -sin. Arithmetic in FP32, rounded once to x's dtype. `rope_int8` also gives the int8 codes
of the result, one scale per head row, from the same pass, and `rope_back` the amax of the gradient
that it turns back, which the cast of that gradient needs next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codes import magnitude_bits
from .int8 import int8_encode, int8_scale, ref_quantize_int8
from .norm import raise_amax
from .op import operator, tl, triton
from .scale import ref_amax


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


def ref_rope_int8(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Reference of `rope_int8`."""
    y = ref_rope(x, cos, sin, False)
    return [y, *ref_quantize_int8(y.flatten(0, 2), y.shape[-1])]


def ref_rope_back(grad: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Reference of `rope_back`."""
    out = ref_rope(grad, cos, sin, True)
    return [out, ref_amax(out)]


@triton.jit
def _rope(
    x, cos, sin, out, codes, scale, amax, x_b, x_t, x_h, a_b, a_t, T, H, sign,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BH: tl.constexpr,
    INT8: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    """One program turns BH heads of one token. HALF >= R / 2 and REST >= D - R are powers of two."""
    if AMAX:
        seen = tl.load(amax)
    token = tl.program_id(0)
    b, t = (token // T).to(tl.int64), token % T
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    i = tl.arange(0, HALF)
    pair = i < R // 2
    angle = b * a_b + t * a_t + i
    cos_low = tl.load(cos + angle, mask=pair, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=pair, other=0.0).to(tl.float32)[None, :] * sign
    cos_high = tl.load(cos + angle + R // 2, mask=pair, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + R // 2, mask=pair, other=0.0).to(tl.float32)[None, :] * sign
    x += b * x_b + t.to(tl.int64) * x_t + h[:, None] * x_h
    row = token.to(tl.int64) * H + h
    at = row[:, None] * D
    inside = (h < H)[:, None] & pair[None, :]
    low = tl.load(x + i[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + R // 2 + i[None, :], mask=inside, other=0.0).to(tl.float32)
    new_low = (low * cos_low - high * sin_low).to(out.dtype.element_ty)
    new_high = (high * cos_high + low * sin_high).to(out.dtype.element_ty)
    tl.store(out + at + i[None, :], new_low, mask=inside)
    tl.store(out + at + R // 2 + i[None, :], new_high, mask=inside)
    j = R + i
    tail = inside
    rest = new_low
    if REST > 0:
        j = R + tl.arange(0, REST)
        tail = (h < H)[:, None] & (j < D)[None, :]
        rest = tl.load(x + j[None, :], mask=tail, other=0.0)
        tl.store(out + at + j[None, :], rest, mask=tail)
    if AMAX:
        low, high = magnitude_bits(new_low.to(tl.float32)), magnitude_bits(new_high.to(tl.float32))
        top = tl.maximum(tl.max(tl.max(low, 1), 0), tl.max(tl.max(high, 1), 0))
        if REST > 0:
            bits = magnitude_bits(rest.to(tl.float32))
            top = tl.maximum(top, tl.max(tl.max(bits, 1), 0))
        raise_amax(amax, seen, top)
    if INT8:  # of the rounded values, as a cast of the stored tensor would see them
        new_low, new_high = new_low.to(tl.float32), new_high.to(tl.float32)
        top = tl.maximum(tl.max(magnitude_bits(new_low), 1), tl.max(magnitude_bits(new_high), 1))
        if REST > 0:
            top = tl.maximum(top, tl.max(magnitude_bits(rest.to(tl.float32)), 1))
        s = int8_scale(top)
        tl.store(scale + row, s.to(tl.bfloat16), mask=h < H)
        inverse = tl.div_rn(1.0, s)[:, None]
        tl.store(codes + at + i[None, :], int8_encode(new_low * inverse), mask=inside)
        tl.store(codes + at + R // 2 + i[None, :], int8_encode(new_high * inverse), mask=inside)
        if REST > 0:
            rest = int8_encode(rest.to(tl.float32) * inverse)
            tl.store(codes + at + j[None, :], rest, mask=tail)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, codes, scale, sign, amax=None):
    b, t, h, d = x.shape
    rotary = cos.shape[-1]
    if out.numel() == 0:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    batched = cos.dim() == 3 and cos.shape[0] > 1
    heads = min(triton.next_power_of_2(h), max(1, 4096 // triton.next_power_of_2(d)))
    _rope[(b * t, triton.cdiv(h, heads))](
        x, cos.contiguous(), sin.contiguous(), out,
        out if codes is None else codes, out if scale is None else scale,
        out if amax is None else amax.view(torch.int32),
        *x.stride()[:3], t * rotary if batched else 0, rotary, t, h, sign,
        D=d, R=rotary, HALF=triton.next_power_of_2(rotary // 2),
        REST=triton.next_power_of_2(d - rotary) if d > rotary else 0, BH=heads,
        INT8=codes is not None, AMAX=amax is not None,
    )  # fmt: skip


def triton_rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """As `ref_rope`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, cos, sin, out, None, None, -1.0 if inverse else 1.0)
    return out


def triton_rope_int8(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """As `ref_rope_int8`."""
    out, codes, scale = _fake_rope_int8(x, cos, sin)
    _launch(x, cos, sin, out, codes, scale, 1.0)
    return [out, codes, scale]


def triton_rope_back(grad: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """As `ref_rope_back`."""
    out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    amax = torch.zeros(1, dtype=torch.float32, device=grad.device)
    _launch(grad, cos, sin, out, None, None, -1.0, amax)
    return [out, amax]


def _fake_rope(x, cos, sin, inverse):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_rope_int8(x, cos, sin):
    d, rows = x.shape[-1], x.shape[0] * x.shape[1] * x.shape[2]
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(rows, d, dtype=torch.int8, device=x.device),
        torch.empty(rows, 1, dtype=torch.bfloat16, device=x.device),
    ]


def _fake_rope_back(grad, cos, sin):
    out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    return [out, torch.empty(1, dtype=torch.float32, device=grad.device)]


_rope_op = operator(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    reference=ref_rope,
    fake=_fake_rope,
    cuda=triton_rope,
)

_rope_int8_op = operator(
    "rope_int8(Tensor x, Tensor cos, Tensor sin) -> Tensor[]",
    reference=ref_rope_int8,
    fake=_fake_rope_int8,
    cuda=triton_rope_int8,
)


_rope_back_op = operator(
    "rope_back(Tensor grad, Tensor cos, Tensor sin) -> Tensor[]",
    reference=ref_rope_back,
    fake=_fake_rope_back,
    cuda=triton_rope_back,
)


def rope(x_BTHD: Tensor, cos_TR: Tensor, sin_TR: Tensor, inverse: bool = False) -> Tensor:
    """x rotated (out of place, contiguous). cos, sin: [T, R] or [B or 1, T, R], R even, R <= D.

    As Hugging Face makes them: cos and sin of all R dims, the second half repeating the first.
    Raises ValueError on shapes that do not fit.
    """
    _check(x_BTHD, cos_TR, sin_TR)
    return _rope_op(x_BTHD, cos_TR, sin_TR, inverse)


def rope_int8(x_BTHD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x rotated, its int8 codes [B * T * H, D], BF16 scales [B * T * H, 1]): as `rope` followed by
    `quantize_int8` of the head rows, bit for bit."""
    _check(x_BTHD, cos_TR, sin_TR)
    out, codes, scale = _rope_int8_op(x_BTHD, cos_TR, sin_TR)
    return out, codes, scale


def rope_back(grad_BTHD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient before rope, its amax FP32 (1,)) of the gradient after it: `rope` inverted."""
    _check(grad_BTHD, cos_TR, sin_TR)
    out, amax = _rope_back_op(grad_BTHD, cos_TR, sin_TR)
    return out, amax


def _check(x_BTHD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
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
