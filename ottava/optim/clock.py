"""The device's copy of AdamW's rates, counts and random keys, for steps that are replayed.

    optimizer.clock = clock; clock.wind(optimizer); ...the step...        # launched by Python
    clock.set_for(updates); replay; advance(updates)                      # launched again

One row (kernels/clock.py) for each group and each count of steps that its parameters stand at,
written by one small copy that does not wait. The counts themselves stay on the host, in AdamW's
state, as in any other step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.clock import WIDTH, clock_row

if TYPE_CHECKING:
    from .adamw import AdamW

ROWS = 256

# (row, group, state) of one parameter's update
Update = tuple[int, dict[str, Any], dict[str, Any]]


class DeviceClock:
    """Rows on `device`. `updated`: the updates that read them since `wind`, in their order.

    counts_skips: whether a parameter counts, on the device, the steps that found_inf made it skip.
    False where the host learns of each and takes the counts back itself.
    """

    def __init__(self, device: torch.device | str, *, counts_skips: bool = True) -> None:
        self.counts_skips = counts_skips
        self.updated: list[Update] = []
        self._values = torch.zeros(ROWS, WIDTH, dtype=torch.int32, device=device)
        self._rows = self._values.unbind()
        self._numbers: dict[tuple[int, int], int] = {}

    def wind(self, optimizer: AdamW) -> None:
        """Set the rows for the next step of every parameter that may get a gradient.

        RuntimeError where they stand at more than 256 different counts.
        """
        wanted: dict[tuple[int, int], dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    wanted[id(group), optimizer.state.get(p, {}).get("step", 0) + 1] = group
        if len(wanted) > ROWS:
            raise RuntimeError(f"AdamW: parameters stand at more than {ROWS} different steps")
        self._numbers = {key: row for row, key in enumerate(wanted)}
        self.updated = []
        self._write({row: (wanted[key], key[1]) for key, row in self._numbers.items()})

    def row(self, group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
        """The row, int32 (8,), of an update whose step `state` already counts."""
        number = self._numbers[id(group), state["step"]]
        self.updated.append((number, group, state))
        return self._rows[number]

    def set_for(self, updates: Sequence[Update]) -> None:
        """Set the rows that `updates` read, for the next step of each."""
        self._write({row: (group, state["step"] + 1) for row, group, state in updates})

    def _write(self, rows: dict[int, tuple[dict[str, Any], int]]) -> None:
        if not rows:
            return
        table = [[0] * WIDTH] * (max(rows) + 1)
        for row, (group, step) in rows.items():
            lr = group["lr"]
            on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
            table[row] = clock_row(
                0.0 if on_device else float(lr), *group["betas"], step, group["seed"]
            )
        host = torch.tensor(table, dtype=torch.int32)
        if self._values.is_cuda:
            host = host.pin_memory()
        self._values[: len(table)].copy_(host, non_blocking=True)


def advance(updates: Sequence[Update], by: int = 1) -> None:
    """Count a step for each parameter of `updates`; by=-1 takes one back."""
    for _, _, state in updates:
        state["step"] += by
