"""q, k and v as one: outputs and weight gradients of separate linears to the bit, one gradient of the
input from one GEMM, and separate linears again wherever something else is asked for."""

import copy
import pickle

import pytest
import torch
from test_decoder import blocks, ids, model_of
from test_layers import Kept
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.layers import waiting
from ottava.layers.linear import JoinedFunction, Linear, run_together
from ottava.numerics.formats import E5M2, error_db
from ottava.numerics.recipe import Cast, Recipe, get_recipe


class Three(nn.Module):
    """Projections of unequal widths, called one after the other."""

    def __init__(self, recipe="tensor", bias=True, sizes=(64, 32, 48), joined=True):
        super().__init__()
        torch.manual_seed(0)
        for name, n in zip("qkv", sizes, strict=True):
            setattr(self, name, Linear(80, n, bias=bias, recipe=recipe))
        with torch.no_grad():
            self.k.weight.mul_(0.01)
        if joined:
            run_together(self.q, self.k, self.v)

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


def run(model, x, weights=(1.0, 0.01, 3.0)):
    """(outputs, gradient of x, gradients of parameters) with gradients of unequal size."""
    x = x.clone().requires_grad_()
    outs = model(x)
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        w * (y.float() * torch.randn(y.shape, generator=generator)).sum()
        for y, w in zip(outs, weights, strict=True) if w
    )  # fmt: skip
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return [y.detach() for y in outs], x.grad, grads


def calls(monkeypatch):
    seen = []
    apply = JoinedFunction.apply
    monkeypatch.setattr(JoinedFunction, "apply", lambda *a: seen.append(a) or apply(*a))
    return seen


@pytest.mark.parametrize("recipe", ["tensor", "delayed"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_like_separate_linears(recipe, bias, dtype, monkeypatch):
    x = torch.randn(2, 37, 80).to(dtype)
    joined, apart = (Three(recipe, bias, joined=j).to(dtype) for j in (True, False))
    seen = calls(monkeypatch)
    for _ in range(3):
        got, want = run(joined, x), run(apart, x)
        assert all(torch.equal(a, b) for a, b in zip(got[0], want[0], strict=True))
        assert all(torch.equal(got[2][n], want[2][n]) for n in want[2])
        exact = Three(bias=bias).double()
        exact.load_state_dict(apart.state_dict())
        for m in (exact.q, exact.k, exact.v):
            m.recipe = None
        reference = run(exact, x.double())[1]
        assert error_db(reference, got[1]) > min(error_db(reference, want[1]), 28.0) - 0.5
        assert error_db(reference, got[1]) > E5M2.gemm_db - 0.5
        for model in (joined, apart):
            torch.optim.SGD(model.parameters(), lr=0.0).step()  # commits delayed scaling
        if recipe == "delayed":
            for a, b in zip(joined.children(), apart.children(), strict=True):
                assert torch.equal(a._history.amax[2], b._history.amax[2])
    assert len(seen) == 3


def test_split_masters_and_recompute():
    x, results = torch.randn(40, 80), []
    for way in ("plain", "again"):
        model = Three()
        ottava.AdamW(_tagged(model).parameters(), lr=1e-3, master="split16", states="8bit")
        call = model if way == "plain" else _Again(model)
        results.append(run(call, x))
    a, b = results
    assert torch.equal(a[1], b[1])
    assert all(torch.equal(p, q) for p, q in zip(a[2].values(), b[2].values(), strict=True))


def _tagged(model):
    for p in model.parameters():
        p._ottava_cast = get_recipe("tensor").weight if p.dim() == 2 else None
    return model


class _Again(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_an_output_that_nobody_uses(unused):
    weights = [0.0 if i == unused else 1.0 for i in range(3)]
    x = torch.randn(24, 80)
    got, want = run(Three(bias=False), x, weights), run(Three(bias=False, joined=False), x, weights)
    assert error_db(want[1], got[1]) > E5M2.gemm_db - 3
    for name, grad in want[2].items():
        if grad is None:
            assert got[2][name] is None or (got[2][name] == 0).all()
        else:
            assert torch.equal(got[2][name], grad)


def test_what_keeps_linears_apart(monkeypatch):
    seen, x = calls(monkeypatch), torch.randn(8, 80, requires_grad=True)

    def apart(model, x=x):
        outs = model(x)
        assert not seen and not hasattr(x, waiting._SLOT)
        return outs

    with torch.no_grad():
        apart(Three())
    apart(Three(), x.detach())
    for recipe in ("row", "block", "storage", Recipe(grad_output=Cast()),
                   Recipe(grad_output=Cast(format="e5m2", rounding="stochastic"))):  # fmt: skip
        apart(Three(recipe))
    frozen, mixed, freed = Three(), Three(), Three()
    frozen.v.weight.requires_grad_(False)
    apart(frozen)
    mixed.v.recipe = get_recipe("row")
    apart(mixed)
    freed.v.weight.data = torch.empty(0)
    freed.v.register_forward_pre_hook(lambda m, a: setattr(m.weight, "data", torch.zeros(48, 80)))
    apart(freed)
    with ottava.autocast(enabled=False):
        apart(Three())
    with ottava.autocast(recipe="row"):
        apart(Three())
    Three()(x)
    assert len(seen) == 1 and not hasattr(x, waiting._SLOT)


def test_hooks_other_inputs_and_changes_between_the_calls():
    x = torch.randn(16, 80)

    def double(module, args, out):
        return out * 2

    got, want = Three(), Three(joined=False)
    for model in (got, want):
        model.k.register_forward_hook(double)
        model.v.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    a, b = run(got, x), run(want, x)
    assert all(torch.equal(p, q) for p, q in zip(a[0], b[0], strict=True))
    assert error_db(b[1], a[1]) > E5M2.gemm_db - 3

    model, leaf = Three(), x.clone().requires_grad_()
    y = leaf * 1
    model.q(y)
    with torch.no_grad():
        y.mul_(3)
    assert torch.equal(model.k(y), Three(joined=False).k(y))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "mimo"])
def test_attention_of_every_family_joins(name, monkeypatch):
    model, seen = model_of(name, "tensor", torch.bfloat16), calls(monkeypatch)
    model(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    assert len(seen) == len(blocks(model)) == 2
    leader = blocks(model)[0].self_attn.q_proj
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other = blocks(twin)[0].self_attn
        assert other.q_proj.together == (other.q_proj, other.k_proj, other.v_proj)
    assert len(leader.together) == 3
    assert list(model.state_dict()) == list(ottava.revert(model).state_dict())
    assert "together" not in leader.__dict__


def test_nothing_more_is_kept():
    sizes = []
    for joined in (True, False):
        model, x = Three(joined=joined), torch.randn(64, 80, requires_grad=True)
        with Kept(model) as kept:
            model(x)
        sizes.append(kept.nbytes)
    assert sizes[0] == sizes[1] == 64 * 80 + 4


def test_the_inputs_codes_are_transposed_once():
    turned = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.ottava.transpose_codes.default:
                turned.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    model, x = Three(bias=False), torch.randn(64, 80, requires_grad=True)
    loss = sum(y.sum() for y in model(x))
    with Watch():
        loss.backward()
    assert turned == [(64, 80)]
