"""LoRA on a base that computes in FP8: what is converted, what trains, what is saved and merged."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ottava
from ottava.kernels.gemm import fp8_gemms

peft = pytest.importorskip("peft")

PROJECTIONS = 14


def llama():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes))


def with_lora(model, targets="all-linear", **changes):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM", **changes)
    return peft.get_peft_model(model, config)


def build(order, targets="all-linear", **changes):
    """A model with adapters, converted before or after they were put in."""
    if order == "base first":
        return with_lora(ottava.convert(llama()), targets, **changes)
    return ottava.convert(with_lora(llama(), targets, **changes))


def batch():
    ids = (torch.arange(24) * 5 + torch.arange(4)[:, None]) % 96
    return {"input_ids": ids, "labels": ids}


def train(model, steps=12):
    opt = ottava.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def adapters(model):
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


@pytest.mark.parametrize("order", ["base first", "adapters first"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_base_layers_are_fp8_and_adapters_are_not(order, targets):
    model = build(order, targets)
    plan = ottava.plan(model)
    lora = [r for r in plan.rows if "lora_" in r.name]
    assert lora and all(r.recipe is None and "adapter" in r.reason for r in lora)
    assert plan.num_fp8 == PROJECTIONS
    attention = [r for r in plan.rows if r.kind in ("attention", "norm") and "layers" in r.name]
    assert len(attention) == 6 and all(r.recipe is not None for r in attention)
    inside = [m for n, m in model.named_modules() if "lora_" in n and isinstance(m, nn.Linear)]
    assert inside and all(getattr(m, "recipe", None) is None for m in inside)


@pytest.mark.parametrize("order", ["base first", "adapters first"])
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_only_adapters_move_and_the_loss_falls(order, changes):
    model = build(order, **changes)
    before = {n: p.clone() for n, p in model.named_parameters()}
    start = fp8_gemms()
    losses = train(model)
    # output and grad_input of the base layers (the first layer's inputs need no gradient past
    # the adapters' own); no grad_weight, since they are frozen
    assert 12 * PROJECTIONS <= fp8_gemms() - start <= 12 * 2 * PROJECTIONS
    assert losses[-1] < losses[0] - 0.6
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == ("lora_" not in name), name


def test_the_first_loss_is_that_of_high_precision():
    want = with_lora(llama())(**batch()).loss
    for order in ("base first", "adapters first"):
        assert abs(build(order)(**batch()).loss - want) < 0.02


@pytest.mark.parametrize("order", ["base first", "adapters first"])
def test_adapters_are_saved_as_usual(tmp_path, order):
    model = build(order)
    train(model, 2)
    model.save_pretrained(tmp_path)
    files = {f.name for f in tmp_path.iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    again = peft.PeftModel.from_pretrained(llama(), tmp_path)
    want, got = adapters(model), adapters(again)
    assert want.keys() == got.keys() and len(got) == 2 * PROJECTIONS
    assert all(torch.equal(want[n], got[n]) for n in want)
    with torch.no_grad():
        plain = again(**batch()).loss
        assert abs(model.eval()(**batch()).loss - plain) < 0.03


@pytest.mark.parametrize("order", ["base first", "adapters first"])
def test_merge_is_exact_in_high_precision(tmp_path, order):
    model = build(order)
    train(model, 2)
    model.save_pretrained(tmp_path / "adapter")
    want = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").merge_and_unload()
    merged = copy.deepcopy(model).merge_and_unload()
    expected = want.state_dict()
    assert merged.state_dict().keys() == expected.keys()
    for name, value in merged.state_dict().items():
        assert torch.equal(value, expected[name]), name
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(plain) is LlamaForCausalLM
    assert all(torch.equal(v, expected[n]) for n, v in plain.state_dict().items())


def test_merging_in_place_and_taking_it_back():
    model = build("adapters first")
    train(model, 2)
    with torch.no_grad():
        apart = model.eval()(**batch()).loss
        model.merge_adapter()
        assert abs(model(**batch()).loss - apart) < 0.03
        model.unmerge_adapter()
        assert abs(model(**batch()).loss - apart) < 0.01
        with model.disable_adapter():
            base = ottava.convert(llama()).eval()(**batch()).loss
            assert abs(model(**batch()).loss - base) < 1e-3


def test_checkpointing_and_lean_adapters():
    model = build("base first")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    opt = ottava.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.02, states="8bit"
    )  # fmt: skip
    losses = []
    for _ in range(8):
        loss = model.train()(**batch(), use_cache=False).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_in_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from ottava.integrations.hf_trainer import OttavaCallback

    data = [{k: v[i] for k, v in batch().items()} for i in range(4)]
    args = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=0.02, bf16=True,
        report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(), save_steps=3,
    )  # fmt: skip
    callback = OttavaCallback(optimizer="adamw-8bit", report=lambda line: None)
    trainer = Trainer(with_lora(llama()), args, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert trainer.predict(data).predictions.shape == (4, 24, 96)
    assert callback.plan.num_fp8 == PROJECTIONS and callback.fp8_gemms >= PROJECTIONS
    assert (tmp_path / "checkpoint-6" / "adapter_model.safetensors").exists()
    whole = {n: p.clone() for n, p in adapters(trainer.model).items()}
    again = Trainer(
        with_lora(llama()), args, train_dataset=data,
        callbacks=[OttavaCallback(optimizer="adamw-8bit", report=lambda line: None)],
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert all(torch.equal(p, whole[n]) for n, p in adapters(again.model).items())
    base_first = Trainer(
        build("base first"), args, train_dataset=data,
        callbacks=[OttavaCallback(report=lambda line: None)],
    )  # fmt: skip
    base_first.train()
    assert base_first.predict(data).predictions.shape == (4, 24, 96)
