"""Rules for what was seen inside steps: casts, updates, moments, experts (see observe.py)."""

from __future__ import annotations

import math

from .facts import Facts, Rule, Seen, short
from .stability import gradient_recipe

SATURATED = 0.01  # share of an operand beyond the largest code that is worth a word
UNDERFLOWED = 0.25  # share of non-zero values that became zero
LEAST_DB = {"output": 10.0, "grad_output": 12.0}  # signal over noise; a good cast has 25 to 31
_OTHER_DB = 15.0


def _saturated(facts: Facts, delayed: bool) -> Seen | None:
    share, row, operand, step = facts.worst("saturated")
    if share <= SATURATED or (facts.recipe == "delayed") is not delayed:
        return None
    often, looks = facts.looks(row, operand, "saturated", lambda x: x > SATURATED)
    if often < min(2, looks):  # once, as at the start of delayed scaling, passes by itself
        return None
    return Seen(
        f"{share:.1%} of {row}'s {operand} were clipped at step {step}, and more than "
        f"{SATURATED:.0%} in {often} of {looks} looks",
        {"row": row},
    )


def _saturated_late(facts: Facts) -> Seen | None:
    return _saturated(facts, True)


def _saturated_row(facts: Facts) -> Seen | None:
    return _saturated(facts, False)


def _underflowed(facts: Facts) -> Seen | None:
    share, row, operand, step = facts.worst("underflowed")
    if share <= UNDERFLOWED:
        return None
    change = f"precision.recipe={gradient_recipe(facts)}"
    if facts.recipe == "block":
        change = f"precision.keep={row}"
    return Seen(f"{share:.1%} of {row}'s {operand} became zero at step {step}", {"change": change})


def _noisy(facts: Facts) -> Seen | None:
    worst = None
    for line in facts.observed:
        for row, operands in (line.get("rows") or {}).items():
            for operand, values in operands.items():
                db = values.get("error_db")
                if not isinstance(db, int | float):
                    continue
                room = db - LEAST_DB.get(operand, _OTHER_DB)
                if room < 0 and (worst is None or room < worst[0]):
                    worst = (room, db, row, operand, line["step"])
    if worst is None:
        return None
    _, db, row, operand, step = worst
    least = LEAST_DB.get(operand, _OTHER_DB)
    often, looks = facts.looks(row, operand, "error_db", lambda x: x < least)
    if often < min(2, looks):
        return None
    return Seen(
        f"the {operand} of {row} has {db:.1f} dB of signal over noise at step {step}; a good cast "
        "has 25 to 31",
        {"row": row},
    )


def _updates_lost(facts: Facts) -> Seen | None:
    norms, lr = facts.parameters("grad_norm"), float(facts.option("optimizer.lr", 1.0))
    updates = facts.parameters("update")
    still = [n for n, v in updates.items() if v[-1] < 1e-9 and norms.get(n, [0.0])[-1] > 0]
    if lr <= 0 or len(still) <= 0.1 * len(updates):
        return None
    return Seen(
        f"{len(still)} of {len(updates)} parameters, such as {still[0]}, have gradients and did not "
        "change in the step looked at"
    )


def _moments_lost(facts: Facts) -> Seen | None:
    first, second = facts.parameters("m_zero"), facts.parameters("v_zero")
    gaps = {n: first[n][-1] - second[n][-1] for n in first if n in second}
    if not gaps:
        return None
    name = max(gaps, key=lambda n: abs(gaps[n]))
    if abs(gaps[name]) < 0.3:
        return None
    return Seen(
        f"{first[name][-1]:.0%} of {name}'s first moment are zero and {second[name][-1]:.0%} of its "
        "second; they vanish together only where gradients do"
    )


def _experts(facts: Facts) -> Seen | None:
    if not facts.observed:
        return None
    loads = facts.observed[-1].get("experts") or {}
    bad = {n: e for n, e in loads.items() if e.get("idle", 0) > 0.5 or e.get("busiest", 0) > 16}
    if not bad:
        return None
    name, load = max(bad.items(), key=lambda x: x[1].get("busiest", 0))
    return Seen(
        f"in {name}, {load.get('idle', 0):.0%} of the experts got no token and one got "
        f"{load.get('busiest', 0):.1f} times the mean, at step {facts.observed[-1]['step']}"
    )


def _average_behind(facts: Facts) -> Seen | None:
    decay = float(facts.option("ema.decay", 0.0))
    evals = [
        x
        for x in facts.metrics.of("eval")
        if all(isinstance(x.get(k), int | float) for k in ("loss", "ema_loss"))
    ]
    if not decay or not evals:
        return None
    last = evals[-1]
    gap = last["ema_loss"] - last["loss"]
    steps = max(int(last["step"]), 1)
    if not gap > max(0.1, 0.03 * abs(last["loss"])):
        return None
    better = 1.0 - 10.0 / steps
    return Seen(
        f"validation loss {last['ema_loss']:.3f} with the running average, {last['loss']:.3f} "
        f"without, at step {steps}; ema.decay={decay:g} averages over {1 / (1 - decay):,.0f} steps",
        {"decay": short(better) if better > 0 else "0"},
    )


def _not_loaded(facts: Facts) -> Seen | None:
    vocab, path = facts.start.get("vocab"), facts.option("model.path", "")
    if not path or facts.option("model.random_init", False) or not facts.losses or not vocab:
        return None
    step, loss = facts.losses[0]
    chance = math.log(vocab)
    if step > 10 or loss < 0.9 * chance:
        return None
    return Seen(
        f"the loss of step {step} is {loss:.2f}, that of guessing among {vocab:,} ids is "
        f"{chance:.2f}",
        {"path": path},
    )


RULES = (
    Rule(
        name="saturation-of-late-scales", source="cases 86", level="warning",
        symptom="values are clipped at the format's largest code",
        evidence=_saturated_late, cause="delayed scaling reacts one step late",
        setting="precision.recipe=tensor",
    ),
    Rule(
        name="saturation", source="cases 86", level="warning",
        symptom="values are clipped at the format's largest code",
        evidence=_saturated_row, cause="the scale in force is too small for this row",
        setting="precision.keep={row}",
    ),
    Rule(
        name="underflow", source="cases 86", level="warning",
        symptom="values become zero in their 8-bit cast",
        evidence=_underflowed, cause="one scale covers values that lie too far apart",
        setting="{change}", unless=("gradients-underflow",),
    ),
    Rule(
        name="noisy-cast", source="section 4.2", level="warning",
        symptom="the error of a cast is far above its format's",
        evidence=_noisy, cause="this row's values do not suit 8 bits",
        setting="precision.keep={row}",
        unless=("saturation", "saturation-of-late-scales", "underflow", "gradients-underflow"),
    ),
    Rule(
        name="updates-lost", source="cases 57", level="warning",
        symptom="parameters have gradients and do not move",
        evidence=_updates_lost, cause="updates are smaller than the master weights' spacing",
        setting="optimizer.master=fp32",
    ),
    Rule(
        name="moments-lost", source="cases 54, 55", level="warning",
        symptom="one of Adam's moments is zero where the other is not",
        evidence=_moments_lost, cause="the moments' format loses small values",
        setting="optimizer.states=fp32",
    ),
    Rule(
        name="experts-idle", source="cases 65, 67, 68", level="warning",
        symptom="a few experts get nearly all tokens",
        evidence=_experts, cause="the router has collapsed",
        setting="model.overrides.sequence_loss_weight=0.0001",
    ),
    Rule(
        name="average-behind", source="cases 58, 60", level="note",
        symptom="the running average is worse than the weights it averages",
        evidence=_average_behind, cause="it averages over more steps than the run has had",
        setting="ema.decay={decay}",
    ),
    Rule(
        name="not-loaded", source="cases 72", level="error",
        symptom="a loaded model starts as if it knew nothing",
        evidence=_not_loaded, cause="weights were read wrongly: scales missing, or another tokenizer",
        setting="data.tokenizer={path}",
    ),
)  # fmt: skip
