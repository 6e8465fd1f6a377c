"""RMSNorm and LayerNorm whose output carries its 8-bit codes and which keep nothing else.

The codes that the next linears read are all the norm needs for its own backward: the normalized
input is y / weight (x_hat = (y - bias) / weight), and one rstd per row completes it. Where no
8-bit linear reads the output, the output itself is kept instead (`recipe` None).

Shapes: M tokens (all leading dims), H features.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import cast as cast_kernels
from ..kernels import norm as norm_kernels
from ..kernels.cast import Quantized
from ..numerics.recipe import Recipe, get_recipe
from .autocast import recipe_in_force
from .linear import grad_dtype_of, plain_weight, weight_values
from .saved import Kept, carry, transposes


class NormFunction(torch.autograd.Function):
    """Forward returns (y, rows, rows_scale, kept, kept_scale); codes are None without a cast."""

    @staticmethod
    def forward(ctx, x_MH, weight_H, bias_H, eps, cast, is_rms):
        w = None if weight_H is None else weight_values(weight_H, torch.float32)
        b = None if bias_H is None else weight_values(bias_H, torch.float32)
        if is_rms:
            y, _, rstd, amax = norm_kernels.rms_norm(x_MH, w, eps, None)
        else:
            y, _, rstd, amax = norm_kernels.layer_norm(x_MH, w, b, eps, None)
        ctx.is_rms, ctx.cast = is_rms, cast
        ctx.grad_dtypes = [None if p is None else grad_dtype_of(p) for p in (weight_H, bias_H)]
        if cast is None:
            ctx.save_for_backward(y, None, rstd, weight_H, bias_H)
            return y, None, None, None, None
        if transposes(cast):
            scale = cast_kernels.scale_from_amax(amax, cast) if cast.granularity == "tensor" else None
            rows = cast_kernels.quantize(y, cast, scale=scale)
            kept = rows
        else:
            rows, kept = cast_kernels.quantize_both(y, cast)
        ctx.save_for_backward(kept.codes, kept.scale, rstd, weight_H, bias_H)
        ctx.mark_non_differentiable(rows.codes, rows.scale, kept.codes, kept.scale)
        return y, rows.codes, rows.scale, kept.codes, kept.scale

    @staticmethod
    def backward(ctx, grad_y, *_):
        saved, scale, rstd, weight_H, bias_H = ctx.saved_tensors
        if scale is not None and not transposes(ctx.cast):
            # Columns were kept (scales along tokens): the values, for the length of this call.
            q = Quantized(saved, scale, ctx.cast.granularity)
            saved, scale = Kept(q, is_cols=True).values(grad_y.dtype).contiguous(), None
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
            for g, dtype in zip(grads + [None], ctx.grad_dtypes, strict=False)
        ]
        return grad_x, *grads[:2], None, None, None


def _norm(module: nn.Module, x: torch.Tensor, weight, bias, eps: float, is_rms: bool):
    recipe = recipe_in_force(module.recipe)
    codes = recipe.keeps_codes and torch.is_grad_enabled()
    cast = recipe.input if codes and recipe.input.scaling == "current" else None
    x_MH = x.reshape(-1, x.shape[-1])
    y, rows, rows_scale, kept, kept_scale = NormFunction.apply(x_MH, weight, bias, eps, cast, is_rms)
    y = y.view(x.shape)
    if rows is not None and not torch.compiler.is_compiling():
        grain = cast.granularity
        carry(
            y,
            cast,
            Quantized(rows, rows_scale, grain),
            Kept(Quantized(kept, kept_scale, grain), is_cols=not transposes(cast)),
        )
    return y


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim, FP32 inside, dtype of x outside."""

    recipe: Recipe | None = None

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


