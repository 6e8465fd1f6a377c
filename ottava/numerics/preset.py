"""Presets: named sets of choices, the columns of every comparison."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

MASTERS = ("fp32", "bf16", "split16", "split24")
STATES = ("fp32", "bf16", "8bit")
RECOMPUTES = ("none", "mlp", "layer")
_AUTOCAST = {
    "autocast-bf16": torch.bfloat16,
    "autocast-fp16": torch.float16,
    "fp8": torch.bfloat16,
    "storage": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named set of choices: a column of every comparison.

    `fused`: the optimizer steps inside backward, so that no gradient is kept.
    `chunked_loss`: the loss is computed from the head in chunks; the logits never exist whole.
    """

    name: str
    compute: str  # "fp32" | "autocast-bf16" | "autocast-fp16" | "bf16" | "fp8" | "storage"
    recipe: str | None  # how linears compute and what they keep; None: plain PyTorch
    param_dtype: str  # "fp32" | "bf16": what the model is built in
    master: str  # one of MASTERS
    grad_dtype: str  # "fp32" | "bf16"
    states: str  # one of STATES
    fused: bool
    chunked_loss: bool

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What torch's autocast computes in; None where it is off."""
        return _AUTOCAST.get(self.compute)


_ROWS: tuple[tuple[Any, ...], ...] = (  # in the order of Preset's fields
    ("fp32", "fp32", None, "fp32", "fp32", "fp32", "fp32", False, False),
    ("amp", "autocast-bf16", None, "fp32", "fp32", "fp32", "fp32", False, False),
    ("amp-fp16", "autocast-fp16", None, "fp32", "fp32", "fp32", "fp32", False, False),
    ("bf16", "bf16", None, "bf16", "bf16", "bf16", "bf16", False, False),
    ("fp8", "fp8", "tensor", "fp32", "fp32", "bf16", "fp32", False, True),
    ("fp8-lean", "fp8", "tensor", "bf16", "split16", "bf16", "8bit", True, True),
    ("storage", "storage", "storage", "fp32", "fp32", "fp32", "fp32", False, True),
)
_names = [f.name for f in fields(Preset)]
PRESETS = {r[0]: Preset(**dict(zip(_names, r, strict=True))) for r in _ROWS}  # type: ignore[arg-type]
