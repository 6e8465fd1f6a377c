"""Gradient norms: exact, without overflow, and harmless where a gradient is not finite."""

import pytest
import torch
from torch import nn

from ottava.optim.adamw import AdamW
from ottava.optim.clip import clip_factor, clip_grad_norm_, fast_norm, grad_norm


def parameters(*grads):
    out = []
    for g in grads:
        p = nn.Parameter(torch.zeros_like(g))
        p.grad = g.clone()
        out.append(p)
    return [*out, nn.Parameter(torch.zeros(3))]  # one without a gradient


def test_it_is_the_global_norm_and_clips_to_it():
    grads = [torch.randn(33), torch.randn(4, 5).bfloat16(), torch.randn(7).half()]
    params = parameters(*grads)
    expected = torch.cat([g.double().flatten() for g in grads]).norm()
    norm = clip_grad_norm_(params, 0.5)
    assert norm.dtype == torch.float64 and norm.dim() == 0
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad_norm(params).item(), 0.5, rtol=2e-3, atol=0)  # FP16, BF16 grads
    for p, g in zip(params, grads, strict=False):
        assert p.grad.dtype == g.dtype
        torch.testing.assert_close(
            p.grad.double(), g.double() * 0.5 / expected, rtol=2**-8, atol=1e-6
        )


def test_small_norms_are_left_alone_bitwise():
    grads = [torch.randn(16) * 1e-3]
    params = parameters(*grads)
    clip_grad_norm_(params, 1.0)
    assert torch.equal(params[0].grad, grads[0])


@pytest.mark.parametrize("big", [1e20, 1e30, 3e38])
def test_huge_finite_norms_do_not_overflow(big):
    params = parameters(torch.full((64,), big))
    norm = clip_grad_norm_(params, 1.0)
    assert norm.item() == pytest.approx(8 * big, rel=1e-6)
    assert params[0].grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_tiny_norms_do_not_vanish():
    assert grad_norm(parameters(torch.full((4,), 1e-30))).item() == pytest.approx(2e-30, rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_norm_changes_nothing_and_is_returned(bad):
    grads = [torch.randn(8), torch.randn(8)]
    grads[1][3] = bad
    params = parameters(*grads)
    norm = clip_grad_norm_(params, 0.1)
    assert not norm.isfinite()
    for p, g in zip(params, grads, strict=False):
        assert torch.equal(p.grad.view(torch.int32), g.view(torch.int32))


def test_a_single_tensor_a_generator_or_nothing():
    p = parameters(torch.ones(4))[0]
    assert clip_grad_norm_(p, 1.0).item() == 2.0
    assert clip_grad_norm_((q for q in [p]), 10.0).item() == pytest.approx(1.0)
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([p], 0.0)


def test_fast_norm_agrees_where_squares_fit():
    params = parameters(torch.randn(100), torch.randn(50).bfloat16())
    torch.testing.assert_close(fast_norm(params).double(), grad_norm(params), rtol=1e-5, atol=0)
    assert not fast_norm(parameters(torch.full((2,), 1e30))).isfinite()
    assert fast_norm([]).item() == 0.0


def test_the_optimizer_can_apply_the_factor():
    g = torch.randn(64, 64) * 10
    (a, _), (b, _) = parameters(g), parameters(g)
    opts = [AdamW([p], states="8bit") for p in (a, b)]
    clip_grad_norm_([a], 1.0)
    opts[0].step()
    opts[1].step(grad_scale=1 / clip_factor(grad_norm([b]), 1.0))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
