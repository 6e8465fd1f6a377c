"""LoRA by PEFT on MiMo's frozen FP8 weights: attention, dense layers, and routed experts by choice."""

import copy

import pytest
import torch
from released_files import Files, small_config
from test_frozen import BATCH, SIZES, db, frozen, plain

import ottava
from ottava.kernels.frozen import FrozenParameter
from ottava.layers.adapters import ExpertWrapper
from ottava.layers.experts import Experts as CodedExperts
from ottava.layers.mlp import GatedMLP
from ottava.models.config import MiMoV2Config
from ottava.models.moe import Experts, freeze_router
from ottava.numerics.recipe import get_recipe
from ottava.recompute import wrap_recompute

peft = pytest.importorskip("peft")

LINEARS = ["qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Files(small_config(**SIZES)).write(tmp_path_factory.mktemp("lora") / "m")


def with_lora(model, experts=True, **changes):
    """Adapters whose B is not zero, the same for the same targets."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "task_type": "CAUSAL_LM"}
    if experts:
        settings["target_parameters"] = EXPERTS
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(**settings | changes))
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.1
    return model


def grads_of(model, **more):
    loss = model.train()(**BATCH, **more).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("experts", [False, True])
def test_gradients_of_adapters(folder, experts):
    want_loss, want = grads_of(with_lora(plain(folder), experts))
    got_loss, got = grads_of(ottava.convert(with_lora(frozen(folder), experts), policy="mimo"))
    assert got.keys() == want.keys() and all("lora_" in n for n in want)
    assert any("experts" in n for n in want) == experts
    assert all(g is not None for g in got.values())
    assert abs(got_loss - want_loss) < 0.02
    worst = min((db(g, want[n]), n) for n, g in got.items())
    assert worst[0] > 14, worst
    everything = [torch.cat([t[n].flatten() for n in want]) for t in (got, want)]
    assert db(*everything) > 22


def test_the_thin_products_are_exact(folder):
    """In high precision, against the whole weights that PEFT makes."""
    want_loss, want = grads_of(with_lora(plain(folder)))
    model = ottava.convert(with_lora(frozen(folder)), recipe="storage")
    with ottava.autocast(enabled=False):
        got_loss, got = grads_of(model)
    assert any(isinstance(m, ExpertWrapper) for m in model.modules())
    assert abs(got_loss - want_loss) < 1e-4
    inside = {n: g for n, g in got.items() if "experts" in n}
    assert len(inside) == 4
    for name, grad in inside.items():
        assert db(grad, want[name]) > 45, (name, db(grad, want[name]))


def test_factors_as_large_as_the_weights_against_whole_weights():
    """One layer of experts in high precision, every gradient; a group without rows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "n_routed_experts": 4}
    plain = Experts(MiMoV2Config(**sizes, num_hidden_layers=1, hybrid_layer_pattern=[0]))
    for p in plain.parameters():
        p.data.normal_(0, 0.1)
    ours = copy.deepcopy(plain)
    ours._ottava_class, ours.__class__ = Experts, CodedExperts
    shapes = {"gate_up_proj": (96, 64), "down_proj": (64, 48)}
    pairs = [{n: (0.3 * torch.randn(4, 8, k), 0.3 * torch.randn(4, m, 8)) for n, (m, k) in shapes.items()}
             for _ in range(2)]  # fmt: skip
    pairs[1] = {n: tuple(t.clone() for t in ab) for n, ab in pairs[0].items()}
    x, index, weight = torch.randn(30, 64), torch.randint(0, 3, (30, 2)), torch.rand(30, 2)

    def run(experts, factors):
        leaves = [x.clone(), weight.clone(), *(t for ab in factors.values() for t in ab)]
        leaves = [t.requires_grad_() for t in leaves]
        if experts is ours:
            experts.adapters = factors
            y = experts(leaves[0], index, leaves[1])
        else:
            whole = {n: getattr(plain, n).detach() + b @ a for n, (a, b) in factors.items()}
            y = torch.func.functional_call(plain, whole, (leaves[0], index, leaves[1]))
        generator = torch.Generator().manual_seed(1)
        return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=generator))]

    for number, (got, want) in enumerate(
        zip(run(ours, pairs[0]), run(plain, pairs[1]), strict=True)
    ):
        assert db(got, want) > 100, number
    ours.recipe = get_recipe("block")
    for number, (got, want) in enumerate(
        zip(run(ours, pairs[0]), run(plain, pairs[1]), strict=True)
    ):
        assert db(got, want) > 18, number


@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_frozen_mlps_run_again(folder, recompute):
    """Adapters on attention alone, so that MLPs and experts are fused on frozen codes."""
    want_loss, want = grads_of(
        ottava.convert(with_lora(frozen(folder), False, target_modules=["qkv_proj"]))
    )
    model = with_lora(frozen(folder), False, target_modules=["qkv_proj"])
    plan = ottava.plan(model, recompute=recompute)
    ottava.convert(model, plan)
    wrap_recompute(model.get_base_model(), recompute, plan, ottava.autocast)
    assert any(isinstance(m, GatedMLP) for m in model.modules())
    got_loss, got = grads_of(model)
    assert torch.equal(got_loss, want_loss)
    assert min(db(g, want[n]) for n, g in got.items()) > (12 if recompute == "layer" else 18)


def test_experts_that_train_take_adapters_too(folder):
    """Not frozen codes: the wrapper's weights never exist whole there either."""
    want_loss, want = grads_of(with_lora(plain(folder)))
    got_loss, got = grads_of(ottava.convert(with_lora(plain(folder)), policy="mimo"))
    assert abs(got_loss - want_loss) < 0.02
    assert min(db(g, want[n]) for n, g in got.items() if "experts" in n) > 14


@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_recompute_gives_the_same_gradients(folder, recompute):
    want_loss, want = grads_of(ottava.convert(with_lora(frozen(folder))))
    model = with_lora(frozen(folder))
    plan = ottava.plan(model, recompute=recompute)
    ottava.convert(model, plan)
    wrap_recompute(model.get_base_model(), recompute, plan, ottava.autocast)
    got_loss, got = grads_of(model)
    assert torch.equal(got_loss, want_loss)
    floor = 12 if recompute == "layer" else 20  # inputs are then read from their 8-bit codes
    assert min(db(g, want[n]) for n, g in got.items()) > floor


def test_only_adapters_move_and_the_loss_falls(folder, tmp_path):
    model = ottava.convert(with_lora(frozen(folder)), policy="mimo")
    model.enable_input_require_grads()
    before = {n: _bytes(p).clone() for n, p in model.named_parameters()}
    opt = ottava.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, states="8bit")
    losses = []
    for _ in range(12):
        loss = model(**BATCH).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    for name, p in model.named_parameters():
        assert torch.equal(_bytes(p), before[name]) == ("lora_" not in name), name
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".mlp.gate.weight" in n)

    model.save_pretrained(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    assert not (tmp_path / "model.safetensors").exists()
    size = sum(f.stat().st_size for f in tmp_path.iterdir())
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert size < 4.5 * adapters + 20_000  # adapters alone, in FP32
    again = ottava.convert(peft.PeftModel.from_pretrained(frozen(folder), tmp_path), policy="mimo")
    assert torch.equal(again.eval()(**BATCH).loss, model.eval()(**BATCH).loss)
    # PEFT alone reads the same file on the plain model
    loss = peft.PeftModel.from_pretrained(plain(folder), tmp_path).eval()(**BATCH).loss
    assert abs(loss - model(**BATCH).loss) < 0.03


def _bytes(p):
    return p.detach().view(torch.uint8) if isinstance(p, FrozenParameter) else p.detach()


def test_merging_is_exact_in_high_precision(folder, tmp_path):
    wanted = with_lora(plain(folder)).merge_and_unload().state_dict()
    model = ottava.convert(with_lora(frozen(folder)), policy="mimo")
    apart = model.eval()(**BATCH).loss
    merged = ottava.revert(model).merge_and_unload()
    got = merged.state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[n].float(), wanted[n]) for n in wanted)
    assert abs(merged.eval()(**BATCH).loss - apart) < 0.03
    # and out again, in FP8 as released
    out = ottava.save_fp8(merged, tmp_path / "merged", "released")
    again = plain(out)
    name = "model.layers.1.mlp.experts.down_proj"
    error = (again.get_parameter(name) - wanted[name]).norm() / wanted[name].norm()
    assert 0 < error < 0.04


def test_merging_into_codes_is_refused_and_changes_nothing(folder):
    for experts in (False, True):
        model = ottava.convert(with_lora(frozen(folder), experts))
        before = {n: _bytes(p).clone() for n, p in model.named_parameters()}
        with pytest.raises((RuntimeError, NotImplementedError, ValueError), match=r"Float8|revert"):
            model.merge_adapter()
        assert all(torch.equal(_bytes(p), before[n]) for n, p in model.named_parameters())


def test_adapters_that_read_the_codes_as_values_are_refused(folder):
    with pytest.raises(NotImplementedError, match="Float8_e4m3fn"):  # by torch, in PEFT
        with_lora(frozen(folder), experts=False, use_dora=True)
    model = with_lora(frozen(folder))
    with pytest.raises(ValueError, match=r"call ottava.convert\(model\) after get_peft_model"):
        model(**BATCH)


def test_a_switched_off_adapter_is_the_base(folder):
    model = ottava.convert(with_lora(frozen(folder)), policy="mimo").eval()
    base = ottava.convert(frozen(folder), policy="mimo").eval()(**BATCH).loss
    with model.disable_adapter():
        assert abs(model(**BATCH).loss - base) < 0.005  # MLPs are not fused
    assert abs(model(**BATCH).loss - base) > 0.01
    assert not any(m.adapters for m in model.modules() if hasattr(m, "adapters"))


def test_a_model_is_copied_and_reverted_with_its_wrappers(folder):
    model = ottava.convert(with_lora(frozen(folder)))
    other = copy.deepcopy(model)
    assert torch.equal(other.eval()(**BATCH).loss, model.eval()(**BATCH).loss)
    ottava.revert(model)
    assert not any(isinstance(m, ExpertWrapper) for m in model.modules())


def test_routers_are_frozen_and_thawed(folder):
    model = frozen(folder)
    freeze_router(model, False)
    assert model.model.layers[1].mlp.gate.weight.requires_grad
    freeze_router(model)
    gate = model.model.layers[1].mlp.gate
    assert gate.frozen and not gate.weight.requires_grad
