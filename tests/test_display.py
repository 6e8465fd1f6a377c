"""How plans and runs show themselves: in a notebook and in a terminal."""

import io
import math
import re

import pytest
from rich.console import Console
from torch import nn

import ottava
from ottava.monitor.metrics import MetricsWriter, read_metrics
from ottava.numerics.display import html_table, rich_table, sparkline, svg_line
from ottava.train.loop import RunResult


def shown(thing, width=200):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(thing)
    return console.file.getvalue()


def test_a_plan_is_a_table_in_both():
    model = nn.ModuleDict(
        {str(i): nn.Linear(64, 64) for i in range(3)} | {"small": nn.Linear(64, 8)}
    )
    plan = ottava.plan(model)
    page, text = plan._repr_html_(), shown(plan)
    for said in (page, text):
        assert "* (3x)" in said and "8 features" in said and "tensor" in said
        assert plan.summary() in re.sub(r"\s+", " ", said)
    assert page.count("<tr") == 1 + len(plan.groups()) and "<pre>" not in page
    assert page.count("opacity") == 1  # of the one that stays in high precision


def test_texts_are_no_markup_and_no_html():
    rows = [["<b>[red]x[/red]", "a & b"]]
    assert "&lt;b&gt;[red]x[/red]</td>" in html_table(["h"], rows) and "a &amp; b" in html_table(
        [], rows
    )
    assert "<b>[red]x[/red]" in shown(rich_table(["h", "i"], rows))


def test_a_run_that_ended_says_how(tmp_path):
    result = RunResult(step=7, loss=1.25, eval_loss=math.nan, skipped=2, seconds=3.0,
                       checkpoint=tmp_path, stopped_by="SIGTERM")  # fmt: skip
    for said in (result._repr_html_(), shown(result)):
        assert "stopped by SIGTERM at step 7 after 3.0 s" in said and "1.2500" in said
        assert str(tmp_path) in said


def test_a_record_shows_its_curve_and_its_problems(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("start", 0, version=1, name="octave", preset="fp8", device="cpu", params=12)
    for step in range(1, 9):
        writer.write("step", step, loss=math.nan if step == 4 else 9.0 - step, tok_per_s=1234.0)
    writer.write("eval", 8, loss=0.75)
    writer.close()
    with open(tmp_path / "run.jsonl", "a") as file:
        file.write('{"kind": "st')
    record = read_metrics(tmp_path)
    page, text = record._repr_html_(), shown(record)
    for said in (page, text):
        assert "octave" in said and "1,234" in said and "0.7500" in said and "half-written" in said
    assert "█▇▆▄▃▂▁" in text
    (points,) = re.findall(r'points="([^"]*)"', page)
    ys = [float(p.split(",")[1]) for p in points.split()]
    assert len(ys) == 7 and ys == sorted(ys)  # downwards is larger
    assert shown(read_metrics(tmp_path / "none")) and read_metrics(tmp_path / "none")._repr_html_()


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], list(range(1000))])
def test_curves_of_any_length(values):
    line = sparkline([float(v) for v in values])
    assert len(line) == min(40, len(values))
    assert svg_line(values).count("<polyline") == (len(values) > 1)
    if len(values) == 1000:
        assert line[0] == "▁" and line[-1] == "█"
