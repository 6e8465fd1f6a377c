"""From a run's checkpoint, or from FP8 files, to a plain Hugging Face folder.

Formats: "bf16" (plain safetensors; `dtype` may make them fp16 or fp32), "fp8" (canonical blocks),
"released" (FP8 as Xiaomi lays it out); see models/fp8_layout.py. "adapter": of a run with [lora], the
folder that PEFT reads; the other formats add its adapters to the base, in FP32, first.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..config import Run, run_from_dict
from ..lora import merged, save_adapter
from ..models.fp8_checkpoint import load_fp8
from ..models.fp8_convert import convert_fp8
from ..models.fp8_match import mtp_blocks
from ..models.fp8_save import save_fp8
from ..models.load import holds_fp8, load_model, skeleton
from ..models.shards import Shards
from .checkpoint import Checkpoint, CheckpointError, checkpoints, latest_good

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = {"bf16": None, "fp8": "canonical", "released": "released", "adapter": None}  # -> layout
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """What was written. dtype: of plain weights, or the FP8 format. step: None for FP8 files.
    passed_over: why newer checkpoints were not taken."""

    folder: Path
    step: int | None
    dtype: str
    passed_over: tuple[str, ...] = ()


def find_checkpoint(path: str | Path) -> tuple[Checkpoint, list[str]]:
    """(the checkpoint at `path`, or the newest whole one under a run's folder; what was passed over).

    Raises CheckpointError: none there, or damaged.
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        return Checkpoint.open(path), []
    for folder in (path / "checkpoints", path):
        if checkpoints(folder):
            found, skipped = latest_good(folder)
            if found is None:
                raise CheckpointError(f"{folder}: no whole checkpoint; {skipped[0]}")
            return found, skipped
    raise CheckpointError(
        f"{path}: holds no checkpoint; give a run's folder or one step-... folder"
    )


def export(
    path: str | Path,
    out: str | Path,
    *,
    format: str = "bf16",
    dtype: str = "bf16",
    layout: str | None = None,
) -> Exported:
    """Write the weights of a checkpoint (of a run's newest; of a folder of FP8 files) to `out`.

    With format "bf16", floating-point weights become `dtype`, except those that the model itself
    keeps in FP32 (router). layout: of FP8 files given as `path`, where they do not say it.
    Raises CheckpointError when there is nothing to export, FileExistsError when `out` holds files,
    ValueError for unknown names, for what `load_fp8` refuses, and for "adapter" where there is none.
    """
    out, path = Path(out), Path(path)
    for option, value, known in (("--dtype", dtype, DTYPES), ("--format", format, FORMATS)):
        if value not in known:
            raise ValueError(f"{option}: {value!r} is not one of {', '.join(known)}")
    if format != "bf16" and dtype != "bf16":
        raise ValueError(f"--dtype {dtype}: goes with --format bf16 alone")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out}: is not empty; give another folder")
    # Blocks are cut from the master weights, not from their BF16 roundings.
    kept = DTYPES[dtype] if format == "bf16" else torch.float32
    if format == "adapter":
        return _export_adapter(path, out)
    if (path / "config.json").exists() and not (path / "manifest.json").exists():
        step, passed_over, files = None, [], path
        model = _of_files(path, kept)
        if format != "bf16":
            convert_fp8(path, model, out, FORMATS[format], source_layout=layout)
        else:
            load_fp8(path, model, layout)
    else:
        if layout is not None:
            raise ValueError("--layout: goes with a folder of FP8 files, not with a checkpoint")
        checkpoint, passed_over = find_checkpoint(path)
        step, files = checkpoint.step, checkpoint.path
        run = _adapted_run(checkpoint)
        model = model_of(checkpoint, kept) if run is None else _merged(checkpoint, run, kept)
    if format == "bf16":
        model.save_pretrained(out)
    elif step is not None:
        save_fp8(model, out, FORMATS[format])
    _copy_tokenizer(files, out)
    return Exported(out, step, dtype if format == "bf16" else format, tuple(passed_over))


def _export_adapter(path: Path, out: Path) -> Exported:
    checkpoint, passed_over = find_checkpoint(path)
    run = _adapted_run(checkpoint)
    if run is None:
        raise ValueError(f"--format adapter: {path} is no run with [lora]; use bf16 or fp8")
    save_adapter(checkpoint.tensors("model"), run.lora, run.model.path, out)
    return Exported(out, checkpoint.step, "adapter", tuple(passed_over))


def model_of(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """The checkpoint's model on the CPU, in `dtype`. Raises CheckpointError."""
    if not (checkpoint.path / "config.json").exists():
        raise checkpoint.refused("has no config.json: its model is not a Hugging Face model")
    model = load_model(str(checkpoint.path), dtype=dtype, device="meta", random_init=True)
    stored = checkpoint.stored("model")
    weights = {}
    for name, wanted in model.state_dict(keep_vars=True).items():
        value = stored.get(checkpoint.skeleton.get("aliases", {}).get(name, name))
        if value is None or value.shape != wanted.shape:
            raise checkpoint.refused(f"does not fit its own config.json: {name}")
        weights[name] = value[:].to(wanted.dtype)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _adapted_run(checkpoint: Checkpoint) -> Run | None:
    """The run of a checkpoint that holds adapters alone, else None."""
    stored = checkpoint.skeleton.get("run")
    if not stored or not checkpoint.section("run").get("lora", {}).get("rank"):
        return None
    run = checkpoint.section("run")
    known = {k: run[k] for k in ("model", "lora")}
    return run_from_dict(known)


def _merged(checkpoint: Checkpoint, run: Run, dtype: torch.dtype) -> nn.Module:
    """The run's base with its adapters added in FP32, then in `dtype`."""
    m = run.model
    if holds_fp8(m.path):
        model = skeleton(m.path, overrides=m.overrides)
        load_fp8(m.path, model, None if m.layout == "auto" else m.layout)
    else:
        model = load_model(m.path, overrides=m.overrides)
    return merged(model, checkpoint.tensors("model"), run.lora).to(dtype)


def _of_files(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a folder of FP8 files on meta, with every MTP block that they hold."""
    blocks = mtp_blocks(Shards(folder))
    overrides = {"num_nextn_predict_layers": blocks} if blocks else {}
    return load_model(str(folder), overrides=overrides, dtype=dtype, device="meta")


def _copy_tokenizer(folder: Path, out: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (folder / name).exists():
            shutil.copy2(folder / name, out / name)
