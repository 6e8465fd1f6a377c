"""The MiMo models: against a second implementation, against transformers, and fact by fact."""

import copy
import json

import mimo_reference as reference
import pytest
import torch
from mimo_toy import TOY, toy, worst
from transformers import AutoModelForCausalLM

from ottava.models.attention_core import AttentionCore, ChunkedAttention, rotary_tables
from ottava.models.config import MiMoV2Config, MiMoV2FlashConfig
from ottava.models.load import load_model
from ottava.models.mimo import (
    MiMoV2FlashForCausalLM,
    MiMoV2ForCausalLM,
    Router,
)
from ottava.models.presets import preset_config


@pytest.mark.parametrize("blocks,documents", [(0, False), (2, True)])
def test_agrees_with_loops_forward_and_all_gradients(blocks, documents):
    model = toy(num_nextn_predict_layers=blocks)
    ids = torch.randint(0, 31, (1, 13))
    docs = torch.tensor([[0] * 5 + [1] * 8]) if documents else torch.zeros(1, 13, dtype=torch.long)
    out = model(ids, labels=ids, documents=docs if documents else None)
    out.loss.backward()
    p = {n: v.detach().double().requires_grad_() for n, v in model.state_dict().items()}
    logits, loss = reference.loss(p, ids[0].tolist(), model.config.to_dict(), docs[0].tolist())
    loss.backward()
    assert worst(out.logits[0].double(), logits) < 1e-5
    assert abs(out.loss.item() - loss.item()) < 1e-5
    for name, parameter in model.named_parameters():
        assert worst(parameter.grad.double(), p[name].grad) < 1e-5, name


def test_agrees_with_transformers_flash():
    from transformers import MiMoV2FlashConfig as TheirConfig
    from transformers import MiMoV2FlashForCausalLM as TheirModel

    same = {k: TOY[k] for k in (
        "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim",
        "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
        "num_experts_per_tok", "routed_scaling_factor", "attention_value_scale", "sliding_window",
    )}  # fmt: skip
    same["num_key_value_heads"] = 3
    kinds = [("full_attention", "sliding_attention")[k] for k in TOY["hybrid_layer_pattern"]]
    theirs = TheirModel(TheirConfig(
        **same, layer_types=kinds, pad_token_id=None, attn_implementation="eager",
        initializer_range=0.3,
    )).train()  # fmt: skip
    for module in theirs.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.normal_(0, 0.2)
    ours = MiMoV2FlashForCausalLM(
        MiMoV2FlashConfig(**same, hybrid_layer_pattern=TOY["hybrid_layer_pattern"])
    ).train()
    renamed = {
        n.replace("self_attn.sinks", "self_attn.attention_sink_bias"): v
        for n, v in theirs.state_dict().items()
    }
    ours.load_state_dict(renamed)
    ids = torch.randint(0, 31, (2, 19))
    a, b = ours(ids, labels=ids), theirs(ids, labels=ids)
    a.loss.backward()
    b.loss.backward()
    assert worst(a.logits, b.logits) < 1e-5
    grads = {n: p.grad for n, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        their_name = name.replace("self_attn.attention_sink_bias", "self_attn.sinks")
        assert worst(p.grad, grads[their_name]) < 1e-5, name


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (2, 37, 4, 2), (1, 64, 6, 3)])
@pytest.mark.parametrize("window", [None, 1, 7, 16])
@pytest.mark.parametrize("sinks", [False, True])
def test_chunked_attention_against_a_mask(shape, window, sinks):
    batch, length, heads, groups = shape
    q = torch.randn(batch, length, heads, 12, dtype=torch.float64)
    k = torch.randn(batch, length, groups, 12, dtype=torch.float64)
    v = torch.randn(batch, length, groups, 8, dtype=torch.float64)
    sink = torch.randn(heads, dtype=torch.float64) if sinks else None
    documents = torch.randint(0, 2, (batch, length)).sort(1)[0]
    inputs = [t.requires_grad_() for t in (q, k, v, sink) if t is not None]

    out = ChunkedAttention.apply(q, k, v, sink, documents, 0.3, 0.7, window, 0)
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (column <= row) & (documents[:, :, None] == documents[:, None])
    if window:
        seen &= column > row - window
    wide = [t.repeat_interleave(heads // groups, 2).transpose(1, 2) for t in (k, v)]
    logits = q.transpose(1, 2) @ wide[0].mT * 0.3
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    if sinks:
        column = sink.view(1, -1, 1, 1).expand(batch, heads, length, 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., :length]
    expected = (weights @ wide[1] * 0.7).transpose(1, 2)
    # Statistics are kept in FP32, whatever the inputs.
    assert worst(out, expected) < 2e-6
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    want = torch.autograd.grad(expected, inputs, grad)
    assert all(worst(a, b) < 1e-5 or b.abs().max() < 1e-12 for a, b in zip(got, want, strict=True))
    if sinks:
        assert (weights.sum(-1) < 1).all()


def test_no_buffer_grows_with_the_square_of_the_length(monkeypatch):
    largest = {}
    for length in (256, 1024):
        core = AttentionCore(MiMoV2Config(**TOY).attention(0))
        q, k, v = (torch.randn(1, length, h, d) for h, d in ((6, 24), (2, 24), (2, 16)))
        sizes = []
        monkeypatch.setattr("ottava.models.attention_core._SCORES", 6 * 16 * length)

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, sizes=sizes):
                out = func(*args, **(kwargs or {}))
                sizes.extend(t.numel() for t in (out,) if isinstance(t, torch.Tensor))
                return out

        with Watch():
            tables = rotary_tables(torch.arange(length), 8, 1e4)
            core(q.requires_grad_(), k, v, *tables).sum().backward()
        largest[length] = max(sizes)
    assert largest[1024] <= 4.1 * largest[256]


# --- generation ------------------------------------------------------------------------------


def test_generate_with_cache_equals_without():
    model = load_model("demo", overrides={"initializer_range": 0.2}).eval()
    ids = torch.randint(0, 256, (2, 21))
    cached = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        for _ in range(24):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, ids)


def test_left_padding_changes_nothing():
    model = load_model("demo", overrides={"initializer_range": 0.2}).eval()
    ids = torch.randint(1, 256, (1, 20))
    alone = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], 1)
    both = torch.cat([padded, torch.randint(1, 256, (1, 27))])
    mask = (torch.arange(27) >= torch.tensor([[7], [0]])).long()
    out = model.generate(
        both, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert torch.equal(out[0, 7:], alone[0])
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(ids, attention_mask=torch.ones(1, 1, 20, 20))


def test_gradient_checkpointing_changes_nothing():
    model = toy(num_nextn_predict_layers=1, sequence_loss_weight=0.1)
    ids = torch.randint(0, 31, (2, 9))
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable()
    for m in (model, twin):
        m(ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert torch.equal(*(m.model.layers[1].mlp.gate.tokens_per_expert for m in (model, twin)))


# --- loading and saving ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "mimo-v2-flash", "mimo-7b"])
def test_save_and_load_round_trip(name, tmp_path):
    small = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 40, "intermediate_size": 32}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_nextn_predict_layers": 1}
    if name != "mimo-7b":
        small |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = load_model(name, overrides=small)
    for module in model.modules():
        if isinstance(module, Router):
            module.e_score_correction_bias.normal_()
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    auto = AutoModelForCausalLM.from_pretrained(tmp_path) if name != "mimo-v2-flash" else loaded
    for other in (loaded, auto):
        assert type(other) is type(model)
        state = other.state_dict()
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    ids = torch.randint(0, 40, (1, 9))
    assert torch.equal(model(ids, labels=ids).loss, loaded(ids, labels=ids).loss)


def test_same_seed_same_weights_in_every_dtype():
    wide = load_model("demo", seed=3).state_dict()
    again = load_model("demo", seed=3).state_dict()
    narrow = load_model("demo", seed=3, dtype=torch.bfloat16).state_dict()
    fewer = load_model("demo", seed=3, overrides={"num_hidden_layers": 2}).state_dict()
    other = load_model("demo", seed=4).state_dict()
    for name, value in wide.items():
        assert torch.equal(value, again[name])
        kept = torch.float32 if ".mlp.gate." in name else torch.bfloat16
        assert narrow[name].dtype == kept and torch.equal(value.to(kept), narrow[name])
        assert name not in fewer or torch.equal(value, fewer[name])
    assert not torch.equal(wide["lm_head.weight"], other["lm_head.weight"])


def test_meta_build_allocates_nothing_and_matches_a_direct_build():
    meta = load_model("demo", device="meta")
    assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))
    made, direct = load_model("demo"), MiMoV2ForCausalLM(preset_config("demo"))
    assert not any(t.is_meta for t in (*made.parameters(), *made.buffers()))
    for (name, a), b in zip(made.named_parameters(), direct.parameters(), strict=True):
        if a.numel() > 4000:
            assert abs(a.std() / b.std() - 1) < 0.05 and abs(a.mean() - b.mean()) < 0.05, name
        elif "norm" in name:
            assert torch.equal(a, b), name


def test_tied_embeddings_stay_one_tensor(tmp_path):
    model = load_model("dense-100m", overrides={
        "tie_word_embeddings": True, "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32,
        "num_attention_heads": 2, "intermediate_size": 32, "num_key_value_heads": 2,
        "head_dim": 16,
    })  # fmt: skip
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_unknown_names_are_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'mimo-v2-nano'"):
        load_model("mimo-v2-nanoo", device="meta")
    with pytest.raises(ValueError, match="did you mean 'n_routed_experts'"):
        load_model("demo", overrides={"n_routed_expert": 4}, device="meta")
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        load_model("dense-w1", overrides={"hidden_sizes": 4}, device="meta")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("key,value", [
    ("n_shared_experts", 1), ("scoring_func", "softmax"), ("topk_method", "greedy"),
    ("n_group", 2), ("hidden_act", "gelu"), ("moe_router_dtype", "bfloat16"),
    ("rope_scaling", {"rope_type": "yarn"}), ("sliding_window_size", 4), ("hybrid_block_size", 6),
    ("attention_projection_layout", "interleaved"), ("hybrid_layer_pattern", [0, 1]),
])  # fmt: skip
def test_a_key_that_would_be_ignored_is_an_error(key, value):
    with pytest.raises(ValueError, match="mimo_v2 config"):
        MiMoV2Config(**{**TOY, key: value})


def test_an_argument_that_would_be_ignored_is_an_error():
    model, ids = toy(), torch.ones(1, 4, dtype=torch.int64)
    for name, value in {
        "output_attentions": True,
        "return_dict": False,
        "token_type_ids": ids,
    }.items():
        with pytest.raises(ValueError, match=f"the argument {name} is not known"):
            model(input_ids=ids, **{name: value})
    idle = {"output_attentions": None, "head_mask": False, "return_dict": True}
    assert model(input_ids=ids, **idle).logits is not None


def test_a_folder_is_loaded_whole_or_not_at_all(tmp_path):
    from safetensors.torch import load_file, save_file

    load_model("demo", overrides={"num_hidden_layers": 2}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gate = tensors.pop("model.layers.1.mlp.gate.weight")
    save_file({**tensors, "model.layers.1.mlp.gates.weight": gate}, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 missing tensors, first 'model.layers.1.mlp.gate.weight'"
    ):
        load_model(str(tmp_path))
    save_file(
        {**tensors, "model.layers.1.mlp.gate.weight": gate, "extra": gate.clone()},
        file,
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match="1 unexpected tensors, first 'extra'"):
        load_model(str(tmp_path))

    config = tmp_path / "config.json"
    keys = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(keys))
    with pytest.raises(ValueError, match=r"load_fp8"):
        load_model(str(tmp_path))
    model = load_model(str(tmp_path), random_init=True)
    assert not hasattr(model.config, "quantization_config")


def test_fused_experts_of_transformers_are_left_to_their_own_loader(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, vocab_size=40, num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=16,
    ))  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ours = load_model(str(tmp_path))
    state = ours.state_dict()
    assert all(torch.equal(v, state[n]) for n, v in theirs.state_dict().items())
    again = [load_model(str(tmp_path), random_init=True, seed=s).state_dict() for s in (1, 1, 2)]
    name = "lm_head.weight"
    assert torch.equal(again[0][name], again[1][name])
    assert not torch.equal(again[0][name], again[2][name])
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        load_model(str(tmp_path), overrides={"hiden_size": 3})
