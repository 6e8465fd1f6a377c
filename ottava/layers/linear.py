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
from .saved import AmaxHistory, Kept, cast_operand, clock, codes_of, remember


def grad_dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which autograd stores this parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def weight_values(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`, also where the parameter holds codes of a split master."""
    return weight.dequantize(dtype) if isinstance(weight, SplitParameter) else weight.to(dtype)


def _stored_codes(weight: torch.Tensor, cast: Cast) -> Quantized | None:
    """The codes that the parameter already is (split master), where they are of this cast."""
    if not isinstance(weight, SplitParameter) or not weight.is_codes:
        return None
    if cast.granularity != "tensor" or cast.format != "e4m3":
        return None
    return Quantized(weight.detach().as_subclass(torch.Tensor), weight.scale.view(1), "tensor")


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
    return cast_kernels.quantize_cols(weight_values(weight, _wide(weight)), cast)


def _wide(weight: torch.Tensor) -> torch.dtype:
    return torch.float32 if isinstance(weight, SplitParameter) else weight.dtype


def operand_key(recipe_cast: Cast, stream: int) -> int:
    """The key for this cast's random bits; 0 where it rounds to nearest."""
    return make_key(clock.seed, clock.step, stream) if recipe_cast.rounding == "stochastic" else 0


class LinearFunction(torch.autograd.Function):
    """The three GEMMs under a recipe. Tensors in `kept` form are saved, never high precision
    (unless the recipe says so); high-precision GEMMs dequantize what was kept."""

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, rows, rows_scale, kept, kept_scale, how):
        recipe: Recipe = how.recipe
        ctx.how, ctx.x_dtype = how, x_MK.dtype
        ctx.bias_dtype = None if bias_N is None else grad_dtype_of(bias_N)
        keeps_input = weight_NK.requires_grad
        if not keeps_input:
            saved = (None, None)
        elif recipe.keeps_codes:
            saved = (kept, kept_scale)
        else:
            saved = (x_MK, None)
        ctx.save_for_backward(*saved, weight_NK)
        if recipe.output.fp8:
            x_q = Quantized(rows, rows_scale, recipe.input.granularity)
            w_q = weight_rows(weight_NK, recipe.weight)
            return gemm(
                x_q, w_q, out_dtype=how.dtype, bias=bias_N, fast_accum=recipe.output.fast_accum
            )
        w = weight_values(weight_NK, how.dtype)
        bias = None if bias_N is None else bias_N.to(how.dtype)
        return F.linear(x_MK.to(how.dtype), w, bias)

    @staticmethod
    def backward(ctx, grad_MN):
        how, recipe = ctx.how, ctx.how.recipe
        kept, kept_scale, weight = ctx.saved_tensors
        grad_MN = grad_MN.contiguous()
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        fp8_x, fp8_w = wants_x and recipe.grad_input.fp8, wants_w and recipe.grad_weight.fp8
        rows = cols = None
        if fp8_x or fp8_w:
            rows, cols = how.cast_grad(grad_MN, rows=fp8_x, cols=fp8_w)
        grad_x = grad_w = grad_b = None
        if wants_x:
            grad_x = _grad_input(grad_MN, rows, weight, recipe, how.dtype).to(ctx.x_dtype)
        if wants_w:
            grad_w = _grad_weight(grad_MN, cols, kept, kept_scale, weight, how)
        if wants_b:
            grad_b = grad_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_b, None, None, None, None, None


def _grad_input(grad_MN, rows, weight, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    if recipe.grad_input.fp8:
        w_q = weight_cols(weight, recipe.weight)
        return gemm(rows, w_q, out_dtype=dtype, fast_accum=recipe.grad_input.fast_accum)
    return grad_MN.to(dtype) @ weight_values(weight, dtype)


def _grad_weight(grad_MN, cols, kept, kept_scale, weight, how) -> torch.Tensor:
    recipe, dtype = how.recipe, grad_dtype_of(weight)
    if kept_scale is not None:
        kept = how.kept(kept, kept_scale)
    if recipe.grad_weight.fp8:
        return gemm(cols, kept.cols(), out_dtype=dtype, fast_accum=recipe.grad_weight.fast_accum)
    x = kept.values(how.dtype) if isinstance(kept, Kept) else kept.to(how.dtype)
    return (grad_MN.to(how.dtype).t() @ x).to(dtype)


class How:
    """What LinearFunction needs besides tensors: the recipe, the compute dtype of the high
    precision parts, and the amax history where scaling is delayed."""

    __slots__ = ("recipe", "dtype", "history", "stream", "record")

    def __init__(self, recipe, dtype, history=None, stream=0, record=False):
        self.recipe, self.dtype = recipe, dtype
        self.history, self.stream, self.record = history, stream, record

    def kept(self, codes: torch.Tensor, scale: torch.Tensor) -> Kept:
        """The saved pair as the input in its kept form."""
        cast = self.recipe.input
        is_cols = cast.granularity in ("row", "group")
        return Kept(Quantized(codes, scale, cast.granularity), is_cols)

    def cast_grad(self, grad_MN: torch.Tensor, *, rows: bool, cols: bool):
        """(rows, cols) codes of grad_output, each only if asked for, in one pass if both."""
        cast = self.recipe.grad_output
        scale = None
        if cast.scaling == "delayed":
            scale = self.history.scale(2, grad_MN, cast, self.record)
        key = operand_key(cast, 3 * self.stream + 2)
        if rows and cols:
            return cast_kernels.quantize_both(grad_MN, cast, scale=scale, key=key)
        if rows:
            return cast_kernels.quantize(grad_MN, cast, scale=scale, key=key), None
        return None, cast_kernels.quantize_cols(grad_MN, cast, scale=scale, key=key)


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
        dtype = compute_dtype(x)
        how = How(recipe, dtype, self._history_for(recipe), self._stream(), self.training)
        rows, kept = self._input_codes(x, how)
        y = LinearFunction.apply(
            x.reshape(-1, self.in_features),
            self.weight,
            self.bias,
            None if rows is None else rows.codes,
            None if rows is None else rows.scale,
            None if kept is None else kept.q.codes,
            None if kept is None else kept.q.scale,
            how,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _input_codes(self, x: torch.Tensor, how: How):
        recipe, cast = how.recipe, how.recipe.input
        wants_kept = recipe.keeps_codes and torch.is_grad_enabled() and self.weight.requires_grad
        if not (recipe.output.fp8 or wants_kept):
            return None, None
        scale = None
        if cast.scaling == "delayed":
            record = how.record and torch.is_grad_enabled()
            scale = how.history.scale(0, x.detach(), cast, record)
        key = operand_key(cast, 3 * how.stream)
        if wants_kept:
            return codes_of(x, cast, scale=scale, key=key)
        x_MK = x.detach().reshape(-1, x.shape[-1])
        return cast_operand(x_MK, cast, keep=False, scale=scale, key=key)

    def _history_for(self, recipe: Recipe) -> AmaxHistory | None:
        if not recipe.delayed:
            return None
        length = recipe.input.history
        if self._history is None:
            self._history = AmaxHistory(length, self.weight.device)
        elif self._history.amax.shape[1] != length:
            self._history = self._history.resized(length)
        self._history.to(self.weight.device)
        remember(self.weight, self._history)
        return self._history

    def _stream(self) -> int:
        return getattr(self.weight, "_ottava_stream", 0)

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
    """Replace codes of a split master in a state dict by plain values, in the dtype that the
    parameter had: model checkpoints hold no scales and no residuals."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, SplitParameter) and prefix + name in destination:
            destination[prefix + name] = parameter.dequantize(parameter.source_dtype)
