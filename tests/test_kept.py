"""What the plan says is kept for backward, against the tensors that autograd is given to keep."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_convert import llama
from test_experts import make as make_experts
from tiny_run import MODEL
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ottava
from ottava.layers.attention import Attention
from ottava.layers.linear import Linear
from ottava.layers.norm import LayerNorm, RMSNorm
from ottava.models.load import load_model
from ottava.numerics.kept import Held, kept_of
from ottava.numerics.recipe import RECIPES, get_recipe

TOKENS, WIDTH, INNER, HEADS, GROUPS, TOP_K = 256, 128, 256, 4, 2, 2
BITS = [n for n, r in RECIPES.items() if r.backend == "native"]
HIGH = replace(get_recipe("tensor"), keep="high", name="keeps high")
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8,
          "high": torch.bfloat16}  # fmt: skip
HEAD = WIDTH // HEADS
SIZES = {  # elements of each tensor of what is kept
    "input": [TOKENS * WIDTH],
    "output": [TOKENS * WIDTH],
    "q, k, v": [TOKENS * HEADS * HEAD, *[TOKENS * GROUPS * HEAD] * 2],
    "gate and up": [TOKENS * INNER] * 2,
    "gate, its SiLU and up": [TOKENS * INNER] * 3,
}


def as_recipe(recipe):
    return get_recipe(recipe) if isinstance(recipe, str) else recipe


def seen(forward, parameters=()):
    """dtype and elements of every tensor saved while `forward` runs, one place in memory once,
    without parameters, and without what has a number or so for a row (scales, lse, rstd, indices)."""
    own = {p.data_ptr() for p in parameters}
    found = {}

    def pack(t):
        if t.data_ptr() not in own and t.numel() > 4 * TOKENS * HEADS:
            found[t.data_ptr()] = (t.dtype, t.numel(), t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    assert out.requires_grad
    return Counter((dtype, numel) for dtype, numel, _ in found.values())


def promised(held, sizes=SIZES):
    """The same from what is said. What is said without a form of codes is BF16, as the input is."""
    return Counter((DTYPES[h.form], numel) for h in held for numel in sizes[h.what])


def x(width=WIDTH, *lead):
    torch.manual_seed(0)
    lead = lead or (TOKENS,)
    return torch.randn(*lead, width).bfloat16().requires_grad_()


def total(counts):
    return sum(dtype.itemsize * numel * n for (dtype, numel), n in counts.items())


def check(forward, held, parameters, sizes=SIZES):
    counts = seen(forward, parameters)
    assert counts == promised(held, sizes)
    return total(counts)


RUNS = [*BITS, HIGH]
IDS = [*BITS, "high"]


@pytest.mark.parametrize("recipe", RUNS, ids=IDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_linear(recipe, frozen):
    layer = Linear(WIDTH, INNER, recipe=recipe, dtype=torch.bfloat16)
    layer.weight.requires_grad_(not frozen)
    held = kept_of("linear", as_recipe(recipe), frozen=frozen)
    size = check(lambda: layer(x()), held, layer.parameters())
    assert size == (0 if frozen else TOKENS * WIDTH * (2 if recipe is HIGH else 1))


@pytest.mark.parametrize("recipe", [*RUNS, None], ids=[*IDS, "none"])
@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_norm(cls, recipe):
    norm = cls(WIDTH, dtype=torch.bfloat16)
    norm.recipe = as_recipe(recipe)
    check(lambda: norm(x()), kept_of("norm", norm.recipe), norm.parameters())


class Core(nn.Module):
    softmax_scale, value_scale, window = HEAD**-0.5, 1.0, None


@pytest.mark.parametrize("recipe", RUNS, ids=IDS)
@pytest.mark.parametrize("keep", ["int8", "e4m3", "high"])
@pytest.mark.parametrize("reads", ["same", "high"])  # "high": policy mimo's o_proj
def test_attention(recipe, keep, reads):
    recipe = replace(as_recipe(recipe), attention=keep)
    core = Core()
    core.__class__ = type("C", (Attention,), dict(Core.__dict__) | {"__module__": __name__})
    o_proj = Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    o_proj.recipe = recipe if reads == "same" else None
    core.__dict__.update(recipe=recipe, reader=o_proj)
    q, k, v = (x(HEAD, 2, TOKENS // 2, h) for h in (HEADS, GROUPS, GROUPS))
    held = kept_of("attention", recipe, reader=o_proj.recipe)

    def forward():
        out = core(*(t * 1 for t in (q, k, v)), None, None)
        return o_proj(out.flatten(2))

    # o_proj keeps nothing beside attention: it is the same tensor
    check(forward, held, o_proj.parameters())


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(INNER, WIDTH, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("recipe", RUNS, ids=IDS)
@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_mlp(recipe, recompute):
    model = nn.Sequential(MLP()).bfloat16()
    plan = ottava.plan(model, recipe=recipe, recompute=recompute)
    ottava.convert(model, plan)
    row = plan["0"]
    held = kept_of("mlp", row.recipe, recompute=recompute)
    assert row.kept == "; ".join(map(str, held))
    down = plan["0.down_proj"].kept
    assert down == ("input, high precision" if recipe is HIGH else "in its MLP")
    if recipe is HIGH:  # what its linears keep is in their rows
        wide = {"input": [TOKENS * INNER]}
        counts = promised(held) + promised([Held("input", "high")])
        counts += promised([Held("input", "high")], wide)
        assert seen(lambda: model(x()), model.parameters()) == counts
    else:
        size = check(lambda: model(x()), held, model.parameters())
        assert size == TOKENS * WIDTH + (0 if recompute == "mlp" else 2 * TOKENS * INNER)


@pytest.mark.parametrize("recipe", RUNS, ids=IDS)
@pytest.mark.parametrize("recompute", ["none", "mlp"])
@pytest.mark.parametrize("frozen", [False, True])
def test_experts(recipe, recompute, frozen):
    _, experts = make_experts(as_recipe(recipe))
    experts.to(torch.bfloat16).recompute = recompute == "mlp"
    experts.gate_up_proj.requires_grad_(not frozen)
    count, rows, width = experts.gate_up_proj.shape
    torch.manual_seed(0)
    index = torch.rand(TOKENS * 4, count).topk(TOP_K).indices
    weight = torch.rand(TOKENS * 4, TOP_K)
    held = kept_of("experts", as_recipe(recipe), recompute=recompute, frozen=frozen)
    sizes = {"input": [4 * TOKENS * width], "gate and up": [4 * TOKENS * TOP_K * rows // 2] * 2}
    check(lambda: experts(x(width, 4 * TOKENS), index, weight), held, experts.parameters(), sizes)


# ---- what a plan says of whole models ----


@pytest.mark.parametrize("policy", ["default", "mimo"])
@pytest.mark.parametrize("name", ["llama", "demo"])
def test_the_plan_says_it_of_its_rows(name, policy):
    model = llama() if name == "llama" else load_model("demo", overrides=MODEL, device="meta")
    plan = ottava.plan(model, policy=policy)
    cores = [r for r in plan.rows if r.kind == "attention"]
    said = "output, high precision" if policy == "mimo" else "output codes (e4m3)"
    assert cores and {r.kept for r in cores} == {f"q, k, v in int8 per head row; {said}"}
    assert plan["model.layers.0.mlp"].kept == (
        "input codes (e4m3); gate and up in int8 (groups of 128)"
    )
    assert plan["model.layers.0.mlp.down_proj"].kept == "in its MLP"
    again = ottava.plan(model, policy=policy, recompute="mlp")
    assert again["model.layers.0.mlp"].kept == "input codes (e4m3)"
    if name == "demo":
        assert again["model.layers.1.mlp.experts"].kept == "nothing: its MLP runs again"
    layer = ottava.plan(model, policy=policy, recompute="layer").summary()
    assert layer.endswith("each layer keeps its input alone and runs again")
    assert "runs again" not in plan.summary()


def test_a_demoted_row_changes_what_those_around_it_keep():
    plan = ottava.plan(llama())
    now = plan.demote("model.layers.0.self_attn.o_proj", "clips")
    assert now["model.layers.0.self_attn"].kept.endswith("output, high precision")
    assert now["model.layers.1.self_attn"].kept.endswith("output codes (e4m3)")
    now = plan.demote("model.layers.0.mlp", "clips")
    assert now["model.layers.0.mlp.down_proj"].kept == "input codes (e4m3)"
    assert now["model.layers.0.mlp"].kept == ""


def test_weights_that_take_no_gradient_keep_no_input():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    plan = ottava.plan(model)
    assert plan["0"].kept == "no input: its weight is frozen"
    assert plan["1"].kept == "input codes (e4m3)"
    with pytest.raises(ValueError, match="'router' keeps nothing of its own"):
        kept_of("router", None)
