"""A linear layer whose three GEMMs run in 8 bits and which keeps 8-bit codes for backward.

    output_MN      = input_MK      @ weight_NK^T
    grad_input_MK  = grad_output_MN @ weight_NK
    grad_weight_NK = grad_output_MN^T @ input_MK

All three become "a @ b^T over the last dimension" (`kernels/gemm.py`), the only layout that
Hopper's FP8 unit takes: grad_input reads the weight's columns, grad_weight the columns of both.
Kept for backward: codes of the input (shared with every linear that read the same tensor) and the
parameter itself; a weight is cast again in backward, so no 8-bit copy stays alive between.

Shapes: M tokens (all leading dims), K in_features, N out_features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.cast import Quantized
from ..kernels.split import SplitParameter
from ..numerics.recipe import Recipe, get_recipe
from .autocast import HIGH, recipe_in_force
from .how import How, flat
from .saved import AmaxHistory, codes_of, noted_amax, save, saved
from .weights import compute_dtype, grad_dtype_of, plain_weight


class LinearFunction(torch.autograd.Function):
    """The three GEMMs of one linear. Saved: the input in kept form, and the parameter itself."""

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, rows, rows_scale, kept, kept_scale, how):
        ctx.how, ctx.x_dtype = how, x_MK.dtype
        ctx.bias_dtype = None if bias_N is None else grad_dtype_of(bias_N)
        if not weight_NK.requires_grad:
            kept = kept_scale = None
        elif not how.recipe.keeps_codes:
            kept, kept_scale = x_MK, None
        elif kept is None:
            kept, kept_scale = rows, rows_scale
        save(ctx, kept, kept_scale, parameters=(weight_NK,))
        x_q = None if rows is None else Quantized(rows, rows_scale, how.recipe.input.granularity)
        return how.output(x_MK, x_q, weight_NK, bias_N)

    @staticmethod
    def backward(ctx, grad_MN):
        how = ctx.how
        kept, kept_scale, weight = saved(ctx)
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        grad_MN = grad_MN.contiguous()
        rows, cols = how.grad_codes(grad_MN, rows=wants_x, cols=wants_w, amax=noted_amax(grad_MN))
        grad_x = grad_w = grad_b = None
        if wants_x:
            grad_x = how.grad_input(grad_MN, rows, weight).to(ctx.x_dtype)
        if wants_w:
            x = kept if kept_scale is None else how.weight_operand(how.kept(kept, kept_scale))
            if kept_scale is None and how.recipe.grad_weight.fp8:
                x = how.input_cols(kept)
            grad_w = how.grad_weight(grad_MN, cols, x, weight)
        if wants_b:
            grad_b = grad_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_b, None, None, None, None, None


class Linear(nn.Linear):
    """`nn.Linear` that runs under a recipe; same parameters, names and state_dict.

    Input: [..., in_features], fp32, bf16 or fp16; output dtype as nn.Linear gives in the same
    setting (the autocast dtype inside torch.autocast, else the input's).
    """

    recipe: Recipe | None = None
    _history: AmaxHistory | None = None

    def __init__(
        self, in_features, out_features, bias=True, device=None, dtype=None, *, recipe="tensor"
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = get_recipe(recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recipe = recipe_in_force(self.recipe)
        if recipe is HIGH and not isinstance(self.weight, SplitParameter):
            return _plain(x, self.weight, self.bias)
        how = self.how(recipe, x)
        rows, kept = self._input_codes(x, how)
        y = LinearFunction.apply(
            x.reshape(-1, self.in_features),
            self.weight,
            self.bias,
            *flat(rows, kept),
            how,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def how(self, recipe: Recipe, x: torch.Tensor) -> How:
        """How this linear runs on x under `recipe`."""
        stream = getattr(self.weight, "_ottava_stream", 0)
        history = self._history_for(recipe) if recipe.delayed else None
        record = self.training and torch.is_grad_enabled()
        return How(recipe, compute_dtype(x), history, stream, record)

    def _input_codes(self, x: torch.Tensor, how: How):
        recipe = how.recipe
        wants_kept = recipe.keeps_codes and torch.is_grad_enabled() and self.weight.requires_grad
        if wants_kept:
            return codes_of(x, recipe.input, how)
        if not recipe.output.fp8:
            return None, None
        return how.cast(0, x.detach().reshape(-1, x.shape[-1]), "rows"), None

    def _history_for(self, recipe: Recipe) -> AmaxHistory:
        self._history = AmaxHistory.of(self._history, recipe.input.history, self.weight)
        return self._history

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        plain_weight(self, destination, prefix)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear that also takes mixed dtypes outside autocast, as the FP8 path does."""
    if torch.is_autocast_enabled(x.device.type) or x.dtype == weight.dtype:
        return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
