"""Write a model as a block-scaled FP8 checkpoint, in either layout of fp8_layout.py.

What a model loaded with `load_fp8` has not trained is written as it was read, bit for bit (see
fp8_checkpoint.py); so are the file of each tensor, the names of scales and config.json's section.
A folder appears whole or not at all. In memory at once: the model, and one shard.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from .fp8_blocks import fresh_scales
from .fp8_checkpoint import Origin, kept_scales
from .fp8_layout import (
    BLOCK,
    Group,
    fp8_weights,
    fp32_tensors,
    groups,
    quantization_config,
)
from .shards import ShardWriter
from .storage import Storage

MTP_FILE = "model_mtp.safetensors"


def save_fp8(
    model: nn.Module,
    path: str | Path,
    layout: str = "canonical",
    *,
    max_shard_bytes: int = 5 << 30,
) -> Path:
    """Write `model` to the folder `path` with its linears and experts in FP8; returns the folder.

    layout: "canonical" ([Q | K | V]; what transformers and most engines read) or "released" (as
    Xiaomi's files). Embedding, head, norms, sinks and what Xiaomi keeps BF16 are BF16, routers FP32;
    a model that was loaded from an FP8 checkpoint keeps that checkpoint's choice.

    Raises FileExistsError where `path` holds files, ValueError for an unknown layout and for a
    weight that is not finite. Nothing is left of a folder that could not be finished.
    """
    with whole_folder(path) as folder:
        origin = model.__dict__.get("_ottava_fp8")
        Saving(model, layout, max_shard_bytes, origin).write(folder)
    return Path(path)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into that is `path` when the block has ended well, and gone when it has not.

    Raises FileExistsError where `path` holds files.
    """
    out = Path(path)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out}: is not an empty folder; give another")
    partial = out.with_name(f".partial-{out.name}-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class Saving:
    """One model on its way into files. origin: what it was loaded from, if anything."""

    def __init__(
        self, model: nn.Module, layout: str, max_shard_bytes: int, origin: Origin | None
    ) -> None:
        self.model, self.layout, self.max_shard_bytes = model, layout, max_shard_bytes
        self.groups = groups(model, layout)
        self.origin = origin
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.fp32 = fp32_tensors(model)
        # weights whose rows lie otherwise than in the origin's files
        self.moved: set[str] = set()
        if self.origin is not None and not self._same_layout:
            other = [g for g in groups(model, "released") if g.layout_matters]
            self.moved = {s.name for g in other for s in g.stored}
        if self.origin is not None and self.origin.scales:
            self.block, stored = self.origin.block, self.origin.scales
            self.fp8 = {
                p.target for g in self.groups for p in g.parts if g.stored[0].name in stored
            }
        else:
            self.block, self.fp8 = BLOCK, fp8_weights(model)

    @torch.no_grad()
    def write(self, folder: Path) -> None:
        """Write every file into `folder`. Raises ValueError as `encode` does."""
        metadata = {"ottava_layout": self.layout}
        if self._same_layout and "ottava_layout" not in self.origin.metadata:
            metadata = {}  # Xiaomi's files do not say it
        writer = ShardWriter(folder, metadata)
        for file, members in self._files().items():
            tensors: dict[str, Tensor] = {}
            for group in members:
                made = self.encode(group)
                tensors |= {n: t for n, t in made.items() if self._file_of.get(n, file) == file}
            writer.write(file, tensors)
            del tensors
        writer.finish()
        config = getattr(self.model, "config", None)
        if hasattr(config, "to_dict"):
            (folder / "config.json").write_text(json.dumps(self._config(config), indent=2) + "\n")

    @property
    def _same_layout(self) -> bool:
        return self.origin is not None and self.origin.layout == self.layout

    def _config(self, config) -> dict:
        keys = json.loads(config.to_json_string(use_diff=False))
        section = quantization_config(self.model, self.layout, self.fp8, self.block)
        if self._same_layout:
            section = self.origin.config.get("quantization_config") or section
        cls = self.model.__dict__.get("_ottava_class", type(self.model))
        return keys | {
            "architectures": [cls.__name__],
            "dtype": "bfloat16",
            "quantization_config": section,
        }

    # ---- which tensor goes into which file ----

    def _files(self) -> dict[str, list[Group]]:
        """File -> its groups. The origin's where it has all names, else filled in order."""
        self._file_of: dict[str, str] = {}
        names = {id(g): self._names(g) for g in self.groups}
        known = {} if self.origin is None else self.origin.weight_map
        if all(n in known for own in names.values() for n in own):
            self._file_of = {n: known[n] for own in names.values() for n in own}
            out: dict[str, list[Group]] = {f: [] for f in sorted(set(self._file_of.values()))}
            for group in self.groups:
                for file in dict.fromkeys(self._file_of[n] for n in names[id(group)]):
                    out[file].append(group)
            return out
        main, mtp = [], []
        for group in self.groups:
            apart = self.layout == "released" and ".mtp" in group.stored[0].name
            (mtp if apart else main).append(group)
        parts = self._filled(main)
        out = {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": p for i, p in enumerate(parts)}
        if len(parts) == 1:
            out = {"model.safetensors": parts[0]}
        return out | ({MTP_FILE: mtp} if mtp else {})

    def _filled(self, members: list[Group]) -> list[list[Group]]:
        parts, room = [[]], self.max_shard_bytes
        for group in members:
            size = self._nbytes(group)
            if parts[-1] and size > room:
                parts.append([])
                room = self.max_shard_bytes
            parts[-1].append(group)
            room -= size
        return parts

    def _nbytes(self, group: Group) -> int:
        """About; scales come to a few bytes more."""
        each = 1 if self.is_fp8(group) else 4 if group.parts[0].target in self.fp32 else 2
        return sum(each * torch.Size(s.shape).numel() for s in group.stored)

    def _names(self, group: Group) -> list[str]:
        out = [s.name for s in group.stored]
        return out + [self._scale_name(n) for n in out] if self.is_fp8(group) else out

    def _scale_name(self, name: str) -> str:
        kept = None if self.origin is None else self.origin.scales.get(name)
        return f"{name}_scale_inv" if kept is None else kept[0]

    # ---- a group as it is stored ----

    def is_fp8(self, group: Group) -> bool:
        """Whether the group's tensors are written as codes."""
        return group.stored[0].grid is not None and group.parts[0].target in self.fp8

    def slots(self, group: Group) -> list[Storage]:
        """Where the values of a group's parts are."""
        return [Storage.of(self.tensors[p.target]).part(p.index) for p in group.parts]

    def encode(self, group: Group) -> dict[str, Tensor]:
        """The group's tensors by their stored names, on the CPU.

        Raises ValueError for an FP8 weight that is not finite.
        """
        slots = self.slots(group)
        values = [s.values() for s in slots]
        if not self.is_fp8(group):
            dtypes = {} if self.origin is None else self.origin.dtypes
            high = torch.float32 if group.parts[0].target in self.fp32 else torch.bfloat16
            return {
                s.name: x.to(dtypes.get(s.name, high)).reshape(s.shape).cpu().clone()
                for s, x in zip(group.stored, group.to_stored(values), strict=True)
            }
        matrices = group.to_stored([v.float() for v in values])
        for stored, matrix in zip(group.stored, matrices, strict=True):
            if not bool(matrix.isfinite().all()):
                raise ValueError(f"save_fp8: {stored.name} is not finite")
        kept = self._kept(group)
        made = None
        if all(kept) and group.stored[0].name not in self.moved:
            made = self._as_loaded(group, slots, matrices)
        if made is None:
            kinds = [k[2] if k else "block" for k in kept]
            like = [k[1] if k else None for k in kept]
            scales, stored_scales = fresh_scales(group, matrices, kinds, self.block, like)
            codes = [s.encode(m) for s, m in zip(scales, matrices, strict=True)]
        else:
            codes, stored_scales = made
        out: dict[str, Tensor] = {}
        for stored, c, scale in zip(group.stored, codes, stored_scales, strict=True):
            out[stored.name] = c.cpu()
            out[self._scale_name(stored.name)] = scale
        return out

    def _kept(self, group: Group) -> list[tuple[str, Tensor, str] | None]:
        """(name, scale as stored, kind) that the origin has for each stored weight."""
        known = {} if self.origin is None else self.origin.scales
        return [known.get(s.name) for s in group.stored]

    def _as_loaded(self, group: Group, slots: list[Storage], matrices: list[Tensor]):
        """(codes, scales as stored) whose loading gives exactly what the model holds, or None."""
        scales = kept_scales(group, self.origin, matrices[0].device)
        codes = [s.encode(m) for s, m in zip(scales, matrices, strict=True)]
        again = group.to_model([s.dequantize(c) for s, c in zip(scales, codes, strict=True)])
        if not all(slot.holds(v) for slot, v in zip(slots, again, strict=True)):
            return None
        return codes, [self.origin.scales[s.name][1] for s in group.stored]
