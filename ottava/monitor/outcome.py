"""Rules for how a run ends, how fast it is (table 6.2) and how good it gets (table 6.3).

Table 6.3 needs a second run in higher precision on the same data: `diagnose(run, against=other)`.
"""

from __future__ import annotations

import re
from statistics import fmean, median

from .facts import Facts, Rule, Seen, short

_GAP = 0.01  # of the loss: "within 1 %" is usually reasonable, says the article


# ---- the end ----


def _unreadable(facts: Facts) -> Seen | None:
    problems = facts.metrics.problems
    return Seen(f"{len(problems)} left out; {problems[0]}") if problems else None


def _reason(facts: Facts) -> str | None:
    """Why the run failed; None where it did not."""
    ends = facts.metrics.of("end")
    if not ends or ends[-1].get("status") != "failed":
        return None
    return str(ends[-1].get("reason") or "no reason given")


def _out_of_memory(facts: Facts) -> Seen | None:
    reason = _reason(facts)
    if reason is None or "out of memory" not in reason.lower():
        return None
    fits = re.search(r"would fit: (\S+=\S+(?: \S+=\S+)*)", reason)
    half = max(int(facts.option("train.micro_batch", 2)) // 2, 1)
    twice = 2 * int(facts.option("train.accumulate", 1))
    by_half = f"train.micro_batch={half} train.accumulate={twice}"
    return Seen(reason, {"change": fits[1] if fits else by_half})


def _disk(facts: Facts) -> Seen | None:
    texts = [_reason(facts) or "", *(str(x.get("text")) for x in facts.metrics.of("event"))]
    reason = next((t for t in texts if "cannot save" in t), None)
    if reason is None:
        return None
    return Seen(reason, {"keep": max(int(facts.option("train.keep_last", 2)) - 1, 1)})


def _failed(facts: Facts) -> Seen | None:
    reason = _reason(facts)
    return None if reason is None else Seen(reason)


def _killed(facts: Facts) -> Seen | None:
    if facts.metrics.of("end"):
        return None
    return Seen(f"no end line; the last line is of step {facts.metrics.lines[-1]['step']}")


def _damaged(facts: Facts) -> Seen | None:
    notes = [n for x in facts.metrics.of("resume") for n in x.get("notes") or ()]
    over = [str(n) for n in notes if "passed over" in str(n)]
    if not over:
        return None
    return Seen(over[0], {"keep": int(facts.option("train.keep_last", 2)) + 1})


def _went_back(facts: Facts) -> Seen | None:
    lines = facts.metrics.of("heal")
    if not lines:
        return None
    rows = [x["row"] for x in lines if x.get("row")]
    change = f"precision.keep={','.join(dict.fromkeys(rows))}"
    if not rows:
        change = f"optimizer.lr={short(lines[-1].get('lr') or facts.option('optimizer.lr', 0.0))}"
    return Seen("; ".join(str(x.get("text")) for x in lines), {"change": change})


# ---- table 6.2 ----


def _share(facts: Facts, part: str) -> float:
    steps = dict(facts.numbers("step_ms"))
    shares = [ms / steps[s] for s, ms in facts.numbers(part) if steps.get(s)]
    return median(shares) if shares else 0.0


def _waits_for_data(facts: Facts) -> Seen | None:
    share = _share(facts, "data_ms")
    if share < 0.2:
        return None
    shuffles = facts.option("data.shuffle", True)
    change = "data.shuffle=false" if shuffles else "data.tokenizer=bytes"
    return Seen(f"{share:.0%} of a step's time is spent waiting for batches", {"change": change})


def _waits_for_ranks(facts: Facts) -> Seen | None:
    share = _share(facts, "comm_ms")
    if share < 0.2:
        return None
    twice = 2 * int(facts.option("train.accumulate", 1))
    return Seen(f"{share:.0%} of a step's time is spent exchanging gradients", {"twice": twice})


def _small_batch(facts: Facts) -> Seen | None:
    room, percent = facts.start.get("device_gib"), [v for _, v in facts.numbers("percent")]
    memory = [v for _, v in facts.numbers("memory_gib")]
    if not facts.on_gpu or not room or not percent or not memory:
        return None
    reached, used = median(percent), max(memory) / room
    if reached > 20 or used > 0.4:
        return None
    twice = 2 * int(facts.option("train.micro_batch", 1))
    return Seen(
        f"{reached:.0f} % of the measured GEMM rate, with {used:.0%} of {room:.0f} GiB in use",
        {"twice": twice},
    )


def _little_in_fp8(facts: Facts) -> Seen | None:
    share = facts.start.get("fp8_share")
    if not facts.fp8 or not isinstance(share, int | float) or share >= 0.5:
        return None
    kept = facts.option("precision.keep", [])
    change = "precision.keep=" if kept else "precision.policy=default"
    return Seen(
        f"{facts.start.get('fp8_modules', 0)} modules with {share:.0%} of the GEMM FLOPs run in FP8",
        {"change": change},
    )


def _emulated(facts: Facts) -> Seen | None:
    if not (facts.on_gpu and facts.fp8 and facts.start.get("emulated")):
        return None
    return Seen(
        f"{facts.start.get('device')} has no FP8 unit for this recipe: every FP8 GEMM is emulated"
    )


# ---- table 6.3, and what a validation loss says ----


def _overfits(facts: Facts) -> Seen | None:
    evals = [x for x in facts.metrics.of("eval") if isinstance(x.get("loss"), int | float)]
    losses = [float(x["loss"]) for x in evals]
    if len(losses) < 3 or not facts.tenths:
        return None
    best, half = min(losses), len(facts.tenths) // 2
    if losses[-1] <= best * 1.02 or fmean(facts.tenths[half:]) >= fmean(facts.tenths[:half]):
        return None
    step = evals[losses.index(best)]["step"]
    return Seen(
        f"validation loss {best:.3f} at step {step}, {losses[-1]:.3f} at the end, while the training "
        "loss fell",
        {"steps": step},
    )


def _gaps(facts: Facts) -> list[float]:
    """Loss above the baseline's over the same steps, by tenth, as a share of the loss; [] where
    there is none to speak of at the end."""
    if facts.baseline is None or not facts.tenths:
        return []
    other = dict(facts.baseline.losses)
    both = [(x, other[s]) for s, x in facts.losses if s in other]
    size = len(both) // 10
    if size < 2:
        return []
    parts = [both[i : i + size] for i in range(0, 10 * size, size)]
    gaps = [fmean(a for a, _ in p) / fmean(b for _, b in p) - 1.0 for p in parts]
    return gaps if gaps[-1] > _GAP else []


def _said(gaps: list[float]) -> str:
    return f"loss {gaps[0]:+.1%} against the other run over the first tenth, {gaps[-1]:+.1%} over the last"


def _opens_early(facts: Facts) -> Seen | None:
    gaps = _gaps(facts)
    if not facts.fp8 or not gaps or gaps[0] < 0.8 * gaps[-1] or gaps[-1] < 0.8 * gaps[0]:
        return None
    return Seen(f"{_said(gaps)}: it opens at once and stays")


def _shrinks(facts: Facts) -> Seen | None:
    gaps = _gaps(facts)
    if not gaps or gaps[-1] >= 0.8 * max(gaps):
        return None
    steps = int(facts.option("train.steps", len(facts.steps)))
    return Seen(f"{_said(gaps)}: it closes", {"steps": round(1.5 * steps)})


def _noise_of_weights(facts: Facts) -> Seen | None:
    gaps = _gaps(facts)
    dbs = [
        values["error_db"]
        for line in facts.observed
        for operands in (line.get("rows") or {}).values()
        for operand, values in operands.items()
        if operand.endswith(("weight", "grad_output")) and values.get("error_db") is not None
    ]
    if not facts.fp8 or not gaps or not dbs or median(dbs) > 22:
        return None
    return Seen(f"{_said(gaps)}; weights and gradients have {median(dbs):.1f} dB over their noise")


def _other_rate(facts: Facts) -> Seen | None:
    gaps = _gaps(facts)
    if not gaps:
        return None
    scale = 0.5 * float(facts.option("precision.lr_scale", 1.0))
    return Seen(f"{_said(gaps)}: it grows", {"scale": short(scale)})


RULES = (
    Rule(
        name="out-of-memory", source="issue 6", level="error", symptom="a step did not fit",
        evidence=_out_of_memory, cause="batch, sequence or model are too large for this device",
        setting="{change}",
    ),
    Rule(
        name="disk", source="issue 6", level="error", symptom="a checkpoint could not be written",
        evidence=_disk, cause="the disk is full or gone", setting="train.keep_last={keep}",
    ),
    Rule(
        name="failed", source="issue 6", level="error", symptom="the run failed",
        evidence=_failed, cause="the evidence names it; the last checkpoint is whole",
        setting="train.resume=auto", unless=("out-of-memory", "disk"),
    ),
    Rule(
        name="unfinished", source="issue 6", level="note",
        symptom="the run has not ended, or was killed", evidence=_killed,
        cause="it still runs, or a signal that cannot be caught",
        setting="train.resume=auto",
    ),
    Rule(
        name="went-back", source="issue 6", level="note",
        symptom="the run went back to a checkpoint by itself", evidence=_went_back,
        cause="too many bad steps in a row", setting="{change}",
    ),
    Rule(
        name="damaged-checkpoint", source="issue 6", level="warning",
        symptom="a checkpoint was damaged, and an older one was taken", evidence=_damaged,
        cause="the disk, or something else that writes there", setting="train.keep_last={keep}",
    ),
    Rule(
        name="unreadable-lines", source="issue 6", level="note",
        symptom="lines of run.jsonl cannot be read", evidence=_unreadable,
        cause="the run was killed while it wrote, or the file is of another version",
        setting="train.resume=auto",
    ),
    Rule(
        name="waits-for-data", source="table 6.2, bottleneck", level="warning",
        symptom="the device waits for batches", evidence=_waits_for_data,
        cause="reading or preparing the data takes longer than a step", setting="{change}",
    ),
    Rule(
        name="small-batch", source="table 6.2, bottleneck", level="note",
        symptom="the GPU is mostly idle, and memory is free", evidence=_small_batch,
        cause="launching a step's kernels takes longer than running them",
        setting="train.micro_batch={twice}", unless=("waits-for-data", "waits-for-ranks"),
    ),
    Rule(
        name="emulated", source="table 6.2, fusion; cases 83", level="warning",
        symptom="FP8 was asked for and is only emulated", evidence=_emulated,
        cause="the GPU has no FP8 unit (compute capability below 8.9)",
        setting="train.preset=storage",
    ),
    Rule(
        name="little-in-fp8", source="table 6.2, fusion; cases 83", level="warning",
        symptom="FP8 was asked for and most of the work is done in high precision",
        evidence=_little_in_fp8, cause="rules or the model's shapes keep its modules out",
        setting="{change}",
    ),
    Rule(
        name="waits-for-ranks", source="table 6.2, communication", level="warning",
        symptom="ranks wait for each other's gradients", evidence=_waits_for_ranks,
        cause="too little compute between two exchanges", setting="train.accumulate={twice}",
    ),
    Rule(
        name="overfitting", source="section 4.2", level="note",
        symptom="the validation loss rises while the training loss falls", evidence=_overfits,
        cause="more steps than this data has to teach", setting="train.steps={steps}",
    ),
    Rule(
        name="gap-closes", source="table 6.3, longer training", level="note",
        symptom="the loss is above the other run's, less and less", evidence=_shrinks,
        cause="the noise of 8 bits slows the run down", setting="train.steps={steps}",
    ),
    Rule(
        name="gap-from-noise", source="table 6.3, activations only", level="warning",
        symptom="the loss is above the other run's", evidence=_noise_of_weights,
        cause="weights and gradients lose too much in their casts", setting="train.preset=storage",
        unless=("gap-closes",),
    ),
    Rule(
        name="gap-from-the-start", source="table 6.3, FP8 later", level="warning",
        symptom="the loss is above the other run's from the beginning", evidence=_opens_early,
        cause="the first steps shape the model and suffer most from noise",
        setting="precision.start_fp8_at=0.1", unless=("gap-closes", "gap-from-noise"),
    ),
    Rule(
        name="gap-grows", source="table 6.3, hyperparameters; section 4.2, 3", level="warning",
        symptom="the loss falls behind the other run's", evidence=_other_rate,
        cause="in 8 bits the best learning rate is 0.5 to 1 times that of high precision",
        setting="precision.lr_scale={scale}",
        unless=("gap-closes", "gap-from-noise", "gap-from-the-start"),
    ),
)  # fmt: skip
