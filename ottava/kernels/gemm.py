"""The FP8 matrix product: a_MK @ b_NK^T from codes and scales, on the FP8 unit where there is one.

Both operands are K-major, the only layout Hopper takes. Sizes that the unit refuses are padded with
zero codes (+0 in both formats), which change nothing: K and N to 16; for groups K to 128, M to 4.
Where a device has no unit for a pair of granularities the same thing is computed from dequantized
operands ("emulated", see `gemm_path`): FP32 on the CPU, BF16 with FP32 accumulation on CUDA.
Granularities: tensor x tensor, row x row, group x block, group x group.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from .cast import Quantized, spread
from .codes import ref_decode
from .op import calls, operator

PAIRS = (("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group"))


@functools.cache
def has_fp8_unit(device: torch.device | str) -> bool:
    """Whether `device` multiplies FP8 natively (CUDA compute capability 8.9 or newer)."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def gemm_path(device: torch.device | str, granularity: str) -> str:
    """ "native" or "emulated": how `device` multiplies a left operand of this granularity.

    Scales per 1 x 128 group run natively on compute capability 9.0 only.
    """
    if not has_fp8_unit(device):
        return "emulated"
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "native" if granularity != "group" or hopper else "emulated"


def ref_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_grain: str,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_grain: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    a_value, b_value = ref_decode(a), ref_decode(b)
    if a_grain == "group":
        a_value = a_value * spread(a_scale, a_grain, *a.shape)
        b_value = b_value * spread(b_scale, b_grain, *b.shape)
        out = a_value @ b_value.t()
    else:
        # Scales after the product: the codes' products are exact in FP32.
        out = (a_value @ b_value.t()) * a_scale * b_scale.t()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _pad(codes: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """codes with zero codes up to multiples of `rows` and `cols`."""
    down, right = -codes.shape[0] % rows, -codes.shape[1] % cols
    if not down and not right:
        return codes
    return F.pad(codes.view(torch.uint8), (0, right, 0, down)).view(codes.dtype)


def _emulated_cuda(a, a_scale, a_grain, b, b_scale, b_grain):
    """FP32 product of the values; codes are exact in BF16, so row and tensor scales come after."""
    if a_grain == "group":
        a = Quantized(a, a_scale, a_grain).dequantize(torch.bfloat16)
        b = Quantized(b, b_scale, b_grain).dequantize(torch.bfloat16)
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    out = torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
    return out.mul_(a_scale).mul_(b_scale.t())


def _group_scales(scale: torch.Tensor, grain: str, rows: int) -> torch.Tensor:
    """Scales as cuBLASLt reads them: outer dimension first for groups [rows, k] with strides
    (1, rows); for blocks [k rounded up to 4, n] with strides (1, that)."""
    if grain == "block":
        return F.pad(scale, (0, -scale.shape[1] % 4)).t()
    if rows != scale.shape[0]:
        scale = F.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0)
    return scale.t().contiguous().t()


def _native_groups(a, a_scale, b, b_scale, b_grain, out_dtype):
    a, b = _pad(a, 4, 128), _pad(b, 16, 128)
    kind = F.ScalingType.BlockWise128x128 if b_grain == "block" else F.ScalingType.BlockWise1x128
    return F.scaled_mm(
        a,
        b.t(),
        _group_scales(a_scale, "group", a.shape[0]),
        F.ScalingType.BlockWise1x128,
        _group_scales(b_scale, b_grain, b.shape[0]),
        kind,
        output_dtype=out_dtype,
    )


def cuda_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_grain: str,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_grain: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    rows, cols = a.shape[0], b.shape[0]
    if bias is not None and bias.dtype is not out_dtype:
        bias = bias.to(out_dtype)
    if not (rows and cols and a.shape[1]):
        out = a.new_zeros(rows, cols, dtype=out_dtype)
    elif gemm_path(a.device, a_grain) == "emulated":
        out = _emulated_cuda(a, a_scale, a_grain, b, b_scale, b_grain)
        return (out if bias is None else out.add_(bias)).to(out_dtype)
    elif a_grain == "group":
        out = _native_groups(a, a_scale, b, b_scale, b_grain, out_dtype)
    else:
        a, b = _pad(a, 1, 16), _pad(b, 16, 16)
        # cuBLASLt wants scales at 16-byte addresses; a slice of a longer tensor may not be at one.
        a_scale, b_scale = (s if s.data_ptr() % 16 == 0 else s.clone() for s in (a_scale, b_scale))
        b_scale = b_scale.t()
        extra = b.shape[0] - cols
        if extra and a_grain == "row":
            b_scale = F.pad(b_scale, (0, extra), value=1.0)
        inside = bias if out_dtype is not torch.float32 else None
        if inside is not None:
            inside, bias = F.pad(inside, (0, extra)) if extra else inside, None
        out = torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_scale,
            scale_b=b_scale,
            bias=inside,
            out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )
    if out.shape != (rows, cols):
        out = out[:rows, :cols].contiguous()
    return out if bias is None else out.add_(bias)


def _fake_gemm(a, a_scale, a_grain, b, b_scale, b_grain, bias, out_dtype, fast_accum):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


_gemm = operator(
    "gemm(Tensor a, Tensor a_scale, str a_grain, Tensor b, Tensor b_scale, str b_grain, "
    "Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=ref_gemm,
    cuda=cuda_gemm,
    fake=_fake_gemm,
    counted=True,
)


def fp8_gemms() -> int:
    """How many FP8 products (single and grouped, native or emulated) have run in this process; of
    Transformer Engine's those of forwards."""
    return calls["gemm"] + calls["grouped_gemm"] + calls["transformer_engine"]


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """a_MK @ b_NK^T as [M, N] in `out_dtype`, plus bias_N.

    Raises ValueError for e5m2 x e5m2 and for granularities or sizes that do not go together, on
    every device alike.
    """
    if a.codes.dtype is b.codes.dtype is torch.float8_e5m2:
        raise ValueError("gemm: e5m2 x e5m2 is refused by FP8 matrix units; cast one to e4m3")
    if (a.granularity, b.granularity) not in PAIRS:
        raise ValueError(
            f"gemm: {a.granularity} x {b.granularity} is not one of "
            + ", ".join(f"{p} x {q}" for p, q in PAIRS)
        )
    if a.granularity == "group" and torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype):
        raise ValueError("gemm: FP8 units take e4m3 only under 1 x 128 and 128 x 128 scales")
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"gemm: K differs: {tuple(a.codes.shape)} @ {tuple(b.codes.shape)}^T")
    return _gemm(
        a.codes,
        a.scale,
        a.granularity,
        b.codes,
        b.scale,
        b.granularity,
        bias,
        out_dtype,
        fast_accum,
    )
