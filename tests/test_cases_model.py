"""Faults of other libraries that must not be here: conversion, checkpoints, inference, compile.

Each public report is a test of its own, here or where the table says. Inference, compile and
reverting are in `test_cases_use.py`.

| report | test |
|---|---|
| float8_experimental#206, spikingjelly#685 | test_a_root_that_is_itself_a_linear; test_convert |
| huggingface/accelerate#4147 | test_convert: test_first_and_last_stay_high |
| accelerate#2305, #1687 | test_weights_replaced_or_copied_by_conversion; test_convert |
| accelerate#3725 | test_convert: test_norm_without_bias |
| transformers#37905, vllm#52147 | test_tied_weights_torn_apart; test_convert |
| pytorch/torchtitan#1359 | test_second_converter_undoes_the_first |
| bionemo-recipes#1368, #1397 | test_meta_build_with_another_distribution; test_convert |
| bitsandbytes#1231, TransformerEngine#529 | test_copies_that_forget_or_share; test_convert |
| TransformerEngine#199, #458 | test_convert: test_state_dicts_load_strictly_both_ways |
| pytorch/torchtitan#639, #651, #1414 | test_names_and_types_in_saved_files; test_checkpoint |
| TransformerEngine#112 | test_resume_with_another_history_length; test_trainer: test_another_run_... |
| TransformerEngine#231 | test_checkpoint_grows_with_training; test_trainer |
| Megatron-LM#6666, TransformerEngine#1121 | test_masters_made_from_fp8_values; test_checkpoint |
| speculators#1027, miles#3187 | test_trainer: test_resume_is_bitwise; test_kill |
| torchtitan#146, pytorch#55585, examples#1196, LVSM#19, transformers#24003, DeepSpeed#4986, | |
| pytorch#115710 | test_loss_scaler |
| epfLLM/Megatron-LLM#34 | test_trainer: test_a_bad_gradient_changes_nothing_and_is_named |
| bitsandbytes#152, #227 | test_moment_table_built_wrongly; test_moments |
| bitsandbytes#2080; pytorch/ao#463; OneTrainer#996 | test_adamw |
| sd_dreambooth_extension#1417, ai-toolkit#1034, lightly-train#892 | test_ema |
| torchtitan#2262, transformers#42654, maxtext#5293 | test_experts, test_cases_moe: test_case_63..65 |
| sglang#31017, torchtitan#1593, Megatron-LM#2976 | test_mimo_family, test_mimo |
| TransformerEngine#1429, Megatron-Bridge#3744 | test_memory |
| miles#2198, verl-omni#539 | test_observe, test_trainer: test_a_streak_of_skips_... |
"""

import copy
import io

import pytest
import torch
from mimo_toy import toy
from test_convert import five, fp8_modules, ids, llama
from test_linear import plain
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.kernels.moments import ref_decode_m
from ottava.kernels.split import SplitParameter
from ottava.layers import delayed
from ottava.models.moe import Router
from ottava.numerics.formats import error_db
from ottava.numerics.recipe import Cast, Recipe
from ottava.train.resume import amax_state, load_amax_state


def lean(model, **settings):
    """The converted model and its AdamW with split masters and 8-bit moments."""
    ottava.convert(model)
    return model, ottava.AdamW(
        model.parameters(), lr=1e-3, master="split16", states="8bit", **settings
    )


def step(model, optimizer, x):
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def values(p):
    return p.dequantize() if isinstance(p, SplitParameter) else p.detach()


# ---- conversion ----


def test_a_root_that_is_itself_a_linear():
    """meta-pytorch/float8_experimental#206: only children were walked."""

    class Tagged(nn.Linear):
        tag = "mine"

        def size(self):
            return self.weight.numel()

    deep = nn.Sequential(nn.ModuleDict({"a": nn.ModuleList([nn.Linear(64, 64), nn.ReLU()])}))
    for model, count in ((nn.Linear(64, 64), 1), (Tagged(64, 64), 1), (deep, 1), (five(), 5)):
        plan = ottava.plan(model)
        out = ottava.convert(model, plan)
        assert out is model and len(fp8_modules(out)) == plan.num_fp8 == count
    root = ottava.convert(Tagged(64, 64))
    assert isinstance(root, Tagged) and (root.tag, root.size()) == ("mine", 4096)
    x = torch.randn(16, 64)
    assert 25 < error_db(plain(root)(x), root(x)) < 45


class Allocated(TorchDispatchMode):
    """Bytes of new storage that operators make."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        for t in out if isinstance(out, list | tuple) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known:
                self.bytes += t.nbytes
        return out


def test_weights_replaced_or_copied_by_conversion():
    """huggingface/accelerate#2305: fresh random weights; #1687: memory for two models at once."""
    model, x = five(), torch.randn(16, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want, before = model(x), {n: (p, p.clone()) for n, p in model.named_parameters()}
    with Allocated() as allocated:
        ottava.convert(model)
    assert allocated.bytes == 0
    assert all(
        p is before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters()
    )
    y = model(x)
    assert 20 < error_db(want, y) < 45
    y.sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[n][1]) for n, p in model.named_parameters())


@pytest.mark.parametrize("split", [False, True])
def test_tied_weights_torn_apart(split, tmp_path):
    """huggingface/transformers#37905: converting one side doubled the memory."""
    model, untouched = llama(tied=True), llama(tied=True)
    count = sum(p.numel() for p in model.parameters())
    plan = ottava.plan(model)
    assert "high by policy" in plan["lm_head"].reason and plan["lm_head"].reason in str(plan)
    if split:
        model, optimizer = lean(model)
    else:
        optimizer = torch.optim.SGD(ottava.convert(model).parameters(), lr=0.01)
    for _ in range(3):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = type(untouched).from_pretrained(tmp_path, dtype=torch.float32)
    moved = model if split else copy.deepcopy(model).to(torch.bfloat16)
    for m in (model, copy.deepcopy(model), loaded, moved):
        head, embedding = m.lm_head.weight, m.model.embed_tokens.weight
        assert head is embedding and head.data_ptr() == embedding.data_ptr()
        assert sum(p.numel() for p in m.parameters()) == count
    for (name, p), (_, q) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(values(p), q), name
    untouched.load_state_dict(model.state_dict(), strict=True)


def test_second_converter_undoes_the_first():
    """pytorch/torchtitan#1359: converting the experts turned the linears back."""
    experts, linears = ["*.experts"], ["*_proj", "*.0.mlp*"]
    models = [toy(hidden_size=32, moe_intermediate_size=16, n_routed_experts=4) for _ in range(3)]
    ottava.convert(models[0])
    for model, order in ((models[1], (experts, linears)), (models[2], (linears, experts))):
        ottava.convert(model, keep=order[0])
        with pytest.warns(UserWarning, match="are in 8 bits already and stay so"):
            ottava.convert(model, keep=order[1])
    kinds = [[(type(m), getattr(m, "recipe", None)) for m in model.modules()] for model in models]
    assert kinds[0] == kinds[1] == kinds[2]
    for model in models:
        rows = {r.name: r.recipe for r in model._ottava_plan.rows}
        for name, module in model.named_modules():
            if name in rows and hasattr(module, "recipe"):
                assert module.recipe == rows[name], name
        casts = [getattr(p, "_ottava_cast", None) for p in model.parameters()]
        assert casts == [getattr(p, "_ottava_cast", None) for p in models[0].parameters()]
    part = llama()
    ottava.convert(part.model.layers[0])
    ottava.convert(part)
    whole = ottava.convert(llama())
    ottava.convert(whole.model.layers[0].mlp)
    assert [type(m) for m in part.modules()] == [type(m) for m in whole.modules()]


def test_modules_that_read_the_weight_themselves_stay_high():
    """The kind of pytorch/torchtitan#1359: a class swapped without what its class computes."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4), "normed": normed,
                           "linear": nn.Linear(64, 64)})  # fmt: skip
    x = torch.randn(8, 64)
    want = model["normed"](x), model["attention"](x, x, x)[0]
    plan = ottava.plan(model)
    assert "reads the weight itself" in plan["attention.out_proj"].reason
    assert "parametrization" in plan["normed"].reason
    ottava.convert(model, plan)
    assert torch.equal(model["normed"](x), want[0]) and fp8_modules(model) == ["linear"]
    assert torch.equal(model["attention"](x, x, x)[0], want[1])


def test_meta_build_with_another_distribution():
    """NVIDIA-BioNeMo/bionemo-recipes#1368: garbage weights, or another spread, after meta."""
    with torch.device("meta"):
        model = five()
    ottava.convert(model, recipe="delayed")
    model(torch.randn(16, 64, device="meta")).sum().backward()  # as shape inference does
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()
    direct = five()
    for p, q in zip(model.parameters(), direct.parameters(), strict=True):
        assert torch.equal(p, q)
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    held += [t for m in model for t in (m._history.amax, m._history.pending)]
    assert loss.isfinite() and not any(t.is_meta for t in held)
    ottava.AdamW(model.parameters(), master="split16")  # and the weights are known as FP8 weights
    assert all(m.weight.dtype == torch.float8_e4m3fn for m in model)


def test_copies_that_forget_or_share():
    """bitsandbytes#1231, TransformerEngine#529: copies of another type, or of one storage."""
    model, x = ottava.convert(toy()), torch.randint(0, 31, (2, 12))
    twin = copy.deepcopy(model)
    with torch.device("meta"):
        bare = ottava.convert(toy())
    bare.load_state_dict(model.state_dict(), assign=True)
    marks = [
        [
            (p.__dict__.get("_ottava_cast"), p.__dict__.get("_ottava_fp32", False))
            for p in m.parameters()
        ]
        for m in (model, twin, bare)
    ]
    assert marks[0] == marks[1] == marks[2] and any(cast for cast, _ in marks[0])
    for other in (twin, bare):
        ottava.AdamW(other.parameters(), master="split16", states="8bit")
        routers = [m for m in other.modules() if isinstance(m, Router)]
        assert routers and all(m.weight.dtype == torch.float32 for m in routers)
    optimizer = ottava.AdamW(model.parameters(), lr=1e-2, master="split16", states="8bit")
    kinds = [(type(p), p.dtype) for p in model.parameters()]
    assert kinds == [(type(p), p.dtype) for p in twin.parameters()]
    model(x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model2, optimizer2 = copy.deepcopy((model, optimizer))
    frozen = {n: values(p).clone() for n, p in model.named_parameters()}
    for m, o in ((model2, optimizer2), (model, optimizer)):
        m(x, labels=x).loss.backward()
        o.step()
        if m is model2:
            assert all(torch.equal(values(p), frozen[n]) for n, p in model.named_parameters())
    for (name, p), (_, q) in zip(model.named_parameters(), model2.named_parameters(), strict=True):
        assert torch.equal(values(p), values(q)), name


# ---- checkpoints ----


@pytest.mark.parametrize("split", [False, True])
def test_names_and_types_in_saved_files(split):
    """pytorch/torchtitan#639: "_orig_mod." in names, and pickled tensor subclasses."""
    model = five()
    if split:
        model, optimizer = lean(model)
        step(model, optimizer, torch.randn(16, 64))
    else:
        ottava.convert(model)
    model.compile(backend="eager")
    model(torch.randn(16, 64))
    torch._dynamo.reset()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert list(read) == list(five().state_dict())
    assert all(type(t) is torch.Tensor and t.dtype == torch.float32 for t in read.values())
    for other in (five(), ottava.convert(five()), lean(five())[0]):
        with torch.no_grad():
            for p in other.parameters():
                p.copy_(values(p) * 40)
        other.load_state_dict(read, strict=True)
        for (name, p), (_, q) in zip(
            other.named_parameters(), model.named_parameters(), strict=True
        ):
            exact = split or not isinstance(p, SplitParameter)
            assert torch.equal(values(p), values(q)) if exact else error_db(q, values(p)) > 65, name


@pytest.mark.parametrize("length", [4, 64])
def test_resume_with_another_history_length(length):
    """NVIDIA/TransformerEngine#112: saved FP8 state of another size was dropped in silence."""

    def delayed(n):
        cast = Cast(scaling="delayed", history=n)
        recipe = Recipe(input=cast, grad_output=Cast(format="e5m2", scaling="delayed", history=n))
        return ottava.convert(five(), recipe=recipe)

    model = delayed(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(7):
        step(model, optimizer, torch.randn(16, 64))
    state, other = amax_state(model), delayed(length)
    assert "16 entries stored" in load_amax_state(other, state)[0]
    want = [m._history.amax.clone() for m in model]
    other.load_state_dict(model.state_dict())
    other(torch.randn(16, 64)).sum().backward()
    for m, amax in zip(other, want, strict=True):
        n = min(length, 16)
        assert m._history.amax.shape == (3, length) and m._history.ready == [True, False, True]
        assert torch.equal(m._history.amax[:, :n], amax[:, :n]) and amax[0, :7].gt(0).all()
        assert m._history.amax[:, n:].eq(0).all() and m.weight.grad.isfinite().all()


def test_checkpoint_grows_with_training():
    """NVIDIA/TransformerEngine#231: files grew with the number of steps."""
    model, optimizer = lean(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)))
    ottava.convert(model, recipe="delayed")
    sizes, x = [], torch.randn(4, 64)
    for number in range(1, 301):
        step(model, optimizer, x)
        if number in (1, 10, 300):
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), amax_state(model)), file)
            sizes.append((len(file.getvalue()), len(delayed._histories)))
    assert sizes[0] == sizes[1] == sizes[2]


def test_masters_made_from_fp8_values():
    """NVIDIA/Megatron-LM#6666: the FP8 image of a weight is not its master."""
    model = five()
    originals = [p.detach().clone() for p in model.parameters()]
    ottava.convert(model)
    for master, least_db in (("fp32", None), ("split24", 110), ("split16", 65)):
        twin = copy.deepcopy(model)
        optimizer = ottava.AdamW(twin.parameters(), lr=0.0, weight_decay=0.0, master=master)
        for p, w in zip(twin.parameters(), originals, strict=True):
            assert (
                torch.equal(values(p), w) if least_db is None else error_db(w, values(p)) > least_db
            )
        before = [p.detach().clone() for p in twin.parameters()]
        other = ottava.convert(five())
        resumed = ottava.AdamW(other.parameters(), lr=0.0, weight_decay=0.0, master=master)
        other.load_state_dict(twin.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        for p, q in zip(other.parameters(), before, strict=True):
            assert torch.equal(p.view(torch.uint8), q.view(torch.uint8))


# ---- moments ----


def test_moment_table_built_wrongly():
    """bitsandbytes#152: a wrong table gave NaN within a few steps, and no test covered it."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, -1)
    table = ref_decode_m(codes, torch.ones(2))[0]
    table = table[table.isfinite()].unique()
    assert len(table) == 253 and table[0] == -448 and table[-1] == 448
    assert all((table == n).any() for n in (-1, 0, 1)) and torch.equal(table, -table.flip(0))
