"""Rules for runs that become unstable: the article's table 6.1, and its kind."""

from __future__ import annotations

from collections import Counter
from statistics import median

from .facts import Facts, Rule, Seen, listed, short

_EARLY = 20  # steps that count as the beginning


def _early(facts: Facts) -> int:
    return max(_EARLY, int(facts.option("optimizer.warmup_steps", 0)))


def _scale_too_high_at_first(facts: Facts) -> Seen | None:
    if not facts.fp16:
        return None
    taken = next((x for x in facts.steps if x.get("stepped")), None)
    before = [x for x in facts.bad if taken is None or x["step"] < taken["step"]]
    if len(before) < 4:
        return None
    scale = (taken or before[-1]).get("scale") or 256.0
    return Seen(
        f"the first {len(before)} steps overflowed; the first that fitted had scale {scale:g}",
        {"scale": short(min(scale, float(facts.option("scaler.init_scale", 65536.0)) / 2))},
    )


def _scale_grows_too_fast(facts: Facts) -> Seen | None:
    if not facts.fp16:
        return None
    late = [x for x in facts.bad if x["step"] > _EARLY]
    if len(late) < 3 or len(late) < 0.02 * len(facts.steps):
        return None
    scales = [v for _, v in facts.numbers("scale")]
    interval = int(facts.option("scaler.growth_interval", 1000))
    return Seen(
        f"{len(late)} overflows after step {_EARLY} (steps {listed([x['step'] for x in late])}); "
        f"the scale reached {max(scales, default=0.0):g}, growing every {interval} steps",
        {"interval": 2 * interval, "cap": f"{max(max(scales, default=2.0) / 4, 1.0):.17g}"},
    )


def _scale_at_floor(facts: Facts) -> Seen | None:
    floor = facts.option("scaler.min_scale")
    scales = [v for _, v in facts.numbers("scale")]
    if not floor or len(scales) < 3 or any(s > floor for s in scales[-3:]):
        return None
    return Seen(f"scale {scales[-1]:g} with scaler.min_scale={floor:g}")


def row_of(first_bad: object) -> tuple[str, str]:
    """(module, operand) of a step's `first_bad`; a parameter counts to its module."""
    if not isinstance(first_bad, list | tuple) or len(first_bad) != 2:
        return "", ""
    name, operand = map(str, first_bad)
    return (name.rpartition(".")[0] if operand in ("weight", "gradient") else name), operand


def _broken_weights(facts: Facts) -> Seen | None:
    broken = [x for x in facts.bad if row_of(x.get("first_bad"))[1] == "weight"]
    if not broken:
        return None
    first, saves = broken[0], facts.metrics.of("save")
    whole = [x for x in saves if x["step"] < first["step"]]
    last = str(whole[-1].get("path")) if whole else ""
    out = facts.option("out", "the run's folder")
    return Seen(
        f"{first['first_bad'][0]} holds numbers that are not finite from step {first['step']} on",
        {"path": f"{out}/checkpoints/{last}" if last else "never"},
    )


def _one_row(facts: Facts) -> Seen | None:
    if not (facts.fp8 or facts.preset == "storage"):
        return None
    named = [(x["step"], *row_of(x.get("first_bad"))) for x in facts.bad]
    rows = Counter(row for _, row, operand in named if row and operand != "weight")
    if not rows:
        return None
    row, count = rows.most_common(1)[0]
    steps = [step for step, r, _ in named if r == row]
    if count < 2 or count < 0.8 * len(facts.bad):
        return None
    operand = next(o for _, r, o in named if r == row)
    return Seen(
        f"the first non-finite numbers are the {operand} of {row}, in {count} of {len(facts.bad)} "
        f"bad steps ({listed(steps)})",
        {"row": row},
    )


def _from_the_start(facts: Facts) -> Seen | None:
    bad = [x["step"] for x in facts.bad]
    if facts.fp16 or not bad or bad[0] > _early(facts):
        return None
    if len(bad) < 3 and len(facts.steps) > _EARLY:
        return None
    text = f"{len(bad)} of {len(facts.steps)} steps are not finite, the first is step {bad[0]}"
    warmup = max(100, 2 * int(facts.option("optimizer.warmup_steps", 0)))
    return Seen(f"{text} ({facts.bad[0].get('cause') or 'the loss'})", {"warmup": warmup})


def _from_the_start_fp8(facts: Facts) -> Seen | None:
    return _from_the_start(facts) if facts.fp8 else None


def _now_and_then(facts: Facts) -> Seen | None:
    if facts.fp16 or not facts.bad:
        return None
    causes = Counter(str(x.get("cause") or "the loss is not finite") for x in facts.bad)
    cause, count = causes.most_common(1)[0]
    longest = streak = 0
    bad = {x["step"] for x in facts.bad}
    for x in facts.steps:
        streak = streak + 1 if x["step"] in bad else 0
        longest = max(longest, streak)
    return Seen(
        f"{len(bad)} of {len(facts.steps)} steps (steps {listed(sorted(bad))}; {longest} in a row at "
        f"most); {count} x {cause}",
        {"clip": _clip(facts)},
    )


def _clip(facts: Facts) -> str:
    middle = median([n for _, n in facts.norms]) if facts.norms else 0.5
    return short(float(f"{2 * middle:.1g}") or 1.0)


def _rises(facts: Facts) -> Seen | None:
    if not facts.tenths or facts.flat:
        return None
    least, last = min(facts.tenths), facts.tenths[-1]
    if last <= least + max(0.1 * abs(least), 0.05):
        return None
    clip = float(facts.option("optimizer.clip_norm", 0.0))
    lr = float(facts.option("optimizer.lr", 3e-4))
    # a fused step cannot clip, and what is clipped already is too fast
    change = f"optimizer.lr={short(lr / 2)}" if clip else f"optimizer.clip_norm={_clip(facts)}"
    return Seen(
        f"{least:.3f} at its best over a tenth of the run, {last:.3f} over the last",
        {"change": change},
    )


def _norm_peaks(facts: Facts) -> Seen | None:
    norms = facts.norms
    if len(norms) < _EARLY:
        return None
    middle = median([n for _, n in norms])
    high = [(s, n) for s, n in norms[len(norms) // 10 :] if middle > 0 and n > 10 * middle]
    if not high:
        return None
    step, worst = max(high, key=lambda x: x[1])
    return Seen(
        f"{len(high)} above ten times the median: {worst:.3g} at step {step}; the median is "
        f"{middle:.3g}",
        {"clip": _clip(facts)},
    )


def _weight_outlier(facts: Facts) -> Seen | None:
    grown = {}
    for name, values in facts.parameters("weight_amax").items():
        if len(values) > 1 and values[0] > 0:
            grown[name] = values[-1] / values[0]
    if len(grown) < 2:
        return None
    name, most = max(grown.items(), key=lambda x: x[1])
    usual = median(grown.values())
    if most < 10 or most < 5 * usual:
        return None
    decay = float(facts.option("optimizer.weight_decay", 0.1))
    return Seen(
        f"the largest weight of {name} grew {most:.3g} times between two looks; the median of all "
        f"grew {usual:.3g} times",
        {"decay": short(max(2 * decay, 0.1))},
    )


def _underflows(facts: Facts) -> tuple[float, str, int]:
    share, row, _, step = facts.worst("underflowed", ("grad_output",))
    return share, row, step


def gradient_recipe(facts: Facts) -> str:
    """A recipe that loses fewer small gradients than the run's own: E5M2 reaches further down than
    E4M3, and where it is in use, smaller blocks do."""
    return "tensor" if facts.recipe in ("row", "block") else "block"


def _flat_by_underflow(facts: Facts) -> Seen | None:
    if not facts.flat:
        return None
    norm = median([n for _, n in facts.norms]) if facts.norms else None
    share, row, step = _underflows(facts)
    if share > 0.25 and facts.fp8:
        return Seen(
            f"loss {facts.tenths[0]:.3f} at first, {facts.tenths[-1]:.3f} at last; {share:.0%} of "
            f"{row}'s grad_output became zero at step {step}",
            {"change": f"precision.recipe={gradient_recipe(facts)}"},
        )
    if norm is not None and norm < 1e-6:
        change = (
            "train.preset=amp" if not facts.fp8 else f"precision.recipe={gradient_recipe(facts)}"
        )
        return Seen(
            f"loss {facts.tenths[0]:.3f} at first, {facts.tenths[-1]:.3f} at last; the median "
            f"gradient norm is {norm:.1e}",
            {"change": change},
        )
    return None


def _flat_too_slow(facts: Facts) -> Seen | None:
    update = facts.typical_update
    if not facts.flat or update is None or update > 1e-5:
        return None
    lr = float(facts.option("optimizer.lr", 3e-4))
    return Seen(
        f"loss {facts.tenths[0]:.3f} at first, {facts.tenths[-1]:.3f} at last; a weight changes by "
        f"{update:.1e} of itself a step",
        {"lr": short(10 * lr)},
    )


def _flat(facts: Facts) -> Seen | None:
    if not facts.flat:
        return None
    lr, update = float(facts.option("optimizer.lr", 3e-4)), facts.typical_update
    moves = "" if update is None else f"; a weight changes by {update:.1e} of itself a step"
    norm = (
        f"; median gradient norm {median([n for _, n in facts.norms]):.2g}" if facts.norms else ""
    )
    return Seen(
        f"loss {facts.tenths[0]:.3f} at first, {facts.tenths[-1]:.3f} at last{norm}{moves}",
        {"lr": short(lr / 10)},
    )


RULES = (
    Rule(
        name="loss-scale-too-high", source="table 6.1, row 1", level="warning",
        symptom="the first steps overflow until the loss scale has come down",
        evidence=_scale_too_high_at_first, cause="scaler.init_scale is too large for this model",
        setting="scaler.init_scale={scale}",
    ),
    Rule(
        name="loss-scale-grows-too-fast", source="table 6.1, row 2", level="warning",
        symptom="steps overflow again and again in the middle of the run",
        evidence=_scale_grows_too_fast, cause="the loss scale grows faster than gradients allow",
        setting="scaler.growth_interval={interval} scaler.max_scale={cap}",
    ),
    Rule(
        name="loss-scale-at-floor", source="cases 50", level="warning",
        symptom="the loss scale has fallen to its floor",
        evidence=_scale_at_floor, cause="gradients overflow FP16 whatever the scale",
        setting="train.preset=amp",
    ),
    Rule(
        name="broken-weights", source="cases 45, 86", level="error",
        symptom="weights hold numbers that are not finite",
        evidence=_broken_weights, cause="something outside the optimizer wrote to them, or memory "
        "is faulty; going back to an earlier checkpoint is the only way",
        setting="train.resume={path}",
    ),
    Rule(
        name="one-row-non-finite", source="table 6.1, row 4; cases 86", level="error",
        symptom="numbers stop being finite at one and the same row",
        evidence=_one_row, cause="that row is unstable in 8 bits (a division or an exponential in "
        "it, or values beyond the format's range)",
        setting="precision.keep={row}", unless=("broken-weights",),
    ),
    Rule(
        name="non-finite-from-the-start-in-fp8", source="table 6.1, row 1", level="error",
        symptom="loss or gradients are not finite from the first steps on",
        evidence=_from_the_start_fp8, cause="the first, largest updates do not fit FP8 yet",
        setting="precision.start_fp8_at=0.1",
        unless=("broken-weights", "one-row-non-finite"),
    ),
    Rule(
        name="non-finite-from-the-start", source="table 6.1, row 1", level="error",
        symptom="loss or gradients are not finite from the first steps on",
        evidence=_from_the_start, cause="the learning rate is too high before weights have settled",
        setting="optimizer.warmup_steps={warmup}",
        unless=("broken-weights", "one-row-non-finite", "non-finite-from-the-start-in-fp8"),
    ),
    Rule(
        name="bad-steps", source="cases 45, 86", level="warning",
        symptom="steps were not finite, or exploded, and changed nothing",
        evidence=_now_and_then, cause="single batches with extreme gradients",
        setting="optimizer.clip_norm={clip}",
        unless=("broken-weights", "one-row-non-finite", "non-finite-from-the-start",
                "non-finite-from-the-start-in-fp8"),
    ),
    Rule(
        name="weight-outlier", source="table 6.1, row 2", level="warning",
        symptom="one weight grows far faster than all others",
        evidence=_weight_outlier, cause="nothing holds that weight back",
        setting="optimizer.weight_decay={decay}",
    ),
    Rule(
        name="loss-explodes", source="table 6.1, row 2", level="warning",
        symptom="the loss fell and rose again",
        evidence=_rises, cause="gradients explode", setting="{change}",
        unless=("one-row-non-finite", "broken-weights", "weight-outlier",
                "loss-scale-grows-too-fast"),
    ),
    Rule(
        name="gradient-peaks", source="table 6.1, row 2", level="warning",
        symptom="gradient norms far above their median",
        evidence=_norm_peaks, cause="single batches with extreme gradients",
        setting="optimizer.clip_norm={clip}", unless=("loss-explodes", "bad-steps"),
    ),
    Rule(
        name="gradients-underflow", source="table 6.1, row 3", level="warning",
        symptom="the loss stays high, and gradients vanish",
        evidence=_flat_by_underflow, cause="small gradients become zero in their 8-bit cast",
        setting="{change}",
    ),
    Rule(
        name="learning-rate-too-low", source="table 6.1, row 3", level="warning",
        symptom="the loss stays high, and weights hardly move",
        evidence=_flat_too_slow, cause="the learning rate is too low",
        setting="optimizer.lr={lr}", unless=("gradients-underflow", "updates-lost"),
    ),
    Rule(
        name="learning-rate-too-high", source="table 6.1, row 3", level="warning",
        symptom="the loss stays high",
        evidence=_flat, cause="the learning rate is too high",
        setting="optimizer.lr={lr}",
        unless=("gradients-underflow", "learning-rate-too-low", "updates-lost", "not-loaded",
                "one-row-non-finite", "broken-weights", "non-finite-from-the-start",
                "non-finite-from-the-start-in-fp8"),
    ),
)  # fmt: skip
