"""FP8 checkpoints with block scales, as DeepSeek and Xiaomi release them: load, train, write again.

Loading goes one group at a time (a matrix; an expert's gate and up) from the file into the form that
the model keeps it in, and is all or nothing: headers, names, shapes, scales and values are checked,
and the model is touched when everything has been read. A model on meta gets new memory and so needs
no second copy; one with memory is written at the end.

What is exact. value = code * scale, rounded once to FP32.
- BF16 and FP32 parameters: every code can be told again from the rounded value.
- split masters (pow2 scale per tensor or expert) cannot hold the value: they round it to 12
  ("split16") or 20 bits. Codes can still be told as long as no block's scale is less than 2^-7
  ("split24": 2^-15) of the largest one of its tensor; where one is, a warning names the weight.
So `save_fp8` writes the loaded codes and scales, bit for bit, for each weight that is still what
loading them gave. It tests just that: it encodes the weight with the loaded scales, loads the result
in memory, and compares. A weight that moved gets new scales, amax / 448 in FP32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from .fp8_blocks import Scales, group_scales, scale_values
from .fp8_layout import Group
from .fp8_match import Job, block_size, choose_layout, match
from .shards import Shards
from .storage import RESIDUAL_BITS, Form, Storage


@dataclass(slots=True)
class Origin:
    """What a loaded model remembers of its checkpoint, for writing it again.

    scales: stored weight -> (name of its scale, the scale as stored, its kind). dtypes: of all other
    tensors. inexact: weights whose codes the model's form cannot tell again. left: names not read.
    """

    folder: str
    layout: str
    block: tuple[int, int]
    config: dict
    metadata: dict[str, str]
    weight_map: dict[str, str]
    left: list[str]
    scales: dict[str, tuple[str, Tensor, str]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    inexact: list[str] = field(default_factory=list)


def load_fp8(
    path_or_id: str | Path,
    model: nn.Module,
    layout: str | None = None,
    *,
    master: str | None = None,
    device: str | torch.device | None = None,
    skip: Iterable[str] = (),
) -> nn.Module:
    """Fill `model` from a folder (or a Hub repository) of FP8 or BF16 safetensors; returns it.

    layout: "released" or "canonical" (fp8_layout.py); None where the files say it or it makes no
    difference. master: "split16" or "split24" turns the weights that `convert` marked for one
    power-of-two scale into split masters, as AdamW would; None keeps every parameter's form.
    device: where a model on meta gets its memory (CPU). skip: globs of names to leave in the files.

    Raises ValueError, one line, for every fault of the files (shards.py, fp8_match.py), for scales
    that are negative or not finite and for codes of NaN; the model is then as it was.
    """
    if master is not None and master not in RESIDUAL_BITS:
        raise ValueError(f"master: {master!r} is not one of {', '.join(RESIDUAL_BITS)}")
    shards, jobs, origin = open_fp8(path_or_id, model, layout, skip)
    try:
        check_covered(shards, jobs, model)
        memory = read_jobs(shards, jobs, origin, model, master, device)
    finally:
        shards.close()
    put(memory, model)
    model.__dict__["_ottava_fp8"] = origin
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        del model.config.quantization_config  # its parameters are none of the library's FP8
    if origin.inexact:
        hint = "; master='split24' keeps 20 bits" if master == "split16" else ""
        warnings.warn(
            f"load_fp8: {len(origin.inexact)} of {len(origin.scales)} FP8 weights lose codes (first "
            f"{origin.inexact[0]}): their blocks' scales lie too far apart for one scale{hint}",
            stacklevel=2,
        )
    return model


def load_vectors(
    path_or_id: str | Path,
    model: nn.Module,
    layout: str | None = None,
    *,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Give the norms, biases and sinks of a model on meta their values, which a plan looks at;
    `load_fp8` reads them again with all else. Arguments, checks and errors are its own."""
    shards, jobs, origin = open_fp8(path_or_id, model, layout)
    vectors = [j for j in jobs if all(s.grid is None for s in j.group.stored)]
    try:
        memory = read_jobs(shards, vectors, origin, model, None, device)
    finally:
        shards.close()
    put(memory, model)
    return model


def open_fp8(
    path_or_id: str | Path, model: nn.Module, layout: str | None, skip: Iterable[str] = ()
) -> tuple[Shards, list[Job], Origin]:
    """(the files, what to read for each group, what a model of theirs remembers); arguments and
    errors as `load_fp8`. All is checked but the weights' values; `model` may be on meta."""
    shards = Shards(_folder(path_or_id))
    try:
        block = block_size(shards.config)
        layout = choose_layout(model, shards, layout)
        first = {n: names[0] for names in _names(model).values() for n in names[1:]}
        jobs, left = match(model, shards, layout, block, skip, first)
        origin = Origin(
            str(shards.folder), layout, block, shards.config, shards.metadata,
            {n: e.file for n, e in shards.entries.items()}, left,
        )  # fmt: skip
        _read_scales(shards, jobs, origin)
    except BaseException:
        shards.close()
        raise
    return shards, jobs, origin


def _folder(path_or_id: str | Path) -> Path:
    """A local folder, or that of a Hub repository's downloaded files."""
    path = Path(path_or_id)
    if path.exists() or len(path.parts) != 2 or path.is_absolute():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path_or_id), allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path_or_id}: no such folder, and not to be had from the Hub ({reason})"
        ) from None


def _names(model: nn.Module) -> dict[str, list[str]]:
    """First name of each parameter and buffer -> all its names."""
    found: dict[int, list[str]] = {}
    for get in (model.named_parameters, model.named_buffers):
        for name, tensor in get(remove_duplicate=False):
            found.setdefault(id(tensor), []).append(name)
    return {names[0]: names for names in found.values()}


def _read_scales(shards: Shards, jobs: list[Job], origin: Origin) -> None:
    """Read and check all scales, 1/16384 of the weights' number, before any weight."""
    for source in (s for job in jobs for s in job.sources):
        if source.scale is None:
            origin.dtypes[source.stored.name] = source.entry.dtype
            continue
        raw = shards.read(source.scale)
        values = scale_values(raw)
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise ValueError(f"{shards.folder}: {source.scale} has a negative or infinite scale")
        origin.scales[source.stored.name] = source.scale, raw, source.kind


def read_jobs(shards, jobs, origin, model, master, device) -> dict[str, Storage]:
    """The memory of every tensor of the model, filled from the files; the model is not touched."""
    targets = _tensors(model)
    memory: dict[str, Storage] = {}
    for job in jobs:
        for part in job.group.parts:
            old = targets[part.target]
            if part.target not in memory:
                place = (device or "cpu") if old.is_meta else old.device
                form = Form.of(old, master, job.sources[0].scale is not None)
                memory[part.target] = Storage.empty(form, tuple(old.shape), place)
        _fill(shards, job, origin, memory)
    return memory


def check_covered(shards: Shards, jobs: list[Job], model: nn.Module) -> None:
    filled = {p.target for job in jobs for p in job.group.parts}
    for name, tensor in _tensors(model).items():
        if tensor.is_meta and name not in filled:
            raise ValueError(
                f"{shards.folder}: the model's {name} is on meta and no checkpoint holds it; give "
                "a model that has memory"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def put(memory: dict[str, Storage], model: nn.Module) -> None:
    """Make what was read the model's, tensor after tensor."""
    tied = _names(model)
    with torch.no_grad():
        for name in list(memory):
            memory.pop(name).put_into(model, tied[name])


def read_group(shards: Shards, job: Job, origin: Origin, device):
    """(tensors as stored, their scales, their values): FP32 for FP8, else in the files' dtype.

    Raises ValueError for codes of NaN.
    """
    raw = [shards.read(s.name).to(device) for s in job.sources]
    scales = kept_scales(job.group, origin, device)
    values = [
        x if scale is None else scale.dequantize(x) for x, scale in zip(raw, scales, strict=True)
    ]
    for source, value in zip(job.sources, values, strict=True):
        if source.scale and not bool(value.isfinite().all()):
            raise ValueError(f"{shards.folder}: {source.name} holds codes of NaN")
    return raw, scales, values


def _fill(shards: Shards, job: Job, origin: Origin, memory: dict[str, Storage]) -> None:
    """Read one group into its place, and note where its codes cannot be told again."""
    group = job.group
    slots = [memory[p.target].part(p.index) for p in group.parts]
    raw, scales, values = read_group(shards, job, origin, slots[0].data.device)
    for slot, value in zip(slots, group.to_model(values), strict=True):
        slot.write(value)
    if any(s.residual is not None or s.data.dtype == torch.float16 for s in slots):
        again = group.to_stored([s.values().float() for s in slots])
        for source, value, x, scale in zip(job.sources, again, raw, scales, strict=True):
            if scale is not None and not same_codes(scale.encode(value), x):
                origin.inexact.append(source.name)


def kept_scales(group: Group, origin: Origin, device) -> list[Scales | None]:
    """The scales that a group's stored weights were loaded with; None for each that is no FP8."""
    kept = [origin.scales.get(s.name) for s in group.stored]
    if not all(kept):
        return [None] * len(kept)
    values = [scale_values(raw) for _, raw, _ in kept]
    return group_scales(group, values, [kind for *_, kind in kept], origin.block, device)


def same_codes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of codes agree in every byte."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
