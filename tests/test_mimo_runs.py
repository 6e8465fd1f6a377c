"""The runs of MiMo models in runs/: what they train, and that the one for a CPU does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ottava import prepare
from ottava.config import load_run
from ottava.models.load import load_config, load_model
from ottava.monitor.metrics import read_metrics
from ottava.train.trainer import Trainer

RUNS = Path(__file__).parents[1] / "runs"
NAMES = ["mimo_nano", "mimo_base", "mimo_pro_width"]


@pytest.mark.parametrize("name", NAMES)
def test_runs_keep_what_xiaomi_keeps_and_train_mtp(name):
    run = load_run(RUNS / f"{name}.toml")
    assert run.name == name and run.data.source == "stdlib"
    config = load_config(run.model.name, run.model.overrides)
    assert config.num_nextn_predict_layers == 1 and config.mtp_loss_weight == 0.3
    assert config.sequence_loss_weight == 1e-5
    model = prepare.build_model(run, "meta")
    plan = prepare.convert_for(run, model, "cpu")
    for row in plan.rows:
        high = row.name.endswith(("o_proj", "eh_proj", ".gate", "embed_tokens", "lm_head"))
        fp8 = row.name.endswith(("qkv_proj", "experts", "up_proj", "down_proj"))
        assert not (high and row.recipe), row.name
        assert not fp8 or row.recipe.any_fp8, row.name
    assert model.model.mtp_blocks[0].eh_proj.weight.shape == (
        config.hidden_size, 2 * config.hidden_size
    )  # fmt: skip


def test_pro_width_is_pro_but_for_its_number_of_experts():
    run = load_run(RUNS / "mimo_pro_width.toml")
    small = load_model(run.model.name, overrides=run.model.overrides, device="meta")
    pro = load_model(
        "mimo-v2.5-pro", device="meta",
        overrides={"num_hidden_layers": 6, "num_nextn_predict_layers": 1, "n_routed_experts": 32},
    )  # fmt: skip
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (small, pro)]
    assert shapes[0] == shapes[1]
    layers = [[m.config.attention(i) for i in (*range(6), None)] for m in (small, pro)]
    for mine, theirs in zip(*layers, strict=True):
        assert replace(mine, value_scale=1.0) == replace(theirs, value_scale=1.0)
        assert mine.value_scale == pytest.approx(theirs.value_scale, abs=5e-4)  # sqrt(0.375), 0.612


def test_nano_trains_on_the_cpu(tmp_path):
    run = load_run(
        RUNS / "mimo_nano.toml",
        [f"out={tmp_path}", "device=cpu", "train.steps=8", "train.micro_batch=2", "train.eval_batches=1",
         "data.sequence_length=48", "data.max_bytes=300000", "optimizer.warmup_steps=2", "monitor.every=4",
         "model.overrides.num_hidden_layers=2", "model.overrides.n_routed_experts=4", "model.overrides.intermediate_size=512"],
    )  # fmt: skip
    trainer = Trainer(run)
    assert len(trainer.model.model.mtp_blocks) == 1 and trainer.plan.num_fp8 == 10
    result = trainer.run(quiet=True)
    losses = read_metrics(tmp_path).series("step", "loss")[1]
    assert len(losses) == 8 and result.skipped == 0
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0, losses
    assert result.eval_loss < 5.2
    lines = [json.loads(x) for x in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [x["kind"] for x in lines].count("observe") == 2
