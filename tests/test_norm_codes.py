"""Norms that give codes beside their output: the same output, and the codes that a cast of it gives."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ottava.kernels import norm, norm_codes
from ottava.kernels.cast import quantize
from ottava.layers import norm as norm_layer
from ottava.layers.linear import Linear
from ottava.layers.norm import LayerNorm, RMSNorm
from ottava.layers.saved import carried_by
from ottava.numerics.formats import error_db
from ottava.numerics.recipe import Cast

IMPLEMENTATIONS = {
    "reference": (norm_codes.ref_norm_codes, norm.ref_norm),
    "triton": (norm_codes.triton_norm_codes, norm.triton_norm),
}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def kernels(request):
    return IMPLEMENTATIONS[request.param]


def casting(cast):
    return cast.format, cast.scale_kind == "pow2", cast.margin


@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 129), (2, 2048)], ids=str)
def test_output_and_codes(kernels, shape, dtype, center, device):
    run, plain = kernels
    x, residual = (torch.randn(shape).to(dtype).to(device) for _ in range(2))
    weight = torch.rand(shape[1], device=device) + 0.5
    bias = torch.randn(shape[1], device=device) if center else None
    for cast, r in ((Cast(), residual), (Cast(format="e5m2", scale_kind="pow2", margin=1), None)):
        y, h, rstd, amax = plain(x, weight, bias, 1e-5, r, center, None)
        past, found = amax * 0.9, torch.full((1,), 1e-3, device=device)
        got = run(x, weight, bias, 1e-5, r, center, past, found, *casting(cast))
        assert torch.equal(got[0], y) and torch.equal(got[1], h) and torch.equal(got[2], rstd)
        want = quantize(y, cast, amax=past)
        assert torch.equal(got[3].view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got[4], want.scale) and torch.equal(found, amax)
        got = run(x, weight, bias, 1e-5, r, center, past, None, *casting(cast))
        assert torch.equal(got[3].view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_rows_stay_visible(kernels, bad, device):
    x, one = torch.randn(5, 40, device=device), torch.ones(1, device=device)
    x[2, 3] = bad
    found = torch.zeros(1, device=device)
    *_, codes, scale = kernels[0](
        x, None, None, 1e-5, None, False, 4 * one, found, *casting(Cast())
    )
    assert codes.float()[2].isnan().any() and codes.float()[[0, 1, 3, 4]].isfinite().all()
    assert scale.isfinite() and not found.isfinite()


def test_empty_refused_and_fakes(device):
    x, one = torch.randn(0, 24, device=device), torch.ones(1, device=device)
    for run, _ in IMPLEMENTATIONS.values():
        assert run(x, None, None, 1e-5, x, False, one, None, *casting(Cast()))[3].shape == (0, 24)
    with pytest.raises(ValueError, match="to nearest only"):
        norm_codes.norm_codes(x, None, None, 1e-5, None, one, Cast(granularity="row"), center=False)
    x, w = torch.randn(3, 24, device=device), torch.ones(24, device=device)
    for residual in (None, x):
        args = (x, w, None, 1e-5, residual, False, one, None, *casting(Cast()))
        real = norm_codes._norm_codes(*args)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fake = norm_codes._norm_codes(*fake)
        assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_delayed_norms_make_their_codes_in_one_pass(kind, monkeypatch):
    module, reader = kind(64, recipe="delayed"), Linear(64, 32, recipe="delayed")
    both = torch.nn.ModuleList([module, reader])
    opt = torch.optim.SGD(both.parameters(), lr=0.0)
    plain = torch.nn.RMSNorm if kind is RMSNorm else torch.nn.LayerNorm
    exact = plain(64, eps=module.eps).double()
    passes, tops = [], []
    make = norm_layer.norm_codes
    monkeypatch.setattr(norm_layer, "norm_codes", lambda *a, **k: passes.append(1) or make(*a, **k))
    for step in range(3):
        x = (step + 1.0) * torch.randn(24, 64)
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        y, grad = module(a), torch.randn(24, 64)
        carried = carried_by(y, module.recipe.input)
        top = max(tops, default=y.abs().max())
        want = quantize(y.detach(), module.recipe.input, amax=torch.tensor([float(top)]))
        assert torch.equal(carried.rows.codes.view(torch.uint8), want.codes.view(torch.uint8))
        tops.append(float(y.abs().max()))
        assert module._history.pending[0] == tops[-1]
        reader(y)
        y.backward(grad)
        exact(b).backward(grad.double())
        assert error_db(b.grad, a.grad) > 27.0
        opt.step()
    assert len(passes) == 2
    assert module._history.amax[0, :3].tolist() == tops[::-1]
