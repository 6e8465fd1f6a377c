"""The step inside backward: the same bits as a plain step, and what it refuses and skips."""

import gc
import weakref

import pytest
import torch
from optimizer_cases import everything, same
from torch import nn

from ottava.kernels.gradient import ref_measure_gradient, triton_measure_gradient
from ottava.optim.adamw import AdamW
from ottava.optim.fused_backward import fuse_backward


def network():
    """Three linears, the first and the last tied."""
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 64))
    model[3].weight = model[0].weight
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_fused_backward_is_the_plain_step(states):
    results = []
    for fused in (False, True):
        model = network()
        opt = AdamW(model.parameters(), lr=1e-2, states=states)
        handle = fuse_backward(model, opt) if fused else None
        assert opt.fused is handle
        for i in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(i))
            model(x).square().mean().backward()
            if fused:
                assert all(p.grad is None for p in model.parameters())
            opt.step()
            opt.zero_grad()
        results.append(everything(opt))
        if fused:
            handle.remove()
            assert opt.fused is None
            model(x).square().mean().backward()
            assert all(p.grad is not None for p in model.parameters())
    assert same(*results)


def test_fused_step_runs_hooks_once_and_refuses_accumulation():
    model, calls = network(), []
    opt = AdamW(model.parameters())
    opt.register_step_post_hook(lambda *_: calls.append(1))
    fuse_backward(model, opt)
    x = torch.randn(4, 64)
    model(x).sum().backward()
    assert calls == []
    opt.step()
    assert calls == [1]
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="cannot be accumulated"):
        model(x).sum().backward()


def test_fused_conflicts_are_one_clear_error():
    model = network()
    opt = AdamW(model.parameters())
    hook = model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"2\.weight has a post-accumulate"):
        fuse_backward(model, opt)
    hook.remove()
    with pytest.raises(ValueError, match="is not in the optimizer"):
        fuse_backward(model, AdamW([model[2].weight]))
    with pytest.raises(ValueError, match="clip"):
        fuse_backward(model, opt, clip="global")
    fuse_backward(model, opt)
    with pytest.raises(ValueError, match="fused already"):
        fuse_backward(model, opt)


def test_fused_guard_skips_a_step_with_a_bad_loss():
    model = network()
    opt = AdamW(model.parameters(), states="8bit")
    handle = fuse_backward(model, opt)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (True, False):
        loss = model(torch.randn(4, 64)).sum() * (torch.nan if bad else 1.0)
        handle.guard(loss)
        loss.backward()
        opt.step()
        now = list(model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)) == bad


@pytest.mark.parametrize("clip", ["previous", "tensor"])
def test_fused_clipping(clip):
    model = network()
    opt = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    handle = fuse_backward(model, opt, clip=clip, max_norm=0.5)
    plain = network()
    other = AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    previous = None
    for i in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(i)) * (i + 1) * 3
        model(x).square().sum().backward()
        opt.step()
        plain(x).square().sum().backward()
        norms = {p: p.grad.double().norm() for p in plain.parameters()}
        total = torch.stack(list(norms.values())).norm()
        for p in plain.parameters():
            norm = norms[p] if clip == "tensor" else previous
            if norm is not None:
                p.grad.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0).float())
        other.step()
        other.zero_grad()
        previous = total
        torch.testing.assert_close(handle.norm.double(), total, rtol=1e-5, atol=0)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    saved = opt.state_dict()
    again = network()
    resumed = AdamW(again.parameters())
    fuse_backward(again, resumed, clip=clip, max_norm=0.5)
    resumed.load_state_dict(saved)
    if clip == "previous":  # the only one with a memory
        assert torch.equal(resumed.fused.norm, handle.norm)


@pytest.mark.parametrize("numel", [1, 4096, 5000, 70_000])
def test_gradient_is_measured_in_one_pass(numel, device):
    g = torch.randn(numel, device=device).bfloat16()
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    for bad in (None, torch.nan, torch.inf, -torch.inf):
        if bad is not None:
            g[-1] = bad
        for measure in (ref_measure_gradient, triton_measure_gradient):
            found = torch.zeros(1, device=device)
            norm = measure(g, found, counter)
            assert found.item() == (bad is not None) and counter.item() == 0
            assert norm.isfinite() == (bad is None)
            if bad is None:
                torch.testing.assert_close(norm, g.float().norm(), rtol=1e-5, atol=0)
    found = torch.ones(1, device=device)
    triton_measure_gradient(torch.zeros(3, device=device), found, counter)
    assert found.item() == 1  # a finite one does not take back what was found


def test_measuring_changes_nothing_but_a_bad_step():
    results = []
    for measure in (False, True):
        model = network()
        opt = AdamW(model.parameters(), states="8bit")
        handle = fuse_backward(model, opt, measure=measure)
        model(torch.ones(2, 64)).square().sum().backward()
        opt.step()
        results.append(everything(opt))
    assert len(results[0]) < len(results[1])  # the device's own count of skipped steps
    assert {t.numel() for t in results[0]} <= {t.numel() for t in results[1]}
    assert handle.found.item() == 0 and set(handle.norms) == set(model.parameters())


def test_fused_clipping_skips_what_is_not_finite():
    model = network()
    opt = AdamW(model.parameters(), states="8bit")
    fuse_backward(model, opt, clip="tensor")
    before = [p.detach().clone() for p in model.parameters()]
    (model(torch.randn(4, 64)).sum() * torch.inf).backward()
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_dropped_model_is_freed_with_its_moments():
    def make():
        model = torch.nn.Linear(64, 64).bfloat16()
        opt = AdamW(model.parameters(), lr=1e-3)
        fuse_backward(model, opt)
        model(torch.randn(16, 64, dtype=torch.bfloat16)).sum().backward()
        opt.step()
        return weakref.ref(opt), weakref.ref(model), weakref.ref(model.weight)

    refs = make()
    gc.collect()
    assert all(ref() is None for ref in refs)
