"""How long a step is predicted to take on several ranks, and what it sends.

Work is what a rehearsal counted, at a card's rates; what is sent follows from the layout. Gathers
run one layer ahead, reductions beside the backward of the layer before, all on one link in turn;
tokens on their way to experts are waited for. A prediction, never a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .cards import Card
from .lifetimes import Span
from .ranks import Layout
from .units import Fact
from .work import Work

COMMUNICATION = ("weight all-gather", "gradient reduce-scatter", "gradient all-reduce",
                 "token all-to-all")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Links:
    """GB/s each way of one GPU: to the GPUs of its node, and to other nodes."""

    intra: float
    inter: float

    @classmethod
    def of(cls, text: str, card: Card) -> Links:
        """From "intra,inter"; the card's own and 50 (400 Gb/s a GPU) where it is empty.

        Raises ValueError.
        """
        try:
            intra, inter = [float(x) for x in text.split(",")] if text else (card.nvlink, 50.0)
        except ValueError:
            intra = inter = 0.0
        if intra <= 0 or inter <= 0:
            raise ValueError(f"--link: {text!r} is not intra,inter in GB/s, such as 450,50")
        return cls(intra=intra, inter=inter)

    def ring(self, nbytes: float, ranks: int, nodes: int) -> float:
        """Seconds for `ranks` on `nodes` to have all of `nbytes`, or to reduce them to shares."""
        if ranks == 1:
            return 0.0
        inside = nbytes * (ranks - 1) / ranks / self.intra if ranks > nodes else 0.0
        across = nbytes * (nodes - 1) / nodes / (self.inter * ranks / nodes)
        return max(inside, across) / 1e9

    def exchange(self, nbytes: float, ranks: int, nodes: int) -> float:
        """Seconds in which every rank sends `nbytes`, an equal part to each."""
        each = ranks / nodes
        inside = nbytes * (each - 1) / ranks / self.intra
        across = nbytes * (ranks - each) / ranks / self.inter
        return max(inside, across) / 1e9


@dataclass
class Sent:
    """`nbytes` that leave one rank in a step, by kind, and the seconds that the links need."""

    nbytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMMUNICATION, 0.0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMMUNICATION, 0.0))

    def add(self, kind: str, nbytes: float, seconds: float) -> float:
        """Note it; the seconds."""
        self.nbytes[kind] += nbytes
        self.seconds[kind] += seconds
        return seconds


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A predicted step, in seconds. `compute`: the GPU is busy; `exposed`: it waits for links;
    `apart`: the whole step if nothing overlapped. `launches`: operators that Python launches."""

    compute: float
    exposed: float
    apart: float
    launches: int
    tokens: int  # of all ranks
    sent: Sent
    work: Work

    @property
    def seconds(self) -> float:
        """The step, overlapped."""
        return self.compute + self.exposed

    @property
    def tok_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.seconds


def predict(
    spans: list[Span], works: list[Work], outside: dict[str, Work], facts: list[Fact],
    layout: Layout, card: Card, links: Links, tokens: int, exchanged: int = 0,
) -> StepTime:  # fmt: skip
    """The time of one step under `layout`: `works` of its `spans`, and by phase what lies outside.

    tokens: of one rank's step. exchanged: bytes of tokens that leave a rank in one pass of one layer
    to experts and back (forward; the backward sends as much).
    """
    link = _Link(layout, links, facts)
    everything = Work()
    for work in (*works, *outside.values()):
        everything.add(work)
    shared = layout.shards if layout.divides("moments") else 1
    step = outside["step"].seconds(card) / shared
    around = sum(w.seconds(card) for phase, w in outside.items() if phase != "step")
    busy = [(s.unit, s.phase, w.seconds(card)) for s, w in zip(spans, works, strict=True)]
    queue = _Queue()
    _walk(queue, link, busy, max((f.unit for f in facts), default=0), exchanged)
    queue.drain()
    queue.now += link.refresh(facts)
    compute = around + step + sum(b[2] for b in busy)
    exposed = max(queue.now - sum(b[2] for b in busy), 0.0)
    return StepTime(
        compute=compute, exposed=exposed, apart=compute + sum(link.sent.seconds.values()),
        launches=everything.launches, tokens=tokens * layout.gpus, sent=link.sent, work=everything,
    )  # fmt: skip


def _walk(queue: _Queue, link: _Link, busy: list, rest: int, exchanged: int) -> None:
    """Every layer in turn, forward and backward, with what is sent beside it."""
    last = max((i for i, b in enumerate(busy) if b[1] == "forward"), default=-1)
    for i, (unit, phase, seconds) in enumerate(busy):
        before = busy[i - 1][1] if i else "backward"
        if (before, phase) == ("backward", "forward"):  # a micro-batch begins
            queue.fetch(link.gather(rest))
        if before != phase:  # nobody fetched ahead
            queue.fetch(link.gather(unit))
        queue.begin()
        after = busy[i + 1] if i + 1 < len(busy) else None
        if after is not None and after[1] == phase:
            queue.fetch(link.gather(after[0]))
        queue.now += seconds + link.tokens(unit, exchanged)
        if phase == "backward" and (i > last or link.layout.divides("gradients")):
            queue.send(link.reduce(unit))
            if after is None or after[1] == "forward":
                queue.send(link.reduce(rest))


class _Queue:
    """One stream that computes and one link that is used in turn. Seconds from the start."""

    def __init__(self) -> None:
        self.now = self.link = self.arrives = 0.0

    def fetch(self, seconds: float) -> None:
        """What the next run needs, ordered now."""
        if seconds:
            self.arrives = self.link = max(self.link, self.now) + seconds

    def begin(self) -> None:
        """Wait for what was ordered."""
        self.now = max(self.now, self.arrives)

    def send(self, seconds: float) -> None:
        """Nobody waits for it before the end."""
        self.link = max(self.link, self.now) + seconds

    def drain(self) -> None:
        """Wait for the link."""
        self.now = max(self.now, self.link)


class _Link:
    """What the strategy sends for one unit; every call is one more time that it is sent."""

    def __init__(self, layout: Layout, links: Links, facts: list[Fact]) -> None:
        self.layout, self.links, self.sent = layout, links, Sent()
        self.units: dict[int, list[Fact]] = {}
        for fact in facts:
            self.units.setdefault(fact.unit, []).append(fact)

    def _groups(self, unit: int) -> Iterator[tuple[list[Fact], int, int]]:
        """(parameters, ranks that share them, nodes these are on) of a unit."""
        layout, facts = self.layout, self.units.get(unit, [])
        own = [f for f in facts if f.expert and layout.strategy == "expert-parallel"]
        shared = [f for f in facts if f not in own]
        if shared:
            nodes = 1 if layout.strategy == "hsdp" else layout.nodes
            yield shared, max(layout.shards, 1), nodes
        if own:  # each rank of a group of experts_over has its twins in the other groups
            twins, each = layout.gpus // layout.experts_over, layout.gpus // layout.nodes
            yield own, twins, min(layout.nodes, twins) if each > 1 else twins

    def gather(self, unit: int) -> float:
        """Weights of a unit, once."""
        seconds = 0.0
        for facts, ranks, nodes in self._groups(unit):
            nbytes = sum(self.layout.whole(f) for f in facts)
            if nbytes:
                seconds += self.sent.add(
                    "weight all-gather", nbytes * (ranks - 1) / ranks,
                    self.links.ring(nbytes, ranks, nodes),
                )  # fmt: skip
        return seconds

    def reduce(self, unit: int) -> float:
        """Gradients of a unit, once."""
        layout, seconds = self.layout, 0.0
        for facts, ranks, nodes in self._groups(unit):
            nbytes = sum(f.grad_bytes for f in facts)
            if layout.divides("gradients") and ranks > 1:
                seconds += self.sent.add(
                    "gradient reduce-scatter", nbytes * (ranks - 1) / ranks,
                    self.links.ring(nbytes, ranks, nodes),
                )  # fmt: skip
                if layout.strategy == "hsdp" and layout.nodes > 1:
                    seconds += self._all_reduce(nbytes / ranks, layout.nodes, layout.nodes)
            elif layout.gpus > 1 and not layout.divides("gradients"):
                seconds += self._all_reduce(nbytes, layout.gpus, layout.nodes)
        return seconds

    def _all_reduce(self, nbytes: float, ranks: int, nodes: int) -> float:
        seconds = 2 * self.links.ring(nbytes, ranks, nodes)
        return self.sent.add("gradient all-reduce", 2 * nbytes * (ranks - 1) / ranks, seconds)

    def tokens(self, unit: int, nbytes: int) -> float:
        """Tokens of one pass of a layer with experts, there and back."""
        over = self.layout.experts_over
        if not nbytes or over == 1 or not any(f.expert for f in self.units.get(unit, ())):
            return 0.0
        each = self.layout.gpus // self.layout.nodes
        nodes = max(1, over // each)
        return self.sent.add(
            "token all-to-all", nbytes * (over - 1) / over, self.links.exchange(nbytes, over, nodes)
        )

    def refresh(self, facts: list[Fact]) -> float:
        """ZeRO-1 and -2 gather the new weights after the step; nothing runs meanwhile."""
        layout = self.layout
        if not layout.zero or layout.gathers:
            return 0.0
        nbytes = sum(f.bytes for f in facts if f.grad_bytes)
        return self.sent.add(
            "weight all-gather", nbytes * (layout.gpus - 1) / layout.gpus,
            self.links.ring(nbytes, layout.gpus, layout.nodes),
        )  # fmt: skip
