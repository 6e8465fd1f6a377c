"""The training step, readable from top to bottom, and what it stands on.

    data -> forward -> loss weighted by valid tokens -> backward -> unscale, finite? -> clip
         -> optimizer -> schedule -> running average -> result

A step whose loss or gradients are not finite changes nothing but the data position: no weight, no
moment, no average, no schedule, no amax history. It is counted, and its first bad gradient named.
Where the optimizer runs inside backward, a loss that is not finite is held back in the same way; a
gradient that turns non-finite on the way stops the update from there on (fused_backward.py).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .. import prepare
from ..config import Run
from ..distributed.choose import strategy_of
from ..layers import te
from ..layers.delayed import clock, discard_amax
from ..models.mimo import MiMoPreTrainedModel
from ..models.moe import balance, take_loads, worst_load
from ..monitor.laps import Laps
from ..monitor.observe import Observation, Observer
from ..monitor.trackers import check_installed
from ..optim.ema import EMA
from ..optim.loss_scaler import GradScaler
from ..optim.schedule import Schedule
from ..recompute import wrap_recompute
from . import captured, loop, resume
from .data import load_data
from .drawing import Drawer
from .first_bad import first_bad_gradient, forget_step, locate
from .forward import Batch, inputs_of, mean_loss, window_loss
from .heal import Health, Precision
from .profiling import Profile
from .result import StepResult, Taken
from .saving import Saver
from .switches import Switches

ROUTER_BIAS_RATE = 1e-3  # loss-free balancing of experts, for models that start from nothing


class Trainer:
    """One run: model, optimizer, data and position. Building it also finds what it continues from;
    nothing is written before `run()`.

    Raises ConfigError or ValueError (the request), DataError, CheckpointError (what it continues).
    """

    def __init__(self, run: Run, *, device: str | None = None) -> None:
        check_installed(run.check().log.trackers)
        self.strategy = strategy_of(run)
        run = self.config = self.asked = self.strategy.config  # an engine's file has a say in it
        self.settings = run.settings
        self.device = self.strategy.device(device or run.device)
        _seed(run.seed)
        self.data = load_data(run, vocab_size=prepare.vocab_size(run))
        self.data.train.share(self.strategy.rank, self.strategy.world)
        self.model, self.plan = prepare.ready_model(run, self.device)
        wrap_recompute(
            self.model, run.train.recompute, self.plan, self.eight_bit,
            draws_random=not isinstance(self.model, MiMoPreTrainedModel),
        )  # fmt: skip
        self.optimizer = self.strategy.prepare(self.model)
        self.handle = self.strategy.fuse(self.model)
        self.scaler = _scaler(run)
        self.ema = EMA(self.model, run.ema.decay) if run.ema.decay else None
        o = run.optimizer
        self.schedule = Schedule(
            self.optimizer, o.schedule, total=run.train.steps, warmup=o.warmup_steps,
            min_ratio=o.min_lr_ratio,
        )  # fmt: skip
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        loaded = bool(run.model.path) and not run.model.random_init
        self.router_rate = 0.0 if loaded else ROUTER_BIAS_RATE
        self.observer = Observer(self.model, self.plan, self.optimizer, every=run.monitor.every)
        self.health, self._rows = Health(run), Precision(self.model, self.plan)
        self.switches = Switches(run, self.plan)
        self.saver = Saver(background=run.train.save == "background")
        source = run.data.source
        self._drawer = Drawer(self.data.train, run.train.data_timeout_s, f"data.source={source}")
        self.laps = Laps(self.device)
        self.updating = False  # weights may have moved: what fails now cannot be tried again
        self._peaks = list(self.schedule.peaks)
        self.step = self.skipped = self.tokens = 0
        self.captured = None
        self.split = 1  # micro-batches made of one of the run file's
        self.origin = self.strategy.on_main(resume.find_origin, run, self.checkpoints)
        if self.origin.checkpoint is not None:
            self.origin.notes += resume.restore(self, self.origin.checkpoint)
        self.captured, self._graph_note = captured.begin(self)

    # ---- the step ----

    def step_once(self) -> StepResult:
        """One optimizer step over `train.accumulate` micro-batches."""
        kind = self.device.type
        if not torch.is_autocast_enabled(kind):
            return self._step_once()
        with torch.autocast(kind, enabled=False):  # an outer one ends here
            return self._step_once()

    def _step_once(self) -> StepResult:
        started, traffic = time.perf_counter(), self.strategy.traffic
        if traffic is not None:
            traffic.reset()
        self.laps.begin(timed=self.observer.due(self.step + 1))
        window = [self._drawer.draw() for _ in range(self.config.train.accumulate)]
        self.laps.lap("data")
        data_seconds = time.perf_counter() - started
        valid = sum(batch["num_valid"] for batch in window)
        tokens = sum(batch["input_ids"].numel() for batch in window)
        valid, tokens = map(int, self.strategy.sum(valid, tokens))
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.adopt_health()
        look, scaling = self.observer.begin(self.step), te.Scaling(self.model)
        if self.captured is None:
            taken = self.launch_step(window, valid, look)
        elif look or self.laps.timed:
            taken = self.captured.step_by_python(window, valid, look)
        else:
            taken = self.captured.step(window, valid)
        observed = look.finish() if look else None
        if observed:
            self.health.look_at(observed)

        self.schedule.step(taken.stepped)
        if taken.stepped and self.ema is not None:
            self.ema.update()
        if not taken.stepped:
            scaling.put_back()
            discard_amax(self.parameters)
            self.skipped += 1
        self.health.note(taken.loss, taken.norm, bad=bool(taken.cause) or not taken.stepped)
        balance(self.model, taken.loads, self.router_rate if taken.stepped else 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        parts_ms = self.laps.finish()
        finite = math.isfinite(taken.loss) and math.isfinite(taken.norm)
        riddle = taken.cause and not finite  # an explosion is none
        first_bad = locate(self, window, valid) if riddle else None
        torch.clear_autocast_cache()  # also where an outer autocast region would keep old weights
        self.step += 1
        self.tokens += tokens
        return StepResult(
            step=self.step, loss=taken.loss, grad_norm=taken.norm, tokens=tokens, lr=lr,
            stepped=taken.stepped, seconds=time.perf_counter() - started, cause=taken.cause,
            first_bad=first_bad, data_seconds=data_seconds, observed=observed, load=taken.load,
            sent=dict(traffic.nbytes) if traffic is not None else {},
            waited=traffic.seconds if traffic is not None and self.device.type == "cpu" else None,
            parts_ms=parts_ms,
        )  # fmt: skip

    def launch_step(self, window: list[Batch], valid: int, look: Observation | None) -> Taken:
        """Gradients and update of one step, launched by Python (captured.py replays the same)."""
        count = torch.full((), max(valid, 1), dtype=torch.int64, device=self.device)

        def loss_of(batch: Batch) -> Tensor:
            with look.forward() if look and batch is window[0] else nullcontext():
                return self.loss_of(batch, valid, count)

        total = self.accumulate(window, loss_of, self.health.loss_limit)
        loads = take_loads(self.model)
        self.scaler.unscale_(self.optimizer)
        # the one wait for the device in a step
        loss, norm, cause, load = self._inspect(total, *self.measured(), worst_load(loads))
        if look:
            look.gradients(self.handle.norms if self.handle is not None else None)
        # in a fused step the weights have moved already and this ends it; after an overflow it only
        # tells the loss scale
        overflow = self.scaler.is_enabled() and not math.isfinite(norm)
        self.updating = True
        stepped = (overflow or not cause) and self.strategy.step(
            self.scaler, self._grad_scale(norm)
        )
        self.scaler.update()
        self.updating = False
        self.laps.lap("update")
        return Taken(loss=loss, norm=norm, cause=cause, stepped=stepped, loads=loads, load=load)

    def accumulate(
        self, window: Sequence[Any], loss_of: Callable[[Any], Tensor], most: float | Tensor
    ) -> Tensor:
        """Forward and backward of a window, part by part: leaves its gradients (of a fused step, the
        update) and returns its loss, FP32 0-dim. Waits for nothing, so that it can be captured.

        loss_of: a part's share of the loss. A fused step updates nothing in the backward of a loss
        that is above `most` or not finite.
        """
        total = torch.zeros((), device=self.device)
        for part in window:
            with self.precision():
                loss = loss_of(part)
            self.laps.lap("forward")
            total += loss.detach()
            if self.handle is not None:
                self.handle.guard(loss.where(loss <= most, math.nan))
            self.strategy.backward(self.scaler.scale(loss), last=part is window[-1])
            self.laps.lap("backward")
            del loss
        return total

    def loss_of(self, batch: Batch, valid: int, count: Tensor) -> Tensor:
        """A micro-batch's part of the mean loss over the window; `count` is `valid` on the device."""
        inputs = inputs_of(self.model, batch, self.device, self.config.data.document_mask)
        return window_loss(self.strategy.forward, inputs, batch["num_valid"], valid, count)

    def measured(self) -> tuple[Tensor, Tensor]:
        """(norm of the gradients before clipping, whether a fused step found one that is not finite:
        above 0), on the device."""
        if self.handle is not None:
            self.handle.finish()
            return self.handle.norm, self.handle.found
        norm = self.strategy.norm(self.parameters)
        return norm, torch.zeros_like(norm)

    def _inspect(
        self, total: Tensor, norm: Tensor, found: Tensor, spread: list[Tensor]
    ) -> tuple[float, float, str, tuple[float, ...] | None]:
        """(loss, gradient norm before clipping, why the step must not be taken or "", load)."""
        values = torch.stack([t.reshape(()).to(total) for t in (total, norm, found, *spread)])
        loss, size, bad, *load = values.tolist()
        if self.handle is None and not math.isfinite(size):
            # squares may have overflowed, no gradient
            size = self.strategy.exact_norm(self.parameters)
            bad = not math.isfinite(size)
        loss, bad = self.strategy.sum(loss, bad)
        loss = float(numpy.float32(loss))  # as one rank would have added it up
        # a fused step has moved already: of its explosions only the loss is held back
        cause = self.cause_of(loss, bool(bad), 0.0 if self.handle is not None else size)
        return loss, size, cause, tuple(load) or None

    def cause_of(self, loss: float, bad: bool, norm: float = 0.0) -> str:
        """Why a step with this loss, norm and, if `bad`, a bad gradient is not taken, or ""."""
        exploded = self.health.explosion(loss, norm)
        if exploded:
            return exploded
        causes = [] if math.isfinite(loss) else [f"the loss is {loss}"]
        if bad or causes:
            causes += first_bad_gradient(self)
        return "; ".join(causes)

    def _grad_scale(self, norm: float) -> float | None:
        """What the optimizer divides gradients by, so that their norm is at most clip_norm."""
        limit = self.config.optimizer.clip_norm
        return norm / limit if limit and norm > limit else None

    @property
    def graph_note(self) -> str:
        """One line: whether steps are replayed as CUDA graphs, and if not, why."""
        return self._graph_note if self.captured is None else self.captured.note

    # ---- precision ----

    @property
    def in_eight_bits(self) -> bool:
        """Whether the step at hand computes as its plan says, or all in high precision."""
        return self.switches.eight_bit(self.step)

    def eight_bit(self) -> AbstractContextManager:
        """The 8-bit context of the step at hand."""
        return te.eight_bit(self.plan, self.in_eight_bits)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Where forwards of this run happen."""
        dtype = self.settings.autocast_dtype
        with (
            torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None),
            self.eight_bit(),
        ):
            yield
        # autocast clears its casts of the weights itself only where it is the outermost one, and
        # until then they stay through backward
        torch.clear_autocast_cache()

    # ---- around the step ----

    def evaluate(self, *, averaged: bool = False) -> float:
        """Mean validation loss, nats per token, over `train.eval_batches` batches from the start.

        averaged: with the running average's weights. Leaves no trace in training: modes, random
        states and every weight are as before. NaN where nothing is held out.
        """
        held = self.data.validation
        if held is None or not self.config.train.eval_batches:
            return math.nan
        modes = [(m, m.training) for m in self.model.modules()]
        before = resume.random_state()
        mask = self.config.data.document_mask
        torch.clear_autocast_cache()
        try:
            self.model.eval()
            average = self.ema.applied() if averaged else nullcontext()
            with te.Scaling(self.model), average, self.precision():
                batches = held.first(self.config.train.eval_batches)
                return float(mean_loss(self.model, batches, self.device, mask))
        finally:
            for module, training in modes:
                module.training = training
            resume.set_random_state(before)
            torch.clear_autocast_cache()

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return Path(self.config.out) / "checkpoints"

    def save(self) -> Path:
        """Write a checkpoint of the position between two steps, or, with train.save=background,
        begin to (see saving.py). Raises CheckpointError, also for the one before."""
        return self.saver.save(self)

    def adopt_health(self) -> None:
        """Compute as `health` has it for the step at hand: rows in high precision, learning rate."""
        self._rows.apply(self.switches.demoted(self.step))
        peaks = [peak * self.health.lr_scale for peak in self._peaks]
        if peaks != self.schedule.peaks:
            self.schedule.load_state_dict({**self.schedule.state_dict(), "peaks": peaks})

    def split_batches(self) -> str:
        """From now on half as many sequences in a forward (a third, where they are odd) and twice as
        many forwards in a step: the same sequences a step. Returns what changed; "" where that
        cannot be, or where the last step may have changed weights before it failed."""
        train, size = self.config.train, self.config.train.micro_batch
        if self.updating or self.handle is not None or size == 1 or self.strategy.world > 1:
            return ""
        by = next(n for n in range(2, size + 1) if size % n == 0)
        self.adopt_split(self.split * by)
        forget_step(self)
        torch.clear_autocast_cache()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        now = self.config.train
        return (
            f"train.micro_batch={size} -> {now.micro_batch}, train.accumulate={train.accumulate} -> "
            f"{now.accumulate} (the same {size * train.accumulate} sequences a step)"
        )

    def adopt_split(self, split: int) -> None:
        """Make every micro-batch of the run file into `split` of them."""
        train, by = self.config.train, split // self.split
        smaller = replace(
            train, micro_batch=train.micro_batch // by, accumulate=train.accumulate * by
        )
        self.config, self.split = replace(self.config, train=smaller), split
        self.data.train.batch = smaller.micro_batch
        self.capture_again()

    def capture_again(self) -> None:
        """Begin anew with graphs, where there were any: the optimizer's state lies elsewhere now."""
        if self.captured is not None:
            self.captured.drop()
            self.captured, self._graph_note = captured.begin(self)

    @property
    def precision_now(self) -> tuple[bool, frozenset[str]]:
        """Whether the step at hand is 8-bit, and the rows demoted in it."""
        return self.in_eight_bits, frozenset(self.switches.demoted(self.step))

    def run(self, *, quiet: bool = False, profile: bool = False) -> loop.RunResult:
        """Train to the last step, evaluating, saving and logging on the way (see loop.py); with
        `profile` a few steps are taken in full view (see profiling.py)."""
        return loop.run(self, quiet=quiet, profile=Profile(self) if profile else None)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    clock.seed, clock.step = seed, 0


def _scaler(run: Run) -> GradScaler:
    s = run.scaler
    return GradScaler(
        init_scale=s.init_scale,
        growth_factor=s.growth_factor,
        backoff_factor=s.backoff_factor,
        growth_interval=s.growth_interval,
        max_scale=s.max_scale or None,
        min_scale=s.min_scale,
        enabled=run.settings.compute == "autocast-fp16",
    )
