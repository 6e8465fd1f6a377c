"""A stretch of a model that runs again in backward instead of keeping what it made.

    y = run_stretch(module.forward, args, kwargs, keep="int8")

Autograd gets a number for every tensor that is saved inside, and the first one that backward asks
for makes the stretch run again from its input, which is kept in int8: one byte a feature, and a BF16
scale for 128 of them. The output and the loss are exact; gradients are those at an input that is off
by int8's rounding. keep="high" keeps the input as it is, and gradients are the same to the bit.

The second run ends where the last tensor has been made again, so what comes after is not paid for
(`end_with`: of the gated MLP its down projection). Choices that a rounded input could turn over, as
of experts, are not made again but remembered (`decided`). What a stretch leaves outside (a router's
loss) has gradients as ever, since it is one graph with the rest.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .kernels.int8 import dequantize_int8, quantize_int8
from .numerics.formats import BLOCK

KEEPS = ("int8", "high")


def run_stretch(
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    keep: str = "int8",
    precision: Callable[[], AbstractContextManager] = nullcontext,
    draws_random: bool = True,
) -> Any:
    """function(*args, **kwargs), which runs again in backward.

    keep: how the first argument (float, [..., H]) is kept, "int8" or "high" (as it is); the others
    are kept as they are. precision: a context for the second run, beside torch's autocast, which is
    put back. draws_random: put random states back too, which a CUDA graph does not allow.
    Raises ValueError for another `keep`; backward RuntimeError where the second run differs.
    """
    if keep not in KEEPS:
        raise ValueError(f"stretch: keep={keep!r} is not one of {', '.join(KEEPS)}")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    stretch = _Stretch(function, args, kwargs, keep, precision, draws_random)
    with _now.entered(stretch, again=False), saved_tensors_hooks(stretch.pack, stretch.unpack):
        return function(*args, **kwargs)


def decided(make: Callable[[], Tensor]) -> Tensor:
    """What `make` returns, int64 in [0, 2^15); in a stretch that runs again, what it returned the
    first time, of which 2 bytes each were kept."""
    if torch.compiler.is_compiling() or _now.stretch is None:
        return make()
    return remembered(lambda: make().to(torch.int16)).long()


def remembered(make: Callable[[], Tensor]) -> Tensor:
    """What `make` returns; in a stretch that runs again, what it returned the first time, which was
    kept as it is."""
    if torch.compiler.is_compiling() or _now.stretch is None:
        return make()
    return _now.stretch.remember(make, _now.again)


def ends_after(ctx, number: int) -> bool:
    """Whether a stretch runs again here and ends once an autograd function, whose `ctx` this is, has
    saved `number` tensors (parameters apart): what it would make after that, nobody reads."""
    if torch.compiler.is_compiling() or not _now.again or not any(ctx.needs_input_grad):
        return False
    return _now.stretch.ends_after(number)


def end_with(ctx, tensors: tuple[Tensor | None, ...]) -> None:
    """To be called where an autograd function is about to save `tensors`: ends a stretch that
    `ends_after` them."""
    kept = [t for t in tensors if t is not None and not isinstance(t, nn.Parameter)]
    if ends_after(ctx, len(kept)):
        for tensor in kept:
            _now.stretch.again(tensor)


def runs_again() -> bool:
    """Whether a stretch runs again here: what its first run noted is not noted twice."""
    return not torch.compiler.is_compiling() and _now.again


class _Now(threading.local):
    """The innermost stretch that runs in this thread, and whether it runs again."""

    stretch: _Stretch | None = None
    again: bool = False

    @contextmanager
    def entered(self, stretch: _Stretch, again: bool) -> Iterator[None]:
        before = self.stretch, self.again
        self.stretch, self.again = stretch, again
        try:
            yield
        finally:
            self.stretch, self.again = before


_now = _Now()


class _Ended(Exception):
    """The way out of a second run that has made all it was asked for."""


class _Input:
    """The first argument of a stretch as it is kept; `restored()` gives it back."""

    __slots__ = ("codes", "dtype", "requires_grad", "scale", "shape")

    def __init__(self, x: Tensor, keep: str) -> None:
        self.shape, self.dtype, self.requires_grad = x.shape, x.dtype, x.requires_grad
        self.codes, self.scale = x.detach(), None
        if keep == "int8":
            self.codes, self.scale = quantize_int8(self.codes.reshape(-1, x.shape[-1]))

    def restored(self) -> Tensor:
        x = self.codes
        if self.scale is not None:
            x = dequantize_int8(self.codes, self.scale, BLOCK, self.dtype).view(self.shape)
        return x.detach().requires_grad_(self.requires_grad)


_GONE = object()  # in place of an input that has done its work


class _Stretch:
    """One call of a function, and how to make again what autograd saved in it."""

    def __init__(self, function, args, kwargs, keep, precision, draws_random) -> None:
        self.function, self.precision = function, precision
        first = args[0] if args and isinstance(args[0], Tensor) else None
        taken = first is not None and first.is_floating_point()
        self.input = _Input(first, keep) if taken else None
        self.args, self.kwargs = args[1:] if taken else args, kwargs
        kind = "cpu" if first is None else first.device.type
        self.autocast = functools.partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self.random = _RandomStates(first) if draws_random else None
        self.saved: list[tuple[torch.Size, torch.dtype]] = []  # what autograd saved, in order
        self.made: dict[int, Tensor] = {}  # of those, what was made again and not yet asked for
        self.run = 0  # tensors that the running second run has made
        self.memory: list[Tensor] = []
        self.told = 0

    # ---- the first run ----

    def pack(self, tensor: Tensor) -> int | Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def remember(self, make: Callable[[], Tensor], again: bool) -> Tensor:
        if again:
            self.told += 1
            return self.memory[self.told - 1]
        self.memory.append(make())
        return self.memory[-1]

    # ---- backward ----

    def unpack(self, packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed not in self.made:
            self._run_again()
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self.input = _GONE  # no other backward can follow
        return self.made.pop(packed)

    def _run_again(self) -> None:
        if self.input is _GONE:
            raise RuntimeError(
                "recompute: what the layer saved is asked for twice; a second backward needs "
                "retain_graph=True in the first"
            )
        self.made, self.run, self.told = {}, 0, 0
        args = self.args if self.input is None else (self.input.restored(), *self.args)
        random = nullcontext() if self.random is None else self.random.restored()
        try:
            with (
                torch.enable_grad(), self.autocast(), self.precision(), random,
                _now.entered(self, again=True), saved_tensors_hooks(self.again, _never),
            ):  # fmt: skip
                self.function(*args, **self.kwargs)
        except _Ended:
            pass
        if self.run != len(self.saved):
            raise RuntimeError(
                f"recompute: the layer saved {self.run} tensors when it ran again, and "
                f"{len(self.saved)} before: it depends on something that changed"
            )

    def again(self, tensor: Tensor) -> None:
        """The saved-tensor hook of the second run, whose own graph is never used."""
        if isinstance(tensor, nn.Parameter):
            return
        number, self.run = self.run, self.run + 1
        if number < len(self.saved) and (tensor.shape, tensor.dtype) != self.saved[number]:
            raise RuntimeError(
                f"recompute: a tensor that was {self.saved[number]} is "
                f"{(tensor.shape, tensor.dtype)} when the layer runs again"
            )
        self.made[number] = tensor.detach()
        if self.run == len(self.saved):
            raise _Ended

    def ends_after(self, number: int) -> bool:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or hooks[0] != self.again:
            return False  # they go to something inside: another stretch, or offloading
        return self.run + number == len(self.saved)


def _never(_packed) -> Tensor:
    raise RuntimeError("recompute: the graph of a second run has no backward")


class _RandomStates:
    """The states of torch's generators where a stretch began."""

    def __init__(self, x: Tensor | None) -> None:
        self.cpu = torch.get_rng_state()
        self.device = x.device if x is not None and x.device.type == "cuda" else None
        self.cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        with torch.random.fork_rng([] if self.device is None else [self.device]):
            torch.set_rng_state(self.cpu)
            if self.device is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield
