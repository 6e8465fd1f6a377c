"""Models whose FP8 weights stay as released: 1.01 bytes a parameter, for adapters on top of them.

    model = ottava.load_frozen(folder, "released")
    model = get_peft_model(model, LoraConfig(...))         # PEFT's own
    model = ottava.convert(model)                          # FP8 products on the released codes

Codes and scales go from the files to where they stay, a group at a time; nothing is rounded again,
and nothing of the model ever exists in high precision. `ottava.revert` gives plain FP32 weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .kernels.frozen import BLOCK, FrozenParameter, freeze
from .layers.frozen import FrozenExperts, FrozenLinear
from .layers.mixed import mixed_class
from .models.fp8_blocks import scale_values
from .models.fp8_checkpoint import Origin, check_covered, open_fp8, put, read_jobs
from .models.fp8_match import Job, Source
from .models.load import skeleton
from .models.shards import Shards


def load_frozen(
    folder: str | Path,
    layout: str | None = None,
    *,
    overrides: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> nn.Module:
    """The model of a folder of FP8 files, in training mode, no parameter of which trains.

    layout: as `load_fp8`. overrides: config keys, such as num_nextn_predict_layers. dtype: of what
    the files hold in BF16; routers stay FP32. Without `convert` it computes in the dtype of its input.

    Raises ValueError, one line, as `load_fp8` does, and for scales that are no 128 x 128 blocks (or
    one for all of a weight), and experts whose gate and up share a block.
    """
    model = skeleton(str(folder), overrides=overrides, dtype=dtype)
    shards, jobs, origin = open_fp8(folder, model, layout)
    try:
        check_covered(shards, jobs, model)
        owners = {f"{n}.weight": m for n, m in model.named_modules() if type(m) is nn.Linear}
        for name, m in model.named_modules():
            if getattr(m, "gate_up_proj", None) is not None and m.gate_up_proj.dim() == 3:
                owners |= {f"{name}.{key}": m for key in ("gate_up_proj", "down_proj")}
        coded: list[Job] = []
        high: list[Job] = []
        for job in jobs:
            stays = job.sources[0].scale is not None and job.group.parts[0].target in owners
            (coded if stays else high).append(job)
        frozen = _Reading(shards, origin, device or "cpu").read(model, coded)
        memory = read_jobs(shards, high, origin, model, None, device)
    finally:
        shards.close()
    put(memory, model)
    for target, parameter in frozen.items():
        _install(owners[target], target.rpartition(".")[2], parameter)
    model.__dict__["_ottava_fp8"] = origin
    return model.requires_grad_(False)


def _install(module: nn.Module, name: str, parameter: FrozenParameter) -> None:
    if "_ottava_class" not in module.__dict__:
        cls = module.__dict__["_ottava_class"] = type(module)
        experts = mixed_class(FrozenExperts, cls)
        module.__class__ = FrozenLinear if cls is nn.Linear else experts
    module._parameters[name] = parameter


class _Reading:
    """Codes on their way from the files into the parameters that they stay in."""

    def __init__(self, shards: Shards, origin: Origin, device: str | torch.device) -> None:
        self.shards, self.origin, self.device = shards, origin, device

    def read(self, model: nn.Module, jobs: list[Job]) -> dict[str, FrozenParameter]:
        """Target -> its parameter, complete. Raises ValueError."""
        places = {}
        for job in jobs:
            for part, place in zip(job.group.parts, self._places(job), strict=True):
                places[part.target, part.index] = place
        codes: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        for job in jobs:
            values = job.group.to_model([self._codes(s) for s in job.sources])
            grids = self._grids(job)
            for part, value, grid in zip(job.group.parts, values, grids, strict=True):
                shape = tuple(model.get_parameter(part.target).shape)
                rows, _ = places[part.target, part.index]
                lead = shape[:1] if part.index is not None else ()
                if part.target not in codes:
                    codes[part.target] = torch.empty(shape, dtype=torch.uint8, device=self.device)
                    grid_shape = (*lead, len(rows), grid.shape[1])
                    scales[part.target] = torch.empty(grid_shape, device=self.device)
                at = ... if part.index is None else part.index
                codes[part.target][at].copy_(value)
                scales[part.target][at].copy_(grid[rows])
        out = {}
        for target, value in codes.items():
            position = places.get((target, None), (None, None))[1]
            position = None if position is None else position.to(self.device)
            out[target] = freeze(value.view(torch.float8_e4m3fn), scales[target], position)
        return out

    def _codes(self, source: Source) -> Tensor:
        """A stored weight as bytes. Raises ValueError for NaN."""
        raw = self.shards.read(source.name).view(torch.uint8)
        if bool(((raw & 0x7F) == 0x7F).any()):
            raise ValueError(f"{self.shards.folder}: {source.name} holds codes of NaN")
        return raw

    def _grids(self, job: Job) -> list[Tensor]:
        """For each part of a job the scales of all blocks of the job, FP32 [n, k]."""
        grids = []
        for source in job.sources:
            _, raw, kind = self.origin.scales[source.stored.name]
            value, (_, cols) = scale_values(raw), source.stored.shape
            if kind == "tensor":
                n = source.stored.grid.chunks * source.stored.grid.total(BLOCK)
                value = value.reshape(1, 1).expand(n, -(-cols // BLOCK))
            grids.append(value)
        if not job.group.joint:
            return [torch.cat(grids)] * len(job.group.parts)
        grid = job.sources[0].stored.grid
        shared = torch.zeros(grid.chunks, grid.total(BLOCK), grids[0].shape[1])
        for source, value in zip(job.sources, grids, strict=True):
            own = source.stored.grid.own(BLOCK)
            shared[:, own.start : own.stop] = value.view(grid.chunks, len(own), -1)
        return [shared.flatten(0, 1)] * len(job.group.parts)

    def _places(self, job: Job) -> list[tuple[Tensor, Tensor | None]]:
        """For each part: the rows of `_grids` that it needs, and each of its rows' position under
        them; None where row r is row r. Raises ValueError for scales of another kind."""
        folder, first = self.shards.folder, job.sources[0]
        if self.origin.block != (BLOCK, BLOCK):
            size = " x ".join(map(str, self.origin.block))
            raise ValueError(f"{folder}: blocks of {size} cannot stay as they are; 128 x 128 can")
        numbers, start = [], 0
        for source in job.sources:
            if source.kind == "row":
                raise ValueError(
                    f"{folder}: {source.scale} scales rows; only 128 x 128 blocks, or one number, "
                    "can stay as they are"
                )
            grid, rows = source.stored.grid, torch.arange(source.stored.shape[0])
            row = grid.index(BLOCK) * BLOCK + (rows % grid.rows + grid.start) % BLOCK
            numbers.append((row + start)[:, None])
            if not job.group.joint:
                start += grid.chunks * grid.total(BLOCK) * BLOCK
        out = []
        for part, row in zip(job.group.parts, job.group.to_model(numbers), strict=True):
            blocks, rank = torch.unique(row[:, 0] // BLOCK, return_inverse=True)
            position = rank * BLOCK + row[:, 0] % BLOCK
            if torch.equal(position, torch.arange(len(position))):
                position = None
            elif part.index is not None:
                raise ValueError(
                    f"{folder}: {first.name}: {first.stored.shape[0]} rows do not fill blocks of "
                    "128, so that gate and up cannot stay side by side as they are"
                )
            out.append((blocks, position))
        return out
