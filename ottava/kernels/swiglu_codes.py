"""The gated activation straight to the codes that the GEMMs after it read, both ways.

Forward, where h's scale is known before h (delayed scaling): h's codes, and gate and up as kept.
Backward: `swiglu_backward` writes two gradients and h in BF16, only to be read and cast. Here they never
exist: with their amaxes known (delayed scaling, or `swiglu_backward_amax`, a pass that writes
nothing), one pass gives the codes of both gradients side by side in both orders, and h's transposed
ones for down_proj's weight gradient. Every value is rounded to the dtype of grad_h first, so codes
are those of a cast of `swiglu_backward`'s outputs, bit for bit. The two gradients' scales are joined
(kernels/joined.py), so that grad_input is one GEMM over 2F.

Shapes: grad_h_MF; gate, up [M, F] int8 with BF16 scales [M, ceil(F/128)], or values with None.
M tokens, F inner features. A tile is BM rows of one group of 128 features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..numerics.formats import BLOCK, FORMATS
from ..numerics.recipe import Cast
from .cast import Quantized, ref_transpose_codes
from .codes import converts_fp8, encode, ref_encode, ref_scale_from_amax, scale_of
from .joined import joined_scale, ref_joined_scales
from .norm import raise_amax
from .op import operator, tl, triton
from .scale import tiles
from .swiglu import (
    inner_contiguous,
    keep_int8,
    ref_swiglu,
    ref_swiglu_backward,
    tile_of,
    top_magnitude,
)


class SwigluCodes(NamedTuple):
    """Outputs of `swiglu_backward_codes`. rows: codes [M, 2F] of grad_gate and grad_up under
    grad_gate's scale, for a GEMM with the joined weights; `interleaves` says in which order. The
    rest is transposed, [F, M]."""

    rows: Quantized
    gate_cols: Quantized
    up_cols: Quantized
    h_cols: Quantized | None


def interleaves(features: int) -> bool:
    """Whether rows of 2F codes alternate between 128 of gate's and 128 of up's, and so lie where the
    same features of a 2-byte grad_h lay; else all of gate's come first."""
    return features % BLOCK == 0


# ---- reference: the specification and the CPU path ----


def ref_swiglu_codes(gate, up, past, amax_out, format, pow2, margin, keep_codes):
    h, found, *kept = ref_swiglu(gate, up, None, keep_codes)
    if amax_out is not None:
        torch.maximum(amax_out, found, out=amax_out)
    scale = ref_scale_from_amax(past, format, pow2, margin)
    return [ref_encode(h.float() * (1.0 / scale), format), scale, *kept]


def ref_swiglu_backward_amax(grad_h, gate, gate_scale, up, up_scale) -> torch.Tensor:
    return ref_swiglu_backward(grad_h, gate, gate_scale, up, up_scale, None, False)[3]


def ref_swiglu_backward_first(
    grad_h, gate, gate_scale, up, up_scale, h_amax, format, pow2, margin
) -> list[torch.Tensor]:
    _, _, h, found, _ = ref_swiglu_backward(grad_h, gate, gate_scale, up, up_scale, None, False)
    scale = ref_scale_from_amax(h_amax.float(), format, pow2, margin)
    codes = ref_encode(h.float() * (1.0 / scale), format)
    return [found[:2].clone(), ref_transpose_codes(codes), scale]


def ref_swiglu_backward_codes(
    grad_h, gate, gate_scale, up, up_scale, rows_out, amaxes, weight_scales, amax_out,
    grad_format, grad_pow2, grad_margin, h_format, h_pow2, h_margin,
):  # fmt: skip
    *values, found, _ = ref_swiglu_backward(grad_h, gate, gate_scale, up, up_scale, None, False)
    for out, top in zip(amax_out, found.split(1), strict=False):
        torch.maximum(out, top, out=out)
    scales = ref_joined_scales(amaxes[:2], weight_scales, grad_format, grad_pow2, grad_margin)
    gate_codes, up_codes = (
        ref_encode(v.float() * (1.0 / s), grad_format)
        for v, s in zip(values[:2], scales, strict=True)
    )
    both = [gate_codes.view(torch.uint8), up_codes.view(torch.uint8)]
    rows = torch.cat(both, 1)
    out = [ref_transpose_codes(rows).view(gate_codes.dtype)]
    out += [s.reshape(1).clone() for s in scales]
    if len(amaxes) == 3:
        h_scale = ref_scale_from_amax(amaxes[2].float(), h_format, h_pow2, h_margin)
        h_codes = ref_encode(values[2].float() * (1.0 / h_scale), h_format)
        out += [ref_transpose_codes(h_codes), h_scale]
    if interleaves(gate.shape[1]):
        rows = torch.stack([c.unflatten(1, (-1, BLOCK)) for c in both], 2).flatten(1)
    rows_out.view(torch.uint8).copy_(rows)
    return out


# ---- Triton ----


@triton.jit
def _forward_kernel(
    gate, up, past, amax, codes, scale, gate_codes, gate_scale, up_codes, up_scale, M, F,
    gate_stride, up_stride, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    HARDWARE: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As `_swiglu_kernel`, with h's codes under the scale of `past` in place of h."""
    seen = tl.load(amax)
    s = scale_of(tl.load(past), E4M3, POW2, MARGIN)
    tl.store(scale, s, mask=tl.program_id(0) == 0)
    number, m, k, inside = tile_of(M, F, ROWS, GROUP)
    wide_m = m.to(tl.int64)[:, None]
    at = wide_m * F + k
    g = tl.load(gate + wide_m * gate_stride + k, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + wide_m * up_stride + k, mask=inside, other=0.0).to(tl.float32)
    h = (g * tl.sigmoid(g) * u).to(gate.dtype.element_ty)
    raise_amax(amax, seen, top_magnitude(h))
    tl.store(codes + at, encode(h.to(tl.float32) * tl.div_rn(1.0, s), E4M3, HARDWARE), mask=inside)
    if KEEP:
        keep_int8(g, gate_codes + at, gate_scale + number, inside, m < M)
        keep_int8(u, up_codes + at, up_scale + number, inside, m < M)


@triton.jit
def _gradients(grad, g, u):
    """grad_gate, grad_up and h in FP32; twin of the arithmetic in swiglu.py."""
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    return grad * u * (sigmoid + silu * (1.0 - sigmoid)), grad * silu, silu * u


@triton.jit
def _load(grad_h, gate, gate_scale, up, up_scale, offs, scale_offs, inside, rows_inside):
    grad = tl.load(grad_h + offs, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + offs, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + offs, mask=inside, other=0).to(tl.float32)
    if gate_scale is not None:
        g *= tl.load(gate_scale + scale_offs, mask=rows_inside, other=0.0).to(tl.float32)[:, None]
        u *= tl.load(up_scale + scale_offs, mask=rows_inside, other=0.0).to(tl.float32)[:, None]
    return grad, g, u


@triton.jit
def _store_both(c, rows, cols, M, stride, i, j, in_m, in_k):
    """Codes c [BM, BF] at `rows` (row stride `stride`; None: not), and transposed at `cols`."""
    if rows is not None:
        tl.store(rows + i[:, None] * stride + j[None, :], c, mask=in_m[:, None] & in_k[None, :])
    tl.store(cols + j[:, None] * M + i[None, :], tl.trans(c), mask=in_k[:, None] & in_m[None, :])


@triton.jit
def _amax_kernel(
    grad_h, gate, gate_scale, up, up_scale, amax, a_h, h_cols, scale_h, M, F,
    H_E4M3: tl.constexpr, H_POW2: tl.constexpr, H_MARGIN: tl.constexpr, HARDWARE: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """amax: int32, of grad_gate, grad_up and, without h_cols [F, M], of h; with it h's codes under
    the scale of a_h."""
    seen_gate, seen_up = tl.load(amax), tl.load(amax + 1)
    groups = tl.cdiv(F, BF)
    pid_m, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    # Eight contiguous elements a thread for bytes too, so that all operands have one layout.
    i, j = tl.arange(0, BM), tl.max_contiguous(tl.arange(0, BF), 8)
    in_m, in_k = pid_m * BM + i < M, group * BF + j < F
    base = pid_m * BM * F + group * BF
    grad, g, u = _load(
        grad_h + base, gate + base, gate_scale, up + base, up_scale,
        i[:, None] * F + j[None, :], (pid_m * BM + i) * groups + group,
        in_m[:, None] & in_k[None, :], in_m,
    )  # fmt: skip
    grad_gate, grad_up, h = _gradients(grad, g, u)
    dtype: tl.constexpr = grad_h.dtype.element_ty
    raise_amax(amax, seen_gate, top_magnitude(grad_gate.to(dtype)))
    raise_amax(amax + 1, seen_up, top_magnitude(grad_up.to(dtype)))
    if h_cols is None:
        raise_amax(amax + 2, tl.load(amax + 2), top_magnitude(h.to(dtype)))
    else:
        s = scale_of(tl.load(a_h), H_E4M3, H_POW2, H_MARGIN)
        tl.store(scale_h, s, mask=tl.program_id(0) == 0)
        c = encode(h.to(dtype).to(tl.float32) * tl.div_rn(1.0, s), H_E4M3, HARDWARE)
        turned = group.to(tl.int64) * BF * M + pid_m * BM
        _store_both(c, None, h_cols + turned, M, 0, i, j, in_m, in_k)


@triton.jit
def _codes_kernel(
    grad_h, gate, gate_scale, up, up_scale, a_gate, a_up, a_h, w_gate, w_up, new_gate, new_up,
    rows, cols, h_cols, scale_gate, scale_up, scale_h, M, F, group_step, up_at,
    GRAD_E4M3: tl.constexpr, GRAD_POW2: tl.constexpr, GRAD_MARGIN: tl.constexpr,
    H_E4M3: tl.constexpr, H_POW2: tl.constexpr, H_MARGIN: tl.constexpr, OVER: tl.constexpr,
    HARDWARE: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """rows [M, 2F], cols [2F, M], h_cols [F, M]. group_step, up_at: codes from one group of gate to
    the next, and from gate's to up's. OVER: rows is the memory of grad_h. new_gate, new_up: where
    the gradients' own amaxes go, or None. h_cols: None where h is not asked for."""
    if new_gate is not None:
        seen_gate, seen_up = tl.load(new_gate), tl.load(new_up)
    s_gate = joined_scale(
        a_gate, a_up, None, w_gate, w_up, None, w_gate, GRAD_E4M3, GRAD_POW2, GRAD_MARGIN
    )
    s_up = joined_scale(
        a_gate, a_up, None, w_gate, w_up, None, w_up, GRAD_E4M3, GRAD_POW2, GRAD_MARGIN
    )
    first = tl.program_id(0) == 0
    tl.store(scale_gate, s_gate, mask=first)
    tl.store(scale_up, s_up, mask=first)
    groups = tl.cdiv(F, BF)
    pid_m, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    i, j = tl.arange(0, BM), tl.max_contiguous(tl.arange(0, BF), 8)
    in_m, in_k = pid_m * BM + i < M, group * BF + j < F
    base = pid_m * BM * F + group * BF
    grad, g, u = _load(
        grad_h + base, gate + base, gate_scale, up + base, up_scale,
        i[:, None] * F + j[None, :], (pid_m * BM + i) * groups + group,
        in_m[:, None] & in_k[None, :], in_m,
    )  # fmt: skip
    if OVER:
        # The tile's own bytes are written below: every thread must have read its part before.
        tl.debug_barrier()
    grad_gate, grad_up, h = _gradients(grad, g, u)
    dtype: tl.constexpr = grad_h.dtype.element_ty
    grad_gate, grad_up, h = grad_gate.to(dtype), grad_up.to(dtype), h.to(dtype)
    if new_gate is not None:
        raise_amax(new_gate, seen_gate, top_magnitude(grad_gate))
        raise_amax(new_up, seen_up, top_magnitude(grad_up))
    rows += pid_m * BM * 2 * F + group * group_step
    turned = group.to(tl.int64) * BF * M + pid_m * BM
    turned_up = (group.to(tl.int64) * BF + F) * M + pid_m * BM
    c = encode(grad_gate.to(tl.float32) * tl.div_rn(1.0, s_gate), GRAD_E4M3, HARDWARE)
    _store_both(c, rows, cols + turned, M, 2 * F, i, j, in_m, in_k)
    c = encode(grad_up.to(tl.float32) * tl.div_rn(1.0, s_up), GRAD_E4M3, HARDWARE)
    _store_both(c, rows + up_at, cols + turned_up, M, 2 * F, i, j, in_m, in_k)
    if h_cols is not None:
        s_h = scale_of(tl.load(a_h), H_E4M3, H_POW2, H_MARGIN)
        tl.store(scale_h, s_h, mask=first)
        c = encode(h.to(tl.float32) * tl.div_rn(1.0, s_h), H_E4M3, HARDWARE)
        _store_both(c, None, h_cols + turned, M, 0, i, j, in_m, in_k)


# ---- Triton wrappers: same arguments and results as the references ----

_ROWS = 32  # rows of a tile: 16 elements a thread with 8 warps
_REGISTERS = 80  # a thread, for the codes: three such tiles on an SM, at the price of a few spills


def triton_swiglu_codes(gate, up, past, amax_out, format, pow2, margin, keep_codes):
    M, F = gate.shape
    if not gate.numel():
        return ref_swiglu_codes(gate, up, past, amax_out, format, pow2, margin, keep_codes)
    gate, up = inner_contiguous(gate), inner_contiguous(up)
    codes, scale, *kept = _fake_forward(gate, up, past, amax_out, format, pow2, margin, keep_codes)
    amax = torch.zeros(1, dtype=torch.float32, device=gate.device) if amax_out is None else amax_out
    _forward_kernel[(triton.cdiv(M * triton.cdiv(F, BLOCK), _ROWS),)](
        gate, up, past.view(torch.int32), amax.view(torch.int32), codes.view(torch.uint8), scale,
        *kept, M, F, gate.stride(0), up.stride(0), E4M3=format == "e4m3", POW2=pow2, MARGIN=margin,
        HARDWARE=converts_fp8(gate.device), KEEP=keep_codes, ROWS=_ROWS, GROUP=BLOCK, num_warps=8,
    )  # fmt: skip
    return [codes, scale, *kept]


def triton_swiglu_backward_amax(grad_h, gate, gate_scale, up, up_scale) -> torch.Tensor:
    amax = torch.zeros(3, dtype=torch.float32, device=grad_h.device)
    if grad_h.numel():
        _amax_kernel[tiles(*grad_h.shape, _ROWS, BLOCK)](
            grad_h.contiguous(), gate.contiguous(), gate_scale, up.contiguous(), up_scale,
            amax.view(torch.int32), None, None, None, *grad_h.shape,
            H_E4M3=True, H_POW2=False, H_MARGIN=0, HARDWARE=False,
            BM=_ROWS, BF=BLOCK, num_warps=8,
        )  # fmt: skip
    return amax


def triton_swiglu_backward_first(
    grad_h, gate, gate_scale, up, up_scale, h_amax, format, pow2, margin
) -> list[torch.Tensor]:
    M, F = grad_h.shape
    amax = torch.zeros(2, dtype=torch.float32, device=grad_h.device)
    codes = torch.empty(F, M, dtype=torch.uint8, device=grad_h.device)
    scale = torch.ones(1, dtype=torch.float32, device=grad_h.device)
    if grad_h.numel():
        _amax_kernel[tiles(M, F, _ROWS, BLOCK)](
            grad_h.contiguous(), gate.contiguous(), gate_scale, up.contiguous(), up_scale,
            amax.view(torch.int32), h_amax.view(torch.int32), codes, scale, M, F,
            H_E4M3=format == "e4m3", H_POW2=pow2, H_MARGIN=margin,
            HARDWARE=converts_fp8(grad_h.device), BM=_ROWS, BF=BLOCK, num_warps=8,
        )  # fmt: skip
    return [amax, codes.view(FORMATS[format].dtype), scale]


def triton_swiglu_backward_codes(
    grad_h, gate, gate_scale, up, up_scale, rows_out, amaxes, weight_scales, amax_out,
    grad_format, grad_pow2, grad_margin, h_format, h_pow2, h_margin,
):  # fmt: skip
    if not grad_h.numel():
        return ref_swiglu_backward_codes(
            grad_h, gate, gate_scale, up, up_scale, rows_out, amaxes, weight_scales, amax_out,
            grad_format, grad_pow2, grad_margin, h_format, h_pow2, h_margin,
        )  # fmt: skip
    M, F = grad_h.shape
    with_h, device = len(amaxes) == 3, grad_h.device
    cols = torch.empty(2 * F, M, dtype=torch.uint8, device=device)
    h_cols = torch.empty(F, M, dtype=torch.uint8, device=device) if with_h else None
    scales = [torch.empty(1, dtype=torch.float32, device=device) for _ in range(2 + with_h)]
    tops = [a.view(torch.int32) for a in amaxes]
    step, up_at = (2 * BLOCK, BLOCK) if interleaves(F) else (BLOCK, F)
    _codes_kernel[tiles(M, F, _ROWS, BLOCK)](
        grad_h.contiguous(), gate.contiguous(), gate_scale, up.contiguous(), up_scale,
        *tops[:2], tops[2] if with_h else None, *weight_scales,
        *([a.view(torch.int32) for a in amax_out] or [None, None]),
        rows_out.view(torch.uint8), cols, h_cols, *scales[:2], scales[2] if with_h else None,
        M, F, step, up_at,
        GRAD_E4M3=grad_format == "e4m3", GRAD_POW2=grad_pow2, GRAD_MARGIN=grad_margin,
        H_E4M3=h_format == "e4m3", H_POW2=h_pow2, H_MARGIN=h_margin,
        OVER=rows_out.data_ptr() == grad_h.data_ptr(),
        HARDWARE=converts_fp8(grad_h.device), BM=_ROWS, BF=BLOCK, num_warps=8,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    out = [cols.view(FORMATS[grad_format].dtype), *scales[:2]]
    return [*out, h_cols.view(FORMATS[h_format].dtype), scales[2]] if with_h else out


# ---- operators ----


def _fake_forward(gate, up, past, amax_out, format, pow2, margin, keep_codes):
    rows, cols = gate.shape
    out = [
        torch.empty(rows, cols, dtype=FORMATS[format].dtype, device=gate.device),
        torch.empty(1, dtype=torch.float32, device=gate.device),
    ]
    for _ in range(2):
        shapes = ((rows, cols), (rows, -(-cols // BLOCK))) if keep_codes else ((0,), (0,))
        kinds = (torch.int8, torch.bfloat16) if keep_codes else (gate.dtype, gate.dtype)
        pairs = zip(shapes, kinds, strict=True)
        out += [torch.empty(shape, dtype=kind, device=gate.device) for shape, kind in pairs]
    return out


def _fake_codes(
    grad_h, gate, gate_scale, up, up_scale, rows_out, amaxes, weight_scales, amax_out,
    grad_format, grad_pow2, grad_margin, h_format, h_pow2, h_margin,
):  # fmt: skip
    rows, cols = grad_h.shape
    out = [grad_h.new_empty(2 * cols, rows, dtype=FORMATS[grad_format].dtype)]
    out += [grad_h.new_empty(1, dtype=torch.float32) for _ in range(2)]
    if len(amaxes) == 3:
        out.append(grad_h.new_empty(cols, rows, dtype=FORMATS[h_format].dtype))
        out.append(grad_h.new_empty(1, dtype=torch.float32))
    return out


def _fake_first(grad_h, gate, gate_scale, up, up_scale, h_amax, format, pow2, margin):
    return [
        grad_h.new_empty(2, dtype=torch.float32),
        grad_h.new_empty(*reversed(grad_h.shape), dtype=FORMATS[format].dtype),
        grad_h.new_empty(1, dtype=torch.float32),
    ]


_codes = operator(
    "swiglu_codes(Tensor gate, Tensor up, Tensor past, Tensor(a!)? amax_out, str format, bool pow2, "
    "int margin, bool keep_codes) -> Tensor[]",
    reference=ref_swiglu_codes,
    fake=_fake_forward,
    cuda=triton_swiglu_codes,
)


def _five(out: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Empty tensors in place of h's: what writes into its arguments returns no lists if traced."""
    return *out, *(out[1].new_empty(0) for _ in range(5 - len(out)))


_KEPT = "Tensor grad_h, Tensor gate, Tensor? gate_scale, Tensor up, Tensor? up_scale"
_backward_amax = operator(
    f"swiglu_backward_amax({_KEPT}) -> Tensor",
    reference=ref_swiglu_backward_amax,
    fake=lambda grad_h, *_: grad_h.new_empty(3, dtype=torch.float32),
    cuda=triton_swiglu_backward_amax,
)
_backward_first = operator(
    f"swiglu_backward_first({_KEPT}, Tensor h_amax, str format, bool pow2, int margin) "
    "-> (Tensor, Tensor, Tensor)",
    reference=lambda *args: tuple(ref_swiglu_backward_first(*args)),
    fake=lambda *args: tuple(_fake_first(*args)),
    cuda=lambda *args: tuple(triton_swiglu_backward_first(*args)),
)
_backward_codes = operator(
    f"swiglu_backward_codes({_KEPT}, Tensor(b!) rows_out, Tensor[] amaxes, Tensor[] weight_scales, "
    "Tensor(a!)[] amax_out, str grad_format, bool grad_pow2, int grad_margin, str h_format, "
    "bool h_pow2, int h_margin) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=lambda *args: _five(ref_swiglu_backward_codes(*args)),
    fake=lambda *args: _five(_fake_codes(*args)),
    cuda=lambda *args: _five(triton_swiglu_backward_codes(*args)),
)


def swiglu_codes(
    gate: torch.Tensor,
    up: torch.Tensor,
    past: torch.Tensor,
    cast: Cast,
    *,
    amax_out: torch.Tensor | None = None,
    keep_codes: bool = True,
) -> tuple[Quantized, list[torch.Tensor]]:
    """(codes of h = silu(gate_MF) * up_MF, the four tensors of gate and up as `swiglu` keeps them).

    past: fp32 (1,), the amax that sets the scale. amax_out: fp32 (1,), raised to the amax of h.
    cast per tensor and to nearest; ValueError otherwise.
    """
    _check(cast)
    codes, scale, *kept = _codes(
        gate, up, past, amax_out, cast.format, cast.scale_kind == "pow2", cast.margin, keep_codes
    )
    return Quantized(codes, scale, "tensor"), kept


def _check(cast: Cast) -> None:
    if cast.granularity != "tensor" or cast.rounding != "nearest":
        raise ValueError(f"swiglu in codes: per tensor and to nearest only: {cast}")


def swiglu_backward_amax(grad_h, gate_codes, gate_scale, up_codes, up_scale) -> list[torch.Tensor]:
    """Amaxes (1,) FP32 of grad_gate, grad_up and h, as `swiglu_backward` would give them."""
    return list(_backward_amax(grad_h, gate_codes, gate_scale, up_codes, up_scale).split(1))


def swiglu_backward_first(
    grad_h: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None],
    h_amax: torch.Tensor,
    h_cast: Cast,
) -> tuple[list[torch.Tensor], Quantized]:
    """Amaxes (1,) FP32 of grad_gate and grad_up, and in the same pass the codes [F, M] of h^T, whose
    amax is known: h_amax, fp32 (1,). So h's codes can go before those of the gradients come."""
    _check(h_cast)
    amax, codes, scale = _backward_first(
        grad_h, *kept, h_amax, h_cast.format, h_cast.scale_kind == "pow2", h_cast.margin
    )
    return list(amax.split(1)), Quantized(codes, scale, "tensor")


def swiglu_backward_codes(
    grad_h: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None],
    amaxes: list[torch.Tensor],
    weight_scales: list[torch.Tensor],
    grad_cast: Cast,
    h_cast: Cast,
    *,
    amax_out: Sequence[torch.Tensor] = (),
    over: bool = False,
) -> SwigluCodes:
    """Codes of grad_gate, grad_up (scales joined under the two weights' scales) and h.

    kept: gate and up, codes and scale each, as `swiglu` gave them. amaxes: fp32 (1,) of grad_gate,
    grad_up and h, which set the scales; without h's, no codes of h. amax_out: fp32 (1,) two, raised to the two gradients' amaxes.
    over: nobody reads grad_h after this, and rows take its memory where they fit.
    Casts per tensor and to nearest; ValueError otherwise.
    """
    _check(grad_cast)
    _check(h_cast)
    M, F = grad_h.shape
    dtype = FORMATS[grad_cast.format].dtype
    if over and interleaves(F) and grad_h.element_size() == 2 and grad_h.is_contiguous():
        rows = grad_h.view(dtype)
    else:
        rows = grad_h.new_empty(M, 2 * F, dtype=dtype)
    cols, s_gate, s_up, *h = _backward_codes(
        grad_h, *kept, rows, amaxes, weight_scales, list(amax_out),
        grad_cast.format, grad_cast.scale_kind == "pow2", grad_cast.margin,
        h_cast.format, h_cast.scale_kind == "pow2", h_cast.margin,
    )  # fmt: skip
    gate_cols, up_cols = cols.chunk(2)
    return SwigluCodes(
        Quantized(rows, s_gate, "tensor"),
        Quantized(gate_cols, s_gate, "tensor"),
        Quantized(up_cols, s_up, "tensor"),
        Quantized(*h, "tensor") if len(amaxes) == 3 else None,
    )
