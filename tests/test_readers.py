"""Who makes codes makes them as the linear that reads them would: with its amax history, its random
stream, under its recipe in force. So they exist once, also under delayed scaling."""

import copy
import functools
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_convert import family, ids
from test_decoder import blocks, model_of
from tiny_run import MODEL, tiny_run
from torch import nn

import ottava
from ottava.config import ConfigError, Model
from ottava.layers import attention as attention_layer
from ottava.layers.autocast import autocast
from ottava.layers.delayed import clock
from ottava.layers.gemms import LinearGemms
from ottava.layers.linear import Linear
from ottava.layers.norm import RMSNorm
from ottava.layers.saved import carried_by
from ottava.models.load import load_model
from ottava.monitor.observe import _input_scale
from ottava.numerics.policy import Plan, Row, linked
from ottava.numerics.recipe import get_recipe, recipe_from_dict, recipe_to_dict
from ottava.planner.memory import estimate_memory
from ottava.recompute import wrap_recompute
from ottava.train.heal import Precision
from ottava.train.trainer import Trainer

NAMES = ["llama", "mimo"]
DELAYED = get_recipe("delayed")
ROUNDED = replace(DELAYED, input=replace(DELAYED.input, rounding="stochastic"))


def makers(model):
    """The modules that make codes of an attention's output."""
    found = outputs(model).values()
    return [m for m in model.modules() if m.__dict__.get("reader") in found]


def apart(model):
    """The same model with every reader making its own codes of attention's output."""
    for maker in makers(model):
        maker.__dict__["reader"] = None
    return model


def outputs(model):
    return {n: m for n, m in model.named_modules() if n.endswith("o_proj")}


def train(model, steps=3, rate=0.0, seed=1):
    """Losses, and gradients of the last step; batches grow, so that no two steps have one amax."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses, clock.step = [], 0
    for step in range(steps):
        x = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(seed + step))
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return torch.stack(losses), grads


def kept_bytes(run):
    """Bytes that autograd keeps of `run()`, parameters apart; each storage once."""
    seen = {}

    def pack(x):
        if not isinstance(x, nn.Parameter):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    return sum(seen.values()), out


def core_and_reader(recipe):
    """An attention, the linear that reads it, and q, k, v."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 64, 4, 16).bfloat16().requires_grad_() for _ in range(3))
    linear = Linear(64, 64, bias=False, recipe=recipe).bfloat16()
    core = nn.Module()
    core.softmax_scale, core.value_scale, core.window = 0.25, 1.0, None
    core.__class__ = attention_layer.Attention
    core.recipe = linear.recipe
    core.__dict__["reader"] = linear
    return core, linear, (q, k, v)


def attention_and_output(recipe, steps):
    """Bytes kept by an attention and its reader after so many steps."""
    core, linear, (q, k, v) = core_and_reader(recipe)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.0)
    for _ in range(steps):
        linear(core(q, k, v, None, None).flatten(-2)).sum().backward()
        optimizer.step()
    return kept_bytes(lambda: linear(core(q, k, v, None, None).flatten(-2)))[0]


@pytest.mark.parametrize("steps", [0, 2])
def test_attention_and_its_reader_keep_the_same_bytes_under_delayed_scaling(steps):
    """Codes of q, k, v and of the output, once; scales a head row in BF16, lse, one for the output."""
    want = 4 * 2 * 64 * 64 + 3 * 2 * (2 * 64 * 4) + 4 * 2 * 64 * 4 + 4
    for recipe in ("tensor", "delayed", ROUNDED):
        assert attention_and_output(recipe, steps) == want


def record(calls, _module, args, kwargs):
    calls.append((args, kwargs))


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_layer_keeps_the_same_bytes_under_delayed_scaling(name):
    kept = {}
    for recipe in ("tensor", "delayed"):
        model = model_of(name, recipe, torch.bfloat16)
        train(model, 2)
        block, calls = blocks(model)[0], []
        hook = functools.partial(record, calls)
        block.register_forward_pre_hook(hook, with_kwargs=True)
        model(input_ids=ids(), use_cache=False)
        args, kwargs = calls.pop()
        x, *args = args or (kwargs.pop("hidden_states"),)
        x = x.detach().requires_grad_()
        run = functools.partial(block, x, *args, **kwargs)
        kept[recipe] = kept_bytes(run)[0]
    assert (
        kept["delayed"] == kept["tensor"] - 4
    )  # the amax of the MLP's inside, for its second cast


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recipe", [DELAYED, ROUNDED], ids=["nearest", "stochastic"])
def test_the_history_is_what_the_reader_alone_would_have(name, recipe):
    """Codes are the same to the bit, so losses are, and what the history holds is."""
    got, want = model_of(name, recipe), apart(model_of(name, recipe))
    assert len(makers(got)) == 2 and not makers(want)
    results = [train(model)[0] for model in (got, want)]
    assert torch.equal(*results)
    for o, p in zip(outputs(got).values(), outputs(want).values(), strict=True):
        assert o._history.ready[0] and o._history.amax[0, :3].unique().numel() == 3
        assert torch.equal(o._history.amax[0], p._history.amax[0])
        assert not o._history.pending.any()


@pytest.mark.parametrize("keep, element, scale", [("int8", 1, 2), ("e4m3", 1, 4), ("high", 2, 0)])
def test_a_recipe_says_what_attention_keeps_q_k_and_v_as(keep, element, scale):
    recipe = replace(get_recipe("tensor"), attention=keep)
    rows, width = 2 * 64 * 4, 16
    want = 3 * rows * (element * width + scale) + rows * width + 4 * rows + 4
    assert attention_and_output(recipe, 0) == want
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    assert ("qkv=" in str(recipe)) == (keep != "int8")
    for name in NAMES:
        model = model_of(name, recipe)
        plan = model._ottava_plan
        (row, *_) = (r for r in plan.rows if r.kind == "attention")
        assert row.recipe == recipe and (keep in row.kept or keep == "high")
        assert train(model, 1)[0].isfinite()
        with autocast(recipe="block"):
            assert train(model, 1)[0].isfinite()


def test_recipes_from_before_keep_int8_and_a_wrong_word_is_refused():
    data = recipe_to_dict(DELAYED)
    del data["attention"]
    assert recipe_from_dict(data) == DELAYED
    with pytest.raises(
        ValueError, match=r"Recipe\.attention: 'int4' is not one of int8, e4m3, high"
    ):
        replace(DELAYED, attention="int4")


@pytest.mark.parametrize("name", NAMES)
def test_the_output_is_cast_once(name, monkeypatch):
    """By attention, with the scale of earlier steps; o_proj casts nothing."""
    model, casts = model_of(name, "delayed"), []
    train(model, 2)
    make = LinearGemms.cast_input
    monkeypatch.setattr(
        LinearGemms, "cast_input", lambda how, x, *a: casts.append(how) or make(how, x, *a)
    )
    for o in outputs(model).values():
        assert o._history.ready[0]
        o.register_forward_pre_hook(
            lambda o, args: casts.append(carried_by(args[0], DELAYED.input).rows.scale)
        )
    model(input_ids=ids(), use_cache=False)
    for (how, scale), o in zip(zip(casts[::2], casts[1::2], strict=True), outputs(model).values(),
                               strict=True):  # fmt: skip
        assert how.history is o._history and how.record
        assert scale == o._history.top[0] / 448


@pytest.mark.parametrize("keep", ["int8", "high"])
def test_a_layer_that_runs_again_notes_nothing_twice(keep):
    """Its second run starts from a rounded input, so its amax is another one."""
    pending = []
    for which in ("none", "layer"):
        model = model_of("mimo", "delayed")
        train(model, 2)
        wrap_recompute(model, which, model._ottava_plan, autocast, keep=keep)
        loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        first = {n: o._history.pending[0].clone() for n, o in outputs(model).items()}
        top = {n: o._history.top[0].clone() for n, o in outputs(model).items()}
        loss.backward()
        for n, o in outputs(model).items():
            assert o._history.pending[0] == first[n] > 0 and o._history.top[0] == top[n]
        pending.append(list(first.values()))
    assert pending[0] == pending[1]


def test_a_frozen_reader_takes_the_codes_too(monkeypatch):
    """It keeps none for a gradient of its own, and casts nothing again."""
    got, want = model_of("mimo", "delayed"), apart(model_of("mimo", "delayed"))
    casts, cast = [], LinearGemms.cast

    def counted(how, operand, *args):
        casts.append((how.history, operand))
        return cast(how, operand, *args)

    monkeypatch.setattr(LinearGemms, "cast", counted)
    for o in [*outputs(got).values(), *outputs(want).values()]:
        o.weight.requires_grad_(False)
    results = [train(model, 2)[0] for model in (got, want)]
    assert torch.equal(*results)
    for o in [*outputs(got).values(), *outputs(want).values()]:
        assert casts.count((o._history, "input")) == 2


def test_regions_and_demotion_decide_for_the_reader():
    model = model_of("mimo", "delayed")
    core, o = (m := model.model.layers[0].self_attn).core, m.o_proj

    @contextmanager
    def takes(cast):
        seen = []
        hook = o.register_forward_pre_hook(
            lambda _, args: seen.append(carried_by(args[0], cast) is not None)
        )
        yield seen
        hook.remove()

    def run(context, cast=DELAYED.input):
        with context, takes(cast) as seen:
            model(input_ids=ids(), use_cache=False)
        return seen

    assert core.reader is o
    assert run(autocast()) == [True]
    assert run(autocast(recipe="row")) == [False]
    assert run(autocast(recipe="row"), get_recipe("row").input) == [True]
    assert run(autocast(enabled=False)) == [False]
    assert run(torch.no_grad()) == [False]
    rows = Precision(model, model._ottava_plan)
    rows.apply(["model.layers.0.self_attn.o_proj"])
    assert o.recipe is None and run(autocast()) == [False]
    assert run(autocast(recipe="row"), get_recipe("row").input) == [False]
    rows.apply(["model.layers.0.self_attn.core"])
    assert run(autocast()) == [False]
    rows.apply([])
    assert run(autocast()) == [True]


def test_evaluation_and_no_grad_leave_no_trace():
    model = model_of("mimo", "delayed")
    train(model, 2)
    model.eval()
    model(input_ids=ids(), use_cache=False)
    with torch.no_grad():
        model.train()(input_ids=ids(), use_cache=False)
    assert not any(o._history.pending[0] for o in outputs(model).values())


def test_readers_are_no_submodules_and_follow_a_copy():
    model = model_of("llama", "delayed")
    names = [n for n, _ in model.named_modules()]
    other = copy.deepcopy(model)
    for a, b in zip(makers(model), makers(other), strict=True):
        assert b.reader is not a.reader and b.reader in list(other.modules())
    assert names == [n for n, _ in other.named_modules()]
    ottava.revert(model)
    assert not makers(model) and "reader" not in model.model.layers[0].self_attn.__dict__


def test_compiled_delayed_attention_agrees_with_eager(monkeypatch):
    """Nothing travels there: the reader makes its own codes, and its history is the same."""
    outs, histories = [], []
    for compiled in (False, True):
        core, linear, qkv = core_and_reader("delayed")
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.0)

        def run(core=core, linear=linear, qkv=qkv):
            return linear(core(*qkv, None, None).flatten(-2))

        for function in (run, torch.compile(run, backend="aot_eager") if compiled else run):
            outs.append(function())
            outs[-1].square().sum().backward()
            optimizer.step()
        histories.append(linear._history.amax)
    torch._dynamo.reset()
    torch.testing.assert_close(outs[3], outs[1])
    torch.testing.assert_close(*histories)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert attention_layer._kept(DELAYED, linear, qkv[0]) == ("int8", None)
    tensor = attention_layer._kept(DELAYED, Linear(64, 64, recipe="tensor"), qkv[0])
    assert tensor[1].recipe == get_recipe("tensor")


# ---- norms, and who reads whom ----


def plain_norms(model):
    """The same model with norms that make no codes: each linear casts for itself."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.recipe = None
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recipe", [DELAYED, ROUNDED], ids=["nearest", "stochastic"])
def test_norms_cast_as_their_readers(name, recipe):
    """q (of q, k and v) and gate (of gate and up) have the history that they alone would have."""
    got, want = model_of(name, recipe), plain_norms(model_of(name, recipe))
    norms = [m for m in got.modules() if isinstance(m, RMSNorm) and m.reader is not None]
    assert len(norms) == 4 and not any(m._history for m in norms)
    assert {n.rpartition(".")[2] for n, m in got.named_modules() if m in [r.reader for r in norms]} == {
        "q_proj", "gate_proj"
    }  # fmt: skip
    losses = [train(model)[0] for model in (got, want)]
    if recipe is DELAYED:
        assert torch.equal(*losses)
    else:  # k, v and up take the first one's codes, and alone would have drawn their own
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    first = got.model.layers[0].input_layernorm.reader._history
    assert torch.equal(first.amax[0], want.model.layers[0].self_attn.q_proj._history.amax[0])
    for n, m in want.named_modules():
        if recipe is DELAYED and n.endswith(("q_proj", "gate_proj")):
            assert torch.equal(got.get_submodule(n)._history.amax[0], m._history.amax[0])


def test_a_look_at_the_step_sees_the_scale_that_is_in_force():
    """k reads the codes that were made for q: its own history knows nothing, and does not matter."""
    model, seen = model_of("mimo", "delayed"), {}
    train(model, 2)
    attention = model.model.layers[0].self_attn
    hooks = [
        m.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, _input_scale(m, args[0])))
        for m in (attention.q_proj, attention.k_proj, attention.o_proj)
    ]
    model(input_ids=ids())
    q, k, o = seen
    assert not k._history.knows("input") and seen[k] == seen[q] == q._history.top[0] / 448
    assert seen[o] == o._history.top[0] / 448
    assert _input_scale(k, torch.ones(2, 64)) is None and len(hooks) == 3


def test_a_norm_of_a_frozen_reader_has_a_history_all_the_same():
    model = model_of("mimo", "delayed")
    norms = [m for m in model.modules() if isinstance(m, RMSNorm) and m.reader is not None]
    for norm in norms:
        norm.reader.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    model(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    assert all(norm.reader._history.ready[0] for norm in norms)


def test_a_norm_without_a_known_reader_keeps_a_history_of_its_own():
    block = ottava.LayerNormLinear(64, 64, recipe="delayed")
    assert block.norm.reader is block.linear and "linear.weight" in block.state_dict()
    assert len(list(block.norm.parameters())) == 2
    alone = RMSNorm(64, recipe="delayed", elementwise_affine=False)
    alone(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert alone._history.pending[0] > 0
    model = ottava.convert(nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)), recipe="delayed")
    assert model[0].recipe is model[1].recipe and model[0].reader is None


FAMILIES = {
    "llama": ("self_attn", "q_proj", "gate_proj"),
    "qwen3": ("self_attn", "q_proj", "gate_proj"),
    "mimo": ("self_attn.core", "q_proj", "gate_proj"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_says_who_reads_whom(name):
    attention, first, gate = FAMILIES[name]
    plan, layer = model_of(name)._ottava_plan, "model.layers.1"
    row = plan[f"{layer}.{attention}"]
    assert row.reader == f"{layer}.self_attn.o_proj"
    assert row.parts == tuple(f"{layer}.self_attn.{n}_proj" for n in "qkv")
    assert plan[f"{layer}.input_layernorm"].reader == f"{layer}.self_attn.{first}"
    assert plan[f"{layer}.post_attention_layernorm"].reader == f"{layer}.mlp.{gate}"
    assert plan[f"{layer}.mlp"].parts == tuple(
        f"{layer}.mlp.{n}_proj" for n in ("gate", "up", "down")
    )
    assert plan["model.norm"].reader == "" == plan[f"{layer}.mlp.up_proj"].reader


def test_a_reader_inside_an_adapter_is_found_and_a_look_alike_layer_is_not():
    row = functools.partial(Row, shape=(), recipe=DELAYED)
    rows = [
        row(name="a", kind="attention"),
        row(name="a.o_proj.base_layer", kind="linear"),
        row(name="b.input_layernorm", kind="norm"),  # b is no decoder layer of a known class
        row(name="b.self_attn.q_proj", kind="linear"),
        row(name="b.mlp", kind="mlp"),
        row(name="b.mlp.gate_proj", kind="linear"),
    ]
    found = {r.name: r for r in linked(rows)}
    assert found["a"].reader == "a.o_proj.base_layer" and found["a"].parts == ()
    assert found["b.input_layernorm"].reader == "" and found["b.mlp"].parts == ()
    assert list(found) == [r.name for r in rows]


def test_a_fused_projection_and_experts_read_the_norms_of_a_moe_layer():
    model = ottava.convert(load_model("demo", overrides=MODEL), recipe="delayed")
    plan, layer = model._ottava_plan, "model.layers.1"
    norm = model.model.layers[1].input_layernorm
    assert plan[f"{layer}.input_layernorm"].reader == f"{layer}.self_attn.qkv_proj"
    assert norm.reader is model.model.layers[1].self_attn.qkv_proj
    second = plan[f"{layer}.post_attention_layernorm"]
    assert second.reader == f"{layer}.mlp.experts" and second.recipe == DELAYED
    assert model.model.layers[1].post_attention_layernorm.reader is None  # they cast for themselves


def test_a_reader_kept_high_reads_no_codes():
    """The first of q, k and v in 8 bits decides; where all are kept high, the norm makes none."""
    keep, names = ["*.q_proj"], ("input_layernorm", "self_attn")
    for expected in ("model.layers.0.self_attn.k_proj", ""):
        plan = ottava.plan(family("llama"), keep=keep)
        norm, attention = (plan[f"model.layers.0.{n}"] for n in names)
        assert (norm.reader if norm.recipe else "") == expected
        assert attention.reader == "model.layers.0.self_attn.o_proj"
        keep += ["*.k_proj", "*.v_proj"]
    model = ottava.convert(family("llama"), keep=["*.o_proj"])
    assert model.model.layers[0].self_attn.reader is None


def test_plans_from_before_are_given_their_readers():
    for name in FAMILIES:
        plan = model_of(name)._ottava_plan
        data = json.loads(json.dumps(plan.to_dict()))
        assert Plan.from_dict(data) == plan
        for row in data["rows"]:
            del row["reader"], row["parts"]
        assert Plan.from_dict(data) == plan
        assert Plan.from_dict(data).difference(plan) is None


def test_the_planner_counts_codes_alone_under_delayed_scaling(tmp_path):
    """Beside them the amax histories only, a few blocks a module: no BF16 output."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 64,
             "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 272}  # fmt: skip
    kept = []
    for recipe in ("tensor", "delayed"):
        run = tiny_run(tmp_path, "fp8-lean", model=Model(name="dense-w1", overrides=sizes),
                       train={"micro_batch": 8}, precision={"recipe": recipe})  # fmt: skip
        run = replace(run, data=replace(run.data, sequence_length=256))
        kept.append(estimate_memory(run).by_category["activations"])
    codes = 8 * 256 * 128  # of the output of attention
    assert 0 <= kept[1] - kept[0] < codes / 2


def test_the_command_line_says_what_attention_keeps(tmp_path):
    run = tiny_run(tmp_path, "fp8", precision={"attention": "e4m3"})
    trainer = Trainer(run)
    assert all(r.recipe.attention == "e4m3" for r in trainer.plan.rows if r.recipe)
    core = trainer.model.model.layers[0].self_attn.core
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = (torch.randn(1, 8, 2, 16).requires_grad_() for _ in range(3))
        kept = core(q, k, v, None, None).grad_fn.saved_tensors
    assert [t.dtype for t in kept[:6:2]] == [torch.float8_e4m3fn] * 3
    with pytest.raises(ConfigError, match=r"precision\.attention: 'high' does nothing"):
        tiny_run(tmp_path, "amp", precision={"attention": "high"})
