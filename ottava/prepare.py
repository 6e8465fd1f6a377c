"""From a run's settings to a model that is ready for its first step: the same for all who need one.

The trainer does this to a real model, the planner to a fake one; so what is planned is what runs.
Order: model -> plan -> convert -> gradient dtypes -> optimizer -> fused backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import Run
from .convert import convert
from .convert import plan as make_plan
from .models.load import load_config, load_model
from .numerics.policy import Plan
from .optim.adamw import AdamW
from .optim.fused_backward import FusedBackward, fuse_backward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def vocab_size(run: Run) -> int:
    """How many token ids the run's model knows. Raises ValueError as `load_config` does."""
    m = run.model
    return load_config(m.name or m.path, m.overrides).vocab_size


def build_model(run: Run, device: str | torch.device) -> nn.Module:
    """The run's model, not yet converted, in the dtype of its settings; "meta" allocates nothing."""
    m = run.model
    return load_model(
        m.name or m.path,
        overrides=m.overrides,
        dtype=DTYPES[run.settings.param_dtype],
        device=device,
        seed=run.seed,
        random_init=m.random_init,
    )


def convert_for(run: Run, model: nn.Module, device: str | torch.device) -> Plan | None:
    """Convert `model` in place as the run's preset says; returns the plan, None where it has none.

    `device`: where the run will compute. Raises ValueError when nothing is eligible for FP8.
    """
    settings, p = run.settings, run.precision
    plan = None
    if settings.recipe is not None:
        plan = make_plan(
            model,
            settings.recipe,
            p.keep,
            policy=p.policy,
            first_last_high=p.first_last_high,
            recompute=run.train.recompute,
            device=device,
        )
        # the residual stream is BF16: what the article calls the activations' tier
        convert(model, plan, activations=torch.bfloat16)
    wanted = DTYPES[settings.grad_dtype]
    for parameter in model.parameters():
        keeps_fp32 = getattr(parameter, "_ottava_fp32", False)
        if parameter.requires_grad and parameter.dtype != wanted and not keeps_fp32:
            parameter.grad_dtype = wanted
    return plan


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices decay; norms, biases and sinks do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def make_optimizer(run: Run, model: nn.Module) -> AdamW:
    """The run's AdamW over the converted model; makes the split masters where there are any."""
    o, settings = run.optimizer, run.settings
    return AdamW(
        parameter_groups(model, o.weight_decay),
        lr=run.peak_lr,
        betas=o.betas,
        eps=o.eps,
        weight_decay=o.weight_decay,
        master=settings.master,
        states=settings.states,
        seed=run.seed,
    )


def fuse(run: Run, model: nn.Module, optimizer: AdamW) -> FusedBackward | None:
    """Put the optimizer's step inside backward where the run's settings say so; the handle."""
    return fuse_backward(model, optimizer, measure=True) if run.settings.fused else None
