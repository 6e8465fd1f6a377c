"""Moments on the host: the same bits as on the device, whatever the slots held before."""

import pytest
import torch
from optimizer_cases import everything, parameter, same, set_grad
from torch import nn

from ottava.optim.adamw import AdamW
from ottava.optim.fused_backward import fuse_backward

SHAPES = ((96, 128), (64, 64), (3, 64, 128), (8, 16), (300, 64))  # the fourth is small


def optimizer(moments_on, states="8bit", master="split16"):
    generator = torch.Generator().manual_seed(0)
    params = [parameter(torch.randn(shape, generator=generator) * 0.1) for shape in SHAPES]
    return params, AdamW(params, lr=1e-2, states=states, master=master, moments_on=moments_on)


def step(params, opt, number, order):
    generator = torch.Generator().manual_seed(number)
    grads = [torch.randn(p.shape, generator=generator) for p in params]
    for i in order:  # as a fused backward does: one parameter at a time
        set_grad(params[i], grads[i])
        opt.update(params[i], opt.param_groups[0])
        params[i].grad = None
    opt.step()


def poison(opt):
    for slot in opt.host._slots:
        slot.room.fill_(0xFF)


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_the_same_bits_in_any_order(states):
    here, there = optimizer("device", states), optimizer("host", states)
    orders = ([4, 3, 2, 1, 0], [4, 3, 2, 1, 0], [0, 2, 1, 4], [1, 0, 4, 3, 2], [1, 0, 4, 3, 2])
    for number, order in enumerate(orders):
        for params, opt in (here, there):
            step(params, opt, number, order)
        assert same(everything(here[1]), everything(there[1])), number
        poison(there[1])
    slots = there[1].host._slots
    assert len(slots) == 2 and not here[1].host._slots
    # the largest parameter's moments, rounded up a piece
    assert slots[0].room.numel() <= {"fp32": 8, "bf16": 4, "8bit": 3}[states] * 3 * 64 * 128


def test_a_prefetched_parameter_is_not_copied_again(monkeypatch):
    params, opt = optimizer("host")
    step(params, opt, 0, [4, 2, 1, 0])
    loads, plain = [], opt.host._load
    monkeypatch.setattr(opt.host, "_load", lambda p, *a: loads.append(p) or plain(p, *a))
    step(params, opt, 1, [4, 2, 1, 0])
    assert [next(i for i, p in enumerate(params) if p is q) for q in loads] == [4, 2, 1, 0]


def test_inside_backward():
    results = []
    for moments_on in ("device", "host"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
        opt = AdamW(model.parameters(), lr=1e-2, states="8bit", moments_on=moments_on)
        fuse_backward(model, opt)
        for i in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(i))
            model(x).square().mean().backward()
            opt.step()
            poison(opt)
        results.append(everything(opt))
    assert same(*results)


@pytest.mark.parametrize(
    "before, after", [("device", "host"), ("host", "device"), ("host", "host")]
)
def test_a_checkpoint_may_move(before, after):
    params, opt = optimizer(before)
    for number in range(2):
        step(params, opt, number, range(5))
    params2, opt2 = optimizer(after)
    params2[3].data.copy_(params[3].data)  # small: FP32, and the model's to keep
    opt2.load_state_dict(opt.state_dict())
    assert opt2.param_groups[0]["moments_on"] == after
    for p, o in ((params, opt), (params2, opt2)):
        step(p, o, 2, [3, 1, 0, 2, 4])
    assert same(everything(opt), everything(opt2))


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match=r"moments_on 'disk' is not one of device, host"):
        optimizer("disk")
