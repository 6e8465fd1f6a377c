"""Facts of the MiMo family, trap by trap; router and balancing; sizes."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from mimo_toy import TOY, toy, worst
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from ottava.models.attention_core import AttentionCore, rotary_tables, rotate
from ottava.models.config import Attention, MiMoConfig, MiMoV2Config
from ottava.models.load import load_config, load_model
from ottava.models.mimo import (
    MiMoForCausalLM,
    Router,
    freeze_router,
    load_statistics,
    update_router_bias,
)
from ottava.models.presets import PRESETS, preset_config

PRO_FULL = [0, 7, 15, 23, 31, 39, 47, 55, 62, 69]
RELEASED_PRO = {
    "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2",
    "auto_map": {"AutoConfig": "configuration_mimo_v2.MiMoV2Config"},
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128], "ignored_layers": []},
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
    "attention_bias": False, "attention_chunk_size": 128, "attention_dropout": 0.0,
    "attention_projection_layout": "fused_qkv", "attention_value_scale": 0.612, "head_dim": 192,
    "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02,
    "hybrid_layer_pattern": [int(i not in PRO_FULL) for i in range(70)],
    "intermediate_size": 16384, "layernorm_epsilon": 1e-05, "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 69, "n_group": 1,
    "n_routed_experts": 384, "n_shared_experts": None, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 70,
    "num_key_value_heads": 8, "partial_rotary_factor": 0.334, "rope_theta": 10000000,
    "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128,
    "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 128,
    "swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 152576,
}  # fmt: skip
RELEASED_V25 = {
    **RELEASED_PRO, "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64,
    "swa_num_attention_heads": 64, "num_key_value_heads": 4, "n_routed_experts": 256,
    "attention_value_scale": 0.707, "moe_layer_freq": [0] + [1] * 47, "hybrid_block_size": None,
    "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 != 0) for i in range(48)],
    "audio_config": {"audio_channels": 20}, "vision_config": {"depth": 28},
    "processor_config": {"fps": 1.0}, "image_token_id": 151655, "video_token_id": 151656,
    "vision_model_type": "mimovl", "pad_token_id": 151643, "eos_token_id": 151645,
    "rope_scaling": {"rope_type": "default", "type": "default"},
}  # fmt: skip


@pytest.mark.parametrize("released,preset", [
    (RELEASED_PRO, "mimo-v2.5-pro"), (RELEASED_V25, "mimo-v2.5"),
])  # fmt: skip
def test_released_config_is_read_unchanged_and_equals_the_preset(released, preset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released))
    named = preset_config(preset)
    for config in (load_config(str(tmp_path)), AutoConfig.from_pretrained(tmp_path)):
        assert type(config) is MiMoV2Config
        for layer in (*range(config.num_hidden_layers), None):
            assert config.attention(layer) == named.attention(layer)
            assert config.is_moe(layer) == named.is_moe(layer)
        written = config.to_dict()
        lost = [
            k for k in released if k not in ("torch_dtype", "rope_scaling") and k not in written
        ]
        assert not lost


def test_trap_1_fused_rows_are_q_then_k_then_v():
    fused, split = toy(), toy(attention_projection_layout="split")
    state = fused.state_dict()
    for i, swa in enumerate(TOY["hybrid_layer_pattern"]):
        kv = 3 if swa else 2
        prefix = f"model.layers.{i}.self_attn."
        parts = state.pop(prefix + "qkv_proj.weight").split([6 * 24, kv * 24, kv * 16])
        state |= {f"{prefix}{n}_proj.weight": p for n, p in zip("qkv", parts, strict=True)}
    split.load_state_dict(state)
    ids = torch.randint(0, 31, (1, 9))
    assert worst(split(ids).logits, fused(ids).logits) < 1e-6


def test_trap_2_window_layers_have_their_own_count_of_kv_heads():
    counts = {n: [preset_config(n).attention(i).num_kv_heads for i in (0, 1)] for n in PRESETS
              if n in ("mimo-v2.5-pro", "mimo-v2.5", "mimo-v2-flash")}  # fmt: skip
    assert counts == {
        "mimo-v2.5-pro": [8, 8], "mimo-v2.5": [4, 8], "mimo-v2-flash": [4, 8]
    }  # fmt: skip


def test_trap_3_full_layers_are_listed():
    def full(name):
        config = preset_config(name)
        return [i for i in range(config.num_hidden_layers) if config.attention(i).window is None]

    assert full("mimo-v2.5-pro") == PRO_FULL
    assert full("mimo-v2-flash") == full("mimo-v2.5") == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert preset_config("mimo-v2.5-pro").layer_types.count("sliding_attention") == 60


def test_trap_4_value_scale_sinks_and_partial_rotation():
    pro = preset_config("mimo-v2.5-pro")
    full, window, mtp = pro.attention(0), pro.attention(1), pro.attention(None)
    assert window == mtp
    assert (full.rotary_dim, full.qk_dim, full.v_dim) == (64, 192, 128)
    assert (full.theta, window.theta) == (1e7, 1e4) and (full.sinks, window.sinks) == (False, True)
    assert preset_config("mimo-v2-flash").attention(0).theta == 5e6

    q = torch.randn(1, 3, 2, 24)
    tables = rotary_tables(torch.arange(3), 8, 100.0)
    turned = rotate(q, *tables)
    assert torch.equal(turned[..., 8:], q[..., 8:]) and torch.equal(turned[:, 0], q[:, 0])
    assert not torch.equal(turned[:, 1:, :, :8], q[:, 1:, :, :8])

    plain = {"num_heads": 2, "num_kv_heads": 1, "qk_dim": 8, "v_dim": 4, "rotary_dim": 4,
             "theta": 1e4, "window": None, "sinks": False, "qkv_bias": False, "fused": True}  # fmt: skip
    k, v = torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 4)
    half, whole = (AttentionCore(Attention(**plain, value_scale=s)) for s in (0.5, 1.0))
    assert torch.allclose(half.attend(q[..., :8], k, v) * 2, whole.attend(q[..., :8], k, v))
    # One visible key: weight exp(a) / (exp(a) + exp(s)), the sink not divided by sqrt(d).
    sinks = torch.tensor([0.3, -1.2])
    a = (q[0, 0, :, :8] @ k[0, 0, 0]) * 8**-0.5
    out = whole.attend(q[:, :1, :, :8], k[:, :1], v[:, :1], sinks)
    assert torch.allclose(out[0, 0], torch.sigmoid(a - sinks)[:, None] * v[0, 0], atol=1e-6)


@pytest.mark.parametrize("window", [128, 129])
def test_trap_5_the_window_counts_the_query_itself(window):
    config = preset_config("mimo-v2.5-pro", {"sliding_window": window})
    spec = config.attention(1)
    assert spec.window == window == config.sliding_window_size
    core = AttentionCore(spec)
    q, k, v = (
        torch.zeros(1, 140, 128, 192),
        torch.zeros(1, 140, 8, 192),
        torch.zeros(1, 140, 8, 128),
    )
    v[0, 139 - window + 1] = 1.0  # the oldest key that the last query sees
    assert core.attend(q, k, v)[0, 139, 0, 0].item() == pytest.approx(0.612 / window)
    v = v.roll(-1, 1)
    assert core.attend(q, k, v)[0, 139].abs().max() == 0


def test_trap_6_the_correction_bias_selects_and_does_not_weigh():
    router = Router(MiMoV2Config(**{**TOY, "routed_scaling_factor": None}))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(1, 50, 20)
    router.e_score_correction_bias[2] = 10.0
    index, weight = router(x)
    assert (index == 2).any(-1).all()
    score = (x[0] @ router.weight.T).sigmoid().gather(1, index)
    assert torch.allclose(weight, score / score.sum(-1, keepdim=True))
    assert not router.e_score_correction_bias.requires_grad
    assert Router(MiMoV2Config(**TOY)).routed_scaling_factor == 1.3


def test_trap_7_mtp_names_order_and_count():
    assert preset_config("mimo-v2.5-pro").num_nextn_predict_layers == 0  # not in config.json
    model = load_model(
        "mimo-v2.5-pro", device="meta",
        overrides={"num_hidden_layers": 1, "n_routed_experts": 8, "num_nextn_predict_layers": 3},
    )  # fmt: skip
    names = {n for n, _ in model.named_parameters() if n.startswith("model.mtp.layers.2.")}
    assert {n.removeprefix("model.mtp.layers.2.") for n in names} == {
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "input_layernorm.weight",
        "pre_mlp_layernorm.weight", "final_layernorm.weight", "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight", "self_attn.attention_sink_bias", "mlp.gate_proj.weight",
        "mlp.up_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip
    assert tuple(model.model.mtp.layers[0].eh_proj.weight.shape) == (6144, 12288)
    dense = load_model("mimo-7b", device="meta", overrides={"num_nextn_predict_layers": 1})
    assert "model.mtp_layers.0.input_proj.weight" in dict(dense.named_parameters())

    # With eh_proj = [I 0] the block sees the token in MiMo-V2 and the state in MiMo-7B.
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9, "num_attention_heads": 2,
            "intermediate_size": 8, "num_nextn_predict_layers": 1, "num_key_value_heads": 2}  # fmt: skip
    for name, block, proj, sees_token in (
        ("demo", lambda m: m.model.mtp.layers[0], "eh_proj", True),
        ("mimo-7b", lambda m: m.model.mtp_layers[0], "input_proj", False),
    ):
        model = load_model(name, overrides=tiny)
        b = block(model)
        b.self_attn.o_proj.weight.data.zero_()
        b.mlp.down_proj.weight.data.zero_()
        getattr(b, proj).weight.data.copy_(torch.eye(8, 16))
        state, token = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
        seen = token if sees_token else state
        tables = rotary_tables(torch.arange(1), *b.self_attn.rotary)
        twice = F.rms_norm(F.rms_norm(seen, (8,), eps=1e-5), (8,), eps=1e-5)
        assert torch.allclose(b(state, token, tables), twice, atol=1e-6)


def test_trap_7_mtp_needs_labels_in_training():
    model = toy(num_nextn_predict_layers=1)
    ids = torch.randint(0, 31, (1, 6))
    with pytest.raises(ValueError, match="MTP blocks train from"):
        model(ids)
    assert model.eval()(ids, labels=ids).mtp_loss is None


def test_trap_8_it_trains():
    model = toy(sequence_loss_weight=1e-3)
    ids = torch.randint(0, 31, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        update_router_bias(model, 1e-3)
    assert losses[-1] < losses[0] - 0.5


def test_trap_9_and_case_65_the_router_is_fp32():
    model = toy().to(torch.bfloat16)
    router = model.model.layers[1].mlp.gate
    assert router.weight.dtype == router.e_score_correction_bias.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    exact = toy().model.layers[1].mlp.gate
    x = torch.randn(1, 1000, 20)
    index, weight = exact(x)
    with torch.autocast("cpu", torch.bfloat16):
        under, under_weight = exact(x)
    assert torch.equal(index, under) and torch.equal(weight, under_weight)
    assert weight.dtype == torch.float32
    before = exact.weight.detach().clone()
    exact.to(torch.bfloat16)  # not even through BF16 and back
    assert torch.equal(exact.weight, before)


def test_trap_10_bias_is_saved_and_a_frozen_router_stays():
    model = toy()
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in model.state_dict()
    freeze_router(model)
    before = copy.deepcopy(model.state_dict())
    ids = torch.randint(0, 31, (1, 16))
    model(ids, labels=ids).loss.backward()
    gate = model.model.layers[1].mlp.gate
    assert gate.weight.grad is None and gate.tokens_per_expert is not None
    update_router_bias(model, 0.1)
    assert gate.tokens_per_expert is None
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    freeze_router(model, frozen=False)
    model(ids, labels=ids).loss.backward()
    update_router_bias(model, 0.1)
    assert gate.weight.grad is not None
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert not torch.equal(model.state_dict()[name], before[name])


def test_case_67_all_scores_zero():
    config = {**TOY, "routed_scaling_factor": 2.5, "num_experts_per_tok": 2}
    model = toy(**config)
    moe = model.model.layers[1].mlp
    moe.gate.e_score_correction_bias.zero_()
    x = torch.randn(1, 4, 20)
    moe.gate.weight.data.copy_(torch.randn(7, 20) * 0.1)
    x[0, 2] = 0
    x[0, 2, 0] = 1.0
    moe.gate.weight.data[:, 0] = -120.0
    x[0, [0, 1, 3], 0] = 0
    x.requires_grad_()
    _index, weight = moe.gate(x)
    y = moe(x)
    y.square().sum().backward()
    assert weight[2].eq(0).all() and y[0, 2].eq(0).all()
    assert torch.allclose(weight[[0, 1, 3]].sum(-1), torch.full((3,), 2.5))
    assert x.grad.isfinite().all() and moe.gate.weight.grad.isfinite().all()


@pytest.mark.parametrize("counts,rate,expected", [
    ([6, 2, 0, 0], 0.001, [-0.00125, -0.00025, 0.00075, 0.00075]), ([3, 1], 0.3, [-0.3, 0.3]),
])  # fmt: skip
def test_case_68_the_bias_update(counts, rate, expected):
    router = Router(MiMoV2Config(**{**TOY, "n_routed_experts": len(counts)}))
    router.tokens_per_expert = torch.tensor(counts)
    holder = torch.nn.ModuleList([torch.nn.Linear(2, 2), router, Router(MiMoV2Config(**TOY))])
    loads = update_router_bias(holder, rate)
    assert torch.allclose(router.e_score_correction_bias, torch.tensor(expected), atol=1e-9)
    assert router.tokens_per_expert is None
    assert list(loads) == ["1"] and loads["1"].tolist() == counts
    _cv, peak, cold = load_statistics(loads)["1"].tolist()
    assert peak == max(counts) / (sum(counts) / len(counts)) and cold == counts.count(0) / len(
        counts
    )


def test_case_68_counts_under_recompute_and_accumulation():
    model = toy()
    ids = torch.randint(0, 31, (4, 9))
    model(ids, labels=ids).loss.backward()
    whole = [m.tokens_per_expert for m in model.modules() if isinstance(m, Router)]
    assert all(c.sum() == 4 * 9 * 3 for c in whole)
    for reentrant in (False, True):
        twin = copy.deepcopy(model)
        update_router_bias(twin, 0.0)
        for half in ids.split(2):
            x = twin.model.embed_tokens(half)
            tables = twin.model.rotary_tables(9, 0, None, x.device)
            for layer in twin.model.layers:
                x = checkpoint(layer, x, tables[layer.self_attn.rotary], use_reentrant=reentrant)
            x.square().sum().backward()
        got = [m.tokens_per_expert for m in twin.modules() if isinstance(m, Router)]
        assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
    model.eval()(ids)
    assert all(
        torch.equal(m.tokens_per_expert, c)
        for m, c in zip((m for m in model.modules() if isinstance(m, Router)), whole, strict=True)
    )


def test_sequence_loss_against_its_formula():
    router = Router(MiMoV2Config(**{**TOY, "sequence_loss_weight": 0.25}))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(3, 8, 20)
    index, _ = router(x)
    s = (x @ router.weight.T).sigmoid()
    total = 0.0
    for b in range(3):
        chosen = F.one_hot(index[b * 8 : b * 8 + 8], 7).sum((0, 1)).float()
        f = 7 / (3 * 8) * chosen
        total = total + 0.25 * (f * (s[b] / s[b].sum(-1, keepdim=True)).mean(0)).sum() / 3
    assert torch.allclose(router.sequence_loss, total)


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name,blocks,total", [
    ("mimo-v2.5-pro", 0, 1_021_248_126_336),
    ("mimo-v2.5-pro", 3, 1_023_182_841_600),
    ("mimo-v2.5", 3, 309_766_601_088),
    ("mimo-v2-flash", 0, 308_778_780_864),
    ("mimo-7b", 1, 7_833_409_536),
    ("dense-w1", 0, 1_473_333_248),
    ("dense-w2", 0, 2_208_370_688),
    ("qwen2.5-7b", 0, 7_615_616_512),
    ("qwen2.5-32b", 0, 32_763_876_352),
])  # fmt: skip
def test_parameter_counts(name, blocks, total):
    model = load_model(name, device="meta", overrides={"num_nextn_predict_layers": blocks})
    count = sum(p.numel() for p in model.parameters())
    count += sum(b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias"))
    assert count == total


@pytest.mark.parametrize("name,billions", [
    ("nano", 0.140), ("tiny", 0.48), ("small", 1.48), ("base", 2.89), ("mid", 7.41),
    ("large", 19.1), ("pro-8L-E32", 13.4), ("pro-8L-E128", 38.8), ("pro-6L-E32", 10.5),
])  # fmt: skip
def test_proxy_sizes(name, billions):
    model = load_model(name, device="meta", overrides={"num_nextn_predict_layers": 1})
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.02)


def test_dense_family_is_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
             "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-5}  # fmt: skip
    theirs = LlamaForCausalLM(LlamaConfig(**sizes))
    ours = MiMoForCausalLM(MiMoConfig(**sizes, attention_bias=False, rope_theta=10_000.0))
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 50, (2, 17))
    assert worst(ours(ids).logits, theirs(ids).logits) < 1e-5
