"""Plan, convert, revert: which modules change, what stays the same, and what a saved file holds."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import ottava
from ottava.kernels.gemm import gemm_path, has_fp8_unit
from ottava.layers.linear import Linear
from ottava.numerics.formats import error_db
from ottava.numerics.policy import Plan


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ModuleList([nn.ModuleDict({"a": nn.Sequential(nn.Linear(64, 64))})])
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        return self.out(self.items[0]["a"](x))


def five():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))


def llama(tied=False, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def family(name):
    import transformers as t

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    if name == "qwen2":
        sizes.pop("head_dim")
    config = {"llama": t.LlamaConfig, "qwen2": t.Qwen2Config, "qwen3": t.Qwen3Config,
              "mistral": t.MistralConfig}[name](**sizes)  # fmt: skip
    return t.AutoModelForCausalLM.from_config(config)


def ids(rows=2, length=24):
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def fp8_modules(model):
    return [n for n, m in model.named_modules() if isinstance(m, Linear) and m.recipe is not None]


def test_the_root_itself_is_converted():
    layer = nn.Linear(64, 64)
    out = ottava.convert(layer)
    assert isinstance(out, Linear) and out is layer
    assert error_db(nn.functional.linear(torch.ones(4, 64), layer.weight, layer.bias),
                    out(torch.ones(4, 64))) < 60  # fmt: skip


def test_nested_containers_and_counts():
    model = ottava.convert(Nested())
    assert fp8_modules(model) == ["items.0.a.0", "out"]
    assert ottava.plan(Nested()).num_fp8 == 2


def test_a_subclass_with_its_own_forward_is_refused_with_a_reason():
    class Lora(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Attributes(nn.Linear):
        tag = "extra"

    model = nn.Sequential(Lora(64, 64), Attributes(64, 64), nn.Linear(64, 64))
    plan = ottava.plan(model)
    assert "own forward" in plan["0"].reason
    assert plan["1"].recipe is not None and plan["2"].recipe is not None
    ottava.convert(model, plan)
    assert model[1].tag == "extra"


def test_first_and_last_stay_high():
    plan = ottava.plan(five(), first_last_high=True)
    assert [bool(r.recipe) for r in plan.rows] == [False, True, True, True, False]
    with pytest.raises(ValueError, match="no module is eligible"):
        ottava.plan(five()[:2], first_last_high=True)
    nested = nn.ModuleDict({"blocks": nn.ModuleList([five(), five()])})
    rows = ottava.plan(nested, first_last_high=True).rows
    assert [bool(r.recipe) for r in rows] == [False] + [True] * 8 + [False]


def test_conversion_changes_no_parameter():
    model = five()
    before = {n: (p, p.clone()) for n, p in model.named_parameters()}
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    ottava.convert(model)
    for name, p in model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1])
    x = torch.randn(16, 64)
    model(x).sum().backward()
    opt.step()
    assert not torch.equal(model[0].weight, before["0.weight"][1])


def test_norm_without_bias():
    model = nn.Sequential(
        nn.LayerNorm(64, bias=False), nn.RMSNorm(64), nn.Linear(64, 64, bias=False)
    )
    x = torch.randn(8, 64)
    want = model[:2](x)
    ottava.convert(model)
    torch.testing.assert_close(model[:2](x), want, rtol=1e-5, atol=1e-5)
    model(x).sum().backward()


@pytest.mark.parametrize("keep", [(), ("*lm_head",)])
def test_tied_embedding_and_head_stay_one_tensor(keep):
    model = llama(tied=True)
    count = sum(p.numel() for p in model.parameters())
    ottava.convert(model, keep=keep)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(input_ids=ids(), labels=ids()).loss.backward()
        opt.step()
        opt.zero_grad()
    for m in (model, copy.deepcopy(model)):
        assert m.lm_head.weight is m.model.embed_tokens.weight
        assert sum(p.numel() for p in m.parameters()) == count
    other = llama(tied=True)
    other.load_state_dict(model.state_dict(), strict=True)
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_a_norm_whose_backward_would_lose_columns_stays_plain():
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[3] = 0.0
        model[2].weight[:60] = 2.0**-11
    plan = ottava.plan(model)
    assert [plan[n].recipe for n in "02"] == [None, None]
    assert all("too small" in plan[n].reason for n in "02")
    ottava.convert(model, plan)
    assert type(model[0]) is nn.RMSNorm and type(model[2]) is nn.LayerNorm
    model(torch.randn(16, 64)).square().sum().backward()
    assert (model[0].weight.grad != 0).all() and (model[2].weight.grad != 0).all()
    assert isinstance(model[1], Linear) and isinstance(ottava.convert(five())[0], Linear)


def test_a_plan_says_emulated_for_what_the_device_emulates(monkeypatch):
    """Compute capability 8.9 has an FP8 unit, and none for scales per 1 x 128 group."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    for path in (gemm_path, has_fp8_unit):
        path.cache_clear()
    try:
        assert not ottava.plan(five(), "row", device="cuda").emulated
        assert ottava.plan(five(), "block", device="cuda").emulated
    finally:
        for path in (gemm_path, has_fp8_unit):
            path.cache_clear()


def test_tied_gradient_is_the_sum_of_both_uses():
    want, got = llama(tied=True), ottava.convert(llama(tied=True))
    for m in (want, got):
        m(input_ids=ids(), labels=ids()).loss.backward()
    a, b = want.lm_head.weight.grad, got.lm_head.weight.grad
    assert (a - b).norm() < 0.1 * a.norm()


def test_converting_twice_changes_nothing():
    model = ottava.convert(llama())
    classes = [type(m) for m in model.modules()]
    assert ottava.plan(model).difference(model._ottava_plan) is None
    with pytest.warns(UserWarning, match="nothing to do"):
        ottava.convert(model)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_hugging_face_blocks_train_and_match(name):
    model = family(name)
    want = model(input_ids=ids(), labels=ids())
    want.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    ottava.convert(model)
    got = model(input_ids=ids(), labels=ids())
    got.loss.backward()
    assert abs(got.loss.item() - want.loss.item()) < 0.02
    assert len(fp8_modules(model)) == 14
    for n, p in model.named_parameters():
        assert p.grad.shape == p.shape and torch.isfinite(p.grad).all()
        if grads[n].norm() > 1e-6:
            assert (p.grad - grads[n]).norm() < 0.35 * grads[n].norm(), n
    logits = model(input_ids=ids()).logits
    assert logits.shape == (2, 24, 96)


def test_revert_gives_the_plain_model_back():
    model, plain = llama(), llama()
    ottava.convert(model)
    ottava.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    for (n, p), (m, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert n == m and torch.equal(p, q)
    out = [m(input_ids=ids(), labels=ids()).loss for m in (model, plain)]
    assert torch.equal(*out)
    assert not any("_ottava" in k for m in model.modules() for k in m.__dict__)


def test_save_pretrained_gives_a_plain_model(tmp_path):
    from transformers import AutoModelForCausalLM

    model = ottava.convert(llama())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == "LlamaForCausalLM" and type(again).__module__.startswith("trans")
    for (n, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), n


def test_state_dicts_load_strictly_both_ways():
    plain, model = llama(), ottava.convert(llama())
    assert list(plain.state_dict()) == list(model.state_dict())
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)


def test_state_dict_does_not_grow():
    model = ottava.convert(five(), recipe="delayed")
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    sizes = []
    for step in range(30):
        model(torch.randn(16, 64)).sum().backward()
        opt.step()
        if step in (0, 9, 29):
            sizes.append(sum(t.nbytes for t in model.state_dict().values()))
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("recipe", ["delayed", "tensor"])
def test_deepcopy_pickle_and_torch_save(recipe):
    model = ottava.convert(five(), recipe=recipe)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 64)
    for _ in range(3):
        model(x).sum().backward()
        opt.step()
    want = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), want)
        with torch.no_grad():
            twin[0].weight.zero_()
        assert torch.equal(model(x), want)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = five()
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(fresh[0].weight, model[0].weight)


def test_meta_model_allocates_nothing_and_materialises():
    with torch.device("meta"):
        model = five()
    ottava.convert(model, recipe="delayed")
    assert all(p.is_meta for p in model.parameters())
    source = five()
    model.load_state_dict(source.state_dict(), assign=True)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert torch.isfinite(model(torch.randn(8, 64))).all()
    model.to_empty(device="cpu")
    for m in model:
        m.reset_parameters()
    assert torch.isfinite(model(torch.randn(8, 64))).all()


def test_compiled_model_saves_plain_names():
    model = ottava.convert(five())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(16, 64))
    saved = {k.removeprefix("_orig_mod."): v for k, v in compiled.state_dict().items()}
    five().load_state_dict(saved, strict=True)
    five().load_state_dict(model.state_dict(), strict=True)


def test_compile_has_no_graph_breaks_and_few_recompiles():
    model = ottava.convert(five()[:3])
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=None)
    for tokens in (16, 32, 48, 48, 48):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count <= 2


def test_nothing_eligible_is_an_error_with_reasons():
    with pytest.raises(ValueError, match="2 features < 16"):
        ottava.plan(nn.Sequential(nn.Linear(8, 2)))
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        ottava.plan(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="did you mean 'tensor'"):
        ottava.plan(five(), recipe="tenser")
    with pytest.raises(ValueError, match="list of globs"):
        ottava.plan(five(), keep="*lm_head")


def test_plan_prints_counts_and_reasons():
    plan = ottava.plan(llama(), keep=["*.0.self_attn.o_proj"])
    text = str(plan)
    assert "output head: high by policy 'default'" in text and "kept by" in text
    assert plan.num_fp8 == 13 and 0.5 < plan.share_flops < 1
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.emulated == (not torch.cuda.is_available())


def test_a_plan_of_another_model_is_refused_before_anything_changes():
    model = five()
    with pytest.raises(ValueError, match="has not"):
        ottava.convert(model, ottava.plan(Nested()))
    wrong = nn.Sequential(*(nn.Linear(64, 48) for _ in range(5)))
    with pytest.raises(ValueError, match="convert before sharding"):
        ottava.convert(model, ottava.plan(wrong))
    assert not fp8_modules(model)


def test_unknown_fused_experts_are_named_with_the_share_left():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))
            self.down_proj = nn.Parameter(torch.randn(4, 32, 32))

    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(32, 4), Strange()
            self.proj = nn.Linear(32, 32)

    plan = ottava.plan(Moe())
    assert "Strange" in plan["experts"].reason and plan["experts"].recipe is None
    assert plan["gate"].kind == "router" and plan["gate"].recipe is None
    assert plan.share_weights < 0.1 and "of the weights" in plan.summary()


def test_policy_mimo_keeps_o_proj_high():
    plan = ottava.plan(llama(), policy="mimo")
    assert all(r.recipe is None for r in plan.rows if r.name.endswith("o_proj"))


def test_quantize_is_one_call():
    x = torch.randn(32, 64)
    q = ottava.quantize(x, format="e4m3", granularity="tensor")
    assert q.codes.dtype == torch.float8_e4m3fn and q.scale.shape == (1,)
    assert error_db(x, q.dequantize()) > 31
    with pytest.raises(ValueError, match="format"):
        ottava.quantize(x, format="e3m4")


def test_fp8_compute_can_be_switched_off():
    model = ottava.convert(five())
    plain = five()
    x = torch.randn(16, 64)
    with ottava.autocast(enabled=False):
        torch.testing.assert_close(model(x), plain(x))
    with ottava.fp8_autocast(enabled=True, fp8_recipe="row"):
        assert error_db(plain(x), model(x)) < 40
