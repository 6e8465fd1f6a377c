"""8-bit moments: the tables, their error, no bias, no lost or invented zeros."""

import math

import pytest
import torch

from ottava.kernels.moments import ref_decode_m, ref_decode_v, ref_encode_m, ref_encode_v
from ottava.kernels.random import ref_random_bits


def test_moment_codes_are_a_table():
    """Every code of m and v stands for its own number, in order; v's first is 0."""
    m = ref_decode_m(
        torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, -1), torch.ones(1)
    )
    assert m[0, 0] == 0 and (m.diff() > 0).all() and m.max() == 448 and (m == 1).any()
    ends = torch.tensor([[-2560, 1280]], dtype=torch.int16)
    v = ref_decode_v(torch.arange(256, dtype=torch.uint8).view(1, -1), ends)
    assert v[0, 0] == 0 and (v.diff() > 0).all()
    torch.testing.assert_close(v[0, [1, 255]], torch.tensor([2.0**-20, 2.0**10]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["uniform", "normal", "log-uniform"])
def test_round_trip_error_is_bounded(kind):
    x = {
        "uniform": torch.rand(64, 128),
        "normal": torch.randn(64, 128),
        "log-uniform": torch.exp2(-12 * torch.rand(64, 128)),
    }[kind]
    random = ref_random_bits(torch.arange(x.numel()), 5).view(x.shape) & 0x3FF
    codes, scale = ref_encode_m(x, random)
    m = ref_decode_m(codes, scale)
    # A step of e4m3 is at most 1/8; below 2**-6 * 448 of the group's scale it is 2**-9 * scale.
    bound = torch.maximum(x.abs() / 8, 2.0**-9 * scale.float().unsqueeze(1))
    assert ((m - x).abs() <= bound).all()
    codes, ends = ref_encode_v(x * x, random)
    v = ref_decode_v(codes, ends)
    step = torch.exp2((ends[:, 1:] - ends[:, :1]).float() / (254 * 128)) - 1
    assert ((v - x * x).abs() <= 1.001 * step * x * x).all()
    assert (codes[(x != 0)] > 0).all()


def test_moment_rounding_is_unbiased():
    draws = 1 << 12
    x = torch.linspace(0.03, 1.0, 128).repeat(draws, 1)
    random = ref_random_bits(torch.arange(x.numel()), 9).view(x.shape) & 0x3FF
    m = ref_decode_m(*ref_encode_m(x, random))
    v = ref_decode_v(*ref_encode_v(x, random))
    for got, step in ((m, x[0] / 8), (v, x[0] * 0.016)):
        assert ((got.double().mean(0) - x[0]).abs() < 5 * 0.5 * step / math.sqrt(draws)).all()


def test_v_is_unbiased_where_codes_are_far_apart():
    """60 binades in a group: codes 18 % apart. Rounding in log v would be 0.4 % off on average,
    which a slow average multiplies by 1 / (1 - beta2)."""
    v = torch.exp2(-60 * torch.rand(1 << 11, 128))
    random = ref_random_bits(torch.arange(v.numel()), 3).view(v.shape) & 0x3FF
    back = ref_decode_v(*ref_encode_v(v, random))
    assert abs((back / v).double().mean() - 1) < 8e-4


def test_zeros_stay_zero_and_nothing_else_becomes_zero():
    x = torch.zeros(4, 128)
    x[0, :5] = torch.tensor([1e-38, 1e-20, 1.0, 3e-39, 1e-44])
    x[1] = 1e-12
    x[2, 7] = 1e30
    for random in (torch.zeros(4, 128, dtype=torch.long), torch.full((4, 128), 1023)):
        codes, ends = ref_encode_v(x, random)
        v = ref_decode_v(codes, ends)
        assert torch.equal(v == 0, x == 0) and torch.equal(codes == 0, x == 0)
        codes, scale = ref_encode_m(-x, random)
        assert ((ref_decode_m(codes, scale) == 0) >= (x == 0)).all()


def test_non_finite_moments_are_seen():
    random = torch.zeros(2, 128, dtype=torch.long)
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 128)
        x[1, 3] = bad
        v = ref_decode_v(*ref_encode_v(x, random))
        m = ref_decode_m(*ref_encode_m(x, random))
        assert v[1].isnan().all() and v[0].isfinite().all()
        assert m[1].isnan().all() and m[0].isfinite().all()


@pytest.mark.parametrize("beta2,halved", [(0.95, 4.0), (0.999, 4.0)])
def test_slow_averages_follow(beta2, halved):
    """Squared gradients fall by 4 midway: the average follows, unbiased; rounding to nearest would
    leave beta2 = 0.999 stuck (2.1 times too large)."""
    steps = 60 if beta2 == 0.95 else 1200
    torch.manual_seed(1)
    level = torch.exp(1.5 * torch.randn(8, 1)) * torch.exp(0.5 * torch.randn(8, 128))
    exact = level.double().clone()
    codes, ends = ref_encode_v(level, torch.full((8, 128), 512))
    for step in range(steps):
        g2 = level / halved * torch.randn(8, 128).square()
        exact = beta2 * exact + (1 - beta2) * g2.double()
        v = beta2 * ref_decode_v(codes, ends) + (1 - beta2) * g2
        random = ref_random_bits(torch.arange(1024), step).view(8, 128) & 0x3FF
        codes, ends = ref_encode_v(v, random)
    root = (ref_decode_v(codes, ends) / exact).sqrt()
    assert (codes > 0).all()
    assert abs(root.mean() - 1) < 0.01 and root.std() < 0.08
