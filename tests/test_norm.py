"""RMSNorm and LayerNorm kernels: reference and Triton against FP64 autograd, every gradient.

Errors are measured against the natural size of a result (what its terms would be without
cancellation), so that one-column rows, whose gradients cancel to zero, are tests as well.
"""

import math

import pytest
import torch

from ottava.kernels import norm
from ottava.kernels.cast import quantize
from ottava.numerics.formats import E4M3
from ottava.numerics.recipe import Cast

IMPLEMENTATIONS = {
    "reference": (norm.ref_norm, norm.ref_norm_backward),
    "triton": (norm.triton_norm, norm.triton_norm_backward),
}
# Roundings of x_hat, y and the gradients to the dtype; Triton's interpreter truncates to BF16,
# which costs 6 dB against the hardware's rounding.
LEAST_DB = {torch.float32: 115.0, torch.float16: 62.0, torch.bfloat16: 39.0}
SHAPES = [(1, 1), (3, 1), (130, 7), (3, 129), (1, 2048), (130, 129)]


@pytest.fixture(params=list(IMPLEMENTATIONS))
def kernels(request):
    return IMPLEMENTATIONS[request.param]


def assert_close(name, value, expected, size, least_db):
    noise = (value.double().cpu() - expected).square().sum().item()
    signal = size.double().square().sum().item()
    db = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
    assert db >= least_db, f"{name}: {db:.1f} dB, at least {least_db} wanted"


def case(M, H, dtype, center, residual=True):
    x, w = torch.randn(M, H).to(dtype), (1 + 0.3 * torch.randn(H)).to(dtype)
    b = (0.2 * torch.randn(H)).to(dtype) if center else None
    r = torch.randn(M, H).to(dtype) if residual else None
    return x, w, b, r


def oracle(x, weight, bias, eps, residual, center, grad_y, grad_h=None):
    """(y, h, rstd, grad of h, grad_weight, grad_bias, natural size of the grad of h) in FP64."""
    h = x.double() if residual is None else x.double() + residual.double()
    leaves = [h] + [None if p is None else p.double() for p in (weight, bias)]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    h, w, b = leaves
    mean = h.mean(1, keepdim=True) if center else 0.0
    rstd = ((h - mean).square().mean(1) + eps).rsqrt()
    x_hat = (h - mean) * rstd[:, None]
    y = x_hat if w is None else x_hat * w
    y = y if b is None else y + b
    y.backward(grad_y.double())
    size = grad_y.double() * (1.0 if w is None else w.detach()) * rstd.detach()[:, None]
    grad = h.grad if grad_h is None else h.grad + grad_h.double()
    grads = [None if p is None else p.grad for p in (w, b)]
    return y.detach(), h.detach(), rstd.detach(), grad, *grads, size


@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", LEAST_DB, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(kernels, shape, dtype, center, device):
    forward, backward = kernels
    M, H = shape
    x, w, b, r = case(M, H, dtype, center, residual=M != 3)
    x[0], least = 0.0, LEAST_DB[dtype]
    grad_y, grad_h = torch.randn(M, H).to(dtype), torch.randn(M, H).to(dtype)
    to = [None if t is None else t.to(device) for t in (x, w, b, r, grad_y, grad_h)]
    y, h, rstd, amax = forward(*to[:3], 1e-3, to[3], center, None)
    seen = x if r is None else h.cpu()  # the oracle starts from h as rounded
    expected = oracle(seen, w, b, 1e-3, None, center, grad_y, grad_h)
    assert y.dtype == dtype and rstd.dtype == amax.dtype == torch.float32
    if r is None:
        assert h.numel() == 0
    else:
        assert h.dtype == dtype
        assert_close("h", h, x.double() + r.double(), x + r, least)
    assert_close("y", y, expected[0], expected[0].abs() + w.double().abs(), least)
    assert_close("rstd", rstd, expected[2], expected[2], 115)
    assert torch.equal(amax, y.float().abs().max().view(1))

    y = expected[0].to(dtype).to(device)
    y32 = expected[0].float().to(device)
    for kept, least_x in ((y32, least), (y, min(least, LEAST_DB[dtype]))):
        grads = backward(to[4], kept, None, *to[1:3], rstd, to[5], center, None)
        size = expected[6] + grad_h.double()
        assert_close("grad_x", grads[0], expected[3], size, least_x)
        assert grads[0].dtype == dtype and grads[1].dtype == torch.float32
        assert torch.equal(grads[3], grads[0].float().abs().max().view(1))
        if kept is y32:
            per_term = grad_y.double().norm(dim=0)
            assert_close("grad_weight", grads[1], expected[4], per_term, 110)
        if center:
            assert_close("grad_bias", grads[2], expected[5], grad_y.double().norm(dim=0), 110)
        else:
            assert grads[2].numel() == 0


@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("granularity", ["tensor", "row", "group"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_backward_from_codes(kernels, format, granularity, center, device):
    """Codes give what their values give, and the error against FP64 is that of the format."""
    forward, backward = kernels
    x, w, b, r = (None if t is None else t.to(device) for t in case(33, 300, torch.float32, center))
    y, h, rstd, _ = forward(x, w, b, 1e-6, r, center, None)
    grad_y = torch.randn(33, 300, device=device)
    q = quantize(y, Cast(format=format, granularity=granularity))
    got = backward(grad_y, q.codes, q.scale, w, b, rstd, None, center, None)
    same = backward(grad_y, q.dequantize(), None, w, b, rstd, None, center, None)
    for a, e in zip(got, same, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    if format == "e4m3":
        expected = oracle(h.cpu(), w.cpu(), None if b is None else b.cpu(), 1e-6, None, center,
                          grad_y.cpu())  # fmt: skip
        # A bias costs a little: the codes are of x_hat * weight + bias, larger than x_hat * weight.
        assert_close("grad_x", got[0], expected[3], expected[6], E4M3.cast_db - 0.5 * center)
        size = grad_y.cpu().double().norm(dim=0)
        assert_close("grad_weight", got[1], expected[4], size, E4M3.cast_db - 1.5 * center)


def test_scale_strides_and_odd_groups(kernels, device):
    """Scales may lie column by column, as a block-scaled GEMM wants them."""
    _, backward = kernels
    y, w = torch.randn(5, 200, device=device), torch.ones(200, device=device)
    q = quantize(y, Cast(granularity="group"))
    rstd, grad = torch.rand(5, device=device), torch.randn(5, 200, device=device)
    args = (w, None, rstd, None, False, None)
    plain = backward(grad, q.codes, q.scale, *args)
    strided = backward(grad, q.codes, q.scale.t().contiguous().t(), *args)
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))


@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
def test_weight_near_zero_gives_no_information(kernels, center, device):
    forward, backward = kernels
    x, w, b, _ = case(9, 40, torch.float32, center)
    w[3], w[5], w[7] = 0.0, w.abs().max() * 2.0**-11, w.abs().max() * 2.0**-9
    x, w = x.to(device), w.to(device)
    b = None if b is None else torch.zeros(40, device=device)
    y, _, rstd, _ = forward(x, w, b, 1e-6, None, center, None)
    grad = torch.randn(9, 40, device=device)
    grad_x, grad_w, *_ = backward(grad, y, None, w, b, rstd, None, center, None)
    expected = oracle(x.cpu(), w.cpu(), None, 1e-6, None, center, grad.cpu())
    assert grad_x.isfinite().all() and (grad_w[[3, 5]] == 0).all()
    known = [i for i in range(40) if i not in (3, 5)]
    torch.testing.assert_close(
        grad_w[known].cpu().double(), expected[4][known], rtol=1e-3, atol=1e-4
    )
    lost = (grad_x.cpu().double() - expected[3]).abs()
    assert lost[:, known].max() < 2.0**-10 * expected[6].abs().max() * 40
    zero = backward(
        grad, torch.zeros_like(y), None, torch.zeros_like(w), b, rstd, None, center, None
    )
    assert (zero[0] == 0).all() and (zero[1] == 0).all()


def test_without_weight(kernels, device):
    forward, backward = kernels
    x, grad = torch.randn(4, 33, device=device), torch.randn(4, 33, device=device)
    y, _, rstd, _ = forward(x, None, None, 1e-6, None, True, None)
    expected = oracle(x.cpu(), None, None, 1e-6, None, True, grad.cpu())
    assert_close("y", y, expected[0], expected[0], 115)
    grads = backward(grad, y, None, None, None, rstd, None, True, None)
    assert_close("grad_x", grads[0], expected[3], expected[6], 110)
    assert grads[1].numel() == grads[2].numel() == 0


def test_mixed_dtypes_and_out_dtype(kernels, device):
    """An FP32 residual stream with BF16 outputs: h stays FP32, y is what was asked for."""
    forward, backward = kernels
    x, r = torch.randn(5, 24, device=device).bfloat16(), torch.randn(5, 24, device=device)
    w = torch.ones(24, device=device)
    y, h, rstd, _ = forward(x, w, None, 1e-6, r, False, None)
    assert h.dtype == torch.float32 and y.dtype == torch.bfloat16
    torch.testing.assert_close(h, x.float() + r)
    assert forward(x, w, None, 1e-6, r, False, torch.float32)[0].dtype == torch.float32
    grad = torch.randn(5, 24, device=device).bfloat16()
    assert backward(grad, y, None, w, None, rstd, r, False, None)[0].dtype == torch.float32
    assert backward(grad, y, None, w, None, rstd, None, False, None)[0].dtype == torch.bfloat16
    out = backward(grad, y, None, w, None, rstd, None, False, torch.float32)[0]
    assert out.dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_shows_in_amax(kernels, bad, device):
    forward, backward = kernels
    x, w = torch.randn(20, 16, device=device), torch.ones(16, device=device)
    y, _, rstd, _ = forward(x, w, None, 1e-6, None, False, None)
    x[13, 5] = bad
    assert not forward(x, w, None, 1e-6, None, False, None)[3].isfinite().any()
    assert not backward(x, y, None, w, None, rstd, None, False, None)[3].isfinite().any()


def test_empty_strided_and_repeatable(kernels, device):
    forward, backward = kernels
    w = torch.randn(12, device=device)
    none = torch.randn(0, 12, device=device)
    y, _, rstd, amax = forward(none, w, None, 1e-6, None, False, None)
    assert y.shape == (0, 12) and amax.item() == 0.0
    grads = backward(none, y, None, w, None, rstd, None, False, None)
    assert (grads[1] == 0).all() and grads[1].shape == (12,)

    x = torch.randn(12, 40, device=device).t()
    a = forward(x, w, None, 1e-6, None, False, None)
    b = forward(x.contiguous(), w, None, 1e-6, None, False, None)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)
    grad = torch.randn(40, 1, device=device).expand(40, 12)
    runs = [backward(grad, a[0], None, w, None, a[2], None, False, None) for _ in range(2)]
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


def test_registered_operators(device):
    """Schema, fake outputs and public functions agree."""
    x, w, b = torch.randn(3, 10, device=device), torch.randn(10, device=device), None
    tests = ("test_schema", "test_faketensor")
    for residual in (None, x):
        args = (x, w, b, 1e-6, residual, False, torch.bfloat16)
        torch.library.opcheck(torch.ops.ottava.norm.default, args, test_utils=tests)
    y, _, rstd, _ = norm.layer_norm(x, w, w, 1e-6)
    q = quantize(y, Cast())
    args = (x, y, None, w, w, rstd, x, True, None)  # values: the checker cannot handle codes
    torch.library.opcheck(torch.ops.ottava.norm_backward.default, args, test_utils=tests)
    y, h, rstd, _ = norm.rms_norm(x, w, 1e-6, x)
    expected = torch.nn.functional.rms_norm(2 * x, (10,), w, 1e-6)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(h, 2 * x)
    assert len(norm.rms_norm_backward(x, y, None, w, rstd)) == 3
    assert len(norm.layer_norm_backward(x, q.codes, q.scale, w, w, rstd, x)) == 4
