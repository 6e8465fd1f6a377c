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
from .cast import ref_dequantize_int8, ref_quantize_int8
from .op import operator


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
    amaxes = [_ref_amax(grad_gate), _ref_amax(grad_up), _ref_amax(h)]
    if joined:
        grad_gate, grad_up = torch.cat([grad_gate, grad_up], 1), grad_h.new_empty(0)
    return grad_gate, grad_up, h, *amaxes, grad_row_weight


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
        *(grad_h.new_empty(1, dtype=torch.float32) for _ in range(3)),
        grad_h.new_empty(0 if row_weight is None else rows, dtype=torch.float32),
    )


_swiglu = operator(
    "swiglu(Tensor gate, Tensor up, Tensor? row_weight, bool keep_codes) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=ref_swiglu,
    fake=_fake_swiglu,
)
_swiglu_backward = operator(
    "swiglu_backward(Tensor grad_h, Tensor gate, Tensor? gate_scale, Tensor up, Tensor? up_scale, "
    "Tensor? row_weight, bool joined) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=ref_swiglu_backward,
    fake=_fake_swiglu_backward,
)


def swiglu(gate, up, row_weight=None, *, keep_codes=True) -> Swiglu:
    """silu(gate_MF) * up_MF (* row_weight_M) in the dtype of gate, its amax, and the codes kept.

    gate and up have one dtype. `keep_codes=False` where gate and up themselves are kept.
    """
    return Swiglu(*_swiglu(gate, up, row_weight, keep_codes))


def swiglu_backward(
    grad_h, gate_codes, gate_scale, up_codes, up_scale, row_weight=None, *, joined=False
) -> SwigluGrads:
    """Gradients of gate, up and the row weight (FP32), and h again, in the dtype of grad_h_MF.

    Scales None: gate_codes and up_codes are gate_MF and up_MF themselves. Amaxes are (1,) FP32.
    `joined` gives both gradients as one [M, 2F], for a projection that made gate and up as one.
    """
    return SwigluGrads(
        *_swiglu_backward(grad_h, gate_codes, gate_scale, up_codes, up_scale, row_weight, joined)
    )
