"""What a rehearsed step computes and moves, operator by operator: FLOPs of products by their format,
of attention, and bytes of everything else that reads and writes memory.

M, N, K: sizes of a product. P: rows of all experts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_iter

from .cards import Card
from .lifetimes import Timeline

KINDS = ("fp8", "bf16", "fp32", "attention", "memory")
_BACKWARD = 2.5  # FLOPs of attention's backward over its forward's
_FORMATS = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.bfloat16: "bf16",
            torch.float16: "bf16"}  # fmt: skip


@dataclass
class Work:
    """`amounts`: by kind, FLOPs or bytes. `launches`: operators that start a kernel."""

    amounts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    launches: int = 0

    def add(self, other: Work) -> None:
        """Take another's in."""
        for kind, amount in other.amounts.items():
            self.amounts[kind] += amount
        self.launches += other.launches

    def times(self, factor: float) -> Work:
        """So many times as much."""
        amounts = {kind: amount * factor for kind, amount in self.amounts.items()}
        return Work(amounts, round(self.launches * factor))

    def seconds(self, card: Card) -> float:
        """How long the GPU is busy with it. Without an FP8 unit those products run in BF16."""
        rates = {k: getattr(card, k) or card.bf16 for k in KINDS}
        return sum(amount / rates[kind] for kind, amount in self.amounts.items())


class Counter:
    """Counts operators; give it to `Rehearsal.rehearse`. `now()`: the number of events so far."""

    def __init__(self) -> None:
        self.now: Callable[[], int] = lambda: 0
        self.entries: list[tuple[int, str, float]] = []

    def __call__(self, func, args, kwargs, out) -> None:
        found = _work_of(func, args, kwargs, out)
        if found is not None and found[1]:
            self.entries.append((self.now(), *found))

    def attention(self, q: torch.Tensor, v: torch.Tensor, backward: bool) -> None:
        """Fused attention of plain models, [B, H, T, D] q and [B, G, S, V] v, which is no operator
        of a rehearsal."""
        flops = _attention(q.transpose(1, 2), v.transpose(1, 2), True, None)
        self.entries.append((self.now(), "attention", flops * (_BACKWARD if backward else 1)))

    def by_span(self, timeline: Timeline) -> tuple[list[Work], dict[str, Work]]:
        """The counted step's work: of each span, and by phase what lies outside of spans."""
        spans = [Work() for _ in timeline.spans]
        outside = {phase: Work() for phase in ("forward", "backward", "step", "idle")}
        starts = sorted((s.start, i) for i, s in enumerate(timeline.spans))
        phases = sorted(timeline.marks)
        for at, kind, amount in self.entries:
            if at < timeline.since:
                continue
            k = bisect_right(starts, (at, len(spans))) - 1
            number = starts[k][1] if k >= 0 else -1
            if number >= 0 and at < timeline.spans[number].stop:
                work = spans[number]
            else:
                j = bisect_right(phases, (at, "~")) - 1
                work = outside[phases[j][1] if j >= 0 else "idle"]
            work.amounts[kind] += amount
            work.launches += 1
        return spans, outside


def _work_of(func, args, kwargs, out) -> tuple[str, float] | None:
    """(kind, amount) of one operator; None where it moves nothing."""
    name = func._schema.name
    if name in _PRODUCTS:
        return _PRODUCTS[name](args, out)
    if name == "ottava::attention":
        q, _, v, _, causal, window = args[:6]
        return "attention", _attention(q, v, causal, window)
    if name == "ottava::attention_backward":
        _, q, _, v, _, _, _, causal, window = args[:9]
        return "attention", _BACKWARD * _attention(q, v, causal, window)
    if func.is_view or "empty" in name or name.startswith(("prim::", "profiler::")):
        return None
    outputs = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
    if name in _LOOK_UPS:
        return "memory", 2.0 * sum(t.nbytes for t in outputs)
    inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    written = outputs
    if func._schema.is_mutable:  # what it changes in place it reads and writes
        names = zip(func._schema.arguments, args, strict=False)
        written = [t for a, t in names if a.alias_info is not None and isinstance(t, torch.Tensor)]
    return "memory", float(sum(t.nbytes for t in (*inputs, *written)))


def _attention(q_BTHD: torch.Tensor, v_BSGV: torch.Tensor, causal: bool, window) -> float:
    batch, length, heads, width = q_BTHD.shape
    keys = v_BSGV.shape[1]
    if window is not None and window < keys:
        pairs = length * window - window * (window - 1) / 2
    else:
        pairs = length * (keys + 1) / 2 if causal else length * keys
    return 2.0 * batch * heads * pairs * (width + v_BSGV.shape[-1])


def _format(t: torch.Tensor) -> str:
    return _FORMATS.get(t.dtype, "fp32")


def _product(first: int) -> Callable:
    """The last dimension of argument `first` is summed over; the output has the rest."""

    def count(args, out):
        a = args[first]
        return _format(a), 2.0 * out.numel() * a.shape[-1]

    return count


def _rows(first: int, second: int) -> Callable:
    """Rows are summed over: [P, N] and [P, K] give [E, N, K]."""

    def count(args, _out):
        a, b = args[first], args[second]
        return _format(a), 2.0 * a.shape[0] * a.shape[1] * b.shape[1]

    return count


def _grad_weight(args, _out):
    # codes of all experts' rows, transposed and end to end: P = elements / rows_a
    a, rows_a, rows_b = args[0], args[6], args[7]
    return _format(a), 2.0 * a.numel() * rows_b if rows_a else 0.0


def _block_grad_weight(args, _out):
    return "fp8", _rows(0, 1)(args, None)[1]


_PRODUCTS: dict[str, Callable] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::addmm_": _product(1),
    "aten::baddbmm": _product(1),
    "aten::baddbmm_": _product(1),
    "ottava::gemm": _product(0),
    "ottava::grouped_gemm": _product(0),
    "ottava::grouped_matmul": _product(0),
    "ottava::grouped_outer": _rows(0, 1),
    "ottava::grouped_grad_weight": _grad_weight,
    "ottava::grouped_block_grad_weight": _block_grad_weight,
    "ottava_models::expert_linear": _product(0),
    "ottava_models::expert_linear_grad_weight": _rows(0, 1),
}
_LOOK_UPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
