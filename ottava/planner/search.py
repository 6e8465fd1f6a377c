"""What fits on a card: the longest sequence, the largest micro-batch, of a process alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..config import Run
from .memory import GIB, MemoryReport
from .ranks import Layout
from .several import Several

GRAIN = 256  # tokens: lengths are multiples of it
_MOST = 1 << 24


def longest(run: Run, gib: float) -> MemoryReport | None:
    """The longest sequence, to 256 tokens, whose step fits into `gib` GiB; None if none does."""
    start = max(GRAIN, run.data.sequence_length // GRAIN * GRAIN)

    def at(tokens: int) -> Run:
        return replace(run, data=replace(run.data, sequence_length=tokens))

    return _largest(at, start, GRAIN, gib)


def largest_batch(run: Run, gib: float) -> MemoryReport | None:
    """The most sequences in one forward whose step fits into `gib` GiB; None if not even one."""

    def at(sequences: int) -> Run:
        return replace(run, train=replace(run.train, micro_batch=sequences))

    return _largest(at, 1, 1, gib)


def _largest(at: Callable[[int], Run], start: int, grain: int, gib: float) -> MemoryReport | None:
    """The report at the largest multiple of `grain` that fits. Bytes grow with the number, nearly
    in proportion: a line through what is known says where to look next."""
    known: dict[int, MemoryReport] = {}

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = Several(at(n)).memory(Layout())
        return known[n].fits(gib)

    if not fits(grain):
        return None
    low, high = grain, max(start, 2 * grain)
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST:
            return known[low]
    while high - low > grain:
        rise = (known[high].peak_bytes - known[low].peak_bytes) / (high - low)
        guess = low + int((gib * GIB - known[low].peak_bytes) / max(rise, 1.0))
        guess = min(max(guess // grain * grain, low + grain), high - grain)
        if fits(guess):
            low = guess
            if low + grain < high and not fits(low + grain):
                high = low + grain
        else:
            high = guess
    return known[low]
