"""What a run does about memory that runs out, a data loader that hangs, and clocks that go back."""

import time
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from test_distributed import ranks_run
from test_trainer import assert_same, weights
from tiny_run import tiny_run

from ottava.monitor.diagnose import diagnose
from ottava.monitor.metrics import read_metrics
from ottava.train.drawing import Drawer, LoaderHangs
from ottava.train.out_of_memory import OutOfMemory
from ottava.train.trainer import Trainer


def crowded_run(folder, preset="fp8", *, out="run", micro_batch=4, accumulate=1, steps=4, **train):
    train = {"micro_batch": micro_batch, "accumulate": accumulate, "eval_batches": 0} | train
    return tiny_run(folder, preset, out=out, steps=steps, train=train)


def out_of_memory_in(t, *, at=1, where="forward", above=2, forever=False):
    """Memory runs out in step `at` where more than `above` sequences go through a forward."""
    failed = []

    def no_memory(*_):
        big = t.config.train.micro_batch > above or forever
        if t.step + 1 >= at and big:
            failed.append(t.step + 1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore")

    if where == "forward":
        t.model.lm_head.register_forward_pre_hook(no_memory)
        t.model.model.norm.register_forward_hook(no_memory)
    elif where == "backward":
        t.model.model.layers[1].input_layernorm.weight.register_hook(no_memory)
    else:
        step = t.optimizer.step
        t.optimizer.step = lambda *a, **k: no_memory() or step(*a, **k)
    return failed


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("preset, at", [("fp32", 1), ("fp8", 3), ("bf16", 2)])
def test_the_same_sequences_in_smaller_micro_batches(tmp_path, where, preset, at):
    t = Trainer(crowded_run(tmp_path, preset))
    failed = out_of_memory_in(t, at=at, where=where)
    t.run(quiet=True)
    assert failed == [at] and t.step == 4 and t.data.train.position == 16
    assert (t.config.train.micro_batch, t.config.train.accumulate, t.split) == (2, 2, 2)
    (event,) = read_metrics(t.config.out).of("event")
    assert event["step"] == at - 1 and event["text"].startswith(
        f"out of memory in step {at}: train.micro_batch=4 -> 2, train.accumulate=1 -> 2 "
        "(the same 4 sequences a step)"
    )
    assert diagnose(t.config.out) == []
    # as if it had been asked for: the failed attempt left nothing behind
    if at == 1:
        small = Trainer(crowded_run(tmp_path, preset, out="small", micro_batch=2, accumulate=2))
        small.run(quiet=True)
        assert_same(weights(t), weights(small))


def test_what_is_odd_is_divided_by_its_smallest_divisor(tmp_path):
    t = Trainer(crowded_run(tmp_path, micro_batch=3, accumulate=2))
    out_of_memory_in(t, above=1)
    t.run(quiet=True)
    assert (t.config.train.micro_batch, t.config.train.accumulate) == (1, 6)
    assert t.data.train.position == 24


@pytest.mark.parametrize(
    "preset, size, where, forever",
    [
        ("fp32", 4, "forward", True),  # smaller ones do not fit either: never a loop
        ("fp32", 1, "forward", True),  # nothing to divide
        ("fp32", 4, "update", False),  # weights may have moved
        ("fp8-lean", 4, "backward", False),  # the same, inside backward
    ],
)
def test_it_is_tried_once_and_never_after_weights_moved(tmp_path, preset, size, where, forever):
    t = Trainer(crowded_run(tmp_path, preset, micro_batch=size))
    failed = out_of_memory_in(t, where=where, forever=forever, above=0)
    with pytest.raises(OutOfMemory, match="out of memory in step 1: a step needs"):
        t.run(quiet=True)
    halved = size == 4 and where == "forward"
    assert len(failed) == 1 + halved and t.split == 1 + halved
    assert [f.rule for f in diagnose(t.config.out)] == ["out-of-memory"]


def test_after_a_stop_it_goes_on_with_what_fitted(tmp_path):
    run = crowded_run(tmp_path, checkpoint_every=2, steps=6)
    t = Trainer(run)
    out_of_memory_in(t, at=2)
    t.run(quiet=True)
    at_4 = replace(run, train=replace(run.train, resume=str(t.checkpoints / "step-00000004")))
    again = Trainer(at_4)
    failed = out_of_memory_in(again)
    assert again.split == 2 and again.config.train.micro_batch == 2
    assert again.origin.notes == [
        "memory ran out before: train.micro_batch=2 and train.accumulate=2 from the start"
    ]
    again.run(quiet=True)
    assert not failed and again.step == 6
    assert_same(weights(t), weights(again))
    asked = replace(at_4.train, micro_batch=1, accumulate=4)
    other = Trainer(replace(at_4, train=asked))
    assert other.split == 1 and other.config.train.micro_batch == 1


def test_with_several_ranks_it_is_the_run_that_ends(tmp_path):
    """One rank alone cannot change the number of forwards that all of them take."""

    def work(rank):
        t = Trainer(ranks_run(tmp_path, "fp32", micro_batch=4, train={"eval_batches": 0}))
        if rank:
            out_of_memory_in(t)
        try:
            t.run(quiet=True)
        except OutOfMemory as e:
            return str(e)[:25]
        except Exception as e:
            return type(e).__name__

    assert run_ranks(2, work, tmp_path) == ["RankLost", "out of memory in step 1: "]


# A real allocator that gives up: see test_faults.py, which has a process of its own for it.


# ---- a loader that hangs ----


def test_a_hung_loader_is_named_after_its_time(tmp_path):
    run = crowded_run(tmp_path, data_timeout_s=0.3, checkpoint_every=1)
    t = Trainer(run)
    batch_at = t.data.train.batch_at
    t.data.train.batch_at = lambda *a: time.sleep(60) if t.step == 2 else batch_at(*a)
    begun = time.monotonic()
    with pytest.raises(LoaderHangs, match=r"gave no batch for 0\.3 s \(data\.source=.*text\.txt"):
        t.run(quiet=True)
    assert time.monotonic() - begun < 10
    end = read_metrics(run.out).of("end")[-1]
    assert end["status"] == "failed" and "train.data_timeout_s" in end["reason"]
    assert Trainer(run).run(quiet=True).step == 4


def test_what_a_loader_raises_arrives_and_order_is_kept():
    def batches():
        yield from range(3)
        raise OSError("gone")

    drawer = Drawer(batches(), 5.0, "x")
    assert [drawer.draw() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="gone"):
        drawer.draw()


# ---- clocks ----


def test_clocks_that_stand_still_or_go_back_change_no_number(tmp_path, monkeypatch):
    results = []
    for out in ("straight", "back"):
        t = Trainer(crowded_run(tmp_path, out=out, checkpoint_every=2))
        t.run(quiet=True)
        results.append((weights(t), [x["loss"] for x in read_metrics(t.config.out).of("step")]))
        for name in ("time", "perf_counter"):
            now = getattr(time, name)()
            back = iter(range(10**6))
            monkeypatch.setattr(time, name, lambda now=now, back=back: now - next(back) // 3)
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
