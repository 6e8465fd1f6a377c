"""Forms that parameters take on fake tensors: codes while a layer runs, frozen codes, fewer experts.

E experts of a layer, shared among `over` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..kernels.split import SplitParameter
from ..numerics.recipe import Cast


class FakeSplit(SplitParameter, FakeTensor):
    """A split master on fake tensors: both classes' behaviour."""


def restore_split_class(model: nn.Module) -> None:
    """Splitting marks a fake parameter but leaves its class, which is what makes it fake."""
    for parameter in model.parameters():
        if isinstance(parameter, SplitParameter):
            parameter.__class__ = FakeSplit


def codes_only(p: torch.Tensor, cast: Cast) -> None:
    """Turn a fake parameter, in place, into e4m3 codes with one scale (one per expert): what a
    weight is that was gathered as codes, or that is frozen."""
    leads = p.shape[0] if p.dim() == 3 else 1
    p.data = torch.empty(p.shape, dtype=torch.float8_e4m3fn)
    p.residual = torch.empty(0, dtype=torch.int8)
    scale = torch.empty(leads)
    p.scale = scale.view(-1, 1, 1) if p.dim() == 3 else scale
    p.amax = p.work = None
    p.cast = p._ottava_cast = cast
    p._is_split = True
    p.dequantize = lambda dtype=torch.float32: torch.empty(p.shape, dtype=dtype)
    p.grad_dtype = torch.bfloat16
    p.__class__ = FakeSplit


_PARTS = ("residual", "scale", "amax", "work", "cast", "_is_split", "dequantize")


@contextmanager
def gathered(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Let `parameters` be gathered codes for a while; gives the tensors that hold the codes."""
    plain = [p.data for p in parameters]
    for p in parameters:
        codes_only(p, p._ottava_cast)
    try:
        yield [p.data for p in parameters]
    finally:
        for p, data in zip(parameters, plain, strict=True):
            grad, p.grad = p.grad, None
            for name in _PARTS:
                del p.__dict__[name]
            p.__class__ = FakeTensor
            p.data = data
            p.grad_dtype = torch.bfloat16
            p.grad = grad


def freeze_as_codes(model: nn.Module) -> None:
    """Keep every frozen weight that FP8 GEMMs read as codes: a released FP8 checkpoint's bytes."""
    for p in model.parameters():
        cast = getattr(p, "_ottava_cast", None)
        if not p.requires_grad and isinstance(cast, Cast) and cast.splits:
            codes_only(p, cast)


def share_experts(model: nn.Module, over: int) -> None:
    """Leave a rank its E / over experts of each layer, in place. Their tokens come from all ranks:
    with even load, as many as it would have had alone. Raises ValueError where E does not divide.
    """
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        stacked = [(n, p) for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
        if count is None or not stacked:
            continue
        if count % over:
            raise ValueError(f"{name}: {count} experts do not divide over {over} ranks")
        module.num_experts = count // over
        for own, p in stacked:
            few = torch.empty((count // over, *p.shape[1:]), dtype=p.dtype)
            setattr(module, own, nn.Parameter(few, requires_grad=p.requires_grad))
