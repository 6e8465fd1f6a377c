"""Names what went wrong in a bad step: the first gradient, or the first tensor, that is not finite;
and a weight or a moment that is not, before it is saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.split import SplitParameter
from ..layers import te
from ..layers.delayed import discard_amax
from ..models.moe import take_loads
from ..monitor.locate import tracing
from ..optim.adamw import local
from . import resume
from .forward import Batch

if TYPE_CHECKING:
    from .trainer import Trainer


def first_bad_gradient(trainer: Trainer) -> list[str]:
    """Names the first gradient, in the order of backward, that is not finite. Slow."""
    if trainer.handle is not None:
        names = {p: n for n, p in trainer.model.named_parameters()}
        grads = [(names[p], norm) for p, norm in trainer.handle.norms.items()]
    else:
        named = trainer.model.named_parameters()
        grads = [(n, p.grad) for n, p in named if p.grad is not None]
        grads.reverse()
    bad = (i for i, (_, g) in enumerate(grads) if not bool(local(g).isfinite().all()))
    number = trainer.strategy.first(next(bad, len(grads)))
    if not grads:  # an engine keeps them to itself
        return ["a gradient is not finite"]
    return [f"the gradient of {n} is not finite" for n, _ in grads[number : number + 1]]


def locate(trainer: Trainer, window: list[Batch], valid: int) -> tuple[str, str] | None:
    """Run a bad step again, changing nothing, to find where it began. None where it is finite
    now (a fused step had begun to update), with a loss scale, or with monitor.locate off."""
    if not trainer.config.monitor.locate or trainer.scaler.is_enabled():
        return None
    before = resume.random_state()
    count = torch.full((), max(valid, 1), dtype=torch.int64, device=trainer.device)
    with tracing(trainer.model) as trace, te.Scaling(trainer.model):

        def loss_of(batch: Batch) -> Tensor:
            loss = trainer.loss_of(batch, valid, count)
            trace.note("", "loss", loss)
            return loss

        trainer.accumulate(window, loss_of, -math.inf)  # no loss is let through to an update
    if trainer.handle is not None:
        trainer.handle.finish()
    forget_step(trainer)
    resume.set_random_state(before)
    return next(filter(None, trainer.strategy.collect(trace.first_bad())), None)


def forget_step(trainer: Trainer) -> None:
    """Let go of everything that an unfinished step left: gradients, amaxes, loads of experts."""
    trainer.optimizer.zero_grad(set_to_none=True)
    discard_amax(trainer.parameters)
    take_loads(trainer.model)


def broken_state(trainer: Trainer) -> str:
    """The first weight or moment that holds a number that is not finite, the same on all ranks; ""
    where all are. Reads all of them once: for when a checkpoint is due."""
    named: list[tuple[str, Tensor]] = []
    for name, p in trainer.model.named_parameters():
        named += [(name, t) for t in _parts(p)]
        for moment, t in trainer.optimizer.state.get(p, {}).items():
            if isinstance(t, Tensor):
                named.append((f"the optimizer's {moment} of {name}", t))
    named = [(n, local(t)) for n, t in named]
    named = [(n, t) for n, t in named if t.is_floating_point() and t.numel()]
    where = trainer.device
    flags = torch.stack([_all_finite(t).to(where) for _, t in named]).tolist() if named else []
    first = next((n for (n, _), good in zip(named, flags, strict=True) if not good), "")
    return next(filter(None, trainer.strategy.collect(first)), "")


def _parts(p: Tensor) -> list[Tensor]:
    own = local(p)  # of a split master in shards, what it is kept in means nothing as numbers
    if isinstance(own, SplitParameter):
        return [t for t in (own.data, own.scale) if t is not None]
    return [own.detach()]


def _all_finite(t: Tensor) -> Tensor:
    t = t.detach()
    if t.element_size() > 1:  # a norm carries NaN and inf along, and makes nothing as large as t
        return torch.linalg.vector_norm(t, torch.inf).isfinite()
    # codes: e4m3 has no infinity; all bits but the sign set is NaN
    least = 0x7F if t.dtype == torch.float8_e4m3fn else 0x7C
    return ((t.view(torch.uint8) & 0x7F) < least).all()
