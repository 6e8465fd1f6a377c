"""The plan in force is a function of the step: late start, early finish, demotion, re-promotion."""

import json
from dataclasses import replace

import pytest
from test_heal import ROW, healing_run, poison_row
from test_trainer import assert_same, everything
from tiny_run import tiny_run

from ottava.monitor.metrics import read_metrics
from ottava.train.checkpoint import Checkpoint
from ottava.train.switches import ALL, Change, Switches
from ottava.train.trainer import Trainer


def switches(plan, steps=10, start=0.0, finish=1.0, *changes):
    precision = {"start_fp8_at": start, "finish_bf16_at": finish}
    run = replace_run(steps, precision)
    made = Switches(run, plan)
    made.changes += changes
    return made


def replace_run(steps, precision):
    from ottava.config import Precision, Run, Train

    return Run(train=Train(steps=steps), precision=Precision(**precision))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return Trainer(tiny_run(tmp_path_factory.mktemp("plan"), "fp8")).plan


def test_start_finish_and_rows_are_one_list(plan):
    row = Change(row=ROW, since=4, until=6, reason="demoted at step 5")
    s = switches(plan, 10, 0.25, 0.75, row)  # 2.5 and 7.5: the first whole steps behind them
    assert [s.eight_bit(n) for n in range(10)] == [False] * 3 + [True] * 5 + [False] * 2
    rows = {r.name for r in plan.rows if r.recipe}
    assert [len(s.high(n)) for n in range(10)] == [len(rows)] * 3 + [0, 1, 1, 0, 0] + [
        len(rows)
    ] * 2
    for step in range(10):
        now = s.plan_at(step)
        for own, then in zip(plan.rows, now.rows, strict=True):
            high = own.name in s.high(step)
            assert then.recipe == (None if high else own.recipe)
            assert not high or then.reason == s.high(step)[own.name]
    assert s.plan_at(0)[ROW].reason == "precision.start_fp8_at=0.25"
    assert s.plan_at(5)[ROW].reason == "demoted at step 5"
    assert s.plan_at(9)[ROW].reason == "precision.finish_bf16_at=0.75"
    assert [s.said(n) for n in range(1, 10) if s.said(n)] == [
        ["from step 4 on: FP8 compute"], [f"from step 7 on: {ROW} is 8-bit again"],
        ["from step 9 on: BF16 compute"],
    ]  # fmt: skip


def test_without_a_plan_nothing_switches():
    s = switches(None, 10, 0.25, 0.75)
    assert s.changes == [] and s.plan_at(3) is None and not s.eight_bit(5) and s.said(3) == []


def test_state_is_plain_and_comes_back(plan):
    row = Change(row=ROW, since=4, until=None, reason="why")
    s = switches(plan, 10, 0.5, 1.0, row)
    state = json.loads(json.dumps(s.state_dict()))
    other = switches(plan, 10, 0.5, 1.0)
    assert other.load_state_dict(state, 6) == [] and other.changes == s.changes
    other.load_state_dict(state, 6)
    assert other.changes == s.changes  # once more changes nothing


@pytest.mark.parametrize(
    "step, start, begins, said",
    [
        (6, 0.5, 5, True),  # began after step 5, and a longer run does not end it
        (4, 0.5, 10, False),  # had not begun: the longer run's half
        (6, 0.8, 16, False),  # another wish is a wish
    ],
)
def test_a_longer_run_does_not_undo_what_has_begun(plan, step, start, begins, said):
    state = switches(plan, 10, 0.5, 0.9).state_dict()
    longer = switches(plan, 20, start, 0.9)
    notes = longer.load_state_dict(state, step)
    first = next(n for n in range(20) if longer.eight_bit(n))
    last = max(n for n in range(20) if longer.eight_bit(n))
    assert first == begins and last == 17 and bool(notes) == said
    assert sum(c.row == ALL for c in longer.changes) == 2


def test_a_run_stopped_anywhere_switches_at_the_same_steps(tmp_path):
    """Late start, a demotion with a way back, and an early finish, in one run."""

    def made(out, steps=14):
        sections = {
            "precision": {"start_fp8_at": 0.2, "finish_bf16_at": 0.9},
            "heal": {"after": 2, "promote_after": 4},
            "train": {"checkpoint_every": 2, "keep_last": 9, "eval_batches": 0},
        }
        return healing_run(tmp_path, out=out, steps=steps, **sections)

    def watched(t, seen):
        step_once, module = t.step_once, t.model.get_submodule(ROW)
        fault = poison_row(t, after=5)

        def step():
            if t.health.rollbacks:
                module._forward_hooks.clear()
            seen[t.step] = (t.in_eight_bits, ROW in t.switches.demoted(t.step))
            return step_once()

        fault.step_once = step
        return fault

    straight, seen = Trainer(made("straight")), {}
    watched(straight, seen).run(quiet=True)
    assert [n for n in seen if seen[n][0]] == list(range(3, 13))
    assert [n for n in seen if seen[n][1]] == [4, 5, 6, 7]
    texts = [x["text"] for x in read_metrics(straight.config.out).of("event")]
    assert texts == ["from step 4 on: FP8 compute", f"from step 9 on: {ROW} is 8-bit again",
                     "from step 14 on: BF16 compute"]  # fmt: skip
    stored = Checkpoint.open(straight.checkpoints / "step-00000006").section("switches")
    assert [c["row"] for c in stored["changes"]] == [ALL, ALL, ROW]
    # continued from the middle of the demotion
    run = made("other")
    run = replace(run, train=replace(run.train, resume=str(straight.checkpoints / "step-00000006")))
    other, again = Trainer(run), {}
    step_once = other.step_once
    other.step_once = lambda: (
        again.update({other.step: ROW in other.switches.demoted(other.step)}) or step_once()
    )
    other.run(quiet=True)
    assert again == {n: seen[n][1] for n in range(6, 14)}
    assert_same(everything(straight, "run"), everything(other, "run"))
