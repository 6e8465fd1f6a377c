"""AdamW between steps: the guard, random bits, and resuming with every bit."""

import io

import pytest
import torch
from optimizer_cases import (
    MASTERS,
    STATES,
    everything,
    parameter,
    same,
    set_grad,
    value,
)

from ottava.kernels.split import SplitParameter
from ottava.optim.adamw import AdamW


@pytest.mark.parametrize("master", MASTERS)
def test_guard_leaves_everything_and_does_not_count(master):
    states = "fp32" if master == "fp32" else "8bit"

    def make():
        torch.manual_seed(3)
        p = parameter(torch.randn(64, 64))
        return p, AdamW([p], master=master, states=states, weight_decay=0.0, lr=1e-2)

    (p, opt), (q, plain) = make(), make()
    g = torch.randn(3, 64, 64)
    ok, bad = torch.zeros(()), torch.ones(())
    set_grad(p, g[0]), set_grad(q, g[0])
    opt.step(found_inf=ok), plain.step()
    before = everything(opt)
    set_grad(p, torch.full((64, 64), torch.nan))
    opt.step(found_inf=bad)
    state = opt.state[p]
    assert state["skipped"] == 1
    state["skipped"].zero_()
    assert same(before, everything(opt))
    state["skipped"].fill_(1)
    set_grad(p, g[1]), set_grad(q, g[1])
    opt.step(found_inf=ok), plain.step()
    # The same but for random bits: bias corrections do not count the skipped step.
    assert opt.state[p]["step"] == 3 and plain.state[q]["step"] == 2
    assert (value(p) - value(q)).abs().mean() < (1e-7 if master == "fp32" else 2e-3)


def test_grad_scale_divides():
    p, q = (parameter(torch.ones(64, 64)) for _ in range(2))
    a, b = AdamW([p]), AdamW([q])
    set_grad(p, torch.full((64, 64), 8.0)), set_grad(q, torch.full((64, 64), 2.0))
    a.step(grad_scale=torch.tensor(4.0)), b.step()
    assert torch.equal(p, q) and torch.equal(a.state[p]["m"], b.state[q]["m"])
    set_grad(p, torch.full((64, 64), 8.0)), set_grad(q, torch.full((64, 64), 2.0))
    a.step(grad_scale=4.0), b.step()
    assert torch.equal(p, q)


def run(opt, params, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            set_grad(p, torch.randn(p.shape, generator=generator))
        opt.step()


def model_parameters():
    generator = torch.Generator().manual_seed(11)
    w = torch.randn(64, 96, generator=generator)
    return [parameter(w), parameter(w[:, :70].clone(), False), parameter(w[0], False, torch.bfloat16),
            parameter(w.view(2, 32, 96).repeat(1, 2, 1))]  # fmt: skip


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", MASTERS)
def test_same_bits_after_save_and_load(master, states):
    kw = {"master": master, "states": states, "seed": 5}
    whole = model_parameters()
    unbroken = AdamW(whole, **kw)
    run(unbroken, whole, 2, 1), run(unbroken, whole, 2, 2)

    first = model_parameters()
    opt = AdamW(first, **kw)
    run(opt, first, 2, 1)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = model_parameters()
    resumed = AdamW(second, **kw)
    if master not in ("split16", "split24"):  # the rest of the weights comes with the model
        for p, q in zip(second, first, strict=True):
            p.data.copy_(q.data)
    run(resumed, second, 1, 9)  # whatever it did before is gone
    if master not in ("split16", "split24"):
        for p, q in zip(second, first, strict=True):
            p.data.copy_(q.data)
    else:
        for p, q in zip(second, first, strict=True):
            if not isinstance(p, SplitParameter):
                p.data.copy_(q.data)
    resumed.load_state_dict(saved)
    kinds = [
        {k: v.dtype for k, v in opt.state[p].items() if isinstance(v, torch.Tensor)} for p in first
    ]
    assert kinds == [
        {k: v.dtype for k, v in resumed.state[p].items() if isinstance(v, torch.Tensor)}
        for p in second
    ]
    assert same(everything(opt), everything(resumed))
    run(resumed, second, 2, 2)
    assert same(everything(unbroken), everything(resumed))


def test_seed_and_number_decide_the_bits():
    def one(seed):
        p = parameter(torch.ones(64, 64))
        opt = AdamW([p], master="bf16", states="8bit", seed=seed)
        run(opt, [p], 2, 1)
        return everything(opt)

    assert same(one(0), one(0)) and not same(one(0), one(1))
    p, q = parameter(torch.ones(64, 64)), parameter(torch.ones(64, 64))
    opt = AdamW([p, q], master="bf16", lr=1e-3)
    set_grad(p, torch.ones(64, 64)), set_grad(q, torch.ones(64, 64))
    opt.step()
    assert not torch.equal(p, q)  # two parameters do not share their random bits


def test_state_that_does_not_fit_is_refused():
    a, b = parameter(torch.randn(64, 64)), parameter(torch.randn(32, 128))
    opt = AdamW([a], states="8bit")
    run(opt, [a], 1, 0)
    with pytest.raises(ValueError, match="moments of parameter 0"):
        AdamW([b], states="8bit").load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="groups"):
        AdamW([a, b]).load_state_dict(opt.state_dict())
    c = parameter(torch.randn(64, 64))
    split = AdamW([c], master="split16").state_dict()
    with pytest.raises(ValueError, match="FP8 codes"):
        AdamW([parameter(torch.randn(64, 64), False)]).load_state_dict(split)
    assert "codes" not in AdamW([c], master="split16").state_dict(weights=False)["state"].get(0, {})


def test_scheduler_and_parameter_groups_of_torch_work():
    a, b = parameter(torch.randn(64, 64)), parameter(torch.randn(64, 64))
    opt = AdamW(
        [{"params": [a], "states": "8bit"}, {"params": [b], "lr": 1e-2, "master": "bf16"}], lr=1e-3
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (n + 1))
    run(opt, [a, b], 1, 0)
    schedule.step()
    assert [g["lr"] for g in opt.param_groups] == [5e-4, 5e-3]
    assert opt.state[a]["m"].dtype == torch.float8_e4m3fn and b.dtype == torch.bfloat16
    assert opt.state[b]["m"].dtype == torch.float32
