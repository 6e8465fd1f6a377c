"""RMSNorm and LayerNorm whose output carries its 8-bit codes and which keep nothing else.

The codes that the next linears read are all the norm needs for its own backward: the normalized
input is y / weight (x_hat = (y - bias) / weight), and one rstd per row completes it. Where no
8-bit linear reads the output, the output itself is kept instead (`recipe` None).

A residual stream h goes into a norm and past it. `summed` runs the norm together with the sum that
makes h, so that h is read once, and backward adds the two gradients of h in the norm's own kernel.

Shapes: M tokens (all leading dims), H features.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import norm as norm_kernels
from ..kernels.norm_codes import norm_codes
from ..numerics.recipe import Recipe, native_recipe
from ..stretch import runs_again
from .autocast import recipe_in_force
from .delayed import AmaxHistory
from .gemms import LinearGemms, carry_flat, flat
from .saved import Kept, note_amax, save, saved
from .waiting import leave, may_wait, take, waits, whole
from .weights import Stored, grad_dtype_of, weight_values


class NormFunction(torch.autograd.Function):
    """Forward returns (y, h, rows, rows_scale, kept, kept_scale), with h = x + residual, or x where
    there is no residual and `passes`, else None. The codes are None without `how`."""

    @staticmethod
    def forward(ctx, x_MH, residual_MH, weight_H, bias_H, eps, how, is_rms, passes):
        w = None if weight_H is None else weight_values(weight_H, torch.float32)
        b = None if bias_H is None else weight_values(bias_H, torch.float32)
        amax = rows = None
        if how is not None and how.knows_input():  # delayed: codes and y from one pass
            y, h, rstd, rows = norm_codes(
                x_MH, w, b, eps, residual_MH, cast=how.recipe.input, center=not is_rms,
                **how.input_known(x_MH),
            )  # fmt: skip
        elif is_rms:
            y, h, rstd, amax = norm_kernels.rms_norm(x_MH, w, eps, residual_MH)
        else:
            y, h, rstd, amax = norm_kernels.layer_norm(x_MH, w, b, eps, residual_MH)
        if residual_MH is None:
            h = x_MH if passes else None
        ctx.is_rms, ctx.how, ctx.adds = is_rms, how, residual_MH is not None
        ctx.set_materialize_grads(False)  # the codes get no gradient: no zeros in their place
        ctx.grad_dtypes = [None if p is None else grad_dtype_of(p) for p in (weight_H, bias_H)]
        if how is None:
            save(ctx, y, None, rstd, parameters=(weight_H, bias_H))
            return y, h, None, None, None, None
        rows, kept = how.cast_input(y, amax) if rows is None else (rows, Kept(rows, False))
        save(ctx, kept.q.codes, kept.q.scale, rstd, parameters=(weight_H, bias_H))
        codes = flat(rows, kept)
        ctx.mark_non_differentiable(*(c for c in codes if c is not None))
        return y, h, *codes

    @staticmethod
    def backward(ctx, grad_y, grad_h, *_):
        if grad_y is None:
            return grad_h, grad_h if ctx.adds else None, *[None] * 6
        codes, scale, rstd, weight_H, bias_H = saved(ctx)
        if scale is not None:
            kept = ctx.how.kept(codes, scale)
            if kept.is_cols:  # scales run along tokens: the values, for the length of this call
                codes, scale = kept.values(grad_y.dtype).contiguous(), None
        w = None if weight_H is None else weight_values(weight_H, torch.float32)
        b = None if bias_H is None else weight_values(bias_H, torch.float32)
        grad_y, operands = grad_y.contiguous(), (codes, scale, w)
        if ctx.is_rms:
            grad_x, *grads, amax = norm_kernels.rms_norm_backward(grad_y, *operands, rstd, grad_h)
        else:
            grad_x, *grads, amax = norm_kernels.layer_norm_backward(
                grad_y, *operands, b, rstd, grad_h
            )
        note_amax(grad_x, amax)
        grads = [
            None if dtype is None else g.to(dtype)
            for g, dtype in zip([*grads, None], ctx.grad_dtypes, strict=False)
        ]
        return grad_x, grad_x if ctx.adds else None, *grads[:2], *[None] * 4


class _Norm(Stored):
    """What both norms share: their forward, and how a split master is saved. `reader`: the first
    linear of ours that reads the output (not a submodule), where that is known."""

    recipe: Recipe | None = None
    reader: nn.Module | None = None
    _history: AmaxHistory | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waiting = take(x, self, recipe_in_force(self.recipe))
        return _run(self, x)[0] if waiting is None else waiting

    def how(self, recipe: Recipe, x: torch.Tensor) -> LinearGemms:
        """How the output is cast, x being of its device and dtype: as its reader would, or where
        that is not known as a linear of its own would."""
        if self.reader is not None:
            how = self.reader.how(recipe, x)
            if how.history is not None:  # the reader's weight may be frozen, and this one not
                how.history.commit_with(self.weight)
            return how
        if recipe.delayed:
            self._history = AmaxHistory.of(self._history, recipe.history, self.weight, x)
        history = self._history if recipe.delayed else None
        return LinearGemms(recipe, x.dtype, history, record=self.training and not runs_again())


class RMSNorm(_Norm, nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim, FP32 inside, dtype of x outside."""

    def __init__(
        self, normalized_shape, eps=1e-6, elementwise_affine=True, device=None, dtype=None,
        *, recipe="tensor",
    ):  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.recipe = native_recipe(recipe)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape) if self.weight is not None else ''}, {self.recipe}"


class LayerNorm(_Norm, nn.LayerNorm):
    """nn.LayerNorm over the last dim, FP32 inside, dtype of x outside; weight and bias optional."""

    def __init__(
        self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None,
        dtype=None, *, recipe="tensor",
    ):  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.recipe = native_recipe(recipe)
        if len(self.normalized_shape) != 1:
            raise ValueError(
                f"LayerNorm: normalizes over {len(self.normalized_shape)} dims; only the last one "
                "is supported: use nn.LayerNorm"
            )


def _run(norm: RMSNorm | LayerNorm, x, residual=None, *, passes: bool = False):
    """(y, h) in the shape of x; y carries its codes. h as in `NormFunction`."""
    is_rms = isinstance(norm, RMSNorm)
    eps = (
        norm.eps if not is_rms else norm.__dict__.get("variance_epsilon", norm.__dict__.get("eps"))
    )
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    weight, bias = norm.weight, None if is_rms else norm.bias
    recipe, how = recipe_in_force(norm.recipe), None
    if recipe.keeps_codes and torch.is_grad_enabled():
        how = norm.how(recipe, x)
    x_MH = x.reshape(-1, x.shape[-1])
    residual_MH = None if residual is None else residual.reshape(x_MH.shape)
    y, h, *codes = NormFunction.apply(x_MH, residual_MH, weight, bias, eps, how, is_rms, passes)
    y = y.view(x.shape)
    if how is not None:
        carry_flat(y, how, *codes)
    return y, None if h is None else h.view(x.shape)


# ------------------------------------------------------------ the residual stream and its norms


def _fits(norm: nn.Module | None, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether `norm` can run here, before its own call. (A compiler fuses the sum by itself.)"""
    if not isinstance(norm, _Norm) or not may_wait():
        return False
    if residual is not None and (x.shape, x.dtype, x.device) != (
        residual.shape, residual.dtype, residual.device
    ):  # fmt: skip
        return False
    return whole(norm.weight, x.shape[-1:], x)


def summed(
    norm: nn.Module | None, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """h = x + residual (or x alone), for a stream that `norm` reads and that goes on past it.

    The same values as the plain sum. Where `norm` is ours it runs in the same kernel, and its
    output waits on h until the module `norm` is called with h.
    x and residual: [..., H], same dtype, or the plain sum is made.
    """
    if not _fits(norm, x, residual):
        return x if residual is None else residual + x
    recipe = recipe_in_force(norm.recipe)
    if residual is None and waits(x, norm, recipe):
        return x
    y, h = _run(norm, x, residual, passes=True)
    leave(h, norm, y, recipe)
    return h
