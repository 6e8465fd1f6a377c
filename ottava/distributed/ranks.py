"""Several processes that agree: joining, and agreement between hosts.

Counts, losses and decisions are agreed on through the CPU (gloo), so that no rank waits for its
device and so that a rank that dies is noticed by the others at the next agreement: its sockets
close. Whoever does not get so far is ended by watch.py. Gradients and weights go through the device's own backend.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import ConfigError, Run
from ..layers.delayed import agree_amax, clock
from ..optim.loss_scaler import GradScaler
from .strategy import Strategy
from .traffic import Traffic
from .watch import Watch


class RankLost(RuntimeError):
    """Another rank ended. Carries one line."""


class Ranks(Strategy):
    """The base of every strategy with more than one process. Started by torchrun or DeepSpeed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.traffic = Traffic()

    def device(self, wanted: str) -> torch.device:
        """This rank's own GPU, or the CPU; joins the process group, which depends on it."""
        device = super().device(wanted)
        if device.type == "cuda":
            there = torch.cuda.device_count()
            if self.local_rank >= there:
                raise ConfigError(
                    f"distributed: {self.local_rank + 1} processes or more were started here for "
                    f"{there} GPU(s); use --nproc-per-node={there}"
                )
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        self._join(device)
        return device

    def _join(self, device: torch.device) -> None:
        self.traffic.install()
        if dist.is_initialized():
            return
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        seconds = datetime.timedelta(seconds=self.config.distributed.timeout_s)
        dist.init_process_group(
            backend, timeout=seconds, device_id=device if device.type == "cuda" else None
        )
        try:
            _process["watch"] = Watch(self.rank, self.world, self.on_main)
        except OSError as e:
            raise ConfigError(
                f"distributed: rank {self.rank} cannot reach rank 0 at "
                f"{os.environ.get('MASTER_ADDR')}, to notice a rank that dies: {e}"
            ) from e
        atexit.register(leave)

    def failed(self) -> None:
        _process.pop("watch", None)  # so that it says no goodbye: the others are to end, too

    def part_ways(self, model: nn.Module) -> None:
        """After the weights are made: see that they are the same everywhere, then let every rank
        draw its own random numbers (dropout, rounding of its own activations)."""
        sums = [float(p.detach().double().sum()) for p in model.parameters() if not p.is_meta]
        if any(other != sums for other in self.collect(sums)):
            raise ConfigError(
                "distributed: the ranks did not build the same weights; give all of them the same "
                "model folder, run file and versions"
            )
        if self.rank:
            torch.manual_seed(self.config.seed + self.rank)
            clock.seed = self.config.seed + (self.rank << 16)

    # ---- agreement ----

    def sum(self, *values: float) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        with self.connected():
            dist.all_reduce(total)
        return total.tolist()

    def first(self, number: int) -> int:
        least = torch.tensor([number])
        with self.connected():
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def on_main(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = work(*args, **kwargs)
            except Exception as error:  # every rank has to raise it
                answer[1] = error
        with self.connected():
            dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def collect(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        with self.connected():
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Say in one line that another rank has ended, where a collective fails inside."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if not any(word in text for word in _LOST):
                raise
            raise RankLost(
                f"rank {self.rank}: lost another rank, see its own message; the same command "
                "continues from the newest checkpoint"
            ) from error

    # ---- a step ----

    def step(self, scaler: GradScaler, grad_scale: float | None) -> bool:
        agree_amax(self.parameters, all_max)
        return super().step(scaler, grad_scale)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What the optimizer holds."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def notes(self) -> list[str]:
        return [f"{self.world} ranks, {self.name}"]


_LOST = ("Connection closed", "Connection reset", "Timed out", "timed out", "Broken pipe",
         "recvBytes", "sendBytes", "Connection refused", "NCCL")  # fmt: skip


def all_max(values: torch.Tensor) -> None:
    # NaN has no order in a maximum over ranks; infinity is refused just the same
    dist.all_reduce(values.nan_to_num_(nan=torch.inf, posinf=torch.inf), dist.ReduceOp.MAX)


_process: dict[str, Watch] = {}  # as many as there are process groups: one


def leave() -> None:
    """End in order: the other ranks need not end with this one."""
    watch = _process.pop("watch", None)
    if watch is not None:
        watch.goodbye()
    if dist.is_initialized():
        dist.destroy_process_group()
    if watch is not None:
        watch.close()
