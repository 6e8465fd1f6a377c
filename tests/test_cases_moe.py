"""Reported faults of MoE layers and of FP8 files with experts: cases 64, 65 and 72 of the project's list."""

import warnings

import pytest
import torch
from released_files import quantize, value
from safetensors.torch import save_file
from torch import nn

import ottava
from ottava.layers.experts import Experts
from ottava.layers.linear import Linear
from ottava.layers.mlp import GatedMLP


class Expert(nn.Module):
    """One expert as a module of its own, as Mixtral once had them, and Xiaomi's own class has."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ListMoE(nn.Module):
    """A softmax router that is an nn.Linear, and a ModuleList of experts."""

    def __init__(self, width=32, inner=48, experts=6):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))
        self.chosen = None

    def forward(self, x):
        weight, self.chosen = self.gate(x).float().softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (self.chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weight[token, slot, None].to(x.dtype))
        return out


class OddExperts(nn.Module):
    """3-D experts with a forward that nobody knows."""

    def __init__(self, width=64, inner=64, experts=8):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, width, inner) * 0.1)

    def forward(self, x):
        gate, up = torch.einsum("th,eih->tei", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("tei,ehi->th", torch.relu(gate) * up, self.down_proj)


def test_case_64_experts_in_a_list_are_converted():
    torch.manual_seed(0)
    model = ListMoE()
    plan = ottava.plan(model)
    assert plan.share_weights > 0.95  # all but the router
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava.convert(model, plan)
    assert all(isinstance(e, GatedMLP) and isinstance(e.down_proj, Linear) for e in model.experts)
    model(torch.randn(64, 32)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_case_64_experts_that_stay_are_said_with_their_share():
    model = nn.Sequential(nn.Linear(64, 64), OddExperts())
    plan = ottava.plan(model)
    assert plan.share_weights < 0.1 and "without a known forward" in plan["1"].reason
    assert "4.1% of the weights" in plan.summary()
    with pytest.warns(
        UserWarning, match=r"convert: 96% of the weights .* 1 modules of experts \(first 1: "
    ):
        ottava.convert(model, plan)
    assert not isinstance(model[1], Experts)
    with warnings.catch_warnings():  # asked for: nothing to say
        warnings.simplefilter("error")
        ottava.convert(nn.Sequential(nn.Linear(64, 64), OddExperts()), keep=["1"])


def test_case_65_a_router_that_is_a_linear_stays_high():
    torch.manual_seed(0)
    model = ListMoE()
    x = torch.randn(1000, 32)
    model(x)
    before = model.chosen
    row = ottava.plan(model)["gate"]
    assert row.kind == "router" and row.recipe is None
    ottava.convert(model)
    model(x)
    assert torch.equal(model.chosen, before)
    assert getattr(model.gate, "recipe", None) is None and model.gate.weight._ottava_fp32


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(130, 140, bias=False)
        self.embed = nn.Embedding(140, 130)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 2 * 140, 130))
        self.experts.down_proj = nn.Parameter(torch.zeros(2, 140, 130))


NAMES = ["linear.weight", "embed.weight"]
NAMES += [f"experts.{e}.{n}_proj.weight" for e in range(2) for n in ("gate", "up", "down")]


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("scalar", [False, True])
def test_case_72_no_scale_is_silently_left_out(tmp_path, suffix, scalar):
    tensors, truth = {}, {}
    for number, name in enumerate(NAMES):
        x = torch.randn(140, 130, generator=torch.Generator().manual_seed(number)) * 0.1
        codes, scale = quantize(x)
        if scalar:
            scale = x.abs().max() / 448
            codes = (x / scale).to(torch.float8_e4m3fn)
        tensors |= {name: codes, name + suffix: scale}
        truth[name] = codes.float() * scale if scalar else value(codes, scale)
        assert truth[name].abs().max() < 1.0 < codes.float().abs().max() / 100
    save_file(tensors, tmp_path / "model.safetensors")
    model = ottava.load_fp8(tmp_path, Holder())
    assert torch.equal(model.linear.weight, truth["linear.weight"])
    assert torch.equal(model.embed.weight, truth["embed.weight"])
    for e in range(2):
        pair = [truth[f"experts.{e}.{n}_proj.weight"] for n in ("gate", "up")]
        assert torch.equal(model.experts.gate_up_proj[e], torch.cat(pair))
        assert torch.equal(model.experts.down_proj[e], truth[f"experts.{e}.down_proj.weight"])
    for name in ("embed.weight", "experts.1.up_proj.weight", "linear.weight"):
        save_file(
            {n: t for n, t in tensors.items() if n != name + suffix}, tmp_path / "model.safetensors"
        )
        with pytest.raises(
            ValueError, match=f"{name} is FP8, and its scale {name}_scale_inv is missing"
        ):
            ottava.load_fp8(tmp_path, Holder())
