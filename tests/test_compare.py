"""Comparisons: same seed and batches, an honest table, and a report that stands alone."""

import io
import json
import math
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_run import tiny_run

from ottava.bench import compare as compare_module
from ottava.bench import contest as contest_module
from ottava.bench import kernels, peers
from ottava.bench.charts import Series, bars, lines, number, stacked_bars, ticks
from ottava.bench.compare import add_gaps, compare, presets_for
from ottava.bench.kernel_cases import CASES
from ottava.bench.report import compare_page, write_report
from ottava.bench.table import comparison_table
from ottava.bench.workloads import WORKLOADS, counted_floor
from ottava.layers.attention import Attention
from ottava.layers.experts import Experts
from ottava.models.load import load_model
from ottava.planner.lifetimes import CATEGORIES
from ottava.train.trainer import Trainer

ROW = {
    "name": str, "status": str, "peak_bytes": int, "peak_phase": str, "memory": dict,
    "reserved_bytes": int, "planned_bytes": int, "tok_per_s": float, "tok_per_s_each": list,
    "step_ms": float, "losses": list, "final_loss": float, "validation_loss": float, "gap": float,
    "skipped": int, "fp8_modules": int, "fp8_share": float,
}  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    run = tiny_run(folder, "fp8", steps=8, out="demo")
    return run, compare(run, ["fp32", "amp", "fp8", "fp8-lean"], repeats=2, quiet=True)


def test_rows_hold_what_the_format_says(compared):
    run, result = compared
    stored = json.loads((Path(run.out) / "compare.json").read_text())
    assert stored["rows"][0]["losses"] == result["rows"][0]["losses"]
    assert [row["name"] for row in result["rows"]] == ["fp32", "amp", "fp8", "fp8-lean"]
    for row in result["rows"]:
        assert row["status"] == "ok"
        for key, kind in ROW.items():
            assert isinstance(row[key], kind), (row["name"], key)
        assert sum(row["memory"].values()) == row["peak_bytes"] and set(row["memory"]) == set(
            CATEGORIES
        )
        assert row["planned_bytes"] == pytest.approx(row["peak_bytes"], rel=0.01)
        assert len(row["losses"]) == 8 and len(row["tok_per_s_each"]) == 2
    assert result["baseline"] == "amp" and result["memory_source"] == "tensors"
    assert result["how"]["versions"]["torch"] == torch.__version__
    assert result["rows"][2]["fp8_modules"] > 0 == result["rows"][1]["fp8_modules"]


def test_memory_falls_in_the_order_that_was_measured(compared):
    peaks = {row["name"]: row["peak_bytes"] for row in compared[1]["rows"]}
    assert peaks["fp8-lean"] < peaks["fp8"] < peaks["fp32"]


def test_a_preset_trains_as_it_would_alone(compared):
    run, result = compared
    for name in ("amp", "fp8-lean"):
        alone = Trainer(run.with_preset(name))
        losses = [alone.step_once().loss for _ in range(8)]
        row = next(r for r in result["rows"] if r["name"] == name)
        assert row["losses"] == losses
        assert row["validation_loss"] == alone.evaluate()


def test_gaps_are_to_the_baseline(compared):
    rows = {row["name"]: row for row in compared[1]["rows"]}
    assert rows["amp"]["gap"] == 0.0
    gap = rows["fp8"]["validation_loss"] - rows["amp"]["validation_loss"]
    assert rows["fp8"]["gap"] == gap and gap != 0.0
    unseen = [{**row, "validation_loss": math.nan} for row in rows.values()]
    result = {"baseline": "amp", "rows": unseen}
    add_gaps(result)
    assert unseen[2]["gap"] == unseen[2]["final_loss"] - unseen[1]["final_loss"]


def test_a_preset_that_breaks_does_not_stop_the_others(tmp_path, monkeypatch):
    class Fragile(Trainer):
        def __init__(self, run, **how):
            if run.train.preset == "fp32":
                raise RuntimeError("out of luck\nsecond line")
            super().__init__(run, **how)

    monkeypatch.setattr(compare_module, "Trainer", Fragile)
    result = compare(tiny_run(tmp_path), ["fp32", "bf16"], repeats=1, quiet=True)
    assert result["rows"][0] == {"name": "fp32", "status": "failed", "reason": "out of luck"}
    assert result["rows"][1]["status"] == "ok" and result["rows"][1]["gap"] == 0.0
    assert result["baseline"] == "bf16"
    assert "out of luck" in text_of(result)


def test_too_few_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train\.steps: 3 is too few"):
        compare(tiny_run(tmp_path, steps=3), ["fp32"], quiet=True)


def test_fp16_is_compared_on_a_gpu_only():
    assert "amp-fp16" in presets_for("cuda") and "amp-fp16" not in presets_for("cpu")


def text_of(result):
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table(result))
    return console.file.getvalue()


def test_the_table_says_which_memory_it_shows(compared):
    text = text_of(compared[1])
    assert "bytes alive in tensors" in text and "fp8-lean" in text
    assert re.search(r"memory: fp8-lean < .*fp32", text) and "speed: " in text


# ---- the report ----


class Page(HTMLParser):
    """Collects tags, attributes that load something, and text outside of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.scripts, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attrs = dict(attrs)
        if tag == "script":
            self.scripts.append(attrs.get("type"))
        self.loads += [a for a in ("src", "href", "data", "xlink:href") if a in attrs]
        self.loads += [a for a in attrs if a.startswith("on")]

    def handle_data(self, data):
        self.text += data


HOSTILE = "\"><script>alert('x')</script></script><img src=x onerror=alert(1)>&amp;"


def hostile(result):
    rows = [
        {**row, "name": HOSTILE if row["name"] == "fp8" else row["name"]} for row in result["rows"]
    ]
    rows.append({"name": "peer", "status": "failed", "reason": HOSTILE})
    return {**result, "name": HOSTILE, "model": HOSTILE, "rows": rows, "notes": [HOSTILE],
            "how": {HOSTILE: HOSTILE}}  # fmt: skip


def test_the_report_stands_alone_and_escapes_everything(compared):
    text = compare_page(hostile(compared[1]))
    page = Page(text)
    assert page.loads == [] and "img" not in page.tags and "link" not in page.tags
    assert page.scripts == ["application/json"]
    assert (
        "@import" not in text
        and "url(" not in text
        and "http" not in text.replace("http-equiv", "")
    )
    assert page.tags.count("svg") == 4 and HOSTILE in page.text
    assert "default-src 'none'" in text


def test_the_report_holds_the_data_it_was_made_from(compared):
    text = compare_page(hostile(compared[1]))
    raw = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    assert json.loads(raw)["name"] == HOSTILE


def test_a_report_can_be_made_again_from_the_folder(compared, tmp_path):
    run, _ = compared
    path = write_report(run.out, tmp_path / "again.html")
    assert path.read_text() == (Path(run.out) / "report.html").read_text()
    with pytest.raises(FileNotFoundError, match="neither compare"):
        write_report(tmp_path)
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(ValueError, match="not a comparison"):
        write_report(tmp_path)


def test_a_run_has_a_report_too(tmp_path):
    lines_ = [
        {"kind": "start", "step": 0, "version": 1, "name": "<b>run</b>", "config": {"a": HOSTILE}},
        *({"kind": "step", "step": i, "loss": 5.0 / i, "lr": 1e-3, "stepped": i != 3, "cause": "nan",
           "tok_per_s": 10.0} for i in range(1, 6)),
        {"kind": "eval", "step": 5, "loss": "nan"},
        {"kind": "end", "step": 5, "status": "done", "reason": ""},
    ]  # fmt: skip
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines_)) + "\n{broken")
    page = Page(write_report(tmp_path).read_text())
    assert "b" not in page.tags and page.loads == [] and page.scripts == []
    assert "done after 5 steps" in page.text and "step 3: skipped: nan" in page.text


def test_charts_bear_gaps_and_nothing():
    nan = math.nan
    svg = lines(
        [Series("a", [1, 2, 3, 4], [1.0, nan, 2.0, 3.0])], title="t", x_label="x", y_label="y"
    )
    assert svg.count('class="line') == 2 and "nan" not in svg
    for empty in (
        lines([Series("a", [1], [nan])], title="t", x_label="x", y_label="y"),
        bars([("a", [nan])], title="t", unit="u"),
        stacked_bars([], ["a"], title="t", unit="u"),
    ):
        assert "Nothing was measured" in empty
    assert "inf" not in lines([Series("a", [0], [5.0])], title="t", x_label="x", y_label="y")
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10] and ticks(3, 3)
    assert [number(x) for x in (0, 12345.6, 1e-9, nan)] == ["0", "12,346", "1.00e-09", "-"]


# ---- workloads, peers, kernels ----


def test_floors_are_the_counted_ones():
    assert counted_floor(WORKLOADS["W1"]) == pytest.approx(94_000, rel=0.02)
    assert counted_floor(WORKLOADS["W2"]) == pytest.approx(68_500, rel=0.02)
    assert counted_floor(WORKLOADS["tiny"]) is None


def test_a_workload_names_the_products_own_settings():
    run = WORKLOADS["W1"].run("fp8-lean", steps=5, recompute="layer")
    assert (run.train.micro_batch, run.data.sequence_length) == (8, 2048)
    assert run.settings.fused and run.train.recompute == "layer"


def piece(name, rate, **changes):
    return {
        "name": name, "status": "ok", "reason": "", "notes": [], "peak_bytes": 3 << 30,
        "peak_phase": "backward", "memory": None, "reserved_bytes": 1, "step_ms_each": [1.0, 3.0],
        "tok_per_s_each": [rate], "losses": [5.0, 4.0], **changes,
    }  # fmt: skip


@pytest.fixture
def no_gpu_needed(monkeypatch):
    monkeypatch.setattr(contest_module, "verify", lambda: [])


def test_a_contest_takes_medians_and_goes_on_where_it_was(tmp_path, monkeypatch, no_gpu_needed):
    ran = []

    def run_child(variant, workload, path, look):
        assert look == (not str(path).endswith("-1.json"))  # once is enough
        ran.append(variant.name)
        crash = {"name": variant.name, "status": "failed", "reason": "boom"}
        good = piece(variant.name, 100.0 + len(ran), notes=["wrong version"])
        if look and variant.name == "amp":
            good["planned_bytes"] = 3 * good["peak_bytes"] // 4
        path.write_text(json.dumps(crash if variant.name == "bf16" else good))

    monkeypatch.setattr(contest_module, "_run_child", run_child)
    variants = [peers.VARIANTS[n] for n in ("amp", "bf16", "TE delayed")]
    arguments = (WORKLOADS["W1"], variants)
    late = contest_module.contest(*arguments, out=tmp_path, seconds=-1)
    assert not ran and {row["reason"] for row in late["rows"]} == {"the time was over"}
    result = contest_module.contest(*arguments, repeats=2, out=tmp_path)
    assert ran == ["amp", "bf16", "TE delayed"] * 2  # interleaved
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["amp"]["tok_per_s"] == 102.5 and rows["amp"]["gap"] == 0.0
    assert rows["amp"]["step_ms"] == 2.0 and rows["bf16"]["reason"] == "boom"
    text = text_of(result)
    assert "planner off by: amp -25.0%" in text.splitlines()
    assert "of floor" in text and "bf16: failed: boom" in text and "wrong version" in text
    assert (tmp_path / "report.html").is_file()
    contest_module.contest(*arguments, repeats=2, out=tmp_path)
    assert len(ran) == 6


def test_a_peer_that_dies_is_reported(tmp_path, monkeypatch):
    def killed(*_, **__):
        return subprocess.CompletedProcess([], -9)

    monkeypatch.setattr(subprocess, "run", killed)
    path = tmp_path / "W1-bf16-0.json"
    contest_module._run_child(peers.VARIANTS["bf16"], WORKLOADS["W1"], path, look=True)
    row = json.loads(path.read_text())
    assert row["status"] == "failed" and "ended with -9" in row["reason"]


def test_a_peer_that_is_not_installed_or_another_version_is_named(monkeypatch):
    variant = peers.VARIANTS["torchao + Liger"]
    row = contest_module.measure_variant(variant, WORKLOADS["W1"])
    assert row["status"] == "not run" and row["reason"] == "torchao, liger-kernel not installed"
    monkeypatch.setattr(peers, "version_of", lambda name: "0.9")
    assert variant.missing() == "" and "torchao 0.9 is installed" in variant.wrong_versions()[0]


def test_a_dense_peer_is_not_run_on_experts(monkeypatch):
    monkeypatch.setattr(peers, "version_of", lambda name: "2.20.2")
    row = contest_module.measure_variant(peers.VARIANTS["TE block"], WORKLOADS["base"])
    assert row["status"] == "not run" and "not a dense model" in row["reason"]


def test_bf16_with_grouped_experts_runs_our_kernels_and_keeps_no_code(monkeypatch):
    row = contest_module.measure_variant(peers.VARIANTS["bf16, grouped experts"], WORKLOADS["W1"])
    assert row["status"] == "not run" and row["reason"].endswith("is a dense model")
    model = load_model("demo", dtype=torch.bfloat16)
    monkeypatch.setattr(peers, "_bf16_model", lambda *_: model)
    ids = torch.randint(0, 256, (2, 32))
    monkeypatch.setattr(peers, "random_batches", lambda *_: iter([(ids, ids)] * 3))
    built = peers.VARIANTS["bf16, grouped experts"].build(WORKLOADS["base"], 0)
    assert built.step() > built.step()
    assert sum(isinstance(m, Attention) for m in model.modules()) == 5
    assert sum(isinstance(m, Experts) for m in model.modules()) == 4
    dtypes = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: dtypes.add(t.dtype) or t, lambda t: t):
        model(input_ids=ids, labels=ids, use_cache=False)
    assert not dtypes & {torch.float8_e4m3fn, torch.float8_e5m2}


def test_a_workload_that_cannot_fit_says_so_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 << 30, 8 << 30))
    small = replace(WORKLOADS["W1"], model="dense-100m", batch=4)
    row = contest_module.measure_variant(peers.VARIANTS["amp"], small)
    assert row["status"] == "not run" and re.match(
        r"needs \d+\.\d GiB; 4\.0 of 8\.0 free", row["reason"]
    )


def test_wrong_names_and_no_gpu_are_refused(capsys):
    assert contest_module.main(["W1", "--only", "nothing"]) == 2
    assert "choose from fp32" in capsys.readouterr().err
    from ottava.cli import main

    assert main(["compare", "--workload", "W9"]) == main(["compare"]) == 2
    said = capsys.readouterr().err
    assert "'W9' is not one of W1, W2" in said and "give a run file" in said
    if not torch.cuda.is_available():
        assert main(["compare", "--workload", "W1", "--peers"]) == 2
        assert kernels.main([]) == 2 and "without a GPU" in capsys.readouterr().err


def test_every_kernel_case_is_green_against_itself():
    checked = kernels.verify(device="cpu")
    assert len(checked) == len(CASES) and all(c.green for c in checked)
    kernels.require_green(checked)


def test_a_wrong_kernel_is_red_and_no_speed_is_printed():
    calls = []

    def wrong(t):
        calls.append(1)
        return (t["x"].float() + (len(calls) - 1),)

    case = replace(CASES[0], call=wrong)
    checked = kernels.verify([case], device="cpu")
    with pytest.raises(kernels.KernelsRed, match=r"1 of 1 kernels disagree.*amax"):
        kernels.require_green(checked)
    broken = replace(CASES[0], call=lambda t: 1 / 0)
    assert "ZeroDivisionError" in kernels.verify([broken], device="cpu")[0].error
