"""What a run does about bad steps: it skips them, and after too many in a row it goes back.

A step is bad when its loss or gradients are not finite, or when they explode: far above the medians
of the last WINDOW good steps. A bad step changes nothing (see trainer.py). After `heal.after` of
them in a row the run goes back to the newest checkpoint that was saved in good health, with the data
moved on past what it has seen, and with one thing changed: the 8-bit row at fault computes in high
precision from now on (see switches.py). Where no row is at fault, new data is the change the first
time, and a lower learning rate every time after that. After `heal.rollbacks` times it stops.

Everything that decides is in the checkpoint, so a run that is killed and continued heals in the same
way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import nn

from ..config import Run
from ..monitor.stability import row_of
from ..numerics.policy import Plan
from . import checkpoint, resume
from .switches import ALL, Change

if TYPE_CHECKING:
    from .result import StepResult
    from .trainer import Trainer

WINDOW = 50  # good steps whose medians say what is usual
LEAST = 20  # of them before anything counts as an explosion
LEAST_WITH_LOSS_SCALE = 50  # bad steps in a row: more than the scale needs to find its floor
SATURATED, UNDERFLOWED = 0.01, 0.25  # shares of an operand that make its row the one at fault


class Incurable(RuntimeError):
    """The run cannot heal any more. Carries one line."""


class Health:
    """How a run is doing. Holds nothing of the model: numbers and names only."""

    def __init__(self, run: Run) -> None:
        self.settings = run.heal
        self.after = run.heal.after
        if run.settings.compute == "autocast-fp16":
            self.after = max(self.after, LEAST_WITH_LOSS_SCALE)
        self.bad_in_a_row = self.rollbacks = 0
        self.lr_scale = 1.0
        self.suspects: list[tuple[str, str]] = []  # rows that clip or lose too much, worst first
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)

    # ---- bad steps ----

    @property
    def loss_limit(self) -> float:
        """A loss above this explodes; inf while nothing is known, or when that is off."""
        rise = self.settings.loss_rise
        return median(self.losses) + rise if rise and len(self.losses) >= LEAST else math.inf

    @property
    def norm_limit(self) -> float:
        """A gradient norm above this explodes."""
        factor = self.settings.norm_factor
        return median(self.norms) * factor if factor and len(self.norms) >= LEAST else math.inf

    def explosion(self, loss: float, norm: float) -> str:
        """Why a finite step is bad; "" where it is not."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return ""
        if loss > self.loss_limit:
            return f"the loss is {loss:.4g}, and {median(self.losses):.4g} is usual"
        if norm > self.norm_limit:
            return f"the gradient norm is {norm:.4g}, and {median(self.norms):.4g} is usual"
        return ""

    def note(self, loss: float, norm: float, bad: bool) -> None:
        """Count a step, and remember a good one's numbers."""
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0
        if not bad:
            self.losses.append(loss)
            self.norms.append(norm)

    def look_at(self, observed: dict[str, Any]) -> None:
        """Remember which rows clip or lose most in a step that was looked into (observe.py)."""
        found = []
        for row, operands in observed["rows"].items():
            for operand, seen in operands.items():
                for word, limit in (("saturated", SATURATED), ("underflowed", UNDERFLOWED)):
                    share = seen.get(word, 0.0)
                    if share > limit:
                        found.append((share / limit, row, f"{share:.1%} of its {operand} {word}"))
        self.suspects = [(row, why) for _, row, why in sorted(found, reverse=True)[:8]]

    @property
    def failing(self) -> bool:
        """Whether there were too many bad steps in a row."""
        return self.bad_in_a_row >= self.after

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "bad_in_a_row": self.bad_in_a_row,
            "rollbacks": self.rollbacks,
            "lr_scale": self.lr_scale,
            "suspects": [list(s) for s in self.suspects],
            "losses": list(self.losses),
            "norms": list(self.norms),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad_in_a_row, self.rollbacks = state["bad_in_a_row"], state["rollbacks"]
        self.lr_scale = state["lr_scale"]
        self.suspects = [(row, why) for row, why in state["suspects"]]
        self.losses = deque(state["losses"], maxlen=WINDOW)
        self.norms = deque(state["norms"], maxlen=WINDOW)


# ---- recipes of a live model ------------------------------------------------------------------


class Precision:
    """Puts rows of a converted model into high precision, and back."""

    def __init__(self, model: nn.Module, plan: Plan | None) -> None:
        self.plan = plan
        self._own = {}  # module name -> (module, its recipe under the plan)
        for row in plan.rows if plan else ():
            module = model.get_submodule(row.name)
            if "recipe" in module.__dict__:
                self._own[row.name] = module, module.__dict__["recipe"]
        self._now: frozenset[str] = frozenset()

    def apply(self, rows: Iterable[str]) -> bool:
        """Have exactly `rows` in high precision; whether that changed anything."""
        wanted = frozenset(rows)
        if wanted == self._now:
            return False
        high = self._with_dependents(wanted)
        for row, (module, own) in self._own.items():
            module.__dict__["recipe"] = None if row in high else own
        self._now = wanted
        return True

    def _with_dependents(self, rows: frozenset[str]) -> set[str]:
        """`rows` and those that run as one with them: a gated MLP and its three linears."""
        high = set(rows)
        for row in self.plan.rows:
            if row.kind == "mlp" and row.name in rows:
                high.update(row.parts)
            elif row.kind == "mlp" and rows.intersection(row.parts):
                high.add(row.name)
        return high


# ---- going back -------------------------------------------------------------------------------


def at_fault(trainer: Trainer, result: StepResult) -> tuple[str, str] | None:
    """(row, why) of the 8-bit row that a bad step is put down to: where numbers first were not
    finite, else the one that clips or loses most, as far as anyone looked. None where there is none.
    """
    demoted = trainer.switches.high(trainer.step)
    rows = {r.name for r in trainer.plan.rows if r.recipe} if trainer.plan else set()
    rows = {r for r in rows - set(demoted) if trainer.strategy.can_demote(r)}
    row, operand = row_of(result.first_bad)
    if operand == "weight":  # no cast did that
        return None
    while row and row not in rows:
        row = row.rpartition(".")[0]  # a part of it, such as a norm inside
    if row in rows and operand != "loss":
        return row, f"its {operand} was the first that was not finite"
    return next((s for s in trainer.health.suspects if s[0] in rows), None)


def heal(trainer: Trainer, result: StepResult) -> dict[str, Any]:
    """Go back, after too many bad steps in a row; what was done, as run.jsonl's "heal" line has it.

    Raises Incurable when the run has gone back often enough, or has nothing to go back to.
    """
    health, settings = trainer.health, trainer.config.heal
    failed_at = trainer.step
    why_now = (
        f"{health.after} bad steps in a row ({result.cause})" if health.failing else result.cause
    )
    if health.rollbacks >= settings.rollbacks:
        often = f"after going back {health.rollbacks} times" if health.rollbacks else "in a row"
        what = f"the {health.bad_in_a_row}th bad step {often}" if health.failing else often
        raise Incurable(f"{what} ({result.cause})")
    faults = trainer.strategy.collect(at_fault(trainer, result) if settings.demote else None)
    fault = next(filter(None, faults), None)  # ranks see different tokens
    target = trainer.strategy.on_main(_last_in_good_health, trainer.checkpoints)
    if target is None and result.stepped:
        raise Incurable(f"exploding steps, and no checkpoint to go back to ({result.cause})")
    position = trainer.data.train.position
    rollbacks, lr_scale = health.rollbacks, health.lr_scale
    decided = [c for c in trainer.switches.changes if c.row != ALL]
    if target is not None:
        trainer.strategy.on_main(checkpoint.set_aside_after, trainer.checkpoints, target.step)
        resume.restore(trainer, target)
        trainer.data.train.position = position
        trainer.capture_again()
    health.bad_in_a_row, health.rollbacks = 0, rollbacks + 1
    health.lr_scale = lr_scale
    switches = trainer.switches
    switches.changes += [c for c in decided if c not in switches.changes]
    until = trainer.step + settings.promote_after if settings.promote_after else None
    if fault is not None:
        row, why = fault
        reason = f"demoted at step {failed_at}: {why}"
        switches.changes.append(Change(row=row, since=trainer.step, until=until, reason=reason))
        changed = f"{row} computes in high precision" + (f" until step {until}" if until else "")
        changed += f" ({why})"
    elif target is not None and not rollbacks:
        broken = result.first_bad is not None and result.first_bad[1] == "weight"
        changed = (
            f"the weights were broken ({result.first_bad[0]})" if broken else "the data moves on"
        )
    else:
        health.lr_scale *= settings.lr_factor
        changed = f"the learning rate is {settings.lr_factor:g} times what it was"
    trainer.adopt_health()
    where = f"went back to step {trainer.step}" if target else "kept the weights as they are"
    return {
        "text": f"step {failed_at}: {why_now}; {where}; {changed}",
        "to": trainer.step,
        "row": fault[0] if fault else None,
        "lr": max(trainer.schedule.peaks),
        "position": position,
        "rollbacks": health.rollbacks,
        "high": sorted(switches.high(trainer.step)),
    }


def _last_in_good_health(folder) -> checkpoint.Checkpoint | None:
    """The newest whole checkpoint that was not saved in the middle of bad steps."""
    for _, path in checkpoint.checkpoints(folder):
        try:
            found = checkpoint.Checkpoint.open(path)
            if not found.section("health")["bad_in_a_row"]:
                return found
        except checkpoint.CheckpointError:
            continue
    return None
