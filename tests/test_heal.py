"""A run that heals: bad steps leave no trace, too many of them lead back, and all of it is
deterministic, also when the run is killed on the way."""

import math
import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_checkpoint import same
from test_trainer import assert_same, everything, weights
from tiny_run import tiny_run

from ottava.layers.saved import carried_by
from ottava.monitor.diagnose import diagnose
from ottava.monitor.metrics import read_metrics
from ottava.numerics.recipe import get_recipe
from ottava.train import heal
from ottava.train.checkpoint import Checkpoint, checkpoints
from ottava.train.first_bad import broken_state
from ottava.train.loop import TrainingError
from ottava.train.switches import Change
from ottava.train.trainer import Trainer

ROW = "model.layers.1.self_attn.o_proj"


@pytest.fixture(autouse=True)
def short_memory(monkeypatch):
    monkeypatch.setattr(heal, "LEAST", 4)


def healing_run(folder, preset="fp8", *, steps=16, **sections):
    sections = {
        "heal": {"after": 3},
        "monitor": {"every": 0},
        "train": {"checkpoint_every": 4, "keep_last": 3, "eval_batches": 0},
    } | sections
    return tiny_run(folder, preset, steps=steps, **sections)


def poison_row(t, name=ROW, *, after=0, always=False):
    """The row gives NaN from step `after` on, whenever it computes in 8 bits."""

    def poisoned(module, _x, y):
        bad = t.step >= after and (always or module.recipe is not None)
        return y * math.nan if bad else y

    t.model.get_submodule(name).register_forward_hook(poisoned)
    return t


def poison_data(t, first, last):
    """Batches at these positions of the data make the loss NaN."""
    head = t.model.lm_head
    head.register_forward_pre_hook(
        lambda m, x: (x[0] * math.nan,) if first <= t.data.train.position <= last else None
    )
    t.model.model.norm.register_forward_hook(
        lambda m, x, y: y * math.nan if first <= t.data.train.position <= last else y
    )
    return t


# ---- going back and demoting ----


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean"])
def test_a_row_that_fails_in_8_bits_is_demoted_and_the_run_ends_well(tmp_path, preset):
    t = poison_row(Trainer(healing_run(tmp_path, preset)), after=6)
    result = t.run(quiet=True)
    metrics = read_metrics(t.config.out)
    (line,) = metrics.of("heal")
    assert (line["step"], line["to"], line["row"], line["rollbacks"]) == (9, 4, ROW, 1)
    assert line["position"] == 18 and line["high"] == [ROW]
    assert "its output was the first that was not finite" in line["text"]
    steps = [(x["step"], x["stepped"]) for x in metrics.of("step")]
    assert steps == [(n, n < 7) for n in range(1, 10)] + [(n, True) for n in range(5, 17)]
    assert result.step == 16 and t.data.train.position == 18 + 12 * 2
    row = t.switches.plan_at(t.step)[ROW]
    assert row.recipe is None and row.reason.startswith("demoted at step 9: its output")
    assert t.plan[ROW].recipe is not None and t.model.get_submodule(ROW).recipe is None
    assert t.health.lr_scale == 1.0
    assert result.loss < 5.2
    found = {f.rule: f for f in diagnose(t.config.out)}
    assert found["went-back"].setting == f"precision.keep={ROW}"


@contextmanager
def carried_to(linear):
    """Whether each input of `linear` carried codes of its plan's cast."""
    found, cast = [], get_recipe("tensor").input
    hook = linear.register_forward_pre_hook(
        lambda _, args: found.append(carried_by(args[0], cast) is not None)
    )
    yield found
    hook.remove()


def test_a_demoted_mlp_linear_takes_its_mlp_out_of_one_function(tmp_path):
    t = Trainer(healing_run(tmp_path))
    mlp = t.model.model.layers[0].mlp
    up = "model.layers.0.mlp.up_proj"
    rows = heal.Precision(t.model, t.plan)
    assert rows.apply([up]) and not rows.apply([up])
    assert mlp.recipe is None and mlp.up_proj.recipe is None and mlp.gate_proj.recipe is not None
    assert t.step_once().stepped
    rows.apply(["model.layers.0.mlp"])
    assert mlp.recipe is mlp.gate_proj.recipe is mlp.down_proj.recipe is None
    rows.apply(["model.layers.0.self_attn.o_proj"])
    attention = t.model.model.layers[0].self_attn
    core = attention.core
    assert attention.o_proj.recipe is None
    assert core.recipe is not None and mlp.recipe is not None
    with carried_to(attention.o_proj) as found:
        assert t.step_once().stepped
    assert found == [False]  # what attention gives is not cast for a reader in high precision
    rows.apply([])
    with carried_to(attention.o_proj) as found:
        assert t.step_once().stepped
    assert found == [True]
    for row in t.plan.rows:
        module = t.model.get_submodule(row.name)
        assert module.__dict__.get("recipe", row.recipe) is row.recipe


def test_a_demoted_row_is_promoted_again(tmp_path):
    run = healing_run(tmp_path, heal={"after": 3, "promote_after": 5})
    t = poison_row(Trainer(run), after=6)
    module, seen = t.model.get_submodule(ROW), {}
    step_once = t.step_once

    def watched():
        result = step_once()
        seen.setdefault(result.step, []).append(module.recipe is not None)
        if len(seen[result.step]) == 2 and result.step >= 6:
            module._forward_hooks.clear()  # the fault is over
        return result

    t.step_once = watched
    t.run(quiet=True)
    assert [seen[n][-1] for n in range(5, 17)] == [False] * 5 + [True] * 7
    assert "until step 9" in read_metrics(run.out).of("heal")[0]["text"]


# ---- exploding steps ----


@pytest.mark.parametrize("preset", ["fp32", "fp8", "fp8-lean"])
def test_an_exploding_step_changes_nothing(tmp_path, preset):
    t = Trainer(healing_run(tmp_path, preset, heal={"loss_rise": 2.0}))
    for _ in range(5):
        assert t.step_once().stepped
    before = everything(t, "data", "progress", "random", "health")
    hook = t.model.model.norm.register_forward_hook(lambda m, x, y: y * 300)
    result = t.step_once()
    hook.remove()
    assert not result.stepped and math.isfinite(result.loss) and result.first_bad is None
    assert "the loss is" in result.cause and "is usual" in result.cause
    after = everything(t, "data", "progress", "random", "health")
    before["schedule"].pop("skipped"), after["schedule"].pop("skipped")
    if preset == "fp8-lean":  # moments count a skipped step, and take it off again
        before.pop("optimizer"), after.pop("optimizer")
    assert_same(before, after)
    assert t.step_once().stepped and t.health.bad_in_a_row == 0


def test_an_exploding_gradient_norm_changes_nothing(tmp_path):
    t = Trainer(healing_run(tmp_path, "fp8", heal={"norm_factor": 50.0}))
    for _ in range(5):
        t.step_once()
    before = weights(t)
    hook = t.model.lm_head.weight.register_hook(lambda g: g * 1e4)
    result = t.step_once()
    hook.remove()
    assert not result.stepped and result.cause.startswith("the gradient norm is")
    assert_same(before, weights(t))


@pytest.mark.parametrize("times", [1, 2])
def test_weights_thrown_off_course_come_back_and_a_second_time_the_rate_is_lower(tmp_path, times):
    t = Trainer(healing_run(tmp_path, "fp8", heal={"after": 3, "loss_rise": 1.0}))
    step_once = t.step_once

    def thrown():
        if t.step == 9 and t.health.rollbacks < times:
            with torch.no_grad():
                t.model.model.norm.weight.mul_(200.0)
        return step_once()

    t.step_once = thrown
    result = t.run(quiet=True)
    first, *more = read_metrics(t.config.out).of("heal")
    assert (first["step"], first["to"], first["row"], first["lr"]) == (12, 8, None, 3e-3)
    assert "the data moves on" in first["text"] and len(more) == times - 1
    if more:
        assert more[0]["lr"] == pytest.approx(1.5e-3) and "0.5 times" in more[0]["text"]
    assert t.health.lr_scale == 0.5 ** (times - 1)
    assert result.step == 16 and result.loss < 5.2
    assert [s for s, _ in checkpoints(t.checkpoints)][:2] == [16, 12]


# ---- broken weights and moments ----


def break_state(t, kind, value):
    """Write `value` into one weight, scale or moment of ROW (a scale: of the first row with one)."""
    p = t.model.get_parameter(f"{ROW}.weight")
    if kind == "scale":
        p = next(q for q in t.parameters if getattr(q, "scale", None) is not None)
    state = t.optimizer.state[p]
    target = {"weight": p.data, "moment": state["m"], "scale": getattr(p, "scale", None)}[kind]
    if target.element_size() == 1:
        target.view(torch.uint8).view(-1)[3] = 0x7F  # NaN in e4m3
    else:
        target.view(-1)[0] = value


@pytest.mark.parametrize(
    "preset, kind", [("fp8", "weight"), ("fp8", "moment"), ("fp8-lean", "weight"),
                     ("fp8-lean", "moment"), ("fp8-lean", "scale"), ("bf16", "moment")],
)  # fmt: skip
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_broken_is_named_and_what_is_not_is_not(tmp_path, preset, kind, value):
    t = Trainer(healing_run(tmp_path, preset))
    t.step_once()
    assert broken_state(t) == ""
    break_state(t, kind, value)
    named = broken_state(t)
    assert named.endswith("proj") or f"{ROW}.weight" in named
    assert ("optimizer's m of" in named) == (kind == "moment")


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean"])
def test_what_is_broken_is_never_saved(tmp_path, preset):
    """Broken inside the very step that is saved: no loss has shown it yet."""
    t = Trainer(healing_run(tmp_path, preset))
    step_once, broken = t.step_once, []

    def breaking():
        result = step_once()
        if t.step == 8 and not broken:
            broken.append(break_state(t, "weight", math.nan))
        return result

    t.step_once = breaking
    result = t.run(quiet=True)
    metrics = read_metrics(t.config.out)
    (line,) = metrics.of("heal")
    assert (line["step"], line["to"], line["row"], line["lr"]) == (8, 4, None, 3e-3)
    assert f"{ROW}.weight holds numbers that are not finite" in line["text"]
    assert "the weights were broken" in line["text"]
    assert result.step == 16 and all(x["stepped"] for x in metrics.of("step"))
    assert all(bool(torch.isfinite(w.float()).all()) for w in weights(t).values())


def test_broken_and_told_to_stop_it_keeps_the_checkpoint_before(tmp_path):
    t = Trainer(healing_run(tmp_path))
    step_once = t.step_once

    def breaking():
        result = step_once()
        if t.step == 6:
            break_state(t, "moment", math.nan)
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    t.step_once = breaking
    result = t.run(quiet=True)
    assert result.exit_code == 143 and [s for s, _ in checkpoints(t.checkpoints)] == [4]
    (event,) = read_metrics(t.config.out).of("event")
    assert event["text"].startswith("not saved: the optimizer's m of")


# ---- when it cannot ----


def test_after_so_many_times_it_stops_with_the_diagnosis(tmp_path):
    run = healing_run(tmp_path, heal={"after": 3, "rollbacks": 2}, train={"checkpoint_every": 2})
    t = poison_row(Trainer(run), after=4, always=True)
    with pytest.raises(TrainingError, match="after going back 2 times") as e:
        t.run(quiet=True)
    text = str(e.value)
    assert "\n" not in text and f"precision.keep={ROW}" in text and "ottava diagnose" in text
    metrics = read_metrics(run.out)
    assert [x["row"] for x in metrics.of("heal")] == [ROW, None]  # then only the rate is left
    assert metrics.of("end")[-1]["status"] == "failed"
    assert all(bool(torch.isfinite(w.float()).all()) for w in weights(t).values())


def test_without_a_checkpoint_skipped_steps_cost_nothing(tmp_path):
    run = healing_run(tmp_path, steps=10, train={"checkpoint_every": 0, "eval_batches": 0})
    t = poison_row(Trainer(run), after=4)
    t.run(quiet=True)
    (line,) = read_metrics(run.out).of("heal")
    assert (line["step"], line["to"], line["row"]) == (7, 7, ROW)
    assert "kept the weights as they are" in line["text"] and t.step == 10 and t.skipped == 3


def test_a_loss_scale_may_take_more_steps(tmp_path):
    assert Trainer(healing_run(tmp_path, "amp-fp16")).health.after == 50


def test_a_checkpoint_in_the_middle_of_bad_steps_is_not_gone_back_to(tmp_path):
    t = poison_row(Trainer(healing_run(tmp_path)), after=7)
    t.run(quiet=True)
    (line,) = read_metrics(t.config.out).of("heal")
    assert (line["step"], line["to"]) == (10, 4)  # not 8, which was saved after a bad step
    assert (t.checkpoints / "unused-step-00000008").is_dir()


# ---- the row at fault ----


def test_the_row_that_clips_most_is_at_fault_where_nothing_is_not_finite(tmp_path):
    t = Trainer(healing_run(tmp_path))
    result = replace(t.step_once(), first_bad=None)
    assert heal.at_fault(t, result) is None
    other = "model.layers.0.self_attn.qkv_proj"
    look = {
        "rows": {
            ROW: {"input": {"saturated": 0.03, "underflowed": 0.2}, "output": {"error_db": 9.0}},
            other: {"grad_output": {"saturated": 0.0, "underflowed": 0.9}},
            "lm_head": {"input": {"saturated": 0.9, "underflowed": 0.0}},
        }
    }
    t.health.look_at(look)
    assert heal.at_fault(t, result) == (other, "90.0% of its grad_output underflowed")
    t.switches.changes.append(Change(row=other, since=0, until=None, reason=""))
    assert heal.at_fault(t, result) == (ROW, "3.0% of its input saturated")
    named = replace(result, first_bad=("model.layers.0.mlp.up_proj.weight", "gradient"))
    assert heal.at_fault(t, named)[0] == "model.layers.0.mlp.up_proj"
    named = replace(result, first_bad=("model.layers.0.mlp.act_fn", "output"))
    assert heal.at_fault(t, named)[0] == "model.layers.0.mlp"
    assert heal.at_fault(Trainer(healing_run(tmp_path, "amp")), named) is None


# ---- deterministic and resumable ----


class Killed(BaseException):
    pass


def lines(folder):
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "stepped", "cause", "first_bad", "text",
            "to", "row", "position", "rollbacks", "high", "path", "kind")  # fmt: skip
    metrics = read_metrics(folder)
    assert not metrics.problems
    found = [x for x in metrics.lines if x["kind"] in ("step", "save", "heal", "eval")]
    return [{k: str(x[k]) for k in kept if k in x} for x in found]


@pytest.mark.parametrize("kills", [[8], [9, 12]])
def test_killed_anywhere_it_heals_in_the_same_way(tmp_path, kills):
    def made(out):
        run = healing_run(
            tmp_path, out=out, ema={"decay": 0.9}, steps=14, precision={"recipe": "delayed"}
        )
        return poison_data(poison_row(Trainer(run), after=6), 27, 27)

    straight = made("straight")
    straight.run(quiet=True)
    taken, limits = 0, [*kills, 10**9]
    while limits:
        t = made("killed")
        step_once = t.step_once

        def counted(step_once=step_once):
            nonlocal taken
            if taken >= limits[0]:
                raise Killed
            taken += 1
            return step_once()

        t.step_once = counted
        try:
            t.run(quiet=True)
        except Killed:
            path = t.config.out + "/run.jsonl"
            with open(path) as f:
                kept = [line for line in f if '"kind": "end"' not in line]
            with open(path, "w") as f:  # a killed process writes no end line
                f.writelines(kept)
        limits.pop(0)
    assert_same(everything(straight, "run"), everything(t, "run"))
    assert lines(straight.config.out) == lines(t.config.out)
    ends = [Checkpoint.open(x.checkpoints / "step-00000014") for x in (straight, t)]
    assert same(ends[0].tensors("model"), ends[1].tensors("model"))
    assert straight.health.rollbacks == t.health.rollbacks == 1


def test_a_run_without_faults_does_not_know_that_it_could_heal(tmp_path):
    off = {"heal": {"after": 10**6, "loss_rise": 0.0, "norm_factor": 0.0}}
    a = Trainer(tiny_run(tmp_path, "fp8"))
    b = Trainer(tiny_run(tmp_path, "fp8", **off))
    for _ in range(4):
        assert a.step_once().loss == b.step_once().loss
    assert_same(weights(a), weights(b))
