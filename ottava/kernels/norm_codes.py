"""RMSNorm and LayerNorm that give the codes of their output beside it, in one pass.

The scale must be known before: delayed scaling takes it from the amax of earlier steps. y, h and
rstd are those of norm.py, and the codes those of a cast of y, to nearest, under that scale.

Shapes: x_MH, y_MH, codes_MH, rstd_M; scale, past and amax_out (1,).
"""

from __future__ import annotations

import torch

from ..numerics.formats import FORMATS
from ..numerics.recipe import Cast
from .cast import Quantized
from .codes import ref_encode, ref_scale_from_amax
from .norm import ref_norm, triton_norm
from .op import operator
from .scale import ref_amax


def ref_norm_codes(
    x, weight, bias, eps, residual, center, past, amax_out, format, pow2, margin
) -> list[torch.Tensor]:
    y, h, rstd, _ = ref_norm(x, weight, bias, eps, residual, center, None)
    if amax_out is not None:
        torch.maximum(amax_out, ref_amax(y), out=amax_out)
    scale = ref_scale_from_amax(past, format, pow2, margin)
    return [y, h, rstd, ref_encode(y.float() * (1.0 / scale), format), scale]


def triton_norm_codes(
    x, weight, bias, eps, residual, center, past, amax_out, format, pow2, margin
) -> list[torch.Tensor]:
    if not x.numel():
        return ref_norm_codes(
            x, weight, bias, eps, residual, center, past, amax_out, format, pow2, margin
        )
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    cast = past, codes, scale, amax_out, format, pow2, margin
    y, h, rstd, _ = triton_norm(x, weight, bias, eps, residual, center, None, cast)
    return [y, h, rstd, codes.view(FORMATS[format].dtype), scale]


def _fake(x, weight, bias, eps, residual, center, past, amax_out, format, pow2, margin):
    h = x.new_empty(0)
    if residual is not None:
        h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    rstd, scale = (x.new_empty(n, dtype=torch.float32) for n in (x.shape[0], 1))
    codes = x.new_empty(x.shape, dtype=FORMATS[format].dtype)
    return [x.new_empty(x.shape), h, rstd, codes, scale]


_norm_codes = operator(
    "norm_codes(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, bool center, "
    "Tensor past, Tensor(a!)? amax_out, str format, bool pow2, int margin) -> Tensor[]",
    reference=ref_norm_codes,
    fake=_fake,
    cuda=triton_norm_codes,
)


def norm_codes(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    past: torch.Tensor,
    cast: Cast,
    *,
    center: bool,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Quantized]:
    """(y, h, rstd, codes of y) as `rms_norm`, or with `center` as `layer_norm`; h is empty without a
    residual. past: the amax that sets the scale. amax_out: raised to the amax of y.

    cast per tensor and to nearest; ValueError otherwise.
    """
    if cast.granularity != "tensor" or cast.rounding != "nearest":
        raise ValueError(f"norm_codes: per tensor and to nearest only: {cast}")
    y, h, rstd, codes, scale = _norm_codes(
        x, weight, bias, eps, residual, center, past, amax_out,
        cast.format, cast.scale_kind == "pow2", cast.margin,
    )  # fmt: skip
    return y, h, rstd, Quantized(codes, scale, "tensor")
