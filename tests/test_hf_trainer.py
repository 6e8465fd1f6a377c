"""OttavaCallback in the Hugging Face Trainer: what it converts, proves, refuses, and leaves alone."""

import copy

import pytest
import torch

import ottava
from ottava.kernels.gemm import fp8_gemms
from ottava.kernels.split import SplitParameter

pytest.importorskip("accelerate")
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ottava.integrations.hf_trainer import OttavaCallback

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINEARS = 14  # two layers of seven
DATA = [{"input_ids": x, "labels": x} for i in range(32) for x in [(torch.arange(24) * 5 + i) % 96]]


def llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def arguments(folder, **changes):
    known = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4,
        "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": DEVICE == "cpu", "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**{**known, **changes})


def build(folder, callback=(), *, model=None, others=(), trainer=(), **changes):
    callback = OttavaCallback(**{"report": lambda line: None, **dict(callback)})
    return Trainer(
        llama() if model is None else model, arguments(folder, **changes), train_dataset=DATA,
        eval_dataset=DATA[:8], callbacks=[callback, *others], **dict(trainer),
    ), callback  # fmt: skip


def losses(trainer):
    return [float(h["loss"]) for h in trainer.state.log_history if "loss" in h]


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of the Trainer alone, in high precision."""
    trainer = Trainer(llama(), arguments(tmp_path_factory.mktemp("plain")), train_dataset=DATA)
    trainer.train()
    return losses(trainer)


# ------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("optimizer, bf16", [
    (None, False), (None, True), ("adamw", True), ("adamw-8bit", False), ("adamw-lean", True),
    ("adamw-lean", False),
])  # fmt: skip
def test_trains_in_fp8_like_the_trainer_alone(tmp_path, plain, optimizer, bf16):
    trainer, callback = build(tmp_path, {"optimizer": optimizer}, bf16=bf16)
    trainer.train()
    got = losses(trainer)
    assert callback.fp8_gemms >= 2 * LINEARS  # no grad_input in some, several joined in one
    assert abs(got[0] - plain[0]) < 0.02 and abs(got[-1] - plain[-1]) < 0.15
    assert got[-1] < got[0] - 0.4
    inner = trainer.optimizer.optimizer
    assert isinstance(inner, ottava.AdamW) == (optimizer is not None)
    split = [p for p in trainer.model.parameters() if isinstance(p, SplitParameter)]
    assert bool(split) == (optimizer == "adamw-lean")
    assert {g["lr"] for g in inner.param_groups} == {5e-3}
    assert {g["weight_decay"] for g in inner.param_groups} == {0.0}


def test_the_optimizer_takes_the_trainers_numbers(tmp_path):
    trainer, _ = build(
        tmp_path, {"optimizer": {"master": "split24", "states": "bf16"}},
        adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.3, max_steps=1,
    )  # fmt: skip
    trainer.train()
    decays, none = trainer.optimizer.param_groups
    assert (decays["betas"], decays["eps"], decays["master"]) == ((0.9, 0.9), 1e-6, "split24")
    assert decays["weight_decay"] == 0.3 and none["weight_decay"] == 0.0
    assert all(p.dim() == 1 for p in none["params"]) and len(none["params"]) == 5


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("optimizer", [None, "adamw-lean"])
def test_checkpointing_changes_no_bit(tmp_path, optimizer):
    found = []
    for reentrant in (None, False, True):
        trainer, callback = build(
            tmp_path, {"optimizer": optimizer}, bf16=True, max_steps=2,
            gradient_checkpointing=reentrant is not None,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )  # fmt: skip
        trainer.train()
        found.append((losses(trainer), weights(trainer.model), callback.fp8_gemms))
    for again in found[1:]:
        assert found[0][0] == again[0] and same(found[0][1], again[1])
        assert again[2] > found[0][2]  # the forward's products ran again


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    found = []
    for size, accumulate in ((8, 1), (4, 2)):
        trainer, _ = build(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulate,
            max_steps=2, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], abs=0.02)  # scales are per micro-batch


def test_loss_may_be_scaled_in_place():
    model = ottava.convert(llama())
    ids = DATA[0]["input_ids"][None]
    loss = model(input_ids=ids, labels=ids).loss
    loss *= 2
    loss.backward()
    half = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(half[n], 2 * p.grad, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_padding_at_the_end_stays_in_the_kernels(side, monkeypatch):
    reasons = []
    monkeypatch.setattr("ottava.layers.attention._say", reasons.append)
    lengths = torch.tensor([24, 9, 17]) if side != "none" else torch.tensor([24, 24, 24])
    mask = (torch.arange(24) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.stack([d["input_ids"] for d in DATA[:3]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}
    want, model = llama(), ottava.convert(llama())
    plain, loss = want(**batch), model(**batch).loss
    assert abs(loss - plain.loss) < 0.02 and bool(reasons) == (side == "left")
    loss.backward()
    plain.loss.backward()
    for (n, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.35 * q.grad.norm(), n
    with torch.no_grad():
        got = model.eval()(ids, mask).logits[mask > 0]
        assert (got - plain.logits[mask > 0]).norm() < 0.1 * plain.logits[mask > 0].norm()


def test_a_converted_model_keeps_its_plan(tmp_path):
    model = ottava.convert(llama(), recipe="block", keep=["*o_proj"])
    trainer, callback = build(tmp_path, {"recipe": "tensor"}, model=model, max_steps=1)
    trainer.train()
    assert callback.plan is model._ottava_plan and callback.plan.num_fp8 == LINEARS - 2


# ------------------------------------------------------------------------- save, load, resume


@pytest.mark.parametrize("optimizer", [None, "adamw-lean"])
def test_resume_gives_the_same_bits(tmp_path, optimizer):
    whole, _ = build(tmp_path, {"optimizer": optimizer}, save_strategy="steps", save_steps=2)
    whole.train()
    again, _ = build(tmp_path / "again", {"optimizer": optimizer})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    assert same(weights(again.model), weights(whole.model))


@pytest.mark.parametrize("optimizer", [None, "adamw-lean"])
def test_saved_folders_are_plain(tmp_path, optimizer):
    trainer, _ = build(tmp_path, {"optimizer": optimizer}, bf16=True, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(plain) is LlamaForCausalLM and type(plain.model.norm).__module__.startswith("tr")
    assert same(weights(plain), weights(trainer.model))
    text = (tmp_path / "out" / "config.json").read_text()
    assert "ottava" not in text and "LlamaForCausalLM" in text


@pytest.mark.parametrize("optimizer", [None, "adamw-lean"])
def test_the_best_model_is_loaded_at_the_end(tmp_path, optimizer):
    trainer, _ = build(
        tmp_path, {"optimizer": optimizer}, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, learning_rate=0.02,
        metric_for_best_model="loss", greater_is_better=True,  # so that the first is the best
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    got = weights(trainer.model)
    for name, value in best.state_dict().items():
        # a split master holds 12 bits of what it is given
        assert (got[name].cpu() - value).abs().max() <= 2.0**-12 * value.abs().max(), name
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=2e-3)


def test_plain_values_load_into_split_masters():
    model = ottava.convert(llama())
    opt = ottava.AdamW(model.parameters(), master="split16", states="8bit")
    want = llama().state_dict()
    want = {k: v + 3.0 * torch.rand_like(v) for k, v in want.items()}
    model.load_state_dict(want)
    got = model.state_dict()
    for name, value in want.items():
        torch.testing.assert_close(got[name].float(), value, rtol=2**-11, atol=2**-8)
    twin = copy.deepcopy(model)
    model.load_state_dict(twin.state_dict())
    assert same(weights(model), weights(twin)) and len(opt.param_groups[0]["params"]) == 21


# ---------------------------------------------------------------------------------- evaluation


def accuracy(prediction):
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def test_evaluation_with_metrics_gets_logits(tmp_path):
    trainer, _ = build(
        tmp_path, {"optimizer": "adamw-lean"}, bf16=True, eval_strategy="steps", eval_steps=2,
        trainer={"compute_metrics": accuracy},
    )  # fmt: skip
    trainer.train()
    found = [h for h in trainer.state.log_history if "eval_accuracy" in h]
    assert len(found) == 2 and found[-1]["eval_accuracy"] > 0.3
    plain = Trainer(llama(), arguments(tmp_path), compute_metrics=accuracy)
    plain.model.load_state_dict(trainer.model.state_dict())
    want, got = plain.evaluate(DATA[:8]), trainer.evaluate()
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], abs=0.02)
    assert got["eval_accuracy"] == pytest.approx(want["eval_accuracy"], abs=0.05)


def test_prediction_without_labels(tmp_path):
    trainer, _ = build(tmp_path, max_steps=1)
    unlabelled = [{"input_ids": d["input_ids"]} for d in DATA[:8]]
    assert trainer.predict(unlabelled).predictions.shape == (8, 24, 96)


@pytest.mark.parametrize("callback, changes", [
    ({"logits": "never"}, {}), ({"logits": "eval"}, {"prediction_loss_only": True}),
])  # fmt: skip
def test_without_logits_the_loss_is_the_same(tmp_path, callback, changes):
    with_logits, _ = build(tmp_path)
    trainer, _ = build(tmp_path, callback, **changes)
    loss = trainer.evaluate()["eval_loss"]
    assert loss == pytest.approx(with_logits.evaluate()["eval_loss"], abs=1e-3)
    batch = {k: v[None].to(DEVICE) for k, v in DATA[0].items()}
    with torch.no_grad():
        assert trainer.model(**batch).logits is None
        assert with_logits.model(**batch).logits.shape == (1, 24, 96)


def test_logits_always_for_trainers_that_read_them_in_training(tmp_path):
    trainer, callback = build(tmp_path, {"logits": "always"}, max_steps=1)
    batch = {k: v[None].to(DEVICE) for k, v in DATA[0].items()}
    assert trainer.model(**batch).logits.shape == (1, 24, 96)
    trainer.train()
    assert callback.fp8_gemms > 0


def test_label_smoothing_and_custom_losses_get_logits(tmp_path):
    trainer, _ = build(tmp_path, label_smoothing_factor=0.1, max_steps=1)
    trainer.train()
    assert 4 < losses(trainer)[0] < 5


class Generate(TrainerCallback):
    def __init__(self):
        self.texts, self.gemms = [], 0

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        before = fp8_gemms()
        prompt = DATA[0]["input_ids"][None, :8].to(DEVICE)
        self.texts.append(model.generate(prompt, min_new_tokens=6, max_new_tokens=6))
        self.gemms += fp8_gemms() - before


def test_generate_during_evaluation_leaves_training_as_it_is(tmp_path):
    generate, how = Generate(), {"optimizer": "adamw-lean"}
    trainer, _ = build(
        tmp_path, how, others=[generate], bf16=True, eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    assert [t.shape for t in generate.texts] == [(1, 14)] * 2 and generate.gemms > 0
    assert all((t < 96).all() for t in generate.texts)
    without, _ = build(tmp_path, how, bf16=True)
    without.train()
    assert losses(trainer) == losses(without)


# ----------------------------------------------------------------------- proof and refusals


def test_the_plan_and_the_count_are_reported(tmp_path):
    lines = []
    trainer, callback = build(tmp_path, {"report": lines.append, "keep": ["*o_proj"]}, max_steps=1)
    assert "kept by '*o_proj'" in lines[0] and "12 modules in" in lines[0]
    trainer.train()
    assert f"{callback.fp8_gemms} " in lines[1] and "(12 modules planned)" in lines[1]


def test_no_fp8_in_the_first_step_is_an_error_before_any_weight_moves(tmp_path):
    trainer, _ = build(tmp_path)
    before = weights(trainer.model)
    with ottava.autocast(enabled=False), pytest.raises(RuntimeError, match="no FP8 product ran"):
        trainer.train()
    assert same(before, weights(trainer.model))


def test_storage_needs_no_fp8_products(tmp_path):
    trainer, callback = build(tmp_path, {"recipe": "storage"}, max_steps=1)
    trainer.train()
    assert callback.fp8_gemms == 0 and callback.plan.num_kept > 0


@pytest.mark.parametrize("callback, changes, message", [
    ({}, {"use_liger_kernel": True}, "use_liger_kernel"),
    ({"optimizer": "adamw-lean"}, {"bf16_full_eval": True}, "full_eval"),
    ({"optimizer": "lion"}, {}, "adamw, adamw-8bit, adamw-lean"),
    ({"logits": "sometimes"}, {}, "eval, never, always"),
    ({"recipe": "tenser"}, {}, "did you mean 'tensor'"),
    ({"keep": ["*"]}, {}, "no module is eligible"),
])  # fmt: skip
def test_what_it_cannot_work_with_is_refused(tmp_path, callback, changes, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, callback, **changes)


@pytest.mark.parametrize("changes, message", [
    ({"fp16": True}, "bf16=True"), ({"n_gpu": 2}, "torchrun"), ({"fsdp": "full_shard"}, "FSDP"),
    ({"deepspeed": {}}, "DeepSpeed"), ({"world_size": 2}, "adamw-8bit"),
])  # fmt: skip
def test_what_cannot_be_built_here_is_refused_too(tmp_path, changes, message):
    class Arguments:
        fp16 = use_liger_kernel = bf16_full_eval = fp16_full_eval = False
        fsdp, deepspeed, n_gpu, world_size = [], None, 1, 1

    build(tmp_path)
    args = Arguments()
    vars(args).update(changes)
    callback = OttavaCallback(optimizer="adamw-lean")
    with pytest.raises(ValueError, match=message):
        callback.on_init_end(args, None, None, model=llama())


def test_accelerates_own_fp8(tmp_path, monkeypatch):
    from accelerate.state import AcceleratorState

    lines = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    build(tmp_path, {"report": lines.append}, bf16=True)
    assert "overridden by bf16=True" in lines[1]
    trainer = Trainer(llama(), arguments(tmp_path, bf16=True))
    monkeypatch.setattr(AcceleratorState, "mixed_precision", "fp8")
    with pytest.raises(ValueError, match="a second time"):
        OttavaCallback().on_init_end(trainer.args, trainer.state, None, model=trainer.model)


def test_two_optimizers(tmp_path):
    model = llama()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="one of the two"):
        build(tmp_path, {"optimizer": "adamw"}, model=model, trainer={"optimizers": (own, None)})
    trainer, callback = build(tmp_path, model=model, trainer={"optimizers": (own, None)})
    trainer.train()
    assert callback.fp8_gemms > 0
    trainer, _ = build(
        tmp_path, {"optimizer": "adamw"},
        trainer={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="uses SGD"):
        trainer.train()


def test_a_callback_added_late_and_a_model_made_late(tmp_path):
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=DATA)
    trainer.add_callback(OttavaCallback())
    with pytest.raises(RuntimeError, match="Trainer\\(callbacks"):
        trainer.train()
    callback = OttavaCallback(report=lambda line: None)
    trainer = Trainer(
        args=arguments(tmp_path), train_dataset=DATA, model_init=lambda: llama(),
        callbacks=[callback],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="model_init"):
        trainer.train()
    trainer = Trainer(
        args=arguments(tmp_path, max_steps=1), train_dataset=DATA,
        model_init=lambda: ottava.convert(llama()), callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert callback.fp8_gemms > 0


def test_arguments_used_again_without_the_callback(tmp_path):
    trainer, _ = build(tmp_path, {"optimizer": "adamw-lean"}, max_steps=1)
    other = Trainer(llama(), trainer.args, train_dataset=DATA)
    with pytest.raises(ValueError, match="belongs to the Trainer"):
        other.train()
