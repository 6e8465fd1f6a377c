"""Direct construction of the two pairs that fuse: norm + linear, and norm + MLP.

They hold the converted layers side by side: the norm's output carries its codes to the linears.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..numerics.recipe import Recipe
from .linear import Linear
from .mlp import GatedMLP
from .norm import LayerNorm, RMSNorm
from .weights import set_on

_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def _norm(kind: str, features: int, eps: float, recipe: str | Recipe, **where) -> nn.Module:
    if kind not in _NORMS:
        raise ValueError(f"normalization: {kind!r} is not one of {', '.join(_NORMS)}")
    return _NORMS[kind](features, eps=eps, recipe=recipe, **where)


class LayerNormLinear(nn.Module):
    """linear(norm(x)): x [..., in_features] -> [..., out_features].

    normalization: "LayerNorm" or "RMSNorm". Raises ValueError for another name.
    """

    def __init__(
        self, in_features: int, out_features: int, *, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", recipe: str | Recipe = "tensor", device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.norm = _norm(normalization, in_features, eps, recipe, **where)
        self.linear = Linear(in_features, out_features, bias, recipe=recipe, **where)
        set_on(self.norm, reader=self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class LayerNormMLP(nn.Module):
    """mlp(norm(x)): x [..., hidden_size] -> [..., hidden_size].

    activation: "gelu" (two linears) or "swiglu" (the gated MLP, fused).
    Raises ValueError for another name.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, *, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu",
        recipe: str | Recipe = "tensor", device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.norm = _norm(normalization, hidden_size, eps, recipe, **where)
        if activation == "swiglu":
            self.mlp = _gated(hidden_size, ffn_hidden_size, recipe, where)
        elif activation == "gelu":
            self.mlp = _Gelu(hidden_size, ffn_hidden_size, bias, recipe, where)
        else:
            raise ValueError(f"activation: {activation!r} is not one of gelu, swiglu")
        set_on(self.norm, reader=self.mlp.gate_proj if activation == "swiglu" else self.mlp.fc1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


def _gated(hidden: int, inner: int, recipe, where: dict) -> GatedMLP:
    mlp = GatedMLP()
    mlp.gate_proj = Linear(hidden, inner, bias=False, recipe=recipe, **where)
    mlp.up_proj = Linear(hidden, inner, bias=False, recipe=recipe, **where)
    mlp.down_proj = Linear(inner, hidden, bias=False, recipe=recipe, **where)
    mlp.recipe = mlp.gate_proj.recipe
    return mlp


class _Gelu(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool, recipe, where: dict) -> None:
        super().__init__()
        self.fc1 = Linear(hidden, inner, bias, recipe=recipe, **where)
        self.fc2 = Linear(inner, hidden, bias, recipe=recipe, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
