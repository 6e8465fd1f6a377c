"""Results made before their module is called, waiting on the tensor that it will be called with.

A kernel that makes a tensor can often make the output of the module that reads it as well. That
output is left on the tensor; the module's forward, called as ever (so hooks run as ever), takes it
where it is what the module would compute here and now, and else computes. Nothing else changes: the
tensor is a real one, and a copy, a changed or a replaced tensor carries nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_SLOT = "_ottava_waiting"


@dataclass(slots=True)
class _Waiting:
    reader: nn.Module
    value: torch.Tensor
    state: object  # what the value depends on besides the tensor: the recipe in force, a dtype
    version: int  # the tensor's at the time
    region: object


def region() -> object:
    """What saved tensors go through here (a stretch that runs again in backward, offloading), or
    None. A result from outside such a stretch is not used inside: it is not there the second time.
    """
    if torch.compiler.is_compiling():  # nothing waits there
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def may_wait() -> bool:
    """Whether results may be made early here: gradients are recorded, and nothing is traced."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def leave(x: torch.Tensor, reader: nn.Module, value: torch.Tensor, state: object) -> None:
    """Leave `value`, the output of `reader` on x, on x."""
    waiting = _Waiting(reader, value, state, x._version, region())
    setattr(x, _SLOT, {**getattr(x, _SLOT, {}), id(reader): waiting})


def waits(x: torch.Tensor, reader: nn.Module, state: object) -> bool:
    """Whether a result for `reader` waits on x and may be used here; drops one that may not."""
    if not may_wait() or not hasattr(x, _SLOT):
        return False
    found = getattr(x, _SLOT).get(id(reader))
    if found is None:
        return False
    usable = found.version == x._version and found.region is region() and found.state == state
    if not usable:
        _drop(x, reader)
    return usable


def take(x: torch.Tensor, reader: nn.Module, state: object) -> torch.Tensor | None:
    """The result that waits on x for `reader`, removed from x; None where there is none."""
    if not waits(x, reader, state):
        return None
    value = getattr(x, _SLOT)[id(reader)].value
    _drop(x, reader)
    return value


def _drop(x: torch.Tensor, reader: nn.Module) -> None:
    left = {k: w for k, w in getattr(x, _SLOT).items() if k != id(reader)}
    if left:
        setattr(x, _SLOT, left)
    else:
        delattr(x, _SLOT)


def whole(weight: torch.Tensor | None, shape: tuple[int, ...], x: torch.Tensor) -> bool:
    """Whether a parameter can be read before its module's own call: all of it, on x's device (not
    sharded or freed until then)."""
    if weight is None:
        return True
    if weight.shape != shape or weight.device != x.device or hasattr(weight, "placements"):
        return False
    return weight.untyped_storage().nbytes() > 0
