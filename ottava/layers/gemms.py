"""How one linear computes: the casts of its operands and its three GEMMs, under one recipe.

Shapes: M tokens (all leading dims), K in_features, N out_features.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..kernels import cast as cast_kernels
from ..kernels.cast import Quantized
from ..kernels.gemm import gemm
from ..kernels.joined import quantize_joined
from ..kernels.random import make_key
from ..kernels.swiglu_codes import swiglu_backward_amax, swiglu_backward_first
from ..numerics.recipe import Cast, Recipe
from .delayed import OPERANDS, clock
from .saved import Kept, carried_by, carry, noted_amax, transposes
from .weights import grad_dtype_of, weight_cols, weight_rows, weight_values


class LinearGemms:
    """One linear's compute: its recipe, the dtype of the high-precision parts, and the amax
    history where scaling is delayed. Its methods are the three GEMMs and the casts before them."""

    __slots__ = ("dtype", "history", "recipe", "record", "stream")

    def __init__(self, recipe: Recipe, dtype: torch.dtype, history=None, stream=0, record=False):
        self.recipe, self.dtype = recipe, dtype
        self.history, self.stream, self.record = history, stream, record

    def cast(self, operand: str, x_MK: torch.Tensor, order: str, amax: torch.Tensor | None = None):
        """Codes of an operand ("input" or "grad_output"): "rows", "cols" (of x^T), or "both".

        amax: fp32 (1,), what the kernel that made x found; saves the pass that would find it.
        """
        cast = self.recipe.input if operand == "input" else self.recipe.grad_output
        known: dict = {"key": self._key(cast, operand)}
        if cast.scaling == "delayed":
            known |= self.history.known(operand, cast, x_MK, self.record)
        elif amax is not None and cast.granularity == "tensor":
            known["amax"] = amax
        if order == "both":
            out = cast_kernels.quantize_both(x_MK, cast, **known)
        else:
            out = cast_kernels.quantize(x_MK if order == "rows" else x_MK.t(), cast, **known)
        return out

    def cast_input(self, x_MK: torch.Tensor, amax: torch.Tensor | None = None):
        """(rows, kept): codes of x for the output GEMM, and the form of them kept for grad_weight.

        x_MK: any float dtype, 2-D. One pass over x where both orders are needed. amax as in `cast`.
        """
        if transposes(self.recipe.input):
            rows = self.cast("input", x_MK, "rows", amax)
            return rows, Kept(rows, is_cols=False)
        rows, cols = self.cast("input", x_MK, "both", amax)
        return rows, Kept(cols, is_cols=True)

    def codes_of(self, x: torch.Tensor, keep: bool = True) -> tuple[Quantized, Kept | None]:
        """(rows, kept) of an input [..., K]: those it carries, or new ones that it carries from now
        on. keep=False: rows alone, of which nothing is left on x."""
        cast = self.recipe.input
        found = carried_by(x, cast)
        if found is not None:
            return found.rows, found.kept if keep else None
        x_MK = x.detach().reshape(-1, x.shape[-1])
        if not keep:
            return self.cast("input", x_MK, "rows"), None
        rows, kept = self.cast_input(x_MK)
        carry(x, cast, rows, kept)
        return rows, kept

    def knows_input(self) -> bool:
        """Whether the input's scale is known before the input is: delayed, and not the first step.
        Not under torch.compile, which does not take the operators that use it."""
        if torch.compiler.is_compiling():
            return False
        cast = self.recipe.input
        delayed = cast.scaling == "delayed" and cast.rounding == "nearest"
        return delayed and self.history.knows("input")

    def input_known(self, like: torch.Tensor) -> dict:
        """Where `knows_input`: the amax that scales it, and where its own goes."""
        known = self.history.known("input", self.recipe.input, like, self.record)
        return {"past": known["amax"], "amax_out": known["amax_out"]}

    def input_cols(self, x_MK: torch.Tensor, amax: torch.Tensor | None = None) -> Quantized:
        """Codes of the input's columns for grad_weight, from values that backward has again.
        Its scale is current also where the forward's was delayed; nothing is recorded."""
        cast = self.recipe.input
        amax = amax if cast.granularity == "tensor" else None
        return cast_kernels.quantize(x_MK.t(), cast, amax=amax, key=self._key(cast, "input"))

    def _key(self, cast: Cast, operand: str) -> int:
        if cast.rounding == "nearest":
            return 0
        return make_key(clock.seed, clock.step, 3 * self.stream + OPERANDS.index(operand))

    def kept(self, codes: torch.Tensor, scale: torch.Tensor) -> Kept:
        """A saved pair as the input in its kept form."""
        cast = self.recipe.input
        return Kept(Quantized(codes, scale, cast.granularity), is_cols=not transposes(cast))

    def grad_codes(self, grad_MN: torch.Tensor, *, rows: bool, cols: bool, amax=None):
        """(rows, cols) codes of grad_output for the GEMMs that run in FP8, in one pass if both."""
        rows, cols = rows and self.recipe.grad_input.fp8, cols and self.recipe.grad_weight.fp8
        if rows and cols:
            return self.cast("grad_output", grad_MN, "both", amax)
        if rows or cols:
            codes = self.cast("grad_output", grad_MN, "rows" if rows else "cols", amax)
            return (codes, None) if rows else (None, codes)
        return None, None

    def output(self, x_MK, x_q: Quantized | None, weight, bias=None) -> torch.Tensor:
        """input @ weight^T (+ bias), from x_q in FP8 or from x in high precision."""
        settings = self.recipe.output
        if settings.fp8:
            w_q = weight_rows(weight, self.recipe.weight)
            return gemm(x_q, w_q, out_dtype=self.dtype, bias=bias, fast_accum=settings.fast_accum)
        bias = None if bias is None else bias.to(self.dtype)
        return F.linear(x_MK.to(self.dtype), weight_values(weight, self.dtype), bias)

    def grad_input(self, grad_MN, rows: Quantized | None, weight) -> torch.Tensor:
        """grad_output @ weight, from rows in FP8 or from grad_MN in high precision."""
        settings = self.recipe.grad_input
        if settings.fp8:
            w_q = weight_cols(weight, self.recipe.weight)
            return gemm(rows, w_q, out_dtype=self.dtype, fast_accum=settings.fast_accum)
        return grad_MN.to(self.dtype) @ weight_values(weight, self.dtype)

    def grad_weight(self, grad_MN, cols: Quantized | None, x, weight) -> torch.Tensor:
        """grad_output^T @ input in the weight's gradient dtype. x: codes of the input's columns
        where that GEMM runs in FP8, else the input's values [M, K]."""
        dtype, settings = grad_dtype_of(weight), self.recipe.grad_weight
        if settings.fp8:
            return gemm(cols, x, out_dtype=dtype, fast_accum=settings.fast_accum)
        return (grad_MN.to(self.dtype).t() @ x.to(self.dtype)).to(dtype)

    def weight_operand(self, kept: Kept):
        """The kept input as `grad_weight` wants it: codes of its columns, or its values."""
        return kept.cols() if self.recipe.grad_weight.fp8 else kept.values(self.dtype)


@functools.cache
def joins(recipe: Recipe) -> bool:
    """Whether linears under this recipe that read one tensor can give its gradient as one GEMM:
    all in FP8 with a scale per tensor, and gradients in a format that has the range to share one."""
    gemms = recipe.output.fp8 and recipe.grad_input.fp8 and recipe.grad_weight.fp8
    casts = (recipe.input, recipe.weight, recipe.grad_output)
    plain = all(c.granularity == "tensor" and c.rounding == "nearest" for c in casts)
    return gemms and plain and recipe.keeps_codes and recipe.grad_output.format == "e5m2"


def joined_grad_codes(hows: list[LinearGemms], grads: list[torch.Tensor], weights: list[Quantized]):
    """(rows, columns of each) codes of grads_MN of linears whose recipe `joins`, for one grad_input
    GEMM with the joined weights, and for each its own grad_weight."""
    cast, found = hows[0].recipe.grad_output, []
    if cast.scaling == "delayed":
        pairs = zip(hows, grads, strict=True)
        amaxes = [how.history.past("grad_output", cast, grad) for how, grad in pairs]
        found = [how.history.note("grad_output") for how in hows if how.record]
    else:
        amaxes = [cast_kernels.amax(g) if noted_amax(g) is None else noted_amax(g) for g in grads]
    return quantize_joined(grads, amaxes, [w.scale for w in weights], cast, amax_out=found)


def gated_amaxes(
    hows: tuple[LinearGemms, LinearGemms, LinearGemms],
    grad_h: torch.Tensor,
    kept: list,
    h_amax: torch.Tensor | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Quantized | None]:
    """(amaxes, where new ones go, columns of h) for `swiglu_backward_codes`, for hows of gate, up and
    down whose recipe `joins`. kept: gate and up as `swiglu` kept them. h_amax: h's in forward, fp32
    (1,), or None where its scale was known before it.

    Scales come from earlier steps where scaling is delayed and all of them are known: h's codes are
    then made with the gradients'. Else a pass over the same operands finds the gradients' amaxes, and
    makes h's codes. h's scale is forward's; only forward records its amax.
    """
    recipe = hows[0].recipe
    grad = ("grad_output", recipe.grad_output)
    each = list(zip(hows, (grad, grad, ("input", recipe.input)), strict=True))
    noting = recipe.grad_output.scaling == "delayed" and hows[0].record
    if all(c.scaling == "delayed" and how.history.knows(operand) for how, (operand, c) in each):
        amaxes = [how.history.past(*operand, grad_h) for how, operand in each]
        found = [how.history.note("grad_output") for how in hows[:2]] if noting else []
        return amaxes, found, None
    h_cols = None
    if h_amax is None:
        amaxes = swiglu_backward_amax(grad_h, *kept)
    else:
        amaxes, h_cols = swiglu_backward_first(grad_h, kept, h_amax, recipe.input)
    for how, amax in zip(hows[:2] if noting else (), amaxes, strict=False):
        how.history.record("grad_output", amax)
    return amaxes, [], h_cols


def flat(rows: Quantized | None, kept: Kept | None) -> tuple[torch.Tensor | None, ...]:
    """(rows, rows_scale, kept, kept_scale) for an autograd function; the kept pair is None where
    the rows themselves are kept (no function takes the same tensor twice under torch.compile)."""
    apart = kept is not None and kept.is_cols
    return (
        *((None, None) if rows is None else (rows.codes, rows.scale)),
        *((kept.q.codes, kept.q.scale) if apart else (None, None)),
    )


def carry_flat(y: torch.Tensor, how: LinearGemms, rows, rows_scale, kept, kept_scale) -> None:
    """Let codes that `flat` gave travel with y to the linear whose `how` cast them."""
    if kept is None:
        kept, kept_scale = rows, rows_scale
    cast = how.recipe.input
    rows = Quantized(rows, rows_scale, cast.granularity)
    carry(y, cast, rows, how.kept(kept, kept_scale))
