"""A second conversion: adds to the first, undoes nothing, and says so where it has nothing to do."""

import warnings

import pytest
import torch
from test_convert import ids, llama
from tiny_run import MODEL
from torch import nn

import ottava
from ottava.models.load import load_model

LINEARS, EXPERTS = ["*_proj"], ["*.experts"]


def demo():
    return load_model("demo", overrides=MODEL)


def state(model):
    """Class, settings and marks of every module, and what the optimizer is to know of parameters."""
    names = {id(m): n for n, m in model.named_modules()}

    def plain(value):
        if isinstance(value, nn.Module):
            return names[id(value)]
        return tuple(map(plain, value)) if isinstance(value, tuple) else value

    modules = {
        n: (type(m), {k: plain(m.__dict__.get(k)) for k in sorted(m.__dict__.get("_ottava_settings", ()))})
        for n, m in model.named_modules()
    }  # fmt: skip
    return modules, {n: sorted(p.__dict__.items()) for n, p in model.named_parameters()}


def eight_bit(model):
    """name -> recipe of every module that computes or keeps in 8 bits."""
    return {n: m.recipe for n, m in model.named_modules() if m.__dict__.get("recipe") is not None}


@pytest.mark.parametrize("how", [{}, {"policy": "mimo"}, {"recipe": "storage"}])
def test_with_nothing_to_do_it_says_what_is_done(how):
    model = ottava.convert(llama(), **how, activations=torch.bfloat16)
    before, plan = state(model), model._ottava_plan
    made = ottava.plan(model, **how)
    for again in (
        lambda: ottava.convert(model, made),
        lambda: ottava.convert(model, **how, activations=torch.bfloat16),
        lambda: ottava.convert(model, **how),  # None: as it is
    ):
        with pytest.warns(UserWarning, match=r"nothing to do, .* first model\.layers\.0") as said:
            assert again() is model
        assert len(said) == 1
        assert f"{12 if how.get('policy') else 14} x linear" in str(said[0].message)
        assert said[0].filename == __file__
        assert state(model) == before and model._ottava_plan is plan


def test_what_changes_something_is_no_second_call():
    model = ottava.convert(llama())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava.convert(model, recipe="row")
        assert {r.name for r in eight_bit(model).values()} == {"row"}
        ottava.convert(model, recipe="row", activations=torch.bfloat16)
        assert model.model.embed_tokens.compute_dtype is torch.bfloat16
        ottava.convert(model, ottava.plan(model, recipe="row", recompute="mlp"))
        assert model.model.layers[0].mlp.recompute
        ottava.revert(model.model.layers[0])
        assert len([n for n in eight_bit(model) if ".layers.0." in n]) == 0
        ottava.convert(model, ottava.plan(model, recipe="row", recompute="mlp"))
    assert eight_bit(model) == eight_bit(ottava.convert(llama(), recipe="row"))
    model(input_ids=ids(), labels=ids()).loss.backward()


@pytest.mark.parametrize("first, second", [(EXPERTS, LINEARS), (LINEARS, EXPERTS)])
@pytest.mark.parametrize("keeps", [True, False])  # whether the second keeps what the first did
def test_linears_and_experts_in_either_order(first, second, keeps):
    want = eight_bit(ottava.convert(demo()))
    model = demo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts stay high: said at the first
        ottava.convert(model, keep=first)
    half = {n for n, r in eight_bit(model).items() if r}
    assert not any(n.endswith(first[0][1:]) for n in half) and half < set(want)
    if keeps:
        with pytest.warns(UserWarning, match="in 8 bits already and stay so"):
            ottava.convert(model, keep=second)
    else:
        ottava.convert(model)
    assert eight_bit(model) == want
    with pytest.warns(UserWarning, match="nothing to do"):
        ottava.convert(model)
    assert model._ottava_plan.num_fp8 == ottava.plan(demo()).num_fp8
