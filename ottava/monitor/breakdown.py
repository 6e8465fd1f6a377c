"""Where the time of profiled steps went, by group and by row of the plan, and what to do about it.

Made from the events of torch.profiler. An operator counts to the row whose module ran it; one of
backward to the row whose forward it belongs to (the profiler numbers both alike). Times are the
device's on a GPU, the CPU's own otherwise, without what an operator calls in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.autograd import DeviceType

from ..numerics.policy import Plan
from .ranges import PART, ROW

IDLE = "Python, between operators"
SLOWEST = 8
_BACKWARD = "autograd::engine::evaluate_function"
_EXCHANGE = ("nccl:", "gloo:", "c10d::")


@dataclass
class RowTime:
    """Milliseconds a step of one row."""

    row: str
    kind: str
    recipe: str  # "high" where it computes in high precision
    forward_ms: float = 0.0
    backward_ms: float = 0.0

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass
class Breakdown:
    """Milliseconds a step. `groups`: kinds of rows, parts of a step, and IDLE; they add up to
    `step_ms`. `advice`: (what was seen, what to do), in the order of the article's table 6.2."""

    steps: int
    device: str
    step_ms: float
    groups: dict[str, float]
    rows: list[RowTime]
    advice: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, rows slowest first."""
        return {**asdict(self), "rows": [{**asdict(r), "ms": r.ms} for r in self.rows]}

    def lines(self) -> list[str]:
        """The table as text."""
        out = [f"{self.steps} steps profiled on the {self.device}: {self.step_ms:.2f} ms a step"]
        for name, ms in sorted(self.groups.items(), key=lambda x: -x[1]):
            out.append(f"  {ms / self.step_ms:6.1%} {ms:9.2f} ms  {name}")
        out.append("slowest rows (forward + backward, ms):")
        for r in self.rows[:SLOWEST]:
            out.append(
                f"  {r.ms / self.step_ms:6.1%} {r.forward_ms:8.2f} + {r.backward_ms:8.2f}  {r.row} "
                f"({r.kind}, {r.recipe})"
            )
        for seen, todo in self.advice:
            out.append(f"  {seen}: {todo}")
        if not self.advice:
            out.append("  nothing in table 6.2 applies: the time goes into the model's own work")
        return out


def breakdown(events: Iterable[Any], plan: Plan | None, *, steps: int, step_ms: float,
              device: str, settings: dict[str, Any]) -> Breakdown:  # fmt: skip
    """What `events` (of `torch.profiler.profile.events()`) say about `steps` steps of `step_ms` each.

    settings: micro_batch, accumulate, recompute, graph, shuffle of the run, for the advice.
    """
    events = [e for e in events if e.device_type == DeviceType.CPU]
    on_gpu = device == "cuda"
    kinds = (
        {r.name: (r.kind, r.recipe.name if r.recipe else "high") for r in plan.rows} if plan else {}
    )
    forward = {
        e.sequence_nr: e for e in events if e.sequence_nr >= 0 and _within(e, _BACKWARD) is None
    }
    rows: dict[str, RowTime] = {}
    groups: dict[str, float] = defaultdict(float)
    for e in events:
        ms = (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3 / steps
        if ms <= 0 or e.name.startswith((ROW, PART)) or e.name == "ProfilerStep":
            continue
        name, is_backward = _owner(e, forward)
        if name.startswith(ROW):
            row = name.removeprefix(ROW)
            kind, recipe = kinds.get(row, ("module", "high"))
            own = rows.setdefault(row, RowTime(row, kind, recipe))
            if is_backward:
                own.backward_ms += ms
            else:
                own.forward_ms += ms
            groups[kind] += ms
        else:
            groups[name] += ms
    groups[IDLE] = max(step_ms - sum(groups.values()), 0.0)
    made = Breakdown(
        steps=steps, device=device, step_ms=max(step_ms, sum(groups.values())),
        groups={k: v for k, v in groups.items() if v > 0},
        rows=sorted(rows.values(), key=lambda r: -r.ms),
    )  # fmt: skip
    made.advice = advise(made, plan, settings)
    return made


def _within(e: Any, *prefixes: str) -> Any | None:
    """The innermost of an event and those around it whose name begins so."""
    while e is not None and not e.name.startswith(prefixes):
        e = e.cpu_parent
    return e


def _owner(e: Any, forward: dict[int, Any]) -> tuple[str, bool]:
    """(the range or the part of a step that an operator counts to, whether it is of backward)."""
    if _within(e, *_EXCHANGE) is not None:
        return "exchange between ranks", False
    if _within(e, "ottava::adamw") is not None:  # also inside backward
        return "update", False
    node = _within(e, _BACKWARD)
    inner = _within(e, ROW)  # a stretch that runs again in backward has rows of its own
    if node is None:
        around = inner or _within(e, PART)
        return (around.name.removeprefix(PART) if around is not None else "other"), False
    if inner is not None:
        return inner.name, True
    origin = forward.get(node.sequence_nr)
    row = _within(origin, ROW) if origin is not None else None
    return (row.name if row is not None else "backward, outside rows"), True


# ---- table 6.2 --------------------------------------------------------------------------------


def advise(made: Breakdown, plan: Plan | None, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """What the article's table 6.2 has for what was seen: bottleneck, fusion, communication."""
    share = {name: ms / made.step_ms for name, ms in made.groups.items()}
    twice = f"train.micro_batch={2 * settings['micro_batch']}"
    out = []
    if share.get("data", 0.0) >= 0.1:
        todo = "data.shuffle=false" if settings["shuffle"] else "data.tokenizer=bytes"
        out.append((f"bottleneck: {share['data']:.0%} of the time goes into batches", todo))
    if share.get(IDLE, 0.0) >= 0.3:
        on_gpu = made.device == "cuda" and settings["graph"] != "on"
        todo = f"train.graph=on, or {twice}" if on_gpu else twice
        out.append((f"bottleneck: for {share[IDLE]:.0%} of the time no operator runs", todo))
    if plan is not None and plan.emulated and made.device == "cuda":
        out.append(("fusion: every FP8 product is emulated on this GPU", "train.preset=storage"))
    high = [r for r in made.rows if _kept_high(plan, r.row) and r.ms >= 0.05 * made.step_ms]
    if high:
        took = sum(r.ms for r in high) / made.step_ms
        out.append((f"fusion: {took:.0%} of the time goes into linears in high precision, "
                    f"{high[0].row} first ({plan[high[0].row].reason})",
                    "precision.keep= and precision.policy=default"))  # fmt: skip
    again = sum(r.backward_ms for r in made.rows)
    first = sum(r.forward_ms for r in made.rows)
    if settings["recompute"] != "none" and again > 2.2 * first:
        out.append((f"fusion: backward takes {again / first:.1f} times forward, which it computes "
                    "again", "train.recompute=none, where memory allows"))  # fmt: skip
    if share.get("update", 0.0) >= 0.2:
        todo = f"train.accumulate={2 * settings['accumulate']}"
        out.append((f"bottleneck: {share['update']:.0%} of the time goes into the optimizer", todo))
    if share.get("exchange between ranks", 0.0) >= 0.1:
        todo = f"train.accumulate={2 * settings['accumulate']}"
        took = share["exchange between ranks"]
        out.append((f"communication: {took:.0%} of the time goes into exchanges", todo))
    return out


def _kept_high(plan: Plan | None, name: str) -> bool:
    """Whether a row has GEMMs and was kept out of 8 bits by a rule that a setting can change."""
    row = next((r for r in plan.rows if r.name == name), None) if plan else None
    return row is not None and row.recipe is None and row.kind in ("linear", "experts")
