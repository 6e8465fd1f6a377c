"""How ranks work together, as the trainer sees it: prepare, backward, step, state.

    strategy = strategy_of(run)                      # joins the other processes
    optimizer = strategy.prepare(model)              # shards what it shards; the optimizer over it
    strategy.backward(loss, last=...)                # gradients of the whole window after the last
    strategy.step(scaler, grad_scale)                # False where an overflow forbids it
    strategy.whole(tensor), .optimizer_state()       # what a checkpoint holds, on rank 0

`Strategy` itself is one process alone, where every agreement is already reached. The trainer's loop
is the same under all of them: every decision in it is made from numbers on which the ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import prepare
from ..config import Run
from ..optim.adamw import AdamW
from ..optim.clip import fast_norm, grad_norm
from ..optim.fused_backward import FusedBackward
from ..optim.loss_scaler import GradScaler
from .shards import Rows
from .traffic import Traffic


class Strategy:
    """One process. `forward`: what a batch is given to; the model itself unless an engine wraps it.

    `rank` of `world` processes; `is_main`: the one that writes files and speaks.
    """

    name = "single"
    shares = False  # whether state is given as `Rows`, which every rank writes to a file of its own
    rank = 0
    world = 1
    traffic: Traffic | None = None  # what is sent, where there are others

    def __init__(self, run: Run) -> None:
        self.config = run
        self.forward: Callable[..., Any]
        self.optimizer: torch.optim.Optimizer

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # ---- prepare ----

    def device(self, wanted: str) -> torch.device:
        """Where this rank computes: "auto", "cpu" or "cuda". Raises ValueError without such a GPU."""
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "device: torch finds no GPU here; use device=cpu, or see `ottava doctor`"
            )
        return torch.device(wanted)

    def prepare(self, model: nn.Module) -> AdamW:
        """Get the converted model ready for this strategy, in place; its optimizer."""
        self.forward = model
        self.optimizer = prepare.make_optimizer(self.config, model)
        return self.optimizer

    def can_demote(self, row: str) -> bool:
        """Whether the plan's row would compute in high precision if it were told to: its layers are
        given more of their weights than FP8 codes."""
        return True

    def fuse(self, model: nn.Module) -> FusedBackward | None:
        """Put the optimizer's step inside backward where the run's settings say so; the handle."""
        return prepare.fuse(self.config, model, self.optimizer)

    # ---- a step ----

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Gradients of one micro-batch; after the `last` of a window, summed over ranks."""
        loss.backward()

    def norm(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """FP32 0-dim norm of the whole gradient, as `fast_norm` gives it; the same on all ranks."""
        return fast_norm(parameters)

    def exact_norm(self, parameters: list[torch.Tensor]) -> float:
        """The same from FP64 squares, which do not overflow. Slow."""
        return float(grad_norm(parameters))

    def step(self, scaler: GradScaler, grad_scale: float | None) -> bool:
        """The optimizer's update, on all ranks or on none; whether it was made."""
        return scaler.step(self.optimizer, grad_scale=grad_scale)

    # ---- agreement, between hosts: nothing here waits for a device ----

    def sum(self, *values: float) -> list[float]:
        """Each value summed over ranks, in FP64. A NaN anywhere is a NaN everywhere."""
        return list(values)

    def first(self, number: int) -> int:
        """The smallest `number` of any rank."""
        return number

    def on_main(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do something once, on rank 0; its result, or what it raises, reaches every rank."""
        return work(*args, **kwargs)

    def collect(self, value: Any) -> list[Any]:
        """The `value` of every rank, in order (plain data and tensors on the CPU)."""
        return [value]

    # ---- state: what a checkpoint holds can be continued by any strategy, on any ranks ----

    def settle(self) -> None:
        """Before state is read between two steps: all ranks know what each will know."""

    def whole(self, t: torch.Tensor) -> torch.Tensor | Rows | dict[str, Rows] | None:
        """What a checkpoint is given for a tensor; all ranks call it. Itself; or gathered from all
        ranks, None except on rank 0; or where a strategy `shares`, its `Rows` here, of a split
        master by part."""
        return t

    def share(self, value: Any, like: torch.Tensor) -> torch.Tensor:
        """This rank's share of a whole tensor, or of one in files, as `like` is shared."""
        return value if isinstance(value, torch.Tensor) else value[:]

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state, whole, without split masters."""
        return self.optimizer.state_dict(weights=False)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Restore what `optimizer_state` gave, on any number of ranks. Raises ValueError."""
        refuse_partitions(state)
        self.optimizer.load_state_dict(state)

    def loading(self, model: nn.Module) -> AbstractContextManager:
        """Where whole weights are copied into the model."""
        return nullcontext()

    def failed(self) -> None:
        """This rank cannot go on, for a reason that it has said: the others are to end, too."""

    def folder(self, out: str) -> Path:
        """Where this rank's own lines go: the run's folder, or ranks/<rank> in it."""
        return Path(out) if self.is_main else Path(out) / "ranks" / str(self.rank)

    def notes(self) -> list[str]:
        """What to say about this strategy when a run begins."""
        return []


def refuse_partitions(state: dict[str, Any]) -> None:
    """Raise ValueError for the state that DeepSpeed's ZeRO has: flat, and cut for so many ranks."""
    if "ranks" in state:
        raise ValueError(
            f"it was written by ZeRO-{state['stage']} on {len(state['ranks'])} rank(s), and "
            "continues only so; export it and start from its weights"
        )
