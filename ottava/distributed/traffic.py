"""What ranks send each other: bytes by kind and time spent waiting, from the calls really made.

While installed, the collectives of `torch.distributed` are counted as they are called, whoever calls
them: our strategies, FSDP2 or DeepSpeed. Bytes are those of the whole tensor (a gather's output, what
a reduction goes in with): on a ring of n ranks each sends (n - 1) / n of it, for an all-reduce twice.
Python objects that ranks exchange (decisions, results) are not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

# function -> kind, position and name of the argument whose bytes count
_CALLS = {
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "all_gather_single": ("all_gather", 0, "output_tensor"),
    "all_gather": ("all_gather", 0, "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "all_to_all": ("all_to_all", 1, "input_tensor_list"),
    "broadcast": ("broadcast", 0, "tensor"),
    "reduce": ("reduce", 0, "tensor"),
}
KINDS = tuple(dict.fromkeys(kind for kind, *_ in _CALLS.values()))


class Traffic:
    """Counts of this process. `nbytes`: by kind; `seconds`: in calls that block, since `reset`.

    On a GPU a call returns when it is queued, so `seconds` says nothing there.
    """

    def __init__(self) -> None:
        self.nbytes: Counter[str] = Counter()
        self.seconds = 0.0
        self._originals: dict[str, Callable] = {}

    def install(self) -> None:
        """Count from now on."""
        for name in _CALLS:
            original = getattr(dist, name, None)  # (no torch has all of them)
            if original is not None and name not in self._originals:
                original = getattr(original, "_uncounted", original)
                self._originals[name] = original
                setattr(dist, name, self._counted(original, *_CALLS[name]))

    def remove(self) -> None:
        """Put the functions back."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()

    def reset(self) -> None:
        self.nbytes.clear()
        self.seconds = 0.0

    def wait(self, work: dist.Work) -> None:
        """Wait for an asynchronous call."""
        begun = time.perf_counter()
        work.wait()
        self.seconds += time.perf_counter() - begun

    def _counted(self, call: Callable, kind: str, position: int, name: str) -> Callable:
        @wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts = args[position] if len(args) > position else kwargs.get(name)
            self.nbytes[kind] += _nbytes(counts)
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        counted._uncounted = call
        return counted


def _nbytes(t: Any) -> int:
    if isinstance(t, torch.Tensor):
        return t.numel() * t.element_size()
    return sum(map(_nbytes, t)) if isinstance(t, list | tuple) else 0
