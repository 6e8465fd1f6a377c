"""What one step of a run did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What gradients and update of one step came to, as launched by Python or replayed. `norm`: of
    the gradients, before clipping. `cause`: what is wrong with them, or "". `stepped`: whether
    weights changed. `loads`: tokens of each expert, int64 [E], by router; `load` as in StepResult.
    """

    loss: float
    norm: float
    cause: str = ""
    stepped: bool
    loads: dict[str, Tensor] = field(default_factory=dict)
    load: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did. `loss`: nats per valid token of the whole window. `grad_norm`: before
    clipping. `tokens`: read, valid or not. `cause`: what is wrong with a bad step, and why nothing
    changed, where not `stepped`; `first_bad`: (module or parameter, operand) where that began.
    `data_seconds`: spent waiting for batches. `sent`: bytes of the collectives, by kind, and
    `waited`: seconds in them (None on a GPU, where they are queued); see distributed/traffic.py.
    `observed`: what the monitor saw, where it looked. `load`: how tokens spread over experts, see
    `worst_load`; None in a model without any.
    `parts_ms`: where the time of the step before a look went."""

    step: int
    loss: float
    grad_norm: float | None
    tokens: int
    lr: float
    stepped: bool
    seconds: float
    cause: str = ""
    first_bad: tuple[str, str] | None = None
    data_seconds: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    waited: float | None = None
    observed: dict[str, Any] | None = None
    load: tuple[float, float, float] | None = None
    parts_ms: dict[str, float] | None = None
