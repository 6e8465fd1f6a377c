"""Operands of one GEMM out of several parts that lie side by side along its inner dimension.

Where several linears read one tensor, the gradient of that tensor is sum over i of
grad_i @ weight_i: one GEMM over the joined inner dimension, if scale(grad_i) * scale(weight_i) is the
same for all parts. The weights' codes stay as they are; the gradients, which are cast here, take up
the difference. With S the largest scale_from_amax(grad_i) * scale(weight_i), part i has scale
S / scale(weight_i): at least its own, so nothing clips, and in the sum its error is no larger than
that of the part which set S. A part that is all zero, or not finite, has no say in S. For grad_weight
each part's columns keep the part's own scale, whatever its size among the others.

Shapes: grad_i [M, N_i], weight_i [N_i, K]; joined codes [M, N] and [N, M], [K, N], N = sum of N_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..numerics.formats import FORMATS
from ..numerics.recipe import Cast
from .cast import Quantized, ref_transpose_codes, widen
from .codes import (
    HUGE,
    TINY,
    converts_fp8,
    encode,
    magnitude_bits,
    ref_encode,
    ref_scale_from_amax,
    scale_of,
)
from .op import operator, tl, triton
from .scale import ref_amax, tiles

MOST = 3  # parts

# ---- reference: the specification and the CPU path ----


def ref_joined_scales(amaxes, weight_scales, format, pow2, margin) -> torch.Tensor:
    """Scales [n] of n parts from their amaxes and the weights' scales, lists of (1,)."""
    amax, w = (torch.cat([t.reshape(1).float() for t in ts]) for ts in (amaxes, weight_scales))
    own = ref_scale_from_amax(amax, format, pow2, margin) * w
    top = torch.where((amax > 0) & (amax < torch.inf), own, 0.0).amax()
    top = torch.where(top > 0, top, w.amax())
    return (top / w).clamp(TINY, HUGE)


def ref_quantize_joined(
    parts, amaxes, weight_scales, amax_out, format, pow2, margin, both
) -> list[torch.Tensor]:
    for found, x in zip(amax_out, parts, strict=False):
        torch.maximum(found, ref_amax(x), out=found)
    dtype = FORMATS[format].dtype

    def codes(scales):
        pairs = zip(parts, scales, strict=True)
        each = [ref_encode(x.float() * (1.0 / s), format).view(torch.uint8) for x, s in pairs]
        return torch.cat(each, 1)

    shared = ref_joined_scales(amaxes, weight_scales, format, pow2, margin)
    out = [codes(shared).view(dtype), shared[:1].clone()]
    if both:
        own = [ref_scale_from_amax(a.float(), format, pow2, margin) for a in amaxes]
        out += [ref_transpose_codes(codes(own)).view(dtype), *own]
    return out


def ref_join_transposed(codes: list[torch.Tensor], turn: int) -> torch.Tensor:
    parts = [c.view(torch.uint8) for c in codes]
    if turn:
        whole = torch.stack([c.unflatten(0, (-1, turn)) for c in parts], 1).flatten(0, 2)
    else:
        whole = torch.cat(parts)
    return ref_transpose_codes(whole).view(codes[0].dtype)


# ---- Triton ----


@triton.jit
def _say(amax, weight, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr):
    """A part's own scale times its weight's; 0 where its amax says nothing."""
    bits = tl.load(amax)
    own = scale_of(bits, E4M3, POW2, MARGIN) * tl.load(weight)
    return tl.where((bits > 0) & (bits < 0x7F800000), own, 0.0)


@triton.jit
def joined_scale(
    a0, a1, a2, w0, w1, w2, weight, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr
):
    """Scale of the part whose weight has the scale at `weight`; twin of `ref_joined_scales`.
    a0..a2: int32 magnitudes; a1, a2, w1, w2 may be None."""
    top, most = _say(a0, w0, E4M3, POW2, MARGIN), tl.load(w0)
    if a1 is not None:
        top = tl.maximum(top, _say(a1, w1, E4M3, POW2, MARGIN))
        most = tl.maximum(most, tl.load(w1))
    if a2 is not None:
        top = tl.maximum(top, _say(a2, w2, E4M3, POW2, MARGIN))
        most = tl.maximum(most, tl.load(w2))
    top = tl.where(top > 0, top, most)
    scale = tl.div_rn(top, tl.load(weight))
    return tl.minimum(tl.maximum(scale, 2.0**-126), 2.0**126)


@triton.jit
def _join_cast_kernel(
    x, a0, a1, a2, w0, w1, w2, amax, weight, amax_out, codes, codes_t, scale, scale_t,
    M, N, stride_m, stride_n, codes_stride,
    E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, HARDWARE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of one part, with its `amax` and `weight` scale. codes, codes_t: where the part begins
    in the joined codes."""
    tiles_n = tl.cdiv(N, BN)
    pid_m, pid_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    in_m, in_n = pid_m * BM + i < M, pid_n * BN + j < N
    inside = in_m[:, None] & in_n[None, :]
    base = x + pid_m.to(tl.int64) * BM * stride_m + pid_n.to(tl.int64) * BN * stride_n
    v = tl.load(base + i[:, None] * stride_m + j[None, :] * stride_n, mask=inside, other=0.0)
    v = widen(v, HARDWARE)
    if amax_out is not None:
        tl.atomic_max(amax_out, tl.max(tl.max(magnitude_bits(v), 1), 0), sem="relaxed")
    s = joined_scale(a0, a1, a2, w0, w1, w2, weight, E4M3, POW2, MARGIN)
    if scale is not None:
        tl.store(scale, s, mask=tl.program_id(0) == 0)
    c = encode(v * tl.div_rn(1.0, s), E4M3, HARDWARE)
    out = codes + pid_m.to(tl.int64) * BM * codes_stride + pid_n * BN
    tl.store(out + i[:, None] * codes_stride + j[None, :], c, mask=inside)
    if codes_t is not None:
        s = scale_of(tl.load(amax), E4M3, POW2, MARGIN)
        tl.store(scale_t, s, mask=tl.program_id(0) == 0)
        c = encode(v * tl.div_rn(1.0, s), E4M3, HARDWARE)
        out = codes_t + pid_n.to(tl.int64) * BN * M + pid_m * BM
        tl.store(out + j[:, None] * M + i[None, :], tl.trans(c), mask=in_n[:, None] & in_m[None, :])


@triton.jit
def _join_transpose_kernel(
    codes, out, M, K, out_stride, step, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """step: columns of `out` from one tile of BM rows to the next."""
    tiles_k = tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    in_m, in_k = pid_m * BM + i < M, pid_k * BK + j < K
    base = codes + pid_m.to(tl.int64) * BM * K + pid_k * BK
    c = tl.load(base + i[:, None] * K + j[None, :], mask=in_m[:, None] & in_k[None, :], other=0)
    base = out + pid_k.to(tl.int64) * BK * out_stride + pid_m * step
    inside = in_k[:, None] & in_m[None, :]
    tl.store(base + j[:, None] * out_stride + i[None, :], tl.trans(c), mask=inside)


# ---- Triton wrappers: same arguments and results as the references ----


def triton_quantize_joined(
    parts, amaxes, weight_scales, amax_out, format, pow2, margin, both
) -> list[torch.Tensor]:
    rows, wide, device = parts[0].shape[0], sum(x.shape[1] for x in parts), parts[0].device
    if not rows:
        return ref_quantize_joined(
            parts, amaxes, weight_scales, amax_out, format, pow2, margin, both
        )
    codes = torch.empty(rows, wide, dtype=torch.uint8, device=device)
    codes_t = torch.empty(wide, rows, dtype=torch.uint8, device=device) if both else None
    shared, *own = (torch.empty(1, device=device) for _ in range(1 + both * len(parts)))
    none, at = [None] * (MOST - len(parts)), 0
    tops = [a.view(torch.int32) for a in amaxes]
    for n, x in enumerate(parts):
        _join_cast_kernel[tiles(rows, x.shape[1], 64, 128)](
            x, *tops, *none, *weight_scales, *none, tops[n], weight_scales[n],
            amax_out[n].view(torch.int32) if amax_out else None, codes[:, at:],
            codes_t[at:] if both else None, None if n else shared, own[n] if both else None,
            rows, x.shape[1], *x.stride(), wide,
            E4M3=format == "e4m3", POW2=pow2, MARGIN=margin, HARDWARE=converts_fp8(device),
            BM=64, BN=128, num_warps=8,
        )  # fmt: skip
        at += x.shape[1]
    dtype = FORMATS[format].dtype
    return [codes.view(dtype), shared, *([codes_t.view(dtype), *own] if both else [])]


def triton_join_transposed(codes: list[torch.Tensor], turn: int) -> torch.Tensor:
    wide, cols = sum(c.shape[0] for c in codes), codes[0].shape[1]
    out = torch.empty(cols, wide, dtype=torch.uint8, device=codes[0].device)
    at, high = 0, turn or 128
    for c in codes:
        _join_transpose_kernel[tiles(c.shape[0], cols, high, 128)](
            c.contiguous().view(torch.uint8), out[:, at:], c.shape[0], cols, wide,
            turn * len(codes) or high, BM=high, BK=128, num_warps=8,
        )  # fmt: skip
        at += turn or c.shape[0]
    return out.view(codes[0].dtype)


# ---- operators ----


def _fake_quantize_joined(parts, amaxes, weight_scales, amax_out, format, pow2, margin, both):
    rows, wide, dtype = parts[0].shape[0], sum(x.shape[1] for x in parts), FORMATS[format].dtype
    out = [parts[0].new_empty(rows, wide, dtype=dtype), parts[0].new_empty(1, dtype=torch.float32)]
    if both:
        out.append(parts[0].new_empty(wide, rows, dtype=dtype))
        out += [x.new_empty(1, dtype=torch.float32) for x in parts]
    return out


_quantize_joined = operator(
    "quantize_joined(Tensor[] parts, Tensor[] amaxes, Tensor[] weight_scales, "
    "Tensor(a!)[] amax_out, str format, bool pow2, int margin, bool both) -> Tensor[]",
    reference=ref_quantize_joined,
    fake=_fake_quantize_joined,
    cuda=triton_quantize_joined,
)
_join_transposed = operator(
    "join_transposed(Tensor[] codes, int turn) -> Tensor",
    reference=ref_join_transposed,
    fake=lambda codes, turn: codes[0].new_empty(codes[0].shape[1], sum(c.shape[0] for c in codes)),
    cuda=triton_join_transposed,
)


def quantize_joined(
    parts: list[torch.Tensor],
    amaxes: list[torch.Tensor],
    weight_scales: list[torch.Tensor],
    cast: Cast,
    *,
    amax_out: Sequence[torch.Tensor] = (),
    both: bool = True,
) -> tuple[Quantized, list[Quantized]]:
    """(rows, columns of each part) of the parts [M, N_i].

    rows: codes [M, N] whose scale is the first part's, for a GEMM with `join_transposed` of weights
    of `weight_scales`. Columns: codes [N_i, M] under the part's own scale; none without `both`.
    amaxes: fp32 (1,) a part. amax_out: fp32 (1,) a part, raised to the part's amax. At most 3 parts;
    cast per tensor and to nearest. Raises ValueError otherwise.
    """
    if len(parts) > MOST or cast.granularity != "tensor" or cast.rounding != "nearest":
        raise ValueError(f"quantize_joined: at most {MOST} parts, per tensor, to nearest: {cast}")
    codes, scale, *cols = _quantize_joined(
        [x.detach() for x in parts], amaxes, weight_scales, list(amax_out), cast.format,
        cast.scale_kind == "pow2", cast.margin, both,
    )  # fmt: skip
    rows = Quantized(codes, scale, "tensor")
    if not both:
        return rows, []
    pairs = zip(cols[0].split([x.shape[1] for x in parts]), cols[1:], strict=True)
    return rows, [Quantized(c, s, "tensor") for c, s in pairs]


def join_transposed(weights: list[Quantized], turn: int = 0) -> Quantized:
    """weight_i [N_i, K] as one [K, N], exactly; its scale is the first weight's. "tensor" only.

    turn: the columns alternate, so many of each weight (a power of two that divides all N_i, which
    are equal; ValueError otherwise); 0: one weight after the other.
    """
    if turn and any(w.codes.shape[0] != weights[0].codes.shape[0] for w in weights):
        raise ValueError("join_transposed: weights that alternate have one shape")
    if turn and (weights[0].codes.shape[0] % turn or turn & (turn - 1)):
        raise ValueError(f"join_transposed: {weights[0].codes.shape[0]} rows in turns of {turn}")
    codes = _join_transposed([w.codes for w in weights], turn)
    return Quantized(codes, weights[0].scale, "tensor")
