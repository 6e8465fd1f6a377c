"""The plan in force, as a function of the step: one list of changes, saved in every checkpoint.

A late start of 8-bit compute, its early finish, a row that was demoted and one that is promoted
again are the same thing: rows that compute in high precision for a range of steps, and why.

    Switches(run, plan)          what the run file asks for; demotions come in as they happen
    .high(step)                  row -> reason, for the step after `step` steps
    .plan_at(step)               the plan with those rows demoted
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..config import Run
from ..numerics.policy import Plan

ALL = "*"  # every row of the plan


@dataclass(frozen=True, kw_only=True)
class Change:
    """`row` (or ALL) computes in high precision after step `since`, until step `until` (None: for
    good)."""

    row: str
    since: int
    until: int | None
    reason: str

    def holds(self, step: int) -> bool:
        """Whether it is in force for the step after `step` steps."""
        return self.since <= step and (self.until is None or step < self.until)


class Switches:
    """All changes of a run. Plain data: nothing of the model."""

    def __init__(self, run: Run, plan: Plan | None) -> None:
        self.plan = plan
        self.asked = {
            "start_fp8_at": run.precision.start_fp8_at,
            "finish_bf16_at": run.precision.finish_bf16_at,
        }
        self.changes: list[Change] = []
        steps = run.train.steps
        # the first step that is 8-bit is the first with start * steps <= step, and so on
        start = _ceil(self.asked["start_fp8_at"] * steps)
        finish = _ceil(self.asked["finish_bf16_at"] * steps)
        if plan is not None and start > 0:
            reason = f"precision.start_fp8_at={self.asked['start_fp8_at']:g}"
            self.changes.append(Change(row=ALL, since=0, until=start, reason=reason))
        if plan is not None and finish < steps:
            reason = f"precision.finish_bf16_at={self.asked['finish_bf16_at']:g}"
            self.changes.append(Change(row=ALL, since=finish, until=None, reason=reason))

    def eight_bit(self, step: int) -> bool:
        """Whether anything is 8-bit in the step after `step` steps."""
        whole = any(c.row == ALL and c.holds(step) for c in self.changes)
        return self.plan is not None and not whole

    def demoted(self, step: int) -> dict[str, str]:
        """Single rows in high precision for the step after `step` steps, and why."""
        return {c.row: c.reason for c in self.changes if c.row != ALL and c.holds(step)}

    def high(self, step: int) -> dict[str, str]:
        """Every row of the plan that is 8-bit by itself and not in this step, and why not."""
        if self.plan is None:
            return {}
        rows = {r.name for r in self.plan.rows if r.recipe}
        whole = [c.reason for c in self.changes if c.row == ALL and c.holds(step)]
        found = dict.fromkeys(sorted(rows), whole[0]) if whole else {}
        return found | {row: why for row, why in self.demoted(step).items() if row in rows}

    def plan_at(self, step: int) -> Plan | None:
        """The plan in force for the step after `step` steps."""
        plan = self.plan
        for row, reason in self.high(step).items():
            plan = plan and plan.demote(row, reason)
        return plan

    def said(self, step: int) -> list[str]:
        """What is different in the step after `step` steps from the one before it, in words."""
        was, now = self.eight_bit(step - 1), self.eight_bit(step)
        out = [] if was == now else [f"from step {step + 1} on: {'FP8' if now else 'BF16'} compute"]
        gone = self.demoted(step - 1).keys() - self.demoted(step).keys()
        return out + [f"from step {step + 1} on: {row} is 8-bit again" for row in sorted(gone)]

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "changes": [asdict(c) for c in self.changes]}

    def load_state_dict(self, state: dict[str, Any], step: int) -> list[str]:
        """Take over what was in force in the first `step` steps; returns what that overrules.

        Demotions stay. Of the run file's own switches those still to come are this run's; 8-bit
        compute that had begun does not end again because a run got longer.
        """
        stored = [Change(**c) for c in state["changes"]]
        own, notes = [c for c in self.changes if c.row == ALL], []
        same = state["asked"]["start_fp8_at"] == self.asked["start_fp8_at"]
        began = next((c.until for c in stored if c.row == ALL and c.since == 0 and c.until), 0)
        if same and began <= step:
            late = [c for c in own if c.row == ALL and c.since == 0 and c.until]
            kept = [c for c in stored if c.row == ALL and c.since == 0 and c.until]
            if late and late[0].until != began:
                notes.append(f"8-bit compute has begun after step {began}, and goes on")
            own = kept + [c for c in own if c not in late]
        self.changes = own + [c for c in stored if c.row != ALL]
        return notes


def _ceil(x: float) -> int:
    return -int(-x // 1)
