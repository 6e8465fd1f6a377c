"""The gated MLP, y = down(silu(gate(x)) * up(x)), as one function that keeps 8-bit codes only.

Kept for backward: the input's codes (shared with the norm that made them) and gate and up in int8
per group of 128; the product is recomputed from those inside the backward kernel, which also gives
its transposed codes for down_proj's weight gradient. Recompute "mlp" keeps the input codes alone.

Shapes: M tokens, H hidden features, F inner features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnF
from torch import nn

from ..kernels import cast as cast_kernels
from ..kernels import swiglu as swiglu_kernels
from ..kernels.cast import Quantized
from ..kernels.gemm import gemm
from ..numerics.recipe import Cast, Recipe
from .autocast import HIGH, recipe_in_force
from .linear import How, Linear, compute_dtype, grad_dtype_of, operand_key, weight_cols, weight_rows
from .linear import weight_values
from .saved import Kept, codes_of, transposes


class GatedMLPFunction(torch.autograd.Function):
    """Three linears and the gate between them under one recipe (FP8 or storage)."""

    @staticmethod
    def forward(ctx, x_MH, w_gate, w_up, w_down, rows, rows_scale, kept, kept_scale, how, recompute):
        ctx.how, ctx.recompute, ctx.x_dtype = how, recompute, x_MH.dtype
        x_q = None if rows is None else Quantized(rows, rows_scale, how.recipe.input.granularity)
        gate = _output(x_MH, x_q, w_gate, how)
        up = _output(x_MH, x_q, w_up, how)
        h, amax, *gate_up = swiglu_kernels.swiglu(gate, up)
        del gate, up
        y = _output(h, _cast_known(h, how, amax), w_down, how)
        ctx.save_for_backward(
            kept, kept_scale, *([None] * 4 if recompute else gate_up), w_gate, w_up, w_down
        )
        return y

    @staticmethod
    def backward(ctx, grad_MH):
        how, recipe = ctx.how, ctx.how.recipe
        kept, kept_scale, *gate_up, w_gate, w_up, w_down = ctx.saved_tensors
        kept = how.kept(kept, kept_scale)
        if ctx.recompute:
            gate_up = _again(kept, w_gate, w_up, how)
        grad_MH = grad_MH.contiguous()
        rows, cols = _cast_grad(grad_MH, how, recipe.grad_input.fp8, recipe.grad_weight.fp8)
        grad_h = _grad_input(grad_MH, rows, w_down, how)
        grad_gate, grad_up, h, *amaxes = swiglu_kernels.swiglu_backward(grad_h, *gate_up)
        del grad_h, gate_up, rows
        grad_down = None
        if ctx.needs_input_grad[3]:
            h_cols = _cols_known(h, recipe.input, amaxes[2]) if recipe.grad_weight.fp8 else None
            grad_down = _grad_weight(grad_MH, cols, h, h_cols, w_down, how)
            del h_cols
        del h, cols
        x_cols = kept.cols() if recipe.grad_weight.fp8 else None
        x = None if recipe.grad_weight.fp8 else kept.values(how.dtype)
        grad_x, grads = None, []
        for grad, w, amax, wanted in (
            (grad_gate, w_gate, amaxes[0], ctx.needs_input_grad[1]),
            (grad_up, w_up, amaxes[1], ctx.needs_input_grad[2]),
        ):
            rows, cols = _cast_grad(
                grad, how, recipe.grad_input.fp8, recipe.grad_weight.fp8 and wanted, amax
            )
            grads.append(_grad_weight(grad, cols, x, x_cols, w, how) if wanted else None)
            if ctx.needs_input_grad[0]:
                part = _grad_input(grad, rows, w, how)
                grad_x = part if grad_x is None else grad_x.add_(part)
        grad_x = None if grad_x is None else grad_x.to(ctx.x_dtype)
        return grad_x, *grads, grad_down, None, None, None, None, None, None


def _output(x, x_q, weight, how: How) -> torch.Tensor:
    gemm_settings = how.recipe.output
    if gemm_settings.fp8:
        w_q = weight_rows(weight, how.recipe.weight)
        return gemm(x_q, w_q, out_dtype=how.dtype, fast_accum=gemm_settings.fast_accum)
    return nnF.linear(x.to(how.dtype), weight_values(weight, how.dtype))


def _known_scale(cast: Cast, amax: torch.Tensor | None) -> torch.Tensor | None:
    """The scale from the amax that the producing kernel found; None where it has other grains."""
    if amax is None or cast.granularity != "tensor":
        return None
    return cast_kernels.scale_from_amax(amax, cast)


def _cast_known(h, how: How, amax) -> Quantized | None:
    if not how.recipe.output.fp8:
        return None
    cast = how.recipe.input
    return cast_kernels.quantize(h, cast, scale=_known_scale(cast, amax), key=0)


def _cols_known(h, cast: Cast, amax) -> Quantized:
    return cast_kernels.quantize_cols(h, cast, scale=_known_scale(cast, amax))


def _cast_grad(grad, how: How, rows: bool, cols: bool, amax=None):
    cast = how.recipe.grad_output
    scale, key = _known_scale(cast, amax), operand_key(cast, 3 * how.stream + 2)
    if rows and cols:
        return cast_kernels.quantize_both(grad, cast, scale=scale, key=key)
    if rows:
        return cast_kernels.quantize(grad, cast, scale=scale, key=key), None
    if cols:
        return None, cast_kernels.quantize_cols(grad, cast, scale=scale, key=key)
    return None, None


def _grad_input(grad, rows, weight, how: How) -> torch.Tensor:
    settings = how.recipe.grad_input
    if settings.fp8:
        w_q = weight_cols(weight, how.recipe.weight)
        return gemm(rows, w_q, out_dtype=how.dtype, fast_accum=settings.fast_accum)
    return grad.to(how.dtype) @ weight_values(weight, how.dtype)


def _grad_weight(grad, cols, x, x_cols, weight, how: How) -> torch.Tensor:
    dtype, settings = grad_dtype_of(weight), how.recipe.grad_weight
    if settings.fp8:
        return gemm(cols, x_cols, out_dtype=dtype, fast_accum=settings.fast_accum)
    return (grad.to(how.dtype).t() @ x.to(how.dtype)).to(dtype)


def _again(kept: Kept, w_gate, w_up, how: How):
    """gate and up in their kept form, from the kept input: the same GEMMs as in forward."""
    cast = how.recipe.input
    same = transposes(cast) and how.recipe.output.fp8
    x = None if same else kept.values(how.dtype)
    x_q = kept.q if same else None
    if x_q is None and how.recipe.output.fp8:
        x_q = cast_kernels.quantize(x, cast)
    gate, up = _output(x, x_q, w_gate, how), _output(x, x_q, w_up, how)
    return swiglu_kernels.swiglu(gate, up)[2:]


class GatedMLP(nn.Module):
    """Swapped in for a module with gate_proj, up_proj, down_proj and SiLU. `recompute`: keep the
    input codes alone and run gate and up again in backward."""

    recipe: Recipe | None = None
    recompute: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        three = (self.gate_proj, self.up_proj, self.down_proj)
        recipe = recipe_in_force(self.recipe)
        fused = recipe is not HIGH and all(isinstance(m, Linear) for m in three)
        if not fused or recipe.delayed or not torch.is_grad_enabled() or not recipe.keeps_codes:
            return self.down_proj(nnF.silu(self.gate_proj(x)) * self.up_proj(x))
        how = How(recipe, compute_dtype(x), stream=three[0]._stream())
        rows, kept = codes_of(x, recipe.input)
        y = GatedMLPFunction.apply(
            x.reshape(-1, x.shape[-1]),
            *(m.weight for m in three),
            rows.codes,
            rows.scale,
            kept.q.codes,
            kept.q.scale,
            how,
            self.recompute,
        )
        return y.view(*x.shape[:-1], y.shape[-1])
