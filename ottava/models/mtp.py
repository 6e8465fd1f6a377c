"""Multi-token prediction blocks: block k reads token t + 1 + k beside the main state of t, and
predicts token t + 2 + k through the main model's head. Embedding and head are shared.

B batch, T tokens, h hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .blocks import MLP, RMSNorm, SelfAttention, Tables


class MTPBlock(GradientCheckpointingLayer):
    """MiMo-V2: eh_proj of [norm(token) ; norm(state)], one window-attention layer, a final norm."""

    def __init__(self, config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = SelfAttention(config, None)
        self.pre_mlp_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(config)
        self.final_layernorm = RMSNorm(width, eps)

    def forward(
        self, state_BTh: Tensor, token_BTh: Tensor, tables: Tables, documents: Tensor | None = None
    ) -> Tensor:
        """State and token embeddings [B, T, h] -> what the head reads, [B, T, h]."""
        x = self.eh_proj(torch.cat((self.enorm(token_BTh), self.hnorm(state_BTh)), dim=-1))
        x = x + self.self_attn(self.input_layernorm(x), tables, documents)
        x = x + self.mlp(self.pre_mlp_layernorm(x))
        return self.final_layernorm(x)


class DenseMTPBlock(GradientCheckpointingLayer):
    """MiMo-7B: input_proj of [norm(state) ; norm(token)] (the other order), full attention."""

    def __init__(self, config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = RMSNorm(width, eps)
        self.hidden_layernorm = RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = SelfAttention(config, None)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(config)
        self.final_layernorm = RMSNorm(width, eps)

    def forward(
        self, state_BTh: Tensor, token_BTh: Tensor, tables: Tables, documents: Tensor | None = None
    ) -> Tensor:
        """State and token embeddings [B, T, h] -> what the head reads, [B, T, h]."""
        parts = (self.hidden_layernorm(state_BTh), self.token_layernorm(token_BTh))
        x = self.input_proj(torch.cat(parts, dim=-1))
        x = x + self.self_attn(self.input_layernorm(x), tables, documents)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.final_layernorm(x)


class MTPBlocks(nn.Module):
    """Holder that gives the released names `mtp.layers.I`."""

    def __init__(self, config) -> None:
        super().__init__()
        count = config.num_nextn_predict_layers
        self.layers = nn.ModuleList(MTPBlock(config) for _ in range(count))


def shift_left(x_BT: Tensor, steps: int, fill: int) -> Tensor:
    """x one or more tokens to the right brought to each position; the tail is `fill`."""
    return torch.cat((x_BT[:, steps:], x_BT.new_full((x_BT.shape[0], steps), fill)), dim=1)


def mtp_labels(labels_BT: Tensor, block: int, documents_BT: Tensor | None) -> Tensor:
    """What block number `block` predicts at each position: the token 2 + block to the right.

    Already shifted; -100 past the end and where that token is another document's.
    """
    steps = min(2 + block, labels_BT.shape[1])
    target = shift_left(labels_BT, steps, -100)
    if documents_BT is not None:
        other = shift_left(documents_BT, steps, -1) != documents_BT
        target = target.masked_fill(other, -100)
    return target
