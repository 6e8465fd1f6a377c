"""What is wrong with a run, from its run.jsonl alone: each finding with its evidence and a setting.

CHECKS lists everything that is looked at; what is not in it is not looked at. A finding is a reason
to look, not a proof: the evidence is there so that you can judge it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .metrics import Metrics, read_metrics

_SATURATED = 0.01  # share of a tensor at the format's largest value that is worth a word
_UNDERFLOWED = 0.25  # share of non-zero values that became zero
_LEAST_STEPS = 20  # fewer say nothing about a trend


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`level`: "error" (the run is lost or will be), "warning" (look at it) or "note"."""

    level: str
    check: str
    what: str
    evidence: str
    change: str


@dataclass(frozen=True)
class Facts:
    """What the checks read. `loss`: (step, nats per token) of every step line, non-finite ones too."""

    metrics: Metrics
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    loss: list[tuple[int, float]]

    @property
    def preset(self) -> str:
        """The preset's name, or ""."""
        return self.config.get("train", {}).get("preset", "")

    @property
    def fp8(self) -> bool:
        """Whether the run computes in FP8."""
        return self.preset.startswith("fp8")


def diagnose(folder: str | Path) -> list[Finding]:
    """The findings of a run's folder (or run.jsonl), the worst first; empty when nothing is wrong.

    Raises FileNotFoundError when there is no run.jsonl, ValueError when it holds no line of a run.
    """
    metrics = read_metrics(folder)
    if not metrics.lines:
        if metrics.problems and "no such file" in metrics.problems[0]:
            raise FileNotFoundError(f"{folder}: holds no run.jsonl; give the folder of a run")
        raise ValueError(f"{folder}: run.jsonl holds no line of a run")
    starts, steps = metrics.of("start"), metrics.of("step")
    config = starts[-1].get("config") if starts else None
    loss = [(x["step"], float(x["loss"])) for x in steps if isinstance(x.get("loss"), int | float)]
    facts = Facts(metrics, config if isinstance(config, dict) else {}, steps, loss)
    found = [f for check in CHECKS.values() for f in check(facts)]
    return sorted(found, key=lambda f: ("error", "warning", "note").index(f.level))


def _end(facts: Facts) -> Iterator[Finding]:
    """how the run ended"""
    ends = facts.metrics.of("end")
    if not ends:
        yield Finding(
            level="note",
            check="end",
            what="the run has not ended, or was killed",
            evidence=f"no end line; last line is of step {facts.metrics.lines[-1]['step']}",
            change="the same command continues it from its last checkpoint",
        )
    elif ends[-1].get("status") == "failed":
        yield Finding(
            level="error",
            check="end",
            what="the run failed",
            evidence=str(ends[-1].get("reason", "no reason given")),
            change="see the reason",
        )


def _unreadable(facts: Facts) -> Iterator[Finding]:
    """lines that cannot be read"""
    if facts.metrics.problems:
        yield Finding(
            level="note",
            check="unreadable",
            what=f"{len(facts.metrics.problems)} line(s) of run.jsonl were left out",
            evidence=facts.metrics.problems[0],
            change="nothing, if the run was killed",
        )


def _non_finite(facts: Facts) -> Iterator[Finding]:
    """a loss that is not finite"""
    bad = [step for step, loss in facts.loss if not math.isfinite(loss)]
    if not bad:
        return
    early = bad[0] <= max(10, facts.config.get("optimizer", {}).get("warmup_steps", 0))
    if facts.preset == "amp-fp16":
        change = "scaler.init_scale=256" if early else "scaler.max_scale=65536, or train.preset=amp"
    elif early:
        change = "a lower optimizer.lr, or optimizer.warmup_steps=100"
        change += "; precision.start_fp8_at=0.1" if facts.fp8 else ""
    else:
        change = "optimizer.clip_norm=1 and a lower optimizer.lr"
        change += "; precision.recipe=block or precision.first_last_high=true" if facts.fp8 else ""
    yield Finding(
        level="error",
        check="non-finite",
        what=f"the loss is not finite from step {bad[0]} on ({len(bad)} of {len(facts.loss)} steps)",
        evidence=f"steps {', '.join(map(str, bad[:5]))}{' ...' if len(bad) > 5 else ''}",
        change=change,
    )


def _skipped(facts: Facts) -> Iterator[Finding]:
    """steps that changed nothing (skipped)"""
    skipped = [x for x in facts.steps if x.get("stepped") is False]
    if not skipped:
        return
    streak = longest = 0
    for x in facts.steps:
        streak = streak + 1 if x.get("stepped") is False else 0
        longest = max(longest, streak)
    causes = Counter(str(x.get("cause") or "no cause given") for x in skipped)
    share = len(skipped) / len(facts.steps)
    settling = facts.preset == "amp-fp16" and len(skipped) <= 20 and skipped[-1]["step"] <= 50
    level = "note" if settling else "error" if longest >= 10 or share > 0.5 else "warning"
    if settling:
        change = "nothing: the loss scale is finding its size; a lower scaler.init_scale skips less"
    elif facts.preset == "amp-fp16":
        change = "scaler.growth_interval=2000 and scaler.max_scale=65536, or train.preset=amp"
    else:
        change = "a lower optimizer.lr, or optimizer.clip_norm=1"
        change += ", or keep the layer that the cause names in precision.keep" if facts.fp8 else ""
    yield Finding(
        level=level,
        check="skipped",
        what=f"{len(skipped)} of {len(facts.steps)} steps were skipped, {longest} in a row at most",
        evidence="; ".join(f"{n} x {cause}" for cause, n in causes.most_common(3)),
        change=change,
    )


def _trend(facts: Facts) -> Iterator[Finding]:
    """a loss that never falls, or falls and rises again"""
    values = [loss for _, loss in facts.loss if math.isfinite(loss)]
    if len(values) < _LEAST_STEPS:
        return
    tenth = max(len(values) // 10, 5)
    means = [fmean(values[i : i + tenth]) for i in range(0, len(values) - tenth + 1, tenth)]
    first, last, least = means[0], means[-1], min(means)
    norms = [x["grad_norm"] for x in facts.steps if isinstance(x.get("grad_norm"), float)]
    vanishing = bool(norms) and median(norms) < 1e-6
    if last > first - 0.01 * abs(first) and least > first - 0.02 * abs(first):
        yield Finding(
            level="warning",
            check="trend",
            what="the loss does not fall",
            evidence=f"{first:.3f} over the first {tenth} steps, {last:.3f} over the last"
            + (f"; median gradient norm {median(norms):.1e}" if norms else ""),
            change="a gradient norm near 0: look for underflow (precision.recipe=block)"
            if vanishing
            else "optimizer.lr: try a tenth and ten times it",
        )
    elif last > least + 0.1 * abs(least):
        yield Finding(
            level="warning",
            check="trend",
            what="the loss fell and rose again",
            evidence=f"{least:.3f} at its best over {tenth} steps, {last:.3f} over the last",
            change="a lower optimizer.lr, or optimizer.clip_norm=1",
        )


def _gradients(facts: Facts) -> Iterator[Finding]:
    """gradient norms far above their median"""
    norms = [
        (x["step"], float(x["grad_norm"]))
        for x in facts.steps
        if isinstance(x.get("grad_norm"), int | float) and math.isfinite(x["grad_norm"])
    ]
    if len(norms) < _LEAST_STEPS:
        return
    middle = median(n for _, n in norms)
    high = [(s, n) for s, n in norms[len(norms) // 10 :] if middle > 0 and n > 10 * middle]
    if high:
        step, worst = max(high, key=lambda sn: sn[1])
        yield Finding(
            level="warning",
            check="gradients",
            what=f"{len(high)} gradient norm(s) above ten times the median",
            evidence=f"{worst:.3g} at step {step}; the median is {middle:.3g}",
            change=f"optimizer.clip_norm={float(f'{2 * middle:.1g}'):g}, or a longer warm-up",
        )


def _casts(facts: Facts) -> Iterator[Finding]:
    """saturation and underflow of 8-bit casts, where the run recorded them"""
    for name, limit, word, change in (
        ("saturation", _SATURATED, "sit at the format's largest value",
         "precision.keep it, or precision.recipe=block (delayed scaling reacts late)"),
        ("underflow", _UNDERFLOWED, "became zero in their 8-bit cast",
         "precision.recipe=block or row, whose scales follow smaller parts"),
    ):  # fmt: skip
        worst: dict[str, float] = {}
        for line in facts.metrics.lines:
            shares = line.get(name)
            shares = {"all": shares} if isinstance(shares, int | float) else shares
            for tensor, share in (shares or {}).items():
                if isinstance(share, int | float) and share > limit:
                    worst[tensor] = max(worst.get(tensor, 0.0), float(share))
        if worst:
            tensor, share = max(worst.items(), key=lambda item: item[1])
            yield Finding(
                level="warning",
                check="casts",
                what=f"values of {len(worst)} tensor(s) {word}",
                evidence=f"{share:.1%} of {tensor} at its worst",
                change=change,
            )


def _scale(facts: Facts) -> Iterator[Finding]:
    """a loss scale stuck at its floor"""
    floor = facts.config.get("scaler", {}).get("min_scale")
    scales = [x["scale"] for x in facts.steps if isinstance(x.get("scale"), int | float)]
    if floor and len(scales) >= 3 and all(s <= floor for s in scales[-3:]):
        yield Finding(
            level="warning",
            check="scale",
            what="the loss scale is at its floor",
            evidence=f"scale {scales[-1]:g} with scaler.min_scale={floor:g}",
            change="train.preset=amp: BF16 has FP32's range and needs no scale",
        )


def _overfitting(facts: Facts) -> Iterator[Finding]:
    """a validation loss that rises while the training loss falls"""
    steps, losses = facts.metrics.series("eval", "loss")
    losses = [x for x in losses if math.isfinite(x)]
    train = [x for _, x in facts.loss if math.isfinite(x)]
    if len(losses) < 3 or len(train) < _LEAST_STEPS or len(losses) != len(steps):
        return
    best = min(losses)
    half = len(train) // 2
    if losses[-1] > best * 1.02 and fmean(train[half:]) < fmean(train[:half]):
        yield Finding(
            level="note",
            check="overfitting",
            what="the validation loss rises while the training loss falls",
            evidence=f"{best:.3f} at step {steps[losses.index(best)]}, {losses[-1]:.3f} at the end",
            change="more data, fewer steps, or a higher optimizer.weight_decay",
        )


CHECKS: dict[str, Callable[[Facts], Iterator[Finding]]] = {
    "end": _end,
    "unreadable": _unreadable,
    "non-finite": _non_finite,
    "skipped": _skipped,
    "trend": _trend,
    "gradients": _gradients,
    "casts": _casts,
    "scale": _scale,
    "overfitting": _overfitting,
}
