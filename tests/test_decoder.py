"""Decoder layers with their residual sums inside the norms: the same values as plain layers, under
hooks, recorded states and recompute, and gradients that differ by one rounding at most."""

import copy
import pickle

import pytest
import torch
from test_convert import family, ids
from test_layers import Kept
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.layers import norm as norm_layer
from ottava.layers import waiting
from ottava.layers.decoder import Block
from ottava.layers.norm import RMSNorm
from ottava.models.config import MiMoConfig
from ottava.models.mimo import MiMoForCausalLM
from ottava.recompute import wrap_recompute

NAMES = ["llama", "qwen2", "qwen3", "mistral", "mimo"]


def mimo():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    return MiMoForCausalLM(MiMoConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def model_of(name, recipe="storage", dtype=None):
    torch.manual_seed(0)
    model = mimo() if name == "mimo" else family(name)
    return ottava.convert(model if dtype is None else model.to(dtype), recipe=recipe).train()


def blocks(model):
    return [m for m in model.modules() if isinstance(m, Block)]


def unfused(model):
    """The same model with the layers' own forward: plain sums, each norm by itself."""
    for block in blocks(model):
        block.__class__ = block._ottava_plain_class
    return model


def step(model, **kwargs):
    out = model(input_ids=ids(), labels=ids(), use_cache=False, **kwargs)
    loss = out.loss
    for state in (out.hidden_states or ())[1:2]:
        loss = loss + state.float().square().mean()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out, grads


def assert_same(got, want, tolerance=1e-4):
    """Equal losses to the bit, equal gradients up to one rounding."""
    assert torch.equal(got[0].loss, want[0].loss)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        error = (got[1][name].float() - grad.float()).norm()
        assert error <= tolerance * grad.float().norm() + 1e-9, name


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_plain_layers(name):
    got, want = model_of(name), unfused(model_of(name))
    assert len(blocks(got)) == 2 and not blocks(want)
    assert_same(step(got), step(want))
    got.eval(), want.eval()
    with torch.no_grad():
        assert torch.equal(got(input_ids=ids()).logits, want(input_ids=ids()).logits)


@pytest.mark.parametrize("name", ["llama", "mimo"])
@pytest.mark.parametrize("recipe", ["tensor", "row", "delayed"])
def test_8_bit_recipes_in_bf16(name, recipe):
    got, want = (f(model_of(name, recipe, torch.bfloat16)) for f in (lambda m: m, unfused))
    results = [step(got), step(want)]
    for _, grads in results:  # a bias of the keys does nothing to a softmax: only rounding is left
        for key in [k for k in grads if k.endswith("k_proj.bias")]:
            del grads[key]
    assert_same(*results, 0.1)  # a code that flips moves what follows


def count_norms(monkeypatch):
    calls = []
    run = norm_layer._run
    monkeypatch.setattr(
        norm_layer, "_run", lambda norm, *a, **k: calls.append(norm) or run(norm, *a, **k)
    )
    return calls


@pytest.mark.parametrize("name", ["llama", "mimo"])
def test_each_norm_runs_once_and_leaves_nothing_behind(name, monkeypatch):
    model, calls = model_of(name), count_norms(monkeypatch)
    seen = []
    for block in blocks(model):
        block.register_forward_hook(lambda m, args, out: seen.append(out))
    step(model)
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    assert len(calls) == len(norms) and set(calls) == set(norms)
    assert not any(hasattr(x, waiting._SLOT) for x in seen)


@pytest.mark.parametrize("name", ["llama", "mimo"])
def test_the_sum_of_two_gradients_is_made_in_the_norm(name):
    """No addition of whole [B, T, H] tensors is left, forward or backward."""
    class Adds(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            shape = (2, 24, 64)
            if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
                self.found += all(getattr(a, "shape", None) == shape for a in args[:2])
            return func(*args, **(kwargs or {}))

    model, counts = model_of(name, "tensor"), []
    for _ in range(2):
        with Adds() as adds:
            loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
            forward, adds.found = adds.found, 0
            loss.backward()
        counts.append((forward, adds.found))
        unfused(model)
    assert counts == [(0, 0), (4, 4)]


@pytest.mark.parametrize("name,passes", [("mimo", 2), ("llama", 6)])
def test_amaxes_come_with_what_they_are_of(name, passes):
    """A pass of its own is left for v's gradient, and for q's and k's where rope is not ours."""
    found = []
    amax = torch.ops.ottava.amax.default

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is amax:
                found.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    model = model_of(name, "tensor", torch.bfloat16)
    ottava.AdamW(model.parameters(), lr=1e-3, master="split16", states="8bit")
    loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
    with Watch():
        loss.backward()
    assert len(found) == passes, found


def change(module, args, out):
    return out * 1.5


HOOKS = {
    "norm output": lambda b: b[1].input_layernorm.register_forward_hook(change),
    "second norm output": lambda b: b[0].post_attention_layernorm.register_forward_hook(change),
    "norm input": lambda b: b[1].input_layernorm.register_forward_pre_hook(
        lambda m, args: (args[0] * 1.5,)
    ),
    "norm gradient": lambda b: b[1].post_attention_layernorm.register_full_backward_hook(
        lambda m, grad_in, grad_out: (grad_in[0] * 1.5,)
    ),
    "layer output": lambda b: b[0].register_forward_hook(change),
    "layer output in place": lambda b: b[0].register_forward_hook(
        lambda m, args, out: out.mul_(1.5)
    ),
    "layer input": lambda b: b[1].register_forward_pre_hook(
        lambda m, args: (args[0] * 1.5, *args[1:])
    ),
}


@pytest.mark.parametrize("name", ["llama", "mimo"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_see_and_change_what_they_always_did(name, hook):
    got, want = model_of(name), model_of(name)
    for model in (got, want):
        HOOKS[hook](blocks(model))
    unchanged = step(model_of(name))
    assert_same(step(got), step(unfused(want)))
    hooked = step(got)
    assert any(not torch.equal(hooked[1][n], g) for n, g in unchanged[1].items())


@pytest.mark.parametrize("name", ["llama", "mimo"])
def test_recorded_hidden_states_are_real_and_differentiable(name):
    got = step(model_of(name), output_hidden_states=True)
    want = step(unfused(model_of(name)), output_hidden_states=True)
    assert_same(got, want)
    states = [out[0].hidden_states for out in (got, want)]
    assert len(states[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("name", ["llama", "mimo"])
@pytest.mark.parametrize("recipe", ["tensor", "row"])
@pytest.mark.parametrize("way", ["layers", "one layer", "library", "reentrant"])
def test_recompute_changes_no_bit(name, recipe, way):
    want = step(model_of(name, recipe))
    model = model_of(name, recipe)
    if way == "layers":
        wrap_recompute(model, "layer", None, lambda: ottava.autocast())
    elif way == "one layer":
        wrap_recompute(nn.ModuleDict({"layers": nn.ModuleList(blocks(model)[1:])}), "layer", None,
                       lambda: ottava.autocast())  # fmt: skip
    else:
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
        if way == "reentrant":
            model.enable_input_require_grads()
    for _ in range(2):
        assert_same(step(model), want, 0.0)


@pytest.mark.parametrize("name", ["llama", "mimo"])
def test_recompute_of_split_masters_changes_no_bit(name):
    """What runs again finds the parameters, not bare copies of their codes."""
    steps = []
    for recompute in (False, True):
        model = model_of(name, "tensor")
        ottava.AdamW(model.parameters(), lr=1e-3, master="split16", states="8bit")
        if recompute:
            wrap_recompute(model, "layer", None, lambda: ottava.autocast())
        steps.append(step(model))
    assert_same(*steps, 0.0)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_keeps_no_more_than_a_plain_one(recompute):
    sizes = []
    for make in (lambda m: m, unfused):
        model = make(model_of("llama", "tensor", torch.bfloat16))
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with Kept(model) as kept:
            model(input_ids=ids(), labels=ids(), use_cache=False)
        sizes.append(kept.nbytes)
    assert sizes[0] == sizes[1]


def test_a_reader_that_is_not_the_planned_one_computes_by_itself():
    got, want = model_of("llama"), unfused(model_of("llama"))
    for model in (got, want):
        model.model.norm = copy.deepcopy(model.model.norm)
        with torch.no_grad():
            model.model.norm.weight.mul_(3)
    assert_same(step(got), step(want))


def test_a_weight_that_is_elsewhere_is_left_alone():
    """Sharding leaves an empty parameter until the norm's own call gathers it."""
    got, want = model_of("llama"), unfused(model_of("llama"))
    for model in (got, want):
        norm = blocks(got)[0].next_norm if model is got else model.model.layers[1].input_layernorm
        whole = norm.weight.data

        def gather(m, args, whole=whole):
            m.weight.data = whole

        def free(m, args, out):
            m.weight.data = torch.empty(0)

        norm.weight.data = torch.empty(0)
        norm.register_forward_pre_hook(gather)
        norm.register_forward_hook(free)
    losses = [m(input_ids=ids(), labels=ids(), use_cache=False).loss for m in (got, want)]
    assert torch.equal(*losses)


def test_precision_contexts_and_mixed_dtypes():
    got, want = model_of("llama", "tensor"), unfused(model_of("llama", "tensor"))
    with ottava.autocast(enabled=False):
        assert_same(step(got), step(want))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # an FP32 stream and BF16 branches
        a, b = step(got), step(want)
    assert torch.equal(a[0].loss, b[0].loss)


@pytest.mark.parametrize("name", ["llama", "mimo"])
def test_copies_pickles_and_revert(name):
    model = model_of(name)
    want = step(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(step(twin), want, 0.0)
        layers = blocks(twin)
        assert layers[0].next_norm is layers[1].input_layernorm
        assert type(layers[0]).__name__ == type(blocks(model)[0]).__name__
    ottava.revert(model)
    assert not blocks(model) and not any("next_norm" in m.__dict__ for m in model.modules())


def test_a_norm_and_its_linear_compile_as_one_graph():
    model = ottava.convert(nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64, bias=False)))
    x = torch.randn(16, 64, requires_grad=True)
    grads = []
    for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
        run(x).square().sum().backward()
        grads.append((x.grad, model[0].weight.grad, model[1].weight.grad))
        x.grad = None
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_plan_names_the_blocks():
    rows = [r for r in ottava.plan(family("llama")).rows if r.kind == "block"]
    assert [r.name for r in rows] == ["model.layers.0", "model.layers.1"]
