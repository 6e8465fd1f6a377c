"""The Hugging Face Trainer with torch_compile=True: the converted model is traced, and FP8 runs in it."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

pytest.importorskip("accelerate")
from ottava.integrations.hf_trainer import OttavaCallback

STEPS = 3


def run(folder, **changes):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=96,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    data = [{"input_ids": x, "labels": x} for i in range(16) for x in [(torch.arange(16) + i) % 96]]
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=5e-3, bf16=True,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), **changes,
    )  # fmt: skip
    callback = OttavaCallback(optimizer="adamw-8bit", report=lambda line: None)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()
    losses = [float(h["loss"]) for h in trainer.state.log_history if "loss" in h]
    return losses, callback.fp8_gemms


def test_compiled_training_is_eager_training(tmp_path):
    torch._dynamo.reset()
    counters.clear()
    want, products = run(tmp_path)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got, compiled_products = run(
            tmp_path, torch_compile=True, torch_compile_backend="aot_eager"
        )
    assert got == pytest.approx(want, abs=0.02) and got[-1] < got[0] - 0.1
    assert 0 < counters["stats"]["unique_graphs"] <= 4  # the model, and what is around its head
    assert compiled_products >= products
