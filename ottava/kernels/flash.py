"""The Triton kernels of `attention.py`, forward: tiles of scores live in registers, never in memory.

One program owns BM query rows of one head, and only visits the tiles of keys that the mask leaves:
windows cost T * W, documents the sum of their squares. The tile functions serve the backward too.

Legend: D query/key dims, split as D1 (a power of two) + D2 (the rest, padded): 192 = 128 + 64.
VP: V padded to a power of two. Scores are kept in base 2 (`* log2 e`), the lse in base e.
Positions: query row i sits at i + S - T among the keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .op import tl, triton

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _inside(rows, N: tl.constexpr, d0: tl.constexpr, W: tl.constexpr, DIM: tl.constexpr):
    """Mask [N, W] of a tile: the first `rows` rows, the columns d0.. below DIM."""
    inside = tl.arange(0, N)[:, None] < rows
    if d0 + W > DIM:
        inside = inside & (d0 + tl.arange(0, W)[None, :] < DIM)
    return inside


@triton.jit
def load_tile(
    base, stride, first, limit,
    N: tl.constexpr, d0: tl.constexpr, W: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Tile [N, W] of rows first.. and columns d0..; zero past `limit` rows and DIM columns."""
    # 64 bits for the tile's start only: inside a tile, offsets fit 32.
    start = base + tl.cast(first, tl.int64) * stride + d0
    tile = start + tl.arange(0, N)[:, None] * stride + tl.arange(0, W)[None, :]
    return tl.load(tile, mask=_inside(limit - first, N, d0, W, DIM), other=0.0)


@triton.jit
def store_tile(
    base, stride, first, limit, x,
    N: tl.constexpr, d0: tl.constexpr, W: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    start = base + tl.cast(first, tl.int64) * stride + d0
    tile = start + tl.arange(0, N)[:, None] * stride + tl.arange(0, W)[None, :]
    tl.store(tile, x.to(base.dtype.element_ty), mask=_inside(limit - first, N, d0, W, DIM))


@triton.jit
def hidden_keys(
    i, j, start, end, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr
):
    """True where position i may not see key j; i, start, end broadcast against j."""
    hidden = j >= S
    if CAUSAL:
        hidden = hidden | (j > i)
    if WINDOW > 0:
        hidden = hidden | (j <= i - WINDOW)
    if DOCS:
        hidden = hidden | (j < start) | (j >= end)
    return hidden


@triton.jit
def keys_of(
    first, last, starts, ends, b, T, S,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(low, full_low, full_high, high): rows first..last see keys in [low, high) only, and all of
    [full_low, full_high), whole tiles of BN counted from low."""
    pos_first, pos_last = first + S - T, last + S - T
    low = first * 0
    sure = first * 0  # the last row sees nothing before this
    high = first * 0 + S
    full = first * 0 + S  # the first row sees nothing from this on
    if CAUSAL:
        high = pos_last + 1
        full = pos_first + 1
    if WINDOW > 0:
        low = tl.maximum(low, pos_first - WINDOW + 1)
        sure = tl.maximum(sure, pos_last - WINDOW + 1)
    if DOCS:
        low = tl.maximum(low, tl.load(starts + b * T + first))
        sure = tl.maximum(sure, tl.load(starts + b * T + last))
        high = tl.minimum(high, tl.load(ends + b * T + last))
        full = tl.minimum(full, tl.load(ends + b * T + first))
    full_low = low + tl.cdiv(sure - low, BN) * BN
    full_high = full_low + tl.maximum(full - full_low, 0) // BN * BN
    return low, full_low, full_high, high


@triton.jit
def dot_qk(a1, a2, b1, b2, D2: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b^T over D = D1 + D2 columns, FP32."""
    out = tl.dot(a1, tl.trans(b1), input_precision=PRECISION)
    if D2 > 0:
        out = tl.dot(a2, tl.trans(b2), out, input_precision=PRECISION)
    return out


@triton.jit
def load_qk(
    base, stride, first, limit,
    N: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Both column parts of a query or key tile; the second repeats the first where D2 is 0."""
    x1 = load_tile(base, stride, first, limit, N, 0, D1, D)
    x2 = x1
    if D2 > 0:
        x2 = load_tile(base, stride, first, limit, N, D1, D2, D)
    return x1, x2


# ----------------------------------------------------------------------------------------- forward


@triton.jit
def _forward_tiles(
    acc, peak, total, q1, q2, k, v, k_s, v_s, low, high, S, i, start, end, scale,
    MASK: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles [low, high): new (acc, peak, total)."""
    for first in range(low, high, BN):
        k1, k2 = load_qk(k, k_s, first, S, BN, D, D1, D2)
        scores = dot_qk(q1, q2, k1, k2, D2, PRECISION) * scale
        if MASK:
            j = first + tl.arange(0, BN)[None, :]
            hidden = hidden_keys(i, j, start, end, S, CAUSAL, WINDOW, DOCS)
            scores = tl.where(hidden, -float("inf"), scores)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shift = higher
        if MASK:  # a row that has seen no key yet: -inf - -inf would be NaN
            shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = load_tile(v, v_s, first, S, BN, 0, VP, V)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        peak = higher
    return acc, peak, total


@triton.jit
def _forward(
    q, k, v, sinks, starts, ends, out, lse,
    q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, T, S, H, R, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, DOCS: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Late rows see the most keys under a causal mask, so they start first.
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    k += b * k_b + (h // R) * k_g
    v += b * v_b + (h // R) * v_g
    row = row0 + tl.arange(0, BM)
    i = (row + S - T)[:, None]
    start, end = i, i
    if DOCS:
        start = tl.load(starts + b * T + row, mask=row < T, other=0)[:, None]
        end = tl.load(ends + b * T + row, mask=row < T, other=0)[:, None]
    q1, q2 = load_qk(q + b * q_b + h * q_h, q_t, row0, T, BM, D, D1, D2)
    acc = tl.zeros([BM, VP], tl.float32)
    peak = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINKS:  # a key with this score and no value
        peak = tl.zeros([BM], tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2E
        total += 1.0
    last = tl.minimum(row0 + BM, T) - 1
    low, full_low, full_high, high = keys_of(
        row0, last, starts, ends, b, T, S, CAUSAL, WINDOW, DOCS, BN
    )
    scale *= LOG2E
    if SPLIT:
        if WINDOW > 0 or DOCS:
            acc, peak, total = _forward_tiles(
                acc, peak, total, q1, q2, k, v, k_s, v_s, low, full_low, S, i, start, end, scale,
                True, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BN, PRECISION,
            )  # fmt: skip
        acc, peak, total = _forward_tiles(
            acc, peak, total, q1, q2, k, v, k_s, v_s, full_low, full_high, S, i, start, end, scale,
            False, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BN, PRECISION,
        )  # fmt: skip
        low = full_high
    acc, peak, total = _forward_tiles(
        acc, peak, total, q1, q2, k, v, k_s, v_s, low, high, S, i, start, end, scale,
        True, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BN, PRECISION,
    )  # fmt: skip
    acc = acc / total[:, None]
    store_tile(out + (b * T * H + h) * V, H * V, row0, T, acc, BM, 0, VP, V)
    tl.store(lse + (b * H + h) * T + row, (peak + tl.log2(total)) * LN2, mask=row < T)


# ----------------------------------------------------------------------------------------- launches


def _head_dims(d: int, v: int) -> dict[str, int]:
    """How the kernels cut D and V into powers of two of at least 16. Raises ValueError past 256."""
    if max(d, v) > 256:
        raise ValueError(f"attention: head dims {d} and {v}; these kernels go up to 256")
    d1 = max(16, 1 << (d.bit_length() - 1))
    d2 = 0 if d <= d1 else max(16, triton.next_power_of_2(d - d1))
    return {"D": d, "D1": d1, "D2": d2, "V": v, "VP": max(16, triton.next_power_of_2(v))}


def _tiles(kind: str, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(BM, BN, num_warps, num_stages), fixed per shape so that results do not depend on timing.
    width is D + V.

    Bounded by Hopper's 227 KiB of shared memory and 255 registers a thread.
    """
    if dtype == torch.float32:
        return (64, 32, 4, 2) if kind == "forward" and width <= 256 else (32, 32, 8, 1)
    if kind == "forward":
        return 128, 64, 4 if width <= 128 else 8, 3 if width <= 256 else 2
    if kind == "dq":
        return (128, 64, 8, 2) if width <= 320 else (64, 64, 4, 2)
    return (64, 128, 8, 2) if width <= 256 else (64, 64, 8, 2)


def launch_settings(
    kind: str, q: Tensor, v: Tensor, window: int | None, causal: bool, documents: bool
):
    """(tile rows, tile keys, keyword arguments that all three attention kernels share)."""
    dims = _head_dims(q.shape[-1], v.shape[-1])
    bm, bn, warps, stages = _tiles(kind, q.shape[-1] + v.shape[-1], q.dtype)
    args = dims | {
        "CAUSAL": causal,
        "WINDOW": window or 0,
        "DOCS": documents,
        # Three loops (edge, whole tiles, edge) pay where whole tiles are many.
        "SPLIT": window is None or window >= 4 * (bm + bn),
        "BM": bm,
        "BN": bn,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "num_warps": warps,
        "num_stages": stages,
    }
    return bm, bn, args


def last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def check_dtype(q: Tensor) -> None:
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"attention: no kernel for {q.dtype}; use float32, bfloat16 or float16")


def triton_attention(q, k, v, scale, causal, window, sinks, starts, ends) -> tuple[Tensor, Tensor]:
    """As `attention.ref_attention`."""
    check_dtype(q)
    (b, t, h, _), (s, g) = q.shape, k.shape[1:3]
    q, k, v = last_dense(q), last_dense(k), last_dense(v)
    out = q.new_empty(b, t, h, v.shape[-1])
    lse = torch.empty(b, h, t, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    bm, _, shared = launch_settings("forward", q, v, window, causal, starts is not None)
    unused = q
    _forward[(triton.cdiv(t, bm), h, b)](
        q, k, v,
        unused if sinks is None else sinks.contiguous(),
        unused if starts is None else starts,
        unused if ends is None else ends,
        out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], t, s, h, h // g, float(scale),
        SINKS=sinks is not None, **shared,
    )  # fmt: skip
    return out, lse
