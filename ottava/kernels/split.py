"""Split master weights: the bits a GEMM reads, and a residual that makes them a master weight.

Codes split (FP8 GEMM weights): the magnitude of w / scale is a float with the exponents of e4m3
and 3 + R mantissa bits (R = 8 or 16 residual bits). Read as an integer M it counts such numbers in
order, so  M = (code << R) + residual  and carries, binades and subnormals need no special case.
M stands for the middle of its cell (M = 0 for exactly 0): no master ever lies half-way between
two codes, so the code *is* the nearest e4m3 of the master, whatever rounds ties, and the error is
at most half a cell: 2**-12 of w for R = 8, 2**-20 for R = 16 (2**(-10 - R) * scale below e4m3's
normal range). scale is a power of two: dividing by it is exact.

BF16 split (every other weight): M is the FP32 magnitude cut to 8 + R bits, exact for R = 16, and
the code is the nearest BF16 (ties up). R = 8 keeps 16 significant bits.

Given up: 2 or 3 bytes hold no more than 12 or 20 bits, so updates are rounded stochastically
(unbiased, but for the one cell at a power of two, where the cells change size).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..numerics.recipe import Cast
from .op import operator, tl, triton
from .scale import amax as amax_of
from .scale import scale_from_amax

NAN_CODE = 0x7F
# |w / scale| may reach 464 before the nearest code is no longer 448: amax within this factor of
# 448 * scale does not need the next scale.
SLACK = 1.0 - 2.0**-11


# ---- reference: the specification, and the CPU path ----


def ref_encode_codes(
    x: torch.Tensor, bits: int, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(code uint8, residual int32) of FP32 x = w / scale. random: ints in [0, 2**(20 - bits))."""
    drop = 20 - bits
    # e4m3's exponents fall on FP32's lowest ones, and its subnormals on FP32's: no case for them.
    a = (x.abs() * 2.0**-120).view(torch.int32)
    m = a.clamp(max=(0x7E8 << 16) - 1)  # |x| = 464 and more: the last cell of code 448
    if random is not None:
        m = (m + (random.to(torch.int32) - (1 << (drop - 1)))).clamp(0, (0x7E8 << 16) - 1)
    code = (m + 0x80000) >> 20
    residual = (m >> drop) - (code << bits)
    bad = a >= 0x7F800000
    code = torch.where(bad, NAN_CODE, code) | ((x.view(torch.int32) >> 24) & 0x80)
    return code.to(torch.uint8), residual.masked_fill_(bad, 0)


def ref_decode_codes(code: torch.Tensor, residual: torch.Tensor, bits: int) -> torch.Tensor:
    """FP32 w / scale of (code uint8, residual)."""
    drop = 20 - bits
    c = code.int()
    # Sign and magnitude to the top, then down to FP32's lowest exponents.
    f = ((c << 24) >> 4) & -0x78100000
    f = f + (residual.int() << drop) + (1 << (drop - 1))
    y = f.view(torch.float32) * 2.0**120
    y = torch.where(y.abs() > 1.5 * 2.0 ** (-10 - bits), y, y * 0.0)
    return torch.where(c & 0x7F == NAN_CODE, torch.nan, y)


def ref_encode_bf16(
    w: torch.Tensor, bits: int, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(BF16 as int16 bits, residual int32) of FP32 w. random: ints in [0, 2**(16 - bits))."""
    f = w.view(torch.int32)
    m = f & 0x7FFFFFFF
    m = torch.where(m > 0x7F800000, 0x7FC00000, m)
    if bits < 16:
        step = random.to(torch.int32) if random is not None else 1 << (15 - bits)
        m = torch.where(m < 0x7F800000, m + step, m) >> (16 - bits)
    code = (m + (1 << (bits - 1))) >> bits
    residual = m - (code << bits)
    return (code | torch.where(f < 0, -0x8000, 0)).to(torch.int16), residual


def ref_decode_bf16(code: torch.Tensor, residual: torch.Tensor, bits: int) -> torch.Tensor:
    """FP32 of (BF16 as int16 bits, residual)."""
    c = code.int()
    m = ((c & 0x7FFF) << 16) + (residual.int() << (16 - bits))
    return torch.where(c < 0, m | -0x80000000, m).view(torch.float32)


def ref_unpack_split(
    codes: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    bits = 8 * residual.element_size()
    if scale is None:
        return ref_decode_bf16(codes.view(torch.int16), residual, bits).to(dtype)
    return (ref_decode_codes(codes.view(torch.uint8), residual, bits) * scale).to(dtype)


# ---- Triton device functions, twins of the above ----


@triton.jit
def encode_codes(x, random, BITS: tl.constexpr):
    """(code, residual, magnitude) int32 of FP32 x = w / scale, |x| < 464 or not finite.

    random: int32 in [0, 2**(20 - BITS)). code and residual: low 8 and BITS bits count. magnitude:
    the bits of |x| * 2**-120, in the order of |x|, NaN on top; undone by `amax_of_magnitude`.
    """
    DROP: tl.constexpr = 20 - BITS
    # e4m3's exponents fall on FP32's lowest ones, and its subnormals on FP32's: no case for them.
    a = (tl.abs(x) * 2.0**-120).to(tl.int32, bitcast=True)
    # What is not finite becomes the NaN code with residual 0.
    m = tl.minimum(a, 0x7F00000 + (1 << (DROP - 1)))
    m = tl.maximum(m + (random - (1 << (DROP - 1))), 0)
    code = ((m + 0x80000) >> 20) & 0x7F
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80), m >> DROP, a


@triton.jit
def amax_of_magnitude(top, scale):
    """FP32 amax of w from the largest `magnitude` of w / scale."""
    return top.to(tl.float32, bitcast=True) * 2.0**120 * scale


@triton.jit
def decode_codes(code, residual, BITS: tl.constexpr):
    """FP32 w / scale of (uint8 code, int8 or int16 residual); the NaN code reads as 480."""
    DROP: tl.constexpr = 20 - BITS
    # Sign and magnitude to the top, then down to FP32's lowest exponents (0x87f00000).
    f = ((code.to(tl.int32) << 24) >> 4) & -0x78100000
    f = f + (residual.to(tl.int32) << DROP) + (1 << (DROP - 1))
    y = f.to(tl.float32, bitcast=True) * 2.0**120
    return tl.where(tl.abs(y) > 1.5 * 2.0 ** (-10 - BITS), y, 0.0)


@triton.jit
def encode_bf16(w, random, BITS: tl.constexpr):
    """(BF16 bits, residual) int32 of FP32 w; random: int32 in [0, 2**(16 - BITS))."""
    f = w.to(tl.int32, bitcast=True)
    m = f & 0x7FFFFFFF
    m = tl.where(m > 0x7F800000, 0x7FC00000, m)
    if BITS < 16:
        m = tl.where(m < 0x7F800000, m + random, m) >> (16 - BITS)
    code = (m + (1 << (BITS - 1))) >> BITS
    return code | ((f >> 16) & 0x8000), m


@triton.jit
def decode_bf16(code, residual, BITS: tl.constexpr):
    """FP32 of (int16 BF16 bits, int8 or int16 residual)."""
    # The code's magnitude is at least 1 where the residual is negative: the sign stays.
    f = (code.to(tl.int32) << 16) + (residual.to(tl.int32) << (16 - BITS))
    return f.to(tl.float32, bitcast=True)


@triton.jit
def _unpack_kernel(
    codes, residual, scale, out, n, per_scale,
    BITS: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    c = tl.load(codes + offs, mask=mask, other=0)
    r = tl.load(residual + offs, mask=mask, other=0)
    if CODES:
        w = decode_codes(c, r, BITS) * tl.load(scale + offs // per_scale, mask=mask, other=1.0)
        w = tl.where((c & 0x7F) == 0x7F, float("nan"), w)
    else:
        w = decode_bf16(c, r, BITS)
    tl.store(out + offs, w.to(out.dtype.element_ty), mask=mask)


def triton_unpack_split(
    codes: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    n, block = codes.numel(), 2048
    if n:
        raw = codes.view(torch.int16 if scale is None else torch.uint8)
        per_scale = n if scale is None else n // scale.numel()
        _unpack_kernel[(triton.cdiv(n, block),)](
            raw, residual, out if scale is None else scale, out, n, per_scale,
            BITS=8 * residual.element_size(), CODES=scale is not None, BLOCK=block,
        )  # fmt: skip
    return out


_unpack = operator(
    "unpack_split(Tensor codes, Tensor residual, Tensor? scale, ScalarType dtype) -> Tensor",
    reference=ref_unpack_split,
    fake=lambda codes, residual, scale, dtype: torch.empty(
        codes.shape, dtype=dtype, device=codes.device
    ),
    cuda=triton_unpack_split,
)


# ---- public ----


@dataclass(frozen=True, slots=True)
class Split:
    """A packed weight. codes: e4m3 (scale given) or BF16 (scale None), the shape of the weight."""

    codes: torch.Tensor
    residual: torch.Tensor  # int8 or int16, the shape of the weight
    scale: torch.Tensor | None  # fp32 power of two: (1,), or [E, 1, 1] for 3-D expert weights


def pack_split(
    w: torch.Tensor,
    scale: torch.Tensor | None,
    residual_bits: int,
    random: torch.Tensor | None = None,
) -> Split:
    """Pack FP32 `w`. scale: power of two that broadcasts against w, or None for a BF16 split.

    Rounds to the nearest cell, or stochastically with `random` (int32 per element in
    [0, 2**(20 - residual_bits)), 16 instead of 20 for BF16). ValueError for other residual_bits.
    """
    if residual_bits not in _RESIDUAL_DTYPES:
        raise ValueError(f"residual_bits: {residual_bits} is not 8 or 16")
    w = w.contiguous()
    if scale is None:
        code, residual = ref_encode_bf16(w, residual_bits, random)
        code = code.view(torch.bfloat16)
    else:
        code, residual = ref_encode_codes(w / scale, residual_bits, random)
        code = code.view(torch.float8_e4m3fn)
    return Split(code, residual.to(_RESIDUAL_DTYPES[residual_bits]), scale)


def unpack_split(
    codes: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The master weight of a split, computed in FP32 and rounded to `dtype`."""
    return _unpack(codes, residual, scale, dtype)


def weight_amax(w: torch.Tensor) -> torch.Tensor:
    """FP32 amax of a weight: (1,), or one per leading index (E,) where w is 3-D."""
    return w.flatten(1).abs().amax(1).float() if w.dim() == 3 and w.numel() else amax_of(w)


def shape_scale(scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A scale per leading index as [E, 1, 1], so that it broadcasts against a 3-D weight."""
    return scale.view(-1, 1, 1) if w.dim() == 3 else scale


class _SplitMeta(type(nn.Parameter)):
    """Fake parameters cannot change class, so `isinstance` also reads a mark on the tensor."""

    def __instancecheck__(cls, instance) -> bool:
        return super().__instancecheck__(instance) or (
            isinstance(instance, torch.Tensor) and getattr(instance, "_is_split", False)
        )


class SplitParameter(nn.Parameter, metaclass=_SplitMeta):
    """A parameter whose data are the codes of a split master weight.

    `.data`: e4m3 codes, or BF16 for a weight that no FP8 GEMM reads. `.residual`: int8 or int16 of
    the same shape. `.scale`: FP32 power of two, (1,) or [E, 1, 1] (None for BF16). `.cast`: the
    numerics Cast it follows (None for BF16). `.amax`: FP32 (1,) or (E,), the master's amax.
    Gradients on it are BF16.
    """

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The master weight in `dtype`. RuntimeError if a `.to()` tore codes and residual apart."""
        kind = _SPLIT_DTYPES[self.scale is None]
        if self.residual.device != self.device or self.dtype is not kind:
            raise RuntimeError(
                f"split weight: codes are {self.dtype} on {self.device}, the residual is on "
                f"{self.residual.device}: move or cast the model before building the optimizer"
            )
        return unpack_split(self.data, self.residual, self.scale, dtype)

    def write(self, w: torch.Tensor) -> None:
        """Make `w` (any float dtype) the master weight: new codes, residual, scale and amax."""
        store_split(self, w)

    def copy_(self, w: torch.Tensor, non_blocking: bool = False) -> SplitParameter:
        """What `load_state_dict` calls with the plain values of a checkpoint: `write`. E4M3 values
        are taken for codes, and copied as they are."""
        if w.dtype is torch.float8_e4m3fn and not isinstance(w, SplitParameter):
            return super().copy_(w, non_blocking)
        self.write(w.dequantize() if isinstance(w, SplitParameter) else w)
        return self

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            args = (t.clone() if isinstance(t, torch.Tensor) else t for t in _fields(self))
            memo[id(self)] = _rebuild(*args)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _rebuild, _fields(self)


_SPLIT_DTYPES = (torch.float8_e4m3fn, torch.bfloat16)
_RESIDUAL_DTYPES = {8: torch.int8, 16: torch.int16}
_CHUNK = 1 << 24


def _fields(p: SplitParameter) -> tuple:
    # As bytes: plain pickle does not know float8.
    codes = p.detach().view(torch.int16 if p.scale is None else torch.uint8)
    return codes, p.residual, p.scale, p.amax, p.cast, p.requires_grad


def _rebuild(codes, residual, scale, amax, cast, requires_grad) -> SplitParameter:
    codes = codes.view(torch.bfloat16 if scale is None else torch.float8_e4m3fn)
    p = nn.Parameter(codes, requires_grad=requires_grad)
    return adopt_split(p, Split(codes, residual, scale), amax, cast)


def adopt_split(
    p: nn.Parameter, split: Split, amax: torch.Tensor | None, cast: Cast | None
) -> SplitParameter:
    """Turn `p`, in place, into the SplitParameter that holds `split`. Returns p."""
    p.data = split.codes
    if type(p) is FakeTensor:
        p._is_split = True
        p.dequantize = lambda dtype=torch.float32: SplitParameter.dequantize(p, dtype)
    else:
        p.__class__ = SplitParameter
    p.residual, p.scale, p.amax, p.cast = split.residual, split.scale, amax, cast
    if cast is not None:
        p._ottava_cast = cast
        # Where the kernel counts finished programs [0] and gathers the next amax [1:]; zero at rest.
        p.work = torch.zeros(amax.numel() + 1, dtype=torch.int32, device=split.codes.device)
    else:
        p.work = None
    p.grad_dtype = torch.bfloat16
    return p


def split_parameter(p: nn.Parameter, residual_bits: int, cast: Cast | None) -> SplitParameter:
    """Turn a float parameter, in place, into a SplitParameter. Returns p.

    cast: its Cast where an FP8 GEMM reads the weight (e4m3, per tensor, pow2): the codes are then
    those the GEMM's own cast would make. None: a BF16 split. Any gradient on p is dropped.
    ValueError for a subclass of Parameter, which could not stay one.
    """
    if type(p) not in (nn.Parameter, SplitParameter, FakeTensor):
        raise ValueError(f"a {type(p).__name__} cannot become a split master; only a Parameter can")
    w = p.detach()
    amax = scale = None
    if cast is not None:
        amax = weight_amax(w)
        scale = shape_scale(scale_from_amax(amax, cast), w)
    split = Split(
        torch.empty(w.shape, dtype=_SPLIT_DTYPES[cast is None], device=w.device),
        torch.empty(w.shape, dtype=_RESIDUAL_DTYPES[residual_bits], device=w.device),
        scale,
    )
    _pack_into(split, w, residual_bits)
    p.grad = None
    return adopt_split(p, split, amax, cast)


def join_split(p: SplitParameter) -> nn.Parameter:
    """Turn a SplitParameter, in place, into a plain FP32 parameter of its master's value. Returns p;
    any gradient on it is dropped."""
    p.grad = None
    p.data = p.dequantize(torch.float32)
    for name in ("residual", "scale", "amax", "cast", "work", "_ottava_cast"):
        p.__dict__.pop(name, None)
    p.__class__ = nn.Parameter
    p.grad_dtype = torch.float32
    return p


def store_split(p: SplitParameter, w: torch.Tensor) -> None:
    """Write master weight `w` into an existing SplitParameter, keeping its tensors."""
    w = w.detach().to(p.device)
    if p.scale is not None:
        p.amax.copy_(weight_amax(w))
        p.scale.copy_(shape_scale(scale_from_amax(p.amax, p.cast), w))
    _pack_into(Split(p.data, p.residual, p.scale), w, 8 * p.residual.element_size())


def _pack_into(split: Split, w: torch.Tensor, residual_bits: int) -> None:
    """Pack `w` into the tensors of `split`, some rows at a time: packing takes 24 bytes an element."""
    rows = max(1, _CHUNK * w.shape[0] // max(1, w.numel())) if w.dim() else 1
    for start in range(0, w.shape[0] if w.dim() else 1, rows):
        at = slice(start, start + rows) if w.dim() else ...
        scale = split.scale
        if scale is not None and scale.dim() == 3:
            scale = scale[at]
        packed = pack_split(w[at].float(), scale, residual_bits)
        split.codes[at].copy_(packed.codes)
        split.residual[at].copy_(packed.residual)
        if type(w) is FakeTensor or w.is_meta:
            break  # no values, and every piece takes what the first one takes
