"""RMSNorm and LayerNorm whose backward needs only the codes of their output.

Forward, FP32 inside: h = x + residual (rounded to its dtype), x_hat = (h - mean) * rstd (RMSNorm:
mean = 0), y = x_hat * weight + bias; RMSNorm rounds x_hat to the dtype of h first, as Hugging Face
does. The amax of y comes along, so that y can be cast without another pass.

Backward keeps no input: x_hat = (y - bias) / weight, from the codes of y. Where |weight| is below
2^-10 of the largest |weight|, y says nothing about x_hat: there x_hat is taken as 0, so that column
gets no grad_weight and loses the x_hat term of grad_x; the planner keeps a norm that has such
columns in high precision. A bias much larger than weight costs precision in the same way.
grad_weight and grad_bias add up in a fixed order: the same bits every run.

Shapes: x_MH, y_MH, rstd_M; codes_MH with scale (1,), [M, 1] or [M, ceil(H/128)] (any strides), or
scale None where y itself was kept. H features of one row, M rows.
"""

from __future__ import annotations

import torch

from ..numerics.formats import BLOCK
from .op import operator

LEAST_WEIGHT = 2.0**-10  # of the largest |weight|; below it x_hat cannot be read from y


# ---- reference: the specification and the CPU path ----


def ref_norm(x, weight, bias, eps, residual, center, out_dtype):
    h = x if residual is None else x + residual
    h32 = h.float()
    if center:
        h32 = h32 - h32.mean(1, keepdim=True)
    rstd = torch.rsqrt(h32.square().mean(1) + eps)
    y = h32 * rstd[:, None]
    if not center:
        y = y.to(h.dtype).float()
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y.to(out_dtype or x.dtype)
    amax = y.abs().amax().float().view(1) if y.numel() else x.new_zeros(1, dtype=torch.float32)
    return y, (x.new_empty(0) if residual is None else h), rstd, amax


def ref_norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h, center, out_dtype):
    grad, x_hat = grad_y.float(), codes.float()
    if scale is not None:
        per_group = scale.dim() == 2 and scale.shape[1] > 1
        spread = scale.float()
        if per_group:
            spread = spread.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        x_hat = x_hat * spread
    if bias is not None:
        x_hat = x_hat - bias.float()
    grad_x_hat = grad
    if weight is not None:
        w = weight.float()
        known = w.abs() > w.abs().amax() * LEAST_WEIGHT
        x_hat = torch.where(known, x_hat * (1.0 / torch.where(known, w, 1.0)), 0.0)
        grad_x_hat = grad * w
    grad_x = grad_x_hat - x_hat * (grad_x_hat * x_hat).mean(1, keepdim=True)
    if center:
        grad_x = grad_x - grad_x_hat.mean(1, keepdim=True)
    grad_x = grad_x * rstd[:, None]
    if grad_h is not None:
        grad_x = grad_x + grad_h.float()
    empty = grad.new_empty(0)
    return (
        grad_x.to(_grad_dtype(grad_y, grad_h, out_dtype)),
        empty if weight is None else (grad * x_hat).sum(0),
        empty.clone() if bias is None else grad.sum(0),
    )


def _grad_dtype(grad_y, grad_h, out_dtype):
    return out_dtype or (grad_y if grad_h is None else grad_h).dtype


# ---- operators ----


def _fake_norm(x, weight, bias, eps, residual, center, out_dtype):
    rows, _ = x.shape
    h = x.new_empty(0)
    if residual is not None:
        h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    return y, h, x.new_empty(rows, dtype=torch.float32), x.new_empty(1, dtype=torch.float32)


def _fake_norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h, center, out_dtype):
    cols = grad_y.shape[1]
    return (
        grad_y.new_empty(grad_y.shape, dtype=_grad_dtype(grad_y, grad_h, out_dtype)),
        grad_y.new_empty(0 if weight is None else cols, dtype=torch.float32),
        grad_y.new_empty(0 if bias is None else cols, dtype=torch.float32),
    )


_norm = operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, bool center, "
    "ScalarType? out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=ref_norm,
    fake=_fake_norm,
)
_norm_backward = operator(
    "norm_backward(Tensor grad_y, Tensor codes, Tensor? scale, Tensor? weight, Tensor? bias, "
    "Tensor rstd, Tensor? grad_h, bool center, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)",
    reference=ref_norm_backward,
    fake=_fake_norm_backward,
)


def rms_norm(x, weight, eps, residual=None, *, out_dtype=None):
    """(y, h, rstd, amax) of x_MH; weight_H or None; h = x + residual_MH (empty without residual).

    y is `out_dtype` (default: the dtype of x), h the wider of x and residual, rstd_M and the amax
    of y (1,) are FP32. A NaN or infinity in y shows in amax.
    """
    return _norm(x, weight, None, eps, residual, False, out_dtype)


def layer_norm(x, weight, bias, eps, residual=None, *, out_dtype=None):
    """(y, h, rstd, amax) as `rms_norm`, with the mean taken out; weight_H and bias_H may be None."""
    return _norm(x, weight, bias, eps, residual, True, out_dtype)


def rms_norm_backward(grad_y, codes, scale, weight, rstd, grad_h=None, *, out_dtype=None):
    """(grad_x_MH, grad_weight_H FP32) from the codes of y and their scale (None: y itself).

    grad_h_MH, the gradient that reached h past the norm, is added: grad_x is then the gradient of
    x and of the residual. grad_x is `out_dtype` (default: that of grad_h, else of grad_y).
    grad_weight is empty without a weight.
    """
    return _norm_backward(
        grad_y, codes, scale, weight, None, rstd, grad_h, False, out_dtype
    )[:2]  # fmt: skip


def layer_norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h=None, *, out_dtype=None):
    """(grad_x_MH, grad_weight_H FP32, grad_bias_H FP32) as `rms_norm_backward`."""
    return _norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h, True, out_dtype)
