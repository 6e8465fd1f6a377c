"""A running average of the weights, always in FP32, tied weights once.

    shadow = decay * shadow + (1 - decay) * weight        after every real update

In half precision such an average never moves; here the shadow is FP32 whatever the weights are,
split masters included. Buffers are not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..kernels.split import SplitParameter


def _master(p: torch.Tensor) -> torch.Tensor:
    """The weight that trains, in full precision."""
    return p.dequantize() if isinstance(p, SplitParameter) else p.detach()


class EMA:
    """FP32 average of the trainable parameters of `model`.

    warmup: the decay of update n (from 0) is min(decay, (1 + n) / (10 + n)), so that the first
    weights do not linger. The counter is part of the state.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = False) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"EMA: decay {decay} must lie in [0, 1)")
        self.decay, self.warmup, self.updates = decay, warmup, 0
        # named_parameters yields a tied parameter once.
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.shadow = {n: _master(p).to(torch.float32, copy=True) for n, p in self._params.items()}
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Average in the current weights. RuntimeError inside `applied()`."""
        if self._applied:
            raise RuntimeError("EMA.update: the averaged weights are in the model; leave applied()")
        n = self.updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        for name, p in self._params.items():
            self.shadow[name].mul_(decay).add_(_master(p), alpha=1.0 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The averaged weights are in the model inside the block; every bit returns after it."""
        if self._applied:
            raise RuntimeError("EMA.applied: already applied")
        saved = {name: _bits(p) for name, p in self._params.items()}
        self._applied = True
        try:
            with torch.no_grad():
                for name, p in self._params.items():
                    _write(p, self.shadow[name])
            yield
        finally:
            with torch.no_grad():
                for name, p in self._params.items():
                    for target, value in zip(_tensors(p), saved[name], strict=True):
                        target.copy_(value)
            self._applied = False

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "updates": self.updates, "shadow": dict(self.shadow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore average and counter. ValueError when the names or shapes differ."""
        if state["shadow"].keys() != self.shadow.keys():
            odd = sorted(state["shadow"].keys() ^ self.shadow.keys())
            raise ValueError(f"EMA.load_state_dict: the parameters differ, first {odd[0]!r}")
        for name, value in state["shadow"].items():
            if value.shape != self.shadow[name].shape:
                raise ValueError(
                    f"EMA.load_state_dict: {name} is {list(value.shape)} there and "
                    f"{list(self.shadow[name].shape)} here"
                )
            self.shadow[name].copy_(value)
        self.decay, self.updates = state["decay"], state["updates"]


def _tensors(p: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor that makes up the weight."""
    own = getattr(p, "local_split", p)
    parts = [own.detach()]
    if isinstance(own, SplitParameter):
        parts += [t for t in (own.residual, own.scale, own.amax) if t is not None]
    return parts


def _bits(p: torch.Tensor) -> list[torch.Tensor]:
    return [t.clone() for t in _tensors(p)]


def _write(p: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(p, SplitParameter):
        p.write(value)
    else:
        p.copy_(value)
