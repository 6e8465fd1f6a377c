"""Joined GEMM operands: the scales they share, the codes, and the sum of products that they give."""

import math

import pytest
import torch

from ottava.kernels import joined
from ottava.kernels.cast import amax as amax_of
from ottava.kernels.cast import quantize, scale_from_amax, transpose
from ottava.kernels.gemm import gemm
from ottava.numerics.formats import E5M2, error_db
from ottava.numerics.recipe import Cast

GRAD, WEIGHT = Cast(format="e5m2"), Cast(scale_kind="pow2")
CASTS = {"cuda": joined.triton_quantize_joined, "reference": joined.ref_quantize_joined}
WIDTHS = [(64,), (130, 7), (129, 1, 48)]


def case(rows, widths, spread=1.0, dtype=torch.float32):
    parts = [(torch.randn(rows, n) * spread**i).to(dtype) for i, n in enumerate(widths)]
    scales = [torch.tensor([2.0 ** -(8 + 3 * i)]) for i in range(len(widths))]
    return parts, [amax_of(x) for x in parts], scales


def arguments(cast, both=True, amax_out=()):
    return list(amax_out), cast.format, cast.scale_kind == "pow2", cast.margin, both


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_is_the_reference_bit_for_bit(widths, rows, dtype, device):
    for cast in (GRAD, Cast(scale_kind="pow2", margin=1)):
        parts, amaxes, scales = case(rows, widths, 0.01, dtype)
        parts, amaxes, scales = ([t.to(device) for t in ts] for ts in (parts, amaxes, scales))
        for both in (True, False):
            outs = []
            for run in CASTS.values():
                found = torch.zeros(len(parts), device=device)
                out = run(parts, amaxes, scales, *arguments(cast, both, found.split(1)))
                assert torch.equal(found, torch.cat(amaxes))
                outs.append([t.view(torch.uint8) for t in out])
            assert len(outs[0]) == (3 + len(parts) if both else 2)
            assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_equal_weights_and_one_part_are_a_plain_cast():
    parts, amaxes, _ = case(40, (48, 64))
    for chosen in (parts[:1], parts):
        scale = [torch.tensor([0.25])] * len(chosen)
        rows, cols = joined.quantize_joined(chosen, amaxes[: len(chosen)], scale, GRAD)
        whole = quantize(torch.cat(chosen, 1), GRAD)
        assert torch.equal(rows.codes.view(torch.uint8), whole.codes.view(torch.uint8))
        assert torch.equal(rows.scale, whole.scale)
        for x, q in zip(chosen, cols, strict=True):
            alone = transpose(quantize(x, GRAD))
            assert torch.equal(q.codes.view(torch.uint8), alone.codes.view(torch.uint8))
            assert torch.equal(q.scale, alone.scale)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
def test_products_add_up_in_one_gemm(spread):
    """Every part is as precise as alone, though weights and gradients differ in size."""
    parts, amaxes, _ = case(96, (64, 32, 16), spread)
    weights = [torch.randn(x.shape[1], 80) * 10.0**-i for i, x in enumerate(parts)]
    codes = [quantize(w, WEIGHT) for w in weights]
    rows, cols = joined.quantize_joined(parts, amaxes, [q.scale for q in codes], GRAD)
    got = gemm(rows, joined.join_transposed(codes), out_dtype=torch.float32)
    alone = sum(
        gemm(quantize(x, GRAD), transpose(q), out_dtype=torch.float32)
        for x, q in zip(parts, codes, strict=True)
    )
    want = sum(x.double() @ w.double() for x, w in zip(parts, weights, strict=True))
    assert error_db(want, got) > min(error_db(want, alone) - 0.5, E5M2.gemm_db + 1)
    for x, q in zip(parts, cols, strict=True):
        assert error_db(x, q.dequantize().t()) > E5M2.cast_db
    for a, q in zip(amaxes, cols, strict=True):
        assert torch.equal(q.scale, scale_from_amax(a, GRAD))


@pytest.mark.parametrize("run", CASTS.values(), ids=CASTS)
def test_zero_and_non_finite_parts_have_no_say(run, device):
    parts, amaxes, scales = case(40, (16, 32))
    parts, amaxes, scales = ([t.to(device) for t in ts] for ts in (parts, amaxes, scales))
    alone = run(parts[:1], amaxes[:1], scales[:1], *arguments(GRAD))
    for bad in (0.0, math.nan, math.inf):
        part = torch.zeros(40, 32, device=device)
        part[3, 5] = bad
        out = run([parts[0], part], [amaxes[0], amax_of(part)], scales, *arguments(GRAD))
        assert torch.equal(out[1], alone[1])
        assert torch.equal(out[0][:, :16].view(torch.uint8), alone[0].view(torch.uint8))
        value = out[0][3, 21].float().item()
        assert value == bad or (math.isnan(value) and math.isnan(bad))
    zeros = [torch.zeros_like(p) for p in parts]
    out = run(zeros, [amax_of(z) for z in zeros], scales, *arguments(GRAD))
    assert (out[0].float() == 0).all() and torch.isfinite(out[1]) and out[1] > 0


@pytest.mark.parametrize("shapes", [[(64, 48)], [(130, 33), (7, 33)], [(16, 1), (1, 1), (300, 1)]])
def test_weights_join_exactly(shapes, device):
    codes = [quantize(torch.randn(s), WEIGHT).codes.to(device) for s in shapes]
    want = torch.cat([c.view(torch.uint8) for c in codes]).t()
    for run in (joined.triton_join_transposed, joined.ref_join_transposed):
        out = run(codes, 0)
        assert out.is_contiguous() and torch.equal(out.view(torch.uint8), want)


@pytest.mark.parametrize("rows", [128, 384])
def test_weights_join_in_turns(rows, device):
    codes = [quantize(torch.randn(rows, 50), WEIGHT).codes.to(device) for _ in range(2)]
    each = [c.view(torch.uint8).split(128) for c in codes]
    want = torch.cat([part for turn in zip(*each, strict=True) for part in turn]).t()
    for run in (joined.triton_join_transposed, joined.ref_join_transposed):
        assert torch.equal(run(codes, 128).view(torch.uint8), want)
    whole = [quantize(torch.randn(n, 50), WEIGHT) for n in (128, 256, 256)]
    with pytest.raises(ValueError, match="have one shape"):
        joined.join_transposed(whole[:2], 128)
    with pytest.raises(ValueError, match="256 rows in turns of 96"):
        joined.join_transposed(whole[1:], 96)


def test_empty_and_refused():
    parts, amaxes, scales = case(4, (16, 16))
    none = [p[:0] for p in parts]
    for run in CASTS.values():
        out = run(none, [amax_of(p) for p in none], scales, *arguments(GRAD))
        assert out[0].shape == (0, 32) and out[2].shape == (32, 0)
    for cast in (Cast(granularity="row"), Cast(rounding="stochastic")):
        with pytest.raises(ValueError, match="per tensor, to nearest"):
            joined.quantize_joined(parts, amaxes, scales, cast)
    with pytest.raises(ValueError, match="at most 3"):
        joined.quantize_joined(parts * 2, amaxes * 2, scales * 2, GRAD)


def test_fakes_are_like_the_real_outputs():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for both in (True, False):
        parts, amaxes, scales = case(5, (16, 3))
        real = joined._quantize_joined(parts, amaxes, scales, *arguments(GRAD, both))
        with FakeTensorMode() as mode:
            fakes = [[mode.from_tensor(t) for t in ts] for ts in (parts, amaxes, scales)]
            fake = joined._quantize_joined(*fakes, *arguments(GRAD, both))
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [
            (t.shape, t.dtype, t.stride()) for t in fake
        ]
        assert len({t.untyped_storage().data_ptr() for t in real}) == len(real)
