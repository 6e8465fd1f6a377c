"""The Triton kernels of `attention.py`, backward: weights are made again from the log-sum-exp.

One program of `dq` owns BM query rows of one head; one of `dk, dv` owns BN keys of one key/value
head and sums over the R query heads that read it. Sums run in a fixed order, without atomics: the
same inputs give the same bits. Legend: see `flash.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .flash import (
    LOG2E,
    check_dtype,
    dot_qk,
    hidden_keys,
    keys_of,
    last_dense,
    launch_settings,
    load_qk,
    load_tile,
    store_tile,
)
from .op import tl, triton


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
def _delta(
    grad, out, delta, g_b, g_t, g_h, T, H,
    V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta [B, H, T] = grad_out . out per row, FP32."""
    row0 = tl.program_id(0) * BM
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = row0 + tl.arange(0, BM)
    g = load_tile(grad + b * g_b + h * g_h, g_t, row0, T, BM, 0, VP, V).to(tl.float32)
    o = load_tile(out + (b * T * H + h) * V, H * V, row0, T, BM, 0, VP, V).to(tl.float32)
    tl.store(delta + (b * H + h) * T + row, tl.sum(g * o, 1), mask=row < T)


@triton.jit
def _dq_tiles(
    dq1, dq2, q1, q2, grad, k, v, k_s, v_s, low, high, S, i, start, end, lse, delta, scale,
    MASK: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(low, high, BN):
        k1, k2 = load_qk(k, k_s, first, S, BN, D, D1, D2)
        weights = tl.exp2(dot_qk(q1, q2, k1, k2, D2, PRECISION) * scale - lse[:, None])
        if MASK:
            j = first + tl.arange(0, BN)[None, :]
            hidden = hidden_keys(i, j, start, end, S, CAUSAL, WINDOW, DOCS)
            weights = tl.where(hidden, 0.0, weights)
        v_tile = load_tile(v, v_s, first, S, BN, 0, VP, V)
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
    q1, q2 = load_qk(q + b * q_b + h * q_h, q_t, row0, T, BM, D, D1, D2)
    g_tile = load_tile(grad + b * g_b + h * g_h, g_t, row0, T, BM, 0, VP, V)
    # Rows past T: lse inf makes their weights exactly 0.
    lse_row = tl.load(lse + (b * H + h) * T + row, mask=row < T, other=float("inf")) * LOG2E
    delta_row = tl.load(delta + (b * H + h) * T + row, mask=row < T, other=0.0)
    dq1 = tl.zeros([BM, D1], tl.float32)
    dq2 = dq1
    if D2 > 0:
        dq2 = tl.zeros([BM, D2], tl.float32)
    last = tl.minimum(row0 + BM, T) - 1
    low, full_low, full_high, high = keys_of(
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
    store_tile(dq, H * D, row0, T, dq1 * scale, BM, 0, D1, D)
    if D2 > 0:
        store_tile(dq, H * D, row0, T, dq2 * scale, BM, D1, D2, D)


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
        q1, q2 = load_qk(q, q_t, first, T, BM, D, D1, D2)
        lse_row = tl.load(lse + row, mask=row < T, other=float("inf")) * LOG2E
        weights = tl.exp2(dot_qk(k1, k2, q1, q2, D2, PRECISION) * scale - lse_row[None, :])
        if MASK:
            hidden = hidden_keys((row + S - T)[None, :], j, start, end, S, CAUSAL, WINDOW, False)
            if DOCS:  # key j's run is [start, end): the rows that may see it lie there too
                hidden = hidden | (row[None, :] < start) | (row[None, :] >= end)
            weights = tl.where(hidden, 0.0, weights)
        g_tile = load_tile(grad, g_t, first, T, BM, 0, VP, V)
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
    k1, k2 = load_qk(k + b * k_b + group * k_g, k_s, key0, S, BN, D, D1, D2)
    v_tile = load_tile(v + b * v_b + group * v_g, v_s, key0, S, BN, 0, VP, V)
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
    store_tile(dk, groups * D, key0, S, dk1 * scale, BN, 0, D1, D)
    if D2 > 0:
        store_tile(dk, groups * D, key0, S, dk2 * scale, BN, D1, D2, D)
    store_tile(dv + (b * S * groups + group) * V, groups * V, key0, S, dv_acc, BN, 0, VP, V)


def triton_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """delta [B, H, T] FP32: grad_out . out per row. grad_out, out: [B, T, H, V]."""
    b, t, h, v = out.shape
    grad_out, out = last_dense(grad_out), out.contiguous()
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
    check_dtype(q)
    (b, t, h, _), (s, g) = q.shape, k.shape[1:3]
    q, k, v, grad_out, lse = (
        last_dense(q),
        last_dense(k),
        last_dense(v),
        last_dense(grad_out),
        lse.contiguous(),
    )
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
    bm, _, shared = launch_settings("dq", q, v, window, causal, starts is not None)
    _backward_q[(triton.cdiv(t, bm), h, b)](
        grad_out, q, k, v, *bounds, lse, delta, dq, *strides, **shared
    )
    _, bn, shared = launch_settings("dkv", q, v, window, causal, starts is not None)
    _backward_kv[(triton.cdiv(s, bn), g, b)](
        grad_out, q, k, v, *bounds, lse, delta, dk, dv, *strides, **shared
    )
    return dq, dk, dv, delta
