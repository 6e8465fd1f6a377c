"""Attention and rope: operators, Triton kernels, the layer and what it keeps, transformers."""

import logging

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.kernels import attention as kernels
from ottava.kernels import flash, flash_backward
from ottava.kernels.attention import attention, attention_backward, document_bounds
from ottava.kernels.cast import quantize_int8
from ottava.kernels.rope import (
    rope,
    rope_back,
    rope_int8,
    triton_rope,
    triton_rope_back,
    triton_rope_int8,
)
from ottava.layers import attention as layer
from ottava.layers.autocast import autocast
from ottava.layers.linear import Linear
from ottava.layers.saved import carried_by
from ottava.numerics.formats import error_db
from ottava.numerics.recipe import get_recipe

# Rows past the end divide zero by zero under the interpreter, and are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
DOUBLE = torch.float64
# causal, window, sinks, documents, T, S, D, V, H, G
CASES = [
    (True, None, False, False, 37, 37, 24, 16, 4, 2),
    (True, 1, False, False, 9, 9, 8, 8, 2, 2),
    (True, 1, True, False, 9, 9, 8, 8, 2, 2),
    (True, 4, True, False, 33, 33, 24, 16, 4, 1),
    (True, 128, True, True, 65, 65, 16, 16, 2, 1),
    (True, 32, False, True, 70, 70, 16, 8, 2, 2),
    (True, None, True, True, 66, 66, 192, 128, 2, 1),
    (False, None, True, True, 33, 33, 24, 16, 2, 1),
    (False, None, False, False, 20, 45, 16, 16, 2, 1),
    (True, 8, True, False, 5, 41, 24, 24, 2, 1),
    (True, None, False, False, 1, 1, 16, 16, 1, 1),
]


def tensors(case, dtype=DOUBLE, batch=2):
    causal, window, sinks, documents, t, s, d, v, h, g = case
    generator = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE).to(dtype)

    q, k, val = rand(batch, t, h, d), rand(batch, s, g, d), rand(batch, s, g, v)
    score = rand(h) if sinks else None
    ids = None
    if documents:  # the second row ends its documents elsewhere
        ids = torch.stack([(torch.arange(t) + 5 * row) // 17 for row in range(batch)]).int()
    settings = {"scale": d**-0.5, "causal": causal, "window": window, "documents": ids}
    return q, k, val, score, settings


def loop(q, k, v, sinks, *, scale, causal, window, documents):
    """out and lse, one query row and one head at a time, as the definition says."""
    (b, t, h, _), (s, g) = q.shape, k.shape[1:3]
    rows, norms = [], []
    for n in range(b):
        for i in range(t):
            at = i + s - t
            seen = torch.ones(s, dtype=torch.bool)
            if causal:
                seen &= torch.arange(s) <= at
            if window is not None:
                seen &= torch.arange(s) > at - window
            if documents is not None:
                seen &= documents[n] == documents[n, i]
            for head in range(h):
                group = head // (h // g)
                scores = scale * (k[n, seen, group] @ q[n, i, head])
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                weights = scores.softmax(0)[: int(seen.sum())]
                rows.append(weights @ v[n, seen, group])
                norms.append(scores.logsumexp(0))
    out = torch.stack(rows).view(b, t, h, -1)
    return out, torch.stack(norms).view(b, t, h).transpose(1, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_a_loop_in_fp64(case):
    q, k, v, sinks, settings = tensors(case)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    want, want_lse = loop(q, k, v, sinks, **settings)
    grad = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, leaves, grad, materialize_grads=True)
    q, k, v = q.detach(), k.detach(), v.detach()
    settings["sinks"] = None if sinks is None else sinks.detach()
    out, lse = attention(q, k, v, **settings)
    *grads, dsinks = attention_backward(grad, q, k, v, out, lse, **settings)
    assert (dsinks is None) == (sinks is None)
    for got, expected in zip(
        (out, lse, *grads, dsinks), (want.detach(), want_lse.detach(), *want_grads), strict=False
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [300, 129, 128])
@pytest.mark.parametrize("window", [None, 4, 128, 200])
def test_reference_is_the_same_over_several_chunks(length, window, monkeypatch):
    case = (True, window, True, True, length, length, 8, 8, 2, 1)
    q, k, v, sinks, settings = tensors(case, batch=1)
    settings["sinks"] = sinks
    many = attention(q, k, v, **settings)
    grads = attention_backward(q, q, k, v, *many, **settings)
    monkeypatch.setattr(kernels, "_ROWS", 10_000)
    one = attention(q, k, v, **settings)
    whole = attention_backward(q, q, k, v, *one, **settings)
    for a, b in zip((*many, *grads), (*one, *whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bf16 dot
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_agrees_with_the_reference(case, dtype, device):
    q, k, v, sinks, settings = tensors(case, dtype)
    q, k, v = q.to(device), k.to(device), v.to(device)
    sinks = None if sinks is None else sinks.float().to(device)
    bounds = (None, None)
    if settings["documents"] is not None:
        bounds = document_bounds(settings["documents"].to(device))
    mask = (settings["scale"], settings["causal"], settings["window"])
    want = kernels.ref_attention(q, k, v, *mask, sinks, *bounds)
    grad = torch.randn_like(want[0])
    want_grads = kernels.ref_attention_backward(grad, q, k, v, *want, *mask, sinks, *bounds)
    got = flash.triton_attention(q, k, v, *mask, sinks, *bounds)
    *grads, delta = flash_backward.triton_attention_backward(grad, q, k, v, *want, *mask, *bounds)
    grads.append(kernels._grad_sinks(sinks, want[1], delta))
    # One rounding of scores' weights to the dtype per tile product: a few units in the last place.
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    for a, b in zip((*got, *grads), (*want, *want_grads), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_triton_splits_whole_tiles_from_edges(device):
    """Lengths at which the three loops (edge, whole tiles, edge) all run."""
    for length, window, documents in ((200, None, True), (150, None, False), (420, 400, False)):
        case = (True, window, True, documents, length, length, 16, 16, 1, 1)
        q, k, v, sinks, settings = tensors(case, torch.float32, batch=1)
        bounds = (None, None)
        if documents:
            bounds = document_bounds((torch.arange(length, device=device) // 170)[None])
        q, k, v, sinks = (x.to(device) for x in (q, k, v, sinks))
        mask = (settings["scale"], True, window)
        out, lse = kernels.ref_attention(q, k, v, *mask, sinks, *bounds)
        want = kernels.ref_attention_backward(q, q, k, v, out, lse, *mask, sinks, *bounds)
        got = flash.triton_attention(q, k, v, *mask, sinks, *bounds)
        torch.testing.assert_close(got, (out, lse), rtol=2e-5, atol=2e-5)
        grads = flash_backward.triton_attention_backward(q, q, k, v, out, lse, *mask, *bounds)
        torch.testing.assert_close(grads[:3], want[:3], rtol=5e-5, atol=5e-5)


def test_triton_takes_slices_of_a_fused_projection(device):
    case = (True, 8, False, False, 21, 21, 16, 16, 2, 2)
    fused = torch.randn(2, 21, 6 * 16, device=device)
    q, k, v = (x.unflatten(-1, (2, 16)) for x in fused.split(32, -1))
    want = kernels.ref_attention(q, k, v, 0.2, True, case[1], None, None, None)
    got = flash.triton_attention(q, k, v, 0.2, True, case[1], None, None, None)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    grad = torch.randn(2, 2, 21, 16, device=device).transpose(1, 2)
    args = (grad, q, k, v, *want, 0.2, True, case[1])
    want_grads = kernels.ref_attention_backward(*args, None, None, None)
    grads = flash_backward.triton_attention_backward(*args, None, None)
    torch.testing.assert_close(grads[:3], want_grads[:3], rtol=2e-5, atol=2e-5)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("window", [None, 128])
def test_memory_is_linear_in_the_length(window):
    def largest(length):
        q, k, v = (torch.randn(1, length, h, 8) for h in (2, 1, 1))
        mask = (0.3, True, window, None, None, None)
        with Largest() as seen:
            out, lse = kernels.ref_attention(q, k, v, *mask)
            kernels.ref_attention_backward(out, q, k, v, out, lse, *mask)
        return seen.numel

    assert largest(2048) <= 2 * largest(1024) + 8
    if window:  # scores of a chunk do not grow at all; q and its like do
        assert largest(2048) <= max(2 * 128 * 256, 2048 * 16)


def test_sink_identities():
    """A sink scales the output by sigmoid(lse - sink), and a plain backward with the sinked out
    and lse is exact: what lets the library kernels train sinks."""
    q, k, v, sinks, settings = tensors((True, None, True, False, 30, 30, 16, 16, 4, 2))
    out, lse = attention(q, k, v, **settings)
    sinked, total = attention(q, k, v, sinks=sinks, **settings)
    gate = torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]
    torch.testing.assert_close(gate * out, sinked)
    torch.testing.assert_close(torch.logaddexp(lse, sinks[:, None].expand_as(lse)), total)
    grad = torch.randn_like(out)
    plain = attention_backward(grad, q, k, v, sinked, total, **settings)
    exact = attention_backward(grad, q, k, v, sinked, total, sinks=sinks, **settings)
    torch.testing.assert_close(plain[:3], exact[:3])


def library_kernel(name, forward):
    """PyTorch's fused attention operator `name` in plain arithmetic: arguments are bound by the real
    operator's schema, layouts are heads first."""
    schema = getattr(torch.ops.aten, name).default._schema

    def call(*args, **kwargs):
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        q, k, v = (given[n].transpose(1, 2) for n in ("query", "key", "value"))
        assert given["dropout_p"] == 0.0 and all(x.is_contiguous() for x in (q, k, v))
        mask = (given["scale"], given["is_causal"], None, None, None, None)
        if forward:
            assert not given["return_debug_mask"] and given.get("compute_log_sumexp", True)
            out, lse = kernels.ref_attention(q, k, v, *mask)
            lse = lse[..., None] if "cudnn" in name else lse
            return out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], None, None, None
        assert (given["max_q"], given["max_k"]) == (q.shape[1], k.shape[1])
        grad, out = (given[n].transpose(1, 2) for n in ("grad_out", "out"))
        assert grad.is_contiguous() and out.is_contiguous()
        lse = given["logsumexp"].squeeze(-1) if "cudnn" in name else given["logsumexp"]
        *grads, _ = kernels.ref_attention_backward(grad, q, k, v, out, lse, *mask)
        return tuple(x.transpose(1, 2) for x in grads)

    return call


@pytest.mark.parametrize("sinked", [False, True])
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_library_kernels_are_called_as_their_schema_says(backend, sinked, monkeypatch):
    for suffix, forward in (("", True), ("_backward", False)):
        name = f"_scaled_dot_product_{backend}_attention{suffix}"
        monkeypatch.setattr(torch.ops.aten, name, library_kernel(name, forward))
    monkeypatch.setattr(kernels, "backend_of", lambda *_: backend)
    q, k, v, sinks, settings = tensors((True, None, sinked, False, 70, 70, 24, 16, 4, 2), batch=2)
    q, k, v = q.float(), k.float(), v.float()
    sinks = sinks.float() if sinked else None
    args = (settings["scale"], True, None, sinks, None, None)
    got = kernels._cuda_attention(q, k, v, *args)
    want = kernels.ref_attention(q, k, v, *args)
    torch.testing.assert_close(got, want)
    grad = torch.randn(2, 4, 70, 16).transpose(1, 2)
    grads = kernels._cuda_attention_backward(grad, q, k, v, *want, *args)
    torch.testing.assert_close(
        grads, kernels.ref_attention_backward(grad, q, k, v, *want, *args), rtol=1e-4, atol=1e-5
    )
    assert all(x.is_contiguous() for x in (*got, *grads))


@pytest.mark.parametrize(
    "shape, changes, capability, expected",
    [
        ((128, 128), {}, 9, "cudnn"),
        ((128, 128), {}, 8, "flash"),
        ((192, 128), {}, 9, "cudnn"),
        ((192, 128), {}, 8, "triton"),
        ((256, 256), {}, 9, "flash"),
        ((32, 32), {}, 9, "flash"),
        ((20, 20), {}, 9, "triton"),
        ((128, 128), {"window": 64}, 9, "triton"),
        ((128, 128), {"starts": torch.zeros(1)}, 9, "triton"),
        ((128, 128), {"dtype": torch.float32}, 9, "triton"),
        ((128, 128), {"keys": 96}, 9, "triton"),
        ((128, 128), {"keys": 96, "causal": False}, 9, "cudnn"),
        ((128, 128), {"deterministic": True}, 9, "flash"),
        ((192, 128), {"deterministic": True}, 9, "triton"),
    ],
)
def test_the_cuda_kernel_is_a_rule_of_shapes(shape, changes, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    exact = changes.get("deterministic", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: exact)
    dtype = changes.get("dtype", torch.bfloat16)
    q = torch.zeros(1, 64, 4, shape[0], dtype=dtype)
    k = torch.zeros(1, changes.get("keys", 64), 2, shape[0], dtype=dtype)
    v = torch.zeros(1, changes.get("keys", 64), 2, shape[1], dtype=dtype)
    causal, window = changes.get("causal", True), changes.get("window")
    assert kernels.backend_of(q, k, v, causal, window, changes.get("starts")) == expected


def test_document_bounds_are_runs():
    ids = torch.tensor([[7, 7, 7, 2, 2, 7], [0, 1, 1, 1, 1, 1]])
    starts, ends = document_bounds(ids)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 1, 1]]
    assert ends.tolist() == [[3, 3, 3, 5, 5, 6], [1, 6, 6, 6, 6, 6]]
    assert document_bounds(ids)[0] is starts  # once a tensor
    ids[0, 5] = 2
    assert document_bounds(ids)[1][0].tolist() == [3, 3, 3, 6, 6, 6]


def test_extreme_scores_stay_finite():
    q, k, v = (torch.full((1, 8, 1, 16), x) for x in (200.0, 200.0, 1.0))
    for sinks in (None, torch.tensor([-1e4]), torch.tensor([-torch.inf])):
        out, lse = attention(q, k, v, scale=1.0, sinks=sinks)
        torch.testing.assert_close(out, v)
        assert lse.isfinite().all()
    out, _ = attention(q, -k, v, scale=1.0, sinks=torch.tensor([1e6]))
    assert (out == 0).all()
    q[0, 3] = torch.nan  # seen by its own row only
    out, _ = attention(q, k, v, scale=1.0)
    assert out[0, 3].isnan().all() and out[0, [2, 4]].isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 0}, "window"),
        ({"window": 3, "causal": False}, "window"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"documents": torch.zeros(2, 4, dtype=torch.int32)}, "documents"),
        ({"v": torch.zeros(2, 6, 2, 8)}, "shapes"),
        ({"q": torch.zeros(2, 5, 3, 8)}, "shapes"),
        ({"q": torch.zeros(2, 6, 4, 8)}, "keys"),
        ({"q": torch.zeros(2, 5, 4, 8, dtype=torch.float16)}, "dtypes"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    inputs = {
        "q": torch.zeros(2, 5, 4, 8),
        "k": torch.zeros(2, 5, 2, 8),
        "v": torch.zeros(2, 5, 2, 8),
    }
    inputs |= {name: change.pop(name) for name in list(change) if name in inputs}
    with pytest.raises(ValueError, match=message):
        attention(*inputs.values(), scale=1.0, **change)


def test_operators_keep_their_contract():
    q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 6)
    tests = ("test_schema", "test_faketensor")
    args = (q, k, v, 0.3, True, 3, torch.randn(4), None, None)
    torch.library.opcheck(torch.ops.ottava.attention.default, args, test_utils=tests)
    out, lse = torch.ops.ottava.attention(*args)
    args = (torch.randn_like(out), q, k, v, out, lse, *args[3:])
    torch.library.opcheck(torch.ops.ottava.attention_backward.default, args, test_utils=tests)
    angles = torch.randn(5, 4)
    args = (q, angles, angles, False)
    torch.library.opcheck(torch.ops.ottava.rope.default, args, test_utils=tests)
    torch.library.opcheck(torch.ops.ottava.rope_int8.default, args[:3], test_utils=tests)
    torch.library.opcheck(torch.ops.ottava.rope_back.default, args[:3], test_utils=tests)


# -------------------------------------------------------------------------------------------- rope


def tables(length, rotary, dtype=torch.float32):
    angle = torch.arange(length)[:, None] * 100.0 ** (-torch.arange(0, rotary, 2) / rotary)
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("rotary", [8, 16, 24])
def test_rope_turns_pairs_by_their_angle(rotary):
    x = torch.randn(2, 7, 3, 24, dtype=DOUBLE)
    cos, sin = tables(7, rotary, DOUBLE)
    y = rope(x, cos, sin)
    half = rotary // 2
    turned = torch.complex(x[..., :half], x[..., half:rotary]) * torch.complex(
        cos[:, None, :half], sin[:, None, :half]
    )
    torch.testing.assert_close(y[..., :half], turned.real)
    torch.testing.assert_close(y[..., half:rotary], turned.imag)
    assert torch.equal(y[..., rotary:], x[..., rotary:])
    torch.testing.assert_close(rope(y, cos, sin, inverse=True), x)
    # orthogonal: the inverse is the gradient
    grad = torch.randn_like(x)
    torch.testing.assert_close((y * grad).sum(), (x * rope(grad, cos, sin, inverse=True)).sum())


@pytest.mark.parametrize("batched", [0, 1, 2])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope_in_triton(batched, inverse, device):
    cos, sin = (x.to(device) for x in tables(13, 8))
    if batched:
        cos, sin = (x.expand(batched, 13, 8).contiguous() for x in (cos, sin))
    x = torch.randn(2, 13, 5 * 24 + 8, device=device)[..., 8:].unflatten(-1, (5, 24))
    want = torch.ops.ottava.rope(x.cpu(), cos.cpu(), sin.cpu(), inverse)
    torch.testing.assert_close(triton_rope(x, cos, sin, inverse).cpu(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotary", [8, 24])
def test_rope_with_codes_is_rope_then_the_cast(rotary, device):
    cos, sin = (x.to(device) for x in tables(13, rotary))
    x = torch.randn(2, 13, 5, 24, device=device).half()
    x[0, 1, 2] = 0
    x[1, 3, 0, 5], x[1, 4, 1, -1] = torch.nan, torch.inf
    y, codes, scale = rope_int8(x, cos, sin)
    assert torch.equal(y.nan_to_num(), rope(x, cos, sin).nan_to_num())
    want = quantize_int8(y.flatten(0, 2), 24)
    torch.testing.assert_close((codes, scale), want, rtol=0, atol=0, equal_nan=True)
    turned, got, got_scale = triton_rope_int8(x, cos, sin)
    torch.testing.assert_close(turned, y, rtol=1e-3, atol=1e-3, equal_nan=True)
    want = quantize_int8(turned.flatten(0, 2), 24)
    torch.testing.assert_close((got, got_scale), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rotary", [8, 24])
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_rope_back_gives_the_amax(rotary, bad, device):
    cos, sin = (x.to(device) for x in tables(13, rotary))
    grad = torch.randn(2, 13, 5, 24, device=device).bfloat16()
    for place in ((0, 1, 2, 3), (1, 4, 4, 23)):
        grad[place] = bad
        y, top = rope_back(grad, cos, sin)
        assert torch.equal(y.nan_to_num(), rope(grad, cos, sin, inverse=True).nan_to_num())
        for value, found in ((y, top), triton_rope_back(grad, cos, sin)):
            want = value.abs().max().float().view(1)
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(value, y, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert triton_rope_back(grad[:0], cos, sin)[1] == 0


def test_rope_refuses_angles_that_do_not_fit():
    x, angles = torch.zeros(2, 7, 3, 8), torch.zeros(7, 8)
    for bad in (torch.zeros(7, 10), torch.zeros(7, 7), torch.zeros(6, 8), torch.zeros(3, 7, 8)):
        with pytest.raises(ValueError, match="rope"):
            rope(x, bad, bad)
    with pytest.raises(ValueError, match="rope"):
        rope(x, angles, angles[:, :4])


# ------------------------------------------------------------------------------------------- layer


def how(**changes):
    settings = {
        "scale": 0.25,
        "dtype": torch.float32,
        "window": 6,
        "value_scale": 0.7,
        "keep": "high",
    }
    return layer.AttentionSettings(**{**settings, **changes})


def layer_inputs(dtype=torch.float32, d=16, v=8, length=19):
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, length, 4, d), (2, length, 2, d), (2, length, 2, v), (4,))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def test_gradients_of_the_whole_function():
    q, k, v, sinks = layer_inputs(DOUBLE, d=4, v=2, length=5)
    cos, sin = tables(5, 2, DOUBLE)
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])

    def run(q, k, v, sinks):
        settings = how(dtype=DOUBLE, window=3)
        return layer.attend(q, k, v, cos, sin, sinks, documents, settings)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


@pytest.mark.parametrize("keep, limit", [("int8", 36.0), ("e4m3", 24.0)])
def test_kept_codes_give_the_gradients_their_precision(keep, limit):
    cos, sin = tables(64, 8)

    def grads(**changes):
        inputs = layer_inputs(d=24, v=16, length=64)
        out = layer.attend(*inputs[:3], cos, sin, inputs[3], None, how(window=None, **changes))
        return torch.autograd.grad(out, inputs, out.detach().sin())

    for exact, got in zip(grads(), grads(keep=keep), strict=True):
        assert error_db(exact, got) > limit


def kept_bytes(run):
    seen = {}

    def pack(x):
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    return sum(seen.values()), out


def heads_first(*args, **kwargs):
    """As PyTorch's own CUDA kernels answer: the output is a view of [B, H, T, V]."""
    out, lse = attention(*args, **kwargs)
    b, t, h, v = out.shape
    root = torch.empty_strided((b, h, t, v), (t * h * v, v, h * v, 1)).copy_(out.transpose(1, 2))
    return root.transpose(1, 2).contiguous(), lse


@pytest.mark.parametrize(
    "recipe, view", [("tensor", False), ("tensor", True), ("row", True), ("block", False)]
)
def test_everything_kept_is_8_bit_and_the_output_is_kept_once(recipe, view, monkeypatch):
    if view:
        monkeypatch.setattr(layer, "attention", heads_first)
    recipe = get_recipe(recipe)
    heads, width, length = 4, 32, 128
    q, k, v = (torch.randn(1, length, heads, width).requires_grad_() for _ in range(3))
    linear = Linear(heads * width, 128, bias=False, recipe=recipe)
    settings = how(window=None, value_scale=1.0, keep="int8", reader=linear.how(recipe, q))
    outputs = []

    def run():
        outputs.append(layer.attend(q, k, v, None, None, None, None, settings))
        return linear(outputs[0].flatten(-2))

    total, out = kept_bytes(run)
    rows = length * heads
    codes = 4 * rows * width  # q, k, v, output
    scales = 3 * 2 * rows + 4 * rows  # bf16 a head row, fp32 lse
    weight = 4 * linear.weight.numel()
    out_scales = 4 * heads * width * max(1, length // 128)  # at most one a column and block
    assert codes + scales <= total - weight <= codes + scales + out_scales
    assert carried_by(outputs[0].flatten(-2), recipe.input) is not None
    assert carried_by(outputs[0], recipe.input) is None  # rows there are heads, not tokens
    exact = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    plain = layer.attend(*exact, None, None, None, None, how(window=None, value_scale=1.0))
    reference = linear(plain.flatten(-2))
    assert torch.equal(reference, out)  # the codes carried are the codes made
    grad = torch.randn_like(out)
    out.backward(grad)
    reference.backward(grad)  # the same linear: what differs is what attention kept
    for a, b in zip((q, k, v), exact, strict=True):
        assert error_db(b.grad, a.grad) > 28


def test_without_a_cast_the_output_is_the_readers_own_tensor():
    q, k, v, sinks = layer_inputs()
    linear = nn.Linear(32, 8, bias=False)

    def run():
        return linear(layer.attend(q, k, v, None, None, sinks, None, how(keep="int8")).flatten(-2))

    total, _ = kept_bytes(run)
    rows = 2 * 19
    codes = rows * (4 * 16 + 2 * 16 + 2 * 8) + 2 * rows * (4 + 2 + 2)
    assert total == codes + 4 * rows * 32 + 4 * rows * 4 + sinks.nbytes + linear.weight.nbytes


class Core(nn.Module):
    """What the layer reads of an attention core, and that core's own cached attention."""

    def __init__(self):
        super().__init__()
        self.softmax_scale, self.value_scale, self.window = 0.25, 0.7, 6

    def attend(self, q, *_):
        return self._own(q)

    def _own(self, q):
        return q * 2


def swapped(recipe="tensor", **settings):
    core = Core()
    core.__dict__["_ottava_class"] = Core
    core.__class__ = layer.Attention
    core.recipe = None if recipe is None else get_recipe(recipe)
    for name, value in settings.items():
        core.__dict__[name] = value  # the reader is no submodule
    return core


def test_swapped_core_agrees_and_keeps_its_cached_attention():
    inputs, (cos, sin) = layer_inputs(), tables(19, 8)
    want = layer.attend(*inputs[:3], cos, sin, inputs[3], None, how())
    cast = get_recipe("tensor").input
    for recipe, settings in ((None, {}), ("tensor", {"reader": Linear(32, 8)})):
        core = swapped(recipe, **settings)
        assert torch.equal(core(*inputs[:3], cos, sin, inputs[3]), want)
        assert torch.equal(core.attend(want), want * 2)
    assert carried_by(core(*inputs[:3], cos, sin).flatten(-2), cast) is not None
    with autocast(enabled=False):
        out = core(*inputs[:3], cos, sin)
        assert out.grad_fn.saved_tensors[1] is None  # q as it is
    with autocast(recipe="row"):
        out = core(*inputs[:3], cos, sin).flatten(-2)
        assert carried_by(out, get_recipe("row").input) is not None
    with torch.no_grad():
        assert carried_by(core(*inputs[:3], cos, sin).flatten(-2), cast) is None
    with pytest.raises(ValueError, match="keep"):
        how(keep="int4")


def test_autocast_decides_the_dtype():
    inputs, (cos, sin) = layer_inputs(), tables(19, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = swapped()(*inputs[:3], cos, sin, inputs[3])
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in inputs)


# ------------------------------------------------------------------------------------- transformers


def hf_model(kind="llama", **changes):
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}  # fmt: skip
    config = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[kind]
    return transformers.AutoModelForCausalLM.from_config(config(**sizes, **changes))


def convert_attention(model, recipe="tensor"):
    for block in model.model.layers:
        layer.convert_hf(block.self_attn, get_recipe(recipe))
    return model


def losses(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind, changes", [("llama", {}), ("mistral", {"sliding_window": 5})])
def test_transformers_models_train_alike(kind, changes, caplog):
    layer._say.cache_clear()
    model, ids = hf_model(kind, **changes), torch.randint(0, 50, (2, 17))
    want, want_grads = losses(model, ids)
    names = list(model.state_dict())
    convert_attention(model)
    assert model.config._attn_implementation == "ottava"
    with caplog.at_level(logging.WARNING, "ottava"):
        got, grads = losses(model, ids)
    assert caplog.text == ""  # no detour
    assert got == pytest.approx(want, rel=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        assert error_db(b, a) > 33  # int8 q, k, v in the backward
    assert list(model.state_dict()) == names
    layer.revert_hf(model)
    assert model.config._attn_implementation == "sdpa"
    assert losses(model, ids)[0] == want


def test_other_calls_go_to_sdpa_and_say_why(caplog):
    layer._say.cache_clear()
    model = convert_attention(hf_model("mistral", sliding_window=5)).eval()
    plain = hf_model("mistral", sliding_window=5).eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(1, 50, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad(), caplog.at_level(logging.WARNING, "ottava"):
        for _ in range(2):
            got = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(got, plain(input_ids=ids, attention_mask=mask).logits)
        assert caplog.text.count("attention mask") == 1
        arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **arguments), plain.generate(ids, **arguments))
    for m in (model, plain):  # dropout: the window must survive the detour
        m.train()
        for block in m.model.layers:
            block.self_attn.attention_dropout = 1e-9
    with caplog.at_level(logging.WARNING, "ottava"):
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert "dropout" in caplog.text
