"""A training step of fixed shapes as one CUDA graph: captured once, then replayed.

    step = CapturedStep(forward, optimizer, example)     # forward(batch) -> loss
    loss = step(batch)                                    # on the device, no wait

A step launches thousands of kernels, and on a fast GPU the launches take longer than the kernels. A
replay launches them all at once, with the arguments and addresses of the capture. What differs from
step to step therefore lies in device memory: the batch in fixed buffers, AdamW's rate, step and
random keys in its clock (optim/clock.py). The first steps run as always, on the side stream that
the capture uses (kernels are compiled, states made, workspaces allocated); the capture itself runs
nothing. All of them give the same numbers.

Given up: anything that Python does inside the step (hooks, counters) happens only while it still
runs it, shapes are fixed, and the graph holds the memory of a step's activations until it is
dropped. `torch.cuda.max_memory_allocated` does not see that memory: add `held_by_graphs`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..layers.delayed import clock as rounding
from ..optim.adamw import AdamW
from ..optim.clock import DeviceClock, Update, advance

WARMUP = 3  # steps before the capture

_log = logging.getLogger("ottava")


class CaptureError(RuntimeError):
    """The step cannot be captured. Carries one line; nothing of the training state has changed."""


class Lane:
    """The side stream and the memory pool of all graphs of one optimizer, on one GPU.

    Raises ValueError on another device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"CUDA graphs need a GPU; the model is on {self.device}")
        self.stream = torch.cuda.Stream(self.device)
        self.renew()

    def synchronize(self) -> None:
        """Wait until nothing runs on the GPU: what a graph uses must not go while it replays."""
        torch.cuda.synchronize(self.device)

    def renew(self) -> None:
        """Use a new pool from now on; the old one's memory goes back with its last graph."""
        self.pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The side stream: after all that was launched before, and before all that comes after."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """(graph, what `step` returned). Nothing runs: the result is there after a replay."""
        # cuBLAS keeps a workspace for each thread and stream, which anyone may drop. The graph gets
        # its own: made during the capture, and afterwards known to nobody else.
        torch._C._cuda_clearCublasWorkspaces()
        # Nodes of an earlier step's autograd graph remember the stream that they ran on.
        gc.collect()
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what a collection frees may call the driver, which ends a capture
        try:
            # The outer one restores the stream also where the end of the capture fails.
            with (
                torch.cuda.stream(self.stream),
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ),
            ):
                out = step()
        except RuntimeError:
            self._end_failed()
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if collects:
                gc.enable()
        return graph, out

    def _end_failed(self) -> None:
        """Take the allocator out of a capture that could not be ended; its pool is freed."""
        index = self.stream.device.index
        with suppress(RuntimeError):  # the capture itself ended well, and only the step did not
            torch._C._cuda_endAllocateToPool(index, self.pool)
            torch._C._cuda_releasePool(index, self.pool)


class Buffers:
    """Device tensors of fixed shapes, contiguous, that batches are copied into without waiting."""

    def __init__(self, example: Mapping[str, torch.Tensor], device: torch.device | str) -> None:
        self._fixed = {
            name: torch.zeros(value.shape, dtype=value.dtype, device=device)
            for name, value in example.items()
        }

    def fill(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Copy in `batch`; names beyond the example's are ignored. ValueError: it does not fit."""
        for name, fixed in self._fixed.items():
            value = batch.get(name)
            if value is None or value.shape != fixed.shape or value.dtype != fixed.dtype:
                got = None if value is None else (value.dtype, tuple(value.shape))
                raise ValueError(
                    f"captured step: {name} was {fixed.dtype} {tuple(fixed.shape)} and is {got}; "
                    "make another step for other shapes"
                )
            if fixed.is_cuda and not value.is_cuda:
                value = value.pin_memory()  # the allocator keeps it until the copy is done
            fixed.copy_(value, non_blocking=True)

    def views(self) -> dict[str, torch.Tensor]:
        """The tensors as new objects, so that nothing that rides on one outlives a step."""
        return {name: fixed.view(fixed.shape) for name, fixed in self._fixed.items()}


class StepGraph:
    """One whole training step: it runs `warmup` times, is captured, and replayed.

    Every step advances the host's counters (AdamW's, and that of stochastic rounding) as if Python
    had run it.
    """

    def __init__(
        self, optimizer: AdamW, lane: Lane, clock: DeviceClock, *, warmup: int = WARMUP
    ) -> None:
        self.optimizer, self.lane, self.clock = optimizer, lane, clock
        self._warmup = self._left = warmup
        self._graph: Any = None
        self._out: torch.Tensor | None = None
        self._updates: list[Update] = []
        self._places: list[Any] = []

    @property
    def captured(self) -> bool:
        """Whether the next step is a replay."""
        return self._graph is not None

    def run(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Take one step; what it returned, which the next step overwrites. Raises CaptureError.

        step: always the same; it computes gradients, calls `optimizer.step` once, leaves no
        gradient behind and returns a tensor.
        """
        if self._graph is not None and self._places != _places(self.optimizer):
            self.drop()
            self._left = self._warmup
        if self._graph is None:
            if self._left:
                self._left -= 1
                return self._launch(step)
            self._capture(step)
        return self._replay()

    def take_back(self) -> None:
        """The step just run changed nothing on the device (found_inf): nor did it count."""
        if not self.clock.counts_skips:
            advance(self._updates, -1)
        rounding.step -= 1

    def drop(self) -> None:
        """Give the graph's memory back. The next step captures it again."""
        if self._graph is not None:
            self.lane.synchronize()
            self._graph = self._out = None
            self.lane.renew()

    def _launch(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.clock.wind(self.optimizer)
        self.optimizer.clock = self.clock
        try:
            with self.lane.entered():
                return step()
        finally:
            self.optimizer.clock = None
            self._updates = self.clock.updated

    def _capture(self, step: Callable[[], torch.Tensor]) -> None:
        optimizer, rounds = self.optimizer, rounding.step
        optimizer.zero_grad(set_to_none=True)
        states = sum(len(state) for state in optimizer.state.values())
        self.clock.wind(optimizer)
        optimizer.clock = self.clock
        failure = ""
        try:
            graph, out = self.lane.capture(step)
        except RuntimeError as error:
            # Raised anew below: this one holds the frames of the step, and they its tensors.
            _log.debug("a capture failed", exc_info=True)
            failure = _first_line(error)
            if optimizer.fused is not None:
                optimizer.fused.give_up()
        finally:
            optimizer.clock = None
            optimizer.zero_grad(set_to_none=True)
            self._updates = self.clock.updated
            advance(self._updates, -1)
            rounding.step = rounds
        if not failure and states != sum(len(state) for state in optimizer.state.values()):
            graph = out = None
            failure = "a parameter that never had a gradient has one now"
        if failure:
            self.lane.renew()
            raise CaptureError(f"the step cannot be captured: {failure}")
        self._graph, self._out, self._places = graph, out, _places(optimizer)

    def _replay(self) -> torch.Tensor:
        self.clock.set_for(self._updates)
        self._graph.replay()
        advance(self._updates)
        rounding.step += 1
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        torch.autograd.graph.increment_version(parameters)
        return self._out


def _places(optimizer: AdamW) -> list[Any]:
    """Where a capture found weights and moments, and the numbers that it took as constants."""
    out: list[Any] = []
    for group in optimizer.param_groups:
        out += (group["betas"], group["eps"], group["weight_decay"], group["seed"])
        for p in group["params"]:
            moment = optimizer.state.get(p, {}).get("m")
            out += (p.requires_grad, p.data_ptr(), None if moment is None else moment.data_ptr())
    return out


def _first_line(error: BaseException) -> str:
    """What went wrong first: the end of a failed capture raises an error of its own on top."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class CapturedStep:
    """A step for one's own loop: forward, backward, `optimizer.step()`, captured and replayed.

    forward(batch) -> loss (0-dim, still part of the graph of autograd), on a dict of tensors with
    the names, shapes and dtypes of `example`, on the device. AdamW may be fused with backward. No
    loss scaling, no clipping, no accumulation: the trainer's steps have those (captured.py).
    """

    def __init__(
        self,
        forward: Callable[[dict[str, torch.Tensor]], torch.Tensor],
        optimizer: AdamW,
        example: Mapping[str, torch.Tensor],
        *,
        lane: Lane | None = None,
    ) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        self.forward, self.optimizer = forward, optimizer
        self._buffers = Buffers(example, device)
        self._graph = StepGraph(optimizer, lane or Lane(device), DeviceClock(device))

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Train on `batch` (on the host or the device); the loss, on the device."""
        self._buffers.fill(batch)
        return self._graph.run(self._step).clone()

    def _step(self) -> torch.Tensor:
        torch.clear_autocast_cache()
        loss = self.forward(self._buffers.views())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()
        return loss.detach()


def held_by_graphs(device: torch.device | str | None = None) -> int:
    """Bytes that CUDA graphs hold for their replays and that no tensor occupies now.

    What a replay takes in all is `torch.cuda.memory_allocated()` plus this.
    """
    index = torch.device("cuda" if device is None else device).index
    index = torch.cuda.current_device() if index is None else index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )
