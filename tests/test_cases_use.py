"""Faults of other libraries that must not be here: inference, compile, hooks, and the way back.

| report | test |
|---|---|
| pytorch/ao#564, #643; unsloth-zoo#351 | test_whole_models_in_inference_mode; test_linear |
| pytorch/ao#563, float8_experimental#237, #321 | test_compiled_steps_equal_eager_ones |
| pytorch/ao#1132, #1344 | test_back_to_a_normal_model_after_training |
| pytorch/ao#463, #736, #744; pytorch#186444 | test_a_rate_that_changes_under_compile |
| LlamaFactory#9500, trl#3860 | test_fp8_asked_for_and_not_run |
"""

import copy
from itertools import pairwise

import pytest
import torch
from mimo_toy import toy
from test_cases_model import lean, step, values
from test_convert import five, fp8_modules, ids, llama
from tiny_run import tiny_run
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ottava
from ottava.config import ConfigError
from ottava.layers.linear import Linear
from ottava.optim.adamw import AdamW
from ottava.train.resume import amax_state

# ---- evaluation, compile, and back ----


@pytest.mark.parametrize("make", [llama, toy])
@pytest.mark.parametrize("name", ["tensor", "row", "delayed"])
def test_whole_models_in_inference_mode(make, name):
    """pytorch/ao#564: works under no_grad, fails under inference_mode."""
    model, x = ottava.convert(make(), recipe=name), ids() % 31
    model(input_ids=x, labels=x).loss.backward()
    model.zero_grad()
    before = {k: v["amax"].clone() for k, v in amax_state(model).items()}
    pending = [h.pending.clone() for _, h in histories(model)]
    outs = []
    for training in (True, False):
        model.train(training)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                outs.append(model(input_ids=x, use_cache=False).logits.clone())
    assert all(torch.equal(y, outs[0]) for y in outs)
    assert all(torch.equal(v["amax"], before[k]) for k, v in amax_state(model).items())
    assert all(
        torch.equal(h.pending, p) for (_, h), p in zip(histories(model), pending, strict=True)
    )
    model.train()
    model(input_ids=x, labels=x).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.fixture(autouse=True)
def own_compilations():
    yield
    torch._dynamo.reset()


def histories(model):
    return [(n, m._history) for n, m in model.named_modules() if getattr(m, "_history", None)]


# ---- compile ----


@pytest.mark.parametrize(
    "name,master", [("tensor", "fp32"), ("block", "fp32"), ("tensor", "split16")]
)
def test_compiled_steps_equal_eager_ones(name, master):
    """pytorch/ao#563: graph breaks, and a compilation for every layer or token count."""
    model = ottava.convert(five()[:3], recipe=name)
    ottava.AdamW(model.parameters(), master=master)
    counter = CompileCounterWithBackend("aot_eager")
    coded = model[0].weight.dtype == torch.float8_e4m3fn  # those linears run between graphs
    compiled = torch.compile(model, backend=counter, fullgraph=not coded)
    for tokens in (16, 32, 48, 48, 48):
        results, x = [], torch.randn(tokens, 64, requires_grad=True)
        for run in (model, compiled):  # the same tensor, which carries codes from the first run
            x.grad = None
            y = run(x)
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


def test_a_decoder_layer_compiles():
    """The kind of pytorch/ao#563, for fused attention, norms and gated MLP."""
    model, x = ottava.convert(llama(num_hidden_layers=1)), ids(1, 12)
    want = model(input_ids=x, labels=x).loss
    want.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    torch.testing.assert_close(loss, want)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad - grad).norm() <= 0.1 * grad.norm()


def test_a_rate_that_changes_under_compile():
    """pytorch/ao#463: the rate was compiled in, or every step compiled anew; pytorch#186444: a rate
    of 0 and a second moment of 0 gave NaN."""
    results, compiled = [], []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(64, 128))
        idle = torch.nn.Parameter(torch.randn(64, 128))
        optimizer = AdamW([weight, idle], weight_decay=0.0, states="8bit")
        step = torch.compile(optimizer.step, backend=backend) if compiles else optimizer.step
        at = [weight.detach().clone()]
        for rate in (0.1, 0.01, 0.0):
            optimizer.param_groups[0]["lr"] = rate
            weight.grad, idle.grad = torch.ones_like(weight), torch.zeros_like(idle)
            step()
            at.append(weight.detach().clone())
        moved = [(b - a).abs().mean() for a, b in pairwise(at)]
        assert 9 < moved[0] / moved[1] < 11 and moved[2] == 0 and idle.isfinite().all()
        results.append(at[-1])
    assert torch.equal(*results) and len(compiled) <= 1


def test_delayed_scales_compile_once_they_are_known():
    """The kind of float8_experimental#321: from the second step on, other operators run."""
    torch.manual_seed(1)
    model = ottava.convert(nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)), recipe="delayed")
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(16, 64)
    outs = []
    for run in (model, model, torch.compile(model, backend="aot_eager")):
        outs.append(run(x))
        outs[-1].square().sum().backward()
        optimizer.step()
    assert (outs[2] - outs[1]).norm() <= 0.05 * outs[1].norm()
    assert model[1]._history.amax[2, :3].gt(0).all()


# ---- hooks, and the way back ----


def test_hooks_of_a_fused_mlp_run():
    """The kind of pytorch/ao#564: what works on the plain module must work on the converted one."""
    for kind in ("forward", "forward_pre", "full_backward"):
        seen, losses, grads = [], [], []
        for model in (llama(), ottava.convert(llama())):
            mlp = model.model.layers[0].mlp

            def hook(module, *args, kind=kind, seen=seen):
                seen.append(kind)
                if kind == "forward":
                    return args[1] * 0
                return (args[0][0] * 0,) if kind == "forward_pre" else (args[0][0] * 3,)

            getattr(mlp.up_proj, f"register_{kind}_hook")(hook)
            loss = model(input_ids=ids(), labels=ids()).loss
            loss.backward()
            losses.append(loss.item())
            grads.append(mlp.gate_proj.weight.grad.norm() + mlp.down_proj.weight.grad.norm())
        assert len(seen) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-3)
        assert (grads[0] == grads[1] == 0) == (kind != "full_backward")


def test_parts_replaced_after_conversion_are_used():
    """A LoRA layer put in place of a converted projection trains, and the frozen base does not."""

    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.a = base, nn.Linear(base.in_features, 4, bias=False)
            self.b = nn.Linear(4, base.out_features, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return self.base_layer(x) + self.b(self.a(x))

    model = ottava.convert(llama()).requires_grad_(False)
    before = model(input_ids=ids(), labels=ids()).loss.item()
    for layer in model.model.layers:
        for owner, name in ((layer.mlp, "up_proj"), (layer.self_attn, "q_proj")):
            setattr(owner, name, Lora(getattr(owner, name)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ottava.AdamW(trained, lr=1e-2, master="split16")
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(before, rel=1e-4) and losses[2] < losses[1] < losses[0]


def test_back_to_a_normal_model_after_training(tmp_path):
    """pytorch/ao#1132: nobody knew how to use the model after FP8 training."""
    model = ottava.convert(llama())
    optimizer = ottava.AdamW(model.parameters(), lr=1e-2, master="split16", states="8bit")
    for _ in range(2):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {n: values(p).clone() for n, p in model.named_parameters()}
    assert ottava.revert(model) is model
    plain = llama()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter and p.dtype == torch.float32 and torch.equal(p, want[name])
        assert not p.__dict__, (name, p.__dict__)
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path, dtype=torch.float32)
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    assert torch.equal(loss, again(input_ids=ids(), labels=ids()).loss)
    optimizer.step()  # the same parameters, now FP32: it still drives them
    assert all(
        p.isfinite().all() and not torch.equal(p, want[n]) for n, p in model.named_parameters()
    )
    twin = ottava.convert(copy.deepcopy(model))
    assert len(fp8_modules(twin)) == 14 and all(
        isinstance(p, nn.Parameter) for p in twin.parameters()
    )


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_codes_cast_as_if_they_were_values(cast):
    """The kind of transformers#47145: codes without their scale must never pass for weights."""
    model, optimizer = lean(five())
    step(model, optimizer, torch.randn(16, 64))
    model.to(cast)
    with pytest.raises(RuntimeError, match="move or cast the model before building the optimizer"):
        model(torch.randn(16, 64).to(cast))


# ---- FP8 that is not there ----


def test_fp8_asked_for_and_not_run(tmp_path):
    """hiyouga/LlamaFactory#9500: no error, no FP8."""
    if not torch.cuda.is_available():
        plan = ottava.plan(five())
        assert plan.emulated and "no FP8 unit for it here" in plan.summary()
        assert not ottava.plan(five(), device="cpu", recipe="storage").emulated
    with pytest.raises(ValueError, match="no module is eligible"):
        ottava.plan(five(), keep=["*"])
    with pytest.raises(ConfigError, match=r"precision\.recipe"):
        tiny_run(tmp_path, "bf16", precision={"recipe": "tensor"})
    kept = ottava.plan(five(), keep=["0", "1", "2", "3"])
    assert kept.num_fp8 == 1 and kept.share_weights == kept.share_flops == pytest.approx(
        0.2, rel=0.02
    )
    model = five()
    assert ottava.plan(model, recipe="storage").num_fp8 == 0
    assert not any(isinstance(m, Linear) for m in model)
