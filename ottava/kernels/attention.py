"""Attention in linear memory, forward and backward: windows, sinks, documents, D_qk != D_v, GQA.

    scores_ij = scale * q_i . k_j      over the keys j that query i may see
    out_i     = sum_j exp(scores_ij - lse_i) v_j
    lse_i     = log(sum_j exp(scores_ij) + exp(sink_h))      (no sink: without that term)

Query row i sits at position i + S - T (T queries, S keys, T <= S), so that S == T in training.
Causal: key j is visible iff j <= position. Window W: iff position - W < j <= position. Documents:
only keys of the same run of equal ids are visible.

The sink is a learned score per head with no value behind it. It only scales the output:
out = sigmoid(lse_plain - sink) * out_plain; and a backward that is given the output and the lse
*with* the sink in them is exact without knowing about it. d sink_h is then one sum over the rows:
-sum_i exp(sink_h - lse_i) (grad_out_i . out_i). So every backend below trains sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import flash, flash_backward
from .op import operator

_ROWS = 128  # query rows a step of the reference: its memory is rows x keys


def document_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """(starts, ends) int32 [B, T]: the run of equal ids around each position is [start, end).

    documents: integer ids [B, T]. A run is a document: an id that comes back later is another one.
    Computed once a tensor: the result rides on the tensor object until the tensor changes.
    """
    known = getattr(documents, "_ottava_bounds", None)
    if known is not None and known[0] == documents._version:  # never set in inference mode
        return known[1], known[2]
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    edge = torch.ones_like(documents, dtype=torch.bool)
    edge[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = index.masked_fill(~edge, 0).cummax(1).values.int()
    last = edge.roll(-1, 1)  # column 0 is always an edge, so the last column is always last
    ends = (index + 1).masked_fill(~last, documents.shape[1]).flip(1).cummin(1).values.flip(1).int()
    if not documents.is_inference():
        documents._ottava_bounds = (documents._version, starts, ends)
    return starts, ends


# --------------------------------------------------------------------------------------- reference


def _key_range(first: int, last: int, num_keys: int, causal: bool, window: int | None):
    """Keys that positions [first, last) may see: [low, high)."""
    low = max(0, first - window + 1) if window else 0
    return low, min(num_keys, last) if causal else num_keys


def _hidden(first, last, low, high, causal, window, starts, ends, offset) -> Tensor | None:
    """bool mask [B or 1, 1, 1, rows, keys], True where a key is hidden; None: nothing is."""
    device = starts.device if starts is not None else None
    i = torch.arange(first, last, device=device)[:, None]
    j = torch.arange(low, high, device=device)[None, :]
    hidden = torch.zeros(1, last - first, high - low, dtype=torch.bool, device=device)
    if causal:
        hidden = hidden | (j > i)
    if window:
        hidden = hidden | (j <= i - window)
    if starts is not None:
        rows = slice(first - offset, last - offset)
        hidden = hidden | (j < starts[:, rows, None]) | (j >= ends[:, rows, None])
    return hidden[:, None, None]


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_group(x: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """[B, n, H, D] -> [B, G, R * n, D]: the R heads of a group stacked, for one GEMM a group."""
    b, n, h, d = x.shape
    x = x.to(dtype).reshape(b, n, num_groups, h // num_groups, d)
    return x.permute(0, 2, 3, 1, 4).reshape(b, num_groups, (h // num_groups) * n, d)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """[B, G, R * n, D] -> [B, n, H, D]; inverse of `_by_group`."""
    b, g, rn, d = x.shape
    return x.view(b, g, rn // rows, rows, d).permute(0, 3, 1, 2, 4).reshape(b, rows, -1, d)


def ref_attention(q, k, v, scale, causal, window, sinks, starts, ends) -> tuple[Tensor, Tensor]:
    """Reference: chunks of query rows against the keys they may see; FP32 (FP64 for FP64)."""
    (b, t, h, _), (s, g), dtype = q.shape, k.shape[1:3], _exact(q.dtype)
    k_BGSD, v_BGSV = k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)
    out = q.new_empty(b, t, h, v.shape[-1])
    lse = torch.empty(b, h, t, dtype=dtype, device=q.device)
    for r0 in range(0, t, _ROWS):
        r1, offset = min(t, r0 + _ROWS), s - t
        low, high = _key_range(r0 + offset, r1 + offset, s, causal, window)
        scores = _by_group(q[:, r0:r1], g, dtype) @ k_BGSD[:, :, low:high].transpose(-1, -2)
        scores = scores.mul_(scale).view(b, g, h // g, r1 - r0, high - low)
        scores.masked_fill_(
            _hidden(r0 + offset, r1 + offset, low, high, causal, window, starts, ends, offset),
            -torch.inf,
        )
        peak = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sinks_GR11 = sinks.to(dtype).view(g, h // g, 1, 1)
            peak = torch.maximum(peak, sinks_GR11)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += torch.exp(sinks_GR11 - peak)
        mixed = (weights.flatten(2, 3) @ v_BGSV[:, :, low:high]) / total.flatten(2, 3)
        out[:, r0:r1] = _by_row(mixed, r1 - r0)
        lse_rows = (peak + total.log()).squeeze(-1)
        lse[:, :, r0:r1] = lse_rows.flatten(1, 2)
    return out, lse


def ref_attention_backward(
    grad_out, q, k, v, out, lse, scale, causal, window, sinks, starts, ends
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference backward: weights are recomputed from the lse, a chunk of query rows at a time."""
    (b, t, h, _), (s, g), dtype = q.shape, k.shape[1:3], _exact(q.dtype)
    k_BGSD, v_BGSV = k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk_BGSD = k_BGSD.new_zeros(k_BGSD.shape)
    dv_BGSV = v_BGSV.new_zeros(v_BGSV.shape)
    delta = lse.new_empty(lse.shape)
    for r0 in range(0, t, _ROWS):
        r1, offset = min(t, r0 + _ROWS), s - t
        low, high = _key_range(r0 + offset, r1 + offset, s, causal, window)
        q_rows = _by_group(q[:, r0:r1], g, dtype)
        do_rows = _by_group(grad_out[:, r0:r1], g, dtype)
        delta_rows = (do_rows * _by_group(out[:, r0:r1], g, dtype)).sum(-1, keepdim=True)
        delta[:, :, r0:r1] = delta_rows.view(b, h, r1 - r0)
        k_seen, v_seen = k_BGSD[:, :, low:high], v_BGSV[:, :, low:high]
        weights = (q_rows @ k_seen.transpose(-1, -2)).mul_(scale)
        weights = weights.view(b, g, h // g, r1 - r0, high - low)
        weights -= lse[:, :, r0:r1].to(dtype).view(b, g, h // g, r1 - r0, 1)
        weights = weights.exp_().masked_fill_(
            _hidden(r0 + offset, r1 + offset, low, high, causal, window, starts, ends, offset), 0.0
        )
        weights = weights.flatten(2, 3)
        dv_BGSV[:, :, low:high] += weights.transpose(-1, -2) @ do_rows
        grad_scores = (do_rows @ v_seen.transpose(-1, -2)).sub_(delta_rows).mul_(weights)
        dq[:, r0:r1] = _by_row((grad_scores @ k_seen).mul_(scale), r1 - r0)
        dk_BGSD[:, :, low:high] += (grad_scores.transpose(-1, -2) @ q_rows).mul_(scale)
    dk = dk_BGSD.transpose(1, 2).to(k.dtype).contiguous()
    dv = dv_BGSV.transpose(1, 2).to(v.dtype).contiguous()
    return dq, dk, dv, _grad_sinks(sinks, lse, delta)


def _grad_sinks(sinks: Tensor | None, lse_BHT: Tensor, delta_BHT: Tensor | None) -> Tensor:
    """-sum over rows of exp(sink - lse) * (grad_out . out), per head; empty without sinks."""
    if sinks is None:
        return lse_BHT.new_empty(0)
    weight = torch.exp(sinks.to(lse_BHT.dtype)[:, None] - lse_BHT)
    return -(weight * delta_BHT).sum((0, 2))


# ------------------------------------------------------------------------------------------- fakes


def _fake_attention(q, k, v, scale, causal, window, sinks, starts, ends):
    b, t, h, _ = q.shape
    lse = torch.empty(b, h, t, dtype=_exact(q.dtype), device=q.device)
    return q.new_empty(b, t, h, v.shape[-1]), lse


def _fake_attention_backward(
    grad_out, q, k, v, out, lse, scale, causal, window, sinks, starts, ends
):
    grads = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return (*grads, lse.new_empty(0 if sinks is None else q.shape[2]))


# -------------------------------------------------------------------------------------------- CUDA


def backend_of(q, k, v, causal: bool, window: int | None, starts: Tensor | None) -> str:
    """Which CUDA kernel runs: "cudnn", "flash" (both PyTorch's own) or "triton" (ours).

    A rule of shapes, not a trial: the library kernels take neither windows nor documents, want
    FP16 or BF16 and S == T where causal. cuDNN is the fastest on Hopper and takes D != V, but PyTorch
    gives its backward no deterministic mode: under `torch.use_deterministic_algorithms` flash
    stands in where D == V, and ours elsewhere.
    """
    d, dv = q.shape[-1], v.shape[-1]
    if (
        window is not None
        or starts is not None
        or q.dtype not in (torch.bfloat16, torch.float16)
        or (causal and q.shape[1] != k.shape[1])
        or d % 8
        or dv % 8
        or any(x.stride(-1) != 1 or x.numel() == 0 for x in (q, k, v))
    ):
        return "triton"
    hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    exact = torch.are_deterministic_algorithms_enabled()
    fits = max(d, dv) <= 128 or (hopper and max(d, dv) <= 192)
    if (
        fits
        and not exact
        and min(q.shape[1], k.shape[1]) >= 64
        and (d != dv or (hopper and d >= 64))
    ):
        return "cudnn"
    return "flash" if d == dv and d <= 256 else "triton"


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _cuda_attention(q, k, v, scale, causal, window, sinks, starts, ends) -> tuple[Tensor, Tensor]:
    backend = backend_of(q, k, v, causal, window, starts)
    if backend == "triton":
        return flash.triton_attention(q, k, v, scale, causal, window, sinks, starts, ends)
    heads = _heads_first(q, k, v)
    if backend == "cudnn":
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *heads, 0.0, causal, False, scale=scale
        )[:2]
    out = out.transpose(1, 2).contiguous()
    lse = lse.reshape(q.shape[0], q.shape[2], q.shape[1]).contiguous()
    if sinks is None:
        return out, lse
    sinks_H1 = sinks.float()[:, None]
    out.mul_(torch.sigmoid(lse - sinks_H1).transpose(1, 2)[..., None])
    return out, torch.logaddexp(lse, sinks_H1)


def _cuda_attention_backward(
    grad_out, q, k, v, out, lse, scale, causal, window, sinks, starts, ends
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    backend = backend_of(q, k, v, causal, window, starts)
    if backend == "triton":
        *grads, delta = flash_backward.triton_attention_backward(
            grad_out, q, k, v, out, lse, scale, causal, window, starts, ends
        )
        return *grads, _grad_sinks(sinks, lse, delta)
    # cuDNN caches its plan by the strides of q, k, v alone: out and grad_out must always come
    # in one layout. Neither kernel reads the random state without dropout.
    grad_out, out, lse = grad_out.contiguous(), out.contiguous(), lse.contiguous()
    heads = _heads_first(grad_out, q, k, v, out)
    lengths = (q.shape[1], k.shape[1], 0.0, causal)
    if backend == "cudnn":
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *heads, lse[..., None], unused, unused, None, None, None, *lengths, scale=scale
        )  # fmt: skip
    else:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *heads, lse, None, None, *lengths, unused, unused, scale=scale
        )
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in grads)
    delta = None if sinks is None else flash_backward.triton_delta(grad_out, out)
    return dq, dk, dv, _grad_sinks(sinks, lse, delta)


_attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, float scale, bool causal, int? window, "
    "Tensor? sinks, Tensor? starts, Tensor? ends) -> (Tensor, Tensor)",
    reference=ref_attention,
    fake=_fake_attention,
    cuda=_cuda_attention,
)
_attention_backward = operator(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float scale, bool causal, int? window, Tensor? sinks, Tensor? starts, Tensor? ends)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=ref_attention_backward,
    fake=_fake_attention_backward,
    cuda=_cuda_attention_backward,
)


# ---------------------------------------------------------------------------------------- contract


def _check(q, k, v, causal, window, sinks, documents) -> None:
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError("attention: q, k, v are [B, T, H, D], [B, S, G, D], [B, S, G, V]")
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    if k.shape[0] != b or k.shape[3] != d or v.shape[:3] != k.shape[:3] or h % g:
        raise ValueError(
            f"attention: shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if s < t:
        raise ValueError(f"attention: {t} queries but only {s} keys")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"attention: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"attention: window {window} needs causal=True and at least 1 key")
    if sinks is not None and tuple(sinks.shape) != (h,):
        raise ValueError(f"attention: sinks {tuple(sinks.shape)} is not one score for {h} heads")
    if documents is not None and (tuple(documents.shape) != (b, t) or s != t):
        raise ValueError(
            f"attention: documents {tuple(documents.shape)} must be ({b}, {t}), with S == T"
        )


def _bounds(documents: Tensor | None):
    return (None, None) if documents is None else document_bounds(documents)


def attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, V] in q's dtype, lse [B, H, T] FP32 with the sink in it).

    Head h reads key/value head h // (H / G). sinks [H]; documents int [B, T] (runs of equal ids).
    A window that spans every key is no window. Not differentiable by itself: see
    `attention_backward`. Raises ValueError on shapes, dtypes or masks that do not fit.
    """
    _check(q_BTHD, k_BSGD, v_BSGV, causal, window, sinks, documents)
    window = None if window is None or window >= k_BSGD.shape[1] else window
    return _attention(q_BTHD, k_BSGD, v_BSGV, scale, causal, window, sinks, *_bounds(documents))


def attention_backward(
    grad_out: Tensor,
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks FP32 [H] or None) from what `attention` returned.

    out and lse carry the sink, as `attention` returns them; `out` may come from codes.
    """
    _check(q_BTHD, k_BSGD, v_BSGV, causal, window, sinks, documents)
    window = None if window is None or window >= k_BSGD.shape[1] else window
    dq, dk, dv, dsinks = _attention_backward(
        grad_out, q_BTHD, k_BSGD, v_BSGV, out, lse, scale, causal, window, sinks,
        *_bounds(documents),
    )  # fmt: skip
    return dq, dk, dv, None if sinks is None else dsinks
