"""RMSNorm and LayerNorm whose backward needs only the codes of their output.

Forward, FP32 inside: h = x + residual (rounded to its dtype), x_hat = (h - mean) * rstd (RMSNorm:
mean = 0), y = x_hat * weight + bias; RMSNorm rounds x_hat to the dtype of h first, as Hugging Face
does. The amax of y comes along, so that y can be cast without another pass.

Backward keeps no input: x_hat = (y - bias) / weight, from the codes of y. Where |weight| is below
2^-10 of the largest |weight|, y says nothing about x_hat: there x_hat is taken as 0, so that column
gets no grad_weight and loses the x_hat term of grad_x. `hides_columns` tells; a plan leaves a norm
that has such columns when the plan is made as it is. A bias much larger than weight costs precision
in the same way.
grad_weight and grad_bias add up in a fixed order: the same bits every run.

Shapes: x_MH, y_MH, rstd_M; codes_MH with scale (1,), [M, 1] or [M, ceil(H/128)] (any strides), or
scale None where y itself was kept. H features of one row, M rows.
"""

from __future__ import annotations

import functools

import torch

from ..numerics.formats import BLOCK
from .codes import converts_fp8, decode, encode, magnitude_bits, scale_of
from .op import operator, tl, triton
from .scale import ref_amax

LEAST_WEIGHT = 2.0**-10  # of the largest |weight|; below it x_hat cannot be read from y


def hides_columns(weight_H: torch.Tensor) -> bool:
    """Whether a norm with this weight has columns whose x_hat its output does not tell. Waits."""
    size = weight_H.float().abs()
    return bool((size <= size.amax() * LEAST_WEIGHT).any())


# ---- reference: the specification and the CPU path ----


def ref_norm(x, weight, bias, eps, residual, center, out_dtype):
    h = x if residual is None else x + residual
    h32 = h.float()
    if center:
        h32 = h32 - h32.mean(1, keepdim=True)
    rstd = torch.rsqrt(h32.square().mean(1) + eps)
    y = h32 * rstd[:, None]
    if not center:
        y = y.to(h.dtype).float()
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y.to(out_dtype or x.dtype)
    return y, (x.new_empty(0) if residual is None else h), rstd, ref_amax(y)


def ref_norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h, center, out_dtype):
    grad, x_hat = grad_y.float(), codes.float()
    if scale is not None:
        per_group = scale.dim() == 2 and scale.shape[1] > 1
        spread = scale.float()
        if per_group:
            spread = spread.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        x_hat = x_hat * spread
    if bias is not None:
        x_hat = x_hat - bias.float()
    grad_x_hat = grad
    if weight is not None:
        w = weight.float()
        known = w.abs() > w.abs().amax() * LEAST_WEIGHT
        x_hat = torch.where(known, x_hat * (1.0 / torch.where(known, w, 1.0)), 0.0)
        grad_x_hat = grad * w
    grad_x = grad_x_hat - x_hat * (grad_x_hat * x_hat).mean(1, keepdim=True)
    if center:
        grad_x = grad_x - grad_x_hat.mean(1, keepdim=True)
    grad_x = grad_x * rstd[:, None]
    if grad_h is not None:
        grad_x = grad_x + grad_h.float()
    grad_x = grad_x.to(_grad_dtype(grad_y, grad_h, out_dtype))
    empty = grad.new_empty(0)
    return (
        grad_x,
        empty if weight is None else (grad * x_hat).sum(0),
        empty.clone() if bias is None else grad.sum(0),
        ref_amax(grad_x),
    )


def _grad_dtype(grad_y, grad_h, out_dtype):
    return out_dtype or (grad_y if grad_h is None else grad_h).dtype


# ---- Triton ----


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, y, h, rstd, amax, past, codes, code_scale, eps, M, H,
    CENTER: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program does ROWS whole rows, WIDE >= H columns at once. past: None, or an int32 magnitude
    known before, whose scale gives the codes of y beside it."""
    seen = tl.load(amax)  # early: it is here by the time it is needed
    m, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (m < M)[:, None] & (k < H)[None, :]
    at = m.to(tl.int64)[:, None] * H + k[None, :]
    v = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        r = tl.load(residual + at, mask=inside, other=0.0)
        v = (v.to(tl.float32) + r.to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + at, v, mask=inside)
    x_hat = v.to(tl.float32)
    if CENTER:
        mean = tl.sum(x_hat, 1) / H
        x_hat = tl.where(inside, x_hat - mean[:, None], 0.0)
    r_std = tl.math.rsqrt(tl.sum(x_hat * x_hat, 1) / H + eps)
    tl.store(rstd + m, r_std, mask=m < M)
    x_hat = x_hat * r_std[:, None]
    if not CENTER:
        x_hat = x_hat.to(v.dtype).to(tl.float32)
    if weight is not None:
        x_hat *= tl.load(weight + k, mask=k < H, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        x_hat += tl.load(bias + k, mask=k < H, other=0.0).to(tl.float32)[None, :]
    out = x_hat.to(y.dtype.element_ty)
    tl.store(y + at, out, mask=inside)
    if past is not None:
        s = scale_of(tl.load(past), E4M3, POW2, MARGIN)
        tl.store(code_scale, s, mask=tl.program_id(0) == 0)
        c = encode(out.to(tl.float32) * tl.div_rn(1.0, s), E4M3, HARDWARE)
        # Eight contiguous elements a thread for bytes too, so that all operands have one layout.
        at = tl.max_contiguous(at, [1, min(WIDE, 8)])
        tl.store(codes + at, c, mask=inside)
    bits = tl.where(inside, magnitude_bits(out.to(tl.float32)), 0)
    raise_amax(amax, seen, tl.max(tl.max(bits, 1), 0))


@triton.jit
def raise_amax(amax, seen, top):
    """Raise the int32 magnitude at `amax` to `top`. Most programs find a larger one `seen` (the
    value there some time before) and are spared the atomic."""
    tl.atomic_max(amax, top, mask=top > seen, sem="relaxed")


@triton.jit
def _norm_backward_kernel(
    grad_y, codes, scale, weight, bias, rstd, grad_h, grad_x, amax, weight_parts, bias_parts, M, H,
    scale_stride_m, scale_stride_k,
    KIND: tl.constexpr, NATIVE: tl.constexpr, PER_GROUP: tl.constexpr, CENTER: tl.constexpr,
    LEAST: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program does every n-th block of ROWS rows and leaves its own sums for weight and bias."""
    k = tl.arange(0, WIDE)
    top = tl.zeros([ROWS], tl.int32)
    if weight is not None:
        w = tl.load(weight + k, mask=k < H, other=0.0).to(tl.float32)
        known = tl.abs(w) > tl.max(tl.abs(w), 0) * LEAST
        inverse = tl.where(known, 1.0 / tl.where(known, w, 1.0), 0.0)
        grad_w = tl.zeros([ROWS, WIDE], tl.float32)
    if bias is not None:
        b = tl.load(bias + k, mask=k < H, other=0.0).to(tl.float32)
        grad_b = tl.zeros([ROWS, WIDE], tl.float32)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        m = block * ROWS + tl.arange(0, ROWS)
        inside = (m < M)[:, None] & (k < H)[None, :]
        # Eight contiguous elements a thread for bytes too, so that all operands have one layout.
        at = tl.max_contiguous(m.to(tl.int64)[:, None] * H + k[None, :], [1, min(WIDE, 8)])
        grad = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(codes + at, mask=inside, other=0)
        if KIND == "values":
            x_hat = c.to(tl.float32)
        elif not NATIVE:
            x_hat = decode(c, KIND == "e4m3")
        elif KIND == "e4m3":
            x_hat = c.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            x_hat = c.to(tl.float8e5, bitcast=True).to(tl.float32)
        if scale is not None:
            first = scale + m.to(tl.int64) * scale_stride_m
            if PER_GROUP:
                s = tl.load(
                    first[:, None] + (k // GROUP)[None, :] * scale_stride_k, mask=inside, other=0.0
                )
                x_hat *= s.to(tl.float32)
            else:
                x_hat *= tl.load(first, mask=m < M, other=0.0).to(tl.float32)[:, None]
        if bias is not None:
            x_hat -= b[None, :]
            grad_b += grad
        r_std = tl.load(rstd + m, mask=m < M, other=0.0)
        if weight is not None:
            x_hat *= inverse[None, :]
            grad_w += grad * x_hat
            grad *= w[None, :]
        out = grad - x_hat * (tl.sum(grad * x_hat, 1) / H)[:, None]
        if CENTER:
            out -= (tl.sum(grad, 1) / H)[:, None]
        out *= r_std[:, None]
        if grad_h is not None:
            out += tl.load(grad_h + at, mask=inside, other=0.0).to(tl.float32)
        out = out.to(grad_x.dtype.element_ty)
        tl.store(grad_x + at, out, mask=inside)
        # Past the edge there are zeros, or a NaN where the row has one.
        top = tl.maximum(top, tl.max(magnitude_bits(out.to(tl.float32)), 1))
    tl.atomic_max(amax, tl.max(top, 0), sem="relaxed")
    mine = tl.program_id(0).to(tl.int64) * H + k
    if weight is not None:
        tl.store(weight_parts + mine, tl.sum(grad_w, 0), mask=k < H)
    if bias is not None:
        tl.store(bias_parts + mine, tl.sum(grad_b, 0), mask=k < H)


# ---- Triton wrappers: same arguments and results as the references ----

_TILE = 4096  # elements of a tile: 16 a thread, so that 16 warps of them fit an SM's registers


def _tile(cols: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of the tile that one program holds."""
    if cols > 65536:
        raise ValueError(f"norm: {cols} features; at most 65536 fit one program")
    wide = triton.next_power_of_2(cols)
    rows = min(max(_TILE // wide, 1), 16)
    return rows, wide, min(max(rows * wide // 512, 1), 16 if wide <= 16384 else 32)


def triton_norm(x, weight, bias, eps, residual, center, out_dtype, cast=None):
    """As `ref_norm`; cast: (past, codes uint8, scale, amax, format, pow2, margin) to fill as well."""
    M, H = x.shape
    x, y = x.contiguous(), torch.empty(M, H, dtype=out_dtype or x.dtype, device=x.device)
    h = x.new_empty(0)
    if residual is not None:
        residual = residual.contiguous()
        h = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    past, codes, scale, amax, format, pow2, margin = cast or (None,) * 7
    amax = torch.zeros(1, dtype=torch.float32, device=x.device) if amax is None else amax
    if x.numel():
        rows, wide, warps = _tile(H)
        _norm_kernel[(triton.cdiv(M, rows),)](
            x, residual, weight, bias, y, h, rstd, amax.view(torch.int32),
            None if past is None else past.view(torch.int32), codes, scale, eps, M, H,
            CENTER=center, E4M3=format == "e4m3", POW2=bool(pow2), MARGIN=margin or 0,
            HARDWARE=converts_fp8(x.device), ROWS=rows, WIDE=wide, num_warps=warps,
        )  # fmt: skip
    return y, h, rstd, amax


@functools.cache
def _device_facts(device: torch.device) -> tuple[int, bool]:
    """(multiprocessors, whether FP8 conversion is an instruction)."""
    if device.type != "cuda":
        return 2, False
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, (facts.major, facts.minor) >= (8, 9)


def triton_norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h, center, out_dtype):
    M, H = grad_y.shape
    device = grad_y.device
    if grad_y.numel() == 0:
        return ref_norm_backward(
            grad_y, codes, scale, weight, bias, rstd, grad_h, center, out_dtype
        )
    grad_x = torch.empty(M, H, dtype=_grad_dtype(grad_y, grad_h, out_dtype), device=device)
    processors, native = _device_facts(device)
    rows, wide, warps = _tile(H)
    programs = min(triton.cdiv(M, rows), processors * max(16 // warps, 1))
    amax = torch.zeros(1, dtype=torch.float32, device=device)
    parts = [
        None if p is None else torch.empty(programs, H, dtype=torch.float32, device=device)
        for p in (weight, bias)
    ]
    kind = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(codes.dtype, "values")
    codes = codes.contiguous() if kind == "values" else codes.contiguous().view(torch.uint8)
    per_row = scale is not None and scale.dim() == 2
    per_group = per_row and scale.shape[1] > 1
    _norm_backward_kernel[(programs,)](
        grad_y.contiguous(), codes, scale, weight, bias, rstd,
        None if grad_h is None else grad_h.contiguous(), grad_x, amax.view(torch.int32), *parts, M, H,
        scale.stride(0) if per_row else 0, scale.stride(1) if per_row else 0,
        KIND=kind, NATIVE=native, PER_GROUP=per_group, CENTER=center,
        LEAST=LEAST_WEIGHT, GROUP=BLOCK, ROWS=rows, WIDE=wide,
        STAGES=2 if per_group else 3, num_warps=warps, maxnreg=128 if warps <= 16 else None,
    )  # fmt: skip
    sums = [grad_y.new_empty(0, dtype=torch.float32) if p is None else p.sum(0) for p in parts]
    return grad_x, *sums, amax


# ---- operators ----


def _fake_norm(x, weight, bias, eps, residual, center, out_dtype):
    rows, _ = x.shape
    h = x.new_empty(0)
    if residual is not None:
        h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    return y, h, x.new_empty(rows, dtype=torch.float32), x.new_empty(1, dtype=torch.float32)


def _fake_norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h, center, out_dtype):
    cols = grad_y.shape[1]
    return (
        grad_y.new_empty(grad_y.shape, dtype=_grad_dtype(grad_y, grad_h, out_dtype)),
        grad_y.new_empty(0 if weight is None else cols, dtype=torch.float32),
        grad_y.new_empty(0 if bias is None else cols, dtype=torch.float32),
        grad_y.new_empty(1, dtype=torch.float32),
    )


_norm = operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, bool center, "
    "ScalarType? out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=ref_norm,
    fake=_fake_norm,
    cuda=triton_norm,
)
_norm_backward = operator(
    "norm_backward(Tensor grad_y, Tensor codes, Tensor? scale, Tensor? weight, Tensor? bias, "
    "Tensor rstd, Tensor? grad_h, bool center, ScalarType? out_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=ref_norm_backward,
    fake=_fake_norm_backward,
    cuda=triton_norm_backward,
)


def rms_norm(x, weight, eps, residual=None, *, out_dtype=None):
    """(y, h, rstd, amax) of x_MH; weight_H or None; h = x + residual_MH (empty without residual).

    y is `out_dtype` (default: the dtype of x), h the wider of x and residual, rstd_M and the amax
    of y (1,) are FP32. A NaN or infinity in y shows in amax.
    """
    return _norm(x, weight, None, eps, residual, False, out_dtype)


def layer_norm(x, weight, bias, eps, residual=None, *, out_dtype=None):
    """(y, h, rstd, amax) as `rms_norm`, with the mean taken out; weight_H and bias_H may be None."""
    return _norm(x, weight, bias, eps, residual, True, out_dtype)


def rms_norm_backward(grad_y, codes, scale, weight, rstd, grad_h=None, *, out_dtype=None):
    """(grad_x_MH, grad_weight_H FP32, amax of grad_x (1,) FP32) from the codes of y and their scale
    (None: y itself).

    grad_h_MH, the gradient that reached h past the norm, is added: grad_x is then the gradient of
    x and of the residual. grad_x is `out_dtype` (default: that of grad_h, else of grad_y).
    grad_weight is empty without a weight.
    """
    grad_x, grad_weight, _, amax = _norm_backward(
        grad_y, codes, scale, weight, None, rstd, grad_h, False, out_dtype
    )
    return grad_x, grad_weight, amax


def layer_norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h=None, *, out_dtype=None):
    """(grad_x_MH, grad_weight_H, grad_bias_H FP32, amax of grad_x) as `rms_norm_backward`."""
    return _norm_backward(grad_y, codes, scale, weight, bias, rstd, grad_h, True, out_dtype)
