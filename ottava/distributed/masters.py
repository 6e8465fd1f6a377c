"""Split masters in shards: of its rows, each rank keeps the codes and the residuals, nothing else.

FSDP2 wants one dtype in a group of parameters, and gives gradients that dtype. So what it shards is
the *carrier*, a BF16 tensor of the weight's shape, and a rank keeps what it knows in the two bytes
per element: codes and then 8-bit residuals, or 16-bit residuals with the codes beside them; of a
weight that no FP8 GEMM reads the BF16 part, with the residuals beside it. A carrier of codes means
nothing as numbers, and nothing reads it as such: FSDP2 asks for what to send, and everybody else
takes the shard for a `SplitParameter` (`local_split`: this rank's rows as a real one).

All ranks have the same scale. An update chooses the next one from the amax of the whole weight
before it and the most that it can add (kernels/adamw.py), so all ranks choose alike without a word.
Before each forward they agree on the new amaxes, and learn the scales of experts held elsewhere.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..kernels.cast import scale_from_amax
from ..kernels.split import Split, SplitParameter, adopt_split, pack_split, shape_scale, weight_amax
from .gather import AllMax, Coded, leads_of, places_of
from .shards import cut, from_rows


class Master:
    """One split master: whole and taken off its parameter when made, shared out by `share`."""

    def __init__(self, p: SplitParameter) -> None:
        self.whole = Split(p.data, p.residual, p.scale)
        self.amax, self.cast = p.amax, p.cast
        _become_carrier(p)

    @property
    def coded(self) -> bool:
        return self.cast is not None

    def share(self, shard: DTensor, all_max: AllMax) -> None:
        """Keep `shard`'s rows in it; it is read as a split master from here on."""
        carrier, (world, rank) = shard._local_tensor, cut(shard)
        begin = rank * -(-shard.shape[0] // world)
        mine = slice(begin, begin + len(carrier))
        codes, residual = _room(carrier, self.whole, self.coded)
        codes.copy_(self.whole.codes[mine]), residual.copy_(self.whole.residual[mine])
        scale, amax = self.whole.scale, self.amax
        if self.coded:
            per_row = scale.dim() == 3
            scale, amax = (t[mine].clone() if per_row else t.clone() for t in (scale, amax))
        own = adopt_split(nn.Parameter(codes), Split(codes, residual, scale), amax, self.cast)
        shard._is_split = True
        shard.local_split = own
        shard.residual, shard.scale, shard.amax, shard.cast = own.residual, scale, amax, own.cast
        shard.parts = partial(_parts, shard)
        shard.dequantize = lambda dtype=torch.float32: from_rows(own.dequantize(dtype), shard)
        shard.write = partial(_write, shard, all_max)
        self.whole = self.amax = None


class CodedMaster(Coded):
    """A split master on its way to the ranks; `with_residual`: with all its precision."""

    def __init__(
        self, shard: DTensor, at: slice, scale: torch.Tensor | None, with_residual: bool
    ) -> None:
        super().__init__(shard, shard.cast, at, scale)
        self.master, self.with_residual = shard.local_split, with_residual
        self.dtype = self.master.dtype

    def parts(self) -> list[torch.Tensor]:
        codes = self.master.data
        return [codes, self.master.residual] if self.with_residual else [codes]


def precise_master(shard: DTensor) -> CodedMaster:
    """A small master (a norm's weight), which layers read in FP32."""
    return CodedMaster(shard, slice(0, 0), None, with_residual=True)


class Masters:
    """What ranks agree on about their split masters. FP32 [2, n]: amaxes and scales, a lead each."""

    def __init__(self, shards: list[tuple[DTensor, bool]], all_max: AllMax) -> None:
        self._all_max = all_max
        places, size = places_of([leads_of(p.shape) for p, _ in shards])
        device = shards[0][0]._local_tensor.device
        self._agreed = torch.ones(2, size, device=device)
        self._sent = torch.zeros_like(self._agreed)
        self.weights = [
            CodedMaster(p, at, self._agreed[1, at], with_residual)
            for (p, with_residual), at in zip(shards, places, strict=True)
        ]
        own = [(w, w.master) for w in self.weights]
        self._send_to = [self._sent[i, w.own] for w, _ in own if len(w.local) for i in (0, 1)]
        self._send_from = [
            t.flatten() for w, m in own if len(w.local) for t in (m.amax, m.scale)
        ]  # fmt: skip
        shared = [(w, m) for w, m in own if w.leads == 1]
        self._amax_to = [m.amax for _, m in shared]
        self._amax_from = [self._agreed[0, w.at] for w, _ in shared]

    @torch.no_grad()
    def agree(self) -> None:
        """Before a forward: one maximum over ranks. A weight that has a NaN anywhere has one here."""
        self._sent.zero_()
        if self._send_to:
            torch._foreach_copy_(self._send_to, self._send_from)
        self._all_max(self._sent)
        self._agreed.copy_(self._sent)
        if self._amax_to:
            torch._foreach_copy_(self._amax_to, self._amax_from)


def _become_carrier(p: SplitParameter) -> None:
    """In place, so that tied modules keep one parameter."""
    for name in ("residual", "scale", "amax", "cast", "work"):
        p.__dict__.pop(name)
    if p.dtype is not torch.bfloat16:
        p.data = torch.empty(p.shape, dtype=torch.bfloat16, device=p.device)
    p.__class__ = nn.Parameter
    p.grad_dtype = torch.bfloat16


def _room(carrier: torch.Tensor, like: Split, coded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, residual) of the carrier's rows, in its own memory as far as they fit."""
    if not coded:
        return carrier, torch.empty(carrier.shape, dtype=like.residual.dtype, device=carrier.device)
    if like.residual.dtype is torch.int16:
        codes = torch.empty(carrier.shape, dtype=torch.float8_e4m3fn, device=carrier.device)
        return codes, carrier.view(torch.int16)
    raw, n = carrier.view(-1).view(torch.uint8), carrier.numel()
    codes = raw[:n].view(torch.float8_e4m3fn).view(carrier.shape)
    return codes, raw[n:].view(torch.int8).view(carrier.shape)


def _parts(shard: DTensor) -> dict[str, torch.Tensor]:
    """Every tensor that a sharded split master consists of, as it is shared out."""
    own = shard.local_split
    parts = {"codes": from_rows(own.data, shard), "residual": from_rows(own.residual, shard)}
    if own.cast is not None:
        for name, t in (("scale", own.scale), ("amax", own.amax)):
            parts[name] = from_rows(t, shard) if shard.dim() == 3 else t
    return parts


@torch.no_grad()
def _write(shard: DTensor, all_max: AllMax, w: torch.Tensor) -> None:
    """Make `w`, shared out as the shard is, the master weight. All ranks call it."""
    own, rows = shard.local_split, w._local_tensor.detach().float()
    if own.cast is not None:
        if rows.numel():
            own.amax.copy_(weight_amax(rows))
        else:
            own.amax.zero_()
        if shard.dim() != 3:
            all_max(own.amax)
        own.scale.copy_(shape_scale(scale_from_amax(own.amax, own.cast), rows))
    if rows.numel():
        packed = pack_split(rows, own.scale, 8 * own.residual.element_size())
        own.data.copy_(packed.codes), own.residual.copy_(packed.residual)
