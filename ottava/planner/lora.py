"""LoRA as PEFT lays it around a linear, without PEFT: y = base(x) + B(A(x)) * 2, adapters in FP32."""

from __future__ import annotations

import torch
from torch import nn

from ..models.mimo import MiMoV2ForCausalLM

_HEADS = ("lm_head", "embed_out")


class Adapted(nn.Module):
    """A frozen linear and its two trained factors, x [..., K] -> [..., N]; rank r."""

    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        n, k = base_layer.weight.shape
        self.lora_A = nn.ModuleDict({"default": nn.Linear(k, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, n, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As PEFT's layer: the base's output, then the adapter's on top."""
        y = self.base_layer(x)
        a, b = self.lora_A["default"], self.lora_B["default"]
        return (y + b(a(x.to(a.weight.dtype))) * 2.0).to(y.dtype)


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freeze `model` and put adapters around every linear but the head, in place; returns it."""
    model.requires_grad_(False)
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Linear) and name not in _HEADS:
                setattr(owner, name, Adapted(child, rank))
    return model


def released_policy(model: nn.Module) -> str:
    """The policy under which a model of this kind is released in FP8."""
    return "mimo" if isinstance(model, MiMoV2ForCausalLM) else "default"
