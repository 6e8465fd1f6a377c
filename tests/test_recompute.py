"""What a plan lets run again in backward, `convert` applies, a run applies once, `revert` undoes."""

import copy
from collections import Counter

import pytest
import torch
from test_convert import ids, llama
from tiny_run import tiny_run
from torch import nn

import ottava
from ottava.recompute import wrap_recompute
from ottava.train.trainer import Trainer


def counted(model, end="layers.0"):
    """How often the first module inside the one whose name ends so ran."""
    calls = Counter()
    (module,) = (m for n, m in model.named_modules() if n.endswith(end))
    first = next(m for m in module.modules() if not any(m.children()))
    first.register_forward_pre_hook(lambda *_: calls.update([end]))
    return calls


def gradients(model):
    model.zero_grad()
    loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def close(got, want, least):
    error = sum(float((got[n] - w).square().sum()) for n, w in want.items())
    return error < least * sum(float(w.square().sum()) for w in want.values())


def saved_bytes(model):
    """Bytes of tensors that autograd holds between forward and backward, outside stretches."""
    found = {}

    def pack(t):
        found[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(input_ids=ids(), labels=ids(), use_cache=False)
    return sum(found.values())


def test_convert_lets_layers_run_again_and_revert_undoes_it():
    want_loss, want = gradients(ottava.convert(llama()))
    model = llama()
    ottava.convert(model, ottava.plan(model, recompute="layer"))
    whole = saved_bytes(ottava.convert(llama()))
    assert saved_bytes(model) < 0.7 * whole
    again = copy.deepcopy(model)
    assert again.model.layers[0].forward.args[0].__self__ is again.model.layers[0]
    assert torch.equal(gradients(again)[0], want_loss)
    calls = counted(model)
    loss, got = gradients(model)
    assert calls["layers.0"] == 2  # once forward, once in backward
    assert torch.equal(loss, want_loss) and close(got, want, 0.1)
    ottava.revert(model)
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)
    assert torch.equal(gradients(model)[0], gradients(llama())[0])


def test_a_second_plan_decides_what_runs_again():
    model = llama()
    ottava.convert(model, ottava.plan(model, recompute="layer"))
    with pytest.warns(UserWarning, match="nothing to do"):
        ottava.convert(model, ottava.plan(model, recompute="layer"))
    calls = counted(model)
    gradients(model)
    assert calls["layers.0"] == 2
    ottava.convert(model, ottava.plan(model, recompute="none"))
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)


def test_mlps_that_are_not_fused_run_again_too():
    model = llama()
    plan = ottava.plan(model, keep=["*.gate_proj"], recompute="mlp")
    assert plan["model.layers.0.mlp"].recipe is None
    assert plan["model.layers.0.mlp.down_proj"].kept == "nothing: its MLP runs again"
    ottava.convert(model, plan)
    calls = counted(model, "layers.0.mlp")
    gradients(model)
    assert calls["layers.0.mlp"] == 2


@pytest.mark.parametrize("inner", [{"enabled": False}, {"recipe": "row"}])
def test_the_second_run_computes_as_the_first(inner):
    """Also where backward is called outside the context."""

    def run(recompute):
        model = llama()
        ottava.convert(model, ottava.plan(model, recompute=recompute))
        with ottava.autocast(**inner):
            loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    assert close(run("layer"), run("none"), 1e-6 if inner == {"enabled": False} else 0.1)


def test_a_forward_of_the_modules_own_comes_back():
    model = llama()
    layer = model.model.layers[0]
    own = layer.__dict__["forward"] = lambda *args, **kwargs: type(layer).forward(
        layer, *args, **kwargs
    )
    wrap_recompute(model, "layer", None)
    wrap_recompute(model, "layer", None)
    assert layer.forward.args[0] is own
    wrap_recompute(model, "none", None)
    assert layer.forward is own


def test_nothing_to_run_again_is_an_error_at_once():
    model = nn.Sequential(nn.Linear(64, 64))
    for recompute, what in (("layer", "no list of layers"), ("mlp", "no MLP that could run again")):
        with pytest.raises(ValueError, match=what):
            ottava.plan(model, recompute=recompute)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("preset", ["fp8", "amp"])  # with a plan, and without
def test_a_run_applies_it_once(tmp_path, preset):
    trainer = Trainer(tiny_run(tmp_path, preset, train={"recompute": "layer"}))
    layer = trainer.model.model.layers[0]
    assert layer.forward.args[0].__self__ is layer and layer.forward.args[1] == trainer.eight_bit
    calls = counted(trainer.model)
    trainer.step_once()
    assert calls["layers.0"] == 2 * trainer.config.train.accumulate
