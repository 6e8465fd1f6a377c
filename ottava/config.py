"""A run: frozen sections read from one TOML file, plus `section.key=value` overrides.

Every key, its meaning, its choices and its range stand once, in sections.py. What cannot
work is refused here, before any data is read: one line that names the key, the nearest valid name
and what to do (`ConfigError`). Relative paths are relative to the current directory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .numerics.preset import PRESETS, Preset
from .schema import ConfigError, apply_override, build, check_values, key, nearest, to_dict
from .sections import (
    Data,
    Distributed,
    Ema,
    Heal,
    Log,
    Lora,
    Model,
    Monitor,
    Optimizer,
    Precision,
    Scaler,
    Train,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. Top-level keys of the file are the plain fields; each table is a section."""

    name: str = key("run", "The name of the run; the file's name unless given.")
    out: str = key("", "The folder that everything is written to; out/<name> unless given.")
    seed: int = key(
        0, "Seed of weights, data order and stochastic rounding.", low=0, high=2**63 - 1
    )
    device: str = key("auto", "auto takes the GPU where there is one.",
                      choices=("auto", "cpu", "cuda"))  # fmt: skip
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = field(default_factory=Precision)
    scaler: Scaler = field(default_factory=Scaler)
    ema: Ema = field(default_factory=Ema)
    log: Log = field(default_factory=Log)
    distributed: Distributed = field(default_factory=Distributed)
    monitor: Monitor = field(default_factory=Monitor)
    heal: Heal = field(default_factory=Heal)

    def __post_init__(self) -> None:
        if not self.out:
            object.__setattr__(self, "out", f"out/{self.name}")

    @property
    def settings(self) -> Preset:
        """The preset with every explicit choice of [optimizer] and [precision] applied.

        `fused` is already off where clipping or accumulation needs all gradients (see `notes`).
        """
        preset, opt = PRESETS[self.train.preset], self.optimizer
        master = preset.master if opt.master == "preset" else opt.master
        if self.lora.rank and opt.master == "preset":
            master = "fp32"  # of adapters, which are few
        param = preset.param_dtype
        if preset.compute in ("fp8", "storage"):
            param = "fp32" if master == "fp32" else "bf16"
        return replace(
            preset,
            recipe=preset.recipe if self.precision.recipe == "preset" else self.precision.recipe,
            param_dtype=param,
            master=master,
            grad_dtype=preset.grad_dtype if opt.grads == "preset" else opt.grads,
            states=preset.states if opt.states == "preset" else opt.states,
            fused=(preset.fused and not self._needs_all_gradients)
            if opt.fused == "preset"
            else opt.fused == "on",
        )

    @property
    def _needs_all_gradients(self) -> str:
        if self.distributed.strategy not in ("single", "fsdp2"):
            return f"distributed.strategy={self.distributed.strategy}"
        if self.optimizer.clip_norm > 0:
            return f"optimizer.clip_norm={self.optimizer.clip_norm:g}"
        return f"train.accumulate={self.train.accumulate}" if self.train.accumulate > 1 else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the run announces at its start: choices that other choices changed."""
        notes = []
        wanted = PRESETS[self.train.preset].fused and self.optimizer.fused == "preset"
        if wanted and (why := self._needs_all_gradients):
            notes.append(
                f"the step inside backward is off because {why} needs every gradient first: "
                f"gradients are kept in {self.settings.grad_dtype.upper()}"
            )
        return tuple(notes)

    @property
    def peak_lr(self) -> float:
        """`optimizer.lr`, times `precision.lr_scale` where the preset has FP8 compute."""
        scale = self.precision.lr_scale if self.settings.compute == "fp8" else 1.0
        return self.optimizer.lr * scale

    def with_preset(self, name: str) -> Run:
        """This run under another preset, for comparisons.

        What only makes sense with another preset (recipe, switch points, fused, master, grads,
        states) goes back to "preset". Raises ConfigError for an unknown name.
        """
        if name not in PRESETS:
            raise ConfigError(f"train.preset: unknown {name!r}{nearest(name, PRESETS)}")
        if name == self.train.preset:
            return self
        return replace(
            self,
            train=replace(self.train, preset=name),
            optimizer=replace(
                self.optimizer, master="preset", states="preset", grads="preset", fused="preset"
            ),
            precision=replace(
                self.precision, recipe="preset", start_fp8_at=0.0, finish_bf16_at=1.0
            ),
        )

    def check(self) -> Run:
        """Refuse what cannot work. Raises ConfigError; returns self."""
        check_values(self)
        for rule in (
            _check_model_and_data,
            _check_lora,
            _check_steps,
            _check_preset,
            _check_gradients,
            _check_distributed,
        ):
            rule(self)
        return self


def _check_model_and_data(run: Run) -> None:
    model, data = run.model, run.data
    if bool(model.name) == bool(model.path):
        raise ConfigError(
            "model.name and model.path: give exactly one: a model preset (model.name=mimo-v2-nano) "
            "or a local Hugging Face folder (model.path=...)"
        )
    if model.path and not Path(model.path).is_dir():
        raise ConfigError(
            f"model.path: {model.path!r} is not a folder; give a local Hugging Face folder, or a "
            "model preset as model.name"
        )
    if model.random_init and model.name:
        raise ConfigError(
            "model.random_init: a model preset always starts from nothing; remove the key, or use "
            "model.path"
        )
    if model.layout != "auto" and (model.random_init or not model.path):
        raise ConfigError(
            f"model.layout: {model.layout!r} says how the FP8 files of model.path are laid out, and "
            "none are read here; remove the key"
        )
    if not data.source:
        raise ConfigError("data.source: empty; use stdlib, random, a file, a folder or a name")
    if not data.prompt_keys:
        raise ConfigError("data.prompt_keys: empty; name the columns of the question")
    data_parts(data)


# What may differ from source to source in data.mix, besides the weight.
_OF_A_PART = ("kind", "text_key", "messages_key", "prompt_keys", "answer_key", "pack", "max_bytes")
SMALLEST_WEIGHT = 1 / 1024


def data_parts(data: Data) -> list[tuple[Data, float]]:
    """The sources of `data.mix` with their weights, each as [data] is for it; without a mix, the one.

    Raises ConfigError.
    """
    if not data.mix:
        return [(data, 1.0)]
    if data.source != Data().source:
        raise ConfigError(
            f"data.source: {data.source!r} beside data.mix, which names the sources; remove one"
        )
    parts = []
    for source, given in data.mix.items():
        where = f"data.mix.{source}"
        keys = dict(given) if isinstance(given, Mapping) else {"weight": given}
        weight = keys.pop("weight", None)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ConfigError(f"{where}: weight {weight!r} must be a number above 0")
        for name in keys:
            if name not in _OF_A_PART:
                hint = nearest(name, _OF_A_PART) or f"; choose from weight, {', '.join(_OF_A_PART)}"
                raise ConfigError(f"{where}: {name!r} cannot differ from source to source{hint}")
        if source == "random":
            raise ConfigError(f"{where}: random tokens cannot be mixed with text; remove it")
        plain = {**to_dict(data), "mix": {}, "source": source, **keys}
        part = build(Data, plain)
        check_values(part, f"{where}.")
        parts.append((part, float(weight)))
    total = sum(weight for _, weight in parts)
    for part, weight in parts:
        if not SMALLEST_WEIGHT <= weight / total <= 1:  # also not a number, or infinite
            raise ConfigError(
                f"data.mix.{part.source}: weight {weight:g} of {total:g} is less than one sequence "
                "in 1,024; raise it, or remove the source"
            )
    return parts


def _check_lora(run: Run) -> None:
    lora = run.lora
    if not lora.rank:
        if lora != Lora():
            raise ConfigError("lora: does nothing with lora.rank=0; set a rank, such as 16")
        return
    if lora.experts and lora.dropout:
        raise ConfigError("lora.dropout: adapters of experts take none; use dropout=0")


def _check_steps(run: Run) -> None:
    train, opt, precision = run.train, run.optimizer, run.precision
    if opt.warmup_steps > train.steps:
        raise ConfigError(
            f"optimizer.warmup_steps: {opt.warmup_steps} is more than train.steps={train.steps}; "
            "lower it"
        )
    if train.eval_every and not train.eval_batches:
        raise ConfigError(
            "train.eval_every: nothing to evaluate with train.eval_batches=0; set eval_batches, "
            "or eval_every=0"
        )
    if train.eval_every and not run.data.validation_fraction:
        raise ConfigError(
            "train.eval_every: data.validation_fraction=0 leaves nothing to evaluate on; set "
            "validation_fraction (0.05), or eval_every=0"
        )
    if precision.start_fp8_at >= precision.finish_bf16_at:
        raise ConfigError(
            f"precision.start_fp8_at: {precision.start_fp8_at:g} is not before "
            f"precision.finish_bf16_at={precision.finish_bf16_at:g}, so nothing would run in FP8; "
            "use train.preset=bf16, or move one"
        )


def _check_preset(run: Run) -> None:
    preset, opt, precision, scaler = (
        PRESETS[run.train.preset], run.optimizer, run.precision, run.scaler
    )  # fmt: skip
    name = preset.name
    if (
        precision.recipe != "preset"
        and preset.compute != "fp8"
        and precision.recipe != preset.recipe
    ):
        raise ConfigError(
            f"precision.recipe: {precision.recipe!r} does nothing under train.preset={name}, which "
            "computes no GEMM in FP8; use train.preset=fp8 or fp8-lean, or remove the key"
        )
    if precision.recipe == "storage" and preset.compute == "fp8":
        raise ConfigError(
            f"precision.recipe: 'storage' computes nothing in FP8 but train.preset={name} asks for "
            "it; use train.preset=storage"
        )
    if precision.attention != "int8" and preset.recipe is None:
        raise ConfigError(
            f"precision.attention: {precision.attention!r} does nothing under train.preset={name}, "
            "which keeps no codes; use train.preset=fp8, fp8-lean or storage, or remove the key"
        )
    for switch, off in (("start_fp8_at", 0.0), ("finish_bf16_at", 1.0)):
        if getattr(precision, switch) != off and preset.compute != "fp8":
            raise ConfigError(
                f"precision.{switch}: train.preset={name} has no FP8 compute to switch; use "
                f"train.preset=fp8 or fp8-lean, or set {switch}={off:g}"
            )
    if opt.master not in ("preset", "fp32") and preset.compute in (
        "fp32", "autocast-bf16", "autocast-fp16"
    ):  # fmt: skip
        raise ConfigError(
            f"optimizer.master: {opt.master!r} is impossible under train.preset={name}, whose FP32 "
            "parameters are the master; use train.preset=bf16, fp8, fp8-lean or storage"
        )
    if name == "amp-fp16":
        if scaler.init_scale == 0.0:
            raise ConfigError(
                "scaler.init_scale: 0 means no loss scaling, and FP16 gradients underflow without "
                "it; use 65536, or train.preset=amp (BF16 needs no scaler)"
            )
        if scaler.max_scale and scaler.max_scale < scaler.min_scale:
            raise ConfigError(
                f"scaler.max_scale: {scaler.max_scale:g} is below scaler.min_scale="
                f"{scaler.min_scale:g}; raise it, or 0 for no cap"
            )
        cap = scaler.max_scale or float("inf")
        if not scaler.min_scale <= scaler.init_scale <= cap:
            raise ConfigError(
                f"scaler.init_scale: {scaler.init_scale:g} is outside min_scale="
                f"{scaler.min_scale:g} .. max_scale={cap:g}"
            )


def _check_gradients(run: Run) -> None:
    if run.optimizer.fused != "on":
        return
    if why := run._needs_all_gradients:
        fix = "train.accumulate=1"
        if "accumulate" not in why:
            fix = "optimizer.clip_norm=0" if "clip" in why else "distributed.strategy=single"
        raise ConfigError(
            f"optimizer.fused: 'on' steps inside backward, but {why} needs every gradient first; "
            f"set {fix} or optimizer.fused=off"
        )
    if run.train.preset == "amp-fp16":
        raise ConfigError(
            "optimizer.fused: 'on' steps inside backward, but the loss scaler of "
            "train.preset=amp-fp16 must see every gradient first; use train.preset=amp or "
            "optimizer.fused=off"
        )


def _check_distributed(run: Run) -> None:
    wanted, strategy = run.distributed.deepspeed, run.distributed.strategy
    if strategy == "deepspeed" and not wanted:
        raise ConfigError(
            "distributed.deepspeed: strategy=deepspeed needs its JSON configuration; give "
            "--deepspeed ds_config.json"
        )
    if wanted and strategy != "deepspeed":
        raise ConfigError(
            f"distributed.deepspeed: does nothing under distributed.strategy={strategy}; use "
            "strategy=deepspeed, or remove the key"
        )
    if run.distributed.replicas > 1 and strategy != "fsdp2":
        raise ConfigError(
            f"distributed.replicas: does nothing under distributed.strategy={strategy}; use "
            "strategy=fsdp2, or remove the key"
        )
    if strategy != "single" and run.train.graph == "on":
        raise ConfigError(
            "train.graph: 'on', but gradients are exchanged between ranks; use train.graph=auto"
        )


def load_run(path: str | Path, overrides: Iterable[str] = ()) -> Run:
    """Read a TOML run file, apply `section.key=value` overrides, and check it.

    A value is read as the key's own type, so text needs no quotes. Raises ConfigError.
    """
    path = Path(path)
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such run file{nearest(path.name, beside)}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    data.setdefault("name", path.stem)
    for override in overrides:
        apply_override(Run, data, override)
    return run_from_dict(data).check()


def run_of_model(model: str, overrides: Iterable[str] = ()) -> Run:
    """A run of a model, by its name or folder, on random tokens: all that planning one asks for.

    Raises ConfigError as `load_run` does.
    """
    kind = "path" if Path(model).is_dir() else "name"
    data: dict[str, Any] = {"name": Path(model).name, "model": {kind: model}}
    data["data"] = {"source": "random"}
    for override in overrides:
        apply_override(Run, data, override)
    return run_from_dict(data).check()


def run_from_dict(data: Mapping[str, Any]) -> Run:
    """The run that nested plain data describes, unchecked. Raises ConfigError."""
    return build(Run, data)


def run_to_dict(run: Run) -> dict[str, Any]:
    """Plain nested data (dicts, lists, numbers, text) that `run_from_dict` reads back equal."""
    return to_dict(run)
