"""Casts to 8-bit codes and back: amax, scales, rounding, both orders, and int8 storage.

value = codes * scale, always. scale = amax / format.max * 2**margin ("pow2": rounded up to a power
of two), finite and positive; a zero or non-finite amax gives 1, a tiny one 2**-126. A code is
x * (1 / scale) in FP32, clamped to +-format.max, rounded to nearest even or stochastically; the
random bits of element (m, k) come from (key, m * K + k), in both orders. NaN stays NaN (code 0x7f);
an infinity becomes NaN in e4m3, which has none, and stays one in e5m2: never a large number.
Kernels read and write codes as bytes.

Shapes: x_MK any strides. Granularity "tensor": scale (1,); "row": [M, 1]; "group": [M, ceil(K/128)];
"block": [ceil(M/128), ceil(K/128)].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..numerics.formats import BLOCK, FORMATS, INT8_MAX, Format, format_of
from ..numerics.recipe import Cast
from .op import operator
from .random import ref_random_bits

TINY = 2.0**-126  # least scale: itself and its inverse are normal FP32 numbers
HUGE = 2.0**126


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


def ref_amax(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().float().reshape(1)


def ref_scale_from_amax(amax: torch.Tensor, format: str, pow2: bool, margin: int) -> torch.Tensor:
    fmt = FORMATS[format]
    usable = (amax > 0) & (amax < torch.inf)
    if pow2:
        # max = 1.75 * 2**e in both formats, so a mantissa above 1.75 needs the next exponent.
        # (exact: no division whose rounding could clip)
        max_exponent = 8 if format == "e4m3" else 15
        exponent = ((amax.view(torch.int32) + 0x1FFFFF) >> 23) - max_exponent + margin
        scale = (exponent.clamp(1, 253) << 23).view(torch.float32)
    else:
        scale = (amax / fmt.max * 2.0**margin).clamp(TINY, HUGE)
    return torch.where(usable, scale, 1.0)


def _spread(scale: torch.Tensor, granularity: str, rows: int, cols: int) -> torch.Tensor:
    """A scale as a tensor that broadcasts against [rows, cols]."""
    if granularity == "group":
        return scale.repeat_interleave(BLOCK, 1)[:, :cols]
    if granularity == "block":
        return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return scale


def _grain_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    rows, cols = x.shape
    if granularity == "tensor":
        return ref_amax(x)
    if x.numel() == 0:
        return x.new_zeros(_scale_shape(rows, cols, granularity), dtype=torch.float32)
    a = x.abs()
    if granularity == "row":
        return a.amax(1, keepdim=True).float()
    a = torch.nn.functional.pad(a, (0, -cols % BLOCK)).unflatten(1, (-1, BLOCK)).amax(2)
    if granularity == "block":
        a = torch.nn.functional.pad(a, (0, 0, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1)
    return a.float()


def _scale_shape(rows: int, cols: int, granularity: str) -> tuple[int, ...]:
    if granularity == "tensor":
        return (1,)
    if granularity == "row":
        return (rows, 1)
    k = -(-cols // BLOCK)
    return (rows, k) if granularity == "group" else (-(-rows // BLOCK), k)


def ref_encode(v: torch.Tensor, format: str, random: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of FP32 `v` (already divided by the scale). random: 32 bits an element (int64)."""
    fmt = FORMATS[format]
    clamped = v.clamp(-fmt.max, fmt.max)
    if random is None:
        codes = clamped.to(fmt.dtype).view(torch.uint8)
    else:
        codes = _ref_stochastic(clamped, fmt, random)
    special = ~v.isfinite()
    if special.any():
        code = torch.full_like(codes, 0x7F)
        if fmt.has_inf:
            code = torch.where(v.isinf(), 0x7C + 0x80 * (v < 0), code).to(torch.uint8)
        codes = torch.where(special, code, codes)
    return codes.view(fmt.dtype)


def _ref_stochastic(v: torch.Tensor, fmt: Format, random: torch.Tensor) -> torch.Tensor:
    """Mantissa plus random bits below the kept ones, truncated; subnormals shift further."""
    bits = v.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0) << 23)
    least = 121 if fmt.mantissa_bits == 3 else 113  # FP32 exponent field of the smallest normal
    above = exponent.clamp(min=least)
    shift = 23 - fmt.mantissa_bits + above - exponent.clamp(min=1)
    mantissa = mantissa >> (shift - 31).clamp(0, 31)
    shift = shift.clamp(max=31)
    kept = (mantissa + (random & ((1 << shift) - 1))) >> shift
    return (sign | (kept + ((above - least) << fmt.mantissa_bits))).to(torch.uint8)


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
        amax_out.copy_(ref_amax(x))

    def cast(x, random, scale):
        if scale is None:
            grain_amax = amax if amax is not None else _grain_amax(x, granularity)
            scale = ref_scale_from_amax(grain_amax, format, pow2, margin)
        else:
            scale = scale.clone()
        v = x.float() * _spread(1.0 / scale, granularity, *x.shape)
        return ref_encode(v, format, random), scale

    codes, scale = cast(x, random, scale)
    out = [codes.contiguous(), scale]
    if both and granularity in ("tensor", "block"):
        out.append(codes.view(torch.uint8).t().contiguous().view(codes.dtype))
        if granularity == "block":
            out.append(scale.t().contiguous())
    elif both:
        out += cast(x.t().contiguous(), None if random is None else random.t(), None)
    return out


def ref_transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).transpose(-2, -1).contiguous().view(codes.dtype)


def ref_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype
) -> torch.Tensor:
    return (codes.float() * _spread(scale, granularity, *codes.shape)).to(dtype)


def ref_quantize_int8(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    rows, cols = x.shape
    k = -(-cols // group)
    if x.numel() == 0:
        return [x.new_zeros(rows, cols, dtype=torch.int8), x.new_zeros(rows, k, dtype=torch.bfloat16)]
    v = torch.nn.functional.pad(x.float(), (0, -cols % group)).unflatten(1, (k, group))
    amax = v.abs().amax(2)
    # Rounded up to BF16, so that the largest element does not clip; NaN marks a non-finite group.
    bits = ((amax / INT8_MAX).clamp(min=TINY).view(torch.int32) + 0xFFFF) & -0x10000
    scale = torch.where(amax < torch.inf, bits.view(torch.float32), torch.nan)
    inverse = torch.where(amax < torch.inf, 1.0 / scale, 0.0)
    codes = torch.nan_to_num(v * inverse.unsqueeze(2)).clamp(-INT8_MAX, INT8_MAX).round()
    return [codes.to(torch.int8).flatten(1)[:, :cols].contiguous(), scale.bfloat16()]


def ref_dequantize_int8(
    codes: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    spread = scale.float().repeat_interleave(group, 1)[:, : codes.shape[1]]
    return (codes.float() * spread).to(dtype)


# ---- operators ----


def _fake_quantize(x, scale, amax, amax_out, format, granularity, pow2, margin, stochastic, key, both):
    rows, cols = x.shape
    dtype = FORMATS[format].dtype
    out = [x.new_empty(rows, cols, dtype=dtype)]
    out.append(x.new_empty(_scale_shape(rows, cols, granularity), dtype=torch.float32))
    if both:
        out.append(x.new_empty(cols, rows, dtype=dtype))
        if granularity != "tensor":
            out.append(x.new_empty(_scale_shape(cols, rows, granularity), dtype=torch.float32))
    return out


def _fake_quantize_int8(x, group):
    rows, cols = x.shape
    scale = x.new_empty(rows, -(-cols // group), dtype=torch.bfloat16)
    return [x.new_empty(rows, cols, dtype=torch.int8), scale]


_amax = operator(
    "amax(Tensor x) -> Tensor",
    reference=ref_amax,
    fake=lambda x: x.new_empty(1, dtype=torch.float32),
)
_scale_from_amax = operator(
    "scale_from_amax(Tensor amax, str format, bool pow2, int margin) -> Tensor",
    reference=ref_scale_from_amax,
    fake=lambda amax, format, pow2, margin: torch.empty_like(amax),
)
_quantize = operator(
    "quantize(Tensor x, Tensor? scale, Tensor? amax, Tensor(a!)? amax_out, str format, "
    "str granularity, bool pow2, int margin, bool stochastic, int key, bool both) -> Tensor[]",
    reference=ref_quantize,
    fake=_fake_quantize,
)
_transpose_codes = operator(
    "transpose_codes(Tensor codes) -> Tensor",
    reference=ref_transpose_codes,
    fake=lambda codes: codes.new_empty(*codes.shape[:-2], codes.shape[-1], codes.shape[-2]),
)
_dequantize = operator(
    "dequantize(Tensor codes, Tensor scale, str granularity, ScalarType dtype) -> Tensor",
    reference=ref_dequantize,
    fake=lambda codes, scale, granularity, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
_quantize_int8 = operator(
    "quantize_int8(Tensor x, int group) -> Tensor[]",
    reference=ref_quantize_int8,
    fake=_fake_quantize_int8,
)
_dequantize_int8 = operator(
    "dequantize_int8(Tensor codes, Tensor scale, int group, ScalarType dtype) -> Tensor",
    reference=ref_dequantize_int8,
    fake=lambda codes, scale, group, dtype: codes.new_empty(codes.shape, dtype=dtype),
)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as an FP32 tensor of shape (1,); NaN and inf propagate; 0 when empty."""
    return _amax(x.detach())


def scale_from_amax(amax: torch.Tensor, cast: Cast) -> torch.Tensor:
    """The scale for each FP32 amax: same shape, finite, positive."""
    return _scale_from_amax(amax, cast.format, cast.scale_kind == "pow2", cast.margin)


def _run(x, cast, scale, amax, amax_out, key, both):
    if x.dim() != 2:
        raise ValueError(f"quantize: x has {x.dim()} dimensions; flatten it to two")
    return _quantize(
        x.detach(),
        scale,
        amax,
        amax_out,
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
    codes, scale = _run(x, cast, scale, amax, amax_out, key, False)
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
    out = _run(x, cast, scale, amax, amax_out, key, True)
    grain = cast.granularity
    return Quantized(out[0], out[1], grain), Quantized(out[2], out[-1 if len(out) > 3 else 1], grain)


def transpose(q: Quantized) -> Quantized:
    """The transposed value, exactly. Raises ValueError for "row" and "group" (new scales needed)."""
    if q.granularity == "tensor":
        return Quantized(_transpose_codes(q.codes), q.scale, "tensor")
    if q.granularity == "block":
        return Quantized(_transpose_codes(q.codes), q.scale.t().contiguous(), "block")
    raise ValueError(
        f"transpose: {q.granularity!r} scales run along K only; use quantize_both on the values"
    )


def quantize_int8(x: torch.Tensor, group: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """x_MK as int8 codes [M, K] and BF16 scales [M, ceil(K/group)]: storage, never a GEMM operand.

    A group with a non-finite element gets scale NaN: all of it comes back as NaN.
    """
    codes, scale = _quantize_int8(x.detach(), group)
    return codes, scale


def dequantize_int8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """codes * scale, computed in FP32 and rounded to `dtype`."""
    return _dequantize_int8(codes, scale, group, dtype)
