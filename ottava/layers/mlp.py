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
from ..kernels.joined import join_transposed
from ..kernels.swiglu_codes import interleaves, swiglu_backward_codes, swiglu_codes
from ..numerics.formats import BLOCK
from ..numerics.recipe import Recipe
from ..stretch import ends_after, remembered
from .autocast import recipe_in_force
from .gemms import flat, gated_amaxes, joins
from .linear import Linear
from .saved import Kept, noted_amax, save, saved
from .weights import traceable, untraced, weight_rows


class GatedMLPFunction(torch.autograd.Function):
    """Three linears and the gate between them, under one recipe (FP8 or storage)."""

    @staticmethod
    def forward(
        ctx, x_MH, w_gate, w_up, w_down, rows, rows_scale, kept, kept_scale, hows, recompute
    ):
        ctx.hows, ctx.recompute, ctx.x_dtype = hows, recompute, x_MH.dtype
        how_gate, how_up, how_down = hows
        x_q = Quantized(rows, rows_scale, how_gate.recipe.input.granularity)
        if kept is None:
            kept, kept_scale = rows, rows_scale
        weights = (w_gate, w_up, w_down)
        in_codes = how_down.knows_input() and joins(how_down.recipe)
        needs_amax = joins(how_down.recipe) and not in_codes
        if not recompute and ends_after(ctx, 6 + needs_amax):  # what follows is not asked for
            gate_up = _codes(x_MH, x_q, weights, hows)
            top = remembered(None) if needs_amax else None
            save(ctx, kept, kept_scale, *gate_up, top, parameters=weights)
        gate, up = how_gate.output(x_MH, x_q, w_gate), how_up.output(x_MH, x_q, w_up)
        h = h_q = amax = None
        if in_codes:  # delayed: h is never but codes
            known, cast = how_down.input_known(x_MH), how_down.recipe.input
            h_q, gate_up = swiglu_codes(gate, up, cast=cast, keep_codes=not recompute, **known)
        else:
            h, amax, *gate_up = swiglu_kernels.swiglu_(gate.contiguous(), up)
        del gate, up
        gate_up = [None] * 4 if recompute else gate_up
        top = remembered(lambda: amax) if needs_amax else None
        save(ctx, kept, kept_scale, *gate_up, top, parameters=weights)
        if h_q is None and how_down.recipe.output.fp8:
            h_q = how_down.cast("input", h, "rows", amax)
        return how_down.output(h, h_q, w_down)

    @staticmethod
    def backward(ctx, grad_MH):
        how_gate, how_up, how_down = ctx.hows
        kept, kept_scale, *gate_up, h_amax, w_gate, w_up, w_down = saved(ctx)
        wants_x, *wants_w = ctx.needs_input_grad[:4]
        kept = how_gate.kept(kept, kept_scale)
        if ctx.recompute:
            gate_up = list(_again(kept, w_gate, w_up, ctx.hows))
        grad_MH, none = grad_MH.contiguous(), [None] * 6
        if all(ctx.needs_input_grad[:4]) and joins(how_gate.recipe):
            weights = (w_gate, w_up, w_down)
            grad_x, *grads = _backward_in_codes(ctx.hows, grad_MH, kept, gate_up, h_amax, weights)
            return grad_x.to(ctx.x_dtype), *grads, *none
        amax = noted_amax(grad_MH)
        rows, cols = how_down.grad_codes(grad_MH, rows=True, cols=wants_w[2], amax=amax)
        grad_h = how_down.grad_input(grad_MH, rows, w_down)
        grad_gate, grad_up, h, *amaxes = swiglu_kernels.swiglu_backward(grad_h, *gate_up)
        del grad_h, gate_up, rows
        grad_down = None
        if wants_w[2]:
            if how_down.recipe.grad_weight.fp8:
                h = how_down.input_cols(h, amaxes[2])
            grad_down = how_down.grad_weight(grad_MH, cols, h, w_down)
        del h, cols
        x = how_gate.weight_operand(kept)
        grad_x, grads = None, []
        for grad, how, w, amax, wants in (
            (grad_gate, how_gate, w_gate, amaxes[0], wants_w[0]),
            (grad_up, how_up, w_up, amaxes[1], wants_w[1]),
        ):
            rows, cols = how.grad_codes(grad, rows=wants_x, cols=wants, amax=amax)
            grads.append(how.grad_weight(grad, cols, x, w) if wants else None)
            if wants_x:
                part = how.grad_input(grad, rows, w)
                grad_x = part if grad_x is None else grad_x.add_(part)
        grad_x = None if grad_x is None else grad_x.to(ctx.x_dtype)
        return grad_x, *grads, grad_down, *none


def _backward_in_codes(hows, grad_MH, kept: Kept, gate_up: list, h_amax, weights):
    """Gradients of x and the three weights; those of gate, up and h exist as codes only, and gate's
    and up's part in x's come from one GEMM. What is needed no more goes at once, `gate_up` too."""
    how_gate, how_up, how_down = hows
    w_gate, w_up, w_down = weights
    rows, cols = how_down.grad_codes(grad_MH, rows=True, cols=True, amax=noted_amax(grad_MH))
    grad_h = how_down.grad_input(grad_MH, rows, w_down)
    del rows
    w_codes = [weight_rows(w, how_gate.recipe.weight) for w in (w_gate, w_up)]
    amaxes, found, h_cols = gated_amaxes(hows, grad_h, gate_up, h_amax)
    grad_down = None
    if h_cols is not None:
        grad_down = how_down.grad_weight(grad_MH, cols, h_cols, w_down)
        h_cols = cols = None
    recipe, scales = how_gate.recipe, [w.scale for w in w_codes]
    codes = swiglu_backward_codes(
        grad_h, gate_up, amaxes, scales, recipe.grad_output, recipe.input, amax_out=found, over=True
    )
    gate_up.clear()
    del grad_h
    if grad_down is None:
        grad_down = how_down.grad_weight(grad_MH, cols, codes.h_cols, w_down)
    rows, gate_cols, up_cols = codes[:3]
    del cols, codes
    grad_x = gemm(
        rows,
        join_transposed(w_codes, BLOCK if interleaves(w_gate.shape[0]) else 0),
        out_dtype=how_gate.dtype,
        fast_accum=how_gate.recipe.grad_input.fast_accum,
    )
    del rows, w_codes
    x = how_gate.weight_operand(kept)
    grad_gate = how_gate.grad_weight(grad_MH, gate_cols, x, w_gate)
    return grad_x, grad_gate, how_up.grad_weight(grad_MH, up_cols, x, w_up), grad_down


def _again(kept: Kept, w_gate, w_up, hows):
    """gate and up in their kept form, from the kept input: the GEMMs of the forward again."""
    how_gate = hows[0]
    fp8 = how_gate.recipe.output.fp8
    if fp8 and not kept.is_cols:
        x, x_q = None, kept.q
    else:
        x = kept.values(how_gate.dtype)
        x_q = cast_kernels.quantize(x, how_gate.recipe.input) if fp8 else None
    return _codes(x, x_q, (w_gate, w_up), hows)


def _codes(x, x_q, weights, hows):
    """gate and up in their kept form, where h is not needed: one after the other."""
    pairs = zip(hows[:2], weights[:2], strict=True)
    each = [cast_kernels.quantize_int8(how.output(x, x_q, w)) for how, w in pairs]
    return *each[0], *each[1]


def _runs_plainly(m: nn.Module) -> bool:
    """Whether a call of `m` is our linear's and nothing else: no forward of its own, and no hooks
    but those marked `only_looks`, which are content not to be called here."""
    if not isinstance(m, Linear) or "forward" in m.__dict__:
        return False
    kinds = (m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks)
    return all(getattr(hook, "only_looks", False) for hooks in kinds for hook in hooks.values())


class GatedMLP(nn.Module):
    """Swapped in for a module with gate_proj, up_proj, down_proj and SiLU. `recompute`: keep the
    input codes alone and run gate and up again in backward."""

    recipe: Recipe | None = None
    recompute: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        three = (self.gate_proj, self.up_proj, self.down_proj)
        recipe = recipe_in_force(self.recipe)
        if not recipe.keeps_codes or not all(_runs_plainly(m) for m in three):
            return self.down_proj(nnF.silu(self.gate_proj(x)) * self.up_proj(x))
        if not traceable(*(m.weight for m in three)):
            return untraced(self.forward, x)
        hows = tuple(m.how(recipe, x) for m in three)
        rows, kept = hows[0].codes_of(x)
        y = GatedMLPFunction.apply(
            x.reshape(-1, x.shape[-1]),
            *(m.weight for m in three),
            *flat(rows, kept),
            hows,
            self.recompute,
        )
        return y.view(*x.shape[:-1], y.shape[-1])
