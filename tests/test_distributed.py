"""Several ranks give what one gives: loss curves, skipped steps, resumed runs, lost ranks."""

import math
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks, wait_for
from test_checkpoint import same
from tiny_run import tiny_run

from ottava.cli import main
from ottava.config import ConfigError
from ottava.distributed.ddp import Reducer
from ottava.distributed.ranks import all_max
from ottava.kernels.cast import scale_from_amax
from ottava.layers.delayed import AmaxHistory, agree_amax
from ottava.layers.linear import Linear
from ottava.train.checkpoint import Checkpoint, checkpoints
from ottava.train.loop import _Loop
from ottava.train.resume import _histories
from ottava.train.trainer import Trainer

DDP = {"strategy": "ddp"}
DELAYED = {"precision": {"recipe": "delayed"}}


def weights(t):
    """Every tensor of the model, and every part of its split masters."""
    out = dict(t.model.state_dict(keep_vars=True))
    out = {n: p.detach().clone() for n, p in out.items()}
    for name, p in t.model.named_parameters():
        for part in ("residual", "scale", "amax"):
            if isinstance(getattr(p, part, None), torch.Tensor):
                out[f"{name}.{part}"] = getattr(p, part).clone()
    return out


def steps(t, number):
    return [(r.loss, r.grad_norm, r.stepped) for r in (t.step_once() for _ in range(number))]


def ranks_run(folder, preset, micro_batch=1, distributed=DDP, **sections):
    """The run that one process makes with `accumulate` = the number of ranks."""
    train = {"micro_batch": micro_batch} | sections.pop("train", {})
    return tiny_run(folder, preset, distributed=distributed, train=train, **sections)


CURVES = {
    "fp32": ("fp32", {}),
    "clipped": ("amp", {"optimizer": {"clip_norm": 0.5}}),
    "fp8": ("fp8", {}),
    "fp8-lean": ("fp8-lean", {}),
    "layers-again": ("fp8", {"train": {"recompute": "layer"}}),
}


@pytest.mark.parametrize("case", CURVES)
def test_two_ranks_give_the_bits_of_one_that_accumulates(tmp_path, case):
    preset, sections = CURVES[case]
    train = {"micro_batch": 1, "accumulate": 2} | sections.get("train", {})
    alone = Trainer(tiny_run(tmp_path, preset, **sections | {"train": train}))
    curve, expected = steps(alone, 4), weights(alone)

    def work(rank):
        t = Trainer(ranks_run(tmp_path, preset, **sections))
        return steps(t, 4), weights(t), t.optimizer.state_dict(), t.data.train.position

    for got, w, state, position in run_ranks(2, work, tmp_path):
        assert got == curve
        assert all(same(w[n], expected[n]) for n in expected) and w.keys() == expected.keys()
        assert same(state, alone.optimizer.state_dict()) and position == 8


def test_more_ranks_and_micro_batches_give_the_same_curve(tmp_path):
    # sums over three ranks are made in another order: float32 rounding, and what grows from it
    train = {"micro_batch": 1, "accumulate": 6}
    curve = steps(Trainer(tiny_run(tmp_path, "fp32", train=train)), 3)

    def work(rank):
        changes = {"train": {"accumulate": 2}, "distributed": DDP | {"bucket_mib": 0.01}}
        t = Trainer(ranks_run(tmp_path, "fp32", **changes))
        assert len(t.strategy.reducer.buckets) > 5
        return steps(t, 3)

    first, *others = run_ranks(3, work, tmp_path)
    assert all(o == first for o in others)
    for (loss, norm, _), (loss1, norm1, _) in zip(first, curve, strict=True):
        assert loss == pytest.approx(loss1, rel=2e-6) and norm == pytest.approx(norm1, rel=2e-5)


def test_unequal_ranks_are_weighted_by_their_tokens(tmp_path):
    def gaps(t):
        batch_at = t.data.train.batch_at

        def with_gaps(position, size=None):
            batch = batch_at(position, size)
            if position % 2:  # the second rank's: nothing to learn from at all, or almost
                batch["labels"][:, position // 2 :] = -100
            batch["num_valid"] = int((batch["labels"] != -100).sum())
            return batch

        t.data.train.batch_at = with_gaps
        return t

    train = {"micro_batch": 1, "accumulate": 2}
    curve = steps(gaps(Trainer(tiny_run(tmp_path, "fp8", train=train))), 3)
    both = run_ranks(2, lambda rank: steps(gaps(Trainer(ranks_run(tmp_path, "fp8"))), 3), tmp_path)
    assert both == [curve, curve]


@pytest.mark.parametrize("preset, sections", [("amp-fp16", {}), ("bf16", {}), ("fp8", DELAYED)])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(tmp_path, preset, sections):
    def work(rank):
        t = Trainer(ranks_run(tmp_path, preset, ema={"decay": 0.9}, **sections))
        first, before = t.step_once(), weights(t)
        p = t.model.get_parameter("model.layers.1.self_attn.qkv_proj.weight")
        handle = p.register_hook(lambda g: g * math.inf) if rank == 0 else None
        bad, kept = t.step_once(), same(weights(t), before)
        if handle:
            handle.remove()
        last = t.step_once()
        history = [h.amax for *_, h in _histories(t.model)]
        return first.stepped, bad, kept, last.loss, t.scaler.get_scale(), t.skipped, history

    one, other = run_ranks(2, work, tmp_path)
    for first, bad, kept, _, scale, skipped, _ in (one, other):
        assert first and not bad.stepped and kept and skipped == 1
        assert "layers.1.self_attn.qkv_proj.weight is not finite" in bad.cause
        assert scale == (32768.0 if preset == "amp-fp16" else 1.0)
    assert one[3:6] == other[3:6]
    assert same(one[6], other[6]) and bool(one[6]) == bool(sections)


def test_ranks_scale_alike_after_unlike_inputs(tmp_path):
    def work(rank):
        dist.init_process_group("gloo")
        layer = Linear(16, 16, bias=False, recipe="delayed")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for largest in (1.0, 2.0):
            x = torch.ones(4, 16) * (100.0 if rank else largest)
            layer(x).sum().backward()
            agree_amax(layer.parameters(), all_max)
            optimizer.step()
        history = layer._history
        scale = scale_from_amax(history.past("input", layer.recipe.input, x), layer.recipe.input)
        return history.amax[0, :3].tolist(), float(scale)

    one, other = run_ranks(2, work, tmp_path)
    assert one == other and one[0] == [100.0, 100.0, 0.0]
    assert one[1] == pytest.approx(100.0 / 448.0, rel=1e-6)


def test_parameters_that_only_some_ranks_use(tmp_path):
    def work(rank):
        dist.init_process_group("gloo")
        a, b, c = (torch.nn.Parameter(torch.ones(n)) for n in (3, 5, 70))
        half = torch.nn.Parameter(torch.ones(4))
        half.grad_dtype = torch.bfloat16
        reducer = Reducer([a, b, c, half], 256)
        results = []
        for _ in range(2):
            for p in (a, b, c, half):
                p.grad = None
            reducer.begin()
            loss = (c * (rank + 1)).sum() + (half * (rank + 1)).sum()
            (loss + (a * 2).sum() if rank else loss).backward()
            reducer.finish()
            results.append([None if p.grad is None else p.grad.clone() for p in (a, b, c, half)])
        return results

    for result in run_ranks(2, work, tmp_path):
        for a, b, c, half in result:
            assert b is None and a.tolist() == [2.0] * 3 and c.tolist() == [3.0] * 70
            assert half.dtype == torch.bfloat16 and half.tolist() == [3.0] * 4


def whole_run(folder, preset, out, **train):
    run = ranks_run(folder, preset, out=out, steps=8,
                    train={"checkpoint_every": 1, "keep_last": 9, "eval_every": 4} | train)  # fmt: skip
    return Trainer(run).run(quiet=True)


def files_of(folder, step):
    path = Checkpoint.open(folder / "checkpoints" / f"step-{step:08d}").path
    return {p.name: p.read_bytes() for p in path.glob("*.safetensors")}


def test_a_lost_rank_ends_the_run_and_it_continues_with_the_same_bits(tmp_path):
    lean = "fp8-lean"
    tiny_run(tmp_path)
    whole = run_ranks(2, lambda rank: whole_run(tmp_path, lean, "whole"), tmp_path)
    assert whole[0].step == 8 and whole[0].eval_loss == whole[1].eval_loss

    def dies(rank):
        after = _Loop.after

        def watched(loop, result):
            after(loop, result)
            if rank == 1 and result.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        _Loop.after = watched
        whole_run(tmp_path, lean, "killed")

    begun = time.monotonic()
    codes = wait_for(start_ranks(2, dies, tmp_path), 30)
    assert codes[1] == -signal.SIGKILL and codes[0] == 1 and time.monotonic() - begun < 15
    assert "RankLost: rank 0: lost another rank" in (tmp_path / "rank0.txt").read_text()
    newest = checkpoints(tmp_path / "killed" / "checkpoints")[0][0]
    assert newest == 3
    again = run_ranks(2, lambda rank: whole_run(tmp_path, lean, "killed"), tmp_path)
    assert [r.loss for r in again] == [r.loss for r in whole]
    expected, got = (files_of(tmp_path / name, 8) for name in ("whole", "killed"))
    assert expected.keys() == got.keys() and len(expected) >= 4
    assert all(expected[name] == got[name] for name in expected)
    assert (tmp_path / "whole" / "run.jsonl").exists()
    assert (tmp_path / "whole" / "ranks" / "1" / "run.jsonl").exists()


def test_a_run_continues_on_another_number_of_ranks(tmp_path):
    train = {"micro_batch": 1, "accumulate": 2, "checkpoint_every": 4}
    alone = Trainer(tiny_run(tmp_path, "fp8", steps=8, out="alone", train=train))
    curve = steps(alone, 8)

    def half(rank):
        t = Trainer(ranks_run(tmp_path, "fp8", out="moved", steps=8))
        got = steps(t, 4)
        t.save()
        return got

    first = run_ranks(2, half, tmp_path)[0]
    t = Trainer(tiny_run(tmp_path, "fp8", steps=8, out="moved", train=train))
    assert t.step == 4 and first + steps(t, 2) == curve[:6]
    t.save()
    then = run_ranks(2, lambda rank: steps(Trainer(ranks_run(tmp_path, "fp8", out="moved", steps=8)),
                                           2), tmp_path)  # fmt: skip
    assert then == [curve[6:]] * 2


def test_a_signal_to_one_rank_stops_all_after_one_step(tmp_path):
    def work(rank):
        after = _Loop.after

        def watched(loop, result):
            after(loop, result)
            if rank == 1 and result.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        _Loop.after = watched
        result = Trainer(ranks_run(tmp_path, "fp32", steps=50)).run(quiet=True)
        return result.step, result.exit_code, str(result.checkpoint)

    one, other = run_ranks(2, work, tmp_path)
    assert one == other and one[:2] == (3, 143)
    assert Checkpoint.open(one[2]).step == 3


def test_a_checkpoint_that_cannot_be_written_ends_every_rank(tmp_path):
    def work(rank):
        t = Trainer(ranks_run(tmp_path, "fp32"))
        t.step_once()
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "checkpoints").touch()
        with pytest.raises(Exception, match=r"cannot save step 1"):
            t.save()

    run_ranks(2, work, tmp_path)


def test_what_cannot_work_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is started by torchrun"):
        Trainer(ranks_run(tmp_path, "fp32"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="'single', but 2 processes were started"):
        Trainer(tiny_run(tmp_path, "fp32"))
    with pytest.raises(ConfigError, match="needs its JSON configuration"):
        ranks_run(tmp_path, "fp32", distributed={"strategy": "deepspeed"})
    with pytest.raises(ConfigError, match="does nothing under"):
        ranks_run(tmp_path, "fp32", distributed=DDP | {"deepspeed": "x.json"})
    with pytest.raises(ConfigError, match=r"distributed.strategy=ddp needs every gradient first"):
        ranks_run(tmp_path, "fp8-lean", optimizer={"fused": "on"})
    run = ranks_run(tmp_path, "fp8-lean")
    assert not run.settings.fused and "distributed.strategy=ddp" in run.notes[0]


RUN = """
[model]
name = "demo"
[data]
source = "random"
sequence_length = 16
[train]
preset = "fp32"
steps = 2
micro_batch = 1
eval_batches = 1
[distributed]
strategy = "ddp"
"""


def test_the_command_line_on_two_ranks(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    out = f"out={tmp_path / 'cli'}"
    arguments = ["--local_rank=0", "train", str(tmp_path / "run.toml"), out]

    codes = run_ranks(2, lambda rank: main(arguments), tmp_path, seconds=90)
    first, second = ((tmp_path / f"rank{r}.txt").read_text() for r in range(2))
    assert codes == [0, 0] and "note: 2 ranks, ddp" in first and "done at step 2" in first
    assert not second.strip()

    codes = run_ranks(2, lambda rank: main([*arguments, "distributed.strategy=single"]), tmp_path)
    first, second = ((tmp_path / f"rank{r}.txt").read_text() for r in range(2))
    assert codes == [2, 2] and not second.strip()
    assert first.startswith("ottava: distributed.strategy: 'single'") and first.count("\n") == 1


def test_ranks_with_other_weights_are_told(tmp_path):
    def work(rank):
        run = ranks_run(tmp_path, "fp32", seed=rank)
        with pytest.raises(ConfigError, match="did not build the same weights"):
            Trainer(run)

    run_ranks(2, work, tmp_path)


def test_histories_are_numbered_in_the_order_in_which_they_are_made():
    one, other = (AmaxHistory(4, torch.device("cpu")) for _ in range(2))
    assert one.number < other.number
