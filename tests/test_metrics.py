"""run.jsonl: one whole line at a time, read back whatever happened to the rest."""

import json
import math

import pytest
from rich.console import Console
from test_trainer import tiny_run

from ottava.config import PRESETS
from ottava.models.load import load_model
from ottava.monitor.console import RunConsole, changed_options
from ottava.monitor.metrics import MetricsWriter, read_metrics
from ottava.monitor.speed import Speed, flops_per_token, machine_speed


def write(folder, steps=3, **kwargs):
    writer = MetricsWriter(folder, **kwargs)
    for step in range(1, steps + 1):
        writer.write("step", step, loss=1.0 / step, grad_norm=None)
    return writer


def test_each_line_is_on_the_disk_when_write_returns(tmp_path):
    writer = write(tmp_path)
    rows = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(r)["step"] for r in rows] == [1, 2, 3]
    writer.close()


def test_numbers_that_json_has_no_word_for(tmp_path):
    values = {"loss": math.nan, "a": math.inf, "b": {"c": [-math.inf]}, "name": "nan"}
    MetricsWriter(tmp_path).write("step", 1, **values)
    text = (tmp_path / "run.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda c: pytest.fail(f"not JSON: {c}"))
    (line,) = read_metrics(tmp_path).lines
    assert math.isnan(line["loss"]) and line["a"] == math.inf and line["name"] == "nan"


def test_a_half_written_last_line_is_left_out_and_said(tmp_path):
    write(tmp_path).close()
    path = tmp_path / "run.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    metrics = read_metrics(tmp_path)
    assert [x["step"] for x in metrics.lines] == [1, 2]
    assert metrics.problems == [f"{path}:3: half-written (the run was killed); left out"]


def test_broken_lines_and_other_versions_are_said(tmp_path):
    path = tmp_path / "run.jsonl"
    good = '{"kind": "step", "step": 2, "loss": 0.5, "new_field": 1}'
    start = '{"kind": "start", "step": 0, "version": 7}'
    path.write_text(f'{start}\n[1]\n{{"kind": 3}}\n\xff\n\n{good}\n')
    metrics = read_metrics(tmp_path)
    assert [x["kind"] for x in metrics.lines] == ["start", "step"]
    assert "metrics version 7" in metrics.problems[0]
    assert [p.split(":")[1] for p in metrics.problems] == ["1", "2", "3", "4"]
    assert metrics.series("step", "loss") == ([2], [0.5])


def test_memory_of_an_older_log_is_read_by_todays_categories(tmp_path):
    writer = MetricsWriter(tmp_path)
    old = {"weights": 1, "residuals": 2, "optimizer": 3, "running average": 4, "peak": 11}
    for gib in (old, {"weights": 1.0, "master": 2.0, "moments": 7.0, "peak": 11.0}):
        writer.write("memory", 2, gib=gib)
    writer.write("memory", 2, gib={"optimizer": "lost", "running average": 4})
    writer.write("memory", 2, gib=None)
    writer.close()
    older, today, broken, none = (x["gib"] for x in read_metrics(tmp_path).of("memory"))
    assert older == today == {"weights": 1, "master": 2, "moments": 7, "peak": 11}
    assert broken == {"moments": 4} and none is None


def test_a_folder_without_metrics_says_so(tmp_path):
    metrics = read_metrics(tmp_path)
    assert metrics.lines == [] and "no such file" in metrics.problems[0]


def test_a_resumed_run_drops_what_came_after_and_what_is_broken(tmp_path):
    write(tmp_path, 5).close()
    path = tmp_path / "run.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    writer = MetricsWriter(tmp_path, after_step=3)
    writer.write("step", 4, loss=0.25, grad_norm=None)
    writer.write("step", 5, loss=0.2, grad_norm=None)
    writer.close()
    assert path.read_bytes() == whole
    MetricsWriter(tmp_path).close()  # a run that starts from nothing
    assert path.read_bytes() == b""


LINE = {
    "loss": 2.5, "grad_norm": 0.125, "lr": 1e-3, "tok_per_s": 1234.5, "percent": 12.5,
    "memory_gib": 1.5, "stepped": True, "cause": "",
}  # fmt: skip


def test_console_shows_steps_and_never_reads_markup(capsys):
    with RunConsole(2, console=Console(width=200, highlight=False)) as console:
        console.say("[bold]a [/hostile] name")
        console.step(1, LINE, "FP8 GEMM")
        console.step(2, {**LINE, "stepped": False, "cause": "the loss is nan"}, "FP8 GEMM")
    out = capsys.readouterr().out
    assert "[bold]a [/hostile] name" in out
    assert "step       1/2  loss   2.5000  grad    0.125  lr 1.00e-03      1,234 tok/s" in out
    assert "12.5% of FP8 GEMM    1.50 GiB" in out and "SKIPPED (the loss is nan)" in out


def test_options_that_differ_from_their_default(tmp_path):
    options = changed_options(tiny_run(tmp_path, "amp", optimizer={"clip_norm": 1.0}))
    assert "train.preset=amp" in options and "optimizer.clip_norm=1.0" in options
    assert not any(o.startswith(("seed", "optimizer.eps", "precision")) for o in options)


def test_flops_of_a_dense_model_are_counted_by_hand():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 128}  # fmt: skip
    model = load_model("dense-100m", overrides=sizes, device="meta")
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 96) + 128 * 64
    attention = 2 * 2 * 4 * (16 + 16) * (32 + 1) / 2
    assert flops_per_token(model, 32) == 3 * (2 * weights + attention)


def test_flops_of_experts_and_windows():
    model = load_model("demo", device="meta")
    c = model.config
    moe = 2 * 3 * c.hidden_size * c.moe_intermediate_size
    more = load_model("demo", overrides={"num_experts_per_tok": 3}, device="meta")
    layers = sum(c.moe_layer_freq)
    assert flops_per_token(more, 64) - flops_per_token(model, 64) == 3 * moe * layers
    # five layers of which two see everything: tokens beyond the window cost only those
    long, short = flops_per_token(model, 1024), flops_per_token(model, 512)
    full = 2 * 2 * c.num_attention_heads * (c.head_dim + c.v_head_dim) * 256
    assert long - short == pytest.approx(3 * full, rel=0.01)


def test_percent_is_of_a_measured_rate():
    speed = machine_speed("cpu", "fp8")
    assert speed is machine_speed("cpu", "fp8") and speed.name == "FP32 GEMM 768^3"
    assert 1e8 < speed.flops < 1e14
    assert Speed(2e12, "x").percent(1e9, 1000.0) == 50.0
    assert {p.compute for p in PRESETS.values()} >= {"fp8", "fp32", "bf16"}
