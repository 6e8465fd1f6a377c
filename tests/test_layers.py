"""Norms and the gated MLP: gradients against FP32, and the bytes they keep against the formula.

Bytes kept per token (decision 4 of the README's table): a norm and the linears that read it share
one byte per feature; the gated MLP adds gate and up at one byte each plus a BF16 scale per 128.
"""

import math

import pytest
import torch
from torch import nn

from ottava.layers import gemms as gemms_layer
from ottava.layers import mlp as mlp_layer
from ottava.layers.blocks import LayerNormLinear, LayerNormMLP
from ottava.layers.linear import Linear
from ottava.layers.mlp import GatedMLP
from ottava.layers.norm import LayerNorm, RMSNorm
from ottava.numerics.formats import E4M3, E5M2, error_db
from ottava.numerics.recipe import get_recipe


class Kept:
    """Distinct storages saved for backward, without parameters."""

    def __init__(self, module: nn.Module):
        self.ignored = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.storages: dict[int, tuple[int, torch.dtype]] = {}

    def __enter__(self):
        def pack(t):
            key = t.untyped_storage().data_ptr()
            if key not in self.ignored:
                self.storages[key] = (t.untyped_storage().nbytes(), t.dtype)
            return t

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc):
        self.hooks.__exit__(*exc)

    @property
    def nbytes(self) -> int:
        return sum(n for n, _ in self.storages.values())


def mlp(hidden=128, inner=256, recipe="tensor", recompute=False):
    torch.manual_seed(0)
    out = GatedMLP()
    out.gate_proj = Linear(hidden, inner, bias=False, recipe=recipe)
    out.up_proj = Linear(hidden, inner, bias=False, recipe=recipe)
    out.down_proj = Linear(inner, hidden, bias=False, recipe=recipe)
    out.recipe, out.recompute = get_recipe(recipe), recompute
    return out


def plain_mlp(m: GatedMLP, x):
    gate, up, down = (w.weight.detach().double().requires_grad_() for w in
                      (m.gate_proj, m.up_proj, m.down_proj))  # fmt: skip
    y = (nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    return y, (gate, up, down)


def train(module, x, grad):
    x = x.clone().requires_grad_()
    module(x).backward(grad)
    out = [x.grad, *(p.grad.clone() for p in module.parameters())]
    module.zero_grad()
    return out


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "delayed", "storage"])
def test_gated_mlp_gradients(recipe, recompute):
    m = mlp(recipe=recipe, recompute=recompute)
    x, grad = torch.randn(2, 40, 128), torch.randn(2, 40, 128)
    xd = x.double().requires_grad_()
    y, weights = plain_mlp(m, xd)
    y.backward(grad.double())
    got = train(m, x, grad)
    # Three GEMM errors add up: gate's and up's in the product, then down's own.
    assert error_db(y, m(x)) > E4M3.gemm_db - 10 * math.log10(3)
    for want, value in zip([xd.grad, *(w.grad for w in weights)], got, strict=True):
        assert error_db(want, value) > 20.0


@pytest.mark.parametrize("recipe", ["tensor", "delayed"])
def test_gradients_in_codes_are_those_of_the_plain_way(recipe, monkeypatch):
    """gate's and up's gradients in one GEMM, against a cast and a GEMM each; over several steps, so
    that delayed scaling leaves its pass over the gradients."""
    x, grad = torch.randn(70, 128), torch.randn(70, 128)
    ways, passes = [], []
    first = gemms_layer.swiglu_backward_first
    counted = lambda *a: passes.append(1) or first(*a)  # noqa: E731
    monkeypatch.setattr(gemms_layer, "swiglu_backward_first", counted)
    for joined in (True, False):
        m = mlp(recipe=recipe)
        monkeypatch.setattr(mlp_layer, "joins", lambda recipe, joined=joined: joined)
        steps = []
        for _ in range(3):
            steps.append([*train(m, x, grad), m(x).detach()])
            torch.optim.SGD(m.parameters(), lr=0.0).step()
        ways.append((steps, [w._history for w in (m.gate_proj, m.up_proj, m.down_proj)]))
    assert len(passes) == (1 if recipe == "delayed" else 3)
    xd = x.double().requires_grad_()
    y, weights = plain_mlp(mlp(), xd)
    y.backward(grad.double())
    exact = [xd.grad, *(w.grad for w in weights)]
    for got, want in zip(ways[0][0], ways[1][0], strict=True):
        assert torch.equal(got.pop(), want.pop())  # the output is the same to the bit
        for true, a, b in zip(exact, got, want, strict=True):
            assert error_db(true, a) > error_db(true, b) - 0.5
    if recipe == "delayed":
        for a, b in zip(ways[0][1], ways[1][1], strict=True):
            torch.testing.assert_close(a.amax, b.amax, rtol=1e-5, atol=0)


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj"])
def test_a_frozen_weight_gets_no_gradient_and_the_others_theirs(frozen):
    m, whole = mlp(), mlp()
    x, grad = torch.randn(40, 128), torch.randn(40, 128)
    getattr(m, frozen).weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    m(leaf).backward(grad)
    want = train(whole, x, grad)
    least = E5M2.gemm_db - 10 * math.log10(2)  # both have the error of a cast of the gradient
    assert error_db(want[0], leaf.grad) > least
    for (name, p), w in zip(m.named_parameters(), want[1:], strict=True):
        assert p.grad is None if name.startswith(frozen) else error_db(w, p.grad) > least


def test_the_gated_mlp_compiles_as_one_graph():
    m, x = mlp(), torch.randn(32, 128)
    grads = []
    for run in (m, torch.compile(m, backend="eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        grads.append((leaf.grad, m.gate_proj.weight.grad, m.down_proj.weight.grad))
        m.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_recompute_changes_no_bit_with_transposable_scales():
    x, grad = torch.randn(48, 128), torch.randn(48, 128)
    first, second = (train(mlp(recompute=r), x, grad) for r in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "storage"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gated_mlp_keeps_what_the_formula_says(recipe, recompute):
    m = mlp(128, 256, recipe, recompute)
    tokens, x = 64, torch.randn(64, 128, requires_grad=True)
    with Kept(m) as kept:
        m(x)
    scales = {"tensor": 4, "storage": 4, "row": 4 * 128, "block": 4 * 128}[recipe]
    expected = tokens * 128 + scales + 4 * (recipe == "tensor")  # and the amax of h
    if not recompute:
        expected += 2 * tokens * (256 + 2 * 256 // 128)
    assert kept.nbytes == expected


def test_evaluation_equals_training_bitwise():
    m, x = mlp(), torch.randn(32, 128)
    y = m(x)
    m.eval()
    with torch.no_grad():
        assert torch.equal(m(x), y)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "delayed", None])
def test_norm_gradients(kind, recipe):
    torch.manual_seed(0)
    norm = (RMSNorm if kind == "rms" else LayerNorm)(192, recipe=recipe or "tensor")
    norm.recipe = get_recipe(recipe) if recipe else None
    reference = (nn.RMSNorm if kind == "rms" else nn.LayerNorm)(192, eps=norm.eps).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        reference.weight.copy_(norm.weight)
    x, grad = 3 * torch.randn(2, 33, 192), torch.randn(2, 33, 192)
    xd = x.double().requires_grad_()
    reference(xd).backward(grad.double())
    got = train(norm, x, grad)
    limit = 100.0 if recipe is None else 28.0
    want = [xd.grad, *(p.grad for p in reference.parameters())]
    for a, b in zip(want, got, strict=True):
        assert error_db(a, b) > limit
    assert error_db(reference(x.double()), norm(x)) > 100.0


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_norm_and_two_linears_share_one_copy(recipe):
    norm = RMSNorm(128, recipe=recipe)
    readers = nn.ModuleList([Linear(128, 64, bias=False, recipe=recipe) for _ in range(3)])
    both = nn.ModuleList([norm, readers])
    x = torch.randn(4, 16, 128, requires_grad=True)
    with Kept(both) as kept:
        y = norm(x)
        outs = [r(y) for r in readers]
    scales = 4 if recipe == "tensor" else 4 * 128
    assert kept.nbytes == 64 * 128 + scales + 64 * 4  # codes, scale(s), one rstd per row
    sum(o.sum() for o in outs).backward()
    assert x.grad is not None


def test_direct_construction_as_in_the_article():
    for block in (
        LayerNormLinear(64, 96),
        LayerNormLinear(64, 96, normalization="RMSNorm"),
        LayerNormMLP(64, 128),
        LayerNormMLP(64, 128, activation="swiglu", normalization="RMSNorm"),
    ):
        x = torch.randn(2, 8, 64, requires_grad=True)
        block(x).square().mean().backward()
        assert torch.isfinite(x.grad).all()
        assert all(p.grad is not None for p in block.parameters())
    with pytest.raises(ValueError, match="normalization"):
        LayerNormLinear(64, 96, normalization="BatchNorm")
