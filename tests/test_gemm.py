"""The FP8 matrix product against FP64, each pair of granularities, on the device of this session.

Limits are the formats' own (`gemm_db`). The CUDA path's padding, bias and scale layouts are also
checked here on the CPU: torch's CPU product takes tensor and row scales, and for groups a stand-in
checks the layout rules of the GPU library.
"""

import pytest
import torch

from ottava.kernels import gemm as gemm_module
from ottava.kernels.cast import Quantized, quantize
from ottava.kernels.gemm import PAIRS, cuda_gemm, gemm, gemm_path, has_fp8_unit
from ottava.numerics.formats import E4M3, E5M2, error_db
from ottava.numerics.recipe import Cast

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((64, 256, 48), (1, 16, 1), (7, 20, 5), (33, 130, 17), (3, 129, 2), (130, 17, 257))


def operands(m, k, n, pair, a_format="e4m3", device="cpu"):
    x, w = torch.randn(m, k), torch.randn(n, k)
    a = quantize(x.to(device), Cast(format=a_format, granularity=pair[0]))
    b = quantize(w.to(device), Cast(granularity=pair[1]))
    return x, w, a, b


def exact(a: Quantized, b: Quantized) -> torch.Tensor:
    """The product of what the codes mean, in FP64."""
    return a.dequantize().double() @ b.dequantize().double().t()


def least_db(dtype: torch.dtype) -> float:
    """Rounding alone: 10 log10(12 / eps^2) is its SQNR at worst for a number at the low end."""
    eps = torch.finfo(dtype).eps
    if eps < 2.0**-12:  # tensor cores keep about 13 bits of a sum: an H200 gives 77 to 80 dB
        return 74.0
    return 10 * torch.log10(torch.tensor(12.0 / eps**2)).item() - 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_error_belongs_to_the_format(pair, dtype, device):
    for fmt in (E4M3, E5M2) if pair[0] != "group" else (E4M3,):
        x, w, a, b = operands(96, 512, 80, pair, fmt.name, device)
        out = gemm(a, b, out_dtype=dtype)
        assert out.dtype is dtype and out.shape == (96, 80) and out.is_contiguous()
        assert error_db(x.double() @ w.double().t(), out.cpu()) >= fmt.gemm_db
        assert error_db(exact(a, b), out) >= least_db(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_any_size_and_bias(pair, shape, device):
    m, k, n = shape
    _, _, a, b = operands(m, k, n, pair, "e4m3" if pair[0] == "group" else "e5m2", device)
    bias = torch.randn(n, device=device)
    out = gemm(a, b, out_dtype=torch.bfloat16, bias=bias.bfloat16())
    assert out.shape == (m, n) and out.is_contiguous()
    want = exact(a, b) + bias.bfloat16().double()
    assert (out - want).abs().max() <= 2.0**-7 * want.abs().max()
    full = gemm(a, b, out_dtype=torch.float32, bias=bias)
    assert (full - exact(a, b) - bias).abs().max() <= 2.0**-11 * want.abs().max()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_zero_rows_give_exactly_the_bias(pair, device):
    x = torch.randn(32, 144, device=device)
    x[[5, 31]] = 0.0
    w = torch.randn(24, 144, device=device)
    w[3] = 0.0
    bias = torch.randn(24, device=device)
    b = quantize(w, Cast(granularity=pair[1]))
    out = gemm(quantize(x, Cast(granularity=pair[0])), b, out_dtype=torch.float32, bias=bias)
    assert torch.equal(out[[5, 31]], bias.expand(2, 24)) and torch.equal(
        out[:, 3], bias[3].expand(32)
    )
    assert out.isfinite().all()
    if pair[0] != "tensor":
        others = [i for i in range(32) if i not in (5, 31)]
        alone = gemm(quantize(x[others], Cast(granularity=pair[0])), b, out_dtype=torch.float32,
                     bias=bias)  # fmt: skip
        torch.testing.assert_close(out[others], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", (1, 3, 7, 8, 15, 17))
def test_tokens_as_inner_dimension_equal_zero_padded_ones(tokens, device):
    # grad_weight: the number of tokens is K, which the unit wants in sixteens.
    grad, x = torch.randn(tokens, 32, device=device), torch.randn(tokens, 48, device=device)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 32 - tokens)) for t in (grad, x)]
    outs = []
    for g, y in ((grad, x), padded):
        a = quantize(g.t(), Cast(format="e5m2"))
        outs.append(gemm(a, quantize(y.t(), Cast()), out_dtype=torch.float32))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-6)


def test_empty_sizes(device):
    for m, k, n in ((0, 16, 16), (4, 16, 0), (4, 0, 16)):
        _, _, a, b = operands(m, k, n, ("tensor", "tensor"), device=device)
        bias = torch.ones(n, device=device)
        out = gemm(a, b, out_dtype=torch.float32, bias=bias)
        assert torch.equal(out, bias.expand(m, n))


def test_nan_and_inf_stay_visible(device):
    x = torch.randn(16, 32, device=device)
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    w = torch.randn(16, 32, device=device)
    for fmt in ("e4m3", "e5m2"):
        out = gemm(quantize(x, Cast(format=fmt)), quantize(w, Cast()), out_dtype=torch.bfloat16)
        assert not out[[2, 4]].isfinite().any() and out[[0, 1, 3]].isfinite().all()


def test_refusals():
    _, _, a, b = operands(16, 32, 16, ("tensor", "tensor"), "e5m2")
    with pytest.raises(ValueError, match="e5m2 x e5m2"):
        gemm(a, a, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="K differs"):
        gemm(a, quantize(torch.randn(16, 48), Cast()), out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="row x tensor"):
        row = quantize(torch.randn(16, 32), Cast(granularity="row"))
        gemm(row, b, out_dtype=torch.bfloat16)


def test_paths():
    assert not has_fp8_unit("cpu") and gemm_path("cpu", "tensor") == "emulated"


def test_fake_matches_real(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        _, _, a, b = operands(7, 20, 5, ("row", "row"))
        out = gemm(a, b, out_dtype=torch.float16)
        assert out.shape == (7, 5) and out.dtype is torch.float16 and mode is not None


# ---- the CUDA path, exercised on the CPU ----


def _layout_checked_scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, *, output_dtype):
    """Stand-in for the GPU library: its layout rules for 1 x 128 and 128 x 128 scales."""
    (m, k), n = a.shape, b.shape[1]
    groups = k // 128
    assert a.is_contiguous() and b.t().is_contiguous()
    assert m % 4 == 0 and k % 128 == 0 and n % 16 == 0
    kind = torch.nn.functional.ScalingType
    assert a_kind == kind.BlockWise1x128
    assert a_scale.shape == (m, groups) and a_scale.stride(0) == 1
    assert a_scale.stride(1) == m or groups == 1
    a_value = a.float() * a_scale.repeat_interleave(128, 1)
    if b_kind == kind.BlockWise128x128:
        high = -(-groups // 4) * 4
        assert b_scale.shape == (high, -(-n // 128)) and b_scale.stride(0) == 1
        assert b_scale.stride(1) == high or b_scale.shape[1] == 1
        spread = b_scale[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
    else:
        assert b_scale.shape == (n, groups) and b_scale.stride(0) == 1
        assert b_scale.stride(1) == n or groups == 1
        spread = b_scale.t().repeat_interleave(128, 0)
    return (a_value @ (b.float() * spread)).to(output_dtype)


def _scaled_mm_with_gpu_rules(a, b, **settings):
    assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
    assert a.is_contiguous() and b.t().is_contiguous()
    bias = settings["bias"]
    assert bias is None or bias.dtype is settings["out_dtype"] is not torch.float32
    scales = settings["scale_a"], settings["scale_b"]
    assert all(s.is_contiguous() for s in scales)
    if scales[0].numel() > 1:
        assert scales[0].shape == (a.shape[0], 1) and scales[1].shape == (1, b.shape[1])
    out = (a.float() @ b.float()) * scales[0] * scales[1]
    return (out if bias is None else out + bias).to(settings["out_dtype"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_cuda_path_pads_and_lays_out_as_the_library_asks(pair, dtype, monkeypatch):
    monkeypatch.setattr(gemm_module, "gemm_path", lambda device, granularity: "native")
    monkeypatch.setattr(gemm_module.F, "scaled_mm", _layout_checked_scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm_with_gpu_rules)
    for m, k, n in (*SHAPES, (5, 600, 300), (0, 16, 4), (4, 0, 16)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        a, b = quantize(x, Cast(granularity=pair[0])), quantize(w, Cast(granularity=pair[1]))
        for bias in (None, torch.randn(n), torch.randn(n).bfloat16()):
            out = cuda_gemm(
                a.codes, a.scale, a.granularity, b.codes, b.scale, b.granularity, bias, dtype, True
            )
            assert out.shape == (m, n) and out.dtype is dtype and out.is_contiguous()
            want = gemm(a, b, out_dtype=torch.float32, bias=bias)
            torch.testing.assert_close(out.float(), want, rtol=2.0**-7, atol=2.0**-4)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_cuda_emulation_equals_the_reference(pair, monkeypatch):
    # torch.mm with an output dtype exists on CUDA only.
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    _, _, a, b = operands(9, 200, 7, pair)
    bias = torch.randn(7)
    args = a.codes, a.scale, pair[0], b.codes, b.scale, pair[1], bias, torch.float32, False
    want = gemm(a, b, out_dtype=torch.float32, bias=bias)
    tolerance = 1e-5 if pair[0] != "group" else 2.0**-6  # groups: values rounded to BF16
    torch.testing.assert_close(cuda_gemm(*args), want, rtol=tolerance, atol=10 * tolerance)
