"""The 8-bit linear against the same linear in FP32: output and every gradient, every recipe, and
the faults of shapes, dtypes, caches and contexts that were reported for other libraries."""

import copy
import gc
import math

import pytest
import torch
from torch import nn

from ottava.kernels.cast import scale_from_amax
from ottava.layers.autocast import autocast
from ottava.layers.delayed import discard_amax
from ottava.layers.linear import Linear
from ottava.numerics.formats import E4M3, E5M2, error_db
from ottava.numerics.recipe import RECIPES, Cast, Gemm, Recipe

RECIPE_NAMES = sorted(RECIPES)


def make(k, n, *, recipe="tensor", bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Linear(k, n, bias=bias, dtype=dtype, recipe=recipe)


def plain(layer: Linear) -> nn.Linear:
    out = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    with torch.no_grad():
        out.weight.copy_(layer.weight)
        if layer.bias is not None:
            out.bias.copy_(layer.bias)
    return out


def run(layer, x, grad=None):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
               if grad is None else grad)  # fmt: skip
    out = [y.detach(), x.grad, layer.weight.grad.clone()]
    if layer.bias is not None:
        out.append(layer.bias.grad.clone())
    layer.zero_grad()
    return out


def least_db(recipe: Recipe) -> float:
    """The GEMM limit of the coarser operand's format."""
    coarse = "e5m2" in (recipe.input.format, recipe.weight.format, recipe.grad_output.format)
    return E5M2.gemm_db if coarse else E4M3.gemm_db


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_gradient_is_within_the_formats_error(name):
    layer = make(256, 384, recipe=name)
    x = torch.randn(200, 256)
    got, want = run(layer, x), run(plain(layer), x)
    recipe = RECIPES[name]
    limits = [E4M3.gemm_db, least_db(recipe), least_db(recipe), 60.0]
    if name == "storage":  # only grad_weight sees a cast, and only of the input
        limits = [60.0, 60.0, E4M3.cast_db, 60.0]
    for what, a, b, limit in zip(
        ["y", "grad_x", "grad_w", "grad_b"], want, got, limits, strict=True
    ):
        assert b.shape == a.shape
        assert error_db(a, b) >= limit, what


def test_fp8_is_real_not_a_quiet_fallback():
    layer = make(256, 256)
    x = torch.randn(64, 256)
    y = layer(x)
    assert 25 < error_db(plain(layer)(x), y) < 45


def strided_inputs():
    full = torch.randn(2, 8, 64)
    return {
        "slice": full[:, 3:, :],
        "transposed": torch.randn(64, 32).t(),
        "4-D": torch.randn(2, 3, 4, 64),
        "expanded": torch.randn(1, 1, 64).expand(4, 5, 64),
        "1-D": torch.randn(64),
    }


@pytest.mark.parametrize("kind", ["slice", "transposed", "4-D", "expanded", "1-D"])
@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_strided_inputs_equal_contiguous_ones_bitwise(kind, name):
    layer = make(64, 48, recipe=name)
    x = strided_inputs()[kind]
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    y2 = layer(x.contiguous())
    assert torch.equal(y, y2)
    y.sum().backward()
    assert leaf.grad.shape == x.shape


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("w_dtype", FLOATS)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", [False, True])
def test_any_mix_of_dtypes(x_dtype, w_dtype, bias, cast):
    layer = make(32, 48, bias=bias is not None, dtype=w_dtype)
    if bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach().to(bias))
    x = torch.randn(8, 32, dtype=x_dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
        y = layer(x)
        with autocast(enabled=False):
            assert layer(x).dtype == y.dtype
    assert y.dtype == (torch.bfloat16 if cast else x_dtype)
    y.float().sum().backward()
    assert x.grad.dtype == x_dtype and layer.weight.grad.dtype == w_dtype
    if bias is not None:
        assert layer.bias.grad.dtype == bias


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_a_gemm_kept_high_under_autocast(gemm):
    layer = make(64, 64, recipe=Recipe(**{gemm: Gemm(fp8=False)}))
    x = torch.randn(48, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(layer, x)
        want = run(plain(layer), x)
    index = ["output", "grad_input", "grad_weight"].index(gemm)
    a, b = want[index].float(), got[index].float()
    assert (a - b).norm() <= 0.01 * a.norm()
    assert got[2].dtype == torch.float32


def test_bias_alone_trainable():
    layer = make(64, 32)
    layer.weight.requires_grad_(False)
    grad = torch.randn(16, 32)
    layer(torch.randn(16, 64)).backward(grad)
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_zero_rows_give_the_bias_and_change_nothing_else(name):
    layer = make(64, 32, recipe=name)
    x = torch.randn(32, 64)
    x[5] = x[31] = 0
    y = layer(x)
    assert torch.equal(y[5], layer.bias) and torch.equal(y[31], layer.bias)
    keep = [i for i in range(32) if i not in (5, 31)]
    torch.testing.assert_close(layer(x[keep]), y[keep], rtol=0, atol=0)
    grad = torch.randn(32, 32)
    grad[3] = 0
    with torch.no_grad():
        layer.weight[7] = 0
    assert all(torch.isfinite(t).all() for t in run(layer, x, grad))


def test_delayed_first_step_is_already_scaled():
    layer = make(64, 64, recipe="delayed", bias=False)
    with torch.no_grad():
        layer.weight.normal_(std=0.005)
    x, grad = torch.randn(64, 64), 1e-6 * torch.randn(64, 64)
    _, _, got = run(layer, x, grad)
    _, _, want = run(plain(layer), x, grad)
    assert (got - want).norm() <= 0.1 * want.norm()


def test_delayed_history_commits_on_real_steps_only():
    layer = make(32, 32, recipe="delayed", bias=False)
    opt = torch.optim.SGD(layer.parameters(), lr=0.0)
    for size in (10.0, 1.0, 1.0):
        x = torch.full((16, 32), size)
        layer(x).sum().backward()
        layer(x / 2)  # a second call of the step: the larger amax counts, one entry
        opt.step()
    assert layer._history.amax[0, :4].tolist() == [1.0, 1.0, 10.0, 0.0]
    before = layer._history.amax.clone()
    layer(torch.full((16, 32), 99.0)).sum().backward()  # a step that is skipped
    discard_amax(layer.parameters())
    layer(torch.full((16, 32), 2.0)).sum().backward()
    opt.step()
    assert layer._history.amax[0, :2].tolist() == [2.0, 1.0]
    assert torch.equal(layer._history.amax[0, 1:], before[0, :-1])


@pytest.mark.parametrize("amax_from,want", [("max", 10.0), ("most_recent", 1.0)])
def test_delayed_amax_from_and_margin(amax_from, want):
    scales = []
    for margin in (0, 1):
        cast = Cast(scaling="delayed", amax_from=amax_from, margin=margin)
        layer = make(32, 32, recipe=Recipe(input=cast), bias=False)
        opt = torch.optim.SGD(layer.parameters(), lr=0.0)
        for size in (10.0, 1.0, 1.0):
            layer(torch.full((16, 32), size)).sum().backward()
            opt.step()
        scales.append(
            scale_from_amax(layer._history.past("input", cast, torch.ones(1, 32)), cast).item()
        )
    assert scales[0] == pytest.approx(want / 448)
    assert scales[1] == 2 * scales[0]


def test_autocast_nests_and_unwinds():
    layer, x = make(64, 64), torch.randn(16, 64)
    fp8, high = layer(x), plain(layer)(x)
    with autocast(enabled=True):
        assert torch.equal(layer(x), fp8)
        with autocast(enabled=False):
            torch.testing.assert_close(layer(x), high)
            with autocast(enabled=True, recipe="row"):
                assert not torch.equal(layer(x), high)
        try:
            with autocast(enabled=False):
                raise KeyError("inner")
        except KeyError:
            pass
        assert torch.equal(layer(x), fp8)
    assert torch.equal(layer(x), fp8)
    with pytest.raises(ValueError, match="did you mean"), autocast(recipe="tenser"):
        pass


def test_models_leave_nothing_behind():
    from ottava.layers import delayed

    outputs = []
    gc.collect()
    others = len(delayed._histories)  # of models that other tests hold
    gc.freeze()  # what they left need not be searched 50 times
    for _ in range(50):
        layer = make(16, 16, recipe="delayed")
        opt = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
        layer(x).sum().backward()
        opt.step()
        outputs.append(layer(x).detach())
        del layer, opt
        gc.collect()
    gc.unfreeze()
    assert torch.equal(outputs[0], outputs[-1])
    assert len(delayed._histories) <= others


def test_output_is_bitwise_the_same_in_every_mode():
    layer, x = make(64, 64), torch.randn(16, 64)
    y = layer(x)
    layer.eval()
    assert torch.equal(layer(x), y)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    with torch.inference_mode():
        assert torch.equal(layer(x).clone(), y)
    layer.train()
    layer(x).sum().backward()


def test_a_history_made_in_inference_mode_serves_training():
    layer, x = make(32, 32, recipe="delayed"), torch.randn(16, 32)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    assert layer._history.amax[0, 0] == x.abs().max() == layer._history.top[0]


def test_a_history_written_from_outside_is_used():
    layer, x = make(32, 32, recipe="delayed"), torch.randn(16, 32)
    layer(x).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    layer._history.amax.copy_(torch.full((3, 16), 7.0))
    assert layer._history.past("input", Cast(scaling="delayed"), x).item() == 7.0
    small = layer._history.resized(4)
    assert small.past("input", Cast(scaling="delayed"), x).item() == 7.0
    assert small.amax.shape == (3, 4)


def test_evaluation_leaves_no_trace_in_the_history():
    layer = make(32, 32, recipe="delayed")
    layer.eval()
    layer(torch.full((16, 32), 100.0))
    layer.train()
    with torch.no_grad():
        layer(torch.full((16, 32), 100.0))
    assert layer._history.pending.max() == 0


def test_codes_are_kept_once_for_several_readers():
    a, b = make(64, 32), make(64, 48)
    x = torch.randn(16, 64)
    kept = set()

    def pack(t):
        if t.dtype == torch.float8_e4m3fn:
            kept.add(t.untyped_storage().data_ptr())
        assert t.dtype == torch.float8_e4m3fn or t.numel() == 1 or t is a.weight or t is b.weight
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ya, yb = a(x), b(x)
    assert len(kept) == 1
    (ya.sum() + yb.sum()).backward()


def test_an_input_changed_in_place_is_cast_again():
    layer, x = make(64, 32), torch.randn(16, 64)
    first = layer(x)
    with torch.no_grad():
        x.mul_(2)
    assert not torch.equal(layer(x), first)
    assert torch.equal(layer(x), layer(x.clone()))


def test_deepcopy_shares_nothing():
    layer = make(32, 32, recipe="delayed")
    opt = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(16, 32)
    for _ in range(3):
        layer(x).sum().backward()
        opt.step()
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    before = layer.weight.clone(), layer._history.amax.clone()
    twin_opt = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(5 * x).sum().backward()
    twin_opt.step()
    assert torch.equal(layer.weight, before[0]) and torch.equal(layer._history.amax, before[1])


def test_stochastic_rounding_repeats_and_is_unbiased():
    recipe = Recipe(grad_output=Cast(format="e5m2", rounding="stochastic"))
    layer, x = make(64, 64, recipe=recipe, bias=False), torch.randn(64, 64)
    grad = torch.randn(64, 64)
    first, again = run(layer, x, grad), run(layer, x, grad)
    assert torch.equal(first[2], again[2])
    assert math.isfinite(error_db(run(plain(layer), x, grad)[2], first[2]))
