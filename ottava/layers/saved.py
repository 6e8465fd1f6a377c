"""The codes of a linear's input that are kept for backward: in which order, and shared by whom.

A tensor that several linears read is cast once: its codes travel with the tensor object
(`carry`, `carried_by`), and every reader keeps the same storage. Which order is kept follows from
the granularity: one scale per tensor (or per 128 x 128 block) transposes exactly, so the rows that
the forward GEMM read are kept and transposed when needed; a scale per row or per 1 x 128 group
does not, so the columns that `grad_weight` will read are kept instead, cast from the original.

Shapes: M tokens, K features. `rows` are codes of x_MK (scales along K), `cols` of x_KM (along M).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels import cast as cast_kernels
from ..kernels.cast import Quantized
from ..kernels.split import SplitParameter
from ..numerics.recipe import Cast
from ..stretch import end_with

_SLOT = "_ottava_carried"
_AMAX = "_ottava_amax"


@dataclass(slots=True)
class Kept:
    """8-bit codes of x_MK as kept for backward: `q` holds rows [M, K], or columns [K, M]."""

    q: Quantized
    is_cols: bool

    def cols(self) -> Quantized:
        """Codes of x^T [K, M], scales along M: what the grad_weight GEMM reads."""
        return self.q if self.is_cols else cast_kernels.transpose(self.q)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """x_MK in `dtype`."""
        return self.q.dequantize(dtype).t() if self.is_cols else self.q.dequantize(dtype)


@dataclass(slots=True)
class Carried:
    """Codes that travel with a tensor. `version` is the tensor's at the time of the cast, so
    that an in-place change is seen and the codes are not used."""

    cast: Cast
    rows: Quantized
    kept: Kept
    version: int


def transposes(cast: Cast) -> bool:
    """Whether codes of this cast transpose exactly (one scale per tensor or square block)."""
    return cast.granularity in ("tensor", "block")


def _home(x: torch.Tensor, any_order: bool = False) -> torch.Tensor:
    """The tensor on which notes about x are left: the one that x is another shape of (or, with
    any_order, another order of), else x.

    A library's kernel may return a view of its own output (attention, heads and tokens swapped), and
    a view of that view knows the first tensor alone.
    """
    base = x._base
    same = base is not None and x.numel() == base.numel() and (any_order or x.is_contiguous())
    return base if same else x


def carried_by(x: torch.Tensor, cast: Cast) -> Carried | None:
    """The codes that travel with `x`, if they are of this cast and x has not changed since.

    A view of all of a tensor in another shape (heads flattened for o_proj) carries what it carries.
    """
    if torch.compiler.is_compiling():  # a version cannot be traced
        return None
    carried = getattr(_home(x), _SLOT, None)
    if carried is None or carried.cast != cast or carried.version != x._version:
        return None
    return carried if carried.rows.codes.shape[1] == x.shape[-1] else None


def carry(x: torch.Tensor, cast: Cast, rows: Quantized, kept: Kept) -> None:
    """Let codes travel with `x` (any leading dims; rows cover x.reshape(-1, K)), unless a change of
    x could not be seen. Not under torch.compile, which merges equal casts by itself."""
    if torch.compiler.is_compiling() or x.is_inference():
        return
    setattr(_home(x), _SLOT, Carried(cast, rows, kept, x._version))


def save(ctx, *tensors: torch.Tensor | None, parameters: tuple = ()) -> None:
    """Save `tensors`, then `parameters`, for backward. A split master is also held as it is: from a
    stretch that runs again, autograd gives back a bare copy of its codes, without scale or class."""
    if not torch.compiler.is_compiling():
        end_with(ctx, tensors)
    ctx.masters = tuple(p if isinstance(p, SplitParameter) else None for p in parameters)
    ctx.save_for_backward(*tensors, *parameters)


def saved(ctx) -> tuple:
    """What `save` was given."""
    out, masters = ctx.saved_tensors, ctx.masters
    first = len(out) - len(masters)
    found = (s if m is None else m for s, m in zip(out[first:], masters, strict=True))
    return *out[:first], *found


def note_amax(grad: torch.Tensor, amax: torch.Tensor) -> None:
    """Let the amax of a gradient (fp32, (1,)), found by the kernel that made it, travel with it."""
    if torch.compiler.is_compiling():
        return
    setattr(_home(grad, any_order=True), _AMAX, (amax, grad._version))


def noted_amax(grad: torch.Tensor) -> torch.Tensor | None:
    """The amax that travels with this gradient, or with the whole tensor that it is a view of;
    None where there is none, or the values have changed since."""
    if torch.compiler.is_compiling():
        return None
    noted = getattr(_home(grad, any_order=True), _AMAX, None)
    return noted[0] if noted is not None and noted[1] == grad._version else None
