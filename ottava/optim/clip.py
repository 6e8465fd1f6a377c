"""Gradient norms and clipping that neither overflow nor spread a NaN.

The norm is summed in FP64: squares of any finite FP32 gradient fit. A non-finite norm is returned
and changes no gradient: scaling by it would turn all of them into NaN or zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def _grads(params: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        params = [params]
    return [p.grad for p in params if p.grad is not None]


def tensor_norm(grad: torch.Tensor) -> torch.Tensor:
    """FP64 0-dim 2-norm of one gradient; of the whole gradient where it is a sharded DTensor."""
    norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float64)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def grad_norm(params: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    """FP64 0-dim 2-norm over the gradients of `params` (0 without any), on their device."""
    norms = [tensor_norm(g) for g in _grads(params)]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def fast_norm(params: Iterable[torch.Tensor]) -> torch.Tensor:
    """FP32 0-dim 2-norm over the gradients of `params`, in a few launches and no FP64 copy.

    Not finite where a gradient is not, and also where squares overflow (a norm above 1.8e19): then
    ask `grad_norm`.
    """
    return norm_of(_grads(params))


def norm_of(grads: list[torch.Tensor]) -> torch.Tensor:
    """The same of gradients that are given."""
    if not grads:
        return torch.zeros(())
    by_kind: dict[tuple, list[torch.Tensor]] = {}
    for g in grads:
        by_kind.setdefault((g.device, g.dtype), []).append(g.detach())
    norms = [n for kind in by_kind.values() for n in torch._foreach_norm(kind, 2, torch.float32)]
    return torch.linalg.vector_norm(torch.stack([n.to(grads[0].device) for n in norms]))


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What to multiply gradients by so that their norm is at most max_norm; 1 if norm is not finite.

    Same shape and device as `norm`, FP64. `AdamW.step(grad_scale=1 / factor)` applies it without
    a pass over the gradients.
    """
    factor = (max_norm / (norm.double() + 1e-6)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, 1.0)


@torch.no_grad()
def clip_grad_norm_(params: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale the gradients of `params`, in place, to a global 2-norm of at most `max_norm`.

    Returns the norm before clipping, FP64 0-dim, without waiting for the device. A non-finite norm
    is returned and changes no gradient. ValueError if max_norm is not positive.
    """
    if not max_norm > 0.0:
        raise ValueError(f"clip_grad_norm_: max_norm {max_norm} must be above 0")
    grads = _grads([params] if isinstance(params, torch.Tensor) else (params := list(params)))
    norm = grad_norm(params)
    if not grads:
        return norm
    factor = clip_factor(norm, max_norm)
    by_kind: dict[tuple, list[torch.Tensor]] = {}
    for g in grads:
        by_kind.setdefault((g.device, g.dtype, type(g)), []).append(g)
    for (device, _, _), kind in by_kind.items():
        torch._foreach_mul_(kind, factor.to(device))
    return norm
