"""RMSNorm and LayerNorm whose output carries its 8-bit codes and which keep nothing else.

The codes that the next linears read are all the norm needs for its own backward: the normalized
input is y / weight (x_hat = (y - bias) / weight), and one rstd per row completes it. Where no
8-bit linear reads the output, the output itself is kept instead (`recipe` None).

Shapes: M tokens (all leading dims), H features.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import norm as norm_kernels
from ..kernels.cast import Quantized
from ..numerics.recipe import Recipe, get_recipe
from .autocast import recipe_in_force
from .linear import How, flat, grad_dtype_of, plain_weight, weight_values
from .saved import AmaxHistory, carry, cast_input


class NormFunction(torch.autograd.Function):
    """Forward returns (y, rows, rows_scale, kept, kept_scale); codes are None without `how`."""

    @staticmethod
    def forward(ctx, x_MH, weight_H, bias_H, eps, how, is_rms):
        w = None if weight_H is None else weight_values(weight_H, torch.float32)
        b = None if bias_H is None else weight_values(bias_H, torch.float32)
        if is_rms:
            y, _, rstd, amax = norm_kernels.rms_norm(x_MH, w, eps, None)
        else:
            y, _, rstd, amax = norm_kernels.layer_norm(x_MH, w, b, eps, None)
        ctx.is_rms, ctx.how = is_rms, how
        ctx.set_materialize_grads(False)  # the codes get no gradient: no zeros in their place
        ctx.grad_dtypes = [None if p is None else grad_dtype_of(p) for p in (weight_H, bias_H)]
        if how is None:
            ctx.save_for_backward(y, None, rstd, weight_H, bias_H)
            return y, None, None, None, None
        rows, kept = cast_input(y, how, amax)
        ctx.save_for_backward(kept.q.codes, kept.q.scale, rstd, weight_H, bias_H)
        codes = flat(rows, kept)
        ctx.mark_non_differentiable(*(c for c in codes if c is not None))
        return y, *codes

    @staticmethod
    def backward(ctx, grad_y, *_):
        if grad_y is None:
            return (None,) * 6
        saved, scale, rstd, weight_H, bias_H = ctx.saved_tensors
        if scale is not None:
            kept = ctx.how.kept(saved, scale)
            if kept.is_cols:  # scales run along tokens: the values, for the length of this call
                saved, scale = kept.values(grad_y.dtype).contiguous(), None
        w = None if weight_H is None else weight_values(weight_H, torch.float32)
        b = None if bias_H is None else weight_values(bias_H, torch.float32)
        grad_y = grad_y.contiguous()
        if ctx.is_rms:
            grad_x, *grads = norm_kernels.rms_norm_backward(grad_y, saved, scale, w, rstd, None)
        else:
            grad_x, *grads = norm_kernels.layer_norm_backward(
                grad_y, saved, scale, w, b, rstd, None
            )
        grads = [
            None if dtype is None else g.to(dtype)
            for g, dtype in zip([*grads, None], ctx.grad_dtypes, strict=False)
        ]
        return grad_x, *grads[:2], None, None, None


def _norm(module: nn.Module, x: torch.Tensor, weight, bias, eps: float, is_rms: bool):
    recipe, how = recipe_in_force(module.recipe), None
    if recipe.keeps_codes and torch.is_grad_enabled():
        if recipe.delayed:
            module._history = AmaxHistory.of(module._history, recipe.input.history, weight)
        how = How(recipe, x.dtype, module._history, record=module.training)
    x_MH = x.reshape(-1, x.shape[-1])
    y, rows, rows_scale, kept, kept_scale = NormFunction.apply(x_MH, weight, bias, eps, how, is_rms)
    y = y.view(x.shape)
    if how is not None and not torch.compiler.is_compiling():
        if kept is None:
            kept, kept_scale = rows, rows_scale
        rows = Quantized(rows, rows_scale, recipe.input.granularity)
        carry(y, recipe.input, rows, how.kept(kept, kept_scale))
    return y


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim, FP32 inside, dtype of x outside."""

    recipe: Recipe | None = None
    _history: AmaxHistory | None = None

    def __init__(
        self, normalized_shape, eps=1e-6, elementwise_affine=True, device=None, dtype=None,
        *, recipe="tensor",
    ):  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.recipe = get_recipe(recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.__dict__.get("variance_epsilon", self.__dict__.get("eps"))
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return _norm(self, x, self.weight, None, eps, True)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        plain_weight(self, destination, prefix)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape) if self.weight is not None else ''}, {self.recipe}"


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dim, FP32 inside, dtype of x outside; weight and bias optional."""

    recipe: Recipe | None = None
    _history: AmaxHistory | None = None

    def __init__(
        self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None,
        dtype=None, *, recipe="tensor",
    ):  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.recipe = get_recipe(recipe)
        if len(self.normalized_shape) != 1:
            raise ValueError(
                f"LayerNorm: normalizes over {len(self.normalized_shape)} dims; only the last one "
                "is supported: use nn.LayerNorm"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _norm(self, x, self.weight, self.bias, self.eps, False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        plain_weight(self, destination, prefix)


