"""Ottava inside the Hugging Face Trainer, as one callback.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[OttavaCallback(recipe="tensor")])

The model is converted when the Trainer is built, before the optimizer and before accelerate wraps
anything; the plan is printed. In the first step the FP8 products are counted: none is an error.
What would silently undo the conversion, or what it would silently undo, is refused with the change
to make. Everything else is the Trainer's: checkpoints are plain Hugging Face folders.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS

from ..convert import convert, plan
from ..kernels.gemm import fp8_gemms
from ..layers.head import ChunkedCausalLM
from ..numerics.policy import Plan, Policy
from ..numerics.recipe import Recipe
from ..optim.adamw import AdamW

_log = logging.getLogger("ottava")

# What `optimizer` may name; bytes per parameter of weight and state together, of FP32 parameters.
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw": {"master": "fp32", "states": "fp32"},  # 12
    "adamw-8bit": {"master": "fp32", "states": "8bit"},  # 6
    "adamw-lean": {"master": "split16", "states": "8bit"},  # 4
}
LOGITS = ("eval", "never", "always")


class OttavaCallback(TrainerCallback):
    """Converts the Trainer's model, and proves that it computes in FP8.

    recipe, keep, policy, first_last_high: as `ottava.plan`. A model that is converted already keeps
    its plan.
    optimizer: None leaves the Trainer's; else a name in OPTIMIZERS, or a dict of keywords for
    `ottava.AdamW` (master, states). Learning rate, betas, eps, weight decay are the Trainer's.
    logits: where a causal LM that is given labels also returns logits. "eval": in evaluation, as
    `compute_metrics` needs (not under prediction_loss_only); "never": the least memory; "always":
    also in training, for trainers that read them there.
    report: takes each line meant for the user, on the main process only.
    Raises ValueError for what it cannot work with, when the Trainer is built.
    """

    def __init__(
        self,
        recipe: str | Recipe = "tensor",
        keep: Iterable[str] = (),
        policy: str | Policy = "default",
        *,
        first_last_high: bool = False,
        optimizer: str | dict[str, Any] | None = None,
        logits: str = "eval",
        report: Callable[[str], Any] = print,
    ) -> None:
        if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer: {optimizer!r} is not one of {', '.join(OPTIMIZERS)}; "
                "None leaves the Trainer's"
            )
        if logits not in LOGITS:
            raise ValueError(f"logits: {logits!r} is not one of {', '.join(LOGITS)}")
        self.how = {"recipe": recipe, "keep": keep, "policy": policy}
        self.first_last_high = first_last_high
        self.optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self.optimizer_name = optimizer if isinstance(optimizer, str) else "adamw"
        self.logits, self.report = logits, report
        self.plan: Plan | None = None
        self.fp8_gemms: int | None = None  # FP8 products of the first step, once it ran
        self._before: int | None = None

    def on_init_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Plan, convert, print; choose the optimizer. ValueError: see the class."""
        _refuse(args, model, optimizer, self.optimizer)
        said = self.report if state.is_world_process_zero else _log.debug
        self.plan = getattr(model, "_ottava_plan", None)
        if self.plan is None:
            made = plan(model, **self.how, first_last_high=self.first_last_high, device=args.device)
            if self.logits == "always":
                rows = tuple(r for r in made.rows if r.kind != "causal_lm")
                made = replace(made, rows=rows)
            # As the residual stream under autocast would be if its first tensor were BF16.
            convert(model, made, activations=torch.bfloat16 if args.bf16 else None)
            self.plan = made
        if self.logits == "eval" and not args.prediction_loss_only:
            for module in model.modules():  # a causal LM may be wrapped, as PEFT does
                if isinstance(module, ChunkedCausalLM):
                    module.logits_in_eval = True
        if self.optimizer is not None:
            args.optim = self._register()
        said(str(self.plan))
        if args.bf16 and os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
            said("ottava: accelerate's fp8 is overridden by bf16=True; FP8 here is ottava's alone")
        if self.plan.emulated and args.device.type == "cuda":
            said(
                "ottava: this GPU has no FP8 unit; products are emulated, which is slow: "
                'recipe="storage" computes in BF16 and keeps 8 bits for backward'
            )

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        """RuntimeError where the model or optimizer about to train is not the planned one."""
        if self.plan is None:
            raise RuntimeError(
                "OttavaCallback was added after the Trainer was built: the optimizer exists "
                "already. Pass it as Trainer(callbacks=[OttavaCallback(...)])"
            )
        if not hasattr(_unwrapped(model), "_ottava_plan"):
            raise RuntimeError(
                "the Trainer made a new model (model_init) after the conversion: convert inside "
                "it, model_init=lambda: ottava.convert(make_model(), ...)"
            )
        inner = getattr(optimizer, "optimizer", optimizer)
        if self.optimizer is not None and not isinstance(inner, AdamW):
            raise RuntimeError(
                f"the Trainer uses {type(inner).__name__}, not the optimizer asked of "
                "OttavaCallback: do not pass optimizer_cls_and_kwargs beside it"
            )
        self.fp8_gemms, self._before = None, fp8_gemms()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """After the first step's backward, before any weight changes: did FP8 run?"""
        if self._before is None or self.plan is None:
            return
        self.fp8_gemms, self._before = fp8_gemms() - self._before, None
        if not self.plan.num_fp8:
            return
        if self.fp8_gemms == 0:
            raise RuntimeError(
                f"no FP8 product ran in the first step, though {self.plan.num_fp8} modules are "
                "planned: something computes around the converted modules (an enclosing "
                "ottava.autocast(enabled=False), or replaced forwards)"
            )
        if state.is_world_process_zero:
            unit = "emulated FP8" if self.plan.emulated else "FP8"
            self.report(
                f"ottava: {self.fp8_gemms} {unit} products in the first step "
                f"({self.plan.num_fp8} modules planned)"
            )
            if self.fp8_gemms < self.plan.num_fp8:
                self.report("ottava: fewer products than modules: some of them did not run")

    def _register(self) -> str:
        """The name under which `TrainingArguments.optim` finds this callback's optimizer."""
        name, chosen = f"ottava-{self.optimizer_name}", dict(self.optimizer)

        def handler(context):
            if not hasattr(_unwrapped(context.model), "_ottava_plan"):
                raise ValueError(
                    f"optim={name!r} belongs to the Trainer that OttavaCallback set it for, whose "
                    "model is converted; make new TrainingArguments for another, and with "
                    "model_init convert inside it"
                )
            return AdamW, {**context.optimizer_kwargs, **context.adam_kwargs, **chosen}

        _OPTIMIZER_HANDLERS[name] = handler
        return name


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module that was converted, inside DDP and a compiled module."""
    model = getattr(model, "module", model)
    return getattr(model, "_orig_mod", model)


def _refuse(args, model: nn.Module, optimizer, chosen: dict[str, Any] | None) -> None:
    """ValueError, with the change to make, for what would undo the conversion or be undone by it."""
    from accelerate.state import AcceleratorState

    split = chosen is not None and str(chosen.get("master", "fp32")).startswith("split")
    sharded = bool(args.fsdp) or args.deepspeed is not None
    reasons = [
        (
            AcceleratorState().mixed_precision == "fp8",
            "accelerate's own FP8 (ACCELERATE_MIXED_PRECISION=fp8, or mixed_precision: fp8) would "
            "convert the model a second time; use bf16=True",
        ),
        (args.fp16, "fp16=True: FP8 training needs BF16's range in between; use bf16=True"),
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs in one process (DataParallel) copy the model every step; start one "
            "process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES=0",
        ),
        (
            args.use_liger_kernel,
            "use_liger_kernel=True replaces the converted modules' forwards; drop it: the norms, "
            "the MLP and the loss are fused here too",
        ),
        (
            chosen is not None and optimizer is not None,
            "an optimizer was passed to the Trainer as well; pass one of the two",
        ),
        (
            chosen is not None and sharded,
            "under FSDP or DeepSpeed the optimizer is theirs; use optimizer=None",
        ),
        (
            split and args.world_size > 1,
            "split masters have no reduction over ranks here; use optimizer='adamw-8bit'",
        ),
        (
            split and (args.bf16_full_eval or args.fp16_full_eval),
            "bf16_full_eval and fp16_full_eval cast the weights, which are 8-bit codes; drop them",
        ),
        (model is None, "the Trainer has no model"),
    ]  # fmt: skip
    for found, reason in reasons:
        if found:
            raise ValueError(f"OttavaCallback: {reason}")
