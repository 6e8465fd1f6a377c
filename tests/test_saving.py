"""Saving behind the run's back: the same bytes, never in the way, never at the older one's cost."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from test_checkpoint import same
from test_distributed import ranks_run
from tiny_run import tiny_run

from ottava.monitor.diagnose import diagnose
from ottava.monitor.metrics import read_metrics
from ottava.train import saving, writing
from ottava.train.checkpoint import Checkpoint, CheckpointError, checkpoints
from ottava.train.serialize import Sink
from ottava.train.trainer import Trainer

EVERY = {"checkpoint_every": 1, "keep_last": 9, "eval_batches": 0}


def background_run(folder, preset="fp8", *, steps=5, out="run", **train):
    return tiny_run(folder, preset, steps=steps, out=out, ema={"decay": 0.9},
                    train={**EVERY, "save": "background", **train})  # fmt: skip


def files_of(path):
    return {p.name: p.read_bytes() for p in sorted(Path(path).iterdir()) if p.name != "state.json"}


@pytest.mark.parametrize("preset", ["fp32", "fp8-lean", "bf16"])
def test_the_bytes_are_those_of_a_blocking_save(tmp_path, preset):
    """Every checkpoint of a run that went on training while it was written, slowly."""
    runs = [
        background_run(tmp_path, preset, out="blocking", save="blocking"),
        background_run(tmp_path, preset, out="background"),
    ]
    results = [Trainer(run).run(quiet=True) for run in runs]
    for step in range(1, 6):
        a, b = (Path(r.out) / "checkpoints" / f"step-{step:08d}" for r in runs)
        one, other = files_of(a), files_of(b)
        assert one.keys() == other.keys()
        assert all(one[n] == other[n] for n in one if n != "manifest.json"), step
        ca, cb = Checkpoint.open(a), Checkpoint.open(b)
        for section in ca.skeleton:
            if section not in ("aliases", "run"):
                assert same(ca.section(section), cb.section(section)), section
    assert results[0].loss == results[1].loss
    assert not [t for t in threading.enumerate() if t.name == "checkpoint"]


@pytest.fixture
def slow(monkeypatch):
    """Writes that wait until they are let go."""
    gate = threading.Event()
    write = writing.write

    def waiting(*args, **kwargs):
        assert gate.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(saving.writing, "write", waiting)
    yield gate
    gate.set()


def test_what_is_written_is_the_state_at_the_save_and_training_goes_on(tmp_path, slow):
    t = Trainer(background_run(tmp_path, "fp8-lean"))
    t.step_once()
    path = t.save()
    held = {n: p.dequantize() if hasattr(p, "residual") else p.detach().clone()
            for n, p in t.model.named_parameters()}  # fmt: skip
    for _ in range(3):
        t.step_once()
        t.saver.poll(t)
    assert t.saver.pending and not path.exists()
    slow.set()
    t.saver.wait(t)
    stored = Checkpoint.open(path)
    assert stored.step == 1 and stored.section("progress")["step"] == 1
    weights = stored.tensors("model")
    for name, value in held.items():
        assert torch.equal(weights[name], value), name
    assert not t.saver.pending


def test_the_next_save_waits_for_the_last(tmp_path, slow):
    t = Trainer(background_run(tmp_path))
    t.step_once()
    first = t.save()
    t.step_once()
    threading.Timer(0.3, slow.set).start()
    second = t.save()
    assert first.exists()  # whole before the second began
    t.saver.wait(t)
    assert [s for s, _ in checkpoints(t.checkpoints)] == [2, 1] and second.exists()


def full(monkeypatch, bad):
    """The disk is full for the saves of the steps in `bad`."""
    write_all = writing._write_all

    def failing(folder, step, staged):
        if step in bad:
            (folder / "half").write_bytes(b"x")
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(folder, step, staged)

    monkeypatch.setattr(writing, "_write_all", failing)


@pytest.mark.parametrize("how", ["background", "blocking"])
def test_a_save_that_failed_is_reported_and_tried_again(tmp_path, monkeypatch, how):
    full(monkeypatch, {3})
    run = background_run(tmp_path, save=how)
    result = Trainer(run).run(quiet=True)
    assert result.step == 5
    metrics = read_metrics(run.out)
    (event,) = metrics.of("event")
    assert (
        event["text"].startswith("cannot save step 3 in ") and "step 2 is intact" in event["text"]
    )
    assert event["step"] in (3, 4) and metrics.of("end")[-1]["status"] == "done"
    assert [s for s, _ in checkpoints(Path(run.out) / "checkpoints")] == [5, 4, 2, 1]
    assert [f.rule for f in diagnose(run.out)] == ["disk"]
    assert not [n for n in os.listdir(Path(run.out) / "checkpoints") if "partial" in n]


@pytest.mark.parametrize("how", ["background", "blocking"])
@pytest.mark.parametrize("bad, step", [({2, 3}, 3), ({5}, 5)])
def test_twice_in_a_row_or_at_the_end_it_ends_the_run(tmp_path, monkeypatch, how, bad, step):
    full(monkeypatch, bad)
    run = background_run(tmp_path, save=how)
    with pytest.raises(CheckpointError, match=f"cannot save step {step}") as e:
        Trainer(run).run(quiet=True)
    assert f"step {min(bad) - 1} is intact" in str(e.value)
    assert Checkpoint.open(Path(run.out) / "checkpoints" / f"step-{min(bad) - 1:08d}").step
    assert read_metrics(run.out).of("end")[-1]["status"] == "failed"


def test_a_write_under_way_is_finished_when_the_run_fails(tmp_path, monkeypatch):
    t = Trainer(background_run(tmp_path))
    write, step_once = Sink.write, t.step_once

    def slow_write(self, data):
        time.sleep(0.002)
        write(self, data)

    def failing():
        if t.step == 3:
            raise RuntimeError("something else")
        return step_once()

    monkeypatch.setattr(Sink, "write", slow_write)
    t.step_once = failing
    with pytest.raises(RuntimeError, match="something else"):
        t.run(quiet=True)
    assert [s for s, _ in checkpoints(t.checkpoints)] == [3, 2, 1]


def test_ranks_agree_on_a_failed_write(tmp_path):
    def work(rank):
        t = Trainer(ranks_run(tmp_path, "fp8", train={"save": "background"}))
        t.step_once()
        t.save()
        t.saver.wait(t)
        saved = Checkpoint.open(t.checkpoints / "step-00000001").step
        t.step_once()
        if t.strategy.is_main:
            writing._write_all = None  # whatever it is that fails
        t.save()
        try:
            while t.saver.pending:
                t.step_once()
                t.saver.poll(t)
        except TypeError as e:
            return saved, str(e), t.saver.pending
        return None

    one, other = run_ranks(2, work, tmp_path)
    assert one == other and one[0] == 1 and not one[2]
