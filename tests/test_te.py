"""Transformer Engine as a backend, with a stand-in for it (tests/fake_te) that runs on a CPU."""

import copy
import pickle
import sys

import pytest
import te_stand_in
import torch
from torch import nn

import ottava
from ottava.layers import te
from ottava.layers.te_modules import TEExperts, TEGatedMLP, TELinear
from ottava.models.blocks import MLP, RMSNorm
from ottava.models.config import MiMoConfig
from ottava.models.mimo import MiMoForCausalLM
from ottava.models.moe import Experts
from ottava.numerics.formats import E4M3, FORMATS, error_db
from ottava.numerics.recipe import TE_NAMES, get_recipe, recipe_from_dict, recipe_to_dict, te_recipe
from ottava.optim.adamw import AdamW


@pytest.fixture
def fake(monkeypatch):
    with te_stand_in.in_place(monkeypatch) as found:
        yield found


class Net(nn.Module):
    """A norm, a linear with bias, and a gated MLP."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = RMSNorm(width, 1e-6)
        self.proj = nn.Linear(width, width)
        config = MiMoConfig(hidden_size=width, intermediate_size=2 * width)
        self.mlp = MLP(config)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, x):
        x = x + self.proj(self.norm(x))
        return x + self.mlp(x)


def test_names_state_dict_and_parameters_stay_the_models_own(fake):
    model = Net()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    ottava.convert(model, recipe="te:current")
    model(torch.randn(3, 7, 32)).sum().backward()
    assert isinstance(model.proj, TELinear) and isinstance(model.mlp, TEGatedMLP)
    assert list(model.state_dict()) == names
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[n] is before[n] for n in before)
    assert not any(type(m).__module__.startswith("transformer_engine") for m in model.modules())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert fake.products == ["Float8CurrentScaling"] * 4
    held = model.proj.__dict__["_te"].module
    assert all(p is None for p in held._parameters.values())  # lent for the call only


@pytest.mark.parametrize("name", TE_NAMES)
@pytest.mark.parametrize("tokens", [37, 64])
def test_a_linears_values_and_gradients_have_the_error_of_their_formats(fake, name, tokens):
    model = nn.Sequential(nn.Linear(64, 96))
    nn.init.normal_(model[0].weight)
    plain = copy.deepcopy(model)
    x, grad = torch.randn(tokens, 64), torch.randn(tokens, 96)
    ottava.convert(model, recipe=name)
    found = []
    for m in (plain, model, model):  # the last: delayed scaling knows nothing at first
        leaf = x.clone().requires_grad_()
        m.zero_grad()
        y = m(leaf)
        y.backward(grad)
        found.append((y, leaf.grad, m[0].weight.grad, m[0].bias.grad))
    back = FORMATS[get_recipe(name).grad_output.format].gemm_db
    limits = (E4M3.gemm_db, back, back)
    for exact, value, limit in zip(found[0], found[2], limits, strict=False):
        assert limit <= error_db(exact, value) < limit + 12
    assert torch.equal(found[0][3], found[2][3])


def test_the_whole_model_errs_as_it_does_natively(fake):
    x, errors = torch.randn(64, 32), []
    start = Net()
    plain = copy.deepcopy(start)
    plain(x).square().mean().backward()
    for name in ("tensor", "te:current"):
        model = ottava.convert(copy.deepcopy(start), recipe=name)
        model(x).square().mean().backward()
        grads = [[p.grad.flatten() for p in m.parameters()] for m in (plain, model)]
        errors.append(error_db(*(torch.cat(g) for g in grads)))
    assert abs(errors[0] - errors[1]) < 1.5 and min(errors) > 20


def test_padded_rows_change_nothing(fake):
    """The same tokens alone and among 32: bit for bit the same output and weight gradient."""
    layer = ottava.convert(Net(), recipe="te:current").proj
    x = torch.randn(5, 32)
    layer.weight.grad = None
    y = layer(x)
    y.sum().backward()
    short, layer.weight.grad = layer.weight.grad, None
    full = torch.zeros(32, 32)
    full[:5] = x
    wide = layer(full)[:5]
    wide.sum().backward()
    assert torch.equal(y, wide) and torch.equal(short, layer.weight.grad)
    assert layer(x[:0]).shape == (0, 32)


def test_a_region_is_the_users_where_there_is_one(fake):
    import transformer_engine.pytorch as te_pytorch
    from transformer_engine.common.recipe import Float8BlockScaling

    model = ottava.convert(Net(), recipe="te:current")
    x = torch.randn(2, 32)
    with te_pytorch.autocast(enabled=True, recipe=Float8BlockScaling()):
        model(x)
    assert set(fake.products) == {"Float8BlockScaling"} and fake.FP8GlobalStateManager.entered == 1
    fake.products.clear()
    with te_pytorch.autocast(enabled=False):  # the user's word
        high = model(x)
    assert fake.products == []
    model.eval()
    assert torch.allclose(high, ottava.revert(model)(x), atol=1e-5)


def test_ottavas_autocast_switches_to_its_own_kernels_or_off(fake):
    model = ottava.convert(Net(), recipe="te:current")
    x = torch.randn(4, 32)
    with ottava.autocast(enabled=False):
        high = model(x)
    with ottava.autocast(recipe="tensor"):
        native = model(x)
    assert fake.products == []
    assert 0 < (native - high).abs().max() < 0.5
    with pytest.raises(ValueError, match=r"te:block: for converted models only"):
        ottava.autocast(recipe="te:block").__enter__()
    with pytest.raises(ValueError, match=r"te:current: for converted models only"):
        ottava.Linear(32, 32, recipe="te:current")


def test_delayed_scaling_has_one_region_for_a_forward_of_the_model(fake):
    model = ottava.convert(Net(), recipe=te_recipe("te:delayed", amax_history_len=4))
    x = torch.randn(32, 32)
    for _ in range(3):
        model(x).sum().backward()
    manager = fake.FP8GlobalStateManager
    assert manager.entered == 3 and manager.quantization_state.autocast_depth == 0
    state = te.scaling_state(model)
    assert set(state) == {f"{n}._te" for n in
                          ("proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}  # fmt: skip
    history = state["proj._te"]["scaling_fwd.amax_history"]
    weight = model.proj.weight.detach().abs().max()
    assert history.shape == (4, 3) and (history[1:, 1] == weight).sum() == 3
    assert state["proj._te"]["scaling_bwd.scale"][0] != 1
    with pytest.raises(ValueError, match=r"te:delayed: its histories move when a te.autocast ends"):
        model.proj(x)
    with pytest.raises(RuntimeError, match="boom"):
        model.mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
        model(x)
    assert manager.quantization_state.autocast_depth == 0  # closed after an error too


def test_scaling_state_survives_copies_pickles_and_loading(fake):
    model = ottava.convert(Net(), recipe=te_recipe("te:delayed", amax_history_len=4))
    x = torch.randn(32, 32)
    for _ in range(2):
        model(x).sum().backward()
    state = copy.deepcopy(te.scaling_state(model))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    fresh = ottava.convert(Net(), recipe=te_recipe("te:delayed", amax_history_len=8))
    fresh.load_state_dict(model.state_dict())
    fresh(x).sum()  # so that its modules exist already
    te.load_scaling_state(fresh, state)
    y = model(x)
    for twin in [*twins, fresh]:
        assert twin.proj.__dict__["_te"].module is not model.proj.__dict__["_te"].module
        assert twin.proj.weight is not model.proj.weight
        assert torch.equal(twin(x), y)
    blank = ottava.convert(Net(), recipe="te:delayed")
    blank.load_state_dict(model.state_dict())
    assert not torch.equal(blank(x), y)  # the state does count


def test_a_step_not_taken_and_an_evaluation_leave_no_trace(fake):
    model = ottava.convert(Net(), recipe=te_recipe("te:delayed", amax_history_len=4))
    x = torch.randn(32, 32)
    first = te.Scaling(model)
    model(x * torch.inf).sum().backward()
    first.put_back()  # of a module made since: as new
    for s in te.scaling_state(model).values():
        assert all((v == ("scale" in k)).all() for k, v in s.items())
    model(x).sum().backward()
    before = copy.deepcopy(te.scaling_state(model))
    with te.Scaling(model):
        model(100 * x).sum().backward()
        assert not torch.equal(
            te.scaling_state(model)["proj._te"]["scaling_fwd.scale"],
            before["proj._te"]["scaling_fwd.scale"],
        )
    for name, s in te.scaling_state(model).items():
        assert all(torch.equal(v, before[name][k]) for k, v in s.items())


def test_revert_gives_the_plain_model_back(fake):
    model = Net()
    plain, x = copy.deepcopy(model), torch.randn(4, 32)
    classes = [type(m) for m in model.modules()]
    ottava.convert(model, recipe="tensor")
    ottava.convert(model, recipe="te:delayed")  # over a native conversion
    model(x)
    ottava.revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert not any("_te" in m.__dict__ for m in model.modules())
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert not model._forward_hooks_always_called
    assert torch.equal(model(x), plain(x))
    ottava.convert(ottava.convert(model, recipe="te:current"), recipe="tensor")
    fake.products.clear()
    model(x)  # back to native
    assert fake.products == []


def test_mixed_dtypes_outside_autocast_and_autocast_inside(fake):
    layer = ottava.convert(Net(), recipe="te:current").proj
    x = torch.randn(32, 32)
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    layer.bfloat16()
    assert layer(x).dtype == torch.float32
    assert len(fake.products) == 3


def test_split_masters_give_their_bf16_part_and_codes_are_refused(fake):
    model = ottava.convert(Net().bfloat16(), recipe="te:current")
    optimizer = AdamW(model.parameters(), lr=1e-2, master="split16", states="8bit")
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    losses = []
    for _ in range(8):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert type(model.proj.weight).__name__ == "SplitParameter"
    assert model.proj.weight._ottava_cast is None  # what travels or is stored as codes is native
    assert model.proj.weight.dtype == torch.bfloat16
    coded = ottava.convert(Net(128).bfloat16(), recipe="tensor")
    AdamW(coded.parameters(), lr=1e-2, master="split16")
    with pytest.raises(ValueError, match="split codes, which Transformer Engine cannot read"):
        ottava.plan(coded, recipe="te:current")
    late = ottava.convert(Net(128), recipe="te:current")
    late.proj.weight = coded.proj.weight
    with pytest.raises(ValueError, match=r"weight is split codes.*ottava.revert"):
        late(torch.randn(2, 128))


def test_experts_run_grouped_with_rows_filled_up(fake):
    config = MiMoConfig(hidden_size=32, intermediate_size=32)
    config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size = 4, 2, 32
    experts = Experts(config)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.2)
    model = nn.ModuleDict({"experts": experts})
    plain = copy.deepcopy(experts)
    ottava.convert(model, recipe="te:current")
    assert isinstance(experts, TEExperts)
    index = torch.tensor([[0, 1], [1, 3], [0, 3], [3, 1], [1, 0]])  # expert 2 gets none
    x, weight = torch.randn(5, 32), torch.rand(5, 2)
    got = []
    for m in (plain, experts):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = m(leaves[0], index, leaves[1])
        y.square().sum().backward()
        got.append([y.detach(), *(t.grad for t in leaves), *(p.grad for p in m.parameters())])
    for a, b in zip(*got, strict=True):
        assert a.shape == b.shape and 0 < (a - b).norm() / a.norm() < 0.12
    assert (experts.gate_up_proj.grad[2] == 0).all()
    assert list(experts.state_dict()) == ["gate_up_proj", "down_proj"]


def test_the_plan_says_what_transformer_engine_cannot_take(fake):
    model = nn.ModuleDict(
        {
            "good": nn.Linear(64, 32),
            "odd": nn.Linear(40, 32),
            "wide": nn.Linear(32, 32).double(),
            "sixteen": nn.Linear(48, 32),
        }
    )
    table = ottava.plan(model, recipe="te:current")
    assert table["odd"].reason == "40 features: Transformer Engine takes multiples of 16"
    assert table["wide"].reason == "Transformer Engine takes no float64 weights"
    assert table["good"].recipe == table["sixteen"].recipe == get_recipe("te:current")
    assert not table.emulated and table.num_fp8 == 2
    assert "its memory is not planned" in str(table)
    assert ottava.Plan.from_dict(table.to_dict()) == table
    small = ottava.plan(model, recipe="te:mxfp8")
    assert small["sixteen"].reason == "48 features: Transformer Engine takes multiples of 32"
    net = ottava.plan(Net(), recipe="te:current")
    assert net["norm"].label == "output codes (e4m3)"
    assert net["mlp"].label.endswith("gate and up in int8 (groups of 128)")
    with pytest.raises(ValueError, match=r"no module is eligible .*multiples of 16"):
        ottava.plan(nn.Sequential(nn.Linear(40, 40)), recipe="te:current")


@pytest.mark.parametrize(("name", "needs"), [("te:block", "block"), ("te:mxfp8", "mxfp8"),
                                             ("te:current", "fp8")])  # fmt: skip
def test_a_device_that_cannot_is_named(fake, name, needs):
    fake.REFUSALS[needs] = "Device compute capability 10.0 or higher required."
    with pytest.raises(ValueError, match=f"{name}: .* cannot run it here: Device compute cap"):
        ottava.plan(Net(), recipe=name)
    te.DEVICES = ("cuda",)  # put back by the fixture
    with pytest.raises(ValueError, match=f"{name}: .* CUDA devices only, and this runs on cpu"):
        ottava.plan(Net(), recipe=name)


def test_options_that_would_be_swallowed_are_refused(fake):
    from transformer_engine.common import recipe as recipes

    recipes.DelayedScaling(interval=4)  # as the real one: no error
    cases = {
        "has no option 'interval' and would ignore it; it has margin": {"interval": 4},
        "has no option 'amax_history_length' .did you mean 'amax_history_len'": {
            "amax_history_length": 4
        },
        "fp8_format='E9' is not one of": {"fp8_format": "E9"},
        "refuses .*Pure E5M2 training is not supported": {"fp8_format": "E5M2"},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message) as raised:
            ottava.plan(Net(), recipe=te_recipe("te:delayed", **options))
        assert "\n" not in str(raised.value)
    recipe = te_recipe("te:delayed", amax_history_len=16, fp8_format="E4M3")
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    assert te.built(recipe).fp8_format is recipes.Format.E4M3
    assert str(recipe) == ("te:delayed(Transformer Engine, amax_history_len=16, fp8_format='E4M3')")
    with pytest.raises(
        ValueError, match=r"Recipe.options: 'margin' is for a recipe of Transformer"
    ):
        ottava.Recipe(options=(("margin", 1),))


def test_compiled_models_run_it_between_graphs(fake):
    model = ottava.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), recipe="te:delayed")
    x = torch.randn(32, 32)
    model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(torch.compile(twin, backend="eager")(x), model(x))
    assert fake.products == ["DelayedScaling"] * 3


def test_without_it_there_is_one_line_with_the_install_command(monkeypatch):
    te_stand_in.forget()
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ValueError) as raised:
        ottava.plan(Net(), recipe="te:current")
    assert str(raised.value) == (f"recipe te:*: Transformer Engine is not installed; {te.INSTALL}")
    te_stand_in.forget()


def test_a_broken_one_is_one_line(monkeypatch, tmp_path):
    te_stand_in.forget()
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("raise RuntimeError('cuDNN 9.12.0 or later\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be imported \(cuDNN 9.12.0 or later\)"):
        ottava.plan(Net(), recipe="te:current")
    (package / "__init__.py").write_text("")
    te_stand_in.forget()
    with pytest.raises(ValueError, match=r"has no te.autocast; this was written for 2.20.2"):
        ottava.plan(Net(), recipe="te:current")
    te_stand_in.forget()


def test_a_model_of_many_heads_trains(fake):
    config = MiMoConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = ottava.convert(MiMoForCausalLM(config), recipe="te:block")
    rows = {r.name: r for r in model._ottava_plan.rows}
    core = next(r for r in rows.values() if r.kind == "attention")
    assert core.recipe.name == "storage" and "int8 per head row" in core.kept
    ids = torch.randint(0, 64, (2, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert fake.products[:14] == ["Float8BlockScaling"] * 14
