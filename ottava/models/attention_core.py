"""Attention in plain PyTorch, memory linear in the sequence: rope, GQA, window, sinks, documents.

Works over chunks of queries with an explicit backward, so that no (T x T) buffer exists and nothing
but q, k, v, the output and one log-sum-exp a row is kept. On CUDA, full layers without sinks or
documents go to `scaled_dot_product_attention`.

B batch, T queries, S keys, H query heads, G key/value heads, D q/k width, V value width, R rotary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import Attention

_SCORES = 1 << 24  # elements of one chunk's scores
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def rotary_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, FP32, [..., R] for positions [...]: NeoX halves, both halves alike."""
    exponent = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angle = positions[..., None].float() * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R of D dims by the tables ([T, R] or [B, T, R]); the others pass.
    In the dtype of x, as Hugging Face's models do; the tables' angles are FP32."""
    width = cos.shape[-1]
    cos, sin = (t.unsqueeze(-2).to(x_BTHD.dtype) for t in (cos, sin))
    turned = x_BTHD[..., :width]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    if width == x_BTHD.shape[-1]:
        return turned
    return torch.cat((turned, x_BTHD[..., width:]), dim=-1)


def _chunks(q: Tensor, k: Tensor, offset: int, window: int | None):
    """(first query, past-last query, first key, past-last key) of each chunk of queries."""
    batch, length, heads, _ = q.shape
    span = k.shape[1] if window is None else min(k.shape[1], 2 * window)
    rows = max(16, min(512, _SCORES // max(1, batch * heads * span)))
    rows = rows if window is None else max(16, min(rows, window))
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        low = 0 if window is None else max(0, offset + start - window + 1)
        yield start, stop, low, min(offset + stop, k.shape[1])


def _grouped(x_BCHD: Tensor, groups: int) -> Tensor:
    """[B, C, H, D] -> [B, G, (H/G) * C, D]: the query heads of one key head, one after another."""
    batch, rows, heads, dim = x_BCHD.shape
    return x_BCHD.permute(0, 2, 1, 3).reshape(batch, groups, heads // groups * rows, dim)


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_grouped`: [B, G, (H/G) * C, D] -> [B, C, H, D]."""
    batch, groups, rows, dim = x.shape
    return x.reshape(batch, heads, rows * groups // heads, dim).transpose(1, 2)


def _scores(q, k, documents, scale, window, offset, chunk) -> Tensor:
    """FP32 logits of one chunk, [B, G, H/G, C, K], -inf where a key is not visible."""
    start, stop, low, high = chunk
    batch, _, heads, _ = q.shape
    groups = k.shape[2]
    keys = k[:, low:high].permute(0, 2, 3, 1)
    logits = (_grouped(q[:, start:stop], groups) @ keys).float() * scale
    logits = logits.view(batch, groups, heads // groups, stop - start, high - low)
    row = torch.arange(start + offset, stop + offset, device=q.device)[:, None]
    column = torch.arange(low, high, device=q.device)[None, :]
    visible = column <= row
    if window is not None:
        visible &= column > row - window
    if documents is not None:
        own = documents[:, start + offset : stop + offset, None] == documents[:, None, low:high]
        visible = (visible & own)[:, None, None]
    return logits.masked_fill(~visible, float("-inf"))


class ChunkedAttention(torch.autograd.Function):
    """out_BTHV = value_scale * softmax(scale q k^T | sinks) v, chunk by chunk in both directions."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, documents, scale, value_scale, window, offset):
        groups, heads = k.shape[2], q.shape[2]
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], heads, q.shape[1], dtype=torch.float32)
        column = None if sinks is None else sinks.float().view(1, groups, heads // groups, 1)
        for chunk in _chunks(q, k, offset, window):
            start, stop, low, high = chunk
            logits = _scores(q, k, documents, scale, window, offset, chunk)
            norm = logits.logsumexp(-1)
            norm = norm if column is None else torch.logaddexp(norm, column)
            weights = (logits - norm[..., None]).exp_().flatten(2, 3).to(v.dtype)
            mixed = weights @ v[:, low:high].transpose(1, 2)
            out[:, start:stop] = _ungrouped(mixed, heads) * value_scale
            lse[:, :, start:stop] = norm.flatten(1, 2)
        ctx.save_for_backward(q, k, v, sinks, documents, out, lse)
        ctx.args = (scale, value_scale, window, offset)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, sinks, documents, out, lse = ctx.saved_tensors
        scale, value_scale, window, offset = ctx.args
        groups, heads = k.shape[2], q.shape[2]
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k, dtype=torch.float32)
        grad_v = torch.zeros_like(v, dtype=torch.float32)
        delta = (grad_out.float() * out.float()).sum(-1).transpose(1, 2)  # [B, H, T]
        for chunk in _chunks(q, k, offset, window):
            start, stop, low, high = chunk
            logits = _scores(q, k, documents, scale, window, offset, chunk)
            shape = (*logits.shape[:-1], 1)
            weights = (logits - lse[:, :, start:stop].reshape(shape)).exp_()
            grad = _grouped(grad_out[:, start:stop].to(q.dtype), groups) * value_scale
            grad_weights = (grad @ v[:, low:high].permute(0, 2, 3, 1)).float().view(weights.shape)
            grad_logits = weights * (grad_weights - delta[:, :, start:stop].reshape(shape)) * scale
            grad_logits = grad_logits.flatten(2, 3).to(q.dtype)
            weights = weights.flatten(2, 3).to(v.dtype)
            grad_q[:, start:stop] = _ungrouped(grad_logits @ k[:, low:high].transpose(1, 2), heads)
            rows = _grouped(q[:, start:stop], groups)
            grad_k[:, low:high] += (grad_logits.mT @ rows).transpose(1, 2)
            grad_v[:, low:high] += (weights.mT @ grad).transpose(1, 2)
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.float()[:, None] - lse).exp()
            grad_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, *[None] * 5


class AttentionCore(nn.Module):
    """Rope and attention of one layer, without parameters; a converted model swaps this class."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.num_heads = attention.num_heads
        self.num_kv_heads = attention.num_kv_heads
        self.qk_dim = attention.qk_dim
        self.v_dim = attention.v_dim
        self.rotary_dim = attention.rotary_dim
        self.softmax_scale = attention.qk_dim**-0.5
        self.value_scale = attention.value_scale
        self.window = attention.window

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        cos: Tensor,
        sin: Tensor,
        sinks: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """[B, T, H, V] from projections not yet rotated. documents: [B, T] int, None is one."""
        q, k = rotate(q_BTHD, cos, sin), rotate(k_BTGD, cos, sin)
        return self.attend(q, k, v_BTGV, sinks, documents)

    def attend(
        self,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGV: Tensor,
        sinks: Tensor | None = None,
        documents: Tensor | None = None,
        offset: int = 0,
    ) -> Tensor:
        """[B, T, H, V] from rotated q and k; query t stands at key `offset` + t. documents: [B, S]."""
        plain = sinks is None and documents is None and self.window is None and offset == 0
        if plain and q_BTHD.is_cuda and q_BTHD.dtype != torch.float32:
            return self._fused(q_BTHD, k_BSGD, v_BSGV)
        return ChunkedAttention.apply(
            q_BTHD, k_BSGD, v_BSGV, sinks, documents,
            self.softmax_scale, self.value_scale, self.window, offset,
        )  # fmt: skip

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The library's causal attention; flash where q/k and v are equally wide, else cuDNN."""
        if self.value_scale != 1.0:
            v = v * self.value_scale
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        shared = self.num_heads != self.num_kv_heads
        with sdpa_kernel(_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=shared
            )
        return out.transpose(1, 2)

    def extra_repr(self) -> str:
        """Heads, widths and window."""
        return (
            f"heads={self.num_heads}/{self.num_kv_heads}, qk={self.qk_dim}, v={self.v_dim}, "
            f"rotary={self.rotary_dim}, window={self.window}"
        )
