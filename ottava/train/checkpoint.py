"""Checkpoints: atomic, complete, checked, and safe to open.

    <folder>/step-00000200/
        model.safetensors      weights under their original names, tied ones once, in high precision
        split.safetensors      only with split masters: codes, residual and scale, every bit
        <section>.safetensors  tensors of one section of the state (optimizer, ema, random, ...)
        shard-*.safetensors    what ranks hold in shares: weights, masters and sections (shard_files.py)
        state.json             everything that is not a tensor
        config.json            the model's configuration, so that the folder is a Hugging Face model
        manifest.json          size and CRC-32 of every file above, and its own

A checkpoint is written under another name in the same folder, flushed to the disk file by file, and
renamed: a process killed at any moment leaves either the whole checkpoint or none, and never touches
the one before. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ..distributed.shards import Rows
from ..kernels.split import SplitParameter, unpack_split
from ..optim.adamw import local
from .serialize import Entry, unflatten
from .shard_files import Stored, stored_in

VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
PARTIAL = ".partial-"  # being written, or being deleted: never a checkpoint


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. Carries exactly one line."""


# ---- weights --------------------------------------------------------------------------------


def _named_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(parameters and persistent buffers under original names, tied once; alias -> that name)."""
    if "_ottava_adapters" in model.__dict__:  # the base lies where it was loaded from
        return {n: p for n, p in model.named_parameters() if p.requires_grad}, {}
    found: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [(n, p) for n, p in module._parameters.items() if p is not None]
        own += [
            (n, b)
            for n, b in module._buffers.items()
            if b is not None and n not in module._non_persistent_buffers_set
        ]
        for name, value in own:
            # torch.compile's wrapper adds a level
            name = f"{prefix}.{name}".replace("_orig_mod.", "").lstrip(".")
            if first.setdefault(id(value), name) != name:
                aliases[name] = first[id(value)]
            else:
                found[name] = value
    return found, aliases


def _split_parts(name: str, p: SplitParameter) -> dict[str, torch.Tensor]:
    """Every tensor that a split master consists of, by its name in split.safetensors."""
    parts = {"codes": p.data, "residual": p.residual, "scale": p.scale, "amax": p.amax}
    parts = p.parts() if local(p) is not p else parts
    return {f"{name}.{k}": v for k, v in parts.items() if v is not None}


def whole_weights(model: nn.Module, whole: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """What `save` writes for each sharded weight: `whole` of it, in an order that all ranks share."""
    named = _named_tensors(model)[0]
    return {name: w for name, p in named.items() if (w := whole(p)) is not p}


def weight_entries(
    model: nn.Module, whole: Mapping[str, Any], hold: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[Entry], list[Entry], dict[str, str]]:
    """Entries of model.safetensors (high precision) and of split.safetensors, of each tensor what
    `hold` gives; and the names that tied weights have besides."""
    plain, split = [], []
    named, aliases = _named_tensors(model)
    for name, p in named.items():
        p = whole.get(name, p)
        if isinstance(p, Rows | Mapping):
            continue  # in the shards
        if isinstance(p, SplitParameter):
            parts = {k: hold(v) for k, v in _split_parts(name, p).items()}
            own = [parts.get(f"{name}.{k}") for k in ("codes", "residual", "scale")]
            # fp32 holds every bit of code and residual; made when its turn comes
            plain.append(
                Entry(name, torch.float32, tuple(p.shape), lambda own=own: unpack_split(*own))
            )
            split += [Entry.of(k, v) for k, v in parts.items()]
        else:
            plain.append(Entry.of(name, hold(p)))
    return plain, split, aliases


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    share: Callable[[Stored, torch.Tensor], torch.Tensor] = lambda value, like: value[:],
) -> None:
    """Copy a checkpoint's weights into `model`, bit for bit, in place; of each, `share(whole, own)`.

    Raises CheckpointError naming the first tensor that is missing, unexpected or differs in shape,
    dtype, or kind of master.
    """
    own, _ = _named_tensors(model)
    stored = checkpoint.stored("model")
    split = checkpoint.stored("split")
    for name in own:
        if name not in stored:
            raise checkpoint.refused(f"is from another model: it has no {name}")
    for name in stored:
        if name not in own:
            raise checkpoint.refused(f"is from another model: this one has no {name}")
    for name, p in own.items():
        if tuple(stored[name].shape) != tuple(p.shape):
            raise checkpoint.refused(
                f"is from another model: {name} is {list(stored[name].shape)} there and "
                f"{list(p.shape)} here"
            )
        is_split = isinstance(p, SplitParameter)
        if is_split != (f"{name}.codes" in split):
            there, here = ("a plain", "a split") if is_split else ("a split", "a plain")
            raise checkpoint.refused(f"has {there} master for {name}, this run {here} one")
        for key, target in (_split_parts(name, p) if is_split else {name: p.data}).items():
            source = (split if is_split else stored).get(key)
            if source is None:
                raise checkpoint.refused(f"has no {key}")
            if source.dtype != target.dtype or source.shape != target.shape:
                raise checkpoint.refused(
                    f"has {key} as {source.dtype} {list(source.shape)}, this run as "
                    f"{target.dtype} {list(target.shape)}"
                )
            with torch.no_grad():
                local(target).copy_(local(share(source, target)))


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was checked. `state` maps section to its content."""

    path: Path
    step: int
    skeleton: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Check the sums of a checkpoint's files and read its JSON. Raises CheckpointError."""
        path = Path(path)
        manifest = verify(path)
        skeleton = json.loads((path / "state.json").read_bytes())
        return cls(path=path, step=manifest["step"], skeleton=skeleton)

    def tensors(self, section: str) -> dict[str, torch.Tensor]:
        """All tensors of a section's file, on the CPU; empty where the section has none."""
        return {name: t[:] for name, t in self.stored(section).items()}

    def stored(self, section: str) -> dict[str, Stored]:
        """The same, to be read later, and in part. Raises CheckpointError."""
        try:
            return stored_in(list(self.path.glob("*.safetensors")), section)
        except SafetensorError as e:
            raise self.refused(f"has an unreadable file: {e}") from e

    def section(self, name: str, *, in_files: bool = False) -> Any:
        """One section of the state, as it was given to `save`; `in_files`: its tensors are yet to
        be read. Raises CheckpointError if absent."""
        if name not in self.skeleton:
            raise self.refused(f"holds no {name}")
        tensors = self.stored(name) if in_files else self.tensors(name)
        return unflatten(self.skeleton[name], tensors)

    def refused(self, reason: str) -> CheckpointError:
        """The error that says why this checkpoint is not used."""
        return CheckpointError(f"checkpoint {self.path} {reason}")


def verify(path: Path) -> dict[str, Any]:
    """Read every file and compare with the manifest, which is returned.

    Raises CheckpointError: missing, incomplete, or damaged, naming the file.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    file = path / "manifest.json"
    if not file.exists():
        raise CheckpointError(f"checkpoint {path} is incomplete: it has no manifest.json")
    try:
        manifest = json.loads(file.read_bytes())
        own = manifest.pop("crc32")
        if own != manifest_crc(manifest):
            raise ValueError
        version, files = manifest["version"], manifest["files"]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json") from e
    if version != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {version}; this version reads {VERSION}"
        )
    for name, expected in files.items():
        part = path / name
        if not part.exists():
            raise CheckpointError(f"checkpoint {path} is incomplete: {name} is missing")
        size = part.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"checkpoint {path} is truncated: {name} has {size} bytes of {expected['bytes']}"
            )
        if _crc(part) != expected["crc32"]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: the checksum of {name} does not match"
            )
    return manifest


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of every finished checkpoint in `folder`, newest first; damaged ones included."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    found = [(int(m[1]), folder / n) for n in names if (m := _NAME.fullmatch(n))]
    return sorted(found, reverse=True)


def latest_good(folder: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """(the newest whole checkpoint or None, why each newer one was passed over)."""
    skipped = []
    for _, path in checkpoints(folder):
        try:
            return Checkpoint.open(path), skipped
        except CheckpointError as e:
            skipped.append(str(e))
    return None, skipped


def set_aside_after(folder: str | Path, step: int) -> list[Path]:
    """Rename checkpoints later than `step` to unused-<name>, so that none is resumed by accident.

    Called when a run goes back to `step`: what came later belongs to a history that is given up.
    """
    moved = []
    for later, path in checkpoints(folder):
        if later > step:
            target = path.with_name(f"unused-{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            os.rename(path, target)
            moved.append(target)
    return moved


def manifest_crc(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value
