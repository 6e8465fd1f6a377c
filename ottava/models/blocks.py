"""The units a MiMo decoder is made of: norm, gated MLP, attention, layer.

Everything that a conversion may replace is a real sub-module here. No buffers.
B batch, T tokens, h hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_core import AttentionCore, rotate
from .moe import MoE

Tables = tuple[Tensor, Tensor]  # cos and sin, FP32, [T, R] or [B, T, R]


class RMSNorm(nn.Module):
    """y = weight * cast(x / rms(x)): normalised in FP32, cast to x's dtype, then weighted."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]."""
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(x.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.Module):
    """Projections around an AttentionCore. `layer` None is an MTP block's, which has no cache.

    A fused `qkv_proj` holds rows [all Q | all K | all V] (not the released chunks).
    """

    def __init__(self, config, layer: int | None) -> None:
        super().__init__()
        spec = config.attention(layer)
        self.layer = layer
        self.rotary = (spec.rotary_dim, spec.theta)
        self.core = AttentionCore(spec)
        self.head_shapes = (
            (spec.num_heads, spec.qk_dim),
            (spec.num_kv_heads, spec.qk_dim),
            (spec.num_kv_heads, spec.v_dim),
        )
        rows = [heads * dim for heads, dim in self.head_shapes]
        self.fused = spec.fused
        if spec.fused:
            self.qkv_proj = nn.Linear(config.hidden_size, sum(rows), bias=spec.qkv_bias)
        else:
            self.q_proj = nn.Linear(config.hidden_size, rows[0], bias=spec.qkv_bias)
            self.k_proj = nn.Linear(config.hidden_size, rows[1], bias=spec.qkv_bias)
            self.v_proj = nn.Linear(config.hidden_size, rows[2], bias=spec.qkv_bias)
        inner = spec.num_heads * spec.v_dim
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.attention_sink_bias = nn.Parameter(torch.empty(spec.num_heads)) if spec.sinks else None

    def forward(
        self, x_BTh: Tensor, tables: Tables, documents: Tensor | None = None, cache=None
    ) -> Tensor:
        """[B, T, h] -> [B, T, h]. documents: [B, T] int ([B, past + T] with a cache)."""
        if self.fused:
            rows = [heads * dim for heads, dim in self.head_shapes]
            projected = self.qkv_proj(x_BTh).split(rows, dim=-1)
        else:
            projected = self.q_proj(x_BTh), self.k_proj(x_BTh), self.v_proj(x_BTh)
        q, k, v = (p.unflatten(-1, s) for p, s in zip(projected, self.head_shapes, strict=True))
        sinks = self.attention_sink_bias
        if cache is None:
            out = self.core(q, k, v, *tables, sinks, documents)
        else:
            q, k = rotate(q, *tables), rotate(k, *tables)
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            if documents is not None:  # a window layer's cache holds the last keys only
                documents = documents[:, -k.shape[1] :]
            out = self.core.attend(q, k, v, sinks, documents, offset=k.shape[1] - q.shape[1])
        return self.o_proj(out.flatten(-2))


class DecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); `mlp` is an MLP or a MoE."""

    def __init__(self, config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if config.is_moe(layer) else MLP(config)

    def forward(
        self, x_BTh: Tensor, tables: Tables, documents: Tensor | None = None, cache=None
    ) -> Tensor:
        """[B, T, h] -> [B, T, h]."""
        x_BTh = x_BTh + self.self_attn(self.input_layernorm(x_BTh), tables, documents, cache)
        return x_BTh + self.mlp(self.post_attention_layernorm(x_BTh))
