"""When memory runs out: how much was needed for what, and which settings would have fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..config import Run
from ..planner.memory import GIB, estimate_memory


class OutOfMemory(RuntimeError):
    """A step did not fit. Carries what was needed, and the settings that would fit."""


@contextmanager
def explained(run: Run, device: torch.device, step: int) -> Iterator[None]:
    """Turn an allocator's error inside into OutOfMemory with the planner's answer."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e):
            raise
        # the failed step's tensors hang on the traceback; let go of them before planning
        first = (str(e).splitlines() or [type(e).__name__])[0]
        e.__traceback__ = None
        raise OutOfMemory(explanation(run, device, step, first)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, of the GPU or of the CPU, gave up."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(w in str(error) for w in _CPU_WORDS)


_CPU_WORDS = ("can't allocate memory", "std::bad_alloc", "could not create a memory")


def explanation(run: Run, device: torch.device, step: int, error: str) -> str:
    """One line: what the step needs by category, what there is, and what would fit."""
    total = available_gib(device)
    try:
        report = estimate_memory(run, device=device.type)
        advice = report.advice(total)
    except Exception as e:  # the planner must never hide the error that it explains
        return f"out of memory in step {step + 1}: {error} (and it cannot be planned: {e})"
    largest = sorted(report.by_category.items(), key=lambda kv: -kv[1])
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in largest if size)
    text = (
        f"out of memory in step {step + 1}: a step needs {report.peak_gib:.2f} GiB ({parts}) and "
        f"{total:.2f} GiB are there"
    )
    if advice:
        fits = "; or ".join(f"{a.settings} ({a.peak_gib:.2f} GiB)" for a in advice)
        return f"{text}; would fit: {fits}"
    if report.fits(total):
        return f"{text}, but something else holds memory on this device"
    return f"{text}; no preset, recompute or micro-batch fits: take a smaller model or sequence"


def available_gib(device: torch.device) -> float:
    """All memory of the device in GiB, less what other processes hold on a GPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (free + torch.cuda.memory_reserved(device)) / GIB
    with open("/proc/meminfo", encoding="ascii") as f:
        kib = {k.strip(): int(v.split()[0]) for k, v in (line.split(":") for line in f)}
    return kib["MemTotal"] / 2**20
