"""A deep model's step out of a shallow one's: one layer of each kind is rehearsed, and repeated.

Layers are alike when they and their neighbours are of the same kind (attention, experts or not).
Events of a layer's forward and backward are copied for every layer like it; what lives from one
layer to the next is matched by its order. The result is event for event what rehearsing all layers
gives; where something does not match, NotAlike is raised, and all layers have to be rehearsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import Run
from ..models.load import load_config
from .lifetimes import Span, Timeline
from .units import Fact


class NotAlike(RuntimeError):
    """Layers that should be alike are not."""


def kinds_of(run: Run) -> list[Any]:
    """The kind of every layer of the run's model; empty where its configuration does not say."""
    config = load_config(run.model.name or run.model.path, run.model.overrides)
    if not hasattr(config, "is_moe"):
        return []
    return [(config.attention(i), config.is_moe(i)) for i in range(config.num_hidden_layers)]


def _contexts(kinds: Sequence[Any]) -> list[tuple]:
    """Each layer's kind between its neighbours'. The first and the last are kinds of their own."""
    ends = {0: "first", len(kinds) - 1: "last"}
    padded = [None, *((kind, ends.get(i)) for i, kind in enumerate(kinds)), None]
    return [tuple(padded[i : i + 3]) for i in range(len(kinds))]


def shortest(kinds: Sequence[Any]) -> list[int]:
    """Numbers of layers that show every kind of layer with every pair of neighbours that it has,
    as neighbours. Not always the fewest."""
    kept = list(range(len(kinds)))
    wanted = set(_contexts(kinds))
    again = True
    while again:
        again = False
        for length in range(len(kept) - 1, 0, -1):
            for start in range(len(kept) - length + 1):
                shorter = kept[:start] + kept[start + length :]
                if shorter and set(_contexts([kinds[i] for i in shorter])) == wanted:
                    kept, again = shorter, True
                    break
            if again:
                break
    return kept


def shallow(run: Run, kept: Sequence[int]) -> Run:
    """The run of a model with only the layers `kept`."""
    config = load_config(run.model.name or run.model.path, run.model.overrides)
    overrides = {**run.model.overrides, "num_hidden_layers": len(kept)}
    for key in ("hybrid_layer_pattern", "moe_layer_freq"):
        if getattr(config, key, None) is not None:
            overrides[key] = [getattr(config, key)[i] for i in kept]
    return replace(run, model=replace(run.model, overrides=overrides))


@dataclass(frozen=True)
class Repeated:
    """`step` and `facts` of the deep model; `spans`: for each of its spans the shallow one's."""

    step: Timeline
    facts: list[Fact]
    spans: list[int]


def repeat(
    step: Timeline, facts: list[Fact], kinds: Sequence[Any], kept: Sequence[int]
) -> Repeated:
    """The step of a model with layers of `kinds` from `step` (of `one_step`) of one with `kept`.

    Raises NotAlike.
    """
    templates = _contexts([kinds[i] for i in kept])
    like = [templates.index(context) for context in _contexts(kinds)]
    return _Repeater(step, facts, like, len(kept)).build()


Key = tuple[int, int]  # (layer, storage of its template)


class _Repeater:
    """like: for each deep layer the shallow one that it is a copy of."""

    def __init__(self, step: Timeline, facts: list[Fact], like: list[int], shallow: int) -> None:
        self.step, self.like, self.shallow = step, like, shallow
        self.out = Timeline()
        self.ids: dict[Key, int] = {}  # alive, of layers
        self.others: dict[int, int] = {}  # alive, of no layer
        self.next = 0
        self.spans: list[int] = []
        self._copy_facts(facts)
        self._place_storages(facts)

    def _copy_facts(self, facts: list[Fact]) -> None:
        self.facts: list[Fact] = []
        self.number: dict[tuple[int, str], int] = {}  # (layer or -1, name in it) -> deep number
        self.place: list[tuple[int, str]] = []  # shallow number -> the same of the shallow model
        deep = len(self.like)
        for fact in facts:
            unit = -1 if fact.unit == self.shallow else fact.unit
            self.place.append((unit, fact.name.replace(f".{unit}.", ".{}.", 1)))
            if unit < 0:
                self.number[self.place[-1]] = len(self.facts)
                self.facts.append(replace(fact, unit=deep))
        for layer, template in enumerate(self.like):
            for fact, (unit, key) in zip(facts, self.place, strict=True):
                if unit == template:
                    self.number[layer, key] = len(self.facts)
                    self.facts.append(replace(fact, unit=layer, name=key.format(layer)))

    def _place_storages(self, facts: list[Fact]) -> None:
        """Whose each storage is (a layer's, or -1), and which of those that another layer frees."""
        self.owner: dict[int, int] = {}
        ends: dict[int, tuple[int, int]] = {}  # storage -> (segment, layer) of its death
        born: dict[int, int] = {}
        self.segments = list(self._cut())
        for number, (layer, _, begin, stop) in enumerate(self.segments):
            for storage, nbytes in self.step.events[begin:stop]:
                if nbytes < 0:
                    ends[storage] = (number, layer)
                    continue
                fact = self.step.owners.get(storage)
                state = layer < 0 and fact is not None
                unit = facts[fact].unit if state else self.step.homes.get(storage, layer)
                self.owner[storage] = -1 if unit == self.shallow else unit
                born[storage] = number
        self.rank: dict[int, tuple[int, int, int]] = {}
        self.crossing: dict[tuple[int, int, int], list[int]] = {}
        for storage, owner in self.owner.items():
            segment, layer = ends.get(storage, (-1, -1))
            if owner >= 0 and layer >= 0 and layer != owner:
                if abs(layer - owner) > 1:
                    raise NotAlike("a tensor lives on beyond the next layer")
                runs = (self.segments[born[storage]][1], self.segments[segment][1])
                group = self.crossing.setdefault((owner, layer, *runs), [])
                self.rank[storage] = (*runs, len(group))
                group.append(storage)

    def _cut(self) -> Iterator[tuple[int, int, int, int]]:
        """(layer or -1, run, begin, stop) of segments in order. A run is one pass over all layers;
        what happens between two layers of a run belongs to the first of them."""
        spans, at, run, before = self.step.spans, 0, 0, ""
        for i, span in enumerate(spans):
            if span.phase != before:
                run, before = run + 1, span.phase
            if at < span.start:
                yield -1, 0, at, span.start
            following = spans[i + 1] if i + 1 < len(spans) else None
            same = following is not None and following.phase == span.phase
            at = following.start if same else span.stop
            yield span.unit, run, span.start, at
        yield -1, 0, at, len(self.step.events)

    def build(self) -> Repeated:
        marks = sorted(self.step.marks)
        done = 0
        spans = sorted(range(len(self.step.spans)), key=lambda i: self.step.spans[i].start)
        by_run: dict[int, dict[int, tuple[int, int, int]]] = {}
        numbers = iter(spans)
        for layer, run, begin, stop in self.segments:
            if layer >= 0:
                by_run.setdefault(run, {})[layer] = (begin, stop, next(numbers))
        for layer, run, begin, stop in self.segments:
            if layer < 0:
                marks = self._between(begin, stop, marks)
            elif run > done:
                done = run
                self._pass(by_run[run])
        for _, phase in marks:
            self.out.marks.append((len(self.out.events), phase))
        return Repeated(self.out, self.facts, self.spans)

    def _pass(self, templates: dict[int, tuple[int, int, int]]) -> None:
        """All layers once, forward or backward."""
        forward = self.step.spans[next(iter(templates.values()))[2]].phase == "forward"
        order = range(len(self.like)) if forward else reversed(range(len(self.like)))
        for layer in order:
            begin, stop, number = templates[self.like[layer]]
            span = self.step.spans[number]
            at = len(self.out.events)
            inner = min(span.stop, stop) - begin
            for i, (storage, nbytes) in enumerate(self.step.events[begin:stop]):
                if i == inner:
                    end = len(self.out.events)
                self._in_layer(layer, storage, nbytes)
            end = end if inner < stop - begin else len(self.out.events)
            self.out.spans.append(Span(layer, span.phase, at, end))
            self.spans.append(number)

    def _in_layer(self, layer: int, storage: int, nbytes: int) -> None:
        template, owner = self.like[layer], self.owner[storage]
        if nbytes > 0:
            self._born((layer, storage), storage, nbytes)
            return
        if owner == template:
            self._dies(self.ids.pop((layer, storage)), nbytes)
        elif owner < 0:
            if storage not in self.others:
                raise NotAlike("a tensor that all layers read is freed by more than one")
            self._dies(self.others.pop(storage), nbytes)
        else:
            first, last, rank = self.rank[storage]
            other = layer + owner - template
            twin = self.like[other]
            group = self.crossing.get((twin, twin + template - owner, first, last), ())
            if rank >= len(group) or (other, group[rank]) not in self.ids:
                raise NotAlike("neighbours hand on different tensors")
            self._dies(self.ids.pop((other, group[rank])), nbytes)

    def _between(self, begin: int, stop: int, marks: list) -> list:
        for i in range(begin, stop):
            while marks and marks[0][0] <= i:
                self.out.marks.append((len(self.out.events), marks.pop(0)[1]))
            if i == self.step.since:
                self.out.since = len(self.out.events)
            storage, nbytes = self.step.events[i]
            owner = self.owner[storage]
            copies = [j for j, t in enumerate(self.like) if t == owner] if owner >= 0 else []
            if owner >= 0 and not copies:
                continue  # a layer that only stands between others
            if nbytes > 0 and copies:
                for layer in copies:
                    self._born((layer, storage), storage, nbytes)
            elif nbytes > 0:
                self._born(None, storage, nbytes)
            elif copies:
                for layer in copies:
                    self._dies(self.ids.pop((layer, storage)), nbytes)
            else:
                self._dies(self.others.pop(storage), nbytes)
        return marks

    def _born(self, key: Key | None, storage: int, nbytes: int) -> None:
        number, self.next = self.next, self.next + 1
        layer = -1 if key is None else key[0]
        if key is None:
            self.others[storage] = number
        else:
            self.ids[key] = number
        self.out.events.append((number, nbytes))
        for mine, its in (
            (self.out.labels, self.step.labels),
            (self.out.origins, self.step.origins),
        ):
            if storage in its:
                mine[number] = its[storage]
        fact = self.step.owners.get(storage)
        if fact is not None:
            self.out.owners[number] = self._number(layer, fact)

    def _number(self, layer: int, fact: int) -> int:
        """The deep model's number of a parameter that a storage of this layer's copy belongs to:
        the layer's own, a neighbour's (the norm that reads its output) or no layer's."""
        unit, key = self.place[fact]
        if unit < 0 or layer < 0:
            return self.number[-1, key]
        return self.number[layer + unit - self.like[layer], key]

    def _dies(self, number: int, nbytes: int) -> None:
        if self.next <= number:
            raise NotAlike("freed before it was there")
        self.out.events.append((number, nbytes))
