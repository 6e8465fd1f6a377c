"""From a run's checkpoint to a plain Hugging Face folder: BF16 safetensors and config.json."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from ..models.load import load_model
from .checkpoint import Checkpoint, CheckpointError, checkpoints, latest_good

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


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


def export(path: str | Path, out: str | Path, *, dtype: str = "bf16") -> Path:
    """Write the weights of a checkpoint (or of a run's newest) to `out` as a Hugging Face folder.

    Floating-point weights become `dtype`, except those that the model itself keeps in FP32 (router).
    Raises CheckpointError when there is nothing to export, FileExistsError when `out` holds files.
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out}: is not empty; give another folder")
    checkpoint, _ = find_checkpoint(path)
    if not (checkpoint.path / "config.json").exists():
        raise checkpoint.refused("has no config.json: its model is not a Hugging Face model")
    model = load_model(str(checkpoint.path), dtype=DTYPES[dtype], device="meta", random_init=True)
    stored = checkpoint.tensors("model")
    weights = {}
    for name, wanted in model.state_dict(keep_vars=True).items():
        value = stored.get(checkpoint.skeleton.get("aliases", {}).get(name, name))
        if value is None or value.shape != wanted.shape:
            raise checkpoint.refused(f"does not fit its own config.json: {name}")
        weights[name] = value.to(wanted.dtype)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    _copy_tokenizer(checkpoint, out)
    return out


def _copy_tokenizer(checkpoint: Checkpoint, out: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (checkpoint.path / name).exists():
            shutil.copy2(checkpoint.path / name, out / name)
