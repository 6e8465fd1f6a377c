"""Casts of a matrix to 8-bit codes and back, in one order or both from a single pass.

value = codes * scale, always; scales and roundings are those of codes.py. Stochastic rounding of
element (m, k) takes its bits from (key, m * K + k), whichever order it is written in.

Shapes: x_MK any strides. Granularity "tensor": scale (1,); "row": [M, 1]; "group": [M, ceil(K/128)];
"block": [ceil(M/128), ceil(K/128)].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..numerics.formats import BLOCK, FORMATS, Format, format_of
from ..numerics.recipe import Cast
from .codes import (
    converts_fp8,
    decode,
    encode,
    encode_stochastic,
    magnitude_bits,
    ref_decode,
    ref_encode,
    ref_scale_from_amax,
    scale_of,
)
from .int8 import dequantize_int8 as dequantize_int8
from .int8 import quantize_int8 as quantize_int8
from .op import operator, tl, triton
from .random import random_bits, ref_random_bits
from .scale import amax as amax
from .scale import grain_amax, ref_amax, scale_shape, tiles, triton_amax, triton_amax_lines
from .scale import scale_from_amax as scale_from_amax


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes and the scale that gives the value back; see the module docstring for shapes."""

    codes: torch.Tensor  # [M, K] float8, contiguous
    scale: torch.Tensor  # fp32
    granularity: str

    @property
    def format(self) -> Format:
        return format_of(self.codes.dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """codes * scale, computed in FP32 and rounded to `dtype`."""
        return _dequantize(self.codes, self.scale, self.granularity, dtype)


# ---- reference: the specification, and the CPU path ----


def spread(scale: torch.Tensor, granularity: str, rows: int, cols: int) -> torch.Tensor:
    """A scale as a tensor that broadcasts against [rows, cols]."""
    if granularity == "group":
        return scale.repeat_interleave(BLOCK, 1)[:, :cols]
    if granularity == "block":
        return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return scale


def ref_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    format: str,
    granularity: str,
    pow2: bool,
    margin: int,
    stochastic: bool,
    key: int,
    both: bool,
) -> list[torch.Tensor]:
    rows, cols = x.shape
    random = None
    if stochastic:
        index = torch.arange(rows * cols, device=x.device).view(rows, cols)
        random = ref_random_bits(index, key)
    if amax_out is not None:
        amax_out.copy_(torch.maximum(amax_out, ref_amax(x)))

    def cast(x, random, scale):
        if scale is None:
            top = grain_amax(x, granularity) if amax is None else amax
            scale = ref_scale_from_amax(top, format, pow2, margin)
        else:
            scale = scale.clone()
        v = x.float() * spread(1.0 / scale, granularity, *x.shape)
        return ref_encode(v, format, random), scale

    codes, scale = cast(x, random, scale)
    out = [codes.contiguous(), scale]
    if both and granularity in ("tensor", "block"):
        out.append(ref_transpose_codes(codes))
        if granularity == "block":
            out.append(_transposed(scale))
    elif both:
        out += cast(x.t().contiguous(), None if random is None else random.t(), None)
    return out


def _transposed(t: torch.Tensor) -> torch.Tensor:
    # Always a copy, also of a single row: outputs of an operator must not share memory.
    return t.transpose(-2, -1).clone(memory_format=torch.contiguous_format)


def ref_transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    return _transposed(codes.view(torch.uint8)).view(codes.dtype)


def ref_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype
) -> torch.Tensor:
    return (ref_decode(codes) * spread(scale, granularity, *codes.shape)).to(dtype)


# ---- Triton ----


@triton.jit
def widen(v, HARDWARE: tl.constexpr):
    """FP32 of loaded values. On the GPU BF16 goes through assembly: a plain conversion tempts the
    compiler to transpose its input and to encode everything a second time in the other order."""
    if HARDWARE and v.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [v],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        ).to(tl.float32, bitcast=True)
    else:
        wide = v.to(tl.float32)
    return wide


@triton.jit(do_not_specialize=["key"])
def _cast_kernel(
    x, given, amax, amax_cols, amax_out, codes, scale, codes_t, scale_t,
    M, K, stride_m, stride_k, key,
    GRAIN: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr, HARDWARE: tl.constexpr, BOTH: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile: scales, codes, and with BOTH the transposed codes (and their own scales).

    given: scales to use. amax, amax_cols: int32 magnitudes per tensor, or per row and column, for
    GRAIN "tensor" and "row"; groups and blocks find theirs inside the tile.
    """
    tiles_m, tiles_k = tl.cdiv(M, BM), tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    m, k = pid_m * BM + i, pid_k * BK + j
    in_m, in_k = m < M, k < K
    inside = in_m[:, None] & in_k[None, :]
    base = x + pid_m.to(tl.int64) * BM * stride_m + pid_k.to(tl.int64) * BK * stride_k
    v = tl.load(base + i[:, None] * stride_m + j[None, :] * stride_k, mask=inside, other=0.0)
    v = widen(v, HARDWARE and BOTH)
    bits = magnitude_bits(v)
    if amax_out is not None:
        tl.atomic_max(amax_out, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    v_cols = v
    if GRAIN == "tensor":
        if given is not None:
            s = tl.load(given)
        else:
            s = scale_of(tl.load(amax), E4M3, POW2, MARGIN)
        tl.store(scale, s, mask=tl.program_id(0) == 0)
        v = v * tl.div_rn(1.0, s)
    elif GRAIN == "block":
        at = pid_m * tiles_k + pid_k
        if given is not None:
            s = tl.load(given + at)
        else:
            s = scale_of(tl.max(tl.max(bits, 1), 0), E4M3, POW2, MARGIN)
        tl.store(scale + at, s)
        if BOTH:
            tl.store(scale_t + pid_k * tiles_m + pid_m, s)
        v = v * tl.div_rn(1.0, s)
    else:
        at = m if GRAIN == "row" else m * tiles_k + pid_k
        if given is not None:
            s = tl.load(given + at, mask=in_m, other=1.0)
        elif GRAIN == "row":
            s = scale_of(tl.load(amax + m, mask=in_m, other=0), E4M3, POW2, MARGIN)
        else:
            s = scale_of(tl.max(bits, 1), E4M3, POW2, MARGIN)
        if GRAIN == "group":
            tl.store(scale + at, s, mask=in_m)
        elif pid_k == 0:
            tl.store(scale + at, s, mask=in_m)
        v = v * tl.div_rn(1.0, s)[:, None]
    if STOCHASTIC:
        index = m.to(tl.int64)[:, None] * K + k[None, :]
        random = random_bits(index, key)
        c = encode_stochastic(v, random, E4M3)
    else:
        c = encode(v, E4M3, HARDWARE)
    out = codes + pid_m.to(tl.int64) * BM * K + pid_k * BK
    tl.store(out + i[:, None] * K + j[None, :], c, mask=inside)
    if BOTH:
        if GRAIN == "row" or GRAIN == "group":
            if GRAIN == "row":
                s = scale_of(tl.load(amax_cols + k, mask=in_k, other=0), E4M3, POW2, MARGIN)
                if pid_m == 0:
                    tl.store(scale_t + k, s, mask=in_k)
            else:
                s = scale_of(tl.max(bits, 0), E4M3, POW2, MARGIN)
                tl.store(scale_t + k * tiles_m + pid_m, s, mask=in_k)
            v_cols = v_cols * tl.div_rn(1.0, s)[None, :]
            if STOCHASTIC:
                c = encode_stochastic(v_cols, random, E4M3)
            else:
                c = encode(v_cols, E4M3, HARDWARE)
        out = codes_t + pid_k.to(tl.int64) * BK * M + pid_m * BM
        inside_t = in_k[:, None] & in_m[None, :]
        tl.store(out + j[:, None] * M + i[None, :], tl.trans(c), mask=inside_t)


@triton.jit(do_not_specialize=["key"])
def _cast_rows_kernel(
    x, amax_out, codes, scale, K, stride_m, key,
    E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row with its own scale; the second read of the row comes from the cache."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BK)
    top = tl.zeros([BK], tl.int32)
    for start in range(0, K, BK):
        k = start + offs
        v = tl.load(x + row * stride_m + k, mask=k < K, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude_bits(v))
    bits = tl.max(top, 0)
    if amax_out is not None:
        tl.atomic_max(amax_out, bits, sem="relaxed")
    s = scale_of(bits, E4M3, POW2, MARGIN)
    tl.store(scale + row, s)
    inverse = tl.div_rn(1.0, s)
    for start in range(0, K, BK):
        k = start + offs
        v = tl.load(x + row * stride_m + k, mask=k < K, other=0.0).to(tl.float32) * inverse
        if STOCHASTIC:
            c = encode_stochastic(v, random_bits(row * K + k, key), E4M3)
        else:
            c = encode(v, E4M3, HARDWARE)
        tl.store(codes + row * K + k, c, mask=k < K)


@triton.jit
def _transpose_kernel(codes, out, M, K, BM: tl.constexpr, BK: tl.constexpr):
    tiles_k = tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    in_m, in_k = pid_m * BM + i < M, pid_k * BK + j < K
    batch = tl.program_id(1).to(tl.int64) * M * K
    base = codes + batch + pid_m.to(tl.int64) * BM * K + pid_k * BK
    c = tl.load(base + i[:, None] * K + j[None, :], mask=in_m[:, None] & in_k[None, :], other=0)
    base = out + batch + pid_k.to(tl.int64) * BK * M + pid_m * BM
    tl.store(base + j[:, None] * M + i[None, :], tl.trans(c), mask=in_k[:, None] & in_m[None, :])


@triton.jit
def _dequantize_kernel(
    codes, scale, out, M, K,
    GRAIN: tl.constexpr, E4M3: tl.constexpr, HARDWARE: tl.constexpr, SIDE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BK)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i, j = tl.arange(0, BM), tl.arange(0, BK)
    m = pid_m * BM + i
    inside = (m < M)[:, None] & (pid_k * BK + j < K)[None, :]
    base = pid_m.to(tl.int64) * BM * K + pid_k * BK
    offs = i[:, None] * K + j[None, :]
    v = decode(tl.load(codes + base + offs, mask=inside, other=0), E4M3, HARDWARE)
    if GRAIN == "tensor":
        v = v * tl.load(scale)
    elif GRAIN == "row":
        v = v * tl.load(scale + m, mask=m < M, other=0.0)[:, None]
    elif GRAIN == "group":
        v = v * tl.load(scale + m * tiles_k + pid_k, mask=m < M, other=0.0)[:, None]
    else:
        v = v * tl.load(scale + (m // SIDE) * tiles_k + pid_k, mask=m < M, other=0.0)[:, None]
    tl.store(out + base + offs, v.to(out.dtype.element_ty), mask=inside)


# ---- Triton wrappers: same arguments and results as the references ----


def _triton_rows(x, amax_out, format, pow2, margin, stochastic, key):
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _cast_rows_kernel[(rows,)](
        x,
        amax_out,
        codes,
        scale,
        cols,
        x.stride(0),
        key,
        E4M3=format == "e4m3",
        POW2=pow2,
        MARGIN=margin,
        STOCHASTIC=stochastic,
        HARDWARE=converts_fp8(x.device),
        BK=1024 if cols <= 1024 else 2048,
    )
    return [codes.view(FORMATS[format].dtype), scale]


def triton_quantize(
    x, scale, amax, amax_out, format, granularity, pow2, margin, stochastic, key, both
) -> list[torch.Tensor]:
    rows, cols = x.shape
    device = x.device
    if x.numel() == 0:
        return ref_quantize(
            x, scale, amax, amax_out, format, granularity, pow2, margin, stochastic, key, both
        )
    if amax_out is not None:
        amax_out = amax_out.view(torch.int32)
    col_amax = codes_t = scale_t = None
    if scale is not None:
        amax = None
    elif granularity == "row":
        if not both and x.stride(1) == 1:
            return _triton_rows(x, amax_out, format, pow2, margin, stochastic, key)
        amax, col_amax = triton_amax_lines(x, both)
    elif granularity == "tensor":
        amax = (triton_amax(x) if amax is None else amax).view(torch.int32)
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=device)
    out_scale = torch.empty(scale_shape(rows, cols, granularity), device=device)
    if both:
        codes_t = torch.empty(cols, rows, dtype=torch.uint8, device=device)
        if granularity != "tensor":
            scale_t = torch.empty(scale_shape(cols, rows, granularity), device=device)
    # A block, or a group of each order, lives inside one tile; else smaller tiles fill the GPU.
    if granularity == "block" or (granularity == "group" and both):
        high, warps, registers = 128, 8, 128  # 128 registers: two such tiles on an SM
    else:
        high, warps, registers = (64 if both or x.stride(1) != 1 else 32), 4, None
    _cast_kernel[tiles(rows, cols, high, 128)](
        x,
        scale,
        amax,
        col_amax,
        amax_out,
        codes,
        out_scale,
        codes_t,
        scale_t,
        rows,
        cols,
        *x.stride(),
        key,
        GRAIN=granularity,
        E4M3=format == "e4m3",
        POW2=pow2,
        MARGIN=margin,
        STOCHASTIC=stochastic,
        HARDWARE=converts_fp8(device),
        BOTH=both,
        BM=high,
        BK=128,
        num_warps=warps,
        maxnreg=registers,
    )
    dtype = FORMATS[format].dtype
    out = [codes.view(dtype), out_scale]
    if both:
        out.append(codes_t.view(dtype))
        if scale_t is not None:
            out.append(scale_t)
    return out


def triton_transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    *batch, rows, cols = codes.shape
    out = torch.empty(*batch, cols, rows, dtype=torch.uint8, device=codes.device)
    if out.numel():
        grid = (*tiles(rows, cols, 128, 128), math.prod(batch))
        bytes_in = codes.contiguous().view(torch.uint8)
        _transpose_kernel[grid](bytes_in, out, rows, cols, BM=128, BK=128, num_warps=8)
    return out.view(codes.dtype)


def triton_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype
) -> torch.Tensor:
    rows, cols = codes.shape
    out = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    if out.numel():
        _dequantize_kernel[tiles(rows, cols, 32, BLOCK)](
            codes.contiguous().view(torch.uint8),
            scale.contiguous(),
            out,
            rows,
            cols,
            GRAIN=granularity,
            E4M3=codes.dtype is torch.float8_e4m3fn,
            HARDWARE=converts_fp8(codes.device),
            SIDE=BLOCK,
            BM=32,
            BK=BLOCK,
        )
    return out


# ---- operators ----


def _fake_quantize(x, scale, amax, amax_out, format, granularity, *settings):
    rows, cols = x.shape
    dtype = FORMATS[format].dtype
    out = [x.new_empty(rows, cols, dtype=dtype)]
    out.append(x.new_empty(scale_shape(rows, cols, granularity), dtype=torch.float32))
    if settings[-1]:
        out.append(x.new_empty(cols, rows, dtype=dtype))
        if granularity != "tensor":
            out.append(x.new_empty(scale_shape(cols, rows, granularity), dtype=torch.float32))
    return out


def _pure(fn):
    return lambda x, scale, amax, *settings: fn(x, scale, amax, None, *settings)


def _four(fn):
    """torch.compile takes no operator that writes to an argument and returns a list."""

    def padded(x, *rest):
        out = fn(x, *rest)
        return *out, *(x.new_empty(0) for _ in range(4 - len(out)))

    return padded


_SETTINGS = (
    "str format, str granularity, bool pow2, int margin, bool stochastic, int key, bool both"
)

_quantize = operator(
    f"quantize(Tensor x, Tensor? scale, Tensor? amax, {_SETTINGS}) -> Tensor[]",
    reference=_pure(ref_quantize),
    cuda=_pure(triton_quantize),
    fake=_pure(_fake_quantize),
)

# The same, and the amax of x goes into amax_out; outputs that there are not are empty.
_quantize_noting = operator(
    "quantize_noting(Tensor x, Tensor? scale, Tensor? amax, Tensor(a!) amax_out, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_four(ref_quantize),
    cuda=_four(triton_quantize),
    fake=_four(_fake_quantize),
)

_transpose_codes = operator(
    "transpose_codes(Tensor codes) -> Tensor",
    reference=ref_transpose_codes,
    cuda=triton_transpose_codes,
    fake=lambda codes: codes.new_empty(*codes.shape[:-2], codes.shape[-1], codes.shape[-2]),
)

_dequantize = operator(
    "dequantize(Tensor codes, Tensor scale, str granularity, ScalarType dtype) -> Tensor",
    reference=ref_dequantize,
    cuda=triton_dequantize,
    fake=lambda codes, scale, granularity, dtype: codes.new_empty(codes.shape, dtype=dtype),
)


def _settings(x, cast, scale, amax, key, both) -> tuple:
    """The operators' last arguments; ValueError for what they cannot do."""
    if x.dim() != 2:
        raise ValueError(f"quantize: x has {x.dim()} dimensions; flatten it to two")
    if amax is not None and cast.granularity != "tensor":
        raise ValueError(f"quantize: one amax does not give {cast.granularity!r} scales")
    if both and scale is not None and cast.granularity in ("row", "group"):
        raise ValueError(f"quantize_both: {cast.granularity!r} needs two scales; one was given")
    return (
        cast.format,
        cast.granularity,
        cast.scale_kind == "pow2",
        cast.margin,
        cast.rounding == "stochastic",
        key,
        both,
    )


def quantize(
    x: torch.Tensor,
    cast: Cast,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    key: int = 0,
) -> Quantized:
    """x_MK as codes with the scale `cast` asks for.

    scale: use this one (delayed scaling). amax: fp32 (1,), known already, "tensor" only: saves the
    pass that finds it. amax_out: fp32 (1,), receives the amax of x from the same pass as the cast.
    """
    settings = _settings(x, cast, scale, amax, key, False)
    if amax_out is None:
        codes, scale = _quantize(x.detach(), scale, amax, *settings)
    else:
        codes, scale, *_ = _quantize_noting(x.detach(), scale, amax, amax_out, *settings)
    return Quantized(codes, scale, cast.granularity)


def quantize_both(
    x: torch.Tensor,
    cast: Cast,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    key: int = 0,
) -> tuple[Quantized, Quantized]:
    """x_MK as codes, and x^T as codes [K, M]: the casts read x once. Arguments as `quantize`."""
    settings, grain = _settings(x, cast, scale, amax, key, True), cast.granularity
    if amax_out is None:
        out = _quantize(x.detach(), scale, amax, *settings)
    else:
        out = _quantize_noting(x.detach(), scale, amax, amax_out, *settings)
    # a scale per tensor is that of both orders
    cols_scale = out[1] if grain == "tensor" else out[3]
    return Quantized(out[0], out[1], grain), Quantized(out[2], cols_scale, grain)


def transpose(q: Quantized) -> Quantized:
    """The transposed value, exactly. Raises ValueError for "row" and "group" (new scales needed)."""
    if q.granularity == "tensor":
        return Quantized(_transpose_codes(q.codes), q.scale, "tensor")
    if q.granularity == "block":
        return Quantized(_transpose_codes(q.codes), q.scale.t().contiguous(), "block")
    raise ValueError(
        f"transpose: {q.granularity!r} scales run along K only; use quantize_both on the values"
    )
