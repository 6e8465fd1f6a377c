"""The norm of one gradient and whether it is finite, in one pass and one launch.

A step that runs inside backward must know that a gradient is finite before it uses it, and waits
for every launch it adds. Sums of squares are FP32, in an order that does not depend on timing: the
program that finishes last adds up the parts. A norm above 1.8e19 counts as not finite.
"""

from __future__ import annotations

import torch

from .op import operator, tl, triton

_BLOCK = 4096
_PROGRAMS = 1024


def ref_measure_gradient(
    grad: torch.Tensor, found_inf: torch.Tensor, counter: torch.Tensor
) -> torch.Tensor:
    norm = grad.float().square().sum().sqrt()
    found_inf.masked_fill_(~norm.isfinite(), 1.0)
    return norm


@triton.jit
def _measure_kernel(
    grad, parts, counter, found_inf, norm, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):
    programs = tl.num_programs(0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), programs):
        offs = tl.full([BLOCK], BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
        g = tl.load(grad + offs, mask=offs < n, other=0.0).to(tl.float32)
        total += g * g
    tl.store(parts + tl.program_id(0), tl.sum(total, 0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == programs - 1:
        i = tl.arange(0, PROGRAMS)
        square = tl.sum(tl.load(parts + i, mask=i < programs, other=0.0, volatile=True), 0)
        tl.store(norm, tl.sqrt(square))
        if (square < float("inf")) == 0:
            tl.store(found_inf, 1.0)
        tl.store(counter, 0)


def triton_measure_gradient(
    grad: torch.Tensor, found_inf: torch.Tensor, counter: torch.Tensor
) -> torch.Tensor:
    norm = torch.empty((), dtype=torch.float32, device=grad.device)
    programs = max(1, min(_PROGRAMS, -(-grad.numel() // _BLOCK)))
    parts = torch.empty(programs, dtype=torch.float32, device=grad.device)
    _measure_kernel[(programs,)](
        grad.contiguous(), parts, counter, found_inf, norm, grad.numel(),
        BLOCK=_BLOCK, PROGRAMS=_PROGRAMS,
    )  # fmt: skip
    return norm


_measure = operator(
    "measure_gradient(Tensor grad, Tensor(a!) found_inf, Tensor(b!) counter) -> Tensor",
    reference=ref_measure_gradient,
    fake=lambda grad, found_inf, counter: torch.empty((), dtype=torch.float32, device=grad.device),
    cuda=triton_measure_gradient,
)


def measure_gradient(
    grad: torch.Tensor, found_inf: torch.Tensor, counter: torch.Tensor
) -> torch.Tensor:
    """FP32 0-dim 2-norm of `grad` (any float dtype and shape), on its device.

    found_inf: fp32 (1,), becomes 1 where the norm is not finite and is left alone where it is.
    counter: int32 (1,) of zero, the caller's to keep; zero again afterwards.
    """
    return _measure(grad.detach(), found_inf, counter)
