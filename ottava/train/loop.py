"""A run from its first step to its last: evaluate, save, log, and stop when told to.

After each step, in this order: its line in run.jsonl, evaluation if due, checkpoint if due, stop if
asked. A checkpoint therefore stands for everything up to its step, and what a killed run did after
it is dropped from run.jsonl when the run continues.
"""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..monitor.console import RunConsole, changed_options
from ..monitor.diagnose import diagnose
from ..monitor.metrics import VERSION, MetricsWriter
from ..monitor.speed import Speed, flops_per_token, machine_speed
from ..monitor.trackers import open_trackers
from ..numerics.display import html_table, rich_table
from ..optim.adamw import local
from .checkpoint import set_aside_after
from .heal import Incurable, heal
from .out_of_memory import explained
from .signals import EXIT_CODES, StopRequest, agreed

if TYPE_CHECKING:
    from .trainer import StepResult, Trainer


class TrainingError(RuntimeError):
    """The run cannot go on. Carries one line: what happened, and what to change."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. `loss`: of the last step taken here (NaN if none was). `eval_loss`: of the
    last evaluation (NaN without). `stopped_by`: the signal that ended it early, or None."""

    step: int
    loss: float
    eval_loss: float
    skipped: int
    seconds: float
    checkpoint: Path | None
    stopped_by: str | None = None

    @property
    def exit_code(self) -> int:
        """0 done; 130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1."""
        return EXIT_CODES[self.stopped_by] if self.stopped_by else 0

    def _cells(self) -> list[list[str]]:
        ended = f"stopped by {self.stopped_by}" if self.stopped_by else "done"
        return [
            ["ended", f"{ended} at step {self.step} after {self.seconds:.1f} s"],
            ["loss", f"{self.loss:.4f}"],
            ["validation loss", f"{self.eval_loss:.4f}"],
            ["steps not taken", str(self.skipped)],
            ["checkpoint", str(self.checkpoint or "none")],
        ]

    def _repr_html_(self) -> str:
        return html_table(["run", ""], self._cells())

    def __rich__(self) -> Any:
        return rich_table(["run", ""], self._cells())


def run(trainer: Trainer, *, quiet: bool = False) -> RunResult:
    """Train `trainer` to its last step. Raises TrainingError, CheckpointError, OutOfMemory."""
    loop = _Loop(trainer, quiet)
    with StopRequest() as stop, loop.console:
        try:
            loop.start()
            strategy, steps = trainer.strategy, trainer.config.train.steps
            while trainer.step < steps and not agreed(stop.requested, strategy):
                with explained(trainer.config, trainer.device, trainer.step):
                    result = trainer.step_once()
                loop.after(result)
            return loop.finish(agreed(stop.requested, strategy))
        except BaseException as e:
            loop.fail(e)
            trainer.strategy.failed()
            raise
        finally:
            loop.metrics.close()


class _Loop:
    """What a run carries from step to step besides its trainer."""

    def __init__(self, trainer: Trainer, quiet: bool) -> None:
        config = trainer.config
        self.trainer, self.config = trainer, config
        strategy = trainer.strategy
        self.console = RunConsole(config.train.steps, quiet=quiet or not strategy.is_main)
        self.begun = time.perf_counter()
        self.saved: tuple[int, Path | None] = (trainer.origin.step, None)
        if trainer.origin.checkpoint is not None:
            self.saved = (trainer.step, trainer.origin.checkpoint.path)
        self.loss = self.eval_loss = math.nan
        self.was_eight_bit = trainer.plan is not None and trainer.in_eight_bits
        self.graph_note = trainer.graph_note
        resumed = trainer.origin.checkpoint is not None
        after = trainer.step if resumed else None
        folder = strategy.folder(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        trackers = open_trackers(
            config.log.trackers if strategy.is_main else (), folder, project=config.log.project,
            run=config.name, config=asdict(config), after_step=after,
        )  # fmt: skip
        self.metrics = MetricsWriter(folder, after_step=after, trackers=trackers)
        self.speed = machine_speed(trainer.device.type, trainer.settings.compute)
        self.flops = flops_per_token(trainer.model, config.data.sequence_length)
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)

    # ---- beginning and end ----

    def start(self) -> None:
        """Set later checkpoints aside, write the first line, and say what is about to run."""
        trainer = self.trainer
        on_main = trainer.strategy.on_main
        for path in on_main(set_aside_after, trainer.checkpoints, trainer.step):
            self.console.say(f"set aside: {path} is later than where this run starts")
        origin = trainer.origin
        if origin.checkpoint is None:
            self.metrics.write("start", 0, **_facts(trainer, self.speed))
        else:
            self.metrics.write(
                "resume", trainer.step, **{"from": origin.checkpoint.path, "notes": origin.notes}
            )
        for line in _opening(trainer, self.speed):
            self.console.say(line)

    def finish(self, stopped_by: str | None) -> RunResult:
        """Evaluate if the run is complete, save, and write the last line."""
        trainer = self.trainer
        path = self._save()
        seconds = time.perf_counter() - self.begun
        self.metrics.write(
            "end", trainer.step, status="stopped" if stopped_by else "done",
            reason=stopped_by or "", seconds=seconds,
        )  # fmt: skip
        verb = f"stopped by {stopped_by}" if stopped_by else "done"
        self.console.say(f"{verb} at step {trainer.step} after {seconds:.1f} s; saved {path}")
        return RunResult(
            step=trainer.step, loss=self.loss, eval_loss=self.eval_loss, skipped=trainer.skipped,
            seconds=seconds, checkpoint=path, stopped_by=stopped_by,
        )  # fmt: skip

    def fail(self, error: BaseException) -> None:
        """Leave the reason in run.jsonl, if the disk still takes it."""
        try:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.metrics.write("end", self.trainer.step, status="failed", reason=reason)
        except (OSError, ValueError):
            self.console.say("run.jsonl could not be written either")

    # ---- between steps ----

    def after(self, result: StepResult) -> None:
        """Log, evaluate, save; after too many bad steps in a row heal, or raise TrainingError."""
        trainer, train = self.trainer, self.config.train
        self.loss = result.loss
        line = self._line(result)
        if result.step % self.config.log.every == 0 or not result.stepped:
            self.metrics.write("step", result.step, **line)
        if result.observed is not None:
            self.metrics.write("observe", result.step, **result.observed)
        self.console.step(result.step, line, self.speed.name)
        if result.step == trainer.origin.step + 2:  # the first step with every state in place
            held = _held(trainer)
            self.metrics.write("memory", result.step, gib=held)
            self.console.say(_in_words(held, trainer.device))
        self._announce_switch()
        last = result.step == train.steps
        due = last or (train.eval_every and result.step % train.eval_every == 0)
        if due and train.eval_batches and trainer.data.validation is not None:
            self._evaluate()
        if last or (train.checkpoint_every and result.step % train.checkpoint_every == 0):
            self._save()
        if trainer.health.failing:
            self._heal(result)

    def _heal(self, result: StepResult) -> None:
        trainer = self.trainer
        try:
            done = heal(trainer, result)
        except Incurable as e:
            raise TrainingError(
                f"step {result.step}: {e}; the weights of the last checkpoint are good"
                f"{_advice(self.metrics.path.parent)}; see `ottava diagnose {self.config.out}`"
            ) from None
        self.metrics.write("heal", result.step, **done)
        self.console.say(done["text"])
        if trainer.step < result.step:
            self.saved = (trainer.step, trainer.checkpoints / f"step-{trainer.step:08d}")
        self.was_eight_bit = trainer.plan is not None and trainer.in_eight_bits

    def _line(self, result: StepResult) -> dict[str, Any]:
        trainer = self.trainer
        tok_per_s = result.tokens / result.seconds
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": trainer.tokens,
            "tok_per_s": tok_per_s,
            "step_ms": 1e3 * result.seconds,
            "percent": self.speed.percent(self.flops, tok_per_s / trainer.strategy.world),
            "memory_gib": peak_gib(trainer.device),
            "stepped": result.stepped,
            "precision": "fp8" if self.was_eight_bit else "high",
            "scale": trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
            "data_ms": 1e3 * result.data_seconds,
            **{f"{kind}_mib": nbytes / 2**20 for kind, nbytes in result.sent.items()},
            **({} if result.waited is None else {"comm_ms": 1e3 * result.waited}),
            "cause": result.cause,
            "first_bad": result.first_bad,
            **dict(zip(("load_cv", "load_peak", "load_cold"), result.load or (), strict=False)),
        }

    def _announce_switch(self) -> None:
        now = self.trainer.plan is not None and self.trainer.in_eight_bits
        if now != self.was_eight_bit and self.trainer.step < self.config.train.steps:
            text = f"from step {self.trainer.step + 1} on: {'FP8' if now else 'BF16'} compute"
            self.metrics.write("event", self.trainer.step, text=text)
            self.console.say(text)
        self.was_eight_bit = now
        if self.graph_note != self.trainer.graph_note:
            self.graph_note = self.trainer.graph_note
            self.metrics.write("event", self.trainer.step, text=self.graph_note)
            self.console.say(self.graph_note)

    def _evaluate(self) -> None:
        trainer = self.trainer
        self.eval_loss = trainer.evaluate()
        averaged = trainer.evaluate(averaged=True) if trainer.ema is not None else None
        self.metrics.write("eval", trainer.step, loss=self.eval_loss, ema_loss=averaged)
        more = "" if averaged is None else f", with the running average {averaged:.4f}"
        self.console.say(f"step {trainer.step}: validation loss {self.eval_loss:.4f}{more}")

    def _save(self) -> Path | None:
        """Save the current step, unless it is on the disk already; the path."""
        step = self.trainer.step
        if self.saved[0] != step:
            self.metrics.write("save", step, path=f"step-{step:08d}")
            self.metrics.sync()
            self.saved = (step, self.trainer.save())
        return self.saved[1]


def peak_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: the CUDA allocator's, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def _advice(folder: Path) -> str:
    """What the first finding about the run so far says, to end a sentence with."""
    found = next((f for f in diagnose(folder) if f.level != "note"), None)
    return f"; {found.symptom}: {found.evidence}; try {found.setting}" if found else ""


def _held(trainer: Trainer) -> dict[str, float]:
    """What is held between steps, by category, and "peak" so far: measured, in GiB."""
    params = list(trainer.model.parameters())
    residuals = [r for p in params if isinstance(r := getattr(p, "residual", None), torch.Tensor)]
    moments = [
        t
        for state in trainer.optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    ]
    sizes = {"weights": params, "residuals": residuals, "optimizer": moments}
    if trainer.ema is not None:
        sizes["running average"] = list(trainer.ema.shadow.values())
    held = {
        name: sum(local(t).nbytes for t in tensors) / 2**30
        for name, tensors in sizes.items()
        if tensors
    }
    return {**held, "peak": peak_gib(trainer.device)}


def _in_words(held: dict[str, float], device: torch.device) -> str:
    parts = ", ".join(f"{name} {gib:.3f}" for name, gib in held.items() if name != "peak")
    kind = "allocator" if device.type == "cuda" else "process"
    return (
        f"memory, GiB: {parts}; peak so far {held['peak']:.2f} ({kind}); less: "
        "train.recompute=mlp or layer, a smaller train.micro_batch, train.preset=fp8-lean"
    )


def _facts(trainer: Trainer, speed: Speed) -> dict[str, Any]:
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


def _opening(trainer: Trainer, speed: Speed) -> list[str]:
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
        reasons = Counter(r.reason for r in plan.rows if r.recipe is None and r.params)
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
