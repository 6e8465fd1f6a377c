"""The units of a model that are gathered and reduced together, and when each of them ran.

A unit is a decoder layer; what lies outside of layers (embedding, last norm, head) is one more, the
last. Hooks on modules and on the tensors between them mark the spans: a unit's backward lasts from
the gradient of its output to the gradient of its input, as FSDP2 sees it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..kernels.split import SplitParameter
from ..layers.decoder import Block
from ..layers.weights import grad_dtype_of
from ..recompute import decoder_layers
from .lifetimes import MemoryTracker, Span


@dataclass(frozen=True, slots=True)
class Fact:
    """A parameter as the planner needs it. `unit`: the layer's number, that of the rest last.

    `rows`: of the first dimension. `bytes`: of the parameter itself, 1 an element where it is
    codes. `grad_bytes`: of its gradient; 0 where it is frozen. `coded`: whether it travels as FP8
    codes. `expert`: whether it holds one matrix for each expert. `divided`: False for a buffer.
    """

    name: str
    unit: int
    rows: int
    numel: int
    bytes: int
    grad_bytes: int
    coded: bool
    expert: bool
    divided: bool = True

    @property
    def gathered(self) -> int:
        """Bytes of the whole parameter when it has been gathered."""
        return self.numel if self.coded else self.bytes


def facts_of(model: nn.Module, coded: set[int]) -> list[Fact]:
    """What there is to know of every parameter, then of every buffer, in the model's order. coded:
    ids of those that travel as codes although they are not kept as codes."""
    layers = list(decoder_layers(model))
    unit_of = {
        id(t): i for i, layer in enumerate(layers) for t in (*layer.parameters(), *layer.buffers())
    }
    out = []
    for name, p in model.named_parameters():
        codes = isinstance(p, SplitParameter) and p.dtype == torch.float8_e4m3fn
        grad = grad_dtype_of(p).itemsize * p.numel() if p.requires_grad else 0
        out.append(
            Fact(
                name, unit_of.get(id(p), len(layers)), p.shape[0] if p.dim() else 1, p.numel(),
                p.numel() * p.element_size(), grad, codes or id(p) in coded, p.dim() == 3,
            )
        )  # fmt: skip
    for name, b in model.named_buffers():
        unit = unit_of.get(id(b), len(layers))
        out.append(Fact(name, unit, 1, b.numel(), b.nbytes, 0, False, False, divided=False))
    return out


def separate(model: nn.Module) -> None:
    """Let no layer read a weight of the next one, which is not gathered then."""
    for module in model.modules():
        if isinstance(module, Block):
            module.__dict__["next_norm"] = None


@contextmanager
def spans_of(tracker: MemoryTracker, model: nn.Module) -> Iterator[None]:
    """Mark in the tracker's timeline when each decoder layer of `model` runs, forward and backward.

    A layer that runs again inside backward counts as backward.
    """
    spans, open_backward = tracker.timeline.spans, []

    def close_backward(unit: int | None = None) -> None:
        if open_backward and unit in (None, open_backward[-1].unit):
            open_backward.pop().stop = tracker.now

    def open_span(unit: int, phase: str) -> Span:
        span = Span(unit, phase, tracker.now, tracker.now)
        spans.append(span)
        return span

    def before(unit: int):
        def hook(module, args, kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if tensors and tensors[0].requires_grad:
                tensors[0].register_hook(lambda _grad: close_backward(unit))
            module.__dict__["_ottava_span"] = open_span(unit, "forward")

        return hook

    def after(unit: int):
        def begin(_grad) -> None:
            close_backward()
            open_backward.append(open_span(unit, "backward"))

        def hook(module, args, out):
            module.__dict__.pop("_ottava_span").stop = tracker.now
            x = out[0] if isinstance(out, tuple) else out
            if x.requires_grad:
                x.register_hook(begin)

        return hook

    def begin_late(_grad) -> None:
        if not any(s.unit == last and s.phase == "backward" and s.start >= run[0] for s in spans):
            open_backward.append(open_span(last, "backward"))

    def phase_begins() -> None:
        close_backward()
        run[0] = tracker.now

    handles, run = [], [0]
    layers = list(decoder_layers(model))
    last = len(layers) - 1
    for p in layers[-1].parameters():
        if p.requires_grad:  # the last norm may take the gradient of the last layer's output
            handles.append(p.register_hook(begin_late))
    for unit, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(before(unit), with_kwargs=True))
        handles.append(layer.register_forward_hook(after(unit)))
    tracker.on_mark = phase_begins
    try:
        yield
    finally:
        tracker.on_mark = None
        for handle in handles:
            handle.remove()
