"""Experts in 8 bits: each against itself alone, all against high precision, every kernel against
its reference."""

import copy

import pytest
import torch
from mimo_toy import toy
from torch import nn

import ottava.kernels.grouped as kernels
from ottava.convert import convert, plan, revert
from ottava.kernels.cast import Quantized, quantize
from ottava.kernels.scale import scale_from_amax
from ottava.kernels.split import split_parameter
from ottava.layers.autocast import autocast
from ottava.layers.experts import Casts, Experts, Groups
from ottava.models.config import MiMoV2Config
from ottava.models.moe import Experts as PlainExperts
from ottava.models.moe import MoE
from ottava.numerics.formats import E4M3, error_db
from ottava.numerics.recipe import RECIPES, Cast, Gemm, Recipe, get_recipe

SIZES = {"hidden_size": 64, "moe_intermediate_size": 48, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "num_hidden_layers": 1, "hybrid_layer_pattern": [0]}  # fmt: skip
GROUPS = [1, 15, 16, 17, 44, 0]  # rows per expert, the last empty
# Three GEMMs (gate, up, down) and silu's slope of up to 1.1: four GEMMs' errors at most, 6 dB.
LEAST_DB = E4M3.gemm_db - 6
ROW = Cast(granularity="row", scale_kind="pow2")


def make(recipe="tensor", **sizes):
    """(plain, 8-bit) experts with the same weights."""
    torch.manual_seed(0)
    plain = PlainExperts(MiMoV2Config(**{**SIZES, **sizes}))
    for p in plain.parameters():
        p.data.normal_(0, p.shape[-1] ** -0.5)
    ours = copy.deepcopy(plain)
    ours._ottava_class = PlainExperts
    ours.__class__ = Experts
    ours.recipe = get_recipe(recipe)
    return plain, ours


def routed(groups=GROUPS, top_k=1, hidden=64):
    """Tokens, choices and weights such that expert e gets groups[e] rows; experts shuffled."""
    index = torch.cat([torch.full((n,), e) for e, n in enumerate(groups)])
    index = index[torch.randperm(len(index))].view(-1, top_k)
    return torch.randn(len(index), hidden), index, torch.rand(index.shape) + 0.1


def run(experts, x, index, weight, grad=None):
    """Output and gradients: x, weight, gate_up_proj, down_proj."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    experts.zero_grad()
    y = experts(x, index, weight)
    y.backward(
        torch.randn(y.shape, generator=torch.Generator().manual_seed(7)) if grad is None else grad
    )
    return [y.detach(), x.grad, weight.grad, *(p.grad.clone() for p in experts.parameters())]


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("top_k", [1, 3])
def test_output_and_gradients_are_within_the_formats_error(name, top_k):
    plain, ours = make(name)
    x, index, weight = routed(GROUPS, top_k)
    want, got = run(plain, x, index, weight), run(ours, x, index, weight)
    limits = [LEAST_DB] * 5
    if name == "storage":
        limits = [60.0, E4M3.cast_db, E4M3.cast_db, E4M3.cast_db - 1, E4M3.cast_db]
    for what, a, b, limit in zip(
        ["y", "x", "weight", "gate_up", "down"], want, got, limits, strict=True
    ):
        assert error_db(a, b) >= limit, what
    assert LEAST_DB < error_db(want[3], got[3]) < 45  # 8-bit arithmetic did run
    for grad in got[3:]:
        assert grad[5].eq(0).all()  # no rows: exactly zero


@pytest.mark.parametrize("name", ["tensor", "row", "block", "storage"])
def test_case_63_each_expert_alone_bitwise(name):
    _, ours = make(name)
    x, index, weight = routed()
    y, grad_x, grad_w, grad_gate_up, grad_down = run(ours, x, index, weight)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    for e, size in enumerate(GROUPS):
        mine = (index[:, 0] == e).nonzero()[:, 0]
        assert len(mine) == size
        alone = run(ours, x[mine], index[mine], weight[mine], grad[mine])
        pairs = [
            (y[mine], alone[0]), (grad_x[mine], alone[1]), (grad_gate_up[e], alone[3][e]),
            (grad_down[e], alone[4][e]), (grad_w[mine], alone[2]),
        ]  # fmt: skip
        # FP32 sums and products on the CPU depend on how the rows are aligned in memory.
        exact = pairs if name == "storage" else pairs[4:]
        assert all(error_db(a, b) > 120 for a, b in exact)
        assert name == "storage" or all(torch.equal(a, b) for a, b in pairs[:4])


@pytest.mark.parametrize("name", ["tensor", "block"])
def test_case_63_scales_never_cross_experts(name):
    _, ours = make(name)
    x, index, weight = routed()
    before = run(ours, x, index, weight)
    theirs = index[:, 0] == 4
    wild = torch.where(theirs[:, None], x * 1e4, x)
    after = run(ours, wild, index, weight)
    with torch.no_grad():
        ours.gate_up_proj[4] *= 1e3
    later = run(ours, wild, index, weight)
    for changed in (after, later):
        assert torch.equal(changed[0][~theirs], before[0][~theirs])
        assert torch.equal(changed[1][~theirs], before[1][~theirs])
        for grad, old in zip(changed[3:], before[3:], strict=True):
            assert torch.equal(grad[[0, 1, 2, 3, 5]], old[[0, 1, 2, 3, 5]])
    assert not torch.equal(after[0][theirs], before[0][theirs])


def test_case_64_every_expert_weight_is_converted():
    model = toy(hidden_size=32, moe_intermediate_size=16, n_routed_experts=4)
    table = plan(model)
    rows = [r for r in table.rows if r.kind == "experts"]
    assert len(rows) == 3 and all(r.recipe is not None for r in rows)
    before = [id(p) for p in model.parameters()]
    convert(model, table)
    assert all(isinstance(model.get_submodule(r.name), Experts) for r in rows)
    assert [id(p) for p in model.parameters()] == before
    ids = torch.randint(0, 31, (1, 12))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.model.layers[1].mlp.parameters())
    revert(model)
    assert all(isinstance(model.get_submodule(r.name), PlainExperts) for r in rows)


def test_case_65_the_router_chooses_alike_before_and_after_conversion():
    moe = MoE(MiMoV2Config(**SIZES))
    for p in moe.parameters():
        p.data.normal_(0, 0.1)
    x = torch.randn(1, 1000, 64)
    before = moe.gate(x)
    convert(moe)
    assert isinstance(moe.experts, Experts)
    with torch.autocast("cpu", torch.bfloat16):
        after = moe.gate(x)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_kept_for_backward_is_eight_bit_and_once_a_token():
    _, ours = make("tensor", hidden_size=128, moe_intermediate_size=128)
    x, index, weight = routed([64] * 6, top_k=3, hidden=128)
    kept = {}
    parameters = {p.data_ptr() for p in ours.parameters()}

    def pack(t):
        if t.data_ptr() not in parameters:
            kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ours(x.requires_grad_(), index, weight)
    tokens, rows = 128, 384
    bound = tokens * 128 + 2 * rows * 128  # codes of x, gate and up
    assert bound < sum(kept.values()) <= bound + rows * (2 * 2 + 4 + 4) + tokens * 8 + 6 * 4
    ours.recompute, kept = True, {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ours(x, index, weight)
    assert sum(kept.values()) <= tokens * 128 + rows * 8 + tokens * 8 + 6 * 4


def test_recompute_changes_nothing():
    _, ours = make()
    x, index, weight = routed(top_k=3)
    first = run(ours, x, index, weight)
    ours.recompute = True
    assert all(torch.equal(a, b) for a, b in zip(first, run(ours, x, index, weight), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_master_weights_are_read_as_they_are(dtype):
    plain, ours = make()
    x, index, weight = routed(top_k=3)
    want = run(ours, x, index, weight)
    for p in ours.parameters():
        split_parameter(p, 16, ours.recipe.weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        got = run(ours, x.to(dtype), index, weight)
    limit = 60 if dtype is torch.float32 else 25
    assert all(error_db(a, b.float()) > limit for a, b in zip(want[:3], got[:3], strict=True))
    assert got[3].dtype == got[4].dtype == torch.bfloat16
    assert all(error_db(a, b.float()) > 25 for a, b in zip(want[3:], got[3:], strict=True))
    with autocast(enabled=False):
        high = run(ours, x, index, weight)
    exact = run(plain, x, index, weight)
    assert all(error_db(a, b.float()) > 45 for a, b in zip(exact, high, strict=True))
    state = ours.state_dict()
    assert state["gate_up_proj"].dtype == torch.float32
    assert error_db(plain.gate_up_proj, state["gate_up_proj"]) > 90


def test_autocast_off_is_the_plain_class():
    plain, ours = make()
    x, index, weight = routed(top_k=3)
    with autocast(enabled=False):
        got = run(ours, x, index, weight)
    assert all(torch.equal(a, b) for a, b in zip(run(plain, x, index, weight), got, strict=True))


def test_frozen_weights_and_inputs_without_gradient():
    _, ours = make()
    x, index, weight = routed(top_k=3)
    full = run(ours, x, index, weight)
    ours.gate_up_proj.requires_grad_(False)
    ours.zero_grad(set_to_none=True)
    y = ours(x, index, weight)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)))
    assert ours.gate_up_proj.grad is None and torch.equal(ours.down_proj.grad, full[4])
    with torch.no_grad():
        assert torch.equal(ours(x, index, weight), full[0])


def test_no_tokens_at_all():
    _, ours = make()
    x = torch.zeros(0, 64, requires_grad=True)
    y = ours(x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == (0, 64) and ours.down_proj.grad.eq(0).all()


def test_zero_rows_and_tiny_gradients_survive():
    plain, ours = make()
    x, index, weight = routed()
    x[::3] = 0
    grad = torch.randn(x.shape) * 1e-12
    grad[::2] = 0
    want, got = run(plain, x, index, weight, grad), run(ours, x, index, weight, grad)
    for a, b in zip(want, got, strict=True):
        assert b.isfinite().all() and error_db(a, b) > LEAST_DB


def test_a_non_finite_token_stays_visible():
    _, ours = make()
    x, index, weight = routed()
    x[3, 5] = torch.inf
    y = run(ours, x, index, weight)
    assert not y[0][3].isfinite().any()
    others = torch.arange(len(x)) != 3
    assert y[0][others].isfinite().all()
    assert not y[3][index[3, 0]].isfinite().all()


def test_stochastic_rounding_of_gradients_repeats():
    recipe = Recipe(grad_output=Cast(rounding="stochastic"), weight=Cast(scale_kind="pow2"))
    _, ours = make(recipe)
    _, nearest = make("tensor")
    x, index, weight = routed()
    first, second = run(ours, x, index, weight), run(ours, x, index, weight)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[1], run(nearest, x, index, weight)[1])


def test_experts_take_what_they_can_keep_to_themselves():
    for name, recipe in RECIPES.items():
        casts = Casts.of(recipe)
        blocks = name == "block"
        assert casts.input.granularity == ("group" if blocks else "row")
        assert casts.input.scale_kind == casts.grad_output.scale_kind == "pow2"
        assert casts.weight == recipe.weight
    mixed = Recipe(grad_weight=Gemm(fp8=False), grad_input=Gemm(fp8=False))
    _, ours = make(mixed)
    x, index, weight = routed()
    assert all(t.isfinite().all() for t in run(ours, x, index, weight))


def test_fake_tensors_follow_the_whole_step():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for recipe in RECIPES:
        plain, ours = make(recipe)
        for experts in (plain, ours):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                experts = copy.deepcopy(experts)
                for name, p in list(experts.named_parameters()):
                    setattr(experts, name, nn.Parameter(mode.from_tensor(p.data)))
                x = torch.randn(20, 64, requires_grad=True)
                y = experts(x, torch.zeros(20, 2, dtype=torch.long), torch.rand(20, 2))
                y.backward(torch.ones(20, 64))
                assert x.grad.shape == (20, 64)
                assert experts.down_proj.grad.shape == (6, 64, 48)


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_agrees_with_the_cpu(name, dtype, device):
    """On a GPU: grouped launches against the reference; without one, the layer against itself."""
    _plain, ours = make(name)
    x, index, weight = routed(top_k=3)
    grad = torch.randn(x.shape).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        want = run(ours, x, index, weight, grad)
    there = copy.deepcopy(ours).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
        got = run(there, *(t.to(device) for t in (x, index, weight, grad)))
    # Codes may flip where FP32 sums differ in their last bits.
    assert all(error_db(a, b.cpu()) > 38 for a, b in zip(want, got, strict=True))
    assert all(g[5].eq(0).all() for g in got[3:])


# --- kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("groups", [GROUPS, [0, 0, 130], [65], [0, 0]])
def test_grouped_cols_against_its_reference(gather, groups, device):
    rows = sum(groups)
    x = (
        torch.randn(max(rows, 1), 200, device=device)
        * torch.logspace(-6, 6, max(rows, 1), device=device)[:, None]
    )
    x = x[:rows] if not gather else x
    q = quantize(x, ROW)
    index = torch.randint(0, len(x), (rows,), dtype=torch.int32, device=device) if gather else None
    ends = torch.tensor(groups, device=device).cumsum(0).to(torch.int32)
    amax = x.abs().amax(1) if len(x) else x.new_zeros(0)
    amax = amax if index is None else amax[index.long()]
    top = [a.max() if len(a) else a.new_zeros(()) for a in amax.split(groups)]
    scale = scale_from_amax(torch.stack(top), ROW)
    want = kernels.ref_grouped_cols(q.codes, q.scale, index, ends, scale)
    got = kernels.triton_grouped_cols(q.codes, q.scale, index, ends, scale)
    used = 200 * sum(-(-n // 16) * 16 for n in groups)
    assert torch.equal(got.view(torch.uint8)[:used], want.view(torch.uint8)[:used])
    starts = kernels.padded_starts(ends).tolist()
    source = x if index is None else x[index.long()]
    for e, part in enumerate(source.split(groups)):
        if len(part):
            cols = kernels.cols_of_expert(got, 200, starts, e, len(part))
            direct = quantize(part, Cast(scale_kind="pow2"))
            assert torch.equal(direct.scale[0], scale[e])
            shifted = cols[:, : len(part)].t().float()
            # Shifted codes are rounded once more only where they are subnormal.
            assert (shifted - direct.codes.float()).abs().max() <= 2.0**-9
            assert cols[:, len(part) :].float().eq(0).all()


def test_sum_rows_against_its_reference(device):
    y = torch.randn(60, 1500, device=device).bfloat16()
    position = torch.randperm(60, device=device).view(20, 3).int()
    want, got = kernels.ref_sum_rows(y, position), kernels.triton_sum_rows(y, position)
    assert (want.float() - got.float()).abs().max() <= 2.0**-7 * y.float().abs().max()
    assert kernels.triton_sum_rows(y[:0], position[:0]).shape == (0, 1500)


def test_the_direct_gemm_writes_what_the_reference_gives():
    a, b = (quantize(torch.randn(n, 48), Cast()) for n in (32, 64))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(32, 64, dtype=dtype)
        kernels.fp8_matmul_into(out, a.codes, a.scale[0], b.codes, b.scale[0], False)
        want = (a.dequantize() @ b.dequantize().t()).to(dtype)
        assert error_db(want, out) > (90 if dtype is torch.float32 else 45)


def test_groups_are_a_stable_sort():
    index = torch.randint(0, 6, (30, 3))
    groups = Groups.of(index, 6)
    expert = torch.empty(90, dtype=torch.long)
    expert[groups.position.flatten().long()] = index.flatten()
    assert torch.equal(expert, index.flatten().sort()[0])
    assert torch.equal(groups.ends, torch.bincount(index.flatten(), minlength=6).cumsum(0).int())
    again = Groups.again(groups.position, groups.ends, groups.host_ends, None)
    assert torch.equal(again.token, groups.token)
    assert torch.equal(groups.arrived(), groups.ends)


def test_gemm_refuses_what_the_unit_refuses():
    q = quantize(torch.randn(8, 32), Cast(format="e5m2", granularity="row"))
    w = Quantized(q.codes[None], q.scale.view(1, 8), "row")
    with pytest.raises(ValueError, match="e5m2 x e5m2"):
        kernels.grouped_gemm(q, w, torch.tensor([8]), out_dtype=torch.float32)
    q = quantize(torch.randn(8, 16), ROW)
    with pytest.raises(ValueError, match="K differs"):
        kernels.grouped_gemm(q, w, torch.tensor([8]), out_dtype=torch.float32)
