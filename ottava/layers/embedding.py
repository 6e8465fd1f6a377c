"""An embedding whose output is in the compute dtype, so that the residual stream is BF16.

The table itself stays in high precision (FP32 master, BF16, or BF16 + residual).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.split import SplitParameter
from .weights import Stored


class Embedding(Stored, nn.Embedding):
    """nn.Embedding with output in `compute_dtype` (None: the weight's own, as nn.Embedding)."""

    compute_dtype: torch.dtype | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, SplitParameter):
            # The BF16 part of the split master is the nearest BF16 value: read it directly.
            weight = _AsPlain.apply(weight)
        y = F.embedding(
            ids, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        )
        return y if self.compute_dtype is None else y.to(self.compute_dtype)


class _AsPlain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.data

    @staticmethod
    def backward(ctx, grad):
        return grad
