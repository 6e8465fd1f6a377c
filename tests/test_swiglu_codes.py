"""The gated activation's backward straight to codes: those of a cast of the plain backward's outputs."""

import math

import pytest
import torch

from ottava.kernels import swiglu_codes
from ottava.kernels.cast import quantize, transpose
from ottava.kernels.joined import ref_joined_scales
from ottava.kernels.swiglu import (
    ref_swiglu,
    ref_swiglu_backward,
    triton_swiglu,
    triton_swiglu_backward,
)
from ottava.numerics.formats import FORMATS, error_db
from ottava.numerics.recipe import Cast

GRAD, INPUT = Cast(format="e5m2"), Cast()
IMPLEMENTATIONS = {
    "reference": (
        swiglu_codes.ref_swiglu_backward_amax, swiglu_codes.ref_swiglu_backward_codes,
        ref_swiglu_backward,
    ),
    "triton": (
        swiglu_codes.triton_swiglu_backward_amax, swiglu_codes.triton_swiglu_backward_codes,
        triton_swiglu_backward,
    ),
}  # fmt: skip
SHAPES = [(1, 1), (3, 130), (33, 128), (35, 256), (40, 300)]


@pytest.fixture(params=list(IMPLEMENTATIONS))
def kernels(request):
    return IMPLEMENTATIONS[request.param]


def case(M, F, dtype, device, keep=True):
    gate, up, grad = (torch.randn(M, F).to(dtype).to(device) for _ in range(3))
    kept = ref_swiglu(gate, up, None, True)[2:] if keep else (gate, None, up, None)
    weights = [torch.tensor([2.0**-9], device=device), torch.tensor([2.0**-7], device=device)]
    return 0.01 * grad, kept, weights


def run(codes, grad, kept, amaxes, weights, grad_cast=GRAD, h_cast=INPUT, amax_out=(), over=False):
    """(rows, all of gate's first, and what `codes` returns)."""
    casts = [x for c in (grad_cast, h_cast) for x in (c.format, c.scale_kind == "pow2", c.margin)]
    M, F = grad.shape
    dtype = FORMATS[grad_cast.format].dtype
    rows = grad.view(dtype) if over else torch.empty(M, 2 * F, dtype=dtype, device=grad.device)
    cols, s_gate, s_up, *h = codes(grad, *kept, rows, amaxes, weights, list(amax_out), *casts)
    out = [cols, h[0], s_gate, s_up, h[1]] if h else [cols, s_gate, s_up]
    if swiglu_codes.interleaves(F):
        turns = rows.view(torch.uint8).view(M, -1, 2, 128)
        rows = turns.transpose(1, 2).reshape(M, 2 * F).view(dtype)
    return [rows, *out]


def same_codes(got, want):
    """Bit for bit; on a GPU two kernels may contract a product and a sum differently."""
    got, want = got.view(torch.uint8), want.view(torch.uint8)
    wrong = (got != want).float().mean().item()
    return got.shape == want.shape and wrong <= (1e-3 if got.is_cuda else 0.0)


@pytest.mark.parametrize("keep", [True, False], ids=["int8", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_a_cast_of_the_plain_backward(kernels, shape, dtype, keep, device):
    amax, codes, plain = kernels
    grad, kept, weights = case(*shape, dtype, device, keep)
    grad_gate, grad_up, h, found, _ = plain(grad, *kept, None, False)
    amaxes = amax(grad, *kept)
    assert torch.equal(amaxes, found)
    for grad_cast, h_cast in ((GRAD, INPUT), (Cast(scale_kind="pow2"), Cast(margin=1))):
        noted = torch.zeros(2, device=device)
        tops = list(amaxes.split(1))
        rows, cols, h_cols, s_gate, s_up, s_h = run(
            codes, grad, kept, tops, weights, grad_cast, h_cast, noted.split(1)
        )
        assert torch.equal(noted, found[:2])
        args = grad_cast.format, grad_cast.scale_kind == "pow2", grad_cast.margin
        assert torch.equal(torch.cat([s_gate, s_up]), ref_joined_scales(tops[:2], weights, *args))
        want_gate, want_up = (
            quantize(x, grad_cast, scale=s).codes for x, s in ((grad_gate, s_gate), (grad_up, s_up))
        )
        want = torch.cat([want_gate.view(torch.uint8), want_up.view(torch.uint8)], 1)
        assert same_codes(rows, want) and same_codes(cols, want.t())
        want = quantize(h, h_cast, amax=tops[2])
        assert torch.equal(want.scale, s_h) and same_codes(h_cols, transpose(want).codes)


FORWARD = {
    "reference": (swiglu_codes.ref_swiglu_codes, ref_swiglu),
    "triton": (swiglu_codes.triton_swiglu_codes, triton_swiglu),
}


@pytest.mark.parametrize("run,plain", FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_codes_are_a_cast_of_the_plain_forward(run, plain, shape, dtype, device):
    M, F = shape
    both = torch.randn(M, 2 * F).to(dtype).to(device)
    gate, up = both[:, :F], both[:, F:]  # strided rows
    h, amax, *kept = plain(gate, up, None, True)
    for cast in (INPUT, Cast(format="e5m2", scale_kind="pow2", margin=1)):
        past, found = amax * 0.9, torch.full((1,), 1e-9, device=device)
        args = past, found, cast.format, cast.scale_kind == "pow2", cast.margin
        codes, scale, *same = run(gate, up, *args, True)
        want = quantize(h, cast, amax=past)
        assert torch.equal(scale, want.scale) and torch.equal(found, amax)
        assert same_codes(codes, want.codes)
        assert all(torch.equal(a, b) for a, b in zip(same, kept, strict=True))
        bare = run(gate, up, past, None, *args[2:], False)
        assert same_codes(bare[0], codes) and all(t.numel() == 0 for t in bare[2:])


@pytest.mark.parametrize("name", ["ref", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_h_first_and_the_gradients_without_it(name, shape, device):
    """Two passes, each with what it makes anyway in the other order of things: the same bits."""
    amax, codes, _ = IMPLEMENTATIONS["reference" if name == "ref" else name]
    first = getattr(swiglu_codes, f"{name}_swiglu_backward_first")
    for dtype in (torch.float32, torch.bfloat16):
        grad, kept, weights = case(*shape, dtype, device)
        tops = amax(grad, *kept)
        want = run(codes, grad, kept, list(tops.split(1)), weights, h_cast=Cast(scale_kind="pow2"))
        found, h_cols, scale = first(grad, *kept, tops[2:], "e4m3", True, 0)
        assert torch.equal(found, tops[:2])
        assert same_codes(h_cols, want[2]) and torch.equal(scale, want[5])
        rows, cols, *scales = run(codes, grad, kept, list(found.split(1)), weights)
        assert same_codes(rows, want[0]) and same_codes(cols, want[1])
        assert all(torch.equal(a, b) for a, b in zip(scales, want[3:5], strict=True))


@pytest.mark.parametrize("shape", [(1, 128), (33, 256), (70, 384)], ids=str)
def test_rows_take_the_memory_of_grad_h(kernels, shape, device):
    amax, codes, _ = kernels
    grad, kept, weights = case(*shape, torch.bfloat16, device)
    tops = list(amax(grad, *kept).split(1))
    want = run(codes, grad.clone(), kept, tops, weights)
    got = run(codes, grad, kept, tops, weights, over=True)
    for a, b in zip(got[:3], want[:3], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    grad, kept, weights = case(*shape, torch.bfloat16, device)
    for x, over in ((grad, True), (grad.float(), False)):
        q = swiglu_codes.swiglu_backward_codes(x, kept, tops, weights, GRAD, INPUT, over=True).rows
        assert (q.codes.data_ptr() == x.data_ptr()) is over


def test_both_implementations_agree(device):
    """Their exponentials differ in the last place, so that a code may be the next one."""
    grad, kept, weights = case(70, 300, torch.float32, device)
    outs = []
    for amax, codes, _ in IMPLEMENTATIONS.values():
        outs.append(run(codes, grad, kept, list(amax(grad, *kept).split(1)), weights))
    for a, b in zip(outs[0][:3], outs[1][:3], strict=True):
        assert error_db(a.float(), b.float()) > 45
    for a, b in zip(outs[0][3:], outs[1][3:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_stay_visible(kernels, bad, device):
    amax, codes, _ = kernels
    grad, kept, weights = case(40, 130, torch.float32, device)
    grad[17, 129] = bad
    amaxes = amax(grad, *kept)
    assert not amaxes[:2].isfinite().any() and amaxes[2].isfinite()
    out = run(codes, grad, kept, list(amaxes.split(1)), weights)
    assert not out[0].float()[17, [129, 259]].isfinite().any()
    clean = [i for i in range(40) if i != 17]
    assert out[0].float()[clean].isfinite().all() and out[2].float().isfinite().all()
    assert all(torch.isfinite(s) and s > 0 for s in out[3:])


def test_a_scale_from_earlier_steps_saturates(kernels, device):
    _, codes, _ = kernels
    grad, kept, weights = case(33, 130, torch.float32, device)
    tops = [torch.full((1,), t, device=device) for t in (1e-4, 1e-4, 1e-2)]
    out = run(codes, grad, kept, tops, weights)
    assert out[0].float().abs().max() == 57344 and out[2].float().abs().max() == 448


def test_empty_refused_and_fakes(device):
    grad, kept, weights = case(0, 130, torch.float32, device)
    for forward, _ in FORWARD.values():
        one = torch.ones(1, device=device)
        assert forward(grad, grad, one, None, "e4m3", False, 0, True)[0].shape == (0, 130)
    for amax, codes, _ in IMPLEMENTATIONS.values():
        amaxes = amax(grad, *kept)
        out = run(codes, grad, kept, list(amaxes.split(1)), weights)
        assert (amaxes == 0).all() and [tuple(t.shape) for t in out[:3]] == [
            (0, 260), (260, 0), (130, 0)
        ]  # fmt: skip
    grad, kept, weights = case(5, 140, torch.float32, device)
    tops = swiglu_codes.swiglu_backward_amax(grad, *kept)
    out = swiglu_codes.swiglu_backward_codes(grad, kept, tops, weights, GRAD, INPUT)
    assert out.gate_cols.codes.shape == out.up_cols.codes.shape == (140, 5)
    assert out.gate_cols.codes.is_contiguous() and out.up_cols.codes.is_contiguous()
    with pytest.raises(ValueError, match="to nearest only"):
        swiglu_codes.swiglu_backward_codes(grad, kept, tops, weights, GRAD, Cast(granularity="row"))

    with pytest.raises(ValueError, match="to nearest only"):
        swiglu_codes.swiglu_codes(grad, grad, tops[0], Cast(rounding="stochastic"))

    from torch._subclasses.fake_tensor import FakeTensorMode

    casts = ("e5m2", False, 0, "e4m3", False, 0)
    rows = torch.empty(5, 280, dtype=torch.float8_e5m2, device=device)
    real = swiglu_codes._backward_codes(grad, *kept, rows, tops, weights, [], *casts)
    real = [*real, *swiglu_codes._codes(grad, grad, tops[0], None, "e4m3", False, 0, True)]
    real += swiglu_codes._backward_first(grad, *kept, tops[2], "e4m3", False, 0)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (grad, *kept, *tops, *weights, rows)]
        more = swiglu_codes._codes(fake[0], fake[0], fake[5], None, "e4m3", False, 0, True)
        more += swiglu_codes._backward_first(*fake[:5], fake[7], "e4m3", False, 0)
        fake = swiglu_codes._backward_codes(*fake[:5], fake[10], fake[5:8], fake[8:10], [], *casts)
        fake = [*fake, *more]
    assert [(t.shape, t.dtype, t.stride()) for t in real] == [
        (t.shape, t.dtype, t.stride()) for t in fake
    ]
