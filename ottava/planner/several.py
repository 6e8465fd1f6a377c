"""Plans for several GPUs: one rehearsal for each way that a rank computes, and from it any number.

Which settings a strategy forces upon a run is asked of the strategy's own code where it has a say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ..config import Run
from ..distributed import ds_config
from ..models.moe import Router
from .allocator import priced
from .cards import Card
from .lifetimes import Timeline
from .memory import NOT_PLANNED, MemoryReport, reported
from .ranks import Layout, on_rank, one_step
from .rehearsal import Rehearsal, Share
from .repeat import NotAlike, kinds_of, repeat, shallow, shortest
from .speed import Links, StepTime, predict
from .units import Fact
from .work import Counter, Work

_TRAINED = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
_FSDP = ("fsdp2", "hsdp", "expert-parallel")
DISPATCH = {"fp8": 1, "bf16": 2}  # bytes of a token's element on its way to an expert
MOST = 65_536  # GPUs that are tried


@dataclass(frozen=True)
class RankPlan:
    """What every rank needs, and how long a step is predicted to take. `notes`: what was assumed
    besides, and what the strategy changed."""

    memory: MemoryReport
    layout: Layout
    time: StepTime
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Rehearsed:
    """The counted step of all layers. `works`: of each span; `outside`: by phase, of the rest.
    `exchanged`: elements of tokens that go to experts in one pass of a layer."""

    step: Timeline
    facts: list[Fact]
    works: list[Work]
    outside: dict[str, Work]
    run: Run
    exchanged: int

    def parameters(self, layout: Layout) -> int:
        """Of the whole model."""
        over = layout.experts_over
        return sum(f.numel * (over if f.expert else 1) for f in self.facts if f.divided)


class Several:
    """A run, planned under layouts. `device`: "cuda" counts allocator blocks, "cpu" bytes in
    tensors. Raises ValueError for an unknown `dispatch`."""

    def __init__(
        self, run: Run, *, dispatch: str = "fp8", device: str = "cuda",
        model: nn.Module | None = None,
    ) -> None:  # fmt: skip
        if dispatch not in DISPATCH:
            raise ValueError(f"--dispatch: {dispatch!r} is not one of {', '.join(DISPATCH)}")
        self.run, self.dispatch, self.device = run, dispatch, device
        self.model = model
        self._known: dict[tuple, _Rehearsed] = {}

    def memory(self, layout: Layout) -> MemoryReport:
        """Bytes of the first rank, whose share is the largest. Raises ValueError where the
        experts do not divide, and for shapes that depend on data."""
        r = self._rehearsed(layout)
        # what goes out beside the rows that the rehearsal has, and what comes back
        exchange = r.exchanged * (DISPATCH[self.dispatch] + 2) if layout.experts_over > 1 else 0
        fused = layout.gathers and layout.gpus > 1 and under(self.run, layout)[0].settings.fused
        timeline = on_rank(r.step, r.facts, layout, exchange, fused)
        peak, reserved = priced(timeline, self.device)
        return reported(
            under(self.run, layout)[0], peak, reserved, self.device, r.parameters(layout)
        )

    def plan(self, layout: Layout, card: Card, links: Links) -> RankPlan:
        """Bytes and predicted time."""
        r, memory = self._rehearsed(layout), self.memory(layout)
        train = r.run.train
        tokens = train.micro_batch * r.run.data.sequence_length * train.accumulate
        exchanged = r.exchanged * (DISPATCH[self.dispatch] + 2)
        time = predict(
            r.step.spans, r.works, r.outside, r.facts, layout, card, links, tokens, exchanged
        )
        return RankPlan(memory, layout, time, tuple(self._notes(r, layout, card, links, time)))

    def smallest(self, like: Layout, gib: float, per_node: int = 8) -> Layout | None:
        """The fewest GPUs on which every rank fits into `gib` GiB; None where no number helps.

        Up to one node any number is tried, beyond that whole nodes.
        """

        def fits(gpus: int) -> bool:
            return self.memory(self.sized(like, gpus, per_node)).fits(gib)

        if like.strategy == "single":
            return like if fits(1) else None
        if fits(per_node):
            few = next(n for n in (2, 4, per_node) if n <= per_node and fits(n))
            return self.sized(like, 1 if few == 2 and fits(1) else few, per_node)
        if not any(map(like.divides, ("weights", "moments", "gradients"))):
            return None
        low, high = 1, 2
        while high * per_node <= MOST and not fits(high * per_node):
            low, high = high, 2 * high
        if high * per_node > MOST:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle * per_node) else (middle, high)
        return self.sized(like, high * per_node, per_node)

    def sized(self, like: Layout, gpus: int, per_node: int = 8) -> Layout:
        """The same strategy on so many GPUs; experts over as many as divide both numbers."""
        nodes = -(-gpus // per_node)
        over = 1
        if like.strategy == "expert-parallel":
            over = max(d for d in _divisors(self.experts) if gpus % d == 0)
        return replace(like, gpus=gpus, nodes=nodes, experts_over=over)

    @property
    def experts(self) -> int:
        """Experts of a layer. Raises ValueError for a model without any."""
        if not hasattr(self, "_experts"):
            from ..prepare import build_model

            model = self.model if self.model is not None else build_model(self.run, "meta")
            counts = {m.num_experts for m in model.modules() if isinstance(m, Router)}
            if not counts:
                raise ValueError(
                    f"--strategy: expert-parallel, but {self.run.name} has no experts; use fsdp2"
                )
            self._experts = min(counts)
        return self._experts

    def _rehearsed(self, layout: Layout) -> _Rehearsed:
        run, _ = under(self.run, layout)
        gathers = layout.gathers and layout.gpus > 1 and not layout.zero
        key = (run.settings, gathers, layout.experts_over)
        if key not in self._known:
            share = Share(gathers=gathers, experts_over=layout.experts_over, lora=run.lora.rank)
            if gathers:  # fused or not, gradients go when they are reduced: see on_rank
                run = replace(run, optimizer=replace(run.optimizer, fused="off"))
            try:
                self._known[key] = rehearsed(run, self.model, self.device, share)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(NOT_PLANNED.format(error)) from error
        return self._known[key]

    def _notes(
        self, r: _Rehearsed, layout: Layout, card: Card, links: Links, time: StepTime
    ) -> Iterator[str]:
        yield from under(self.run, layout)[1]
        if layout.gpus > 1 and (self.run.lora.rank or layout.strategy not in _TRAINED):
            what = "adapters" if self.run.lora.rank else layout.strategy
            yield f"on paper: `ottava train` does not run {what} on several GPUs yet"
        yield from under(self.run, layout)[0].notes
        rates = f"FP8 {card.fp8 / 1e12:.0f}, BF16 {card.bf16 / 1e12:.0f}"
        how = (
            "as measured"
            if card.measured
            else "from its data sheet, at the H200's share of its own"
        )
        yield (
            f"predicted with {rates}, attention {card.attention / 1e12:.0f} TFLOP/s and "
            f"{card.memory / 1e12:.1f} TB/s ({card.name}, {how})"
        )
        if layout.gpus > 1:
            yield (
                f"predicted with links of {links.intra:g} GB/s within a node and {links.inter:g} GB/s "
                "between nodes, each GPU, each way, at full speed; gathers one layer ahead, "
                "reductions beside backward, even load of experts"
            )
            yield (
                f"Python launches {time.launches:,} operators a step: where it takes "
                f"{LAUNCH_MS:g} ms for each, no step is below {time.launches * LAUNCH_MS / 1e3:.2f} s"
            )


LAUNCH_MS = 0.1  # of Python for each operator: 0.09 to 0.14 were seen on an H200's host


def rehearsed(run: Run, model: nn.Module | None, device: str, share: Share) -> _Rehearsed:
    """The counted step of a run. Of a named model one layer of each kind is rehearsed and repeated
    (repeat.py), where that is the same; else all of them."""
    kinds = kinds_of(run) if model is None else []
    kept = shortest(kinds) if kinds else []
    if len(kept) < len(kinds):
        try:
            return _rehearse(shallow(run, kept), None, device, share, kinds, kept)
        except NotAlike:
            pass
    return _rehearse(run, model, device, share, [], [])


def _rehearse(run, model, device: str, share: Share, kinds: list, kept: list) -> _Rehearsed:
    rehearsal, counter = Rehearsal(run, model, device, share), Counter()
    timeline = rehearsal.rehearse(counter)
    works, outside = counter.by_span(timeline)
    works = [w for s, w in zip(timeline.spans, works, strict=True) if s.start >= timeline.since]
    step, facts = one_step(timeline), rehearsal.facts
    if kinds:
        few = sum(f.numel for f in facts)
        deep = repeat(step, facts, kinds, kept)
        step, facts = deep.step, deep.facts
        works = [works[i] for i in deep.spans]
        outside["step"] = outside["step"].times(sum(f.numel for f in facts) / few)
    return _Rehearsed(step, facts, works, outside, run, rehearsal.exchanged)


def under(run: Run, layout: Layout) -> tuple[Run, tuple[str, ...]]:
    """The run as the layout's strategy makes it, and what the strategy says about that."""
    if layout.strategy == "single" or layout.gpus == 1:
        return run, ()
    if layout.zero:
        stage = {"zero_optimization": {"stage": int(layout.strategy[-1])}}
        applied = ds_config.apply(stage, run, layout.gpus)
        return applied.run, tuple(n for n in applied.notes if "sequences a step" not in n)
    name = "fsdp2" if layout.strategy in _FSDP else "ddp"
    return replace(run, distributed=replace(run.distributed, strategy=name)), ()


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
