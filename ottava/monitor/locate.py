"""Which tensor of a step was the first that is not finite: found by running the step again.

A bad step leaves no trace, so forward and backward of the same batch give the same numbers again,
this time with hooks on every module and parameter. In order: the weights, what each module gives in
forward, then gradients as backward meets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Trace:
    """Tensors in the order in which they came to be, and whether each was finite."""

    where: list[tuple[str, str]] = field(default_factory=list)
    good: list[Tensor] = field(default_factory=list)

    def note(self, row: str, operand: str, x: object) -> None:
        """Note a tensor, or the first one of a module's several outputs."""
        while isinstance(x, tuple | list) and x:
            x = x[0]
        if isinstance(x, Tensor) and (x.is_floating_point() and x.element_size() > 1):
            self.where.append((row, operand))
            x = getattr(x, "_local_tensor", x)  # of a sharded gradient, this rank's part
            self.good.append(torch.isfinite(x.detach()).all())

    def first_bad(self) -> tuple[str, str] | None:
        """(module or parameter, operand) of the first tensor that is not finite. Waits for the
        device."""
        good = torch.stack([g.to(self.good[0].device) for g in self.good]).tolist()
        return next((w for w, g in zip(self.where, good, strict=True) if not g), None)


@contextmanager
def tracing(model: nn.Module) -> Iterator[Trace]:
    """Everything that the forward and backward inside compute is noted in the Trace.

    Operands: "weight", "output" of a module in forward; "grad_output" of a module and "gradient" of
    a parameter in backward.
    """
    trace, hooks = Trace(), []
    for name, p in model.named_parameters():
        trace.note(name, "weight", p)
        if p.requires_grad:
            hooks.append(p.register_hook(lambda g, name=name: trace.note(name, "gradient", g)))

    def after(name: str, y: object) -> None:
        trace.note(name, "output", y)
        y = y[0] if isinstance(y, tuple | list) and y else y
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(lambda g: trace.note(name, "grad_output", g))

    for name, module in model.named_modules():
        if name:
            hook = module.register_forward_hook(lambda _m, _x, y, name=name: after(name, y))
            hooks.append(hook)
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()
