"""Trackers: the protocol with fakes, the real libraries where they are installed, and their failures."""

import json
import math
import sys
import types

import pytest

from ottava.cli import REFUSED, main
from ottava.config import load_run
from ottava.monitor import trackers
from ottava.monitor.metrics import MetricsWriter, read_metrics
from ottava.train.trainer import Trainer


class Fake:
    name = "fake"

    def __init__(self, fail_at=None):
        self.seen, self.closed, self.fail_at = [], 0, fail_at

    def log(self, values, step):
        if step == self.fail_at:
            raise ConnectionError("no\nnetwork")
        self.seen.append((step, dict(values)))

    def close(self):
        self.closed += 1


def write(folder, *given):
    writer = MetricsWriter(folder, trackers=given)
    writer.write("start", 0, name="a", params=3)
    writer.write("step", 1, loss=2.0, stepped=True, cause="", scale=None, first_bad=None)
    writer.write("step", 2, loss=math.nan, stepped=False, cause="bad", scale=0.5)
    writer.write("eval", 2, loss=1.5, ema_loss=None)
    writer.write("observe", 2, rows={"a": {"input": {"amax": 1.0}}})
    writer.close()


def test_a_tracker_gets_the_numbers_of_steps_and_evaluations(tmp_path):
    fake = Fake()
    write(tmp_path, fake)
    (s1, one), (s2, two), (s3, three) = fake.seen
    assert (s1, one) == (1, {"step/loss": 2.0, "step/stepped": 1.0})
    assert s2 == 2 and math.isnan(two.pop("step/loss"))
    assert two == {"step/stepped": 0.0, "step/scale": 0.5}
    assert (s3, three) == (2, {"eval/loss": 1.5})
    assert all(type(v) is float for v in one.values()) and fake.closed == 1
    assert len(read_metrics(tmp_path).lines) == 5


def test_a_tracker_that_fails_is_dropped_and_said_and_the_others_go_on(tmp_path, capsys):
    bad, good = Fake(fail_at=2), Fake()
    write(tmp_path, bad, good)
    assert [step for step, _ in bad.seen] == [1] and len(good.seen) == 3
    (event,) = read_metrics(tmp_path).of("event")
    text = "fake failed and gets nothing more: ConnectionError: no network"
    assert event["text"] == text and text in capsys.readouterr().err
    assert good.closed == 1 and len(read_metrics(tmp_path).of("step")) == 2


def test_a_tracker_that_fails_to_close_does_not_fail_the_run(tmp_path):
    bad = Fake()
    bad.close = lambda: 1 / 0
    write(tmp_path, bad)
    assert "ZeroDivisionError" in read_metrics(tmp_path).of("event")[0]["text"]


def test_one_that_does_not_start_closes_those_before_it(tmp_path, monkeypatch):
    fake = Fake()

    def refuses(*args, **kwargs):
        raise OSError("no\nkey")

    known = {"a": (lambda *args, **kwargs: fake, "json"), "b": (refuses, "json")}
    monkeypatch.setattr(trackers, "TRACKERS", known)
    with pytest.raises(RuntimeError, match=r"log\.trackers: b did not start: no key; take it out"):
        trackers.open_trackers(["a", "b"], tmp_path, project="p", run="r", config={})
    assert fake.closed == 1


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_one_that_is_missing_is_refused_before_anything_is_built(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "toy.toml"
    path.write_text('[model]\nname = "dense-100m"\n[data]\nsource = "random"\n')
    assert main(["train", str(path), f"log.trackers={name}", f"out={tmp_path}/out"]) == REFUSED
    done = capsys.readouterr()
    assert done.err.count("\n") == 1
    assert f"log.trackers: {name} is not installed; run: pip install {name}" in done.err
    assert not (tmp_path / "out").exists()


# ---- the libraries, first as their interfaces are ----


def test_wandb_is_called_so_that_steps_may_repeat_and_runs_go_on(tmp_path, monkeypatch):
    calls = []

    class Run:
        id = "abc"

        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace()
    module.init = lambda **kwargs: calls.append(("init", (), kwargs)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for after in (None, 5, None):
        opened = trackers.open_trackers(
            ["wandb"], tmp_path, project="p", run="r", config={"seed": 1}, after_step=after
        )
        opened[0].log({"step/loss": 2.0}, 3)
        opened[0].close()
    inits = [k for name, _, k in calls if name == "init"]
    assert [(k["id"], k["resume"]) for k in inits] == [(None, None), ("abc", "allow"), (None, None)]
    assert inits[0]["project"] == "p" and inits[0]["config"] == {"seed": 1}
    assert ("log", ({"step/loss": 2.0, "steps": 3},), {}) in calls
    assert ("define_metric", ("*",), {"step_metric": "steps"}) in calls


def test_trackio_is_called_as_its_interface_is(tmp_path, monkeypatch):
    calls = []
    module = types.ModuleType("trackio")
    module.__spec__ = types.SimpleNamespace()
    run = types.SimpleNamespace(log=lambda values, step: calls.append((values, step)))
    module.init = lambda **kwargs: calls.append(kwargs) or run
    module.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "trackio", module)
    for after in (None, 5):
        (opened,) = trackers.open_trackers(
            ["trackio"], tmp_path, project="p", run="r", config={}, after_step=after
        )
        opened.log({"step/loss": 2.0}, 3)
        opened.close()
    assert [c["resume"] for c in calls if isinstance(c, dict)] == ["never", "allow"]
    assert calls.count(({"step/loss": 2.0}, 3)) == calls.count("finish") == 2


# ---- and then as they are ----


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """trained(name) trains three steps into one tracker, interrupted and continued."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))

    def train(name):
        path = tmp_path / "toy.toml"
        path.write_text(f"""
out = "{tmp_path}/out"
[model]
name = "dense-100m"
[model.overrides]
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
num_hidden_layers = 1
intermediate_size = 64
vocab_size = 96
[data]
source = "random"
sequence_length = 16
[train]
preset = "fp32"
steps = 3
micro_batch = 2
eval_batches = 1
[log]
trackers = ["{name}"]
""")
        Trainer(load_run(path, ["train.steps=2", "optimizer.schedule=constant"])).run(quiet=True)
        Trainer(load_run(path, ["optimizer.schedule=constant"])).run(quiet=True)
        lines = read_metrics(tmp_path / "out").of("step")
        return tmp_path, [(x["step"], x["loss"]) for x in lines]

    return train


def test_tensorboard_has_the_run(trained):
    pytest.importorskip("tensorboard")
    folder, losses = trained("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "out" / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("step/loss")]
    assert found == [(s, pytest.approx(x, rel=1e-6)) for s, x in losses] and len(found) == 3
    assert [e.step for e in events.Scalars("eval/loss")] == [2, 3]


def test_trackio_has_the_run(trained):
    pytest.importorskip("trackio")
    folder, losses = trained("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_metric_values("ottava", "toy", "step/loss")
    assert [(r["step"], pytest.approx(r["value"])) for r in rows] == losses
    assert list((folder / "trackio").rglob("*.db"))


def records(path):
    """The records of a .wandb file: LevelDB's log format after seven bytes of header."""
    data, at, parts = path.read_bytes(), 7, []
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_wandb_has_the_run(trained):
    wandb = pytest.importorskip("wandb")
    folder, losses = trained("wandb")
    wandb.teardown()  # its process writes the files, after finish() has returned too
    runs = sorted((folder / "out" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and (folder / "out" / "wandb-id.txt").exists()
    from wandb.proto import wandb_internal_pb2

    found, ids = [], set()
    for run in runs:
        for data in records(next(run.glob("*.wandb"))):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {
                    i.key or ".".join(i.nested_key): json.loads(i.value_json)
                    for i in record.history.item
                }
                if "step/loss" in items:
                    found.append((items["steps"], items["step/loss"]))
    assert found == [(s, pytest.approx(x)) for s, x in losses] and len(found) == 3
    assert len(ids) == 1
