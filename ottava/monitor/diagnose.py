"""What is wrong with a run, from its run.jsonl alone: symptom, evidence, cause, and a setting.

RULES is everything that is looked at, as data; what is not in it is not looked at. A finding is a
reason to look, not a proof: the evidence is there so that you can judge it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import inside, outcome, stability
from .facts import LEVELS, Facts, Finding, Rule, Seen
from .metrics import Metrics, read_metrics

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (*stability.RULES, *inside.RULES, *outcome.RULES)
}


def diagnose(folder: str | Path, against: str | Path | None = None) -> list[Finding]:
    """The findings of a run's folder (or run.jsonl), the worst first; empty when nothing is wrong.

    against: a run in higher precision on the same data, for table 6.3. Raises FileNotFoundError when
    there is no run.jsonl, ValueError when it holds no line of a run.
    """
    baseline = None if against is None else Facts(_read(against))
    return findings(Facts(_read(folder), baseline))


def findings(facts: Facts, rules: Iterable[Rule] = tuple(RULES.values())) -> list[Finding]:
    """What `rules` say about a run; a rule is silent where one that it names in `unless` speaks."""
    rules = tuple(rules)
    seen: dict[str, Seen] = {}
    for rule in rules:
        evidence = rule.evidence(facts)
        if evidence is not None:
            seen[rule.name] = evidence
    spoken = [r for r in rules if r.name in seen and not any(u in seen for u in r.unless)]
    found = [
        Finding(
            level=r.level, rule=r.name, source=r.source, symptom=r.symptom,
            evidence=seen[r.name].text, cause=r.cause,
            setting=r.setting.format(**seen[r.name].values),
        )
        for r in spoken
    ]  # fmt: skip
    return sorted(found, key=lambda f: LEVELS.index(f.level))


def _read(folder: str | Path) -> Metrics:
    metrics = read_metrics(folder)
    if not metrics.lines:
        if metrics.problems and "no such file" in metrics.problems[0]:
            raise FileNotFoundError(f"{folder}: holds no run.jsonl; give the folder of a run")
        raise ValueError(f"{folder}: run.jsonl holds no line of a run")
    return metrics
