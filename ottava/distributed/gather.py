"""FSDP2's all-gather of FP8 weights: every rank sends the codes of its rows, as bytes.

One scale for the whole weight (one per expert), the same on all ranks, so the gathered codes are
those that one rank would have: the GEMMs read them as they arrive. What is gathered becomes a
`SplitParameter`, which every layer knows how to read. FSDP2 asks a shard for the two hooks by name;
they are set on the local tensor. Here are weights that are cast for each gather; those that are
codes already, split masters, are in masters.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from ..kernels.cast import quantize
from ..kernels.scale import scale_from_amax
from ..kernels.split import SplitParameter, unpack_split
from ..numerics.recipe import Cast
from .shards import cut

AllMax = Callable[[torch.Tensor], None]  # in place, over the ranks that share a weight
_APART = 4  # floats from one weight's scales to the next: cuBLASLt wants 16-byte addresses


class Gathered(SplitParameter):
    """A whole weight while its module runs. `.data`: e4m3 codes; `.scale`: FP32 (1,) or [E, 1, 1];
    `.residual`: empty where only the codes travelled. (Of a small master: BF16, None, 16 bits.)"""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight, as precisely as it was sent."""
        if self.residual.numel():
            return unpack_split(self.data, self.residual, self.scale, dtype)
        return (self.data.to(torch.float32) * self.scale).to(dtype)


class Coded:
    """A weight that travels as codes. `scale`: FP32 (leads,) that all ranks agreed on; `at`: where
    the facts of its leads (experts, or one) lie among those of all weights. A small master travels
    like it, without cast and scale."""

    dtype = torch.float8_e4m3fn  # of the first of `parts`

    def __init__(
        self, p: torch.Tensor, cast: Cast | None, at: slice, scale: torch.Tensor | None
    ) -> None:
        self.cast, self.at, self.scale = cast, at, scale
        self.leads = leads_of(p.shape)
        self.rows, (world, rank) = p.shape[0], cut(p)
        self.share = -(-self.rows // world)
        self.begin = rank * self.share
        self.local = p._local_tensor
        self.local.fsdp_pre_all_gather = self._before
        self.local.fsdp_post_all_gather = self._after
        self._residual = torch.zeros(0, dtype=torch.int8, device=self.local.device)

    @property
    def own(self) -> slice:
        """Where the facts lie that this rank finds out: of its experts, or of its rows' weight."""
        if self.leads == 1:
            return slice(self.at.start, self.at.start + min(len(self.local), 1))
        return slice(self.at.start + self.begin, self.at.start + self.begin + len(self.local))

    def parts(self) -> list[torch.Tensor]:
        """This rank's codes, and residuals where they travel too. Shape of its rows."""
        raise NotImplementedError

    def _before(self, mesh, outer_size, outer_stride, module, mp_policy):
        return tuple(self._padded(t) for t in self.parts()), None

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.view(torch.uint8) if rows.dtype is torch.float8_e4m3fn else rows
        if len(rows) == self.share:
            return rows
        padded = rows.new_zeros((self.share, *rows.shape[1:]))
        padded[: len(rows)] = rows
        return padded

    def _after(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            return None  # everything lies where it lay the first time
        if len(outputs) > 1:
            self._residual = outputs[1][: self.rows]
        return outputs[0][: self.rows].view(self.dtype), ()

    def adopt(self, p: nn.Parameter) -> None:
        """Let a gathered weight, codes as yet, be read as one. Once for each."""
        p.__class__ = Gathered
        p.residual = self._residual
        p.amax = p.work = None
        p.scale = self.scale.view(-1, 1, 1) if p.dim() == 3 else self.scale
        p.cast = self.cast
        p.grad_dtype = torch.bfloat16


class CodedWeight(Coded):
    """A weight in high precision, cast anew for each gather."""

    def note_amax(self, facts: torch.Tensor) -> None:
        """Put this rank's amaxes where they belong in `facts`."""
        if not self.local.numel():
            return
        rows = self.local.flatten(1) if self.leads > 1 else self.local.reshape(1, -1)
        facts[self.own] = torch.linalg.vector_norm(rows, torch.inf, dim=1)

    def parts(self) -> list[torch.Tensor]:
        local = self.local
        if not local.numel():
            return [torch.zeros(local.shape, dtype=torch.uint8, device=local.device)]
        if self.leads == 1:
            return [quantize(local, self.cast, scale=self.scale).codes]
        mine = self.scale[self.begin : self.begin + len(local)].view(-1, 1, 1)
        # a division by a power of two is exact, so the codes are those of the expert's own scale
        rows = (local.float() / mine).flatten(0, 1)
        one = torch.ones(1, device=local.device)
        return [quantize(rows, self.cast, scale=one).codes.view(local.shape)]


class Scales:
    """The scales of all weights that are cast for their gather."""

    def __init__(self, weights: list[tuple[torch.Tensor, Cast]], all_max: AllMax) -> None:
        self._all_max = all_max
        places, size = places_of([leads_of(p.shape) for p, _ in weights])
        self.amax = torch.zeros(size, device=weights[0][0].device)
        self.scales = torch.ones_like(self.amax)
        self.weights = [
            CodedWeight(p, cast, at, self.scales[at])
            for (p, cast), at in zip(weights, places, strict=True)
        ]
        self._casts = {cast for _, cast in weights}

    @torch.no_grad()
    def agree(self) -> None:
        """Before a forward: one maximum over ranks for all weights, and the scales that follow."""
        self.amax.zero_()
        for weight in self.weights:
            weight.note_amax(self.amax)
        self._all_max(self.amax)
        if len(self._casts) == 1:
            self.scales.copy_(scale_from_amax(self.amax, next(iter(self._casts))))
            return
        for weight in self.weights:
            weight.scale.copy_(scale_from_amax(self.amax[weight.at], weight.cast))


def leads_of(shape: torch.Size) -> int:
    """How many scales a weight has: one per expert of a 3-D one, else one."""
    return shape[0] if len(shape) == 3 else 1


def places_of(counts: list[int]) -> tuple[list[slice], int]:
    """(where each weight's facts lie in one vector of all, the vector's length)."""
    places, end = [], 0
    for count in counts:
        places.append(slice(end, end + count))
        end += math.ceil(count / _APART) * _APART
    return places, end
