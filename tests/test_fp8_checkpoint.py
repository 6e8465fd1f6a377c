"""Block-scaled FP8 checkpoints: the released tensors, both layouts, exactness, and every bad file.

The files come from released_files.py, which knows the format and none of our code.
"""

import itertools
import json
import math
import shutil
import warnings
import weakref

import pytest
import torch
from released_files import SECTION, Files, quantize, read_all, same, small_config, value
from safetensors.torch import save_file
from torch import nn

import ottava
from ottava.kernels.split import SplitParameter, pack_split
from ottava.models.fp8_layout import BLOCK, groups, tensor_table
from ottava.models.load import load_model
from ottava.models.shards import Shards

TINY = {
    "hidden_size": 128, "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1], "intermediate_size": 128,
    "moe_intermediate_size": 64, "n_routed_experts": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """(files, their folder) of the small model, written once and read only."""
    files = Files(small_config())
    return files, files.write(tmp_path_factory.mktemp("released") / "m")


@pytest.fixture
def released(tmp_path):
    """(files, their folder) of a still smaller model, to be spoilt."""
    files = Files(small_config(**TINY))
    return files, files.write(tmp_path / "released")


def empty(folder, dtype=torch.float32, **overrides):
    return load_model(str(folder), dtype=dtype, device="meta", overrides=overrides)


def marked(folder, dtype=torch.bfloat16):
    """On meta, converted: the weights that become split masters are marked."""
    model = empty(folder, dtype)
    return ottava.convert(model, recipe="tensor", policy="mimo")


def rewrite(folder, file, change):
    """Change the tensors of one file of a folder, and its index."""
    path = folder / file
    tensors = change({k: v.clone() for k, v in _load(path).items()})
    save_file(tensors, path, {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file}
    index["weight_map"] |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _load(path):
    from safetensors.torch import load_file

    return load_file(path)


# ---- the released tensors -------------------------------------------------------------------


def test_the_tensor_table_of_pro_is_the_released_one_to_the_byte():
    pro = load_model("mimo-v2.5-pro", device="meta", overrides={"num_nextn_predict_layers": 3})
    table = tensor_table(pro, "released")
    sizes = {n: math.prod(shape) for n, (_, shape) in table.items()}
    assert len(table) == 159_581
    assert sum(sizes.values()) == 1_023_244_718_976
    total = sum(sizes[n] * dtype.itemsize for n, (dtype, _) in table.items())
    assert f"{total / 2**30:.2f}" == "962.40"
    e4m3, fp32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    layer, mtp = "model.layers.69.", "model.mtp.layers.2."
    expected = {
        "model.embed_tokens.weight": (bf16, (152576, 6144)), "lm_head.weight": (bf16, (152576, 6144)),
        "model.layers.0.self_attn.qkv_proj.weight": (e4m3, (27136, 6144)),
        "model.layers.0.self_attn.qkv_proj.weight_scale_inv": (fp32, (216, 48)),
        "model.layers.0.mlp.down_proj.weight_scale_inv": (fp32, (48, 128)),
        f"{layer}self_attn.o_proj.weight": (bf16, (6144, 16384)),
        "model.layers.68.self_attn.attention_sink_bias": (bf16, (128,)),
        f"{layer}mlp.experts.383.up_proj.weight": (e4m3, (2048, 6144)),
        f"{layer}mlp.experts.383.up_proj.weight_scale_inv": (fp32, (16, 48)),
        f"{layer}mlp.experts.0.down_proj.weight_scale_inv": (fp32, (48, 16)),
        f"{layer}mlp.gate.weight": (fp32, (384, 6144)),
        f"{layer}mlp.gate.e_score_correction_bias": (fp32, (384,)),
        f"{layer}post_attention_layernorm.weight": (bf16, (6144,)),
        f"{mtp}eh_proj.weight": (bf16, (6144, 12288)), f"{mtp}pre_mlp_layernorm.weight": (bf16, (6144,)),
        f"{mtp}self_attn.qkv_proj.weight_scale_inv": (fp32, (216, 48)),
        f"{mtp}mlp.gate_proj.weight_scale_inv": (fp32, (128, 48)),
    }  # fmt: skip
    assert {n: table.get(n) for n in expected} == expected
    assert f"{layer}self_attn.attention_sink_bias" not in table  # a full layer
    scales = sum(sizes[n] for n in table if n.endswith("_scale_inv"))
    assert scales == 61_877_376


@pytest.mark.parametrize(("layer", "rows", "released", "canonical"), [
    (0, 13568, 108, 106), (1, 14848, 116, 116),
])  # fmt: skip
def test_v25_has_the_released_scale_rows(layer, rows, released, canonical):
    model = load_model("mimo-v2.5", device="meta", overrides={"num_hidden_layers": 2})
    name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
    for layout, scale_rows in (("released", released), ("canonical", canonical)):
        table = tensor_table(model, layout)
        assert table[name][1][0] == rows and table[f"{name}_scale_inv"][1][0] == scale_rows


# ---- loading --------------------------------------------------------------------------------


@pytest.mark.parametrize(("flash", "heads"), [(False, 4), (True, 4), (True, 2)])
def test_released_files_load_as_what_they_stand_for(tmp_path, flash, heads):
    files = Files(small_config(**TINY | {"num_attention_heads": heads}, flash=flash))
    folder = files.write(tmp_path / "m")
    model = ottava.load_fp8(folder, empty(folder), "released")
    state = model.state_dict()
    assert set(state) == set(files.truth)
    for name, wanted in files.truth.items():
        assert torch.equal(state[name], wanted), name


def test_partial_blocks_and_a_model_that_has_memory(kept):
    files, folder = kept
    model = load_model("mimo-v2.5-pro", overrides=_overrides(files.config), dtype=torch.bfloat16)
    parameters = {n: (p, p.data_ptr()) for n, p in model.named_parameters()}
    assert ottava.load_fp8(folder, model, "released") is model
    for name, (p, at) in parameters.items():
        assert model.get_parameter(name) is p and p.data_ptr() == at  # written in place
        assert torch.equal(p.detach(), files.truth[name].to(p.dtype)), name


def _overrides(config):
    return {k: getattr(config, k) for k in TINY} | {
        k: getattr(config, k) for k in ("vocab_size", "num_nextn_predict_layers", "num_experts_per_tok",
                                        "moe_layer_freq")
    }  # fmt: skip


def test_tied_weights_are_one_tensor_under_either_name(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 48,
             "num_key_value_heads": 1, "intermediate_size": 96, "tie_word_embeddings": True}  # fmt: skip
    model = load_model("dense-100m", overrides=sizes, seed=2)
    ottava.save_fp8(model, tmp_path / "m")
    out = read_all(tmp_path / "m")
    assert (
        "lm_head.weight" not in out and out["model.layers.0.self_attn.o_proj.weight"].itemsize == 1
    )
    out["lm_head.weight"] = out.pop("model.embed_tokens.weight")
    save_file(out, tmp_path / "m" / "model.safetensors")
    again = ottava.load_fp8(tmp_path / "m", empty(tmp_path / "m"))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, out["lm_head.weight"].float())


def test_a_repository_of_the_hub_is_downloaded(released, monkeypatch):
    import huggingface_hub

    files, folder = released
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(folder)
    )
    model = ottava.load_fp8("XiaomiMiMo/Small", empty(folder), "released")
    assert asked == ["XiaomiMiMo/Small"]
    assert torch.equal(model.lm_head.weight, files.truth["lm_head.weight"])

    def offline(*_, **__):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"XiaomiMiMo/Small: no such folder.*\(no network\)"):
        ottava.load_fp8("XiaomiMiMo/Small", model, "released")


def test_mtp_blocks_that_the_model_has_not_stay_in_the_files(released):
    files, folder = released
    model = ottava.load_fp8(folder, empty(folder, num_nextn_predict_layers=0), "released")
    assert all(".mtp." in n for n in model._ottava_fp8.left) and model._ottava_fp8.left
    assert torch.equal(model.lm_head.weight, files.truth["lm_head.weight"])


def test_the_layout_is_chosen_never_guessed(released, tmp_path):
    files, folder = released
    with pytest.raises(ValueError, match="say layout='released'"):
        ottava.load_fp8(folder, empty(folder))
    with pytest.raises(
        ValueError, match=r"is \[12, 1\]; canonical .* this is the grid of layout 're"
    ):
        ottava.load_fp8(folder, empty(folder), "canonical")
    # Our own files say what they are.
    model = ottava.load_fp8(folder, empty(folder), "released")
    ottava.save_fp8(model, tmp_path / "plain", "canonical")
    again = ottava.load_fp8(tmp_path / "plain", empty(folder))
    with pytest.raises(ValueError, match="says that its layout is 'canonical'"):
        ottava.load_fp8(tmp_path / "plain", empty(folder), "released")
    for name, p in again.state_dict().items():
        error = (p - files.truth[name]).abs().max()
        assert error == 0 or ("qkv" in name and error < 2**-4 * p.abs().max()), name


# ---- names, shapes and types of scales ------------------------------------------------------


class Plain(nn.Module):
    """Linears of shapes that no block divides, an expert layer, an embedding."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(256, 1000, bias=False)
        self.b = nn.Linear(384, 576, bias=False)
        self.c = nn.Linear(128, 192, bias=False)
        self.d = nn.Linear(1, 1, bias=False)
        self.embed = nn.Embedding(96, 130)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 140, 130))
        self.experts.down_proj = nn.Parameter(torch.zeros(2, 130, 70))


def test_the_block_size_is_not_inferred_from_the_shapes(tmp_path):
    model, truth, tensors = Plain(), {}, {}
    for name, p in model.named_parameters():
        for e, part in enumerate(p.detach() if p.dim() == 3 else [p.detach()]):
            half = part.shape[0] // 2
            names = {"experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",)}.get(
                name
            )
            keys = [f"experts.{e}.{n}_proj.weight" for n in names] if names else [name]
            for key, rows in zip(keys, (half, half) if len(keys) == 2 else (2 * half + part.shape[0] % 2,),
                                 strict=True):  # fmt: skip
                x = torch.randn(rows, part.shape[1]) * (1 + torch.arange(rows) % 9).view(-1, 1)
                codes, scale = quantize(x)
                tensors |= {key: codes, f"{key}_scale_inv": scale}
                assert ((value(codes, scale) - x).norm() / x.norm()) < 0.027
                truth.setdefault(name, []).append(value(codes, scale))
    save_file(tensors, tmp_path / "model.safetensors")
    ottava.load_fp8(tmp_path, model)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().flatten(), torch.cat(truth[name]).flatten()), name
    assert tensors["a.weight_scale_inv"].shape == (8, 2)
    tensors["a.weight_scale_inv"] = torch.ones(10, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"a.weight_scale_inv is \[10, 2\].*128 x 128.*need \[8, 2\]"
    ):
        ottava.load_fp8(tmp_path, Plain())


POWERS = torch.tensor([0.5, 0.25, 2.0**-9])
SCALES = {
    "scalar": torch.tensor(0.037), "one": torch.tensor([0.037]), "one by one": torch.tensor([[0.037]]),
    "rows": torch.linspace(0.1, 1, 300)[:, None], "rows flat": torch.linspace(0.1, 1, 300),
    "e8m0": POWERS[:, None].to(torch.float8_e8m0fnu), "bf16": POWERS[:, None].bfloat16(),
    "e8m0 bytes": POWERS[:, None].to(torch.float8_e8m0fnu).view(torch.uint8),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("case", SCALES)
def test_every_kind_of_scale_is_applied_and_written_again(tmp_path, case, suffix):
    scale = SCALES[case]
    codes = (torch.randn(300, 100) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {}
    for name in ("linear.weight", "embed.weight"):
        tensors |= {name: codes.clone(), name + suffix: scale.clone()}
    tensors["linear.input_scale"] = torch.tensor(1.0)
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    model = nn.Module()
    model.linear, model.embed = nn.Linear(100, 300, bias=False), nn.Embedding(300, 100)
    ottava.load_fp8(tmp_path / "a", model)
    wide = {"e8m0": POWERS, "e8m0 bytes": POWERS, "bf16": POWERS}.get(case, scale)
    if wide is POWERS:
        wide = POWERS.repeat_interleave(128)[:300]
    truth = codes.float() * (wide.reshape(-1, 1) if wide.numel() > 1 else wide.reshape(()))
    assert torch.equal(model.linear.weight, truth) and torch.equal(model.embed.weight, truth)
    ottava.save_fp8(model, tmp_path / "b")
    again = read_all(tmp_path / "b")
    assert all(same(again[n], t) for n, t in tensors.items() if n != "linear.input_scale")
    with torch.no_grad():  # trained: new scales of the same kind
        model.linear.weight.mul_(1.5)
    ottava.save_fp8(model, tmp_path / "c")
    moved = read_all(tmp_path / "c")["linear.weight" + suffix]
    assert moved.dtype == scale.dtype and moved.shape == scale.shape
    ottava.load_fp8(tmp_path / "c", model)
    error = (model.linear.weight - truth * 1.5).abs() / truth.abs().clamp_min(1e-2)
    assert error.max() < 0.1


# ---- split masters --------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["split16", "split24"])
def test_split_masters_come_straight_from_the_files_and_go_back_bit_for_bit(
    released, tmp_path, master
):
    files, folder = released
    model = marked(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every code can be told again
        ottava.load_fp8(folder, model, "released", master=master)
    bits = {"split16": 8, "split24": 16}[master]
    splits = {n: p for n, p in model.named_parameters() if isinstance(p, SplitParameter)}
    streams = {n: vars(p).get("_ottava_stream") for n, p in marked(folder).named_parameters()}
    assert {n: vars(p).get("_ottava_stream") for n, p in model.named_parameters()} == streams
    assert set(splits) == {
        n for n in files.truth
        if n.endswith(("qkv_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight",
                       "experts.gate_up_proj", "experts.down_proj"))
    }  # fmt: skip
    for name, p in splits.items():
        wanted = pack_split(files.truth[name], p.scale, bits)
        assert same(p.data, wanted.codes) and same(p.residual, wanted.residual), name
        size = files.truth[name].abs() / p.scale
        error = (p.dequantize() - files.truth[name]).abs() / p.scale
        # and half of FP32's last bit where e4m3 is subnormal
        bound = (size * 2.0 ** (-4 - bits)).clamp_min(2.0 ** (-10 - bits)) + 2.0**-30
        assert (error <= bound).all(), name
    ottava.save_fp8(model, tmp_path / "again", "released")
    again = read_all(tmp_path / "again")
    assert set(again) == set(files.tensors)
    assert all(same(again[n], t) for n, t in files.tensors.items())

    opt = ottava.AdamW(model.parameters(), lr=1e-2, master=master, states="8bit")
    assert all(isinstance(model.get_parameter(n), SplitParameter) for n in splits)
    ids = torch.randint(0, 40, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    ottava.save_fp8(model, tmp_path / "trained", "released")
    trained = read_all(tmp_path / "trained")
    assert {n: t.shape for n, t in trained.items()} == {n: t.shape for n, t in again.items()}
    ottava.load_fp8(tmp_path / "trained", plain := empty(folder), "released")
    for name, p in splits.items():
        got, held = plain.get_parameter(name), p.dequantize()
        assert not torch.equal(got, files.truth[name])
        assert (got - held).norm() < 0.03 * held.norm(), name


def test_masters_that_an_optimizer_holds_are_written_in_place(released):
    files, folder = released
    model = load_model("mimo-v2.5-pro", overrides=_overrides(files.config), seed=1)
    ottava.convert(model, recipe="tensor", policy="mimo")
    opt = ottava.AdamW(model.parameters(), master="split16")
    held = {n: (p, p.residual.data_ptr()) for n, p in model.named_parameters()
            if isinstance(p, SplitParameter)}  # fmt: skip
    ottava.load_fp8(folder, model, "released")
    for name, (p, at) in held.items():
        assert model.get_parameter(name) is p and p.residual.data_ptr() == at
        scale = p.scale if p.cast else None
        wanted = pack_split(files.truth[name], scale, 8 * p.residual.element_size())
        assert same(p.data, wanted.codes) and same(p.residual, wanted.residual), name
        if p.cast:
            assert torch.equal(
                p.amax, files.truth[name].flatten(-p.dim() + (p.dim() == 3)).abs().amax(-1).view(-1)
            )
    assert {id(p) for p, _ in held.values()} <= {
        id(p) for group in opt.param_groups for p in group["params"]
    }


@pytest.mark.parametrize(("master", "smallest"), [("split16", 2.0**-7), ("split24", 2.0**-15)])
def test_every_code_survives_a_split_master_down_to_the_stated_scale(tmp_path, master, smallest):
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    codes = torch.cat((every, every[:2]))[:, None].view(torch.uint8).expand(256, 128)
    codes = codes.contiguous().view(torch.float8_e4m3fn)
    for factor in (1.0, 1.1, 1.9):  # the scale per tensor is the next power of two
        grid = torch.tensor([[1.0], [smallest]]) * factor
        save_file({"weight": codes, "weight_scale_inv": grid}, tmp_path / "model.safetensors")
        with torch.device("meta"):
            model = nn.Linear(128, 256, bias=False)
        ottava.load_fp8(tmp_path, ottava.convert(model), master=master)
        assert not model._ottava_fp8.inexact
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        ottava.save_fp8(model, tmp_path / "out")
        out = read_all(tmp_path / "out")
        assert same(out["weight"], codes) and same(out["weight_scale_inv"], grid)


def test_blocks_too_far_apart_for_one_scale_are_named(tmp_path):
    codes = torch.full((256, 128), 3.0).to(torch.float8_e4m3fn)
    codes[:, 1] = 448
    codes[:, ::2] = 2.0**-9 * 5
    grid = torch.tensor([[1.0], [2.0**-12]])
    save_file({"weight": codes, "weight_scale_inv": grid}, tmp_path / "model.safetensors")

    def load(master):
        with torch.device("meta"):
            model = nn.Linear(128, 256, bias=False)
        return ottava.load_fp8(tmp_path, ottava.convert(model), master=master)

    with pytest.warns(
        UserWarning, match=r"1 of 1 FP8 weights lose codes \(first weight\).*split24"
    ):
        model = load("split16")
    assert model._ottava_fp8.inexact == ["weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load("split24")
    ottava.save_fp8(model, tmp_path / "out")
    assert same(read_all(tmp_path / "out")["weight"], codes)


# ---- saving ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_and_save_leaves_every_bit_the_files_and_the_section(kept, tmp_path, dtype):
    files, folder = kept
    model = ottava.load_fp8(folder, empty(folder, dtype), "released")
    assert ottava.save_fp8(model, tmp_path / "out", "released") == tmp_path / "out"
    out = read_all(tmp_path / "out")
    assert set(out) == set(files.tensors)
    for name, tensor in files.tensors.items():
        assert same(out[name], tensor), name
    index = "model.safetensors.index.json"
    before, after = (json.loads((f / index).read_text()) for f in (folder, tmp_path / "out"))
    assert before == after
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == SECTION
    assert config["architectures"] == ["MiMoV2ForCausalLM"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_what_was_trained_gets_new_codes_and_scales(kept, tmp_path):
    files, folder = kept
    model = ottava.load_fp8(folder, empty(folder), "released")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2] += 0.003
    ottava.save_fp8(model, tmp_path / "out", "released")
    out = read_all(tmp_path / "out")
    changed = {n for n, t in files.tensors.items() if not same(out[n], t)}
    stem = "model.layers.1.mlp.experts.2."
    expected = {f"{stem}{k}_proj.weight" for k in ("gate", "up")}
    assert changed == expected | {f"{n}_scale_inv" for n in expected}
    moved = model.model.layers[1].mlp.experts.gate_up_proj[2, :192].detach()
    codes, scale = quantize(moved)
    assert same(out[f"{stem}gate_proj.weight_scale_inv"], scale)
    assert (out[f"{stem}gate_proj.weight"].float() - codes.float()).abs().max() <= 32
    got = value(out[f"{stem}gate_proj.weight"], scale)
    assert (got - moved).norm() < 0.027 * moved.norm()


@pytest.mark.parametrize("layout", ["canonical", "released"])
@pytest.mark.parametrize("flash", [False, True])
def test_a_model_of_ours_goes_out_and_comes_back(tmp_path, layout, flash):
    overrides = _overrides(small_config(**TINY, flash=flash))
    model = load_model("mimo-v2-flash" if flash else "mimo-v2.5-pro", overrides=overrides, seed=3)
    ottava.save_fp8(model, tmp_path / "a", layout, max_shard_bytes=100_000)
    table, out = tensor_table(model, layout), read_all(tmp_path / "a")
    assert {n: (t.dtype, tuple(t.shape)) for n, t in out.items()} == table
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "a" / "model_mtp.safetensors").exists() == (layout == "released")
    section = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert section["weight_block_size"] == list(BLOCK) and section["quant_method"] == "fp8"
    mtp = "model.decoder" if layout == "released" else "model.mtp.layers.0"
    o_proj = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)] + [f"{mtp}.self_attn.o_proj"]
    more = ["model.mtp.layers.0.eh_proj", "lm_head"] if layout == "canonical" else []
    key = "ignored_layers" if layout == "released" else "modules_to_not_convert"
    assert sorted(section[key]) == sorted(o_proj + more)
    again = ottava.load_fp8(tmp_path / "a", empty(tmp_path / "a"))
    before = model.state_dict()
    for name, got in again.state_dict().items():
        assert (got - before[name]).norm() <= 0.03 * before[name].norm(), name
    ottava.save_fp8(again, tmp_path / "b", layout)
    second = read_all(tmp_path / "b")
    assert all(same(second[n], t) for n, t in out.items())


def test_saving_as_bf16_leaves_nothing_of_fp8(released, tmp_path):
    files, folder = released
    model = ottava.load_fp8(folder, marked(folder), "released", master="split16")
    ottava.revert(model)
    model = ottava.load_fp8(folder, empty(folder, torch.bfloat16), "released")
    model.save_pretrained(tmp_path / "plain")
    out = read_all(tmp_path / "plain")
    assert {t.dtype for n, t in out.items() if "mlp.gate." not in n} == {torch.bfloat16}
    assert not [n for n in out if "scale" in n]
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    for name, t in out.items():
        assert torch.equal(t, files.truth[name].to(t.dtype)), name
    load_model(str(tmp_path / "plain"))  # whole, by the plain path


def test_saving_is_all_or_nothing(released, tmp_path):
    _, folder = released
    model = ottava.load_fp8(folder, empty(folder), "released")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        ottava.save_fp8(model, folder)
    with pytest.raises(ValueError, match="layout: 'plain' is not one of canonical, released"):
        ottava.save_fp8(model, tmp_path / "x", "plain")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[1, 0, 0] = math.inf
    with pytest.raises(ValueError, match=r"experts\.1\.down_proj\.weight is not finite"):
        ottava.save_fp8(model, tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["released"]


def test_the_library_reads_the_canonical_files(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    pytest.importorskip("accelerate")
    sizes = {
        **TINY, "num_key_value_heads": 2, "swa_num_key_value_heads": 4,
        "num_attention_heads": 4, "moe_intermediate_size": 128, "vocab_size": 64, "num_experts_per_tok": 2,
        "hybrid_layer_pattern": [0, 1], "head_dim": 64, "v_head_dim": 64,
    }  # fmt: skip
    model = load_model("mimo-v2-flash", overrides=sizes, seed=1)
    folder = ottava.save_fp8(model, tmp_path / "m", "canonical")
    theirs = transformers.MiMoV2FlashForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = ottava.load_fp8(folder, empty(folder))
    state = {n.replace(".sinks", ".attention_sink_bias"): t for n, t in theirs.state_dict().items()}
    for name, wanted in ours.state_dict().items():
        assert torch.equal(state[name].float(), wanted), name
    model.to(torch.bfloat16)


# ---- memory ---------------------------------------------------------------------------------


def test_tensors_are_read_once_and_two_shards_are_never_held(tmp_path, monkeypatch):
    files = Files(small_config(**TINY))
    folder = files.write(tmp_path / "m", shards=8)
    model = marked(folder)
    alive, peak, reads = [0], [0], []
    read = Shards.read

    def counting(self, name):
        tensor = read(self, name)
        alive[0] += tensor.nbytes
        peak[0] = max(peak[0], alive[0])
        reads.append(name)
        nbytes = tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), lambda: alive.__setitem__(0, alive[0] - nbytes))
        return tensor

    monkeypatch.setattr(Shards, "read", counting)
    ottava.load_fp8(folder, model, "released", master="split16")
    assert sorted(reads) == sorted(files.tensors)
    largest = max(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert 0 < peak[0] <= 2 * largest
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    order = [index[n] for n in reads if "scale" not in n]
    assert sum(a != b for a, b in itertools.pairwise(order)) < 20  # file after file


def test_files_are_converted_without_a_model_in_memory(tmp_path):
    from ottava.models.fp8_convert import convert_fp8

    for flash in (False, True):
        files = Files(small_config(**TINY, flash=flash))
        folder, out = files.write(tmp_path / f"m{flash}"), tmp_path / f"c{flash}"
        model = empty(folder)
        assert convert_fp8(folder, model, out, "canonical", source_layout="released") == out
        assert all(p.is_meta for p in model.parameters())
        loaded = ottava.load_fp8(folder, empty(folder), "released")
        ottava.save_fp8(loaded, tmp_path / f"s{flash}", "canonical")
        got, wanted = read_all(out), read_all(tmp_path / f"s{flash}")
        assert set(got) == set(wanted)
        assert all(same(got[n], t) for n, t in wanted.items())
        alike = {n for n, t in files.tensors.items() if same(got[n], t)}
        assert all(("k_proj" in n or "v_proj" in n) if flash else "qkv" in n
                   for n in set(files.tensors) - alike)  # fmt: skip
        # there and back: all but what was cut anew is as released
        back = convert_fp8(out, empty(folder), tmp_path / f"b{flash}", "released")
        again = read_all(back)
        assert all(
            same(again[n], files.tensors[n]) for n in alike if again[n].dim() == 1 or "qkv" not in n
        )


# ---- bad files ------------------------------------------------------------------------------


def _drop(name):
    return lambda t: {k: v for k, v in t.items() if k != name}


def _rename(old, new):
    return lambda t: {new if k == old else k: v for k, v in t.items()}


def _set(name, make):
    return lambda t: {**t, name: make(t.get(name))}


GATE = "model.layers.1.mlp.experts.1.gate_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
BAD = {
    "missing": (NORM, _drop(NORM), rf"1 tensor is missing, first '{NORM}'"),
    "renamed": (NORM, _rename(NORM, "model.layers.1.input_norm.weight"),
                rf"missing, first '{NORM}'; the nearest is 'model.layers.1.input_norm.weight'"),
    "extra": (NORM, _set("model.layers.1.inputlayernorm.weight", lambda _: torch.ones(3)),
              rf"not the model's, first '.*inputlayernorm.weight'; the nearest is '{NORM}'"),
    "scale missing": (f"{GATE}_scale_inv", _drop(f"{GATE}_scale_inv"),
                      rf"{GATE} is FP8, and its scale {GATE}_scale_inv is missing"),
    "weight missing": (GATE, _drop(GATE), rf"{GATE}_scale_inv scales a weight that is not there|is missing"),
    "scale alone": (NORM, _set("model.layers.7.x.weight_scale_inv", lambda _: torch.ones(1, 1)),
                    "model.layers.7.x.weight_scale_inv scales a weight that is not there"),
    "scaled bf16": (NORM, _set(f"{NORM}_scale_inv", lambda _: torch.ones(1)),
                    rf"{NORM}_scale_inv scales {NORM}, which is bfloat16"),
    "two scales": (GATE, _set(f"{GATE}_scale", lambda _: torch.ones(1)), "a second scale"),
    "wrong shape": (NORM, _set(NORM, lambda t: torch.ones(3).bfloat16()), r"is \[3\], the model's is"),
    "wrong grid": (f"{GATE}_scale_inv", _set(f"{GATE}_scale_inv", lambda t: torch.ones(2, 2)),
                   r"_scale_inv is \[2, 2\]; released blocks of 128 x 128 .* need \[1, 1\]"),
    "negative scale": (f"{GATE}_scale_inv", _set(f"{GATE}_scale_inv", lambda t: -t), "negative or inf"),
    "nan scale": (f"{GATE}_scale_inv", _set(f"{GATE}_scale_inv", lambda t: t * math.nan), "negative or inf"),
    "nan codes": (GATE, _set(GATE, lambda t: torch.full_like(t.float(), math.nan).to(t.dtype)),
                  rf"{GATE} holds codes of NaN"),
    "e5m2": (GATE, _set(GATE, lambda t: t.float().to(torch.float8_e5m2)), "only E4M3 matrices"),
    "half fp8": (GATE, lambda t: {**{k: v for k, v in t.items() if k != GATE + "_scale_inv"},
                                  GATE: t[GATE].float().bfloat16()}, "scales .*, which is bfloat16|is not FP8"),
    "integers": (NORM, _set(NORM, lambda t: t.int()), "int32, neither FP8 nor a float"),
    "scale of integers": (f"{GATE}_scale_inv", _set(f"{GATE}_scale_inv", lambda t: t.int()), "no type for"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_clear_line_and_changes_nothing(released, case):
    files, folder = released
    name, change, says = BAD[case]
    model = load_model("mimo-v2.5-pro", overrides=_overrides(files.config), dtype=torch.bfloat16)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    rewrite(folder, index["weight_map"][name], change)
    with pytest.raises(ValueError, match=says) as error:
        ottava.load_fp8(folder, model, "released")
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not hasattr(model, "_ottava_fp8")


def _truncate(folder):
    path = folder / "model_1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _no_header(folder):
    (folder / "model_1.safetensors").write_bytes(b"abc")


def _block_size(folder, size):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = size
    (folder / "config.json").write_text(json.dumps(config))


SPOILT = {
    "truncated": (_truncate, "model_1.safetensors: is truncated"),
    "no header": (_no_header, "model_1.safetensors: is truncated, or no safetensors"),
    "shard gone": (lambda f: (f / "model_2.safetensors").unlink(), "shard model_2.safetensors is missing"),
    "index lies": (lambda f: shutil.copy(f / "model_0.safetensors", f / "model_1.safetensors"),
                   "is in model_0.safetensors and in model_1"),
    "index broken": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "cannot be read as JSON"),
    "block size": (lambda f: _block_size(f, [64, 64]), "blocks of 64 x 64 .* need"),
    "no size": (lambda f: _block_size(f, [64]), "is not two positive numbers"),
    "no files": (lambda f: [p.unlink() for p in f.glob("*.s*")], "holds no safetensors files"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_folder_is_named_before_a_weight_is_read(released, monkeypatch, case):
    _, folder = released
    model = empty(folder)
    monkeypatch.setattr(Shards, "read", None)
    spoil, says = SPOILT[case]
    spoil(folder)
    with pytest.raises(ValueError, match=says) as error:
        ottava.load_fp8(folder, model, "released")
    assert "\n" not in str(error.value)
    assert all(p.is_meta for p in model.parameters())


def test_wrong_requests_are_refused(released, tmp_path):
    _, folder = released
    model = empty(folder)
    with pytest.raises(ValueError, match="no such folder"):
        ottava.load_fp8(tmp_path / "a" / "nowhere", model, "released")
    with pytest.raises(ValueError, match="master: 'fp8' is not one of split16, split24"):
        ottava.load_fp8(folder, model, "released", master="fp8")
    with pytest.raises(ValueError, match="layout: 'plain'"):
        ottava.load_fp8(folder, model, "plain")
    with pytest.raises(ValueError, match="heads do not divide into 3 released chunks"):
        model.config.num_key_value_heads = 3
        groups(model, "released")


# ---- export ---------------------------------------------------------------------------------


def test_export_writes_fp8_from_a_checkpoint_and_converts_fp8_files(capsys, released, tmp_path):
    from ottava.cli import main
    from ottava.train.writing import save

    files, folder = released

    def export(*arguments):
        capsys.readouterr()
        code = main(["export", *map(str, arguments)])
        return code, capsys.readouterr()

    model = ottava.load_fp8(folder, empty(folder), "released")
    save(tmp_path / "run" / "checkpoints", 5, model=model, sections={})
    code, done = export(tmp_path / "run", tmp_path / "a", "--format", "released", "--json")
    assert code == 0, done.err
    assert json.loads(done.out) == {"folder": str(tmp_path / "a"), "step": 5, "dtype": "released"}
    out = read_all(tmp_path / "a")
    for name, t in files.tensors.items():  # new scales: amax / 448 again, to the last bit but one
        assert torch.allclose(out[name].float(), t.float(), rtol=2**-22, atol=0), name
    code, done = export(folder, tmp_path / "b", "--format", "fp8", "--layout", "released")
    assert code == 0, done.err
    code, done = export(tmp_path / "b", tmp_path / "c", "--format", "bf16")
    assert code == 0, done.err
    plain = load_model(str(tmp_path / "c"), dtype=torch.bfloat16)
    assert len(plain.model.mtp_blocks) == 1
    assert torch.equal(plain.lm_head.weight, files.tensors["lm_head.weight"])
    for arguments, says in (
        ((folder, tmp_path / "d"), "say layout='released'"),
        ((folder, tmp_path / "d", "--format", "fp4"), "--format: 'fp4' is not one of"),
        ((folder, tmp_path / "d", "--format", "fp8", "--dtype", "fp16"), "goes with --format bf16"),
        ((tmp_path / "run", tmp_path / "d", "--layout", "released"), "goes with a folder of FP8"),
    ):
        code, done = export(*arguments)
        assert code == 2 and says in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "d").exists()
