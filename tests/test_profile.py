"""`ottava train --profile`: time by group and by row adds up, changes no bit, and says what to do."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_trainer import assert_same, weights
from tiny_run import MODEL, tiny_run

from ottava.cli import main
from ottava.monitor import ranges
from ottava.monitor.breakdown import IDLE, Breakdown, RowTime, advise
from ottava.monitor.metrics import read_metrics
from ottava.monitor.ranges import RowRanges
from ottava.train.trainer import Trainer

QUIET = {"eval_batches": 0, "checkpoint_every": 0}
SETTINGS = {
    "micro_batch": 4,
    "accumulate": 1,
    "recompute": "none",
    "graph": "auto",
    "shuffle": True,
}


def profiled(folder, preset, *, out="run", steps=7, **train):
    warm = {"warmup_steps": min(steps, 2)}
    run = tiny_run(folder, preset, out=out, steps=steps, train={**QUIET, **train}, optimizer=warm)
    t = Trainer(run)
    t.run(quiet=True, profile=True)
    path = Path(t.config.out) / "profile"
    return t, json.loads((path / "breakdown.json").read_text()), path


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean", "amp"])
def test_it_adds_up_names_every_row_and_changes_no_bit(tmp_path, preset):
    t, made, path = profiled(tmp_path, preset)
    plain = Trainer(tiny_run(tmp_path, preset, out="plain", steps=7, train=QUIET))
    plain.run(quiet=True)
    assert_same(weights(t), weights(plain))
    assert made["steps"] == 3 and made["step_ms"] > 0
    assert sum(made["groups"].values()) == pytest.approx(made["step_ms"], rel=1e-6)
    rows = {r["row"]: r for r in made["rows"]}
    if t.plan is not None:
        ran = [r for r in t.plan.rows if r.kind in ("experts", "attention", "mlp", "head")]
        for row in ran:
            assert rows[row.name]["forward_ms"] > 0, row.name
            assert rows[row.name]["backward_ms"] > 0 or row.kind == "head", row.name
            assert rows[row.name]["kind"] == row.kind
        in_rows = sum(r["ms"] for r in made["rows"])
        outside = made["groups"].get("backward, outside rows", 0.0)
        assert outside < 0.2 * in_rows, "backward was not told apart"
    assert [r["ms"] for r in made["rows"]] == sorted((r["ms"] for r in made["rows"]), reverse=True)
    assert made["groups"]["update"] > 0 and made["groups"][IDLE] > 0
    trace = json.loads((path / "trace.json").read_text())
    names = {e.get("name") for e in trace["traceEvents"]}
    assert {"part:data", "part:forward", "part:backward", "part:update"} <= names
    assert {f"row:{r['row']}" for r in made["rows"]} <= names
    (line,) = read_metrics(t.config.out).of("profile")
    assert line["step"] == 6 and line["groups"] == made["groups"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in t.model.modules())
    assert "draw" not in vars(t._drawer) and "backward" not in vars(t.strategy)
    text = (path / "breakdown.txt").read_text()
    assert "slowest rows" in text and IDLE in text


@pytest.mark.parametrize("steps, profiled_steps", [(1, 1), (4, 1), (5, 2)])
def test_a_short_run_is_profiled_as_far_as_it_goes(tmp_path, steps, profiled_steps):
    t, made, _ = profiled(tmp_path, "fp32", steps=steps)
    assert made["steps"] == profiled_steps and t.step == steps


def test_layers_that_run_again_in_backward_count_to_their_rows(tmp_path):
    def ranges_of_a_row(**train):
        _, made, path = profiled(tmp_path, "fp8", out=train.get("recompute", "none"), **train)
        trace = json.loads((path / "trace.json").read_text())
        names = [e.get("name") for e in trace["traceEvents"]]
        return names.count("row:model.layers.0.mlp") / made["steps"]

    plain, again = ranges_of_a_row(), ranges_of_a_row(recompute="layer")
    assert again > plain >= 1


def test_from_the_command_line(tmp_path, capsys):
    run = tiny_run(tmp_path, "fp32", steps=4, train=QUIET)
    lines = [
        f'name = "x"\nout = "{run.out}"\ndevice = "cpu"\n[model]\nname = "demo"\n[model.overrides]'
    ]
    lines += [f"{k} = {json.dumps(v)}" for k, v in MODEL.items()]
    lines += [
        f'[data]\nsource = "{run.data.source}"\nsequence_length = 16\n[train]\npreset = "fp32"'
    ]
    lines += ["steps = 4\nmicro_batch = 2\neval_batches = 0"]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert main(["train", str(tmp_path / "run.toml"), "--profile"]) == 0
    out = capsys.readouterr().out
    assert "steps profiled on the cpu" in out and "profile/" not in out.split("profile: ")[0]
    assert (Path(run.out) / "profile" / "trace.json").exists()


def test_nvtx_ranges_are_named_by_rows_and_all_end(tmp_path, monkeypatch):
    """NVTX itself needs CUDA: what is called is looked at."""
    opened, log = {}, []

    def start(name):
        opened[len(log)] = name
        log.append(name)
        return len(log) - 1

    monkeypatch.setattr(ranges.torch.cuda.nvtx, "range_start", start)
    monkeypatch.setattr(ranges.torch.cuda.nvtx, "range_end", lambda number: opened.pop(number))
    t = Trainer(tiny_run(tmp_path, "fp8", train=QUIET))
    marks = RowRanges(t.model, t.plan, nvtx=True)
    t.step_once()
    marks.end_backward()
    marks.remove()
    assert not opened
    for name in (
        "model.layers.0.mlp",
        "model.layers.1.mlp.experts",
        "model.layers.2.self_attn.core",
    ):
        assert log.index(name) < log.index(f"{name} backward")
    assert log.index("model.layers.2.mlp.experts backward") < log.index(
        "model.layers.0.mlp backward"
    )


# ---- advice: table 6.2 ----


def made_of(step_ms=100.0, rows=(), device="cuda", **groups):
    return Breakdown(steps=3, device=device, step_ms=step_ms, groups=groups, rows=list(rows))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("plan"), "fp8", precision={"keep": ("*qkv_proj",)})
    return replace(Trainer(run).plan, emulated=False)


QKV = RowTime("model.layers.0.self_attn.qkv_proj", "linear", "high", 10.0, 20.0)
MLP = RowTime("model.layers.0.mlp", "mlp", "tensor", 10.0, 30.0)


@pytest.mark.parametrize(
    "made, settings, says",
    [
        (made_of(data=12.0), {}, ["data.shuffle=false"]),
        (made_of(data=12.0), {"shuffle": False}, ["data.tokenizer=bytes"]),
        (made_of(**{IDLE: 40.0}), {}, ["train.graph=on, or train.micro_batch=8"]),
        (made_of(**{IDLE: 40.0}), {"graph": "on"}, ["train.micro_batch=8"]),
        (made_of(device="cpu", **{IDLE: 40.0}), {}, ["train.micro_batch=8"]),
        (made_of(rows=[QKV, MLP]), {}, ["precision.keep= and precision.policy=default"]),
        (
            made_of(rows=[MLP]),
            {"recompute": "layer"},
            ["train.recompute=none, where memory allows"],
        ),
        (made_of(update=25.0), {"accumulate": 2}, ["train.accumulate=4"]),
        (made_of(**{"exchange between ranks": 15.0}), {}, ["train.accumulate=2"]),
        (made_of(rows=[MLP], linear=80.0, update=5.0, **{IDLE: 10.0}), {}, []),
    ],
)
def test_each_row_of_the_table_has_its_sign_and_no_other(plan, made, settings, says):
    assert [todo for _, todo in advise(made, plan, {**SETTINGS, **settings})] == says


def test_emulated_products_on_a_gpu_are_said(plan):
    emulated = replace(plan, emulated=True)
    assert [t for _, t in advise(made_of(), emulated, SETTINGS)] == ["train.preset=storage"]
    assert advise(made_of(device="cpu"), emulated, SETTINGS) == []
