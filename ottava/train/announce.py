"""What a run says of itself when it begins: its facts for run.jsonl, its lines for the console, and
what it holds in memory."""

from __future__ import annotations

import resource
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ..monitor.console import changed_options
from ..monitor.metrics import VERSION
from ..monitor.speed import Speed
from ..optim.adamw import local
from ..planner.lifetimes import CATEGORIES, state_tensors

if TYPE_CHECKING:
    from .trainer import Trainer


def peak_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: the CUDA allocator's, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def held_gib(trainer: Trainer) -> dict[str, float]:
    """What is held between steps, in the planner's categories, and "peak" so far: measured, in GiB.
    Of several ranks, this one's part. Bytes that two tensors share count once."""
    held: dict[str, int] = {}
    seen = set()
    for category, tensor in state_tensors(trainer.model, trainer.optimizer, trainer.ema):
        own = local(tensor)
        place = own.untyped_storage()._cdata, own.storage_offset(), own.nbytes
        if own.nbytes and place not in seen:
            seen.add(place)
            held[category] = held.get(category, 0) + own.nbytes
    sizes = {name: held[name] / 2**30 for name in CATEGORIES if name in held}
    return {**sizes, "peak": peak_gib(trainer.device)}


def in_words(held: dict[str, float], device: torch.device) -> str:
    parts = ", ".join(f"{name} {gib:.3f}" for name, gib in held.items() if name != "peak")
    kind = "allocator" if device.type == "cuda" else "process"
    return (
        f"memory, GiB: {parts}; peak so far {held['peak']:.2f} ({kind}); less: "
        "train.recompute=mlp or layer, a smaller train.micro_batch, train.preset=fp8-lean"
    )


def facts_of(trainer: Trainer, speed: Speed) -> dict[str, Any]:
    config, plan = trainer.config, trainer.plan
    device, gib = str(trainer.device), None
    if trainer.device.type == "cuda":
        device = torch.cuda.get_device_name(trainer.device)
        gib = torch.cuda.get_device_properties(trainer.device).total_memory / 2**30
    train = config.train
    return {
        "version": VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "name": config.name,
        "preset": train.preset,
        "device": device,
        "device_gib": gib,
        "speed": str(speed),
        "params": sum(p.numel() for p in trainer.model.parameters()),
        "fp8_modules": plan.num_fp8 if plan else 0,
        "fp8_share": plan.share_flops if plan else 0.0,
        "emulated": bool(plan and plan.emulated),
        "vocab": trainer.model.config.vocab_size,
        "tokens_per_step": train.micro_batch
        * train.accumulate
        * config.data.sequence_length
        * trainer.strategy.world,
        "strategy": trainer.strategy.name,
        "ranks": trainer.strategy.world,
        "steps": train.steps,
        "config": asdict(config),
    }


def opening(trainer: Trainer, speed: Speed) -> list[str]:
    """What is said before the first step: options, data, plan, and the machine."""
    config, plan = trainer.config, trainer.plan
    lines = [f"{config.name}: {', '.join(changed_options(config)) or 'all options at default'}"]
    lines += [f"note: {note}" for note in (*config.notes, *trainer.origin.notes)]
    lines.append(f"data: {trainer.data.summary}")
    if plan is None:
        lines.append(f"plan: none ({config.train.preset} is plain PyTorch)")
    else:
        lines.append(f"plan: {plan.summary()}")
        recipes = Counter(r.recipe.name for r in plan.rows if r.recipe and r.flops)
        lines += [f"  {n} x {name}" for name, n in recipes.items()]
        reasons = Counter(r.reason for r in plan.rows if r.recipe is None and (r.params or r.flops))
        lines += [f"  {n} x high precision: {reason}" for reason, n in reasons.items() if reason]
    params = sum(p.numel() for p in trainer.model.parameters())
    lines += [f"note: {note}" for note in trainer.strategy.notes()]
    lines.append(f"model: {params / 1e6:,.1f} M parameters on {trainer.device}")
    emulated = plan is not None and plan.emulated
    lines.append(f"speed: percent is of {speed}" + (" (FP8 is emulated here)" if emulated else ""))
    lines.append(f"launches: {trainer.graph_note}")
    if trainer.step:
        lines.append(f"continues after step {trainer.step} from {trainer.origin.checkpoint.path}")
    return lines
