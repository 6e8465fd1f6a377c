"""h = silu(gate) * up, kept for backward as 8-bit codes of gate and up, with h made again there.

Forward gives h, its amax (for a cast without another pass) and int8 codes of gate and up per group
of 128 along F, exactly as `cast.quantize_int8` makes them. Backward reads only those codes and
gives both gradients, h, and the amax of all three in one pass. FP32 inside, one rounding per
output. An optional row weight r (an expert's routing weight) makes it h = silu(gate) * up * r.

Shapes: gate_MF, up_MF (rows may be strided, as halves of one [M, 2F]), r_M; codes_MF int8,
scale [M, ceil(F/128)] BF16. M tokens, F inner features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..numerics.formats import BLOCK
from .codes import magnitude_bits
from .int8 import int8_encode, int8_scale, ref_dequantize_int8, ref_quantize_int8
from .norm import raise_amax
from .op import operator, tl, triton


class Swiglu(NamedTuple):
    """Outputs of `swiglu`. Without `keep_codes` the last four are empty."""

    h: torch.Tensor
    amax: torch.Tensor
    gate_codes: torch.Tensor
    gate_scale: torch.Tensor
    up_codes: torch.Tensor
    up_scale: torch.Tensor


class SwigluGrads(NamedTuple):
    """Outputs of `swiglu_backward`. `joined`: grad_gate is [M, 2F], gate first; grad_up is empty."""

    grad_gate: torch.Tensor
    grad_up: torch.Tensor
    h: torch.Tensor
    amax_grad_gate: torch.Tensor
    amax_grad_up: torch.Tensor
    amax_h: torch.Tensor
    grad_row_weight: torch.Tensor


# ---- reference: the specification and the CPU path ----


def _ref_amax(x):
    return x.abs().amax().float().view(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)


def ref_swiglu(gate, up, row_weight, keep_codes):
    g, u = gate.float(), up.float()
    h = g * torch.sigmoid(g) * u
    if row_weight is not None:
        h = h * row_weight.float()[:, None]
    h = h.to(gate.dtype)
    if keep_codes:
        kept = [*ref_quantize_int8(gate, BLOCK), *ref_quantize_int8(up, BLOCK)]
    else:
        kept = [gate.new_empty(0) for _ in range(4)]
    return h, _ref_amax(h), *kept


def ref_swiglu_(gate, up, row_weight, keep_codes):
    h, *rest = ref_swiglu(gate, up, row_weight, keep_codes)
    gate.copy_(h)
    return rest


def ref_swiglu_backward(grad_h, gate, gate_scale, up, up_scale, row_weight, joined):
    dtype, grad = grad_h.dtype, grad_h.float()
    if gate_scale is None:
        g, u = gate.float(), up.float()
    else:
        g = ref_dequantize_int8(gate, gate_scale, BLOCK, torch.float32)
        u = ref_dequantize_int8(up, up_scale, BLOCK, torch.float32)
    sigmoid = torch.sigmoid(g)
    silu = g * sigmoid
    h, grad_row_weight = silu * u, grad.new_empty(0)
    if row_weight is not None:
        r = row_weight.float()[:, None]
        grad_row_weight = (grad * h).sum(1)
        h, grad = h * r, grad * r
    grad_gate = (grad * u * (sigmoid + silu * (1.0 - sigmoid))).to(dtype)
    grad_up = (grad * silu).to(dtype)
    h = h.to(dtype)
    amaxes = torch.cat([_ref_amax(grad_gate), _ref_amax(grad_up), _ref_amax(h)])
    if joined:
        grad_gate, grad_up = torch.cat([grad_gate, grad_up], 1), grad_h.new_empty(0)
    return grad_gate, grad_up, h, amaxes, grad_row_weight


# ---- Triton ----
# A tile is ROWS groups of 128 neighbours in memory; group number = row * groups_per_row + group.


@triton.jit
def tile_of(M, F, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(group numbers, their rows, columns of their elements, which are inside)."""
    per_row = tl.cdiv(F, GROUP)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = number // per_row
    k = ((number % per_row) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    # Eight contiguous elements a thread for bytes too, so that all operands have one layout.
    k = tl.max_contiguous(k, [1, 8])
    inside = (m < M)[:, None] & (k < F)
    return number, m, k, inside


@triton.jit
def _swiglu_kernel(
    gate, up, row_weight, h, amax, gate_codes, gate_scale, up_codes, up_scale, M, F,
    gate_stride, up_stride, KEEP: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    seen = tl.load(amax)
    number, m, k, inside = tile_of(M, F, ROWS, GROUP)
    wide_m = m.to(tl.int64)[:, None]
    at = wide_m * F + k
    g = tl.load(gate + wide_m * gate_stride + k, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + wide_m * up_stride + k, mask=inside, other=0.0).to(tl.float32)
    v = g * tl.sigmoid(g) * u
    if row_weight is not None:
        v *= tl.load(row_weight + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    out = v.to(h.dtype.element_ty)
    tl.store(h + at, out, mask=inside)
    raise_amax(amax, seen, top_magnitude(out))
    if KEEP:
        keep_int8(g, gate_codes + at, gate_scale + number, inside, m < M)
        keep_int8(u, up_codes + at, up_scale + number, inside, m < M)


@triton.jit
def top_magnitude(v):
    return tl.max(tl.max(magnitude_bits(v.to(tl.float32)), 1), 0)


@triton.jit
def keep_int8(v, codes, scale, inside, rows_inside):
    s = int8_scale(tl.max(magnitude_bits(v), 1))
    tl.store(scale, s.to(tl.bfloat16), mask=rows_inside)
    tl.store(codes, int8_encode(v * tl.div_rn(1.0, s)[:, None]), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    grad_h, gate, gate_scale, up, up_scale, row_weight, grad_gate, grad_up, h,
    amax, row_parts, M, F, gate_stride, up_stride, grad_gate_stride, grad_up_stride,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """amax: three int32, of grad_gate, grad_up and h."""
    seen_gate, seen_up, seen_h = tl.load(amax), tl.load(amax + 1), tl.load(amax + 2)
    number, m, k, inside = tile_of(M, F, ROWS, GROUP)
    wide_m = m.to(tl.int64)[:, None]
    at = wide_m * F + k
    grad = tl.load(grad_h + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + wide_m * gate_stride + k, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + wide_m * up_stride + k, mask=inside, other=0).to(tl.float32)
    if gate_scale is not None:
        g *= tl.load(gate_scale + number, mask=m < M, other=0.0).to(tl.float32)[:, None]
        u *= tl.load(up_scale + number, mask=m < M, other=0.0).to(tl.float32)[:, None]
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    v = silu * u
    if row_weight is not None:
        tl.store(row_parts + number, tl.sum(grad * v, 1), mask=m < M)
        r = tl.load(row_weight + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
        v, grad = v * r, grad * r
    out = v.to(h.dtype.element_ty)
    tl.store(h + at, out, mask=inside)
    raise_amax(amax + 2, seen_h, top_magnitude(out))
    out = (grad * u * (sigmoid + silu * (1.0 - sigmoid))).to(grad_gate.dtype.element_ty)
    tl.store(grad_gate + wide_m * grad_gate_stride + k, out, mask=inside)
    raise_amax(amax, seen_gate, top_magnitude(out))
    out = (grad * silu).to(grad_up.dtype.element_ty)
    tl.store(grad_up + wide_m * grad_up_stride + k, out, mask=inside)
    raise_amax(amax + 1, seen_up, top_magnitude(out))


# ---- Triton wrappers: same arguments and results as the references ----

_ROWS = 32  # groups a program: 16 elements a thread with 8 warps


def inner_contiguous(x):
    return x if x.stride(1) == 1 else x.contiguous()


def triton_swiglu(gate, up, row_weight, keep_codes, h=None):
    M, F = gate.shape
    gate, up = inner_contiguous(gate), inner_contiguous(up)
    groups, device = triton.cdiv(F, BLOCK), gate.device
    h = torch.empty(M, F, dtype=gate.dtype, device=device) if h is None else h
    amax = torch.zeros(1, dtype=torch.float32, device=device)
    kept = [gate.new_empty(0) for _ in range(4)]
    if keep_codes:
        kept = [
            torch.empty(M, n, dtype=dtype, device=device)
            for n, dtype in 2 * [(F, torch.int8), (groups, torch.bfloat16)]
        ]
    if h.numel():
        _swiglu_kernel[(triton.cdiv(M * groups, _ROWS),)](
            gate, up, row_weight, h, amax.view(torch.int32), *kept, M, F,
            gate.stride(0), up.stride(0), KEEP=keep_codes, ROWS=_ROWS, GROUP=BLOCK, num_warps=8,
        )  # fmt: skip
    return h, amax, *kept


def triton_swiglu_(gate, up, row_weight, keep_codes):
    # A program has read all of its tile before it writes any of it.
    return triton_swiglu(gate, up, row_weight, keep_codes, gate)[1:]


def triton_swiglu_backward(grad_h, gate, gate_scale, up, up_scale, row_weight, joined):
    M, F = grad_h.shape
    gate, up = inner_contiguous(gate), inner_contiguous(up)
    groups, device = triton.cdiv(F, BLOCK), grad_h.device
    grad_gate = torch.empty(M, F * (1 + joined), dtype=grad_h.dtype, device=device)
    h = torch.empty(M, F, dtype=grad_h.dtype, device=device)
    grad_up = grad_gate[:, F:] if joined else torch.empty_like(h)
    amaxes = torch.zeros(3, dtype=torch.float32, device=device)
    parts = None
    if row_weight is not None:
        parts = torch.empty(M, groups, dtype=torch.float32, device=device)
    if h.numel():
        _swiglu_backward_kernel[(triton.cdiv(M * groups, _ROWS),)](
            grad_h.contiguous(), gate, gate_scale, up, up_scale, row_weight, grad_gate, grad_up, h,
            amaxes.view(torch.int32), parts, M, F, gate.stride(0), up.stride(0),
            grad_gate.stride(0), grad_up.stride(0), ROWS=_ROWS, GROUP=BLOCK, num_warps=8,
        )  # fmt: skip
    grad_row_weight = amaxes.new_empty(0) if parts is None else parts.sum(1)
    if joined:
        grad_up = grad_h.new_empty(0)
    return grad_gate, grad_up, h, amaxes, grad_row_weight


# ---- operators ----


def _fake_swiglu(gate, up, row_weight, keep_codes):
    rows, cols = gate.shape
    out = [gate.new_empty(rows, cols), gate.new_empty(1, dtype=torch.float32)]
    for _ in range(2):
        if keep_codes:
            out.append(gate.new_empty(rows, cols, dtype=torch.int8))
            out.append(gate.new_empty(rows, -(-cols // BLOCK), dtype=torch.bfloat16))
        else:
            out += [gate.new_empty(0), gate.new_empty(0)]
    return tuple(out)


def _fake_swiglu_backward(grad_h, gate, gate_scale, up, up_scale, row_weight, joined):
    rows, cols = grad_h.shape
    return (
        grad_h.new_empty(rows, 2 * cols if joined else cols),
        grad_h.new_empty(0) if joined else grad_h.new_empty(rows, cols),
        grad_h.new_empty(rows, cols),
        grad_h.new_empty(3, dtype=torch.float32),
        grad_h.new_empty(0 if row_weight is None else rows, dtype=torch.float32),
    )


_swiglu = operator(
    "swiglu(Tensor gate, Tensor up, Tensor? row_weight, bool keep_codes) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=ref_swiglu,
    fake=_fake_swiglu,
    cuda=triton_swiglu,
)
_swiglu_ = operator(
    "swiglu_(Tensor(a!) gate, Tensor up, Tensor? row_weight, bool keep_codes) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=lambda *args: tuple(ref_swiglu_(*args)),
    fake=lambda *args: _fake_swiglu(*args)[1:],
    cuda=triton_swiglu_,
)
_swiglu_backward = operator(
    "swiglu_backward(Tensor grad_h, Tensor gate, Tensor? gate_scale, Tensor up, Tensor? up_scale, "
    "Tensor? row_weight, bool joined) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=ref_swiglu_backward,
    fake=_fake_swiglu_backward,
    cuda=triton_swiglu_backward,
)


def swiglu(gate, up, row_weight=None, *, keep_codes=True) -> Swiglu:
    """silu(gate_MF) * up_MF (* row_weight_M) in the dtype of gate, its amax, and the codes kept.

    gate and up have one dtype. `keep_codes=False` where gate and up themselves are kept.
    """
    return Swiglu(*_swiglu(gate, up, row_weight, keep_codes))


def swiglu_(gate, up, row_weight=None, *, keep_codes=True) -> Swiglu:
    """`swiglu` that writes h over `gate` (contiguous, else ValueError), which is h in the result."""
    if not gate.is_contiguous():
        raise ValueError(f"swiglu_: gate must be contiguous; its strides are {gate.stride()}")
    return Swiglu(gate, *_swiglu_(gate, up, row_weight, keep_codes))


def swiglu_backward(
    grad_h, gate_codes, gate_scale, up_codes, up_scale, row_weight=None, *, joined=False
) -> SwigluGrads:
    """Gradients of gate, up and the row weight (FP32), and h again, in the dtype of grad_h_MF.

    Scales None: gate_codes and up_codes are gate_MF and up_MF themselves. Amaxes are (1,) FP32.
    `joined` gives both gradients as one [M, 2F], for a projection that made gate and up as one.
    """
    *grads, amaxes, grad_row_weight = _swiglu_backward(
        grad_h, gate_codes, gate_scale, up_codes, up_scale, row_weight, joined
    )
    return SwigluGrads(*grads, *amaxes.split(1), grad_row_weight)
