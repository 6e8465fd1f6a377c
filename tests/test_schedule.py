"""Schedules: a pure function of real updates, and an object that can be saved."""

import pytest
import torch
from torch import nn

from ottava.optim.adamw import AdamW
from ottava.optim.schedule import Schedule, lr_factor


def optimizer(lr=2.0):
    return AdamW([nn.Parameter(torch.ones(4))], lr=lr)


def test_values():
    warm = {"total": 110, "warmup": 10, "min_ratio": 0.1}
    for kind in ("cosine", "linear", "constant"):
        assert lr_factor(0, kind=kind, **warm) == pytest.approx(0.1)
        assert lr_factor(9, kind=kind, **warm) == lr_factor(10, kind=kind, **warm) == 1.0
    assert lr_factor(60, kind="cosine", **warm) == pytest.approx(0.55)
    assert lr_factor(35, kind="cosine", **warm) == pytest.approx(0.1 + 0.9 * 0.8535534)
    assert lr_factor(60, kind="linear", **warm) == pytest.approx(0.55)
    assert lr_factor(10_000, kind="constant", **warm) == 1.0
    for kind in ("cosine", "linear"):
        assert (
            lr_factor(110, kind=kind, **warm)
            == lr_factor(500, kind=kind, **warm)
            == pytest.approx(0.1)
        )
        assert lr_factor(5, kind=kind, total=5, warmup=5) == 1.0
    with pytest.raises(ValueError, match="cosine, linear, constant"):
        lr_factor(0, kind="step", total=1)


def test_skipped_steps_do_not_move_it_and_state_goes_on():
    opt = optimizer()
    schedule = Schedule(opt, "linear", total=20, warmup=4)
    rates = [opt.param_groups[0]["lr"]]
    for stepped in (True, False, True, False, True):
        schedule.step(stepped)
        rates.append(opt.param_groups[0]["lr"])
    assert rates == [0.5, 1.0, 1.0, 1.5, 1.5, 2.0]
    assert schedule.get_last_lr() == [2.0]

    other = optimizer(lr=123.0)
    resumed = Schedule(other, "linear", total=20, warmup=4)
    resumed.load_state_dict(schedule.state_dict())
    assert (resumed.updates, resumed.skipped) == (3, 2) and other.param_groups[0]["lr"] == 2.0
    schedule.step(), resumed.step()
    assert other.param_groups[0]["lr"] == opt.param_groups[0]["lr"]


def test_groups_keep_their_peaks_and_tensor_rates_are_filled_in_place():
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    rate = torch.tensor(1.0)
    opt = AdamW([{"params": [a], "lr": rate}, {"params": [b], "lr": 3.0}])
    schedule = Schedule(opt, "linear", total=10)
    for _ in range(5):
        schedule.step()
    assert opt.param_groups[0]["lr"] is rate and rate.item() == 0.5
    assert opt.param_groups[1]["lr"] == 1.5
