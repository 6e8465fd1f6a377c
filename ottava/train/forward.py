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


def tensors_of(batch: Batch, document_mask: bool) -> dict[str, torch.Tensor]:
    """What of a batch a model is given: ids and labels int64 [B, T], and the documents int32 [B, T]
    where attention is to stay within them and a sequence holds more than one."""
    documents = batch["document_ids"]
    names = ["input_ids", "labels"]
    if document_mask and bool((documents != documents[:, :1]).any()):
        names.append("document_ids")
    return {name: batch[name] for name in names}


def arguments_of(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Keyword arguments for `model` from what `tensors_of` gave, on its device."""
    documents = tensors.get("document_ids")
    kept: dict[str, Any] = {k: v for k, v in tensors.items() if k != "document_ids"}
    if documents is None:
        pass
    elif isinstance(model, MiMoPreTrainedModel):
        kept["documents"] = documents
    else:  # Hugging Face models read the boundaries from positions that start again
        kept["position_ids"] = positions_in_document(documents)
    return {**kept, "use_cache": False}


def inputs_of(
    model: nn.Module, batch: Batch, device: torch.device, document_mask: bool
) -> dict[str, Any]:
    """Keyword arguments for `model`, on `device`, from a batch of the loader."""
    tensors = tensors_of(batch, document_mask)
    return arguments_of(model, {k: v.to(device, non_blocking=True) for k, v in tensors.items()})


def window_loss(
    model: nn.Module,
    inputs: dict[str, Any],
    num_valid: int,
    window_valid: int,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """One micro-batch's part of the mean loss over a window's valid tokens, FP32 0-dim.

    num_valid: valid tokens here; window_valid: in the whole window. The parts of a window add up to
    its mean, however unequal they are. A router's auxiliary loss is weighted in the same way.
    count: window_valid, but at least 1, on the device: dividing by it is another operation there
    than dividing by a number, and a captured step can do only that.
    """
    out = model(**inputs, num_items_in_batch=max(window_valid, 1) if count is None else count)
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
