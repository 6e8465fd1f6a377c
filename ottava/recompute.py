"""What is computed again in backward instead of kept: train.recompute = "none", "mlp" or "layer".

"mlp" of a converted model is the gated MLP's own business (layers/mlp.py); what is left, whole
decoder layers and the MLPs of plain models, runs as stretches (stretch.py). `convert` applies what its
plan says; a run that has a context of its own for the second run, or no plan, applies it anew. Where the layers compute
in 8 bits, their inputs are kept in 8 bits too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .layers.autocast import as_now, recipe_in_force
from .numerics.policy import Plan
from .numerics.recipe import Recipe
from .stretch import run_stretch


def wrap_recompute(
    model: nn.Module,
    which: str,
    plan: Plan | None,
    precision: Callable[[], AbstractContextManager] | None = None,
    *,
    draws_random: bool = True,
    keep: str = "int8",
) -> None:
    """Make the modules that `which` names, and no others, recompute their forward in backward, in
    place; again called, in place of what an earlier call made of them.

    `precision()` is the 8-bit context of the second run (None: the one in force at the first):
    backward may run in another thread, where a context entered around forward does not reach.
    draws_random: whether a layer may draw random numbers; random states are then kept and put back,
    which a CUDA graph does not allow.
    keep: how a module's input is kept while its plan's recipes are in force, "int8" or "high"; any
    other input is kept as it is. Raises ValueError as `targets_of` does, before anything changes.
    """
    targets = targets_of(model, which, plan)
    unwrap_recompute(model)
    recipe = next((r.recipe for r in plan.rows if r.recipe), None) if plan else None
    for module in targets:
        module.forward = functools.partial(  # type: ignore[method-assign]
            _recomputed, module.forward, precision, recipe, draws_random=draws_random, keep=keep
        )


def targets_of(model: nn.Module, which: str, plan: Plan | None) -> list[nn.Module]:
    """The modules that run again as stretches. ValueError where there is nothing of the kind."""
    if which == "none":
        return []
    if which == "layer":
        return list(decoder_layers(model))
    rows = plan.rows if plan else ()
    ours = [r for r in rows if r.recipe and r.recipe.backend == "native"]
    fused = {r.name for r in ours if r.kind == "mlp"}
    targets = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "mlp" and name not in fused
    ]
    if not targets and not any(r.kind in ("mlp", "experts") for r in ours):
        raise ValueError(
            f"recompute: {type(model).__name__} has no MLP that could run again (gated, or named "
            "mlp); use recompute=none"
        )
    return targets


def unwrap_recompute(model: nn.Module) -> None:
    """Undo `wrap_recompute` on every module of `model`."""
    for module in model.modules():
        wrapped = module.__dict__.get("forward")
        if isinstance(wrapped, functools.partial) and wrapped.func is _recomputed:
            forward = wrapped.args[0]
            del module.__dict__["forward"]
            if not (isinstance(forward, types.MethodType) and forward.__self__ is module):
                module.__dict__["forward"] = forward  # not its class's own


def _recomputed(
    forward: Callable[..., Any],
    precision: Callable[[], AbstractContextManager] | None,
    recipe: Recipe | None,
    *args,
    draws_random,
    keep,
    **kwargs,
) -> Any:
    if torch.compiler.is_compiling():  # the compiler knows this one, and chooses what to keep
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    keep = keep if recipe_in_force(recipe).keeps_codes else "high"
    precision = as_now() if precision is None else precision
    return run_stretch(
        forward, args, kwargs, keep=keep, precision=precision, draws_random=draws_random
    )


def restores_random_states(model: nn.Module) -> bool:
    """Whether `wrap_recompute` made a module of `model` put random states back."""
    forwards = (m.__dict__.get("forward") for m in model.modules())
    return any(
        isinstance(f, functools.partial) and f.keywords.get("draws_random") for f in forwards
    )


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's blocks, by Hugging Face's convention. Raises ValueError where there are none."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT's
    inner = getattr(inner, "base_model", inner)
    layers = getattr(inner, "layers", None) or getattr(inner, "h", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"recompute: {type(model).__name__} has no list of layers "
            "(model.model.layers); use recompute=none"
        )
    return layers
