"""Split masters: error over all mantissas, the code is the nearest FP8, nothing is lost on the way."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ottava.kernels import split
from ottava.kernels.cast import quantize, scale_from_amax
from ottava.kernels.random import ref_random_bits
from ottava.kernels.split import (
    SplitParameter,
    pack_split,
    ref_unpack_split,
    split_parameter,
    triton_unpack_split,
    unpack_split,
    weight_amax,
)
from ottava.layers.weights import weight_values
from ottava.numerics.recipe import Cast

POW2 = Cast(scale_kind="pow2")
ONE = torch.ones(1)


def bits(t):
    return t.view(torch.uint8) if t.element_size() == 1 else t


def equal(a, b):
    return torch.equal(bits(a), bits(b))


def all_mantissas(exponent):
    f = torch.arange(1 << 23, dtype=torch.int32) | ((127 + exponent) << 23)
    return f.view(torch.float32)


@pytest.mark.parametrize("residual_bits", [8, 16])
def test_error_over_all_mantissas(residual_bits):
    w = all_mantissas(-1)
    s = pack_split(w, ONE, residual_bits)
    master = unpack_split(s.codes, s.residual, s.scale)
    # Half a cell: 2**-(4 + bits) of the binade, reached by exact code values alone.
    assert ((master - w).abs() / w).max() <= 2.0 ** -(4 + residual_bits)
    assert equal(s.codes, master.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("residual_bits", [8, 16])
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**9])
def test_every_binade_and_subnormals(residual_bits, scale):
    x = torch.cat([all_mantissas(e)[::997] for e in range(-40, 8)] + [torch.tensor([448.0, 463.0])])
    w = torch.cat([x, -x]) * scale
    s = pack_split(w, torch.tensor([scale]), residual_bits)
    master = unpack_split(s.codes, s.residual, s.scale)
    normal = w.abs() >= 2.0**-6 * scale
    assert ((master - w).abs() / w.abs())[normal].max() <= 2.0 ** -(4 + residual_bits)
    # Below the normal range the cells are 2**-(9 + bits) wide; the one at zero reads as zero.
    assert (master - w).abs()[~normal].max() <= 2.0 ** -(9 + residual_bits) * scale
    assert equal(s.codes, (master / scale).to(torch.float8_e4m3fn))
    again = pack_split(master, s.scale, residual_bits)
    assert equal(again.codes, s.codes) and equal(again.residual, s.residual)


@pytest.mark.parametrize("residual_bits", [8, 16])
def test_code_is_nearest_of_master_for_every_code_and_residual(residual_bits):
    low = -(1 << (residual_bits - 1))
    residual = torch.arange(low, -low, 1 if residual_bits == 8 else 61)
    code = torch.arange(256).repeat_interleave(residual.numel())
    residual = residual.repeat(256)
    # Code 0 has no residual below 0, and code 0x7f (NaN) none at all.
    valid = ((code & 0x7F) < 0x7F) & ~(((code & 0x7F) == 0) & (residual < 0))
    code = code[valid].to(torch.uint8).view(torch.float8_e4m3fn)
    residual = residual[valid].to(torch.int8 if residual_bits == 8 else torch.int16)
    master = unpack_split(code, residual, ONE)
    top = master.abs() > 448.0  # torch's cast of these depends on its version; 448 is the nearest
    assert equal(master[~top].to(torch.float8_e4m3fn), code[~top])
    assert (master[top].abs() < 464.0).all() and (code[top].float().abs() == 448.0).all()
    s = pack_split(master, ONE, residual_bits)
    assert equal(s.codes, code) and equal(s.residual, residual)


def test_zero_and_what_is_not_finite():
    w = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-30])
    for residual_bits in (8, 16):
        s = pack_split(w, ONE, residual_bits)
        master = unpack_split(s.codes, s.residual, s.scale)
        assert equal(master[:2], w[:2]) and master[5] == 0.0
        assert master[2:5].isnan().all() and s.codes.float()[2:5].isnan().all()
        b = pack_split(w, None, residual_bits)
        back = unpack_split(b.codes, b.residual, None)
        torch.testing.assert_close(back[:5], w[:5], rtol=0, atol=0, equal_nan=True)


def test_bf16_split_is_exact_with_16_bits_and_16_significant_with_8():
    w = torch.randint(-(2**31), 2**31 - 1, (200_000,)).to(torch.int32).view(torch.float32)
    w = w[w.isfinite() & (w.abs() < 3e38)]
    s = pack_split(w, None, 16)
    assert equal(unpack_split(s.codes, s.residual, None), w)
    w = all_mantissas(3)
    s = pack_split(w, None, 8)
    back = unpack_split(s.codes, s.residual, None)
    assert (
        (back - w).abs() / w
    ).max() <= 2.0**-16  # 16 significant bits: half a step at the bottom
    assert (s.codes.float() - back).abs().max() <= (back - back.bfloat16().float()).abs().max()


@pytest.mark.parametrize("residual_bits,coded", [(8, True), (16, True), (8, False)])
def test_stochastic_rounding_is_unbiased(residual_bits, coded):
    drop = (20 if coded else 16) - residual_bits
    step = 2.0 ** -((3 if coded else 7) + residual_bits)
    # Away from powers of two, where the cells change size and the mean is off by a quarter cell.
    w = (1.1 + (torch.arange(8) + 0.3) / 8 * 3 * step).repeat_interleave(1 << 14)
    random = ref_random_bits(torch.arange(w.numel()), 123) >> (32 - drop)
    s = pack_split(w, ONE if coded else None, residual_bits, random)
    master = unpack_split(s.codes, s.residual, s.scale).view(8, -1)
    target = w.view(8, -1)[:, 0]
    assert (master - target.unsqueeze(1)).abs().max() < step
    # A fair coin's mean over 2**14 draws: at most half a step / 2**7; five deviations.
    assert (master.double().mean(1) - target).abs().max() < 5 * 0.5 * step / 2**7


@pytest.mark.parametrize("master_bits", [8, 16])
def test_codes_and_scale_are_those_of_the_cast(master_bits):
    for w in (torch.randn(48, 160) * 0.02, torch.randn(16, 16) * 300, torch.zeros(16, 16)):
        p = split_parameter(nn.Parameter(w.clone()), master_bits, POW2)
        q = quantize(w, POW2)
        assert equal(p.data, q.codes) and equal(p.scale, q.scale)
        assert p.amax == w.abs().max() and p.cast == POW2
        if w.any():
            assert (p.dequantize() - w).abs().max() <= w.abs().max() * 2.0 ** -(4 + master_bits)


def test_experts_have_one_scale_per_leading_index():
    w = torch.randn(3, 16, 24) * torch.tensor([1.0, 1e-3, 50.0]).view(3, 1, 1)
    p = split_parameter(nn.Parameter(w.clone()), 16, POW2)
    assert p.scale.shape == (3, 1, 1) and p.amax.shape == (3,)
    for e in range(3):
        q = quantize(w[e], POW2)
        assert equal(p.data[e], q.codes) and p.scale[e].item() == q.scale.item()
    assert torch.equal(weight_amax(w), w.flatten(1).abs().amax(1))


@pytest.mark.parametrize("coded", [True, False])
def test_parameter_survives_copy_pickle_and_save(coded):
    w = torch.randn(32, 40) * 0.1
    p = split_parameter(nn.Parameter(w.clone()), 8, POW2 if coded else None)
    assert isinstance(p, SplitParameter) and isinstance(p, nn.Parameter) and p.requires_grad
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    module = nn.Linear(40, 32, bias=False)
    module.weight = p
    for q in (
        copy.deepcopy(p),
        pickle.loads(pickle.dumps(p)),
        torch.load(file, weights_only=False),
        copy.deepcopy(module).weight,
    ):
        assert type(q) is SplitParameter and q.data_ptr() != p.data_ptr()
        assert equal(q.data, p.data) and equal(q.residual, p.residual) and q.cast == p.cast
        assert q.residual.data_ptr() != p.residual.data_ptr() and q.grad_dtype == torch.bfloat16
        assert torch.equal(q.dequantize(), p.dequantize())


def test_write_makes_a_new_master_in_place():
    p = split_parameter(nn.Parameter(torch.randn(16, 32)), 8, POW2)
    tensors = (p.residual, p.scale, p.amax)
    w = torch.randn(16, 32) * 7
    p.write(w)
    fresh = split_parameter(nn.Parameter(w.clone()), 8, POW2)
    assert equal(p.data, fresh.data) and equal(p.residual, fresh.residual)
    assert torch.equal(p.scale, fresh.scale) and torch.equal(p.amax, fresh.amax)
    assert all(a is b for a, b in zip(tensors, (p.residual, p.scale, p.amax), strict=True))


def test_gradients_on_codes_are_bf16_and_optimizer_sees_them():
    p = split_parameter(nn.Parameter(torch.randn(16, 16)), 8, POW2)

    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.dequantize()

        @staticmethod
        def backward(ctx, grad):
            return grad.bfloat16()

    Read.apply(p).square().sum().backward()
    assert p.grad.dtype == torch.bfloat16
    torch.testing.assert_close(p.grad.float(), 2 * p.dequantize(), rtol=2**-8, atol=0)


def test_packing_in_pieces_is_packing(monkeypatch):
    for w, cast in (
        (torch.randn(7, 30), POW2),
        (torch.randn(5, 4, 6), POW2),
        (torch.randn(9), None),
    ):
        whole = split_parameter(nn.Parameter(w.clone()), 8, cast)
        monkeypatch.setattr(split, "_CHUNK", 70)
        pieces = split_parameter(nn.Parameter(w.clone()), 8, cast)
        monkeypatch.undo()
        assert equal(whole.data, pieces.data) and equal(whole.residual, pieces.residual)
    with pytest.raises(ValueError, match="only a Parameter"):
        split_parameter(nn.UninitializedParameter(), 8, None)


def test_a_moved_or_cast_split_weight_is_refused():
    p = split_parameter(nn.Parameter(torch.randn(16, 16)), 8, POW2)
    p.data = p.data.float()
    with pytest.raises(RuntimeError, match="before building the optimizer"):
        p.dequantize()
    with pytest.raises(ValueError, match="residual_bits"):
        pack_split(torch.ones(2), None, 12)


def test_fake_parameters_can_be_split():
    with FakeTensorMode():
        p = nn.Parameter(torch.randn(64, 64))
        split_parameter(p, 8, POW2)
        assert isinstance(p, SplitParameter) and p.dtype == torch.float8_e4m3fn
        assert p.residual.shape == (64, 64) and p.scale.shape == (1,)
        assert unpack_split(p.data, p.residual, p.scale).dtype == torch.float32
        assert p.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert not isinstance(nn.Parameter(torch.ones(1)), SplitParameter)


@pytest.mark.parametrize("shape", [(33, 70), (3, 20, 50)])
@pytest.mark.parametrize("residual_bits", [8, 16])
@pytest.mark.parametrize("coded", [True, False])
def test_triton_unpack_is_bitwise_the_reference(shape, residual_bits, coded, device):
    w = torch.randn(shape, device=device) * torch.logspace(-8, 0, shape[-1], device=device)
    w.view(-1)[:3] = torch.tensor([0.0, -0.0, float("nan")])
    scale = None
    if coded:
        scale = scale_from_amax(weight_amax(w.nan_to_num()), POW2)
        scale = scale.view(-1, 1, 1) if w.dim() == 3 else scale
    s = pack_split(w, scale, residual_bits)
    for dtype in (torch.float32, torch.bfloat16):
        got = triton_unpack_split(s.codes, s.residual, s.scale, dtype)
        want = ref_unpack_split(s.codes, s.residual, s.scale, dtype)
        assert got.dtype == want.dtype == dtype
        assert torch.equal(got.isnan(), want.isnan())
        got, want = got.float().nan_to_num(), want.float().nan_to_num()
        if dtype == torch.float32 or device == "cuda":
            assert torch.equal(got, want)
        else:  # Triton's interpreter cuts to BF16 instead of rounding
            assert ((got - want).abs() <= 2.0**-7 * want.abs()).all()


def test_bf16_values_of_a_bf16_split_are_its_codes():
    """The head reads them where they lie: no copy, and within half a BF16 step of the master."""
    p = split_parameter(nn.Parameter(torch.randn(64, 32)), 8, None)
    values = weight_values(p, torch.bfloat16)
    assert values.data_ptr() == p.data_ptr()
    master = weight_values(p, torch.float32)
    assert ((values.float() - master).abs() <= 2.0**-8 * master.abs()).all()


def test_what_has_no_values_is_packed_once_however_large(monkeypatch):
    packed = []
    monkeypatch.setattr(
        split, "pack_split", lambda w, *rest: packed.append(w.shape) or pack_split(w, *rest)
    )
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(384, 4096, 6144))
        split_parameter(p, 8, POW2)
    assert len(packed) == 1 and p.residual.shape == (384, 4096, 6144)
