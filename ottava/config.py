"""A run: frozen sections read from one TOML file, plus `section.key=value` overrides.

Every key, its meaning, its choices and its range stand once, in the dataclasses below. What cannot
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
from .numerics.recipe import RECIPES
from .schema import ConfigError, apply_override, build, check_values, key, nearest, to_dict


@dataclass(frozen=True, kw_only=True)
class Model:
    """[model]: what is trained. Exactly one of `name` and `path`."""

    name: str = key("", "A model preset, such as mimo-v2-nano or dense-w1; starts from nothing.")
    path: str = key("", "A local Hugging Face causal-LM folder.")
    overrides: dict[str, Any] = key(
        doc="Hugging Face config keys to change, such as num_hidden_layers.", factory=dict
    )
    random_init: bool = key(False, "With path: read the config only and start from nothing.")


@dataclass(frozen=True, kw_only=True)
class Data:
    """[data]: the tokens."""

    source: str = key(
        "stdlib",
        "stdlib (the Python standard library's sources), random (random tokens, for speed), a "
        ".txt/.md/.jsonl/.parquet file or a folder of them, a Hugging Face dataset folder or name.",
    )
    text_key: str = key("text", "The column or JSON key that holds the text.")
    tokenizer: str = key("bytes", "bytes (256 values and a document separator), or a Hugging Face "
                         "tokenizer folder or name.")  # fmt: skip
    sequence_length: int = key(512, "Tokens in a sequence.", low=2)
    pack: bool = key(True, "Fill sequences with documents end to end; false: one document a "
                     "sequence, cut or padded.")  # fmt: skip
    document_mask: bool = key(True, "Attention does not look across document boundaries.")
    validation_fraction: float = key(0.05, "Share of the documents held out.", low=0.0, below=1.0)
    shuffle: bool = key(True, "Visit sequences in a seeded random order each epoch.")
    max_bytes: int = key(0, "Read at most this many bytes of text; 0: all.", low=0)


@dataclass(frozen=True, kw_only=True)
class Train:
    """[train]: the loop."""

    preset: str = key("fp8", "A named set of precision choices.", choices=tuple(PRESETS))
    steps: int = key(1000, "Optimizer steps.", low=1)
    micro_batch: int = key(8, "Sequences in one forward.", low=1)
    accumulate: int = key(1, "Forwards in one optimizer step.", low=1)
    recompute: str = key("none", "What is computed again in backward instead of kept.",
                         choices=("none", "mlp", "layer"))  # fmt: skip
    eval_every: int = key(0, "Evaluate every so many steps; 0: only at the end.", low=0)
    eval_batches: int = key(8, "Micro-batches in one evaluation; 0: no evaluation.", low=0)
    checkpoint_every: int = key(0, "Save every so many steps; 0: only at the end.", low=0)
    keep_last: int = key(2, "Checkpoints kept.", low=1)
    graph: str = key("auto", "Replay the step as a CUDA graph: auto (on a GPU, where it can be), "
                     "on, off.", choices=("auto", "on", "off"))  # fmt: skip
    resume: str = key("auto", "auto (continue from the newest checkpoint in out), never, or the "
                      "path of a checkpoint.")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """[optimizer]: AdamW and its schedule. "preset" takes the preset's choice."""

    lr: float = key(3e-4, "Peak learning rate.", low=0.0)
    betas: tuple[float, float] = key((0.9, 0.95), "Decay of the two moments.", low=0.0, below=1.0)
    eps: float = key(1e-8, "Added to the root of the second moment.", above=0.0)
    weight_decay: float = key(0.1, "Decoupled weight decay, on matrices only.", low=0.0)
    clip_norm: float = key(0.0, "Largest global gradient norm; 0: no clipping.", low=0.0)
    master: str = key("preset", "What the weights are kept in.",
                      choices=("preset", "fp32", "bf16", "split16", "split24"))  # fmt: skip
    states: str = key("preset", "What the moments are kept in.",
                      choices=("preset", "fp32", "bf16", "8bit"))  # fmt: skip
    grads: str = key("preset", "What gradients are kept in.", choices=("preset", "fp32", "bf16"))
    fused: str = key("preset", "Step inside backward and keep no gradients.",
                     choices=("preset", "on", "off"))  # fmt: skip
    schedule: str = key("cosine", "Learning rate after warm-up.",
                        choices=("cosine", "linear", "constant"))  # fmt: skip
    warmup_steps: int = key(0, "Steps of linear warm-up.", low=0)
    min_lr_ratio: float = key(0.1, "Last learning rate over the peak.", low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """[precision]: which modules run in FP8, how, and when."""

    recipe: str = key("preset", "How FP8 linears scale.", choices=("preset", *RECIPES))
    policy: str = key("default", "Which modules stay in high precision.",
                      choices=("default", "mimo"))  # fmt: skip
    keep: tuple[str, ...] = key((), "Globs of module names that stay in high precision.")
    start_fp8_at: float = key(
        0.0, "Share of the steps run in BF16 before FP8 starts.", low=0.0, below=1.0
    )
    finish_bf16_at: float = key(
        1.0, "Share of the steps after which the rest runs in BF16; 1: never.", above=0.0, high=1.0
    )
    lr_scale: float = key(1.0, "Multiplies optimizer.lr where the preset has FP8.", above=0.0)
    first_last_high: bool = key(False, "Keep the first and the last layer in high precision.")


@dataclass(frozen=True, kw_only=True)
class Scaler:
    """[scaler]: dynamic loss scaling, used by amp-fp16 only."""

    init_scale: float = key(2.0**16, "First scale.", low=0.0)
    growth_factor: float = key(2.0, "Multiplies the scale after growth_interval.", above=1.0)
    backoff_factor: float = key(0.5, "Multiplies the scale on overflow.", above=0.0, below=1.0)
    growth_interval: int = key(1000, "Clean steps before the scale grows.", low=1)
    max_scale: float = key(0.0, "Cap of the scale; 0: none.", low=0.0)
    min_scale: float = key(1.0, "Floor of the scale.", above=0.0)


@dataclass(frozen=True, kw_only=True)
class Ema:
    """[ema]: an FP32 running average of the weights, used for evaluation."""

    decay: float = key(0.0, "Decay a step; 0: off.", low=0.0, below=1.0)


@dataclass(frozen=True, kw_only=True)
class Log:
    """[log]: what is written while training."""

    every: int = key(1, "Write a line of run.jsonl every so many steps.", low=1)
    tensorboard: bool = key(False, "Also write TensorBoard events.")


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
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = field(default_factory=Precision)
    scaler: Scaler = field(default_factory=Scaler)
    ema: Ema = field(default_factory=Ema)
    log: Log = field(default_factory=Log)

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
        for rule in (_check_model_and_data, _check_steps, _check_preset, _check_gradients):
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
    if not data.source:
        raise ConfigError("data.source: empty; use stdlib, random, a file, a folder or a name")


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
        fix = "optimizer.clip_norm=0" if "clip" in why else "train.accumulate=1"
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


def run_from_dict(data: Mapping[str, Any]) -> Run:
    """The run that nested plain data describes, unchecked. Raises ConfigError."""
    return build(Run, data)


def run_to_dict(run: Run) -> dict[str, Any]:
    """Plain nested data (dicts, lists, numbers, text) that `run_from_dict` reads back equal."""
    return to_dict(run)
