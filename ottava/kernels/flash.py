"""The Triton kernels of `attention.py`: tiles of scores live in registers, never in memory.

One program of the forward or of `dq` owns BM query rows of one head; one of `dk, dv` owns BN keys
of one key/value head and sums over the R query heads that read it, in a fixed order: no atomics,
so the same inputs give the same bits. Programs only visit the tiles that the mask leaves: windows
cost T * W, documents cost the sum of their squares.

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
def _load(
    base, stride, first, limit,
    N: tl.constexpr, d0: tl.constexpr, W: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Tile [N, W] of rows first.. and columns d0..; zero past `limit` rows and DIM columns."""
    # 64 bits for the tile's start only: inside a tile, offsets fit 32.
    start = base + tl.cast(first, tl.int64) * stride + d0
    tile = start + tl.arange(0, N)[:, None] * stride + tl.arange(0, W)[None, :]
    return tl.load(tile, mask=_inside(limit - first, N, d0, W, DIM), other=0.0)


@triton.jit
def _store(
    base, stride, first, limit, x,
    N: tl.constexpr, d0: tl.constexpr, W: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    start = base + tl.cast(first, tl.int64) * stride + d0
    tile = start + tl.arange(0, N)[:, None] * stride + tl.arange(0, W)[None, :]
    tl.store(tile, x.to(base.dtype.element_ty), mask=_inside(limit - first, N, d0, W, DIM))


@triton.jit
def _hidden(i, j, start, end, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr):
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
def _keys_of(
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
def _queries_of(
    first, last, starts, ends, b, T, S,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """(low, full_low, full_high, high): keys first..last are seen by query rows in [low, high)
    only, and by all of [full_low, full_high), whole tiles of BM counted from low."""
    offset = S - T
    low = first * 0
    sure = first * 0
    high = first * 0 + T
    full = first * 0 + T
    if CAUSAL:
        low = tl.maximum(low, first - offset)
        sure = tl.maximum(sure, last - offset)
    if WINDOW > 0:
        high = tl.minimum(high, last + WINDOW - offset)
        full = tl.minimum(full, first + WINDOW - offset)
    if DOCS:  # S == T
        low = tl.maximum(low, tl.load(starts + b * T + first))
        sure = tl.maximum(sure, tl.load(starts + b * T + last))
        high = tl.minimum(high, tl.load(ends + b * T + last))
        full = tl.minimum(full, tl.load(ends + b * T + first))
    full_low = low + tl.cdiv(tl.maximum(sure - low, 0), BM) * BM
    full_high = full_low + tl.maximum(full - full_low, 0) // BM * BM
    return low, full_low, full_high, high


@triton.jit
def _dot_qk(a1, a2, b1, b2, D2: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b^T over D = D1 + D2 columns, FP32."""
    out = tl.dot(a1, tl.trans(b1), input_precision=PRECISION)
    if D2 > 0:
        out = tl.dot(a2, tl.trans(b2), out, input_precision=PRECISION)
    return out


@triton.jit
def _load_qk(
    base, stride, first, limit,
    N: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Both column parts of a query or key tile; the second repeats the first where D2 is 0."""
    x1 = _load(base, stride, first, limit, N, 0, D1, D)
    x2 = x1
    if D2 > 0:
        x2 = _load(base, stride, first, limit, N, D1, D2, D)
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
        k1, k2 = _load_qk(k, k_s, first, S, BN, D, D1, D2)
        scores = _dot_qk(q1, q2, k1, k2, D2, PRECISION) * scale
        if MASK:
            j = first + tl.arange(0, BN)[None, :]
            hidden = _hidden(i, j, start, end, S, CAUSAL, WINDOW, DOCS)
            scores = tl.where(hidden, -float("inf"), scores)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shift = higher
        if MASK:  # a row that has seen no key yet: -inf - -inf would be NaN
            shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = _load(v, v_s, first, S, BN, 0, VP, V)
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
    q1, q2 = _load_qk(q + b * q_b + h * q_h, q_t, row0, T, BM, D, D1, D2)
    acc = tl.zeros([BM, VP], tl.float32)
    peak = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINKS:  # a key with this score and no value
        peak = tl.zeros([BM], tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2E
        total += 1.0
    last = tl.minimum(row0 + BM, T) - 1
    low, full_low, full_high, high = _keys_of(
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
    _store(out + (b * T * H + h) * V, H * V, row0, T, acc, BM, 0, VP, V)
    tl.store(lse + (b * H + h) * T + row, (peak + tl.log2(total)) * LN2, mask=row < T)


# ---------------------------------------------------------------------------------------- backward


@triton.jit
def _delta(
    grad, out, delta, g_b, g_t, g_h, T, H,
    V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta [B, H, T] = grad_out . out per row, FP32."""
    row0 = tl.program_id(0) * BM
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = row0 + tl.arange(0, BM)
    g = _load(grad + b * g_b + h * g_h, g_t, row0, T, BM, 0, VP, V).to(tl.float32)
    o = _load(out + (b * T * H + h) * V, H * V, row0, T, BM, 0, VP, V).to(tl.float32)
    tl.store(delta + (b * H + h) * T + row, tl.sum(g * o, 1), mask=row < T)


@triton.jit
def _dq_tiles(
    dq1, dq2, q1, q2, grad, k, v, k_s, v_s, low, high, S, i, start, end, lse, delta, scale,
    MASK: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(low, high, BN):
        k1, k2 = _load_qk(k, k_s, first, S, BN, D, D1, D2)
        weights = tl.exp2(_dot_qk(q1, q2, k1, k2, D2, PRECISION) * scale - lse[:, None])
        if MASK:
            j = first + tl.arange(0, BN)[None, :]
            hidden = _hidden(i, j, start, end, S, CAUSAL, WINDOW, DOCS)
            weights = tl.where(hidden, 0.0, weights)
        v_tile = _load(v, v_s, first, S, BN, 0, VP, V)
        grad_weights = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION)
        grad_scores = (weights * (grad_weights - delta[:, None])).to(k1.dtype)
        dq1 = tl.dot(grad_scores, k1, dq1, input_precision=PRECISION)
        if D2 > 0:
            dq2 = tl.dot(grad_scores, k2, dq2, input_precision=PRECISION)
    return dq1, dq2


@triton.jit
def _backward_q(
    grad, q, k, v, starts, ends, lse, delta, dq,
    g_b, g_t, g_h, q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, T, S, H, R, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    q1, q2 = _load_qk(q + b * q_b + h * q_h, q_t, row0, T, BM, D, D1, D2)
    g_tile = _load(grad + b * g_b + h * g_h, g_t, row0, T, BM, 0, VP, V)
    # Rows past T: lse inf makes their weights exactly 0.
    lse_row = tl.load(lse + (b * H + h) * T + row, mask=row < T, other=float("inf")) * LOG2E
    delta_row = tl.load(delta + (b * H + h) * T + row, mask=row < T, other=0.0)
    dq1 = tl.zeros([BM, D1], tl.float32)
    dq2 = dq1
    if D2 > 0:
        dq2 = tl.zeros([BM, D2], tl.float32)
    last = tl.minimum(row0 + BM, T) - 1
    low, full_low, full_high, high = _keys_of(
        row0, last, starts, ends, b, T, S, CAUSAL, WINDOW, DOCS, BN
    )
    scale2 = scale * LOG2E
    if SPLIT:
        if WINDOW > 0 or DOCS:
            dq1, dq2 = _dq_tiles(
                dq1, dq2, q1, q2, g_tile, k, v, k_s, v_s, low, full_low, S, i, start, end,
                lse_row, delta_row, scale2,
                True, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BN, PRECISION,
            )  # fmt: skip
        dq1, dq2 = _dq_tiles(
            dq1, dq2, q1, q2, g_tile, k, v, k_s, v_s, full_low, full_high, S, i, start, end,
            lse_row, delta_row, scale2,
            False, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BN, PRECISION,
        )  # fmt: skip
        low = full_high
    dq1, dq2 = _dq_tiles(
        dq1, dq2, q1, q2, g_tile, k, v, k_s, v_s, low, high, S, i, start, end,
        lse_row, delta_row, scale2,
        True, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BN, PRECISION,
    )  # fmt: skip
    dq += (b * T * H + h) * D
    _store(dq, H * D, row0, T, dq1 * scale, BM, 0, D1, D)
    if D2 > 0:
        _store(dq, H * D, row0, T, dq2 * scale, BM, D1, D2, D)


@triton.jit
def _dkv_tiles(
    dk1, dk2, dv, k1, k2, v_tile, q, grad, lse, delta, q_t, g_t, low, high, T, S, j, start, end,
    scale,
    MASK: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum over the query tiles [low, high) of one head. Scores are transposed: [keys, rows]."""
    for first in range(low, high, BM):
        row = first + tl.arange(0, BM)
        q1, q2 = _load_qk(q, q_t, first, T, BM, D, D1, D2)
        lse_row = tl.load(lse + row, mask=row < T, other=float("inf")) * LOG2E
        weights = tl.exp2(_dot_qk(k1, k2, q1, q2, D2, PRECISION) * scale - lse_row[None, :])
        if MASK:
            hidden = _hidden((row + S - T)[None, :], j, start, end, S, CAUSAL, WINDOW, False)
            if DOCS:  # key j's run is [start, end): the rows that may see it lie there too
                hidden = hidden | (row[None, :] < start) | (row[None, :] >= end)
            weights = tl.where(hidden, 0.0, weights)
        g_tile = _load(grad, g_t, first, T, BM, 0, VP, V)
        dv = tl.dot(weights.to(g_tile.dtype), g_tile, dv, input_precision=PRECISION)
        delta_row = tl.load(delta + row, mask=row < T, other=0.0)
        grad_weights = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
        grad_scores = (weights * (grad_weights - delta_row[None, :])).to(q1.dtype)
        dk1 = tl.dot(grad_scores, q1, dk1, input_precision=PRECISION)
        if D2 > 0:
            dk2 = tl.dot(grad_scores, q2, dk2, input_precision=PRECISION)
    return dk1, dk2, dv


@triton.jit
def _backward_kv(
    grad, q, k, v, starts, ends, lse, delta, dk, dv,
    g_b, g_t, g_h, q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, T, S, H, R, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key0 = tl.program_id(0) * BN
    group = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    key = key0 + tl.arange(0, BN)
    j = key[:, None]
    start, end = j, j
    if DOCS:  # S == T
        start = tl.load(starts + b * T + key, mask=key < S, other=0)[:, None]
        end = tl.load(ends + b * T + key, mask=key < S, other=0)[:, None]
    k1, k2 = _load_qk(k + b * k_b + group * k_g, k_s, key0, S, BN, D, D1, D2)
    v_tile = _load(v + b * v_b + group * v_g, v_s, key0, S, BN, 0, VP, V)
    dk1 = tl.zeros([BN, D1], tl.float32)
    dk2 = dk1
    if D2 > 0:
        dk2 = tl.zeros([BN, D2], tl.float32)
    dv_acc = tl.zeros([BN, VP], tl.float32)
    last = tl.minimum(key0 + BN, S) - 1
    low, full_low, full_high, high = _queries_of(
        key0, last, starts, ends, b, T, S, CAUSAL, WINDOW, DOCS, BM
    )
    scale2 = scale * LOG2E
    for r in range(R):
        h = group * R + r
        q_h0 = q + b * q_b + h * q_h
        g_h0 = grad + b * g_b + h * g_h
        lse_h = lse + (b * H + h) * T
        delta_h = delta + (b * H + h) * T
        rest = full_high
        if SPLIT:
            dk1, dk2, dv_acc = _dkv_tiles(
                dk1, dk2, dv_acc, k1, k2, v_tile, q_h0, g_h0, lse_h, delta_h, q_t, g_t,
                low, full_low, T, S, j, start, end, scale2,
                True, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BM, PRECISION,
            )  # fmt: skip
            dk1, dk2, dv_acc = _dkv_tiles(
                dk1, dk2, dv_acc, k1, k2, v_tile, q_h0, g_h0, lse_h, delta_h, q_t, g_t,
                full_low, full_high, T, S, j, start, end, scale2,
                False, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BM, PRECISION,
            )  # fmt: skip
        else:
            rest = low
        dk1, dk2, dv_acc = _dkv_tiles(
            dk1, dk2, dv_acc, k1, k2, v_tile, q_h0, g_h0, lse_h, delta_h, q_t, g_t,
            rest, high, T, S, j, start, end, scale2,
            True, D, D1, D2, V, VP, CAUSAL, WINDOW, DOCS, BM, PRECISION,
        )  # fmt: skip
    groups = H // R
    dk += (b * S * groups + group) * D
    _store(dk, groups * D, key0, S, dk1 * scale, BN, 0, D1, D)
    if D2 > 0:
        _store(dk, groups * D, key0, S, dk2 * scale, BN, D1, D2, D)
    _store(dv + (b * S * groups + group) * V, groups * V, key0, S, dv_acc, BN, 0, VP, V)


# ----------------------------------------------------------------------------------------- launches


def _head_dims(d: int, v: int) -> dict[str, int]:
    """How the kernels cut D and V into powers of two of at least 16. Raises ValueError past 256."""
    if max(d, v) > 256:
        raise ValueError(f"attention: head dims {d} and {v}; these kernels go up to 256")
    d1 = max(16, 1 << (d.bit_length() - 1))
    d2 = 0 if d <= d1 else max(16, triton.next_power_of_2(d - d1))
    return {"D": d, "D1": d1, "D2": d2, "V": v, "VP": max(16, triton.next_power_of_2(v))}


def _tiles(kind: str, wide: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(BM, BN, num_warps, num_stages), fixed per shape so that results do not depend on timing.

    Bounded by Hopper's 227 KiB of shared memory and 255 registers a thread.
    """
    if dtype == torch.float32:
        return (64, 32, 4, 2) if kind == "forward" and wide <= 128 else (32, 32, 8, 1)
    if kind == "forward":
        return 128, 64, 4 if wide <= 64 else 8, 3 if wide <= 128 else 2
    if kind == "dq":
        return (128, 64, 8, 2) if wide <= 192 else (64, 64, 4, 2)
    return (64, 128, 8, 2) if wide <= 128 else (64, 64, 8, 2)


def _launch(kind: str, q: Tensor, v: Tensor, window: int | None, causal: bool, documents: bool):
    """(tile rows, tile keys, keyword arguments that all three attention kernels share)."""
    dims = _head_dims(q.shape[-1], v.shape[-1])
    bm, bn, warps, stages = _tiles(kind, max(q.shape[-1], v.shape[-1]), q.dtype)
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


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_dtype(q: Tensor) -> None:
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"attention: no kernel for {q.dtype}; use float32, bfloat16 or float16")


def triton_attention(q, k, v, scale, causal, window, sinks, starts, ends) -> tuple[Tensor, Tensor]:
    """As `attention.ref_attention`."""
    _check_dtype(q)
    (b, t, h, _), (s, g) = q.shape, k.shape[1:3]
    q, k, v = _rows(q), _rows(k), _rows(v)
    out = q.new_empty(b, t, h, v.shape[-1])
    lse = torch.empty(b, h, t, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    bm, _, shared = _launch("forward", q, v, window, causal, starts is not None)
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


def triton_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """delta [B, H, T] FP32: grad_out . out per row. grad_out, out: [B, T, H, V]."""
    b, t, h, v = out.shape
    grad_out, out = _rows(grad_out), out.contiguous()
    delta = torch.empty(b, h, t, dtype=torch.float32, device=out.device)
    if out.numel() == 0:
        return delta.zero_()
    vp = triton.next_power_of_2(v)
    _delta[(triton.cdiv(t, 64), h, b)](
        grad_out, out, delta, *grad_out.stride()[:3], t, h, V=v, VP=vp, BM=64
    )
    return delta


def triton_attention_backward(
    grad_out, q, k, v, out, lse, scale, causal, window, starts, ends
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, delta [B, H, T]); arguments as `attention.ref_attention_backward`, whose sinks
    are inside out and lse already."""
    _check_dtype(q)
    (b, t, h, _), (s, g) = q.shape, k.shape[1:3]
    q, k, v, grad_out, lse = _rows(q), _rows(k), _rows(v), _rows(grad_out), lse.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = triton_delta(grad_out, out)
    if out.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), delta
    unused = q
    bounds = (unused, unused) if starts is None else (starts, ends)
    strides = (
        *grad_out.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        t, s, h, h // g, float(scale),
    )  # fmt: skip
    bm, _, shared = _launch("dq", q, v, window, causal, starts is not None)
    _backward_q[(triton.cdiv(t, bm), h, b)](
        grad_out, q, k, v, *bounds, lse, delta, dq, *strides, **shared
    )
    _, bn, shared = _launch("dkv", q, v, window, causal, starts is not None)
    _backward_kv[(triton.cdiv(s, bn), g, b)](
        grad_out, q, k, v, *bounds, lse, delta, dk, dv, *strides, **shared
    )
    return dq, dk, dv, delta
