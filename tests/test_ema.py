"""The running average: FP32 whatever the weights, the right sign, and a resume that goes on."""

import io

import pytest
import torch
from torch import nn

from ottava.kernels.split import SplitParameter
from ottava.numerics.recipe import Cast
from ottava.optim.adamw import AdamW
from ottava.optim.ema import EMA


def model_of(*values, dtype=torch.float32):
    return nn.ParameterList([nn.Parameter(torch.full((4,), v, dtype=dtype)) for v in values])


def set_to(model, value):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_weights_do_not_stop_it(dtype):
    model = model_of(1.0, dtype=dtype)
    ema = EMA(model, decay=0.999)
    set_to(model, 1.0078125)
    for _ in range(1000):
        ema.update()
    assert ema.shadow["0"].dtype == torch.float32
    assert ema.shadow["0"][0].item() == pytest.approx(1.00494, abs=1e-4)


@pytest.mark.parametrize("n", [1, 10, 100])
def test_it_approaches_the_weights(n):
    model = model_of(0.0)
    ema = EMA(model, decay=0.99)
    set_to(model, 1.0)
    gap = 1.0
    for _ in range(n):
        ema.update()
        now = 1.0 - ema.shadow["0"][0].item()
        assert now < gap
        gap = now
    assert ema.shadow["0"][0].item() == pytest.approx(1 - 0.99**n, abs=1e-5)


def test_warm_up_goes_on_after_a_resume():
    model = model_of(1.0)
    ema = EMA(model, decay=0.9999, warmup=True)
    ema.updates = 1000
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    file.seek(0)

    set_to(model, 7.0)
    resumed = EMA(model, decay=0.5, warmup=True)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    set_to(model, 5.0)
    resumed.update()
    assert resumed.updates == 1001 and resumed.decay == 0.9999
    assert resumed.shadow["0"][0].item() == pytest.approx(1.0356, abs=1e-4)
    fresh = EMA(model, decay=0.9999, warmup=True)
    fresh.shadow["0"].fill_(1.0)
    fresh.update()
    assert fresh.shadow["0"][0].item() == pytest.approx(4.6, abs=1e-5)


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    ema = EMA(model, decay=0.5)
    assert list(ema.shadow) == ["0.weight"]
    start = model[0].weight.detach().clone()
    set_to(model, 1.0)
    ema.update()
    torch.testing.assert_close(ema.shadow["0.weight"], (start + 1.0) / 2)
    with ema.applied():
        assert torch.equal(model[1].weight, ema.shadow["0.weight"])


def test_applied_returns_every_bit_also_after_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    model[0].bias.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    ema = EMA(model, decay=0.5)
    assert "0.bias" not in ema.shadow
    for value in ema.shadow.values():
        value.add_(1.0)
    with pytest.raises(KeyError), ema.applied():
        assert torch.equal(model[0].weight, ema.shadow["0.weight"])
        assert torch.equal(model[1].weight, ema.shadow["1.weight"].bfloat16())
        with pytest.raises(RuntimeError, match="already applied"), ema.applied():
            pass
        with pytest.raises(RuntimeError, match="leave applied"):
            ema.update()
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    ema.update()


@pytest.mark.parametrize("master", ["split16", "split24"])
def test_split_masters_are_averaged_in_full(master):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Embedding(70, 64))
    model[0].weight._ottava_cast = Cast(scale_kind="pow2")
    AdamW(model.parameters(), master=master)
    assert all(isinstance(p, SplitParameter) for p in model.parameters())
    ema = EMA(model, decay=0.9)
    parts = [[p.detach(), p.residual, p.scale, p.amax] for p in model.parameters()]
    before = [[None if t is None else t.clone() for t in row] for row in parts]
    for p in model.parameters():
        p.write(p.dequantize() * 3.0)
    moved = [p.dequantize().clone() for p in model.parameters()]
    ema.update()
    expected = {n: 0.9 * s.clone() for n, s in zip(ema.shadow, moved, strict=True)}
    for (name, shadow), w in zip(ema.shadow.items(), moved, strict=True):
        expected[name] = 0.9 * w / 3.0 + 0.1 * w
        torch.testing.assert_close(shadow, expected[name], rtol=2**-10, atol=1e-7)
    with ema.applied():
        for p, shadow in zip(model.parameters(), ema.shadow.values(), strict=True):
            torch.testing.assert_close(p.dequantize(), shadow, rtol=2**-11, atol=1e-6)
    for p, w in zip(model.parameters(), moved, strict=True):
        assert torch.equal(p.dequantize(), w)
    assert parts[0][1] is model[0].weight.residual and not torch.equal(before[0][2], parts[0][2])


def test_what_does_not_fit_is_refused():
    ema = EMA(model_of(1.0))
    with pytest.raises(ValueError, match="first '1'"):
        ema.load_state_dict(EMA(model_of(1.0, 2.0)).state_dict())
    other = EMA(nn.ParameterList([nn.Parameter(torch.ones(5))]))
    with pytest.raises(ValueError, match=r"\[5\] there and \[4\] here"):
        ema.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="decay"):
        EMA(model_of(1.0), decay=1.0)
