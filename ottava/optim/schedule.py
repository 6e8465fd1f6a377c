"""Learning-rate schedules: a pure function of the number of real updates.

A step that was skipped (overflow, non-finite gradient) is no update: the schedule, the optimizer
and the EMA then stand still together.
"""

from __future__ import annotations

import math

import torch

KINDS = ("cosine", "linear", "constant")


def lr_factor(
    updates: int, *, kind: str, total: int, warmup: int = 0, min_ratio: float = 0.0
) -> float:
    """The next update's learning rate over the peak, after `updates` real updates.

    Warm-up rises linearly, update 1 of `warmup` already at 1 / warmup. Then "cosine" or "linear"
    fall from 1 to `min_ratio` at `total` updates, and stay there. ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"schedule: {kind!r} is not one of {', '.join(KINDS)}")
    if updates < warmup:
        return (updates + 1) / warmup
    if kind == "constant":
        return 1.0
    done = min(1.0, (updates - warmup) / max(1, total - warmup))
    left = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return min_ratio + (1.0 - min_ratio) * left


class Schedule:
    """Sets the learning rate of an optimizer's groups from `updates`, its count of real updates.

    A group's peak is its lr at the time of construction. `skipped` counts the other steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: str = "cosine",
        *,
        total: int,
        warmup: int = 0,
        min_ratio: float = 0.0,
    ) -> None:
        self.optimizer = optimizer
        self.kind, self.total, self.warmup, self.min_ratio = kind, total, warmup, min_ratio
        self.peaks = [float(g["lr"]) for g in optimizer.param_groups]
        self.updates = self.skipped = 0
        self._apply()

    @property
    def factor(self) -> float:
        """The next update's learning rate over the peak."""
        return lr_factor(
            self.updates,
            kind=self.kind,
            total=self.total,
            warmup=self.warmup,
            min_ratio=self.min_ratio,
        )

    def step(self, stepped: bool = True) -> None:
        """Count what the optimizer did (`scaler.step` says it) and set the next learning rate."""
        if stepped:
            self.updates += 1
        else:
            self.skipped += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The learning rate now in force, per group."""
        return [peak * self.factor for peak in self.peaks]

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict:
        return {"updates": self.updates, "skipped": self.skipped, "peaks": list(self.peaks)}

    def load_state_dict(self, state: dict) -> None:
        self.updates, self.skipped = state["updates"], state["skipped"]
        self.peaks = list(state["peaks"])
        self._apply()
