"""From a run's settings to a model that is ready for its first step: the same for all who need one.

The trainer does this to a real model, the planner to a fake one; so what is planned is what runs.
Order: model -> plan -> convert -> gradient dtypes -> optimizer -> fused backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .config import ConfigError, Run
from .convert import convert
from .convert import plan as make_plan
from .frozen import load_frozen
from .layers.adapters import adapt_experts
from .lora import add_lora
from .models.fp8_checkpoint import load_fp8, load_vectors
from .models.load import holds_fp8, load_config, load_model, skeleton
from .models.moe import Router, freeze_router
from .models.storage import RESIDUAL_BITS
from .numerics.policy import Plan
from .numerics.recipe import Recipe, get_recipe
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


def ready_model(run: Run, device: torch.device) -> tuple[nn.Module, Plan | None]:
    """The run's model on `device`, converted, with its weights; and its plan, None without one.

    FP8 files go straight into the form that the model trains in: planned and converted on meta, it
    is filled group by group. Raises ValueError as `load_model` and `load_fp8` do, nothing half-loaded.
    """
    m = run.model
    if run.lora.rank:
        return _adapted(run, device)
    if m.random_init or not (m.path and holds_fp8(m.path)):
        _refuse_layout(run)
        model = build_model(run, device)
        return model, convert_for(run, model, device)
    dtype = DTYPES[run.settings.param_dtype]
    model = skeleton(m.path, overrides=m.overrides, dtype=dtype)
    layout = None if m.layout == "auto" else m.layout
    load_vectors(m.path, model, layout, device=device)
    plan = convert_for(run, model, device)
    master = run.settings.master if run.settings.master in RESIDUAL_BITS else None
    load_fp8(m.path, model, layout, master=master, device=device)
    return model, plan


def _adapted(run: Run, device: torch.device) -> tuple[nn.Module, Plan | None]:
    """The same for adapters on a frozen base: FP8 files stay codes, everything else is BF16."""
    m = run.model
    if not m.path or m.random_init:
        raise ConfigError(
            "lora.rank: adapters train on top of a model that was trained; give it as model.path"
        )
    if run.distributed.strategy != "single":
        raise ConfigError("lora.rank: adapters train in one process as yet; use strategy=single")
    dtype = torch.float32 if run.settings.compute == "fp32" else torch.bfloat16
    if holds_fp8(m.path):
        layout = None if m.layout == "auto" else m.layout
        model = load_frozen(m.path, layout, overrides=m.overrides, dtype=dtype, device=device)
    else:
        _refuse_layout(run)
        model = load_model(m.path, overrides=m.overrides, dtype=dtype, device=device)
    add_lora(model, run.lora)
    plan = convert_for(run, model, device)
    adapt_experts(dict(model.named_modules()))  # without a plan too
    return model, plan


def _refuse_layout(run: Run) -> None:
    if run.model.layout != "auto":
        raise ConfigError(
            f"model.layout: {run.model.layout!r} is for FP8 files, and {run.model.path} holds none "
            "(its config.json has no FP8 quantization_config); remove the key"
        )


def convert_for(run: Run, model: nn.Module, device: str | torch.device) -> Plan | None:
    """Convert `model` in place as the run's preset says; returns the plan, None where it has none.

    `device`: where the run will compute. Raises ValueError when nothing is eligible for FP8.
    """
    settings, p = run.settings, run.precision
    if run.model.freeze_router:
        if not any(isinstance(m, Router) for m in model.modules()):
            raise ConfigError(
                f"model.freeze_router: a {type(model).__name__} has no router; remove the key"
            )
        freeze_router(model)
    plan = None
    if settings.recipe is not None:
        plan = make_plan(
            model,
            _recipe(run),
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


def _recipe(run: Run) -> Recipe:
    """The recipe of a run whose preset has one. Raises ConfigError for what does not go with one of
    Transformer Engine's."""
    p, name = run.precision, str(run.settings.recipe)
    recipe = replace(get_recipe(name), attention=p.attention)
    if recipe.backend != "te":
        if p.te:
            raise ConfigError(
                f"precision.te: options for Transformer Engine, and precision.recipe is {name}; "
                "use te:delayed, te:current, te:block or te:mxfp8, or remove the key"
            )
        return recipe
    if name == "te:delayed" and run.train.recompute != "none":
        raise ConfigError(
            f"precision.recipe: te:delayed would move its histories again where "
            f"train.recompute={run.train.recompute} runs layers a second time; use te:current"
        )
    if run.distributed.strategy in ("fsdp2", "deepspeed"):
        raise ConfigError(
            f"precision.recipe: {name} is for one process or distributed.strategy=ddp; under "
            f"{run.distributed.strategy} Transformer Engine's copies of gathered weights would stay "
            "on every rank; use a native recipe"
        )
    return replace(recipe, options=tuple(sorted(p.te.items())))


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
        moments_on=o.moments_on,
        seed=run.seed,
    )


def fuse(run: Run, model: nn.Module, optimizer: AdamW) -> FusedBackward | None:
    """Put the optimizer's step inside backward where the run's settings say so; the handle."""
    return fuse_backward(model, optimizer, measure=True) if run.settings.fused else None
