"""A run from its first step to its last: evaluate, save, log, and stop when told to.

After each step, in this order: its line in run.jsonl, evaluation if due, checkpoint if due, stop if
asked. A checkpoint therefore stands for everything up to its step, and what a killed run did after
it is dropped from run.jsonl when the run continues.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..monitor.console import RunConsole
from ..monitor.diagnose import diagnose
from ..monitor.metrics import MetricsWriter
from ..monitor.speed import flops_per_token, machine_speed
from ..monitor.trackers import open_trackers
from ..numerics.display import html_table, rich_table
from .announce import facts_of, held_gib, in_words, opening, peak_gib
from .checkpoint import CheckpointError, set_aside_after
from .first_bad import broken_state
from .heal import Incurable, heal
from .out_of_memory import explained, is_out_of_memory
from .signals import EXIT_CODES, StopRequest, agreed

if TYPE_CHECKING:
    from ..monitor.breakdown import Breakdown
    from .profiling import Profile
    from .result import StepResult
    from .trainer import Trainer


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


def run(trainer: Trainer, *, quiet: bool = False, profile: Profile | None = None) -> RunResult:
    """Train `trainer` to its last step, profiling a few steps where asked to.

    Raises TrainingError, CheckpointError, OutOfMemory, LoaderHangs, RankLost.
    """
    loop = _Loop(trainer, quiet)
    with StopRequest() as stop, loop.console:
        try:
            loop.start()
            strategy, steps = trainer.strategy, trainer.config.train.steps
            while trainer.step < steps and not agreed(stop.requested, strategy):
                with profile.step() if profile else nullcontext():
                    result = loop.step()
                if profile and profile.made and profile.made is not loop.breakdown:
                    loop.profiled(profile)
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
        self.failed_saves, self.broken = 0, ""
        self.breakdown: Breakdown | None = None
        self.ending = False
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
            self.metrics.write("start", 0, **facts_of(trainer, self.speed))
        else:
            self.metrics.write(
                "resume", trainer.step, **{"from": origin.checkpoint.path, "notes": origin.notes}
            )
        for line in opening(trainer, self.speed):
            self.console.say(line)

    def finish(self, stopped_by: str | None) -> RunResult:
        """Evaluate if the run is complete, save, and write the last line."""
        trainer, self.ending = self.trainer, True
        broken = "" if self.saved[0] == trainer.step else broken_state(trainer)
        if broken:
            self._tell(trainer.step, f"not saved: {broken} holds numbers that are not finite")
        else:
            self._save()
        self._settle(wait=True)
        path = self.saved[1]
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
        """Leave the reason in run.jsonl, if the disk still takes it. A checkpoint that is being
        written is finished first."""
        failed_write = self.trainer.saver.finish_alone()
        if failed_write is not None:
            self.console.say(str(failed_write))
        try:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.metrics.write("end", self.trainer.step, status="failed", reason=reason)
        except (OSError, ValueError):
            self.console.say("run.jsonl could not be written either")

    # ---- a step ----

    def step(self) -> StepResult:
        """The next step. Where memory runs out the first time, the same sequences once more in
        smaller micro-batches. Raises OutOfMemory where that does not help, or cannot be."""
        trainer = self.trainer
        position = trainer.data.train.position
        if trainer.split == 1:
            try:
                return trainer.step_once()
            except (RuntimeError, MemoryError) as e:
                smaller = trainer.split_batches() if is_out_of_memory(e) else ""
                if not smaller:
                    with explained(self.config, trainer.device, trainer.step):
                        raise
            # out of the handler: the traceback held the failed step's tensors
            trainer.data.train.position = position
            self.config = trainer.config
            self._tell(trainer.step, f"out of memory in step {trainer.step + 1}: {smaller}")
        with explained(trainer.config, trainer.device, trainer.step):
            return trainer.step_once()

    def profiled(self, profile: Profile) -> None:
        """Say where the time of the profiled steps went."""
        made = self.breakdown = profile.made
        self.metrics.write("profile", self.trainer.step, **made.to_dict())
        for line in profile.lines():
            self.console.say(line)

    def _tell(self, step: int, text: str) -> None:
        """Say something in run.jsonl and on the console."""
        self.metrics.write("event", step, text=text)
        self.console.say(text)

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
        if result.parts_ms is not None:
            self.metrics.write("time", result.step, ms=result.parts_ms)
        self.console.step(result.step, line, self.speed.name)
        if result.step == trainer.origin.step + 2:  # the first step with every state in place
            held = held_gib(trainer)
            self.metrics.write("memory", result.step, gib=held)
            self.console.say(in_words(held, trainer.device))
        self._announce_switch()
        last = result.step == train.steps
        due = last or (train.eval_every and result.step % train.eval_every == 0)
        if due and train.eval_batches and trainer.data.validation is not None:
            self._evaluate()
        self._settle(wait=False)
        if last or (train.checkpoint_every and result.step % train.checkpoint_every == 0):
            result = self._save_sound(result)
        if trainer.health.failing or self.broken:
            self._heal(result)

    def _heal(self, result: StepResult) -> None:
        trainer = self.trainer
        self._settle(wait=True)
        try:
            done = heal(trainer, result)
        except Incurable as e:
            raise TrainingError(
                f"step {result.step}: {e}; the weights of the last checkpoint are good"
                f"{_advice(self.metrics.path.parent)}; see `ottava diagnose {self.config.out}`"
            ) from None
        self.broken = ""
        self.metrics.write("heal", result.step, **done)
        self.console.say(done["text"])
        if trainer.step < result.step:
            self.saved = (trainer.step, trainer.checkpoints / f"step-{trainer.step:08d}")

    def _line(self, result: StepResult) -> dict[str, Any]:
        trainer = self.trainer
        tok_per_s = result.tokens / max(result.seconds, 1e-6)  # clocks stand still, or go back
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
            "precision": "fp8" if trainer.switches.eight_bit(result.step - 1) else "high",
            "scale": trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
            "data_ms": 1e3 * result.data_seconds,
            **{f"{kind}_mib": nbytes / 2**20 for kind, nbytes in result.sent.items()},
            **({} if result.waited is None else {"comm_ms": 1e3 * result.waited}),
            "cause": result.cause,
            "first_bad": result.first_bad,
            **dict(zip(("load_cv", "load_peak", "load_cold"), result.load or (), strict=False)),
        }

    def _announce_switch(self) -> None:
        step = self.trainer.step
        if step < self.config.train.steps:
            for text in self.trainer.switches.said(step):
                self._tell(step, text)
        if self.graph_note != self.trainer.graph_note:
            self.graph_note = self.trainer.graph_note
            self._tell(step, self.graph_note)

    def _evaluate(self) -> None:
        trainer = self.trainer
        self.eval_loss = trainer.evaluate()
        averaged = trainer.evaluate(averaged=True) if trainer.ema is not None else None
        self.metrics.write("eval", trainer.step, loss=self.eval_loss, ema_loss=averaged)
        more = "" if averaged is None else f", with the running average {averaged:.4f}"
        self.console.say(f"step {trainer.step}: validation loss {self.eval_loss:.4f}{more}")

    # ---- saving ----

    def _save_sound(self, result: StepResult) -> StepResult:
        """Save, unless a weight or a moment is broken: that has to be healed, and is what the
        result that comes back says."""
        self.broken = broken_state(self.trainer)
        if self.broken:
            cause = f"{self.broken} holds numbers that are not finite"
            return replace(result, cause=cause, first_bad=(self.broken, "weight"))
        self._save()
        return result

    def _save(self) -> Path | None:
        """Save the current step, unless it is on the disk already; the path."""
        step = self.trainer.step
        if self.saved[0] != step:
            self._settle(wait=True)
            self.metrics.write("save", step, path=f"step-{step:08d}")
            self.metrics.sync()
            try:
                self.saved = (step, self.trainer.save())
                self.failed_saves *= self.trainer.saver.pending  # not over yet
            except CheckpointError as error:
                self._not_saved(error)
        return self.saved[1]

    def _settle(self, *, wait: bool) -> None:
        """Hear what became of the checkpoint that is being written, or wait until that is known."""
        saver = self.trainer.saver
        if not saver.pending:
            return
        try:
            saver.wait(self.trainer) if wait else saver.poll(self.trainer)
            self.failed_saves *= saver.pending
        except CheckpointError as error:
            self._not_saved(error)

    def _not_saved(self, error: CheckpointError) -> None:
        """Go on after a save that failed, once: the next one may find room. Raises it after that,
        and where there is no next one."""
        self.saved = (-1, None)
        self.failed_saves += 1
        if self.failed_saves > 1 or self.ending:
            raise error
        self._tell(self.trainer.step, f"{error}; tried again at the next checkpoint")


def _advice(folder: Path) -> str:
    """What the first finding about the run so far says, to end a sentence with."""
    found = next((f for f in diagnose(folder) if f.level != "note"), None)
    return f"; {found.symptom}: {found.evidence}; try {found.setting}" if found else ""
