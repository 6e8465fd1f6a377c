"""Models on frozen FP8 weights as released: what they hold, what they take, what passes through them."""

import copy
import gc
import io
import pickle

import pytest
import torch
from released_files import Files, read_all, same, small_config
from safetensors.torch import save_file
from test_fp8_checkpoint import TINY, rewrite
from torch import nn

import ottava
from ottava.kernels.cast import quantize
from ottava.kernels.frozen import FrozenParameter, freeze
from ottava.layers.frozen import FrozenExperts, FrozenLinear
from ottava.models.load import skeleton
from ottava.numerics.recipe import BLOCK128

# Experts that fill blocks; qkv whose released chunks end inside one, and one that is shared.
SIZES = {**TINY, "num_nextn_predict_layers": 1, "moe_intermediate_size": 128, "hidden_size": 320}
BATCH = {"input_ids": torch.arange(24).view(2, 12) * 7 % 40, "use_cache": False}
BATCH["labels"] = BATCH["input_ids"]


def db(got, wanted):
    """Signal over error in dB."""
    error = (got.double() - wanted.double()).norm()
    return (20 * torch.log10(wanted.double().norm() / error.clamp_min(1e-300))).item()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """{is flash: (files, their folder)}, read only."""
    out = {}
    for flash in (False, True):
        files = Files(small_config(**SIZES, flash=flash))
        out[flash] = files, files.write(tmp_path_factory.mktemp("released") / "m")
    return out


def frozen(folder, dtype=torch.float32, **more):
    """The model on the codes."""
    overrides = {"num_nextn_predict_layers": 1}
    return ottava.load_frozen(folder, "released", overrides=overrides, dtype=dtype, **more)


def plain(folder):
    """The same in FP32."""
    model = skeleton(str(folder), overrides={"num_nextn_predict_layers": 1})
    return ottava.load_fp8(folder, model, "released")


@pytest.mark.parametrize("flash", [False, True])
def test_weights_are_the_released_codes(kept, flash):
    files, folder = kept[flash]
    model = frozen(folder)
    coded = {n: p for n, p in model.named_parameters() if isinstance(p, FrozenParameter)}
    assert not any(p.requires_grad for p in model.parameters())
    stored = sum(t.numel() for t in files.tensors.values() if t.dtype == torch.float8_e4m3fn)
    assert sum(p.numel() for p in coded.values()) == stored
    for name, p in model.named_parameters():
        value = p.dequantize() if name in coded else p
        assert torch.equal(value, files.truth[name]), name
    q = coded["model.layers.0.self_attn." + ("q" if flash else "qkv") + "_proj.weight"]
    v = coded["model.layers.0.self_attn." + ("v" if flash else "qkv") + "_proj.weight"]
    assert v.position is not None and (q.position is None) == flash
    down = files.tensors["model.layers.1.mlp.experts.1.down_proj.weight"]
    assert same(coded["model.layers.1.mlp.experts.down_proj"].data[1], down)


def test_saved_again_every_bit_is_the_files(kept, tmp_path):
    for flash in (False, True):
        files, folder = kept[flash]
        model = ottava.convert(frozen(folder, torch.bfloat16))
        ottava.save_fp8(model, tmp_path / f"{flash}", "released")
        again = read_all(tmp_path / f"{flash}")
        assert set(again) == set(files.tensors)
        assert all(same(again[n], t) for n, t in files.tensors.items())


def alive():
    """Bytes of all tensors alive, storages once."""
    gc.collect()
    found = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor) and not x.is_meta:
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            for part in ("scale", "position"):
                t = getattr(x, part, None)
                if isinstance(t, torch.Tensor):
                    found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
    return sum(found.values())


def test_a_parameter_takes_1_01_bytes(tmp_path):
    sizes = {"hidden_size": 512, "n_routed_experts": 48, "moe_intermediate_size": 512,
             "num_attention_heads": 2, "num_key_value_heads": 1, "swa_num_key_value_heads": 1,
             "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1], "intermediate_size": 512,
             "num_nextn_predict_layers": 0}  # fmt: skip
    folder = Files(small_config(**sizes)).write(tmp_path / "m")
    before = alive()
    model = ottava.convert(ottava.load_frozen(folder, "released"))
    took = alive() - before
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters > 35e6
    assert 1.0 < took / parameters < 1.0125, took / parameters
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    assert alive() - before < took * 1.002  # nothing dequantized is left behind


@pytest.mark.parametrize("flash", [False, True])
def test_gradients_pass_through(kept, flash):
    _, folder = kept[flash]
    embeds = torch.randn(2, 12, 320, generator=torch.Generator().manual_seed(0)) * 0.5

    def run(model):
        x = embeds.clone().requires_grad_()
        model.config.num_nextn_predict_layers = 0
        out = model.eval()(inputs_embeds=x, labels=BATCH["labels"], use_cache=False)
        out.loss.backward()
        return out.loss.detach(), x.grad

    want = run(plain(folder).requires_grad_(False))
    high = run(frozen(folder))
    assert abs(high[0] - want[0]) < 1e-5 and db(high[1], want[1]) > 90
    converted = ottava.convert(frozen(folder), policy="mimo")
    got = run(converted)
    assert abs(got[0] - want[0]) < 0.02 and db(got[1], want[1]) > 35
    reference = ottava.convert(plain(folder), policy="mimo")
    with ottava.autocast(enabled=False):
        assert db(run(converted)[1], run(reference)[1]) > 90


def test_one_layer_is_the_product_of_its_codes(kept):
    _, folder = kept[False]
    layer = ottava.convert(frozen(folder)).model.layers[0].self_attn.qkv_proj
    assert isinstance(layer, FrozenLinear) and layer.recipe == BLOCK128
    x = torch.randn(9, 320, requires_grad=True)
    w = layer.weight.dequantize()
    y = layer(x)
    codes = quantize(x.detach(), BLOCK128.input).dequantize()
    assert db(y, codes @ w.t()) > 100
    grad = torch.randn_like(y)
    y.backward(grad)
    # groups of 128 of the gradient as the padded rows have them
    padded = grad.new_zeros(9, layer.weight.scale.shape[0] * 128)
    padded[:, layer.weight.position] = grad
    codes = quantize(padded, BLOCK128.grad_output).dequantize()[:, layer.weight.position]
    assert db(x.grad, codes @ w) > 100
    assert not any(isinstance(t, torch.Tensor) for t in y.grad_fn.next_functions)


def test_nothing_of_the_input_is_kept(kept):
    _, folder = kept[False]
    layer = ottava.convert(frozen(folder)).model.layers[0].self_attn.qkv_proj
    saved = []
    x = torch.randn(64, 320, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x * 1.0)
    assert all(t.dtype == torch.int64 for t in saved), [t.shape for t in saved]
    assert y.requires_grad


def test_moves_copies_and_pickles_keep_the_codes(kept):
    files, folder = kept[False]
    model = frozen(folder)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    for other in (copy.deepcopy(model), pickle.load(io.BytesIO(pickle.dumps(model))),
                  copy.deepcopy(model).to(torch.bfloat16), copy.deepcopy(model).half()):  # fmt: skip
        p = other.get_parameter(name)
        assert isinstance(p, FrozenParameter) and torch.equal(p.dequantize(), files.truth[name])
    there = copy.deepcopy(model).to("meta").get_parameter(name)
    assert there.is_meta and there.scale.is_meta and there.position.is_meta


def test_revert_gives_the_plain_model_in_fp32(kept):
    files, folder = kept[True]
    model = ottava.revert(ottava.convert(frozen(folder)))
    assert not any(isinstance(m, FrozenLinear | FrozenExperts) for m in model.modules())
    assert all(torch.equal(p, files.truth[n]) for n, p in model.named_parameters())
    want = plain(folder)
    model.train(), want.train()
    assert torch.equal(model(**BATCH).loss, want(**BATCH).loss)


def test_the_plan_says_what_is_frozen(kept):
    _, folder = kept[False]
    plan = ottava.plan(frozen(folder), policy="mimo")
    row = plan["model.layers.1.mlp.experts"]
    assert row.recipe == BLOCK128 and "no input: its weight is frozen" in row.label
    assert plan["model.layers.1.self_attn.o_proj"].recipe is None
    none = ottava.plan(frozen(folder), "storage")["model.layers.0.self_attn.qkv_proj"]
    assert none.recipe is None and "dequantized" in none.reason


def test_kinds_of_scales(tmp_path, monkeypatch):
    codes = torch.randn(256, 128).to(torch.float8_e4m3fn)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(128, 256, bias=False))
    monkeypatch.setattr("ottava.frozen.skeleton", lambda *_, **__: copy.deepcopy(empty))

    def load(scale):
        save_file({"0.weight": codes, "0.weight_scale_inv": scale}, tmp_path / "model.safetensors")
        return ottava.load_frozen(tmp_path)[0].weight

    for shape in ((), (1,), (1, 1)):
        assert torch.equal(load(torch.full(shape, 0.5)).dequantize(), codes.float() * 0.5)
    with pytest.raises(ValueError, match="scales rows; only 128 x 128 blocks, or one number"):
        load(torch.full((256, 1), 0.5))


def test_what_cannot_stay_is_refused_in_one_line(tmp_path, kept):
    files = Files(small_config(**SIZES | {"moe_intermediate_size": 64}))
    folder = files.write(tmp_path / "released")
    with pytest.raises(ValueError, match="64 rows do not fill blocks of 128") as error:
        frozen(folder)
    assert "\n" not in str(error.value)
    _, folder = kept[False]
    with pytest.raises(ValueError, match="say layout='released'"):
        ottava.load_frozen(folder)
    files = Files(small_config(**SIZES))
    folder = files.write(tmp_path / "nan")
    name = "model.layers.1.mlp.experts.1.gate_proj.weight"
    index = {n: f.name for f in folder.glob("*.safetensors") for n in _names(f)}
    rewrite(folder, index[name], lambda t: {**t, name: torch.full_like(t[name].view(torch.uint8), 0xFF).view(torch.float8_e4m3fn)})  # fmt: skip
    with pytest.raises(ValueError, match="holds codes of NaN"):
        frozen(folder)
    with pytest.raises(ValueError, match=r"need a scale \[2, 1\], not \[1, 1\]"):
        freeze(torch.zeros(130, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))


def _names(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        return list(f.keys())
