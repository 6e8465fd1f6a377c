"""Largest magnitudes, of a tensor or of its rows and columns, and the scales that follow from them.

One pass: every program finds its own maximum and puts it in with one atomic maximum on FP32 bits as
int32, whose order is the same for magnitudes, with NaN above inf above all numbers: both propagate.
"""

from __future__ import annotations

import torch

from ..numerics.formats import BLOCK
from ..numerics.recipe import Cast
from .codes import magnitude_bits, ref_scale_from_amax, scale_of
from .op import operator, tl, triton

# ---- reference: the specification, and the CPU path ----


def ref_amax(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().float().reshape(1)


def grain_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    rows, cols = x.shape
    if granularity == "tensor":
        return ref_amax(x)
    if x.numel() == 0:
        return x.new_zeros(scale_shape(rows, cols, granularity), dtype=torch.float32)
    a = x.abs()
    if granularity == "row":
        return a.amax(1, keepdim=True).float()
    a = torch.nn.functional.pad(a, (0, -cols % BLOCK)).unflatten(1, (-1, BLOCK)).amax(2)
    if granularity == "block":
        a = torch.nn.functional.pad(a, (0, 0, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1)
    return a.float()


def scale_shape(rows: int, cols: int, granularity: str) -> tuple[int, ...]:
    if granularity == "tensor":
        return (1,)
    if granularity == "row":
        return (rows, 1)
    k = -(-cols // BLOCK)
    return (rows, k) if granularity == "group" else (-(-rows // BLOCK), k)


# ---- Triton ----


@triton.jit
def _amax_kernel(x, out, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    left = n - start
    offs = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        here = step * BLOCK + offs
        v = tl.load(x + start + here, mask=here < left, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude_bits(v))
    tl.atomic_max(out, tl.max(top, 0), sem="relaxed")


@triton.jit
def _amax_lines_kernel(
    x, rows, cols, M, K, stride_m, stride_k, COLS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """Amax of each row, and with COLS of each column, into zeroed int32 vectors."""
    tiles_k = tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    m, k = pid_m * BM + tl.arange(0, BM), pid_k * BK + tl.arange(0, BK)
    base = x + pid_m.to(tl.int64) * BM * stride_m + pid_k.to(tl.int64) * BK * stride_k
    offs = tl.arange(0, BM)[:, None] * stride_m + tl.arange(0, BK)[None, :] * stride_k
    v = tl.load(base + offs, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    bits = magnitude_bits(v.to(tl.float32))
    tl.atomic_max(rows + m, tl.max(bits, 1), mask=m < M, sem="relaxed")
    if COLS:
        tl.atomic_max(cols + k, tl.max(bits, 0), mask=k < K, sem="relaxed")


@triton.jit
def _scale_kernel(
    amax, scale, n, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, B: tl.constexpr
):
    i = tl.program_id(0) * B + tl.arange(0, B)
    bits = tl.load(amax + i, mask=i < n, other=0.0).to(tl.int32, bitcast=True)
    tl.store(scale + i, scale_of(bits, E4M3, POW2, MARGIN), mask=i < n)


# ---- Triton wrappers: same arguments and results as the references ----


def tiles(rows: int, cols: int, high: int, wide: int) -> tuple[int]:
    return (-(-rows // high) * -(-cols // wide),)


def triton_amax(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    n = x.numel()
    if n:
        if not x.is_contiguous() and not (x.dim() == 2 and x.t().is_contiguous()):
            x = x.contiguous()
        _amax_kernel[(-(-n // 32768),)](x, out.view(torch.int32), n, BLOCK=4096, STEPS=8)
    return out


def triton_amax_lines(x: torch.Tensor, both: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int32 magnitudes of each row, and with `both` of each column."""
    rows, cols = x.shape
    out = torch.zeros(rows + cols if both else rows, dtype=torch.int32, device=x.device)
    row_amax, col_amax = out[:rows], out[rows:] if both else None
    _amax_lines_kernel[tiles(rows, cols, 128, 128)](
        x, row_amax, col_amax, rows, cols, *x.stride(), COLS=both, BM=128, BK=128, num_warps=8
    )
    return row_amax, col_amax


def triton_scale_from_amax(
    amax: torch.Tensor, format: str, pow2: bool, margin: int
) -> torch.Tensor:
    amax = amax.contiguous()
    scale, n = torch.empty_like(amax), amax.numel()
    if n:
        _scale_kernel[(-(-n // 512),)](
            amax, scale, n, E4M3=format == "e4m3", POW2=pow2, MARGIN=margin, B=512
        )
    return scale


# ---- operators ----

_amax = operator(
    "amax(Tensor x) -> Tensor",
    reference=ref_amax,
    cuda=triton_amax,
    fake=lambda x: x.new_empty(1, dtype=torch.float32),
)

_scale_from_amax = operator(
    "scale_from_amax(Tensor amax, str format, bool pow2, int margin) -> Tensor",
    reference=ref_scale_from_amax,
    cuda=triton_scale_from_amax,
    fake=lambda amax, format, pow2, margin: torch.empty_like(amax),
)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as an FP32 tensor of shape (1,); NaN and inf propagate; 0 when empty."""
    return _amax(x.detach())


def scale_from_amax(amax: torch.Tensor, cast: Cast) -> torch.Tensor:
    """The scale for each FP32 amax: same shape, finite, positive."""
    return _scale_from_amax(amax, cast.format, cast.scale_kind == "pow2", cast.margin)
