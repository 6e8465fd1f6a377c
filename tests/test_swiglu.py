"""The gated activation: reference and Triton against FP64 autograd, every output and gradient."""

import math

import pytest
import torch

from ottava.kernels import swiglu
from ottava.kernels.cast import dequantize_int8, quantize_int8
from ottava.numerics.formats import INT8_CAST_DB, error_db

IMPLEMENTATIONS = {
    "reference": (swiglu.ref_swiglu, swiglu.ref_swiglu_backward),
    "triton": (swiglu.triton_swiglu, swiglu.triton_swiglu_backward),
}
# One rounding to the dtype; Triton's interpreter truncates to BF16, 6 dB worse than rounding.
LEAST_DB = {torch.float32: 120.0, torch.float16: 65.0, torch.bfloat16: 42.0}
SHAPES = [(1, 1), (3, 7), (130, 129), (3, 2048)]


@pytest.fixture(params=list(IMPLEMENTATIONS))
def kernels(request):
    return IMPLEMENTATIONS[request.param]


def oracle(gate, up, row_weight, grad_h):
    """h and the gradients of gate, up and the row weight, in FP64."""
    leaves = [t.double().cpu().requires_grad_() for t in (gate, up)]
    h = torch.nn.functional.silu(leaves[0]) * leaves[1]
    if row_weight is not None:
        leaves.append(row_weight.double().cpu().requires_grad_())
        h = h * leaves[2][:, None]
    h.backward(grad_h.double().cpu())
    return h.detach(), [leaf.grad for leaf in leaves]


def top(x):
    return x.abs().max().float().view(1)


def assert_db(name, expected, value, least):
    db = error_db(expected, value.cpu())
    assert db >= least, f"{name}: {db:.1f} dB, at least {least} wanted"


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "row_weight"])
@pytest.mark.parametrize("dtype", LEAST_DB, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(kernels, shape, dtype, weighted, device):
    forward, backward = kernels
    M, F = shape
    least = LEAST_DB[dtype] if M * F > 100 else LEAST_DB[dtype] - 6  # few elements: more spread
    both = (2 * torch.randn(M, 2 * F)).to(dtype).to(device)
    if M > 1:
        both[1] = 0.0
    gate, up = both[:, :F], both[:, F:]  # halves of one tensor: strided rows
    r = torch.rand(M, device=device) if weighted else None
    grad_h = torch.randn(M, F).to(dtype).to(device)

    h, amax, *kept = forward(gate, up, r, True)
    assert h.dtype == dtype
    assert_db("h", oracle(gate, up, r, grad_h)[0], h, least)
    assert torch.equal(amax, top(h))
    for x, codes, scale in ((gate, *kept[:2]), (up, *kept[2:])):
        same = quantize_int8(x.contiguous())
        assert torch.equal(codes, same[0]) and torch.equal(scale, same[1])
    bare = forward(gate, up, r, False)
    assert torch.equal(bare[0], h) and all(t.numel() == 0 for t in bare[2:])

    g, u = (dequantize_int8(*pair, 128, torch.float32) for pair in (kept[:2], kept[2:]))
    grads = backward(grad_h, *kept, r, False)
    check_backward(grads, oracle(g, u, r, grad_h), dtype, least)
    check_backward(backward(grad_h, gate, None, up, None, r, False),
                   oracle(gate, up, r, grad_h), dtype, least)  # fmt: skip
    joined = backward(grad_h, *kept, r, True)
    assert joined[1].numel() == 0 and torch.equal(joined[0], torch.cat(grads[:2], 1))
    assert all(torch.equal(a, b) for a, b in zip(joined[2:], grads[2:], strict=True))


def check_backward(grads, expected, dtype, least):
    grad_gate, grad_up, h, amaxes, grad_r = grads
    for name, value, want in (
        ("grad_gate", grad_gate, expected[1][0]),
        ("grad_up", grad_up, expected[1][1]),
        ("h", h, expected[0]),
    ):
        assert value.dtype == dtype
        assert_db(name, want, value, least)
    assert torch.equal(amaxes, torch.cat([top(grad_gate), top(grad_up), top(h)]))
    if len(expected[1]) == 3:
        assert grad_r.dtype == torch.float32
        assert_db("grad_row_weight", expected[1][2], grad_r, 100)
    else:
        assert grad_r.numel() == 0


def test_error_of_the_codes(kernels, device):
    """Gradients from int8 codes differ from exact ones by the error of the codes, not more."""
    forward, backward = kernels
    gate, up, grad = torch.randn(3, 16, 384, device=device)
    grads = backward(grad, *forward(gate, up, None, True)[2:], None, False)
    h, expected = oracle(gate, up, None, grad)
    # silu * up multiplies two operands with that error: 3 dB.
    for value, want in zip(grads[:3], [*expected, h], strict=True):
        assert_db("codes", want, value, INT8_CAST_DB - 3)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["ref", "triton"])
def test_h_written_over_gate(name, keep, device):
    """The same bits as apart, and up as it was."""
    for shape in SHAPES:
        gate, up = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        want = getattr(swiglu, f"{name}_swiglu")(gate.clone(), up, None, keep)
        before = up.clone()
        rest = getattr(swiglu, f"{name}_swiglu_")(gate, up, None, keep)
        assert torch.equal(gate, want[0]) and torch.equal(up, before)
        assert all(torch.equal(a, b) for a, b in zip(rest, want[1:], strict=True))
    wide = torch.randn(4, 256, device=device)
    with pytest.raises(ValueError, match="gate must be contiguous"):
        swiglu.swiglu_(wide[:, :128], wide[:, 128:])
    h = swiglu.swiglu_(wide[:, :128].contiguous(), wide[:, 128:]).h
    assert torch.equal(h, swiglu.swiglu(wide[:, :128], wide[:, 128:]).h)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_is_seen(kernels, bad, device):
    forward, backward = kernels
    gate, up, grad = torch.randn(3, 40, 130, device=device)
    up[17, 129] = bad
    _, amax, *kept = forward(gate, up, None, True)
    assert not amax.isfinite().any()
    grads = backward(grad, *kept, None, False)
    assert not grads[3][[0, 2]].isfinite().any()
    assert grads[1].isfinite().all(), "grad_up does not depend on up"
    clean = [i for i in range(40) if i != 17]
    assert all(g[clean].isfinite().all() for g in grads[:3])


def test_large_gates(kernels, device):
    """silu far out is 0 or gate itself, and its derivative 0 or 1: no NaN from inf * 0."""
    forward, backward = kernels
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4]], device=device)
    one = torch.ones_like(gate)
    h, *_ = forward(gate, one, None, False)
    torch.testing.assert_close(h, gate.clamp(min=0))
    grads = backward(one, gate, None, one, None, None, False)
    slope = torch.tensor([[0.0, 0, 0, 0.5, 1, 1]], device=device)
    torch.testing.assert_close(grads[0], slope)


def test_empty(kernels, device):
    forward, backward = kernels
    none = torch.randn(0, 130, device=device)
    h, amax, *kept = forward(none, none, None, True)
    assert h.shape == (0, 130) and amax.item() == 0.0 and kept[1].shape == (0, 2)
    r = torch.ones(0, device=device)
    grads = backward(none, *kept, r, True)
    assert grads[0].shape == (0, 260) and (grads[3] == 0).all() and grads[4].shape == (0,)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_registered_operators(weighted, keep, device):
    """Schema, fake outputs and public functions agree."""
    gate, up, grad = torch.randn(3, 5, 140, device=device)
    r = torch.rand(5, device=device) if weighted else None
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.ottava
    torch.library.opcheck(ops.swiglu.default, (gate, up, r, keep), test_utils=tests)
    out = swiglu.swiglu(gate, up, r, keep_codes=keep)
    kept = out[2:] if keep else (gate, None, up, None)
    for joined in (False, True):
        torch.library.opcheck(
            ops.swiglu_backward.default, (grad, *kept, r, joined), test_utils=tests
        )
    grads = swiglu.swiglu_backward(grad, *kept, r)
    assert grads.amax_h.shape == grads.amax_grad_up.shape == (1,)
    assert torch.equal(grads.amax_grad_gate, top(grads.grad_gate))
    assert torch.equal(grads.amax_grad_up, top(grads.grad_up))
    assert torch.equal(grads.amax_h, top(grads.h))
    if not keep:
        torch.testing.assert_close(grads.h, out.h)
