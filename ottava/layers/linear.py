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
from ..kernels.gemm import gemm
from ..kernels.joined import join_transposed
from ..kernels.split import SplitParameter
from ..numerics.recipe import Recipe, native_recipe
from ..stretch import runs_again
from .autocast import HIGH, recipe_in_force
from .delayed import AmaxHistory
from .gemms import LinearGemms, flat, joined_grad_codes, joins
from .saved import noted_amax, save, saved
from .waiting import leave, may_wait, take, whole
from .weights import (
    Stored,
    compute_dtype,
    grad_dtype_of,
    set_on,
    traceable,
    untraced,
    weight_rows,
)


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


class JoinedFunction(torch.autograd.Function):
    """Linears that read one tensor, as one: their gradients of it come out of one GEMM over all
    their outputs, and its codes are transposed once. Saved as by `LinearFunction`, once for all."""

    @staticmethod
    def forward(ctx, x_MK, rows, rows_scale, hows, *parameters):
        weights, biases = parameters[: len(hows)], parameters[len(hows) :]
        ctx.hows, ctx.x_dtype = hows, x_MK.dtype
        ctx.bias_dtypes = [None if b is None else grad_dtype_of(b) for b in biases]
        ctx.set_materialize_grads(False)
        save(ctx, rows, rows_scale, parameters=weights)
        x_q = Quantized(rows, rows_scale, hows[0].recipe.input.granularity)
        each = zip(hows, weights, biases, strict=True)
        return tuple(how.output(x_MK, x_q, w, b) for how, w, b in each)

    @staticmethod
    def backward(ctx, *grads):
        hows = ctx.hows
        rows, rows_scale, *weights = saved(ctx)
        if all(g is None for g in grads):
            return None, None, None, None, *[None] * (2 * len(hows))
        grads = [
            rows.new_zeros(rows.shape[0], w.shape[0], dtype=how.dtype)
            if g is None
            else g.contiguous()
            for g, how, w in zip(grads, hows, weights, strict=True)
        ]
        w_codes = [weight_rows(w, hows[0].recipe.weight) for w in weights]
        joined, cols = joined_grad_codes(hows, grads, w_codes)
        settings = hows[0].recipe.grad_input
        grad_x = gemm(
            joined,
            join_transposed(w_codes),
            out_dtype=hows[0].dtype,
            fast_accum=settings.fast_accum,
        ).to(ctx.x_dtype)
        del joined, w_codes
        x = hows[0].weight_operand(hows[0].kept(rows, rows_scale))
        each = zip(hows, grads, cols, weights, strict=True)
        grad_w = [how.grad_weight(g, c, x, w) for how, g, c, w in each]
        grad_b = [
            g.sum(0, dtype=torch.float32).to(dtype) if needed else None
            for g, dtype, needed in zip(
                grads, ctx.bias_dtypes, ctx.needs_input_grad[4 + len(hows) :], strict=True
            )
        ]
        return grad_x, None, None, None, *grad_w, *grad_b


class Linear(Stored, nn.Linear):
    """`nn.Linear` that runs under a recipe; same parameters, names and state_dict.

    Input: [..., in_features], fp32, bf16 or fp16; output dtype as nn.Linear gives in the same
    setting (the autocast dtype inside torch.autocast, else the input's).
    """

    recipe: Recipe | None = None
    together: tuple[Linear, ...] = ()  # this linear and those called after it with the same input
    _history: AmaxHistory | None = None

    def __init__(
        self, in_features, out_features, bias=True, device=None, dtype=None, *, recipe="tensor"
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = native_recipe(recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not traceable(self.weight):
            return untraced(self.forward, x)
        recipe = recipe_in_force(self.recipe)
        if recipe is HIGH and not isinstance(self.weight, SplitParameter):
            return _plain(x, self.weight, self.bias)
        waiting = take(x, self, (recipe, compute_dtype(x)))
        if waiting is not None:
            return waiting
        if self.together and self._joins(x, recipe):
            return self._forward_together(x, recipe)
        how = self.how(recipe, x)
        keep = recipe.keeps_codes and torch.is_grad_enabled() and self.weight.requires_grad
        rows = kept = None
        if keep or recipe.output.fp8:
            rows, kept = how.codes_of(x, keep)
        y = LinearFunction.apply(
            x.reshape(-1, self.in_features),
            self.weight,
            self.bias,
            *flat(rows, kept),
            how,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _joins(self, x: torch.Tensor, recipe: Recipe) -> bool:
        """Whether all of `together` can run on x now, as one."""
        if not (may_wait() and x.requires_grad and joins(recipe)):
            return False
        return all(
            recipe_in_force(m.recipe) == recipe
            and m.weight.requires_grad
            and whole(m.weight, (m.out_features, self.in_features), x)
            and (m.bias is None or whole(m.bias, (m.out_features,), x))
            for m in self.together
        )

    def _forward_together(self, x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """This linear's output; those of the others wait on x until they are called."""
        hows = [m.how(recipe, x) for m in self.together]
        rows, _ = hows[0].codes_of(x)
        outs = JoinedFunction.apply(
            x.reshape(-1, self.in_features),
            rows.codes,
            rows.scale,
            hows,
            *(m.weight for m in self.together),
            *(m.bias for m in self.together),
        )
        outs = [y.view(*x.shape[:-1], y.shape[-1]) for y in outs]
        for module, y in zip(self.together[1:], outs[1:], strict=True):
            leave(x, module, y, (recipe, hows[0].dtype))
        return outs[0]

    def how(self, recipe: Recipe, x: torch.Tensor) -> LinearGemms:
        """How this linear runs on x under `recipe`; what makes x asks as well, to cast it (`reader`).
        Needs nothing of the weight but what is noted on it, so a sharded one may be elsewhere."""
        stream = getattr(self.weight, "_ottava_stream", 0)
        history = None
        if recipe.delayed:
            history = AmaxHistory.of(self._history, recipe.history, self.weight, x)
            self._history = history
        record = self.training and torch.is_grad_enabled() and not runs_again()
        return LinearGemms(recipe, compute_dtype(x), history, stream, record)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


def run_together(*linears: nn.Module | None) -> None:
    """Let linears that are called one after the other with the same input run as one, where they
    are ours and have one recipe; the first call runs them all."""
    ours = all(isinstance(m, Linear) and m.recipe is not None for m in linears)
    if ours and len({m.recipe for m in linears}) == 1:
        set_on(linears[0], together=linears)


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear that also takes mixed dtypes outside autocast, as the FP8 path does."""
    if torch.is_autocast_enabled(x.device.type) or x.dtype == weight.dtype:
        return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
