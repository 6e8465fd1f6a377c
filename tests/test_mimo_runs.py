"""The runs of MiMo models in runs/: what they train, and that the one for a CPU does."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import tiny_run

from ottava import prepare
from ottava.config import ConfigError, load_run
from ottava.models.load import load_config, load_model
from ottava.models.moe import Router
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
    for name, low, high in (
        ("load_cv", 0.0, 2.0),
        ("load_peak", 1.0, 2.0),
        ("load_cold", 0.0, 0.5),
    ):
        values = read_metrics(tmp_path).series("step", name)[1]
        assert len(values) == 8 and all(low <= v <= high for v in values), name
    lines = [json.loads(x) for x in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [x["kind"] for x in lines].count("observe") == 2


def test_load_statistics_are_of_the_whole_step(tmp_path):
    """Two micro-batches; frozen routers; against the routers' own choices, counted by hooks."""
    run = tiny_run(tmp_path, "fp8", train={"accumulate": 2}, model={"freeze_router": True})
    trainer = Trainer(run)
    routers = [m for m in trainer.model.modules() if isinstance(m, Router)]
    counts = [torch.zeros(r.num_experts) for r in routers]

    def count(number):
        def hook(_module, _args, out):
            counts[number] += torch.bincount(out[0].flatten(), minlength=len(counts[number]))

        return hook

    for number, router in enumerate(routers):
        router.register_forward_hook(count(number))
    before = [(r.weight.clone(), r.e_score_correction_bias.clone()) for r in routers]
    load = trainer.step_once().load
    each = [c / c.mean() for c in counts]
    assert counts[0].sum() == 2 * 2 * 16 * routers[0].top_k  # two micro-batches of two sequences
    assert load[0] == pytest.approx(max(c.std(correction=0).item() for c in each), rel=1e-5)
    assert load[1] == pytest.approx(max(c.max().item() for c in each), rel=1e-5)
    assert load[2] == pytest.approx(sum((c == 0).float().mean().item() for c in each) / len(each))
    for router, (weight, bias) in zip(routers, before, strict=True):
        assert torch.equal(router.weight, weight) and torch.equal(
            router.e_score_correction_bias, bias
        )
        assert router.tokens_per_expert is None
    trained = Trainer(tiny_run(tmp_path, "fp8", out="trained"))
    before = [
        m.e_score_correction_bias.clone() for m in trained.model.modules() if isinstance(m, Router)
    ]
    trained.step_once()
    after = [m.e_score_correction_bias for m in trained.model.modules() if isinstance(m, Router)]
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_model_without_experts_has_no_load(tmp_path):
    dense = {"name": "dense-100m", "overrides": {
        "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 272}}  # fmt: skip
    trainer = Trainer(tiny_run(tmp_path, "amp", steps=3, model=dense))
    assert trainer.step_once().load is None
    Trainer(trainer.config).run(quiet=True)
    assert all("load_cv" not in line for line in read_metrics(tmp_path / "run").of("step"))
    with pytest.raises(ConfigError, match=r"freeze_router: a MiMoForCausalLM has no router"):
        Trainer(tiny_run(tmp_path, "amp", model={**dense, "freeze_router": True}))


def test_the_report_draws_the_load(tmp_path):
    from ottava.bench.report import write_report

    Trainer(tiny_run(tmp_path, "amp", steps=3)).run(quiet=True)
    page = write_report(tmp_path / "run").read_text()
    assert "Expert load: standard deviation over mean" in page and "Cold experts" in page


def test_the_page_about_mimo_names_what_exists():
    text = (RUNS.parent / "docs" / "mimo.md").read_text()
    names = re.findall(
        r"`(mimo-v[\w.-]+|mimo-7b|nano|tiny|small|base|mid|large|pro-\w+-\w+)`", text
    )
    assert len(names) > 10
    for name in names:
        load_config(name)
    assert set(re.findall(r"^\| `runs/(\w+)\.toml` \|", text, re.M)) == set(NAMES)
    for line in re.findall(r"^ottava train run.toml (.*)$", text, re.M):
        given = [w.split("=")[0] for w in line.split()]
        assert given[:2] == ["model.path", "model.layout"]
        plain = {
            "model.overrides.num_nextn_predict_layers",
            "lora.rank",
            "lora.targets",
            "lora.experts",
        }
        assert set(given[2:]) <= plain
