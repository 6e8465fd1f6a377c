"""What kernels.py checks and times: inputs, the public call, and the least work it must do.

Sizes are (M, H, F, V) or what a case says: M tokens, H hidden, F MLP width. `work` counts the bytes
that must cross memory once, or the FLOPs; whatever a kernel moves beyond that shows as lost share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import cast as casts
from ..kernels.attention import attention, attention_backward
from ..kernels.cast import Quantized
from ..kernels.gemm import gemm
from ..kernels.joined import quantize_joined
from ..kernels.loss import softmax_loss_
from ..kernels.norm import rms_norm, rms_norm_backward
from ..kernels.rope import rope
from ..kernels.swiglu import swiglu, swiglu_backward
from ..kernels.swiglu_codes import swiglu_backward_amax, swiglu_backward_codes
from ..numerics.recipe import Cast
from ..optim.adamw import AdamW

Tensors = dict[str, Any]  # the inputs, and what a case makes of them once
Size = tuple[int, ...]
BF16 = torch.bfloat16
TENSOR, ROW, GRAD = Cast(), Cast(granularity="row"), Cast(format="e5m2")
GROUP = Cast(granularity="group", scale_kind="pow2")
EXACT = 120.0  # dB: equal, or different in a few last bits of FP32
CLOSE = 45.0  # dB: BF16 outputs of sums taken in another order, codes next to a rounding edge


@dataclass(frozen=True)
class Case:
    """`bound`: "copy" (bytes), "bf16" or "fp8" (FLOPs): the ceiling that `work` is held against."""

    name: str
    make: Callable[[Size, torch.Generator], Tensors]
    call: Callable[[Tensors], tuple[Tensor, ...]]
    work: Callable[[Size], float]
    bound: str
    small: Size
    large: Size
    limit_db: float = CLOSE
    note: str = ""


def _randn(generator: torch.Generator, *shape: int, dtype=BF16) -> Tensor:
    # Random numbers for large inputs are few and repeated: making them must not take minutes.
    count = math.prod(shape)
    few = torch.randn(min(count, 1 << 20), generator=generator)
    return few.repeat(-(-count // few.numel()))[:count].view(shape).to(dtype)


def _matrix(size: Size, generator: torch.Generator) -> Tensors:
    x = _randn(generator, *size)
    return {"x": x, "scale": (x.float().abs().amax() / 448).view(1)}


def _codes(q: Quantized) -> tuple[Tensor, Tensor]:
    return q.codes, q.scale


def _quantize(t: Tensors) -> tuple[Tensor, ...]:
    return _codes(casts.quantize(t["x"], TENSOR, scale=t["scale"]))


def _both(t: Tensors) -> tuple[Tensor, ...]:
    rows, cols = casts.quantize_both(t["x"], TENSOR, scale=t["scale"])
    return *_codes(rows), cols.codes


def _both_of(cast: Cast) -> Callable[[Tensors], tuple[Tensor, ...]]:
    def call(t: Tensors) -> tuple[Tensor, ...]:
        rows, cols = casts.quantize_both(t["x"], cast)
        return *_codes(rows), *_codes(cols)

    return call


def _as_codes(size: Size, generator: torch.Generator) -> Tensors:
    return {"codes": _randn(generator, *size).to(torch.float8_e4m3fn)}


def _transpose(t: Tensors) -> tuple[Tensor, ...]:
    one = torch.ones(1, device=t["codes"].device)
    return (casts.transpose(Quantized(t["codes"], one, "tensor")).codes,)


def _int8(size: Size, generator: torch.Generator) -> Tensors:
    codes, scale = casts.quantize_int8(_randn(generator, *size))
    return {"codes": codes, "scale": scale}


def _norm_inputs(size: Size, generator: torch.Generator) -> Tensors:
    m, h = size
    weight = 1 + 0.1 * _randn(generator, h, dtype=torch.float32)
    return {
        "x": _randn(generator, m, h),
        "residual": _randn(generator, m, h),
        "weight": weight.to(BF16),
    }


def _norm(t: Tensors) -> tuple[Tensor, ...]:
    return rms_norm(t["x"], t["weight"], 1e-5, t["residual"])


def _norm_backward_inputs(size: Size, generator: torch.Generator) -> Tensors:
    t = _norm_inputs(size, generator)
    y, _, rstd, amax = rms_norm(t["x"], t["weight"], 1e-5)
    q = casts.quantize(y, TENSOR, amax=amax)
    grads = {k: _randn(generator, *size) for k in ("grad_y", "grad_h")}
    return {"codes": q.codes, "scale": q.scale, "weight": t["weight"], "rstd": rstd, **grads}


def _norm_backward(t: Tensors) -> tuple[Tensor, ...]:
    return rms_norm_backward(
        t["grad_y"], t["codes"], t["scale"], t["weight"], t["rstd"], t["grad_h"]
    )


def _swiglu_inputs(size: Size, generator: torch.Generator) -> Tensors:
    return {k: _randn(generator, *size) for k in ("gate", "up")}


def _swiglu(t: Tensors) -> tuple[Tensor, ...]:
    return tuple(swiglu(t["gate"], t["up"]))


def _swiglu_backward_inputs(size: Size, generator: torch.Generator) -> Tensors:
    gate, gate_scale = casts.quantize_int8(_randn(generator, *size))
    up, up_scale = casts.quantize_int8(_randn(generator, *size))
    grad = _randn(generator, *size)
    return {"grad": grad, "gate": gate, "gate_scale": gate_scale, "up": up, "up_scale": up_scale}


def _swiglu_backward(t: Tensors) -> tuple[Tensor, ...]:
    out = swiglu_backward(t["grad"], t["gate"], t["gate_scale"], t["up"], t["up_scale"])
    return tuple(out)[:6]


def _swiglu_amax(t: Tensors) -> tuple[Tensor, ...]:
    kept = (t[k] for k in ("grad", "gate", "gate_scale", "up", "up_scale"))
    return (torch.cat(swiglu_backward_amax(*kept)),)


def _swiglu_codes_inputs(size: Size, generator: torch.Generator) -> Tensors:
    amax, weights = torch.tensor([8.0, 8.0, 16.0]), torch.tensor([2.0**-9, 2.0**-8])
    return _swiglu_backward_inputs(size, generator) | {"amax": amax, "weights": weights}


def _swiglu_codes(t: Tensors) -> tuple[Tensor, ...]:
    kept = tuple(t[k] for k in ("gate", "gate_scale", "up", "up_scale"))
    scales = list(t["amax"].split(1)), list(t["weights"].split(1))
    out = swiglu_backward_codes(t["grad"], kept, *scales, GRAD, TENSOR)
    return tuple(q.codes for q in out)


def _parts(size: Size, generator: torch.Generator) -> Tensors:
    parts = {f"x{i}": 0.1**i * _randn(generator, *size) for i in range(3)}
    amax = torch.stack([x.float().abs().amax() for x in parts.values()])
    return parts | {"amax": amax, "weights": torch.tensor([2.0**-9, 2.0**-8, 2.0**-9])}


def _joined(t: Tensors) -> tuple[Tensor, ...]:
    parts, scales = (
        [t[f"x{i}"] for i in range(3)],
        [list(t[k].split(1)) for k in ("amax", "weights")],
    )
    rows, cols = quantize_joined(parts, *scales, GRAD)
    return rows.codes, *(q.codes for q in cols)


def _rope_inputs(size: Size, generator: torch.Generator) -> Tensors:
    length, width = size[1], size[3]
    angle = torch.outer(torch.arange(length).float(), torch.rand(width // 2, generator=generator))
    angle = torch.cat([angle, angle], 1)
    return {"x": _randn(generator, *size), "cos": angle.cos(), "sin": angle.sin()}


def _rope(t: Tensors) -> tuple[Tensor, ...]:
    return (rope(t["x"], t["cos"], t["sin"]),)


def _loss_inputs(size: Size, generator: torch.Generator) -> Tensors:
    targets = torch.randint(0, size[1], size[:1], generator=generator)
    return {"logits": _randn(generator, *size), "targets": targets}


def _loss(t: Tensors) -> tuple[Tensor, ...]:
    loss = softmax_loss_(t["logits"], t["targets"], -100, 0.0, True)
    return t["logits"], loss


def _adamw_inputs(size: Size, generator: torch.Generator) -> Tensors:
    return {"weight": 0.02 * _randn(generator, *size, dtype=torch.float32),
            "grad": 1e-3 * _randn(generator, *size)}  # fmt: skip


def _adamw(t: Tensors) -> tuple[Tensor, ...]:
    """One step; the optimizer of an input is built once, so that only the update is timed."""
    if "p" not in t:
        p = t["p"] = torch.nn.Parameter(t["weight"].to(BF16))
        p._ottava_cast = Cast(scale_kind="pow2")
        t["optimizer"] = AdamW([p], master="split16", states="8bit")
    p = t["p"]
    p.grad = t["grad"]
    t["optimizer"].step()
    return p.detach(), p.residual


def _gemm_inputs(size: Size, generator: torch.Generator) -> Tensors:
    m, n, k = size
    return {"a": _randn(generator, m, k), "b": _randn(generator, n, k)}


def _gemm_of(cast: Cast, weight: Cast, fast: bool) -> Callable[[Tensors], tuple[Tensor, ...]]:
    def call(t: Tensors) -> tuple[Tensor, ...]:
        if "a_q" not in t:  # operands are cast once, outside of what is timed
            for name, how in (("a", cast), ("b", weight)):
                q = casts.quantize(t[name], how)
                t[name + "_q"], t[name + "_s"] = q.codes, q.scale
        a = Quantized(t["a_q"], t["a_s"], cast.granularity)
        b = Quantized(t["b_q"], t["b_s"], weight.granularity)
        return (gemm(a, b, out_dtype=BF16, fast_accum=fast),)

    return call


def _gemm_flops(size: Size) -> float:
    m, n, k = size
    return 2.0 * m * n * k


def _attention_inputs(size: Size, generator: torch.Generator) -> Tensors:
    b, t, heads, groups, d, v = size
    out = {"q": _randn(generator, b, t, heads, d), "k": _randn(generator, b, t, groups, d)}
    return {
        **out,
        "v": _randn(generator, b, t, groups, v),
        "grad": _randn(generator, b, t, heads, v),
    }


def _attend(window: int | None) -> Callable[[Tensors], tuple[Tensor, ...]]:
    def call(t: Tensors) -> tuple[Tensor, ...]:
        scale = t["q"].shape[-1] ** -0.5
        return attention(t["q"], t["k"], t["v"], scale=scale, window=window)

    return call


def _attend_backward(window: int | None) -> Callable[[Tensors], tuple[Tensor, ...]]:
    def call(t: Tensors) -> tuple[Tensor, ...]:
        scale = t["q"].shape[-1] ** -0.5
        if "out" not in t:
            t["out"], t["lse"] = attention(t["q"], t["k"], t["v"], scale=scale, window=window)
        return attention_backward(
            t["grad"], t["q"], t["k"], t["v"], t["out"], t["lse"], scale=scale, window=window
        )[:3]

    return call


def _attention_flops(times: float, window: int | None = None) -> Callable[[Size], float]:
    def flops(size: Size) -> float:
        b, t, heads, _, d, v = size
        seen = t * (t + 1) / 2 if window is None else t * window
        return times * 2.0 * b * heads * seen * (d + v)

    return flops


def _bytes(per_element: float) -> Callable[[Size], float]:
    return lambda size: per_element * math.prod(size)


_X, _W1_X, _W1_F = (67, 300), (16384, 2048), (16384, 8192)
_LINEAR = (16384, 8192, 2048)
_HEADS, _W1_HEADS, _MIMO_HEADS = (
    (2, 96, 4, 2, 64, 64),
    (8, 2048, 16, 16, 128, 128),
    (1, 8192, 128, 8, 192, 128),
)
_WEIGHT = Cast(granularity="block", scale_kind="pow2")
CASES: tuple[Case, ...] = (
    Case("amax", _matrix, lambda t: (casts.amax(t["x"]),), _bytes(2), "copy", _X, _W1_F, EXACT),
    Case("cast, tensor", _matrix, _quantize, _bytes(3), "copy", _X, _W1_F, EXACT),
    Case("cast, tensor, both orders", _matrix, _both, _bytes(4), "copy", _X, _W1_F, EXACT),
    Case("cast, row", _matrix, lambda t: _codes(casts.quantize(t["x"], ROW)), _bytes(3), "copy", _X,
         _W1_F, EXACT),
    Case("cast, row, both orders", _matrix, _both_of(ROW), _bytes(4), "copy", _X, _W1_F, EXACT,
         "columns need their amax first: x is read twice"),
    Case("cast, 1x128, both orders", _matrix, _both_of(GROUP), _bytes(4), "copy", _X, _W1_F, EXACT),
    Case("cast, three joined, both orders", _parts, _joined, _bytes(12), "copy", _X, _W1_X, EXACT),
    Case("transpose codes", _as_codes, _transpose, _bytes(2), "copy", _X, _W1_F, EXACT),
    Case("int8 storage", _matrix, lambda t: casts.quantize_int8(t["x"]), _bytes(3), "copy", _X,
         _W1_F, CLOSE),
    Case("int8 back", _int8, lambda t: (casts.dequantize_int8(t["codes"], t["scale"], 128, BF16),),
         _bytes(3), "copy", _X, _W1_F, EXACT),
    Case("rms norm + residual", _norm_inputs, _norm, _bytes(8), "copy", _X, _W1_X),
    Case("rms norm backward", _norm_backward_inputs, _norm_backward, _bytes(7), "copy", _X, _W1_X),
    Case("swiglu", _swiglu_inputs, _swiglu, _bytes(8), "copy", _X, _W1_F),
    Case("swiglu backward", _swiglu_backward_inputs, _swiglu_backward, _bytes(10), "copy", _X, _W1_F),
    Case("swiglu backward, amaxes", _swiglu_backward_inputs, _swiglu_amax, _bytes(4), "copy", _X,
         _W1_F),
    Case("swiglu backward, codes", _swiglu_codes_inputs, _swiglu_codes, _bytes(9), "copy", _X,
         _W1_F, 40.0),
    Case("rope", _rope_inputs, _rope, _bytes(4), "copy", (2, 37, 3, 64), (8, 2048, 16, 128)),
    Case("softmax loss", _loss_inputs, _loss, _bytes(4), "copy", (50, 1000), (4096, 32000)),
    Case("adamw, split16, 8-bit", _adamw_inputs, _adamw, _bytes(10), "copy", (96, 160), (8192, 4096),
         40.0, "arithmetic and random bits, not only bytes"),
    Case("gemm, tensor, fast", _gemm_inputs, _gemm_of(TENSOR, TENSOR, True), _gemm_flops, "fp8",
         (50, 72, 96), _LINEAR),
    Case("gemm, tensor", _gemm_inputs, _gemm_of(TENSOR, TENSOR, False), _gemm_flops, "fp8",
         (50, 72, 96), _LINEAR),
    Case("gemm, row, fast", _gemm_inputs, _gemm_of(ROW, ROW, True), _gemm_flops, "fp8",
         (50, 72, 96), _LINEAR),
    Case("gemm, 1x128 x 128x128", _gemm_inputs, _gemm_of(GROUP, _WEIGHT, False), _gemm_flops, "fp8",
         (52, 256, 384), _LINEAR),
    Case("attention", _attention_inputs, _attend(None), _attention_flops(1), "bf16", _HEADS,
         _W1_HEADS, 40.0),
    Case("attention backward", _attention_inputs, _attend_backward(None), _attention_flops(2.5),
         "bf16", _HEADS, _W1_HEADS, 35.0),
    Case("attention, 192/128", _attention_inputs, _attend(None), _attention_flops(1), "bf16",
         (1, 96, 4, 2, 96, 64), _MIMO_HEADS, 40.0),
    Case("attention, window 128", _attention_inputs, _attend(128), _attention_flops(1, 128), "bf16",
         (1, 160, 4, 2, 96, 64), _MIMO_HEADS, 40.0, "bounded by bytes"),
    Case("attention backward, window 128", _attention_inputs, _attend_backward(128),
         _attention_flops(2.5, 128), "bf16", (1, 160, 4, 2, 96, 64), _MIMO_HEADS, 35.0,
         "bounded by bytes"),
)  # fmt: skip
