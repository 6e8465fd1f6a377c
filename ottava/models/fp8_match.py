"""Every tensor of a checkpoint beside the tensor of the model that it fills, checked before any is read.

The rules: each tensor of the model has one in the checkpoint, of its shape, and each of the
checkpoint has its place; codes have a scale, and only codes; a scale's shape is one of the kinds of
fp8_blocks.py. What is left in the files on purpose: MTP blocks that the model does not have, scales
of static activations (a recipe makes its own), and names that the caller skips.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from .fp8_blocks import SCALE_DTYPES, kind_of
from .fp8_layout import BLOCK, LAYOUTS, Group, Stored, groups
from .shards import Entry, Shards

_SCALE_NAMES = ("_scale_inv", "_scale")
_ACTIVATION = re.compile(r"\.(input_scale|activation_scale|input_scale_inv)$")
_MTP = re.compile(r"^model\.mtp(?:\.layers|_layers)\.(\d+)\.")
_HIGH = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Source:
    """A stored weight in the files. scale: the name of its scale, None for no FP8; kind: its kind."""

    stored: Stored
    name: str
    entry: Entry
    scale: str | None
    kind: str


@dataclass(frozen=True, slots=True)
class Job:
    """A group and where its tensors lie."""

    group: Group
    sources: tuple[Source, ...]


def block_size(config: dict) -> tuple[int, int]:
    """The block size that a config.json names, 128 x 128 where it names none.

    Raises ValueError for a quantization other than FP8 and for what is no size.
    """
    section = config.get("quantization_config") or {}
    method = section.get("quant_method", "fp8")
    if method not in ("fp8", "compressed-tensors"):
        raise ValueError(f"config.json: quant_method {method!r} is not 'fp8'")
    size = section.get("weight_block_size") or BLOCK
    if len(size) != 2 or not all(isinstance(s, int) and s > 0 for s in size):
        raise ValueError(f"config.json: weight_block_size {size!r} is not two positive numbers")
    return size[0], size[1]


def mtp_blocks(shards: Shards) -> int:
    """How many MTP blocks the files hold; config.json does not say."""
    found = {int(m[1]) for m in map(_MTP.match, shards.entries) if m}
    return max(found) + 1 if found else 0


def choose_layout(model: nn.Module, shards: Shards, layout: str | None) -> str:
    """The layout asked for, or the one the files name, or the only one there is for this model.

    Raises ValueError where none decides, and where the files name another.
    """
    named = shards.metadata.get("ottava_layout")
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
    if layout and named and layout != named:
        raise ValueError(f"{shards.folder}: says that its layout is {named!r}, not {layout!r}")
    if layout or named:
        return layout or named
    if any(g.layout_matters for g in groups(model, "released")):
        raise ValueError(
            f"{shards.folder}: its shapes do not tell how q, k and v are laid out; say "
            "layout='released' (Xiaomi's files) or layout='canonical' (re-exports, [Q | K | V])"
        )
    return "canonical"


def match(
    model: nn.Module,
    shards: Shards,
    layout: str,
    block: tuple[int, int],
    skip: Iterable[str],
    aliases: dict[str, str],
) -> tuple[list[Job], list[str]]:
    """(what to read for each group, in the files' order; names left in the files on purpose).

    aliases: other names of tied tensors -> the first. Raises ValueError as the module docstring says.
    """
    wanted = groups(model, layout)
    other = {
        s.name: s
        for g in groups(model, next(n for n in LAYOUTS if n != layout))
        if g.layout_matters or layout == "released"
        for s in g.stored
    }
    entries = shards.entries
    names = {s.name: s.name for g in wanted for s in g.stored}
    for alias, first in aliases.items():
        if first not in entries and alias in entries:
            names[first] = alias
    used, jobs, missing = set(), [], []
    for group in wanted:
        sources = []
        for stored in group.stored:
            name = names[stored.name]
            if name not in entries:
                missing.append(name)
                continue
            source = _source(shards, stored, name, block, layout, other)
            used |= {name, source.scale} if source.scale else {name}
            sources.append(source)
        _check_together(shards, group, sources)
        jobs.append(Job(group, tuple(sources)))
    left = [n for n in entries if n not in used and _left(n, model, tuple(skip), aliases)]
    extra = [n for n in entries if n not in used and n not in set(left)]
    _refuse(shards, missing, extra, names)
    jobs.sort(key=lambda j: (j.sources[0].entry.file, j.sources[0].entry.offset))
    return jobs, left


def _check_together(shards: Shards, group: Group, sources: list[Source]) -> None:
    """Tensors of one group are all FP8 or none; those that share scales have them in blocks."""
    kinds = [s.kind for s in sources]
    if "" in kinds and any(kinds):
        other = sources[kinds.index("")].name
        raise ValueError(f"{shards.folder}: {other} is not FP8, what belongs to it is")
    if group.joint and set(kinds) - {"", "block"}:
        raise ValueError(f"{shards.folder}: {sources[0].scale} must be a grid of blocks")


def _source(shards, stored: Stored, name: str, block, layout: str, other) -> Source:
    entry, folder = shards.entries[name], shards.folder
    if entry.shape != stored.shape:
        raise ValueError(
            f"{folder}: {name} is {list(entry.shape)}, the model's is {list(stored.shape)}"
        )
    scale = next((name + s for s in _SCALE_NAMES if name + s in shards.entries), None)
    if entry.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        if entry.dtype not in _HIGH:
            raise ValueError(f"{folder}: {name} is {_short(entry.dtype)}, neither FP8 nor a float")
        if scale is not None:
            raise ValueError(f"{folder}: {scale} scales {name}, which is {_short(entry.dtype)}")
        return Source(stored, name, entry, None, "")
    if entry.dtype == torch.float8_e5m2 or stored.grid is None:
        raise ValueError(f"{folder}: {name} is {_short(entry.dtype)}; only E4M3 matrices are read")
    if scale is None:
        raise ValueError(f"{folder}: {name} is FP8, and its scale {name}_scale_inv is missing")
    given = shards.entries[scale]
    kind = kind_of(given.shape, stored, block)
    if kind is None:
        raise ValueError(
            f"{folder}: {scale} is {list(given.shape)}; {layout} blocks of {block[0]} x {block[1]} "
            f"over {name} need {list(stored.scale_shape(block))}"
            + _hint(given.shape, other.get(stored.name), block, layout)
        )
    if given.dtype not in SCALE_DTYPES:
        raise ValueError(f"{folder}: {scale} is {_short(given.dtype)}, no type for a scale")
    return Source(stored, name, entry, scale, kind)


def _hint(shape, other: Stored | None, block, layout: str) -> str:
    if other is not None and shape == other.scale_shape(block):
        return f": this is the grid of layout {next(n for n in LAYOUTS if n != layout)!r}"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _left(name: str, model: nn.Module, skip: tuple[str, ...], aliases: dict[str, str]) -> bool:
    if name in aliases or _ACTIVATION.search(name) or any(fnmatchcase(name, s) for s in skip):
        return True
    found = _MTP.match(name)
    blocks = getattr(getattr(model, "model", None), "mtp_blocks", ())
    return found is not None and int(found[1]) >= len(blocks)


def _refuse(shards: Shards, missing: list[str], extra: list[str], names: dict[str, str]) -> None:
    """Raise ValueError for what has no counterpart, with the nearest name on the other side."""
    for name in extra:
        for suffix in _SCALE_NAMES:
            weight = name.removesuffix(suffix)
            if name.endswith(suffix) and weight not in shards.entries:
                raise ValueError(f"{shards.folder}: {name} scales a weight that is not there")
            if name.endswith(suffix) and weight in names:
                raise ValueError(f"{shards.folder}: {name} is a second scale of {weight}")
    for what, which, others in (
        ("missing", missing, extra),
        ("not the model's", extra, missing or list(names)),
    ):
        if which:
            near = difflib.get_close_matches(which[0], others, 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            verb = "is" if len(which) == 1 else "are"
            tensors = "1 tensor" if len(which) == 1 else f"{len(which):,} tensors"
            raise ValueError(f"{shards.folder}: {tensors} {verb} {what}, first {which[0]!r}{hint}")
