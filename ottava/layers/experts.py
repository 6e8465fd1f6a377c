"""The experts of a MoE layer in 8 bits (being built)."""

from __future__ import annotations

from torch import nn

from ..numerics.recipe import Recipe


class Experts(nn.Module):
    """Swapped in for a module with 3-D gate_up_proj and down_proj parameters."""

    recipe: Recipe | None = None

    def forward(self, x_Th, topk_index, topk_weight):
        raise NotImplementedError("experts in 8 bits are not built yet; keep '*experts' high")
