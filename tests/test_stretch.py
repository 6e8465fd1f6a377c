"""Stretches that run again in backward: what they keep, the gradients they give, where they end."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from tiny_run import MODEL, tiny_run
from torch import nn

import ottava
from ottava.kernels import gemm as gemm_kernels
from ottava.layers.autocast import autocast
from ottava.models.load import load_model
from ottava.models.moe import Router
from ottava.planner.lifetimes import MemoryTracker
from ottava.recompute import restores_random_states, wrap_recompute
from ottava.stretch import run_stretch
from ottava.train.trainer import Trainer

DENSE = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 320,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def build(name="dense-w1", which="none", keep="int8", **overrides):
    """A converted model whose layers are recomputed as `which` says; the same weights each time."""
    torch.manual_seed(0)
    model = load_model(name, overrides=(DENSE if name == "dense-w1" else MODEL) | overrides).train()
    plan = ottava.plan(model, recipe="tensor")
    ottava.convert(model, plan, activations=torch.bfloat16)
    wrap_recompute(model, which, plan, nullcontext, keep=keep, draws_random=False)
    return model


def batch(length=64, vocabulary=256):
    ids = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(length) > length // 3).int().expand(2, length)
    return {"input_ids": ids, "labels": ids, "documents": documents, "use_cache": False}


def gradients(model, **inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**(inputs or batch()))
    out.loss.backward()
    return out.loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def distance_db(want, got):
    """Signal over error of all gradients together, in dB."""
    signal = sum(float(g.double().square().sum()) for g in want.values())
    error = sum(float((g.double() - got[n].double()).square().sum()) for n, g in want.items())
    return 10 * math.log10(signal / error) if error else math.inf


# ---- gradients ----


@pytest.mark.parametrize("name", ["dense-w1", "demo"])
def test_high_inputs_give_the_same_bits(name):
    loss, want = gradients(build(name))
    again, got = gradients(build(name, "layer", "high"))
    assert torch.equal(loss, again)
    assert all(torch.equal(want[n], g) for n, g in got.items())


@pytest.mark.parametrize("name", ["dense-w1", "demo"])
def test_int8_inputs_cost_no_more_than_fp8_itself(name):
    """The second run rounds to FP8 anew: its gradients are as far from FP32's as the first's."""
    loss, want = gradients(build(name))
    again, got = gradients(build(name, "layer"))
    assert torch.equal(loss, again)
    with autocast(enabled=False):
        exact = gradients(build(name))[1]
    first, second = distance_db(exact, want), distance_db(exact, got)
    assert second > first - 1.0
    assert distance_db(want, got) > 14.0
    assert all(torch.isfinite(g).all() for g in got.values())


def test_inputs_stay_high_outside_of_8_bits():
    with autocast(enabled=False):
        _, want = gradients(build())
        _, got = gradients(build(which="layer"))
    assert all(torch.equal(want[n], g) for n, g in got.items())


@pytest.mark.parametrize("keep", ["int8", "high"])
def test_experts_are_chosen_and_counted_once(keep):
    model = build("demo", "layer", keep, sequence_loss_weight=0.1)
    plain = build("demo", sequence_loss_weight=0.1)
    gradients(plain), gradients(model)
    routers = [(a, b) for a, b in zip(plain.modules(), model.modules(), strict=True)
               if isinstance(a, Router)]  # fmt: skip
    assert routers
    for a, b in routers:
        assert torch.equal(a.tokens_per_expert, b.tokens_per_expert)
        # the sequence loss leaves the layer by another way than its output
        assert distance_db({"w": a.weight.grad}, {"w": b.weight.grad}) > 15.0


def test_deterministic_and_a_second_backward():
    model = build(which="layer")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.model(batch()["input_ids"], use_cache=False).last_hidden_state.float()
    y.sum().backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.model.named_parameters()}
    model.zero_grad()
    y.sum().backward()
    assert all(torch.equal(first[n], p.grad) for n, p in model.model.named_parameters())


# ---- what is kept ----


def test_one_byte_a_feature_is_kept():
    """int8 codes and a BF16 scale for 128 of them, and of a layer nothing else but one amax."""
    model = build(which="layer")
    layers, hidden, tokens = 2, 256, 2 * 64
    with MemoryTracker() as tracker, torch.autocast("cpu", dtype=torch.bfloat16):
        tracker.watch(model)
        x = torch.randn(2, 64, hidden).bfloat16().requires_grad_()
        tables = model.model.rotary_tables(64, 0, None, x.device)
        before = sum(n for _, n in tracker.timeline.events)
        for layer in model.model.layers:
            x = layer(x, tables[layer.self_attn.rotary], None, None)
        kept = sum(n for _, n in tracker.timeline.events) - before
    output = 2 * tokens * hidden
    assert kept - output == layers * (tokens * (hidden + 2 * hidden // 128) + 4)


def test_the_second_run_ends_before_the_down_projection(monkeypatch):
    calls = []
    real = gemm_kernels._gemm

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return real(*args, **kwargs)

    monkeypatch.setattr(gemm_kernels, "_gemm", counted)
    count = []
    for which in ("none", "layer"):
        model = build(which=which, num_hidden_layers=1)
        calls.clear()
        gradients(model)
        count.append(len(calls))
    assert count[1] - count[0] == 6  # q, k, v, o, gate, up


# ---- the mechanism ----


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.p = nn.Linear(128, 128), nn.Linear(128, 128), 0.5

    def forward(self, x, factor=1.0):
        return self.b(torch.tanh(nn.functional.dropout(self.a(x), self.p)) * factor)


def test_random_states_are_put_back():
    module, x = Noisy(), torch.randn(4, 128)
    twin = copy.deepcopy(module)
    for m in (module, twin):
        torch.manual_seed(3)
        call = (m.forward, (x,), {"factor": 2.0})
        y = m(x, factor=2.0) if m is module else run_stretch(*call, keep="high")
        after = torch.rand(1)
        y.square().sum().backward()
        assert not torch.equal(torch.rand(1), after)
    assert all(torch.equal(a.grad, b.grad) for a, b in
               zip(module.parameters(), twin.parameters(), strict=True))  # fmt: skip


def test_stretches_nest_and_pass_gradients_to_their_input():
    module, x = Noisy().eval(), torch.randn(4, 128, requires_grad=True)
    module.p = 0.0

    def inner(h):
        return run_stretch(module.forward, (h,), {}, keep="high") + h

    def outer(h):
        return run_stretch(inner, (h,), {}, keep="high")

    outer(outer(x)).sum().backward()
    got, x.grad = x.grad, None
    y = module(x) + x
    (module(y) + y).sum().backward()
    assert torch.equal(got, x.grad)
    with torch.no_grad():
        assert not run_stretch(module.forward, (x,), {}).requires_grad


def test_a_stretch_that_changes_is_named():
    shapes = iter([4, 6])

    def fickle(x):
        return torch.tanh(x.reshape(next(shapes), -1)).sum()

    x = torch.randn(24, requires_grad=True)
    loss = run_stretch(fickle, (x,), {}, keep="high")
    with pytest.raises(RuntimeError, match=r"was \(torch.Size\(\[4, 6\]\).*runs again"):
        loss.backward()
    with pytest.raises(ValueError, match="keep='fp4' is not one of int8, high"):
        run_stretch(fickle, (x,), {}, keep="fp4")


def test_models_that_may_draw_random_numbers_are_known():
    model = load_model("demo", overrides=MODEL)
    wrap_recompute(model, "layer", None, nullcontext)
    assert restores_random_states(model) and not restores_random_states(build("demo", "layer"))


def test_a_run_learns_with_its_layers_recomputed(tmp_path):
    losses = {}
    for which in ("none", "layer"):
        run = tiny_run(tmp_path, "fp8-lean", train={"recompute": which}, out=which)
        trainer = Trainer(run)
        losses[which] = [trainer.step_once().loss for _ in range(6)]
    assert losses["layer"][0] == losses["none"][0]
    assert losses["layer"][-1] < losses["layer"][0]
    assert losses["layer"][-1] == pytest.approx(losses["none"][-1], abs=0.05)


def test_an_input_goes_once_it_has_done_its_work():
    module, x = Noisy().eval(), torch.randn(4, 128, requires_grad=True)
    module.p, seen = 0.0, []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            with pytest.raises(RuntimeError, match="asked for twice"):
                _ = ctx.saved_tensors
            return grad

    def probed(h):
        return Probe.apply(module(h))

    run_stretch(probed, (x,), {}).sum().backward()
    assert len(seen) == 1 and x.grad is not None
