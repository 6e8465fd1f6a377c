"""Layers on weights that stay the codes of a checkpoint: gradients pass through, none is made for them.

Under a recipe the GEMMs read the released codes and their 128 x 128 scales as they are (input and
grad_output in 1 x 128 groups); without one the weight is dequantized for the length of a product.
Nothing of the input is kept for backward.

Shapes: M tokens, K in_features, N out_features, R rows of the padded weight (kernels/frozen.py).
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.frozen import FrozenParameter
from .autocast import recipe_in_force
from .experts import Experts
from .gemms import LinearGemms
from .linear import Linear
from .saved import carried_by
from .weights import compute_dtype, untraced


class FrozenFunction(torch.autograd.Function):
    """input @ weight^T, and grad_output @ weight. `rows`: codes of the input, None in high precision."""

    @staticmethod
    def forward(ctx, x_MK, bias_N, weight, rows, how):
        ctx.how, ctx.weight, ctx.x_dtype = how, weight, x_MK.dtype
        y = how.output(x_MK, rows, weight)
        if how.recipe.output.fp8 and _is_padded(how, weight):
            y = y[:, weight.position]
        return y if bias_N is None else y + bias_N.to(y.dtype)

    @staticmethod
    def backward(ctx, grad_MN):
        how, weight = ctx.how, ctx.weight
        grad_x = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = grad_MN.sum(0, dtype=torch.float32)
        if ctx.needs_input_grad[0]:
            padded = how.recipe.grad_input.fp8 and _is_padded(how, weight)
            grad = _spread(grad_MN, weight) if padded else grad_MN.contiguous()
            rows, _ = how.grad_codes(grad, rows=True, cols=False)
            grad_x = how.grad_input(grad, rows, weight).to(ctx.x_dtype)
        return grad_x, grad_bias, None, None, None


def _is_padded(how: LinearGemms, weight: FrozenParameter) -> bool:
    """Whether FP8 products read the weight in its padded form."""
    return weight.position is not None and weight.reads_as(how.recipe.weight)


def _spread(grad_MN: torch.Tensor, weight: FrozenParameter) -> torch.Tensor:
    """[M, R] with the columns where the padded weight has those rows, zero elsewhere."""
    out = grad_MN.new_zeros(grad_MN.shape[0], weight.scale.shape[0] * 128)
    out[:, weight.position] = grad_MN
    return out


class _Frozen:
    """Mixed in before a module with frozen parameters: they follow a move, but no change of dtype."""

    def _apply(self, fn, recurse=True):
        held = {n: p for n, p in self._parameters.items() if isinstance(p, FrozenParameter)}
        for name in held:
            self._parameters[name] = None
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters |= held
        for name, p in held.items():
            device = fn(torch.empty(0, device=p.device)).device
            if device != p.device:
                self._parameters[name] = p.to_device(device)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """Codes as they are, and their scales beside them: no copy of a model that fills a GPU."""
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        for name, p in self._parameters.items():
            if isinstance(p, FrozenParameter):
                scale = p.scale
                if p.position is not None:  # of each row: no layout of files has such a grid
                    scale = scale[p.position // 128]
                destination[f"{prefix}{name}_scale_inv"] = scale


class FrozenLinear(_Frozen, Linear):
    """A linear whose weight is a `FrozenParameter`. Output dtype as `Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return untraced(self.forward, x)
        recipe = recipe_in_force(self.recipe)
        how = LinearGemms(recipe, compute_dtype(x))
        rows = None
        if recipe.output.fp8:
            carried = carried_by(x, recipe.input)
            rows = how.cast("input", x.detach().reshape(-1, self.in_features), "rows") \
                if carried is None else carried.rows  # fmt: skip
        y = FrozenFunction.apply(
            x.reshape(-1, self.in_features), self.bias, self.weight, rows, how
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.out_features)


class FrozenExperts(_Frozen, Experts):
    """Experts whose two weights are `FrozenParameter`s."""

    def forward(self, x_Th, topk_index, topk_weight) -> torch.Tensor:
        for name in ("gate_up_proj", "down_proj"):
            if not isinstance(getattr(self, name), FrozenParameter):
                raise ValueError(
                    f"experts: PEFT is about to add an adapter to the FP8 codes of {name} as if they "
                    "were values; call ottava.convert(model) after get_peft_model"
                )
        return super().forward(x_Th, topk_index, topk_weight)
