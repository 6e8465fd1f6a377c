"""From a batch to a loss: the one place that knows how models take documents and labels.

Both kinds of model, with the loss from the head in chunks or from whole logits, are called the same
way: labels and the count to divide by. B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..models.mimo import MiMoPreTrainedModel
from .data import positions_in_document

Batch = dict[str, Any]


def inputs_of(
    model: nn.Module, batch: Batch, device: torch.device, document_mask: bool
) -> dict[str, Any]:
    """Keyword arguments for `model`, on `device`: ids and labels int64 [B, T], and what keeps
    attention within a document (nothing where each sequence is one document)."""
    moved = {k: batch[k].to(device, non_blocking=True) for k in ("input_ids", "labels")}
    documents = batch["document_ids"]
    if document_mask and bool((documents != documents[:, :1]).any()):
        documents = documents.to(device, non_blocking=True)
        if isinstance(model, MiMoPreTrainedModel):
            moved["documents"] = documents
        else:  # Hugging Face models read the boundaries from positions that start again
            moved["position_ids"] = positions_in_document(documents)
    return {**moved, "use_cache": False}


def window_loss(
    model: nn.Module, inputs: dict[str, Any], num_valid: int, window_valid: int
) -> torch.Tensor:
    """One micro-batch's part of the mean loss over a window's valid tokens, FP32 0-dim.

    num_valid: valid tokens here; window_valid: in the whole window. The parts of a window add up to
    its mean, however unequal they are. A router's auxiliary loss is weighted in the same way.
    """
    out = model(**inputs, num_items_in_batch=max(window_valid, 1))
    loss = out.loss
    aux = getattr(out, "aux_loss", None)
    weight = getattr(model, "router_aux_loss_coef", None)
    if aux is not None and weight is not None and num_valid != window_valid:
        loss = loss - (1.0 - num_valid / max(window_valid, 1)) * weight * aux
    return loss


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, document_mask: bool
) -> torch.Tensor:
    """Mean loss over all valid tokens of `batches`, FP32 0-dim; 0 without any."""
    batches = list(batches)
    valid = max(sum(b["num_valid"] for b in batches), 1)
    total = torch.zeros((), device=device)
    for batch in batches:
        inputs = inputs_of(model, batch, device, document_mask)
        total += model(**inputs, num_items_in_batch=valid).loss
    return total
