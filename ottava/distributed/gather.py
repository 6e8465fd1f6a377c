"""FSDP2's all-gather of FP8 weights: each rank casts its rows, and the codes travel as bytes.

One scale for the whole weight (one per expert), agreed on by all ranks before every forward, so the
gathered codes are those that one rank would have cast: the GEMMs read them as they arrive. What is
gathered becomes a `SplitParameter` without a residual, which every layer knows how to read.
FSDP2 asks a shard for the two hooks by name; they are set on the local tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..kernels.cast import quantize
from ..kernels.scale import scale_from_amax
from ..kernels.split import SplitParameter
from ..numerics.recipe import Cast


class Gathered(SplitParameter):
    """A whole weight while its module runs. `.data`: e4m3 codes; `.scale`: FP32 (1,) or [E, 1, 1]."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight as its codes say. There is no more precision here."""
        return (self.data.to(torch.float32) * self.scale).to(dtype)


class CodedWeight:
    """One weight that travels as codes. `scale`: a view of the scales that all ranks agreed on."""

    def __init__(self, p: torch.Tensor, cast: Cast, scale: torch.Tensor) -> None:
        self.cast = cast
        self.leads = p.shape[0] if p.dim() == 3 else 1
        self.scale = scale
        self.local = p._local_tensor
        self.world, self.rank = p.device_mesh.size(), p.device_mesh.get_local_rank()
        self.share = -(-p.shape[0] // self.world)
        self.rows = p.shape[0]
        self.local.fsdp_pre_all_gather = self._before
        self.local.fsdp_post_all_gather = self._after

    def note_amax(self, out: torch.Tensor) -> None:
        """Put this rank's amax into `out`, FP32 (1,) or (E,), zero elsewhere."""
        if not self.local.numel():
            return
        if self.leads == 1:
            out.copy_(torch.linalg.vector_norm(self.local, torch.inf))
        else:
            begin = self.rank * self.share
            each = torch.linalg.vector_norm(self.local.flatten(1), torch.inf, dim=1)
            out[begin : begin + len(each)] = each

    def _before(self, mesh, outer_size, outer_stride, module, mp_policy):
        local = self.local
        codes = torch.zeros((self.share, *local.shape[1:]), dtype=torch.uint8, device=local.device)
        if local.numel():
            codes[: len(local)] = self._codes(local).view(torch.uint8)
        return (codes,), None

    def _codes(self, local: torch.Tensor) -> torch.Tensor:
        if self.leads == 1:
            return quantize(local, self.cast, scale=self.scale).codes
        begin = self.rank * self.share
        mine = self.scale[begin : begin + len(local)].view(-1, 1, 1)
        # a division by a power of two is exact, so the codes are those of the expert's own scale
        rows = (local.float() / mine).flatten(0, 1)
        one = torch.ones(1, device=local.device)
        return quantize(rows, self.cast, scale=one).codes.view(local.shape)

    def _after(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            return None  # the codes lie where those of the first time lay
        return outputs[0][: self.rows].view(torch.float8_e4m3fn), ()

    def adopt(self, p: nn.Parameter) -> None:
        """Let a gathered weight, codes as yet, be read as one. Once for each."""
        p.__class__ = Gathered
        p.residual = torch.zeros(0, dtype=torch.int8, device=p.device)  # nothing beside the codes
        p.amax = p.work = None
        p.scale = self.scale.view(-1, 1, 1) if p.dim() == 3 else self.scale
        p.cast = p._ottava_cast = self.cast
        p.grad_dtype = torch.bfloat16


class Scales:
    """The scales of all weights that travel as codes."""

    def __init__(
        self, weights: list[tuple[torch.Tensor, Cast]], all_max: Callable[[torch.Tensor], None]
    ) -> None:
        self._all_max = all_max
        counts = [p.shape[0] if p.dim() == 3 else 1 for p, _ in weights]
        device = weights[0][0].device
        self.amax = torch.zeros(sum(counts), device=device)
        self.scales = torch.ones(sum(counts), device=device)
        pieces = zip(weights, self.scales.split(counts), strict=True)
        self.weights = [CodedWeight(p, cast, scale) for (p, cast), scale in pieces]
        self._amaxes = self.amax.split(counts)
        self._casts = {cast for _, cast in weights}

    @torch.no_grad()
    def agree(self) -> None:
        """Before a forward: one maximum over ranks for all weights, and the scales that follow."""
        self.amax.zero_()
        for weight, amax in zip(self.weights, self._amaxes, strict=True):
            weight.note_amax(amax)
        self._all_max(self.amax)
        if len(self._casts) == 1:
            self.scales.copy_(scale_from_amax(self.amax, next(iter(self._casts))))
            return
        for weight, amax in zip(self.weights, self._amaxes, strict=True):
            weight.scale.copy_(scale_from_amax(amax, weight.cast))
