"""The trainer: steps that leave no trace, weighting, schedules, precision switches, exact resume."""

import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch
from test_checkpoint import same
from tiny_run import tiny_run

from ottava.kernels import cast as cast_kernels
from ottava.monitor.metrics import read_metrics
from ottava.train import loop, out_of_memory, resume, trainer
from ottava.train.checkpoint import Checkpoint, CheckpointError, checkpoints
from ottava.train.data import DataError
from ottava.train.forward import window_loss
from ottava.train.trainer import Trainer

DELAYED = {"precision": {"recipe": "delayed"}}


def weights(t):
    """Every tensor of the model, and every part of its split masters."""
    out = {n: p.detach().clone() for n, p in t.model.named_parameters()}
    out |= {n: b.clone() for n, b in t.model.named_buffers()}
    for name, p in t.model.named_parameters():
        for part in ("residual", "scale", "amax"):
            if isinstance(getattr(p, part, None), torch.Tensor):
                out[f"{name}.{part}"] = getattr(p, part).clone()
    return out


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: clone(v) for k, v in value.items()}
    return type(value)(clone(v) for v in value) if isinstance(value, list | tuple) else value


def everything(t, *left_out):
    """All state of a trainer, by section."""
    state = {"weights": weights(t), **clone(resume.collect(t))}
    return {k: v for k, v in state.items() if k not in left_out}


def assert_same(a, b):
    for section in a:
        assert same(a[section], b[section]), section


def poison_gradient(t, name):
    """The gradient of one parameter is NaN from now on; the returned handle undoes it."""
    return t.model.get_parameter(name).register_hook(lambda g: g * math.nan)


BAD = "model.layers.1.self_attn.qkv_proj.weight"
SKIPS = {
    "fp32": ("fp32", {}),
    "ema": ("amp", {"ema": {"decay": 0.9}}),
    "bf16": ("bf16", {}),
    "fp8": ("fp8", {}),
    "delayed": ("fp8", DELAYED),
    "lean-unfused": ("fp8-lean", {"optimizer": {"clip_norm": 1.0}}),
}


@pytest.mark.parametrize("case", SKIPS)
def test_a_bad_gradient_changes_nothing_and_is_named(tmp_path, case):
    preset, sections = SKIPS[case]
    t = Trainer(tiny_run(tmp_path, preset, **sections))
    assert t.step_once().stepped
    before = everything(t, "data", "progress", "random", "health")
    bad = poison_gradient(t, BAD)
    result = t.step_once()
    bad.remove()
    assert not result.stepped and t.skipped == 1 and t.step == 2
    # it spreads from layer 1 down; the name is where it began
    assert result.cause == f"the gradient of {BAD} is not finite"
    assert math.isfinite(result.loss) and math.isnan(result.grad_norm)
    after = everything(t, "data", "progress", "random", "health")
    assert before["schedule"].pop("skipped") + 1 == after["schedule"].pop("skipped")
    assert_same(before, after)
    # and the next step is the one that would have come without it
    other = Trainer(tiny_run(tmp_path, preset, **sections))
    other.step_once()
    other.data.train.position += 2
    assert t.step_once().stepped and other.step_once().stepped
    assert_same(weights(t), weights(other))


def test_a_bad_loss_changes_nothing_in_a_fused_step(tmp_path, monkeypatch):
    t = Trainer(tiny_run(tmp_path, "fp8-lean", ema={"decay": 0.9}))
    assert t.handle is not None and t.step_once().stepped
    before, moments = everything(t), clone(t.optimizer.state_dict())["state"]
    monkeypatch.setattr(trainer, "window_loss", lambda *a: window_loss(*a) * math.inf)
    result = t.step_once()
    assert not result.stepped and result.cause.startswith("the loss is inf")
    assert_same({k: before[k] for k in ("weights", "ema", "amax")}, everything(t))
    for number, state in t.optimizer.state_dict()["state"].items():
        for name in ("m", "v", "m_scale", "v_range"):
            assert name not in state or same(state[name], moments[number][name])
    assert t.schedule.updates == 1
    monkeypatch.undo()
    assert t.step_once().stepped


def test_a_bad_gradient_in_a_fused_step_stops_the_update_there(tmp_path):
    t = Trainer(tiny_run(tmp_path, "fp8-lean"))
    t.step_once()
    before = weights(t)
    bad = poison_gradient(t, BAD)
    result = t.step_once()
    bad.remove()
    assert not result.stepped and BAD in result.cause
    after = weights(t)
    assert all(bool(torch.isfinite(w.float()).all()) for w in after.values())
    assert same(before[BAD], after[BAD])
    assert same(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def test_looking_for_what_broke_a_fused_step_updates_nothing(tmp_path):
    after = []
    for look in (True, False):
        t = Trainer(tiny_run(tmp_path, "fp8-lean", monitor={"locate": look}))
        t.step_once()
        bad = poison_gradient(t, BAD)
        assert (t.step_once().first_bad is not None) == look
        bad.remove()
        after.append(weights(t))
    assert_same(*after)


def test_schedule_optimizer_and_average_count_real_updates(tmp_path):
    t = Trainer(tiny_run(tmp_path, ema={"decay": 0.9}, optimizer={"warmup_steps": 6}))
    bad = poison_gradient(t, "lm_head.weight")
    first = [t.step_once() for _ in range(3)]
    bad.remove()
    then = [t.step_once() for _ in range(2)]
    assert [r.stepped for r in first + then] == [False] * 3 + [True] * 2
    assert t.schedule.updates == 2 and t.ema.updates == 2 and t.skipped == 3
    assert {s["step"] for s in t.optimizer.state.values()} == {2}
    assert [r.lr for r in first + then] == pytest.approx([5e-4] * 4 + [1e-3])


def test_fp16_gradients_are_unscaled_before_they_are_measured_and_clipped(tmp_path):
    sections = {"optimizer": {"clip_norm": 0.5}}
    plain = Trainer(tiny_run(tmp_path, "fp32", **sections)).step_once()
    t = Trainer(tiny_run(tmp_path, "amp-fp16", **sections))
    result = t.step_once()
    assert t.scaler.get_scale() == 65536 and result.stepped
    assert result.grad_norm == pytest.approx(plain.grad_norm, rel=0.02) and plain.grad_norm > 0.5
    moments = [s["m"].float().norm() for s in t.optimizer.state.values()]
    # m is 0.1 x gradient after one step, and the gradient was clipped to 0.5
    assert float(torch.stack(moments).norm()) == pytest.approx(0.05, rel=1e-3)
    bad = poison_gradient(t, "lm_head.weight")
    assert not t.step_once().stepped and t.scaler.get_scale() == 32768
    bad.remove()
    assert t.step_once().stepped


class Fixed(torch.nn.Module):
    """Returns a mean loss over its valid tokens, as a causal LM does."""

    def forward(self, mean, valid, num_items_in_batch):
        loss = torch.tensor(mean * valid / num_items_in_batch)
        return type("Out", (), {"loss": loss})()


def test_unequal_micro_batches_are_weighted_by_their_tokens():
    parts = [(1.0, 3), (2.0, 1), (0.0, 0)]
    valid = sum(n for _, n in parts)
    losses = [window_loss(Fixed(), {"mean": m, "valid": n}, n, valid) for m, n in parts]
    assert sum(losses) == 1.25
    assert window_loss(Fixed(), {"mean": 0.0, "valid": 0}, 0, 0) == 0.0


@pytest.mark.parametrize("preset", ["fp32", "fp8"])
def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path, preset):
    def one_step(micro, accumulate, unlabelled=()):
        changes = {"micro_batch": micro, "accumulate": accumulate}
        t = Trainer(tiny_run(tmp_path, preset, train=changes, optimizer={"lr": 0.0}))
        batch_at = t.data.train.batch_at

        def with_gaps(position, size=None):
            batch = batch_at(position, size)
            for row in range(len(batch["labels"])):
                batch["labels"][row, : 4 * (position + row)] = -100
                if position + row in unlabelled:
                    batch["labels"][row] = -100
            batch["num_valid"] = int((batch["labels"][:, 1:] != -100).sum())
            return batch

        t.data.train.batch_at = with_gaps
        return t.step_once()

    whole, parts = one_step(4, 1, {3}), one_step(1, 4, {3})
    assert parts.stepped and parts.loss == pytest.approx(whole.loss, rel=1e-4)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4 if preset == "fp32" else 0.05)
    none = one_step(1, 2, {0, 1})
    assert none.loss == 0.0 and none.grad_norm == 0.0


def test_evaluation_leaves_no_trace(tmp_path):
    t = Trainer(tiny_run(tmp_path, "fp8", ema={"decay": 0.5}, **DELAYED))
    t.step_once()
    t.model.model.norm.eval()
    before = everything(t)
    modes = [m.training for m in t.model.modules()]
    live, averaged = t.evaluate(), t.evaluate(averaged=True)
    assert math.isfinite(live) and live != averaged and live == t.evaluate()
    assert_same(before, everything(t))
    assert modes == [m.training for m in t.model.modules()]


def test_steps_inside_an_outer_autocast_region_are_the_same(tmp_path):
    def train():
        t = Trainer(tiny_run(tmp_path, "amp", ema={"decay": 0.5}))
        losses = [t.step_once().loss for _ in range(2)]
        return weights(t), [*losses, t.evaluate(), t.evaluate(averaged=True)]

    plain, losses = train()
    with torch.autocast("cpu", torch.bfloat16):
        inside, losses_inside = train()
    assert losses == losses_inside and losses[2] != losses[3]
    assert_same(plain, inside)


RESUMES = {
    "fp32": ("fp32", {"ema": {"decay": 0.9}}),
    "amp-fp16": ("amp-fp16", {"scaler": {"growth_interval": 2}}),
    "bf16": ("bf16", {"train": {"accumulate": 2}}),
    "fp8": ("fp8", {"optimizer": {"clip_norm": 1.0}}),
    "delayed": ("fp8", DELAYED),
    "fp8-lean": ("fp8-lean", {}),
    "split24": ("fp8-lean", {"optimizer": {"master": "split24", "fused": "off"}}),
}


@pytest.mark.parametrize("case", RESUMES)
def test_resume_is_bitwise(tmp_path, case):
    preset, sections = RESUMES[case]
    straight = Trainer(tiny_run(tmp_path, preset, **sections))
    for _ in range(4):
        straight.step_once()
    first = Trainer(tiny_run(tmp_path, preset, **sections))
    first.step_once(), first.step_once()
    first.save()
    torch.manual_seed(99)
    second = Trainer(tiny_run(tmp_path, preset, **sections))
    assert second.step == 2 and second.origin.notes == []
    assert_same(everything(first), everything(second))
    second.step_once(), second.step_once()
    assert_same(everything(straight), everything(second))


def test_checkpoints_do_not_grow(tmp_path):
    t = Trainer(tiny_run(tmp_path, "fp8-lean", train={"keep_last": 9}, **DELAYED))
    sizes = []
    for _ in range(3):
        t.step_once()
        path = t.save()
        sizes.append({f.name: f.stat().st_size for f in path.glob("*.safetensors")})
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": 1}, r"seed=0 there, 1 here"),
        ({"model": {"overrides": {"hidden_size": 64}}}, r"model\.overrides=.* there"),
        ({"preset": "amp"}, r"train\.preset=fp8 there, amp here"),
        ({"precision": {"keep": ("*.o_proj",)}}, r"another plan .*o_proj"),
        ({"precision": {"recipe": "row"}}, r"another plan"),
        ({"optimizer": {"states": "8bit"}}, r"optimizer\.states=preset there, 8bit here"),
    ],
)
def test_another_run_is_refused_with_what_differs(tmp_path, changes, message):
    t = Trainer(tiny_run(tmp_path, "fp8"))
    t.step_once()
    t.save()
    run = tiny_run(tmp_path, **{"preset": "fp8", **changes})
    with pytest.raises(CheckpointError, match=message) as e:
        Trainer(run)
    assert "\n" not in str(e.value)
    assert [s for s, _ in checkpoints(t.checkpoints)] == [1]


def test_other_data_is_refused(tmp_path):
    t = Trainer(tiny_run(tmp_path))
    t.save()
    with pytest.raises(DataError, match="not the data that the checkpoint was made with"):
        Trainer(tiny_run(tmp_path, data={"sequence_length": 8}))


def test_settings_that_may_change_are_taken_and_announced(tmp_path):
    t = Trainer(tiny_run(tmp_path))
    t.step_once()
    t.save()
    t = Trainer(tiny_run(tmp_path, optimizer={"lr": 1.0, "weight_decay": 0.5}))
    assert t.optimizer.param_groups[0]["lr"] == 1.0
    assert t.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert "optimizer.lr: 0.003 until the checkpoint, 1.0 from now on" in t.origin.notes


def test_another_history_length_is_kept_and_announced(tmp_path):
    from ottava.layers import delayed

    t = Trainer(tiny_run(tmp_path, "fp8", **DELAYED))
    t.step_once()
    state = resume.amax_state(t.model)
    assert state and all(s["amax"].shape[1] == 16 for s in state.values())
    longer = {k: {**s, "amax": torch.cat([s["amax"], s["amax"]], 1)} for k, s in state.items()}
    notes = resume.load_amax_state(t.model, longer)
    assert notes == [
        "amax history: 32 entries stored, 16 from now on (the most recent are kept, or zeros "
        "appended)"
    ]
    assert t.step_once().stepped
    assert isinstance(t.model.model.layers[0].self_attn.qkv_proj._history, delayed.AmaxHistory)


def test_damaged_newest_checkpoint_gives_way_to_the_older_one(tmp_path):
    t = Trainer(tiny_run(tmp_path))
    for _ in range(2):
        t.step_once()
        newest = t.save()
    (newest / "optimizer.safetensors").write_bytes(b"")
    t = Trainer(tiny_run(tmp_path))
    assert t.step == 1 and "optimizer.safetensors" in t.origin.notes[0]
    (t.checkpoints / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no older one is whole: .*train\.resume=never"):
        Trainer(tiny_run(tmp_path))
    assert Trainer(tiny_run(tmp_path, train={"resume": "never"})).step == 0


def test_a_named_checkpoint_is_taken_and_later_ones_set_aside(tmp_path):
    run = tiny_run(tmp_path, steps=3, train={"checkpoint_every": 1, "keep_last": 5})
    done = Trainer(run).run(quiet=True)
    again = replace(
        run, train=replace(run.train, resume=str(done.checkpoint.parent / "step-00000001"))
    )
    t = Trainer(again)
    assert t.step == 1
    assert t.run(quiet=True).step == 3
    assert (t.checkpoints / "unused-step-00000003").is_dir()
    a, b = (Checkpoint.open(p / "step-00000003") for p in (t.checkpoints,) * 2)
    assert same(a.tensors("model"), b.tensors("model"))
    with pytest.raises(CheckpointError, match="does not exist"):
        Trainer(replace(run, train=replace(run.train, resume=str(tmp_path / "nothing"))))


def test_precision_switches_when_it_should(tmp_path, monkeypatch):
    calls = []
    quantize = cast_kernels.quantize

    def counted(*args, **kwargs):
        calls.append(1)
        return quantize(*args, **kwargs)

    monkeypatch.setattr(cast_kernels, "quantize", counted)
    sections = {"precision": {"start_fp8_at": 0.25, "finish_bf16_at": 0.75}}
    t = Trainer(tiny_run(tmp_path, "fp8", steps=4, train={"eval_batches": 0}, **sections))
    step_once, counts = t.step_once, []

    def counting():
        calls.clear()
        result = step_once()
        counts.append(len(calls))
        return result

    t.step_once = counting
    t.run(quiet=True)
    assert [c > 0 for c in counts] == [False, True, True, False]
    metrics = read_metrics(t.config.out)
    assert [x["precision"] for x in metrics.of("step")] == ["high", "fp8", "fp8", "high"]
    assert [(x["step"], x["text"]) for x in metrics.of("event")] == [
        (1, "from step 2 on: FP8 compute"), (3, "from step 4 on: BF16 compute"),
    ]  # fmt: skip


@pytest.mark.parametrize("preset", ["fp32", "fp8"])
@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_recompute_changes_no_number(tmp_path, preset, recompute):
    results = []
    for which in ("none", recompute):
        t = Trainer(tiny_run(tmp_path, preset, train={"recompute": which}))
        results.append([(r.loss, r.grad_norm) for r in (t.step_once(), t.step_once())])
    if preset == "fp8":  # what is kept of a stretch is in 8 bits
        assert results[0] == [pytest.approx(r, rel=0.05) for r in results[1]]
    else:
        assert results[0] == results[1]


def test_interrupted_once_it_finishes_the_step_and_saves(tmp_path):
    run = tiny_run(tmp_path, steps=5)
    for name, code in (("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)):
        number = signal.Signals[name]
        t = Trainer(run)
        begun, step_once = t.step, t.step_once

        def interrupted(number=number, step_once=step_once):
            os.kill(os.getpid(), number)
            return step_once()

        t.step_once = interrupted
        handlers = signal.getsignal(number)
        result = t.run(quiet=True)
        assert signal.getsignal(number) is handlers
        assert (result.stopped_by, result.exit_code, result.step) == (name, code, begun + 1)
        assert Checkpoint.open(result.checkpoint).step == begun + 1
        end = read_metrics(run.out).of("end")[-1]
        assert (end["status"], end["reason"]) == ("stopped", name)
    result = Trainer(run).run(quiet=True)
    assert (result.step, result.exit_code) == (5, 0)


def test_a_streak_of_skips_stops_the_run_with_the_cause(tmp_path):
    t = Trainer(tiny_run(tmp_path, heal={"after": 3, "rollbacks": 0}))
    poison_gradient(t, "lm_head.weight")
    with pytest.raises(loop.TrainingError, match=r"step 3: .*lm_head\.weight.*ottava diagnose"):
        t.run(quiet=True)
    metrics = read_metrics(t.config.out)
    assert metrics.of("end")[-1]["status"] == "failed"
    assert [x["stepped"] for x in metrics.of("step")] == [False] * 3
    assert all(math.isnan(x["grad_norm"]) for x in metrics.of("step"))


def test_out_of_memory_says_what_was_needed_and_what_would_fit(tmp_path, monkeypatch):
    run = tiny_run(tmp_path, "fp32", train={"micro_batch": 16})
    t = Trainer(run)

    def no_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore")

    t.step_once = no_memory
    needed = out_of_memory.estimate_memory(run, device="cpu").peak_gib
    monkeypatch.setattr(out_of_memory, "available_gib", lambda _: 0.6 * needed)
    with pytest.raises(
        out_of_memory.OutOfMemory, match="out of memory in step 1: a step needs"
    ) as e:
        t.run(quiet=True)
    assert "activations" in str(e.value) and "would fit: train.preset=" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_run_writes_what_is_documented(tmp_path):
    run = tiny_run(
        tmp_path, "fp8", steps=4, train={"eval_every": 2, "checkpoint_every": 2}, ema={"decay": 0.9}
    )
    result = Trainer(run).run(quiet=True)
    metrics = read_metrics(run.out)
    assert metrics.problems == []
    kinds = [(x["kind"], x["step"]) for x in metrics.lines]
    assert kinds == [
        ("start", 0), ("step", 1), ("step", 2), ("memory", 2), ("eval", 2), ("save", 2), ("step", 3), ("step", 4),
        ("eval", 4), ("save", 4), ("end", 4),
    ]  # fmt: skip
    start = metrics.of("start")[0]
    assert start["fp8_modules"] == Trainer(run).plan.num_fp8 > 0
    assert start["config"]["train"]["preset"] == "fp8" and start["tokens_per_step"] == 32
    step = metrics.of("step")[-1]
    assert step["tokens"] == 4 * 32 and step["percent"] > 0 and step["memory_gib"] > 0
    assert math.isfinite(result.eval_loss) and result.eval_loss == metrics.of("eval")[-1]["loss"]
    assert metrics.of("eval")[-1]["ema_loss"] is not None
    json.loads((result.checkpoint / "manifest.json").read_text())
    again = Trainer(run)
    assert again.step == 4 and again.run(quiet=True).step == 4  # nothing left to do


@pytest.mark.parametrize("preset", ["amp", "fp8-lean"])
def test_a_hugging_face_folder_trains_and_resumes(tmp_path, preset):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=272, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    source = tmp_path / "docs"
    source.mkdir()
    for n in range(40):
        (source / f"{n}.txt").write_text(f"document {n} says {n * n} " * 3)
    run = tiny_run(
        tmp_path,
        preset,
        model={"name": "", "path": str(tmp_path / "llama"), "overrides": {}},
        data={"source": str(source), "sequence_length": 48},
        optimizer={"lr": 3e-3},
        train={"checkpoint_every": 2},
    )
    t = Trainer(run)
    result = t.run(quiet=True)
    assert math.isfinite(result.eval_loss) and t.step == 6
    (result.checkpoint / "state.json").unlink()
    again = Trainer(run)
    assert again.step == 4
    again.run(quiet=True)
    assert_same(weights(t), weights(again))
    exported = json.loads((again.checkpoints / "step-00000006" / "config.json").read_text())
    assert exported["architectures"] == ["LlamaForCausalLM"]
