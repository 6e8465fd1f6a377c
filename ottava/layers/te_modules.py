"""Linears, gated MLPs and experts whose GEMMs are Transformer Engine's (layers/te.py).

Parameters are the model's own. Transformer Engine keeps what its GEMMs need in backward; what lies
between two of them is kept by Ottava, in int8 per group of 128: gate and up of an MLP. Its fused
modules are not used: LayerNormLinear hands its norm's output to one linear, and here hooks see it and
two or three linears read it; LayerNormMLP wants gate and up as one weight, which is a copy.

Under `ottava.autocast` each of them computes as its native class does. Outside of torch.autocast
input and weight may differ in dtype, as everywhere here.

M tokens, K in_features, N out_features, F inner features; T tokens of a MoE layer, k experts each.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as nnF
from torch import Tensor, nn

from ..kernels import swiglu as swiglu_kernels
from ..kernels.split import SplitParameter
from ..numerics.recipe import Recipe
from .autocast import recipe_in_force
from .experts import Experts, Groups
from .linear import Linear, _plain
from .mlp import GatedMLP
from .saved import save, saved
from .te import ROWS, Held
from .weights import set_on, untraced


def _held(owner: nn.Module, key: str, kind: str, **sizes) -> Held:
    """The module of Transformer Engine's that `owner` holds as `key`, not a submodule."""
    held = owner.__dict__.get(key)
    if held is None:
        held = Held(kind, **sizes)
        set_on(owner, **{key: held})
    return held


def _readable(name: str, weight: Tensor) -> Tensor:
    """The weight, if Transformer Engine can read it: also the BF16 part of a split master."""
    if isinstance(weight, SplitParameter) and weight.dtype is torch.float8_e4m3fn:
        raise ValueError(
            f"{name} is split codes, which Transformer Engine cannot read; ottava.revert(model), and "
            "convert with a te recipe before the optimizer is made"
        )
    return weight


def _call(held: Held, parameters: dict[str, Tensor], recipe: Recipe, x_MK: Tensor, *rest) -> Tensor:
    """held(x), in the dtype that the native class would give."""
    dtype, kind = next(iter(parameters.values())).dtype, x_MK.device.type
    if torch.is_autocast_enabled(kind) or x_MK.dtype == dtype:
        return held(parameters, recipe, x_MK, *rest)
    if x_MK.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(kind, dtype=x_MK.dtype):
            return held(parameters, recipe, x_MK, *rest)
    return held(parameters, recipe, x_MK.to(dtype), *rest).to(x_MK.dtype)


class TELinear(Linear):
    """`nn.Linear` on `te.Linear`. Tokens are padded with zero rows, which change nothing."""

    def forward(self, x: Tensor) -> Tensor:
        recipe = recipe_in_force(self.recipe)
        if recipe.backend != "te":
            return super().forward(x)
        if x.numel() == 0:  # there is nothing to quantize
            return _plain(x, self.weight, self.bias)
        if torch.compiler.is_compiling():
            return untraced(self.forward, x)
        parameters = {"weight": _readable("weight", self.weight)}
        if self.bias is not None:
            parameters["bias"] = self.bias
        x_MK = x.reshape(-1, self.in_features)
        tokens = x_MK.shape[0]
        if tokens % ROWS:
            x_MK = nnF.pad(x_MK, (0, 0, 0, -tokens % ROWS))
        y = _call(self.held("_te"), parameters, recipe, x_MK)
        return y[:tokens].view(*x.shape[:-1], self.out_features)

    def held(self, key: str) -> Held:
        """The `te.Linear` that it runs on."""
        return _held(
            self, key, "Linear", in_features=self.in_features, out_features=self.out_features,
            bias=self.bias is not None,
        )  # fmt: skip


class _Gate(torch.autograd.Function):
    """silu(gate) * up (* row weight), which keeps gate and up in int8."""

    @staticmethod
    def forward(ctx, gate_MF, up_MF, weight_M):
        ctx.dtypes = gate_MF.dtype, None if weight_M is None else weight_M.dtype
        h, _, *codes = swiglu_kernels.swiglu(gate_MF, up_MF, weight_M)
        save(ctx, *codes, weight_M)
        return h

    @staticmethod
    def backward(ctx, grad_MF):
        dtype, weight_dtype = ctx.dtypes
        grads = swiglu_kernels.swiglu_backward(grad_MF.contiguous(), *saved(ctx))
        row = None if weight_dtype is None else grads.grad_row_weight.to(weight_dtype)
        return grads.grad_gate.to(dtype), grads.grad_up.to(dtype), row


class TEGatedMLP(GatedMLP):
    """down(silu(gate(x)) * up(x)) of three `TELinear`s; each is called, so hooks run."""

    def forward(self, x: Tensor) -> Tensor:
        if recipe_in_force(self.recipe).backend != "te":
            return super().forward(x)
        if torch.compiler.is_compiling():
            return untraced(self.forward, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not torch.is_grad_enabled():
            return self.down_proj(nnF.silu(gate) * up)
        h = _Gate.apply(gate.flatten(0, -2), up.flatten(0, -2), None)
        return self.down_proj(h.view(gate.shape))


class _Spread(torch.autograd.Function):
    """Tokens [T, H] into rows [rows, H], zeros elsewhere; place_Tk: the rows of each."""

    @staticmethod
    def forward(ctx, x_TH, place_Tk, rows):
        ctx.save_for_backward(place_Tk)
        return _spread(x_TH, place_Tk, rows)

    @staticmethod
    def backward(ctx, grad_PH):
        return grad_PH[ctx.saved_tensors[0]].sum(1), None, None


class _Gather(torch.autograd.Function):
    """The reverse: a token's k rows, summed in a fixed order."""

    @staticmethod
    def forward(ctx, y_PH, place_Tk):
        ctx.save_for_backward(place_Tk)
        ctx.rows = y_PH.shape[0]
        return y_PH[place_Tk].sum(1)

    @staticmethod
    def backward(ctx, grad_TH):
        return _spread(grad_TH, ctx.saved_tensors[0], ctx.rows), None


def _spread(x_TH: Tensor, place_Tk: Tensor, rows: int) -> Tensor:
    out = x_TH.new_zeros(rows, x_TH.shape[1])
    out[place_Tk.flatten()] = x_TH.repeat_interleave(place_Tk.shape[1], 0)
    return out


def _places(groups: Groups) -> tuple[Tensor, list[int], int]:
    """(row of each choice int64 [T, k], rows of each expert, rows in all), every expert's rows filled
    up to a multiple of ROWS. Reads the group sizes on the host, as `te.GroupedLinear` must."""
    counts = groups.arrived().diff(prepend=groups.host_ends.new_zeros(1)).tolist()
    splits = [-(-count // ROWS) * ROWS for count in counts]
    starts = zip(_starts(splits), _starts(counts), strict=True)
    device = groups.position.device
    shift = torch.tensor([a - b for a, b in starts], device=device)
    position = groups.position.long()
    expert = torch.searchsorted(groups.ends, position, right=True)
    return position + shift[expert], splits, sum(splits)


def _starts(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][: len(sizes)]


class TEExperts(Experts):
    """The experts of a MoE layer on two `te.GroupedLinear`s."""

    def forward(self, x_Th: Tensor, topk_index: Tensor, topk_weight: Tensor) -> Tensor:
        recipe = recipe_in_force(self.recipe)
        if recipe.backend != "te":
            return super().forward(x_Th, topk_index, topk_weight)
        if x_Th.numel() == 0:
            return self._ottava_class.forward(self, x_Th, topk_index, topk_weight)
        if torch.compiler.is_compiling():
            return untraced(self.forward, x_Th, topk_index, topk_weight)
        if self.adapters:
            raise ValueError(f"{recipe.name}: experts with adapters run natively only; use tensor")
        if torch.is_autocast_enabled(x_Th.device.type):
            x_Th = x_Th.to(torch.get_autocast_dtype(x_Th.device.type))
        place, splits, rows = _places(Groups.of(topk_index, self.gate_up_proj.shape[0]))
        weight = topk_weight.new_zeros(rows).index_put((place.flatten(),), topk_weight.flatten())
        both = self._grouped("gate_up_proj", _Spread.apply(x_Th, place, rows), splits, recipe)
        h = _Gate.apply(*both.chunk(2, dim=1), weight.float())
        return _Gather.apply(self._grouped("down_proj", h, splits, recipe), place)

    def _grouped(self, name: str, x_PK: Tensor, splits: list[int], recipe: Recipe) -> Tensor:
        weight = _readable(name, getattr(self, name))
        each = {f"weight{i}": w for i, w in enumerate(weight.unbind(0))}
        return _call(self.held(f"_te_{name}"), each, recipe, x_PK, torch.tensor(splits))

    def held(self, key: str) -> Held:
        """The `te.GroupedLinear` that a parameter's products run on."""
        experts, features, inner = getattr(self, key.removeprefix("_te_")).shape
        return _held(
            self, key, "GroupedLinear", num_gemms=experts, in_features=inner,
            out_features=features, bias=False,
        )  # fmt: skip


CLASSES: dict[str, type[nn.Module]] = {
    "linear": TELinear,
    "mlp": TEGatedMLP,
    "experts": TEExperts,
}
