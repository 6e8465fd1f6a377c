"""Each check of diagnose sees the run that it is for, and nothing in a good one."""

import json
import math

import pytest

from ottava.monitor.diagnose import CHECKS, diagnose
from ottava.monitor.metrics import MetricsWriter

CONFIG = {
    "train": {"preset": "fp8"},
    "optimizer": {"warmup_steps": 5},
    "scaler": {"min_scale": 1.0},
}


def write_run(folder, steps, *, evals=(), config=CONFIG, end="done", **more):
    """A run.jsonl with these step lines (dicts), as the trainer writes it."""
    writer = MetricsWriter(folder)
    writer.write("start", 0, version=1, config=config)
    for number, values in enumerate(steps, 1):
        writer.write("step", number, **({"stepped": True, "grad_norm": 1.0} | values))
    for step, loss in evals:
        writer.write("eval", step, loss=loss)
    if end:
        writer.write("end", len(steps), status=end, reason=more.get("reason", ""), seconds=1.0)
    writer.close()
    return folder


def falling(count=100):
    return [{"loss": 2.0 + 3.0 * math.exp(-i / 30)} for i in range(count)]


def checks(folder):
    return {f.check: f for f in diagnose(folder)}


def test_a_good_run_has_no_findings(tmp_path):
    assert diagnose(write_run(tmp_path, falling(), evals=[(50, 3.0), (100, 2.5)])) == []


def test_a_loss_that_is_not_finite_is_an_error(tmp_path):
    steps = falling()
    steps[60] = {"loss": float("nan")}
    steps[61] = {"loss": float("inf")}
    found = checks(write_run(tmp_path, steps))["non-finite"]
    assert found.level == "error"
    assert "step 61 on (2 of 100" in found.what and found.evidence == "steps 61, 62"
    assert "precision.recipe=block" in found.change


def test_early_fp16_overflow_asks_for_a_lower_scale(tmp_path):
    steps = falling()
    steps[2]["loss"] = float("nan")
    config = CONFIG | {"train": {"preset": "amp-fp16"}}
    assert "init_scale" in checks(write_run(tmp_path, steps, config=config))["non-finite"].change


def test_skipped_steps_are_counted_with_their_cause(tmp_path):
    steps = falling()
    for i in (70, 71, 72, 90):
        steps[i] |= {"stepped": False, "cause": "grad of model.layers.3"}
    found = checks(write_run(tmp_path, steps))["skipped"]
    assert found.level == "warning"
    assert found.what == "4 of 100 steps were skipped, 3 in a row at most"
    assert found.evidence == "4 x grad of model.layers.3"


def test_a_settling_loss_scale_is_only_a_note_and_a_long_streak_an_error(tmp_path):
    steps = falling()
    for i in range(4):
        steps[i] |= {"stepped": False, "cause": "overflow"}
    config = CONFIG | {"train": {"preset": "amp-fp16"}}
    assert checks(write_run(tmp_path / "a", steps, config=config))["skipped"].level == "note"
    for i in range(60, 72):
        steps[i] |= {"stepped": False}
    assert checks(write_run(tmp_path / "b", steps, config=config))["skipped"].level == "error"


def test_a_loss_that_never_falls_or_rises_again_is_seen(tmp_path):
    flat = [{"loss": 5.5 + 0.01 * (i % 3)} for i in range(60)]
    assert checks(write_run(tmp_path / "a", flat))["trend"].what == "the loss does not fall"
    again = falling(60) + [{"loss": 4.0}] * 20
    assert "rose again" in checks(write_run(tmp_path / "b", again))["trend"].what
    tiny = [x | {"grad_norm": 1e-9} for x in flat]
    assert "underflow" in checks(write_run(tmp_path / "c", tiny))["trend"].change
    assert "trend" not in checks(write_run(tmp_path / "d", flat[:10]))


def test_gradient_peaks_are_seen_after_the_start(tmp_path):
    steps = falling()
    steps[1]["grad_norm"] = 500.0
    assert "gradients" not in checks(write_run(tmp_path / "a", steps))
    steps[70]["grad_norm"] = 50.0
    found = checks(write_run(tmp_path / "b", steps))["gradients"]
    assert found.evidence == "50 at step 71; the median is 1" and "clip_norm=2" in found.change


def test_saturation_and_underflow_are_read_where_recorded(tmp_path):
    steps = falling()
    steps[50] |= {"saturation": {"layers.0.q": 0.001, "layers.1.q": 0.2}, "underflow": 0.1}
    found = diagnose(write_run(tmp_path, steps))
    assert [(f.check, f.evidence) for f in found] == [("casts", "20.0% of layers.1.q at its worst")]


def test_a_scale_at_its_floor_and_overfitting_are_seen(tmp_path):
    steps = [x | {"scale": 1.0} for x in falling()]
    found = checks(write_run(tmp_path, steps, evals=[(20, 3.0), (60, 2.5), (100, 2.9)]))
    assert set(found) == {"scale", "overfitting"}
    assert found["overfitting"].evidence == "2.500 at step 60, 2.900 at the end"


def test_a_failed_or_killed_run_is_told_apart(tmp_path):
    failed = checks(write_run(tmp_path / "a", falling(), end="failed", reason="disk full"))["end"]
    assert (failed.level, failed.evidence) == ("error", "disk full")
    killed = write_run(tmp_path / "b", falling(), end=None)
    with (killed / "run.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    found = checks(killed)
    assert found["end"].level == "note" and "step 100" in found["end"].evidence
    assert "half-written" in found["unreadable"].evidence


def test_findings_come_worst_first_and_are_plain_data(tmp_path):
    steps = falling()
    steps[60]["loss"] = float("nan")
    found = diagnose(write_run(tmp_path, steps, end=None))
    assert [f.level for f in found] == ["error", "note"]
    json.dumps([vars(f) for f in found])
    assert {f.check for f in found} <= set(CHECKS)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run\.jsonl"):
        diagnose(tmp_path)
    (tmp_path / "run.jsonl").write_text("\nnot json\n")
    with pytest.raises(ValueError, match="no line of a run"):
        diagnose(tmp_path)
