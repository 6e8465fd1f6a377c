"""Dynamic loss scaling for FP16 gradients. BF16 has FP32's exponents and needs none; FP8 operands
carry their own scales.

    scaler.scale(loss).backward(); scaler.unscale_(opt); clip; stepped = scaler.step(opt); scaler.update()

A step with a non-finite gradient is skipped, and `step` says so: schedule, EMA and counters follow
its answer. Gradients are unscaled exactly once: `unscale_` may be called again within a step, and a
later `scale` (another micro-batch, or a step that was given up) takes an unscaling back first. An
optimizer without gradients is passed over. At `min_scale` steps go on being skipped; the scale
never falls below it. On several ranks all skip when one overflows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, overload

import torch
import torch.distributed as dist

from .adamw import local

_STATE = ("scale", "growth_tracker", "hysteresis_left", "skipped")


class GradScaler:
    """Loss scale that halves on overflow and doubles after `growth_interval` clean steps.

    init_scale, growth_factor, backoff_factor, growth_interval: as in torch. max_scale (None: no
    cap), min_scale: bounds. hysteresis: the scale falls only at the n-th overflow; a growth restores
    it, and with consecutive_hysteresis every clean step does. `skipped` counts skipped updates.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        max_scale: float | None = None,
        min_scale: float = 1.0,
        hysteresis: int = 1,
        *,
        consecutive_hysteresis: bool = False,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        cap = max_scale if max_scale is not None else float("inf")
        if not 0.0 < min_scale <= init_scale <= cap:
            raise ValueError(
                f"GradScaler: need 0 < min_scale <= init_scale <= max_scale, not {min_scale}, "
                f"{init_scale}, {max_scale}"
            )
        if not (growth_factor > 1.0 and 0.0 < backoff_factor < 1.0):
            raise ValueError(
                f"GradScaler: need growth_factor {growth_factor} > 1 and backoff_factor "
                f"{backoff_factor} in (0, 1)"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError("GradScaler: growth_interval and hysteresis must be at least 1")
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.max_scale, self.min_scale, self._cap = max_scale, min_scale, cap
        self.consecutive_hysteresis, self.enabled = consecutive_hysteresis, enabled
        self.process_group = process_group
        self.scale_value = float(init_scale)
        self.growth_tracker = self.skipped = 0
        self.hysteresis_left = hysteresis
        # optimizer -> whether its gradients held a non-finite value when they were unscaled
        self._unscaled: weakref.WeakKeyDictionary[torch.optim.Optimizer, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )
        self._overflowed: bool | None = None  # of the steps since the last update; None: no step

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, outputs: list[Any]) -> list[Any]: ...
    @overload
    def scale(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]: ...
    def scale(self, outputs: Any) -> Any:
        """outputs * scale: a tensor, or nested lists and tuples of tensors."""
        if not self.enabled:
            return outputs
        for optimizer in list(self._unscaled):
            # Gradients accumulate in scaled units: put the unscaled ones back. Exact but for
            # what overflows, and that is found again.
            del self._unscaled[optimizer]
            for grads in _by_kind(optimizer).values():
                torch._foreach_mul_(grads, self.scale_value)
        return self._scaled(outputs)

    def _scaled(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            return outputs * self.scale_value
        if isinstance(outputs, Iterable):
            return type(outputs)(self._scaled(o) for o in outputs)
        raise ValueError(f"GradScaler.scale: {type(outputs).__name__} is no tensor")

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once a step, so that they can be clipped."""
        if not self.enabled or optimizer in self._unscaled:
            return
        found = None
        for (device, _), grads in _by_kind(optimizer).items():
            here = torch.zeros(1, dtype=torch.float32, device=device)
            inverse = torch.full_like(here, 1.0 / self.scale_value)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, here, inverse)
            found = here if found is None else torch.maximum(found, here.to(found.device))
        if found is not None:
            self._unscaled[optimizer] = found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> bool:
        """optimizer.step() unless a gradient is not finite. True when it stepped.

        Waits for the device: whether to step is decided on the host.
        """
        if not self.enabled:
            optimizer.step(*args, **kwargs)
            return True
        self.unscale_(optimizer)
        overflow, any_grads = self._agreed(self._unscaled.get(optimizer))
        if not any_grads:
            return False
        self._overflowed = overflow or bool(self._overflowed)
        if overflow:
            return False
        optimizer.step(*args, **kwargs)
        return True

    def _agreed(self, found: torch.Tensor | None) -> tuple[bool, bool]:
        """(overflow, any gradients) over all ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return (False, False) if found is None else (found.item() > 0, True)
        device = found.device if found is not None else _collective_device(self.process_group)
        flags = torch.zeros(2, device=device)
        if found is not None:
            flags[0], flags[1] = found[0], 1.0
        dist.all_reduce(flags, dist.ReduceOp.MAX, self.process_group)
        overflow, any_grads = flags.tolist()
        return overflow > 0, any_grads > 0

    def update(self, new_scale: float | None = None) -> None:
        """After every optimizer's step: adjust the scale (or set it to new_scale)."""
        overflowed, self._overflowed = self._overflowed, None
        self._unscaled.clear()
        if not self.enabled:
            return
        if new_scale is not None:
            self.scale_value = float(new_scale)
        elif overflowed:
            self.skipped += 1
            self.growth_tracker = 0
            if self.hysteresis_left > 1:
                self.hysteresis_left -= 1
            else:
                self.scale_value = max(self.scale_value * self.backoff_factor, self.min_scale)
        elif overflowed is False:
            self.growth_tracker += 1
            if self.consecutive_hysteresis:
                self.hysteresis_left = self.hysteresis
            if self.growth_tracker == self.growth_interval:
                self.growth_tracker, self.hysteresis_left = 0, self.hysteresis
                self.scale_value = min(self.scale_value * self.growth_factor, self._cap)

    def get_scale(self) -> float:
        """The scale now in force; 1 when disabled."""
        return self.scale_value if self.enabled else 1.0

    def is_enabled(self) -> bool:
        return self.enabled

    def state_dict(self) -> dict[str, float | int]:
        """Scale, growth counter, hysteresis left and the count of skipped updates."""
        values = (self.scale_value, self.growth_tracker, self.hysteresis_left, self.skipped)
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        scale, self.growth_tracker, self.hysteresis_left, self.skipped = (state[k] for k in _STATE)
        self.scale_value = float(scale)


def _by_kind(optimizer: torch.optim.Optimizer) -> dict[tuple, list[torch.Tensor]]:
    """The optimizer's gradients by (device, dtype); of a sharded one, this rank's part."""
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                g = local(p.grad)
                kinds.setdefault((g.device, g.dtype), []).append(g)
    return kinds


def _collective_device(group) -> torch.device:
    """Where tensors of this group's collectives must lie."""
    name = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.device(name, torch.cuda.current_device() if name == "cuda" else 0)
