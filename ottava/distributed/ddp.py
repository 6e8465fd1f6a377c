"""Data parallel: every rank holds the whole model and a share of each window's batches.

Gradients are summed (each rank's loss is already divided by the valid tokens of all), in their own
dtype, in buckets that leave while backward still runs. A reduced bucket's memory becomes the
gradients, so that none is held twice. PyTorch's own wrapper would do most of that, but knows neither
gradients whose dtype is not the parameter's nor parameters that are codes, and renames every module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from .. import prepare
from ..layers.weights import grad_dtype_of
from ..optim.adamw import AdamW
from .ranks import Ranks

_ALIGN = 128  # bytes: where a gradient begins in its bucket


class DDP(Ranks):
    """See the module docstring."""

    name = "ddp"

    def prepare(self, model: nn.Module) -> AdamW:
        self.part_ways(model)
        self.forward = model
        self.optimizer = prepare.make_optimizer(self.config, model)
        # backward meets the parameters in about the reverse of the order in which they were made
        trainable = [p for p in model.parameters() if p.requires_grad]
        nbytes = int(self.config.distributed.bucket_mib * 2**20)
        self.reducer = Reducer(reversed(trainable), nbytes, self.traffic.wait)
        return self.optimizer

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if not last:
            return loss.backward()
        with self.connected():
            self.reducer.begin()
            loss.backward()
            self.reducer.finish()
        return None

    def notes(self) -> list[str]:
        sizes = [b.nbytes for b in self.reducer.buckets]
        return [
            f"{self.world} ranks, ddp: {sum(sizes) / 2**20:,.1f} MiB of gradients reduced a step, "
            f"in {len(sizes)} bucket(s)"
        ]


class Bucket:
    """Gradients of one dtype that are reduced together."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.parameters: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.numel = 0
        self.waiting = 0

    def add(self, p: torch.Tensor) -> None:
        self.parameters.append(p)
        self.offsets.append(self.numel)
        step = _ALIGN // self.dtype.itemsize
        self.numel += -(-p.numel() // step) * step

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def launch(self) -> dist.Work:
        """Start the sum over ranks; the gradients are views of the buffer from here on. A parameter
        that has none on this rank adds zeros."""
        buffer = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        for p, offset in zip(self.parameters, self.offsets, strict=True):
            place = buffer[offset : offset + p.numel()].view(p.shape)
            if p.grad is not None:
                place.copy_(p.grad)
            p.grad = place
        return dist.all_reduce(buffer, async_op=True)


class Reducer:
    """Sums the gradients of `parameters` over ranks during the backward between `begin` and
    `finish`. Buckets leave in one order, the same on every rank, each as soon as it is complete."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        bucket_bytes: int,
        wait: Callable[[dist.Work], None] = dist.Work.wait,
    ) -> None:
        self._wait = wait
        self.buckets: list[Bucket] = []
        self.running = False
        self._bucket_of: dict[torch.Tensor, Bucket] = {}
        open_ones: dict[tuple, Bucket] = {}
        for p in parameters:
            kind = (grad_dtype_of(p), p.device)
            bucket = open_ones.get(kind)
            if bucket is None:
                bucket = open_ones[kind] = Bucket(*kind)
                self.buckets.append(bucket)
            bucket.add(p)
            self._bucket_of[p] = bucket
            if bucket.nbytes >= bucket_bytes:
                del open_ones[kind]
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        """The coming backward is a window's last."""
        self.running, self._next = True, 0
        self._works: list[dist.Work] = []
        self._present: set[torch.Tensor] = {p for p in self._bucket_of if p.grad is not None}
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)

    def _arrived(self, p: torch.Tensor) -> None:
        if not self.running:
            return
        self._present.add(p)
        self._bucket_of[p].waiting -= 1
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._launch_next()

    def _launch_next(self) -> None:
        self._works.append(self.buckets[self._next].launch())
        self._next += 1

    def finish(self) -> None:
        """After backward: reduce what is left, and wait. A parameter that got a gradient on no rank
        has none, as on one rank."""
        self.running = False
        mask = torch.tensor([p in self._present for p in self._bucket_of], dtype=torch.uint8)
        while self._next < len(self.buckets):
            self._launch_next()
        dist.all_reduce(mask, dist.ReduceOp.MAX)
        for work in self._works:
            self._wait(work)
        for p, present in zip(self._bucket_of, mask.tolist(), strict=True):
            if not present:
                p.grad = None
