"""One rank's step under a strategy, from the rehearsed step of a process alone.

What outlives a step is divided as the strategy divides it; whole weights are there only while their
unit runs; a unit's gradients are whole until they are reduced, at the end of its backward. The
buffers are those of the engines: FSDP2 holds the flat result of a gather beside the weights until the
next one, and the input of a reduce-scatter until the next one; DDP and ZeRO-1 and -2 fill buckets.
Of all ranks this is the first, whose shares are the largest; the padding of uneven shares is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .lifetimes import GATHERED, Span, Timeline
from .units import Fact

ZERO_BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size unless its file says otherwise
_SHARDS = {  # what is divided: weights, master and moments, gradients
    "single": (False, False, False),
    "ddp": (False, False, False),
    "zero1": (False, True, False),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
    "fsdp2": (True, True, True),
    "hsdp": (True, True, True),
    "expert-parallel": (True, True, True),
}
STRATEGIES = tuple(_SHARDS)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How `gpus` on `nodes` work together. `experts_over`: ranks that share a layer's experts.

    Raises ValueError for an unknown strategy and for numbers that do not divide.
    """

    strategy: str = "single"
    gpus: int = 1
    nodes: int = 1
    experts_over: int = 1
    bucket_bytes: int = 25 << 20

    def __post_init__(self) -> None:
        if self.strategy not in _SHARDS:
            raise ValueError(f"--strategy: {self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.gpus < 1 or self.nodes < 1:
            raise ValueError(f"--gpus {self.gpus}, --nodes {self.nodes}: both must be 1 or more")
        if self.gpus % self.nodes:
            raise ValueError(
                f"--gpus: {self.gpus} GPUs do not divide over --nodes {self.nodes}; every node has "
                "as many"
            )
        if self.strategy == "single" and self.gpus > 1:
            raise ValueError(
                f"--gpus: {self.gpus} GPUs need a --strategy: {', '.join(STRATEGIES[1:])}"
            )
        if self.gpus % self.experts_over:
            raise ValueError(
                f"--experts-over: {self.gpus} GPUs do not divide into groups of {self.experts_over}"
            )

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered for each layer."""
        return _SHARDS[self.strategy][0]

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed's ZeRO does it."""
        return self.strategy.startswith("zero")

    @property
    def shards(self) -> int:
        """Ranks that share a parameter: all, or with hsdp those of one node."""
        if not any(_SHARDS[self.strategy]):
            return 1
        return self.gpus // self.nodes if self.strategy == "hsdp" else self.gpus

    def shards_of(self, fact: Fact) -> int:
        """Ranks that share this parameter of the rehearsed model; 1 for a buffer."""
        if not fact.divided:
            return 1
        if fact.expert and self.strategy == "expert-parallel":
            return self.gpus // self.experts_over
        return self.shards

    def share(self, fact: Fact) -> float:
        """The first rank's share of a parameter. FSDP2 divides by rows, ZeRO and experts evenly."""
        count = self.shards_of(fact)
        if count == 1:
            return 1.0
        if self.zero or (fact.expert and self.strategy == "expert-parallel"):
            return 1 / count
        return -(-fact.rows // count) / fact.rows

    def whole(self, fact: Fact) -> int:
        """Bytes of a parameter that was gathered: every rank's share, the last ones' padding too;
        0 where it is never gathered."""
        count = self.shards_of(fact)
        if not self.gathers or count == 1:
            return 0
        size = fact.bytes if self.zero else fact.gathered
        return math.ceil(size * self.share(fact) * count)

    def kept_gradient(self, fact: Fact) -> int:
        """Bytes of a gradient that stay until the step. FSDP2 keeps the parameter's own dtype."""
        if not fact.grad_bytes or not _SHARDS[self.strategy][2]:
            return fact.grad_bytes
        if self.shards_of(fact) == 1:
            return fact.grad_bytes
        size = fact.grad_bytes if self.zero else max(fact.grad_bytes, fact.bytes)
        return math.ceil(size * self.share(fact))

    def divides(self, category: str) -> bool:
        """Whether a category of state is divided."""
        weights, states, gradients = _SHARDS[self.strategy]
        return {"weights": weights, "gradients": gradients}.get(category, states)


def one_step(timeline: Timeline) -> Timeline:
    """The counted step of a rehearsal alone: what was there before it is born at its start."""
    since = timeline.since
    alive: dict[int, int] = {}
    homes: dict[int, int] = {}
    units = {i: s.unit for s in timeline.spans for i in range(s.start, min(s.stop, since))}
    for i, (storage, nbytes) in enumerate(timeline.events[:since]):
        if nbytes > 0:
            alive[storage] = nbytes
            if i in units:
                homes[storage] = units[i]
        else:
            del alive[storage]
    first = len(alive)
    place = first - since
    return Timeline(
        events=[*alive.items(), *timeline.events[since:]],
        marks=[(0, "idle"), *((i + place, phase) for i, phase in timeline.marks if i >= since)],
        labels=dict(timeline.labels),
        origins=dict(timeline.origins),
        owners=dict(timeline.owners),
        spans=[
            Span(s.unit, s.phase, s.start + place, s.stop + place)
            for s in timeline.spans
            if s.start >= since
        ],
        homes={storage: unit for storage, unit in homes.items() if storage in alive},
        since=first,
    )


def on_rank(
    step: Timeline, facts: list[Fact], layout: Layout, exchange: int = 0, fused: bool = False
) -> Timeline:
    """What the first rank allocates in `step` (from `one_step`) under `layout`.

    exchange: bytes of the buffers in which a layer's tokens go to their experts and come back.
    fused: gradients, which `step` keeps until its end, go as soon as their unit's are reduced.
    """
    return _Writer(step, facts, layout, exchange, fused).write()


class _Writer:
    """Rewrites a step event by event. What it adds has numbers past those of the step."""

    def __init__(
        self, step: Timeline, facts: list[Fact], layout: Layout, exchange: int, fused: bool
    ) -> None:
        self.step, self.facts, self.layout, self.exchange = step, facts, layout, exchange
        self.fused = fused
        self.out = Timeline(labels=dict(step.labels), origins=dict(step.origins))
        self.next = 1 + max((s for s, _ in step.events), default=0)
        self.rest = max((f.unit for f in facts), default=0)
        self.units: dict[int, list[int]] = {}
        for number, fact in enumerate(facts):
            self.units.setdefault(fact.unit, []).append(number)
        self.weights: dict[int, list[int]] = {}  # unit -> its whole weights
        self.flat: dict[int, int] = {}  # unit -> the flat result of its gather
        self.held_flat = self.held_input = 0
        self.whole_grads: dict[int, int] = {}  # storage -> parameter, not reduced yet
        self.shares: dict[int, int] = {}  # storage of a whole gradient -> of its share
        self.exchanged: dict[int, int] = {}
        self.filled = 0  # of a DDP bucket
        self.phase = "idle"

    # ---- events ----

    def born(self, nbytes: int, label: str = "temporary", origin: str = "gathered") -> int:
        if nbytes <= 0:
            return 0
        number, self.next = self.next, self.next + 1
        self.out.events.append((number, nbytes))
        self.out.labels[number], self.out.origins[number] = label, origin
        self.alive[number] = nbytes
        return number

    def dies(self, number: int) -> int:
        if number:
            self.out.events.append((number, -self.alive.pop(number)))
        return 0

    def write(self) -> Timeline:
        self.alive: dict[int, int] = {}
        actions = self._actions()
        marks = sorted(self.step.marks)
        if self.layout.zero:
            self._zero_buffers()
        for i, (storage, nbytes) in enumerate([*self.step.events, (0, 0)]):
            while marks and marks[0][0] <= i:
                self._mark(marks.pop(0)[1])
            for act, unit in actions.get(i, ()):
                act(unit)
            if i == self.step.since:
                self.out.since = len(self.out.events)
            if nbytes:
                self._event(storage, nbytes)
        return self.out

    def _event(self, storage: int, nbytes: int) -> None:
        label = self.step.labels.get(storage)
        owner = self.step.owners.get(storage)
        if label == GATHERED:
            return
        if nbytes < 0:
            share = self.shares.pop(storage, None)
            if share is not None:
                self.dies(share)
            elif storage in self.alive:
                self.whole_grads.pop(storage, None)
                self.dies(storage)
            return
        if owner is not None and label != "gradients" and self.layout.divides(label):
            nbytes = math.ceil(nbytes * self.layout.share(self.facts[owner]))
        elif owner is not None and label == "gradients" and (self.fused or self._reduces(owner)):
            self.whole_grads[storage] = owner
            self.out.labels[storage] = "temporary"
        elif owner is None and self.phase == "step" and self.layout.divides("gradients"):
            nbytes = math.ceil(nbytes / self.layout.shards)  # what works on gradients has less
        self.alive[storage] = nbytes
        self.out.events.append((storage, nbytes))

    def _reduces(self, owner: int) -> bool:
        fact = self.facts[owner]
        return self.layout.divides("gradients") and self.layout.shards_of(fact) > 1

    # ---- what a strategy does, and when ----

    def _mark(self, phase: str) -> None:
        if self.phase == "backward" and phase != "backward":
            self._unit_is_done(self.rest)
            self.held_input = self.dies(self.held_input)
        if self.phase == "forward":
            self.held_flat = self.dies(self.held_flat)
        self.phase = phase
        self.out.marks.append((len(self.out.events), phase))
        if phase == "forward" and self.rest not in self.weights:
            self._gather(self.rest)
        if phase == "step" and self.layout.zero and self.layout.divides("gradients"):
            copy = sum(f.numel * 4 for f in self.facts if f.grad_bytes) // self.layout.shards
            self.step_copy = self.born(copy, "gradients", "zero: FP32 gradients for the step")
        elif phase == "idle" and getattr(self, "step_copy", 0):
            self.step_copy = self.dies(self.step_copy)

    def _actions(self) -> dict[int, list]:
        actions: dict[int, list] = {}
        for span in self.step.spans:
            forward = span.phase == "forward"
            begin = self._gather if forward else self._begin_backward
            end = self._end_forward if forward else self._unit_is_done
            actions.setdefault(span.start, []).append((begin, span.unit))
            actions.setdefault(span.stop, []).insert(0, (end, span.unit))
        return actions

    def _sizes(self, unit: int) -> Iterator[int]:
        return filter(None, (self.layout.whole(self.facts[i]) for i in self.units.get(unit, ())))

    def _gather(self, unit: int) -> None:
        """In forward: the flat result stays until the next one has come."""
        self._exchange(unit)
        sizes = list(self._sizes(unit))
        if not sizes:
            return
        flat = self.born(sum(sizes), origin="gather")
        self.held_flat = self.dies(self.held_flat)
        self.weights[unit] = [self.born(size, origin="gathered weights") for size in sizes]
        self.held_flat = flat

    def _end_forward(self, unit: int) -> None:
        self.dies(self.exchanged.pop(unit, 0))
        for number in self.weights.pop(unit, ()):
            self.dies(number)

    def _begin_backward(self, unit: int) -> None:
        """Weights come again, and those of the unit before are fetched meanwhile."""
        self._exchange(unit)
        sizes = list(self._sizes(unit))
        if sizes and unit not in self.weights:
            flat = self.flat.pop(unit, 0) or self.born(sum(sizes), origin="gather")
            self.weights[unit] = [self.born(size, origin="gathered weights") for size in sizes]
            self.dies(flat)
        ahead = list(self._sizes(unit - 1)) if unit else []
        if ahead and unit - 1 not in self.flat:
            self.flat[unit - 1] = self.born(sum(ahead), origin="gather")

    def _unit_is_done(self, unit: int) -> None:
        """The end of a unit's backward: its weights go, its gradients are reduced."""
        self._end_forward(unit)
        mine = [s for s, owner in self.whole_grads.items() if self.facts[owner].unit == unit]
        if self.layout.strategy == "ddp" or self.layout.zero:
            self._through_buckets(unit, mine)
            return
        if not mine:
            return
        self.held_input = self.dies(self.held_input)
        facts = [self.facts[i] for i in map(self.whole_grads.get, mine) if self._reduces(i)]
        padded = sum(
            math.ceil(f.grad_bytes * self.layout.share(f) * self.layout.shards_of(f)) for f in facts
        )
        self.held_input = self.born(padded, origin="reduce-scatter")
        for storage in mine:
            self._keep_share(storage)
        for storage in mine if self.fused else ():
            self.dies(self.shares.pop(storage))

    def _keep_share(self, storage: int) -> None:
        owner = self.whole_grads.pop(storage)
        self.dies(storage)
        kept = self.layout.kept_gradient(self.facts[owner])
        self.shares[storage] = self.born(kept, "gradients", "reduced gradients")

    def _through_buckets(self, unit: int, mine: list[int]) -> None:
        """One gradient after the other goes through a bucket that is there (ZeRO), or is made a
        part of one that takes its place (DDP)."""
        if self.layout.strategy == "ddp" and self.layout.gpus > 1:
            self.filled += sum(self.facts[i].grad_bytes for i in self.units.get(unit, ()))
            if self.filled >= self.layout.bucket_bytes or unit == self.rest:
                self.dies(self.born(self.filled, origin="bucket"))
                self.filled = 0
        for storage in mine:
            self._keep_share(storage)

    def _zero_buffers(self) -> None:
        """DeepSpeed's own: FP32 masters in flat partitions, and the bucket that it reduces by."""
        trained = [f for f in self.facts if f.grad_bytes]
        numel = sum(f.numel for f in trained)
        self.born(4 * numel // self.layout.shards, "master", "zero: FP32 partition")
        if trained and self.layout.divides("gradients"):
            width = max(f.grad_bytes // f.numel for f in trained)
            self.born(min(ZERO_BUCKET, numel) * width, "temporary", "zero: reduce bucket")

    def _exchange(self, unit: int) -> None:
        experts = any(self.facts[i].expert for i in self.units.get(unit, ()))
        if self.exchange and experts and unit not in self.exchanged:
            self.exchanged[unit] = self.born(self.exchange, origin="all-to-all")
