"""Faults inside a run's own process: functions of a Trainer that is about to run.

Nothing here says what should come out; faults.py measures that.
"""

from __future__ import annotations

import ctypes
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..layers.delayed import AmaxHistory
from ..train.trainer import Trainer
from .fault_runs import Case, Inject

ROW = "model.layers.1.self_attn.o_proj"
_MMAP_THRESHOLD = -3  # of glibc's mallopt
Act = Callable[[Case], None]

# ---- inside the process -----------------------------------------------------------------------


def before_step(number: int, do: Inject, *, times: int = 1) -> Inject:
    """Do something right before step `number` (and the `times` - 1 steps that are taken next)."""

    def inject(t: Trainer) -> None:
        step_once, left = t.step_once, [times]

        def disturbed():
            if left[0] and (t.step + 1 >= number):
                left[0] -= 1
                do(t)
            return step_once()

        t.step_once = disturbed  # type: ignore[method-assign]

    return inject


def bad_input(number: int, value: float) -> Inject:
    """What the embedding gives is `value` somewhere, in one step."""

    def poison(t: Trainer) -> None:
        def once(_module, _x, y):
            handle.remove()
            y = y.clone()
            y[0, 3, 5] = value
            return y

        handle = t.model.get_input_embeddings().register_forward_hook(once)

    return before_step(number, poison)


def bad_row(number: int) -> Inject:
    """One row gives NaN from a step on, whenever it computes in 8 bits."""

    def inject(t: Trainer) -> None:
        def poisoned(module, _x, y):
            return y * math.nan if t.step + 1 >= number and module.recipe is not None else y

        t.model.get_submodule(ROW).register_forward_hook(poisoned)

    return inject


def bad_gradient(number: int, value: float) -> Inject:
    """One gradient is `value`, in one step."""

    def poison(t: Trainer) -> None:
        def once(grad):
            handle.remove()
            return grad * value

        handle = t.model.get_parameter(f"{ROW}.weight").register_hook(once)

    return before_step(number, poison)


def bad_weight(number: int, value: float) -> Inject:
    """Memory fails: one weight is `value` from now on."""

    def poison(t: Trainer) -> None:
        with torch.no_grad():
            t.model.get_parameter(f"{ROW}.weight").data.view(-1)[7] = value

    return before_step(number, poison)


def bad_moment(number: int, which: str, value: float) -> Inject:
    """Memory fails: one value of a moment is `value` from now on."""

    def poison(t: Trainer) -> None:
        state = t.optimizer.state[t.model.get_parameter(f"{ROW}.weight")]
        state[which].view(-1)[7] = value

    return before_step(number, poison)


def wrong_scales(number: int, operand: int, factor: float) -> Inject:
    """Delayed scaling remembers amaxes of one operand (0 input, 2 grad_output) times `factor`."""

    def wrong(t: Trainer) -> None:
        for module in t.model.modules():
            for history in vars(module).values():
                if isinstance(history, AmaxHistory):
                    history.amax[operand] *= factor

    return before_step(number, wrong, times=10)


def high_rate(number: int, factor: float, times: int) -> Inject:
    """The learning rate is `factor` times what it should be, for so many steps."""

    def raise_it(t: Trainer) -> None:
        for group in t.optimizer.param_groups:
            group["lr"] = factor * max(t.schedule.peaks)

    return before_step(number, raise_it, times=times)


def bad_token(number: int) -> Inject:
    """A batch holds a token id that the model does not know."""

    def poison(t: Trainer) -> None:
        batch_at = t.data.train.batch_at

        def broken(*args: Any, **kwargs: Any):
            batch = batch_at(*args, **kwargs)
            batch["input_ids"][0, 3] = 1 << 20
            return batch

        t.data.train.batch_at = broken  # type: ignore[method-assign]

    return before_step(number, poison)


def hung_loader(number: int) -> Inject:
    """The data loader does not come back."""

    def hang(t: Trainer) -> None:
        t.data.train.batch_at = lambda *_: time.sleep(3600)  # type: ignore[method-assign]
        t._drawer.seconds = 1.0

    return before_step(number, hang)


def clock_back(number: int) -> Inject:
    """All clocks of the process jump back by an hour, and stand still for a step."""

    def turn(_t: Trainer) -> None:
        for name in ("time", "perf_counter", "monotonic"):
            stopped = getattr(time, name)() - 3600.0
            setattr(time, name, lambda stopped=stopped: stopped)

    return before_step(number, turn)


def little_memory(*, divisible: bool) -> Inject:
    """The allocator really gives up in the first step: hardly any address space is left until its
    micro-batches are smaller, or, not `divisible`, for the next try too."""

    def limit(t: Trainer) -> None:
        launch, split = t.launch_step, t.split_batches
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        # tensors come from new address space, never from what the heap has left
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)

        def limited(*window: Any):
            if t.step == 0 and (t.split == 1 or not divisible):
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                most = pages * resource.getpagesize() + (256 << 10)
                resource.setrlimit(resource.RLIMIT_AS, (most, hard))
            return launch(*window)

        def relieved() -> str:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
            return split()

        t.launch_step, t.split_batches = limited, relieved  # type: ignore[method-assign]

    return limit


def small_files(number: int, nbytes: int, until: int = 10**9) -> Inject:
    """No file may be larger than `nbytes` (a quota), from a step on, until another."""

    def inject(t: Trainer) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

        def limit(size: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

        before_step(number, lambda _t: limit(nbytes))(t)
        before_step(until, lambda _t: limit(hard))(t)

    return inject
