"""Learning rate, step and key from device memory: the same bits as from launch arguments."""

import pytest
import torch
from optimizer_cases import MASTERS, STATES, bits, everything, parameter, same, set_grad

from ottava.kernels import adamw as kernel
from ottava.kernels.clock import WIDTH, clock_row, corrections, read_clock, ref_read_clock
from ottava.kernels.moments import init_moments
from ottava.kernels.op import tl, triton
from ottava.kernels.random import make_key
from ottava.kernels.split import split_parameter
from ottava.numerics.recipe import TENSOR
from ottava.optim.adamw import AdamW
from ottava.optim.clock import ROWS, DeviceClock, advance

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow encountered")


@triton.jit
def _read(row, stream, floats, ints):
    lr, correct1, correct2, step, key = read_clock(row, stream)
    tl.store(floats, lr)
    tl.store(floats + 1, correct1)
    tl.store(floats + 2, correct2)
    tl.store(ints, step)
    tl.store(ints + 1, key)


def test_a_row_holds_what_a_launch_would_be_given(device):
    for seed, step, stream, lr in ((0, 1, 0, 3e-4), (2**63 - 1, 7, 1 << 20, 0.1),
                                   (5, 123_456, (1 << 20) + 999, 0.0), (1, 2**31 - 1, 3, 1e-30)):  # fmt: skip
        row = torch.tensor(clock_row(lr, 0.9, 0.999, step, seed), dtype=torch.int32)
        assert row.shape == (WIDTH,)
        got = ref_read_clock(row, stream)
        floats = torch.tensor([lr, *corrections(0.9, 0.999, step)])
        assert torch.equal(torch.tensor(got[:3]), floats)
        assert got[3:] == (step, make_key(seed, step, stream))
        read = torch.empty(3, device=device), torch.empty(2, dtype=torch.int32, device=device)
        _read[(1,)](row.to(device), stream, *read)
        assert torch.equal(read[0].cpu(), floats) and tuple(read[1].tolist()) == got[3:]


def sides(master, states, shape, device):
    """Two equal parameters with their moments, as lists of adamw_step's first arguments."""
    torch.manual_seed(1)
    w = (torch.randn(shape) * 0.05).to(device)
    out = []
    for _ in range(2):
        low = None
        if master.startswith(("codes", "split")):
            p = torch.nn.Parameter(w.clone())
            cast = TENSOR.weight if master.startswith("codes") else None
            p = split_parameter(p, 8 if master.endswith("8") else 16, cast)
            parts = [p.detach(), p.residual, p.scale, p.amax, p.work]
        else:
            p = w.clone() if master != "bf16" else w.bfloat16()
            low = p.bfloat16() if master == "low" else None
            parts = [p, None, None, None, None]
        out.append((parts, init_moments(w, states), low))
    return out


def tensors(side):
    parts, moments, low = side
    return [bits(t) for t in (*parts, *moments.values(), low) if t is not None]


@pytest.mark.parametrize("side", ["reference", "triton"])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", ["fp32", "low", "bf16", "codes8", "split8", "split16"])
def test_clock_gives_the_bits_of_arguments(side, master, states, device):
    run = kernel.ref_adamw_step if side == "reference" else kernel.triton_adamw_step
    shape = (2, 3, 77) if master == "codes8" else (9, 70)
    host, clocked = sides(master, states, shape, device)
    seed, stream, found = 11, (1 << 20) + 3, torch.zeros(1, device=device)
    counters = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
    for step in (1, 2, 3, 4):
        g = (torch.randn(shape) * 0.01).bfloat16().to(device)
        lr = 1e-3 / step
        row = torch.tensor(clock_row(lr, 0.9, 0.95, step, seed), dtype=torch.int32, device=device)
        found.fill_(step == 3)  # a step that both skip
        for (parts, s, low), counter, tail in (
            (host, counters[0], (lr, step, make_key(seed, step, stream), None)),
            (clocked, counters[1], (0.0, 0, stream, row)),
        ):
            guard = (found, counter) if step > 1 else (None, None)
            lr_, step_, key, clock = tail
            run(*parts, g, s["m"], s["v"], s.get("m_scale"), s.get("v_range"), low, None, None,
                *guard, lr_, 0.9, 0.95, 1e-8, 0.1, 0, max(step_, 1), key, clock)  # fmt: skip
    assert counters[0].item() == counters[1].item() == 1
    assert same(tensors(host), tensors(clocked))


@pytest.mark.parametrize("side", ["reference", "triton"])
def test_without_a_counter_the_host_counts(side, device):
    """A guarded step whose skips the host takes back corrects the bias as an unguarded one does."""
    run = kernel.ref_adamw_step if side == "reference" else kernel.triton_adamw_step
    host, clocked = sides("codes8", "8bit", (16, 128), device)
    for step, bad in ((1, False), (2, True), (2, False), (3, False)):
        g = (torch.randn(16, 128) * 0.01).to(device)
        row = torch.tensor(clock_row(1e-3, 0.9, 0.95, step, 0), dtype=torch.int32, device=device)
        found = torch.full((1,), float(bad), device=device)
        parts, s, _ = clocked
        run(*parts, g, *s.values(), None, None, None, found, None, 0.0, 0.9, 0.95, 1e-8, 0.1, 0, 1,
            77, row)  # fmt: skip
        if not bad:
            parts, s, _ = host
            run(*parts, g, *s.values(), None, None, None, None, None, 1e-3, 0.9, 0.95, 1e-8, 0.1,
                0, step, make_key(0, step, 77))  # fmt: skip
    assert same(tensors(host), tensors(clocked))


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", MASTERS)
def test_optimizer_under_a_clock(master, states):
    torch.manual_seed(3)
    weights = [torch.randn(70, 64) * 0.1, torch.ones(96)]
    make = lambda: [parameter(weights[0].clone()), parameter(weights[1].clone(), False)]  # noqa: E731
    host, clocked = make(), make()
    a, b = (
        AdamW([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.0, "lr": 1e-2}],
              lr=1e-3, master=master, states=states, seed=9)
        for p in (host, clocked)
    )  # fmt: skip
    clock = DeviceClock("cpu")
    for step in range(4):
        for p, q in zip(host, clocked, strict=True):
            if step == 1 and p is host[1]:  # a parameter without a gradient falls behind
                p.grad = q.grad = None
                continue
            g = torch.randn(p.shape) * 0.01
            set_grad(p, g), set_grad(q, g)
        for group in (*a.param_groups, *b.param_groups):
            group["lr"] *= 0.7
        a.step()
        clock.wind(b)
        b.clock = clock
        b.step()
        b.clock = None
    assert same(everything(a), everything(b))


def test_rows_for_a_replay():
    p, q = parameter(torch.randn(64, 64)), parameter(torch.randn(32, 64))
    opt = AdamW([p, q], lr=0.25)
    clock = DeviceClock("cpu")
    set_grad(p, torch.ones(64, 64))
    clock.wind(opt)
    opt.clock = clock
    opt.step()
    updates = clock.updated
    assert [(row, state["step"]) for row, _, state in updates] == [(0, 1)]
    opt.param_groups[0]["lr"] = 0.5
    clock.set_for(updates)
    lr, correct1, _, step, _ = ref_read_clock(clock._values[0], 0)
    assert (lr, step) == (0.5, 2) and correct1 == pytest.approx(1 / (1 - 0.81))
    advance(updates)
    assert opt.state[p]["step"] == 2 and q not in opt.state
    advance(updates, -1)
    assert opt.state[p]["step"] == 1
    many = [parameter(torch.zeros(2, 2)) for _ in range(ROWS + 1)]
    opt = AdamW(many)
    for i, m in enumerate(many):
        opt.state[m]["step"] = i
    with pytest.raises(RuntimeError, match="different steps"):
        DeviceClock("cpu").wind(opt)
