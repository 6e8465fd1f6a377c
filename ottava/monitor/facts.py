"""What rules are made of: the facts of a run, what a rule saw in them, and what it then says.

A rule is data: a symptom, a function that looks for evidence, the likely cause, and the setting to
change as `section.key=value`, with places in braces that the evidence fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any

from ..numerics.preset import PRESETS
from .metrics import Metrics

LEVELS = ("error", "warning", "note")
LEAST_STEPS = 20  # fewer say nothing about a trend


@dataclass(frozen=True)
class Seen:
    """Evidence: numbers, steps and rows in words, and the values for the setting's braces."""

    text: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`source`: where the fault is described. `unless`: rules that, where they apply, explain this
    symptom better."""

    name: str
    source: str
    level: str
    symptom: str
    evidence: Callable[[Facts], Seen | None]
    cause: str
    setting: str
    unless: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule says about a run: plain text. `level`: "error" (the run is lost or will be),
    "warning" (look at it) or "note". `setting`: to paste behind `ottava train run.toml`."""

    level: str
    rule: str
    source: str
    symptom: str
    evidence: str
    cause: str
    setting: str


@dataclass(frozen=True)
class Facts:
    """A run as its run.jsonl tells it; `baseline` is a run in higher precision to hold it against."""

    metrics: Metrics
    baseline: Facts | None = None

    @cached_property
    def start(self) -> dict[str, Any]:
        """The first line of the run as it is now, or {}."""
        starts = self.metrics.of("start")
        return starts[-1] if starts else {}

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Step lines in order; of a step taken again after going back, the last."""
        by_step = {x["step"]: x for x in self.metrics.of("step")}
        return [by_step[s] for s in sorted(by_step)]

    @cached_property
    def losses(self) -> list[tuple[int, float]]:
        """(step, nats per token), only finite ones."""
        return [(s, x) for s, x in self.numbers("loss") if math.isfinite(x)]

    @cached_property
    def norms(self) -> list[tuple[int, float]]:
        """(step, gradient norm), only finite ones."""
        return [(s, x) for s, x in self.numbers("grad_norm") if math.isfinite(x)]

    @cached_property
    def bad(self) -> list[dict[str, Any]]:
        """Lines of steps that were not taken, or whose loss is not finite."""
        return [x for x in self.steps if x.get("stepped") is False or _non_finite(x.get("loss"))]

    @cached_property
    def observed(self) -> list[dict[str, Any]]:
        """The steps that were looked into, as far as they are written as metrics.py says."""
        return [{**x, **_looks_of(x)} for x in self.metrics.of("observe")]

    def numbers(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a step line's field, where it is a number."""
        have = ((x["step"], x.get(name)) for x in self.steps)
        return [(s, float(v)) for s, v in have if isinstance(v, int | float)]

    def option(self, key: str, default: Any = None) -> Any:
        """A key of the run's configuration, such as "optimizer.lr"."""
        value: Any = self.start.get("config") or {}
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def preset(self) -> str:
        return str(self.option("train.preset", self.start.get("preset", "")))

    @property
    def fp8(self) -> bool:
        """Whether the run computes in FP8."""
        return self.preset.startswith("fp8")

    @property
    def fp16(self) -> bool:
        """Whether the run has a loss scale."""
        return self.preset == "amp-fp16"

    @property
    def on_gpu(self) -> bool:
        return str(self.start.get("device", "cpu")) != "cpu"

    @property
    def recipe(self) -> str:
        """The FP8 recipe's name, also where the preset chose it; "" without."""
        chosen = self.option("precision.recipe", "preset")
        preset = PRESETS.get(self.preset)
        return chosen if chosen != "preset" else (preset.recipe or "" if preset else "")

    @cached_property
    def tenths(self) -> list[float]:
        """Mean loss over each tenth of the run; [] for a run too short to have a trend."""
        values = [x for _, x in self.losses]
        if len(values) < LEAST_STEPS:
            return []
        size = max(len(values) // 10, 5)
        return [fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]

    @cached_property
    def flat(self) -> bool:
        """Whether the loss never fell."""
        if not self.tenths:
            return False
        first, last, least = self.tenths[0], self.tenths[-1], min(self.tenths)
        return last > first - 0.01 * abs(first) and least > first - 0.02 * abs(first)

    def worst(self, name: str, operands: tuple[str, ...] = ()) -> tuple[float, str, str, int]:
        """(value, row, operand, step) of the largest number `name` of any operand looked at."""
        found = (0.0, "", "", 0)
        for line in self.observed:
            for row, seen in (line.get("rows") or {}).items():
                for operand, values in seen.items():
                    value = values.get(name)
                    if operands and not operand.endswith(operands):
                        continue
                    if isinstance(value, int | float) and value > found[0]:
                        found = (float(value), row, operand, line["step"])
        return found

    def looks(
        self, row: str, operand: str, name: str, bad: Callable[[float], bool]
    ) -> tuple[int, int]:
        """(looks in which an operand's number is bad, looks that have it)."""
        values = []
        for line in self.observed:
            value = (line.get("rows") or {}).get(row, {}).get(operand, {}).get(name)
            if isinstance(value, int | float):
                values.append(float(value))
        return sum(map(bad, values)), len(values)

    def parameters(self, name: str) -> dict[str, list[float]]:
        """A parameter's number over the steps that were looked into."""
        out: dict[str, list[float]] = {}
        for line in self.observed:
            for parameter, values in (line.get("parameters") or {}).items():
                if isinstance(values.get(name), int | float):
                    out.setdefault(parameter, []).append(float(values[name]))
        return out

    @cached_property
    def typical_update(self) -> float | None:
        """Median change of a matrix in one step over its norm; None where nobody looked."""
        values = [v for own in self.parameters("update").values() for v in own]
        return median(values) if values else None


def _looks_of(line: dict[str, Any]) -> dict[str, dict]:
    """What a look holds by row, parameter and expert, without what is no numbers by name."""

    def named(x: Any) -> dict[str, dict]:
        return {k: v for k, v in x.items() if isinstance(v, dict)} if isinstance(x, dict) else {}

    rows = {row: named(operands) for row, operands in named(line.get("rows")).items()}
    return {"rows": rows} | {k: named(line.get(k)) for k in ("parameters", "experts")}


def _non_finite(x: Any) -> bool:
    return isinstance(x, float) and not math.isfinite(x)


def short(x: float) -> str:
    """A number in three digits, as a key's value is written."""
    return f"{float(f'{x:.3g}'):g}"


def listed(steps: list[int]) -> str:
    """The first few step numbers in words."""
    return ", ".join(map(str, steps[:5])) + (" ..." if len(steps) > 5 else "")
