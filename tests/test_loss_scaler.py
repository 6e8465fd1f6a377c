"""Dynamic loss scaling: the exact sequences, one unscaling a step, quiet where nothing is to do."""

import gc
import multiprocessing
import socket
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ottava.optim.adamw import AdamW
from ottava.optim.clip import clip_grad_norm_
from ottava.optim.ema import EMA
from ottava.optim.loss_scaler import GradScaler
from ottava.optim.schedule import Schedule

INF, NAN = float("inf"), float("nan")


def weight(value=1.0, n=4):
    return nn.Parameter(torch.full((n,), value))


def iteration(scaler, optimizer, p, gradient):
    """One step whose unscaled gradient is `gradient`; returns whether it stepped."""
    optimizer.zero_grad()
    scaler.scale((p * gradient).sum()).backward()
    stepped = scaler.step(optimizer)
    scaler.update()
    return stepped


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD([p], lr=0.1), lambda p: AdamW([p], lr=0.1)]
)
@pytest.mark.parametrize("resume_at", range(8))
def test_sequence_also_through_save_and_load(make, resume_at):
    p = weight()
    optimizer, scaler = make(p), GradScaler(init_scale=1024.0, growth_interval=2)
    gradients = [1.0, INF, 1.0, 1.0, NAN, 1.0, 1.0]
    scales = [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0]
    counters = [1, 0, 1, 0, 0, 1, 0]
    for i, g in enumerate(gradients):
        if i == resume_at:
            state, scaler = scaler.state_dict(), GradScaler(init_scale=8.0, growth_interval=2)
            scaler.load_state_dict(state)
        before = p.detach().clone()
        stepped = iteration(scaler, optimizer, p, g)
        assert stepped == (g == 1.0) and torch.equal(before, p.detach()) == (not stepped)
        assert (scaler.get_scale(), scaler.growth_tracker) == (scales[i], counters[i])
    assert scaler.skipped == 2


def test_skipped_steps_are_no_updates():
    p = weight(n=8)
    model = nn.ParameterDict({"p": p})
    optimizer = AdamW([p], lr=1.0)
    scaler = GradScaler()
    schedule, ema = Schedule(optimizer, "linear", total=100, warmup=10), EMA(model)
    for g in (INF, INF, INF, 1.0, 1.0):
        stepped = iteration(scaler, optimizer, p, g)
        schedule.step(stepped)
        if stepped:
            ema.update()
    assert (schedule.updates, schedule.skipped, scaler.skipped) == (2, 3, 3)
    assert optimizer.state[p]["step"] == 2 and ema.updates == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)


def test_clip_acts_on_unscaled_gradients():
    p = weight(1.0, 1)
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), GradScaler(init_scale=65536.0)
    scaler.scale((p * 0.5).sum()).backward()
    scaler.unscale_(optimizer)
    assert clip_grad_norm_([p], 1.0).item() == 0.5
    assert scaler.step(optimizer)
    assert p.item() == 0.5


def test_unscaled_exactly_once():
    """Clipping in every micro-batch, and a step that the user gives up."""
    p = weight(0.0, 1)
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), GradScaler(init_scale=1024.0)
    for _ in range(4):
        scaler.scale((p * 0.25).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        clip_grad_norm_([p], 10.0)
    assert p.grad.item() == 1.0
    assert scaler.step(optimizer) and p.item() == -1.0
    scaler.update()

    optimizer.zero_grad()
    scaler.scale((p * 3.0).sum()).backward()
    scaler.unscale_(optimizer)  # and then nothing: no step, no update
    optimizer.zero_grad()
    scaler.scale((p * 0.5).sum()).backward()
    scaler.unscale_(optimizer)
    assert p.grad.item() == 0.5
    assert scaler.step(optimizer) and p.item() == -1.5


def test_optimizer_without_gradients_is_passed_over():
    p, unused = weight(), weight()
    first, second = torch.optim.SGD([p], lr=0.1), torch.optim.SGD([unused], lr=0.1)
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    assert scaler.step(first) is True and scaler.step(second) is False
    scaler.update()
    assert scaler.get_scale() == 1024.0 and scaler.growth_tracker == 1 and scaler.skipped == 0
    assert scaler.step(second) is False
    scaler.update()  # nothing stepped at all
    assert scaler.growth_tracker == 1


def test_one_of_two_optimizers_overflows():
    p, q = weight(), weight()
    a, b = torch.optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1)
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(p.sum() + (q * INF).sum()).backward()
    assert (scaler.step(a), scaler.step(b)) == (True, False)
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_documented_defaults_and_hysteresis():
    assert GradScaler(growth_interval=5).get_scale() == 65536.0
    p = weight()
    optimizer = torch.optim.SGD([p], lr=0.0)
    for consecutive in (False, True):
        scaler = GradScaler(hysteresis=2, consecutive_hysteresis=consecutive)
        scales = []
        for g in (INF, INF, INF):
            iteration(scaler, optimizer, p, g)
            scales.append(scaler.get_scale())
        assert scales == [65536.0, 32768.0, 16384.0]
        iteration(scaler, optimizer, p, 1.0)
        iteration(scaler, optimizer, p, INF)
        assert scaler.get_scale() == (16384.0 if consecutive else 8192.0)


def test_floor_and_cap():
    p = weight()
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = GradScaler(init_scale=4.0, min_scale=1.0, max_scale=8.0, growth_interval=1)
    for _ in range(6):
        assert not iteration(scaler, optimizer, p, NAN)
        assert scaler.get_scale() >= 1.0
    assert scaler.get_scale() == 1.0 and scaler.skipped == 6
    for _ in range(6):
        assert iteration(scaler, optimizer, p, 1.0)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradient_dtypes(dtype):
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([p], lr=0.5), GradScaler(init_scale=256.0)
    scaler.scale((p * 2.0).sum()).backward()
    assert p.grad[0] == 512.0
    assert scaler.step(optimizer) and torch.equal(p.detach(), torch.zeros(4, dtype=dtype))


def test_disabled_is_transparent():
    p = weight()
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), GradScaler(enabled=False)
    loss = (p * 0.5).sum()
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer) is True
    scaler.update()
    assert torch.equal(p.detach(), torch.full((4,), 0.5))


def test_scale_takes_nested_outputs_and_new_scale():
    scaler = GradScaler(init_scale=2.0)
    a, (b,) = scaler.scale((torch.ones(()), [torch.ones(())]))
    assert a.item() == b.item() == 2.0
    with pytest.raises(ValueError, match="is no tensor"):
        scaler.scale(3.0)
    scaler.update(new_scale=16.0)
    assert scaler.get_scale() == 16.0


def test_wrong_settings_are_refused():
    for bad in (
        {"init_scale": 0.5},
        {"init_scale": 8.0, "max_scale": 4.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ):
        with pytest.raises(ValueError, match="GradScaler"):
            GradScaler(**bad)


def test_optimizers_are_not_kept_alive():
    p = weight()
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), GradScaler()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def _rank(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    p = weight()
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), GradScaler(init_scale=1024.0)
    outcome = []
    for step in range(3):
        p.grad = None
        if not (step == 2 and rank == 1):  # an expert that no token of this rank reached
            p.grad = torch.full((4,), INF if step == 0 and rank == 0 else 1024.0)
        stepped = scaler.step(optimizer)
        scaler.update()
        outcome.append((stepped, scaler.get_scale()))
    results.put((rank, outcome))
    dist.destroy_process_group()


def test_overflow_on_one_rank_skips_on_all():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")  # starts in milliseconds; no autograd, no GPU
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, results)) for r in range(2)]
    for process in ranks:
        process.start()
    outcomes = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert outcomes[0] == outcomes[1] == [(False, 512.0), (True, 512.0), (True, 512.0)]
