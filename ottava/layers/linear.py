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

from ..kernels import cast as cast_kernels
from ..kernels.cast import Quantized
from ..kernels.gemm import gemm
from ..kernels.random import make_key
from ..kernels.split import SplitParameter
from ..numerics.recipe import Cast, Recipe, get_recipe
from .autocast import HIGH, recipe_in_force
from .saved import AmaxHistory, Kept, clock, codes_of, noted_amax, save, saved, transposes


def grad_dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which autograd stores this parameter's gradient."""
    if isinstance(parameter, SplitParameter):
        return torch.bfloat16
    if torch.compiler.is_compiling():  # grad_dtype cannot be traced; autograd casts afterwards
        return parameter.dtype
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype


def weight_values(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`, also where the parameter holds codes of a split master."""
    return weight.dequantize(dtype) if isinstance(weight, SplitParameter) else weight.to(dtype)


def _stored_codes(weight: torch.Tensor, cast: Cast) -> Quantized | None:
    """The codes that the parameter already is (split master), where they are of this cast."""
    if not isinstance(weight, SplitParameter) or weight.cast != cast:
        return None
    return Quantized(weight.data, weight.scale, "tensor")


def weight_rows(weight: torch.Tensor, cast: Cast) -> Quantized:
    """Codes of weight_NK with scales along K: what the output GEMM reads."""
    stored = _stored_codes(weight, cast)
    if stored is not None:
        return stored
    return cast_kernels.quantize(weight_values(weight, _wide(weight)), cast)


def weight_cols(weight: torch.Tensor, cast: Cast) -> Quantized:
    """Codes of weight^T [K, N] with scales along N: what the grad_input GEMM reads."""
    stored = _stored_codes(weight, cast)
    if stored is not None:
        return cast_kernels.transpose(stored)
    return cast_kernels.quantize(weight_values(weight, _wide(weight)).t(), cast)


def _wide(weight: torch.Tensor) -> torch.dtype:
    return torch.float32 if isinstance(weight, SplitParameter) else weight.dtype


class How:
    """One linear's compute: its recipe, the dtype of the high-precision parts, and the amax
    history where scaling is delayed. Its methods are the three GEMMs and the casts before them."""

    __slots__ = ("dtype", "history", "recipe", "record", "stream")

    def __init__(self, recipe: Recipe, dtype: torch.dtype, history=None, stream=0, record=False):
        self.recipe, self.dtype = recipe, dtype
        self.history, self.stream, self.record = history, stream, record

    def cast(self, operand: int, x_MK: torch.Tensor, order: str, amax: torch.Tensor | None = None):
        """Codes of an operand (0 input, 2 grad_output): "rows", "cols" (of x^T), or "both".

        amax: fp32 (1,), what the kernel that made x found; saves the pass that would find it.
        """
        cast = self.recipe.input if operand == 0 else self.recipe.grad_output
        known: dict = {"key": self._key(cast, operand)}
        if cast.scaling == "delayed":
            known |= self.history.known(operand, cast, x_MK)
        elif amax is not None and cast.granularity == "tensor":
            known["amax"] = amax
        if order == "both":
            out = cast_kernels.quantize_both(x_MK, cast, **known)
        else:
            out = cast_kernels.quantize(x_MK if order == "rows" else x_MK.t(), cast, **known)
        if self.record and "amax_out" in known:
            self.history.record(operand, known["amax_out"])
        return out

    def input_cols(self, x_MK: torch.Tensor, amax: torch.Tensor | None = None) -> Quantized:
        """Codes of the input's columns for grad_weight, from values that backward has again.
        Its scale is current also where the forward's was delayed; nothing is recorded."""
        cast = self.recipe.input
        amax = amax if cast.granularity == "tensor" else None
        return cast_kernels.quantize(x_MK.t(), cast, amax=amax, key=self._key(cast, 0))

    def _key(self, cast: Cast, operand: int) -> int:
        if cast.rounding == "nearest":
            return 0
        return make_key(clock.seed, clock.step, 3 * self.stream + operand)

    def kept(self, codes: torch.Tensor, scale: torch.Tensor) -> Kept:
        """A saved pair as the input in its kept form."""
        cast = self.recipe.input
        return Kept(Quantized(codes, scale, cast.granularity), is_cols=not transposes(cast))

    def grad_codes(self, grad_MN: torch.Tensor, *, rows: bool, cols: bool, amax=None):
        """(rows, cols) codes of grad_output for the GEMMs that run in FP8, in one pass if both."""
        rows, cols = rows and self.recipe.grad_input.fp8, cols and self.recipe.grad_weight.fp8
        if rows and cols:
            return self.cast(2, grad_MN, "both", amax)
        if rows or cols:
            codes = self.cast(2, grad_MN, "rows" if rows else "cols", amax)
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


def flat(rows: Quantized | None, kept: Kept | None) -> tuple[torch.Tensor | None, ...]:
    """(rows, rows_scale, kept, kept_scale) for an autograd function; the kept pair is None where
    the rows themselves are kept (no function takes the same tensor twice under torch.compile)."""
    apart = kept is not None and kept.is_cols
    return (
        *((None, None) if rows is None else (rows.codes, rows.scale)),
        *((kept.q.codes, kept.q.scale) if apart else (None, None)),
    )


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


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the high-precision parts: autocast's where it is on, else the input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear that also takes mixed dtypes outside autocast, as the FP8 path does."""
    if torch.is_autocast_enabled(x.device.type) or x.dtype == weight.dtype:
        return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def plain_weight(module: nn.Module, destination: dict, prefix: str) -> None:
    """Replace codes of a split master in a state dict by plain FP32 values: model
    checkpoints hold no scales and no residuals."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, SplitParameter) and prefix + name in destination:
            destination[prefix + name] = parameter.dequantize(torch.float32)
