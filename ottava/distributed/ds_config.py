"""DeepSpeed's JSON, understood before DeepSpeed sees it.

DeepSpeed ignores top-level keys that it does not know, an "fp8" block among them, and trains on in
BF16. So the top level is checked here: a key that nobody would read is an error, the "fp8" block is
applied and taken out, and where the file and the run file both decide something (precision, batch,
clipping, optimizer), one line says which key to remove. // and /* */ comments are allowed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import ConfigError, Run
from ..schema import nearest

# What DeepSpeed 0.19 reads, apart from what only we decide (below).
KNOWN = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "steps_per_print",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "disable_allgather",
        "disable_python_gc",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "flops_profiler",
        "comms_logger",
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "aio",
        "checkpoint",
        "compile",
        "log_level",
        "fp8",
        "fp16",
        "bf16",
    ]
)
# What it reads too, and what then would be decided twice, or would not be what the trainer does.
REFUSED = {
    "optimizer": "the run file's [optimizer] decides",
    "scheduler": "optimizer.schedule in the run file decides",
    "torch_autocast": "train.preset decides about precision",
    "data_types": "train.preset decides about precision",
    "managed_gradient_accumulation": "train.accumulate decides",
    "gradient_allreduce_op": "gradients are weighted by the tokens of all ranks",
    "activation_checkpointing": "train.recompute decides",
    "data_efficiency": "[data] decides",
    "dataloader_drop_last": "[data] decides",
    "autotuning": "use `ottava plan`",
    "pipeline": "there are no pipeline stages",
    "tensor_parallel": "there is no tensor parallelism",
    "expert_parallel": "there is no expert parallelism under DeepSpeed",
    "sequence_parallel_size": "there is no sequence parallelism",
    "hybrid_engine": "it is for generation",
    "weight_quantization": "it is for inference",
}
BACKENDS = ("native", "transformer_engine")
_STAGES = (1, 2, 3)
# strings first, so that // inside one is none
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A run with the file's batch and clipping in it, what DeepSpeed is given, what to announce."""

    run: Run
    engine: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def stage(self) -> int:
        return self.engine["zero_optimization"]["stage"]


def read(path: str | Path) -> dict[str, Any]:
    """The file's content, comments left out. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--deepspeed: {path} cannot be read: {error}") from None
    plain = _TOKEN.sub(lambda m: m[0] if m[0].startswith('"') else " ", text)
    try:
        data = json.loads(plain, object_pairs_hook=_once)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be an object, such as {{'zero_optimization': ...}}")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = [n for n in names if names.count(n) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands there twice")
    return dict(pairs)


def apply(data: dict[str, Any], run: Run, world: int) -> Applied:
    """`data` and `run`, brought together for `world` ranks. Raises ConfigError."""
    for name in data:
        if name in REFUSED:
            raise ConfigError(f"deepspeed: {REFUSED[name]}; remove {name!r}")
        if name not in KNOWN:
            raise ConfigError(
                f"deepspeed: {name!r} is no key that DeepSpeed reads, it would do nothing"
                f"{nearest(name, KNOWN) or '; remove it'}"
            )
    engine = dict(data)
    notes = _precision(engine, run)
    run, batch = _batch(engine, run, world)
    run = _clipping(engine, run)
    _zero(engine)
    settings = run.settings
    optimizer = replace(run.optimizer, fused="off")
    if settings.master.startswith("split"):
        optimizer = replace(optimizer, master="bf16")
        notes.append(
            f"ZeRO keeps FP32 masters in flat partitions: no {settings.master} masters here"
        )
    elif settings.param_dtype == "fp32":
        # ZeRO's buffers have one dtype
        optimizer = replace(optimizer, grads="fp32")
    # ZeRO decides about a step by its gradients alone, and keeps them to itself
    heal = replace(run.heal, norm_factor=0.0, loss_rise=0.0)
    monitor = replace(run.monitor, every=0, locate=False)
    run = replace(run, optimizer=optimizer, monitor=monitor, heal=heal).check()
    if run.ema.decay:
        raise ConfigError("ema.decay: no running average under DeepSpeed yet; set ema.decay=0")
    if run.settings.compute == "autocast-fp16":
        raise ConfigError(
            "train.preset: amp-fp16 has a loss scale of its own, and so would ZeRO; use amp"
        )
    engine["bf16"] = {"enabled": run.settings.param_dtype == "bf16"}
    engine["zero_allow_untested_optimizer"] = True
    engine["zero_force_ds_cpu_optimizer"] = False
    engine.setdefault("steps_per_print", 10**9)
    return Applied(run=run, engine=engine, notes=(*notes, batch))


def _section(engine: dict[str, Any], name: str) -> dict[str, Any]:
    """A section taken out; {} where there is none. "enabled" must be there and true or false."""
    section = engine.pop(name, {"enabled": False})
    if not isinstance(section, dict) or not isinstance(section.get("enabled"), bool):
        raise ConfigError(f'deepspeed: {name} must say "enabled": true or false')
    return section


def _precision(engine: dict[str, Any], run: Run) -> list[str]:
    """Take fp8, fp16 and bf16 out, and see that they agree with the run's preset."""
    preset, settings = run.train.preset, run.settings
    asked = "fp8" in engine
    fp8, fp16, bf16 = (_section(engine, name) for name in ("fp8", "fp16", "bf16"))
    odd = set(fp8) - {"enabled", "backend"}
    if odd:
        raise ConfigError(f"deepspeed: fp8.{min(odd)} is unknown; it has enabled and backend")
    backend = fp8.get("backend", "native")
    if backend not in BACKENDS:
        raise ConfigError(
            f"deepspeed: fp8.backend {backend!r} is not one of {', '.join(BACKENDS)}"
            f"{nearest(str(backend), BACKENDS)}"
        )
    computes = settings.compute == "fp8"
    if fp8["enabled"] and not computes:
        raise ConfigError(
            f'deepspeed: "fp8" is enabled, but train.preset={preset} computes nothing in FP8; use '
            'train.preset=fp8, or remove "fp8"'
        )
    if asked and not fp8["enabled"] and computes:
        raise ConfigError(
            f'deepspeed: "fp8" is off, but train.preset={preset} computes in FP8; use '
            'train.preset=bf16, or remove "fp8"'
        )
    if fp16["enabled"]:
        raise ConfigError(
            f"deepspeed: precision is decided by train.preset={preset}, and fp16 beside it; remove "
            '"fp16"'
        )
    if bf16["enabled"] and preset != "bf16":
        raise ConfigError(
            f"deepspeed: precision is decided by train.preset={preset}, and bf16 beside it; remove "
            '"bf16", or use train.preset=bf16'
        )
    if not fp8["enabled"]:
        return []
    note = "deepspeed: fp8 applied (DeepSpeed itself ignores that block, and does not see it)"
    if backend == "transformer_engine":
        note += "; backend transformer_engine: under DeepSpeed FP8 runs natively"
    return [note]


def _number(engine: dict[str, Any], name: str) -> int | None:
    value = engine.get(name, "auto")
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"deepspeed: {name} {value!r} must be a whole number from 1")
    return value


def _batch(engine: dict[str, Any], run: Run, world: int) -> tuple[Run, str]:
    """The run with the file's batch sizes, which must multiply; they go into `engine` as well."""
    total, micro, accumulate = (
        _number(engine, name)
        for name in (
            "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        )
    )  # fmt: skip
    if accumulate is None:
        accumulate = run.train.accumulate
        if total is not None and micro is not None:
            accumulate = max(total // (micro * world), 1)
    if micro is None:
        micro = run.train.micro_batch
        if total is not None:
            micro = max(total // (accumulate * world), 1)
    if total is not None and total != micro * accumulate * world:
        raise ConfigError(
            f"deepspeed: train_batch_size {total} is not {micro} sequences x {accumulate} forwards x "
            f"{world} ranks = {micro * accumulate * world}; change one of them"
        )
    engine["train_micro_batch_size_per_gpu"] = micro
    engine["gradient_accumulation_steps"] = accumulate
    engine["train_batch_size"] = micro * accumulate * world
    run = replace(run, train=replace(run.train, micro_batch=micro, accumulate=accumulate))
    return run, (
        f"deepspeed: {micro * accumulate * world} sequences a step: train.micro_batch={micro}, "
        f"train.accumulate={accumulate}, {world} rank(s)"
    )


def _clipping(engine: dict[str, Any], run: Run) -> Run:
    wanted, own = engine.get("gradient_clipping", "auto"), run.optimizer.clip_norm
    if wanted == "auto":
        wanted = own
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or wanted < 0:
        raise ConfigError(f"deepspeed: gradient_clipping {wanted!r} must be a number from 0")
    if own and own != wanted:
        raise ConfigError(
            f"deepspeed: gradient_clipping {wanted:g} and optimizer.clip_norm={own:g} in the run "
            'file; remove "gradient_clipping"'
        )
    engine["gradient_clipping"] = float(wanted)
    return replace(run, optimizer=replace(run.optimizer, clip_norm=float(wanted)))


def _zero(engine: dict[str, Any]) -> None:
    zero = engine.setdefault("zero_optimization", {"stage": 0})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    if stage not in _STAGES:
        raise ConfigError(
            f"deepspeed: zero_optimization.stage {stage!r} is not 1, 2 or 3"
            + ("; with nothing sharded use distributed.strategy=ddp" if stage == 0 else "")
        )
    device = zero.get("offload_optimizer", {}).get("device", "none")
    if device not in ("none", "cpu"):
        raise ConfigError(f"deepspeed: offload_optimizer.device {device!r} is not none or cpu")
    if zero.get("offload_param", {}).get("device", "none") != "none":
        raise ConfigError('deepspeed: parameters are not offloaded yet; remove "offload_param"')
