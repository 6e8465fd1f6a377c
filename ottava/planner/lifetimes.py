"""When every storage is born and dies, and what was alive at the peak.

One list of events (storage number, plus or minus bytes) serves a real step on the CPU, a step on
fake tensors, and a step on a GPU (from the allocator's own trace, see allocator.py). What a storage
was is decided afterwards: kept activations are those born in a forward and alive at its end, which
nothing can know while the forward runs. So a category is never a guess made at birth.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..optim.adamw import local

CATEGORIES: tuple[str, ...] = (
    "weights",
    "master",
    "gradients",
    "moments",
    "activations",
    "temporary",
)
GATHERED = "gathered"  # label of whole weights that a strategy gathers; it puts them in itself
LARGEST = 16  # groups of storages that a peak names
EMPTY = -1  # the number of every storage without bytes, which no event mentions
PHASES = ("forward", "backward", "step", "idle")


@dataclass
class Timeline:
    """What happened, in order.

    `events`: (storage, bytes), bytes > 0 at birth and < 0 at death. `marks`: (number of events
    before it, phase that starts there). `labels`: category of the storages that a registry knows.
    `origins`: the operator that a storage came from, where it is known. `owners`: number of the
    parameter (or, after them, buffer) whose value, state or gradient a storage is. `spans`: when the model's units ran.
    `homes`: unit in whose span a storage was born, of those born before `since`. `since`: the number of events before the span whose peak is asked for.
    """

    events: list[tuple[int, int]] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    homes: dict[int, int] = field(default_factory=dict)
    since: int = 0


@dataclass
class Span:
    """One run of a unit of the model, forward or backward: events number `start` up to `stop`."""

    unit: int
    phase: str
    start: int
    stop: int


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once, when, and as what. `by_category` adds up to `bytes`.

    `largest`: (category, operator, storages, bytes) of what took most, by operator.
    """

    bytes: int
    phase: str
    event: int
    by_category: dict[str, int]
    largest: tuple[tuple[str, str, int, int], ...] = ()


def categories(timeline: Timeline) -> dict[int, str]:
    """The category of every storage: its label, or kept activation, or temporary."""
    spans = [
        (start, timeline.marks[i + 1][0])
        for i, (start, phase) in enumerate(timeline.marks[:-1])
        if phase == "forward"
    ]
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    for i, (storage, nbytes) in enumerate(timeline.events):
        (birth if nbytes > 0 else death)[storage] = i
    end = len(timeline.events)
    out = {}
    for storage, born in birth.items():
        dead = death.get(storage, end)
        kept = any(start <= born < stop <= dead for start, stop in spans)
        out[storage] = timeline.labels.get(storage, "activations" if kept else "temporary")
    return out


def replay(timeline: Timeline, sizes: Mapping[int, int] | None = None) -> Peak:
    """The exact peak over the events from number `timeline.since` on.

    `sizes`: bytes that each storage really occupies (allocator blocks), in place of its own bytes.
    """
    alive: dict[int, int] = {}
    total = most = 0
    at = -1
    for i, (storage, nbytes) in enumerate(timeline.events):
        if nbytes > 0:
            size = nbytes if sizes is None else sizes[storage]
            alive[storage] = size
            total += size
        else:
            total -= alive.pop(storage)
        if i + 1 >= timeline.since and (total > most or at < 0):
            most, at = total, i
    kinds = categories(timeline)
    split = dict.fromkeys(CATEGORIES, 0)
    groups: dict[tuple[str, str], list[int]] = {}
    for storage, size in _alive_after(timeline, at, sizes).items():
        split[kinds[storage]] += size
        groups.setdefault((kinds[storage], timeline.origins.get(storage, "")), []).append(size)
    ranked = sorted(((*k, len(v), sum(v)) for k, v in groups.items()), key=lambda g: -g[3])
    phase = "idle"
    for start, name in timeline.marks:
        phase = name if start <= at else phase
    return Peak(most, phase, at, split, tuple(ranked[:LARGEST]))


def leave_out(timeline: Timeline, category: str) -> None:
    """Take every storage of one category out, in place: it lies elsewhere."""
    gone = {storage for storage, label in timeline.labels.items() if label == category}
    kept = [i for i, (storage, _) in enumerate(timeline.events) if storage not in gone]
    place = [bisect_left(kept, i) for i in range(len(timeline.events) + 1)]
    timeline.events = [timeline.events[i] for i in kept]
    timeline.marks = [(place[i], phase) for i, phase in timeline.marks]
    for span in timeline.spans:
        span.start, span.stop = place[span.start], place[span.stop]
    timeline.since = place[timeline.since]


def _alive_after(timeline: Timeline, event: int, sizes: Mapping[int, int] | None) -> dict[int, int]:
    alive: dict[int, int] = {}
    for storage, nbytes in timeline.events[: event + 1]:
        if nbytes > 0:
            alive[storage] = nbytes if sizes is None else sizes[storage]
        else:
            del alive[storage]
    return alive


def state_tensors(
    model: nn.Module, optimizer=None, average=None
) -> Iterable[tuple[str, torch.Tensor]]:
    """(category, tensor) for everything that outlives a step. Tied parameters come once.

    A parameter's own bytes and its scale are weights; its residual, and an optimizer's master copy,
    are master; everything else an optimizer keeps, and a running `average` (an EMA), is moments.
    """
    for category, tensor, _ in owned_tensors(model, optimizer, average):
        yield category, tensor


def owned_tensors(
    model: nn.Module, optimizer=None, average=None
) -> Iterable[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """The same with the parameter or buffer that each tensor belongs to; None where it has none."""
    seen: set[int] = set()
    for owner in (model.parameters(), model.buffers()):
        for tensor in owner:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield "weights", tensor, tensor
                yield from ((kind, part, tensor) for kind, part in _parts_of(tensor))
    if average is not None:
        names = dict(model.named_parameters())
        yield from (("moments", t, names.get(name)) for name, t in average.shadow.items())
    for parameter, name, value in _state_items(optimizer):
        master = any(word in name for word in ("master", "residual"))
        for tensor in tree_iter(value):
            if isinstance(tensor, torch.Tensor):
                yield ("master" if master else "moments"), tensor, parameter


@contextmanager
def follow(recorder, model: nn.Module, optimizer=None, average=None) -> Iterator[None]:
    """Mark the phases of whole steps that run inside, from outside of their code.

    A forward starts at the first module call after the phase before has ended; recomputation inside
    backward stays backward. `recorder`: a MemoryTracker or an AllocatorRecorder, already entered.
    """
    phase = "idle"

    def enter(name: str) -> None:
        nonlocal phase
        if name != phase:
            phase = name
            recorder.mark(name)

    def before_module(module, args):
        if phase != "backward" or torch._C._current_graph_task_id() == -1:
            enter("forward")

    def backward(tensor, *args, **kwargs):
        enter("backward")
        return plain_backward(tensor, *args, **kwargs)

    recorder.watch(model, optimizer, average)
    handles = [model.register_forward_pre_hook(before_module)]
    if (base := getattr(model, "base_model", None)) is not None and base is not model:
        handles.append(base.register_forward_pre_hook(before_module))
    if optimizer is not None:
        handles.append(optimizer.register_step_pre_hook(lambda *_: enter("step")))
        handles.append(optimizer.register_step_post_hook(lambda *_: enter("idle")))
    plain_backward = torch.Tensor.backward
    torch.Tensor.backward = backward
    try:
        yield
        enter("idle")
    finally:
        torch.Tensor.backward = plain_backward
        for handle in handles:
            handle.remove()


def _parts_of(parameter: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    for name, value in list(getattr(parameter, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor) and name not in ("grad", "_grad"):
            yield ("master" if "residual" in name else "weights"), value


def _state_items(optimizer) -> Iterable[tuple[torch.Tensor, str, object]]:
    if optimizer is None:
        return
    for parameter, state in optimizer.state.items():
        if isinstance(state, Mapping):
            yield from ((parameter, name, value) for name, value in state.items())


class MemoryTracker(TorchDispatchMode):
    """Records the life of every storage that an operator returns, real or fake, on one thread.

    Exact for bytes alive in tensors between operators; what an operator allocates and frees inside
    itself is seen only if `temporaries(func, args, kwargs, out)` tells its bytes.

        with MemoryTracker() as tracker:
            tracker.watch(model, optimizer)
            tracker.mark("forward"); loss = model(x)
            tracker.mark("backward"); loss.backward()
            tracker.mark("step"); optimizer.step()
            tracker.mark("idle")
        peak = replay(tracker.timeline)
    """

    def __init__(self, temporaries: Callable[..., int] | None = None) -> None:
        super().__init__()
        self.timeline = Timeline()
        self._temporaries = temporaries
        self._number: dict[int, int] = {}  # address of a live StorageImpl -> its number
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref] = {}
        self._watched: tuple[nn.Module, object, object] | None = None
        self._hooks: list = []
        self._count = 0
        self._operator = ""
        self._owners: dict[int, int] = {}  # id of a parameter -> its number
        self.on_mark: Callable[[], object] | None = None  # called when a phase begins

    def register(
        self, category: str, tensors: Iterable[torch.Tensor], owner: torch.Tensor | None = None
    ) -> None:
        """Label the storages of `tensors`, which count as alive from now on if they are new.

        `owner`: the parameter they belong to.
        """
        number = self._owners.get(id(owner))
        for tensor in tensors:
            storage = self._see(tensor)
            if self.timeline.labels.get(storage) == GATHERED:
                continue
            self.timeline.labels[storage] = category
            if number is not None:
                self.timeline.owners[storage] = number

    @property
    def now(self) -> int:
        """The number of events so far."""
        return len(self.timeline.events)

    def watch(self, model: nn.Module, optimizer=None, average=None) -> None:
        """Register everything that outlives a step, now and again at every mark."""
        self._watched = (model, optimizer, average)
        for number, parameter in enumerate((*model.parameters(), *model.buffers())):
            self._owners[id(parameter)] = number
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._label_gradient)
                self._hooks.append(hook)
        self._relabel()

    def mark(self, phase: str) -> None:
        """Start a phase: "forward", "backward", "step", or "idle" after the last."""
        if phase not in PHASES:
            raise ValueError(f"mark: {phase!r} is not one of {', '.join(PHASES)}")
        if self.on_mark is not None:
            self.on_mark()
        self._relabel()
        self.timeline.marks.append((len(self.timeline.events), phase))

    def start_span(self) -> None:
        """The peak that counts is the peak from here on."""
        self.timeline.since = len(self.timeline.events)

    def __enter__(self) -> MemoryTracker:
        self._plain_resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda *a: self._resized(*a)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*exc)
        # Storages that live on must not write into a finished timeline.
        self._refs.clear()
        self._number.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return out
        inside = self._temporaries(func, args, kwargs, out) if self._temporaries else 0
        self._operator = func._schema.name
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        if inside:  # the operator's own buffers are alive together with what it returns
            self.timeline.events.append((self._next(inside), -inside))
        return out

    def _next(self, nbytes: int) -> int:
        number, self._count = self._count, self._count + 1
        self.timeline.events.append((number, nbytes))
        self.timeline.origins[number] = self._operator
        return number

    def _see(self, tensor: torch.Tensor) -> int:
        return self._follow(local(tensor).untyped_storage())

    def _follow(self, storage: torch.UntypedStorage) -> int:
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._number.get(key)
        if known is not None:
            if self._sizes[known] == nbytes:
                return known
            self._forget(key, known)  # resized in place: one life ends, another begins
        if nbytes == 0:
            return EMPTY
        number = self._next(nbytes)
        self._number[key] = number
        self._sizes[number] = nbytes
        self._refs[number] = weakref.ref(storage, lambda _: self._forget(key, number))
        return number

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """A storage that was resized by itself, as FSDP2 does with weights that it gathers."""
        out = self._plain_resize(storage, nbytes)
        self._follow(storage)
        return out

    def _forget(self, key: int, number: int) -> None:
        if self._refs.pop(number, None) is not None:
            self.timeline.events.append((number, -self._sizes.pop(number)))
            if self._number.get(key) == number:
                del self._number[key]

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.register("gradients", [parameter.grad], parameter)

    def _relabel(self) -> None:
        if self._watched:
            for category, tensor, owner in owned_tensors(*self._watched):
                self.register(category, [tensor], owner)
