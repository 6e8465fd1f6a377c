"""What is computed again in backward instead of kept: train.recompute = "none", "mlp" or "layer".

"mlp" of a converted model is the gated MLP's own business (layers/mlp.py); what is left, whole
decoder layers and the MLPs of plain models, runs under torch's non-reentrant checkpointing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint

from .numerics.policy import Plan


def wrap_recompute(
    model: nn.Module,
    which: str,
    plan: Plan | None,
    precision: Callable[[], AbstractContextManager],
    *,
    draws_random: bool = True,
) -> None:
    """Make the modules that `which` names recompute their forward in backward, in place.

    `precision()` is the 8-bit context of the running step: backward may run in another thread,
    where a context entered around forward does not reach. draws_random: whether a layer may draw
    random numbers; random states are then kept and put back, which a CUDA graph does not allow.
    Raises ValueError when the model has no layers that it could name.
    """
    if which == "none":
        return
    layers = decoder_layers(model)
    if which == "layer":
        targets: list[nn.Module] = list(layers)
    else:
        fused = {r.name for r in plan.rows if r.kind == "mlp" and r.recipe} if plan else set()
        targets = [
            module
            for name, module in model.named_modules()
            if name.rpartition(".")[2] == "mlp" and name not in fused
        ]

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), precision()

    for module in targets:
        module.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, module.forward, use_reentrant=False, context_fn=contexts,
            preserve_rng_state=draws_random,
        )  # fmt: skip


def restores_random_states(model: nn.Module) -> bool:
    """Whether `wrap_recompute` made a module of `model` put random states back."""
    forwards = (m.__dict__.get("forward") for m in model.modules())
    return any(
        isinstance(f, functools.partial) and f.keywords.get("preserve_rng_state") for f in forwards
    )


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's blocks, by Hugging Face's convention. Raises ValueError where there are none."""
    inner = getattr(model, "base_model", model)
    layers = getattr(inner, "layers", None) or getattr(inner, "h", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"train.recompute: {type(model).__name__} has no list of layers "
            "(model.model.layers); use train.recompute=none"
        )
    return layers
