"""The trainer's steps as CUDA graphs: which can be, and what each of them does.

One graph for each kind of window (shapes, whether sequences hold several documents, precision). The
first step of a kind runs as the trainer always runs it, the next ones inside a StepGraph. What the
trainer decides on the host after looking at a step (skip it, clip it) is decided on the device
here. A step that turns out bad has changed nothing, unless its optimizer runs inside backward; it
is then taken again without a graph, so that what it says and does is the same.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config import ConfigError, Run
from ..layers.experts import Experts as CodedExperts
from ..models.moe import Experts, Router
from ..numerics.recipe import Recipe
from ..optim.clock import DeviceClock
from ..recompute import restores_random_states
from .forward import Batch, arguments_of, tensors_of, window_loss
from .graph import Buffers, CaptureError, Lane, StepGraph, held_by_graphs
from .result import Taken

if TYPE_CHECKING:
    from ..monitor.observe import Observation
    from .trainer import Trainer

KINDS = 4  # graphs at a time
MICRO_BATCHES = 8  # in one graph
WARMUP = 2  # steps of a kind before its capture, beside the first
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def why_not_captured(run: Run, model: nn.Module) -> str | None:
    """Why steps of `run` on its converted `model` cannot be CUDA graphs; None where they can."""
    devices = _places_of(model)
    if any(d.type != "cuda" for d in devices):
        return f"the model is on the {next(d.type for d in devices if d.type != 'cuda').upper()}"
    if len(devices) > 1:
        return "the weights lie on several GPUs"
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        return "gradients are exchanged between ranks"
    if run.settings.compute == "autocast-fp16":
        return f"the loss scale of train.preset={run.train.preset} changes on the host"
    if run.train.accumulate > MICRO_BATCHES:
        return f"train.accumulate={run.train.accumulate} is more than {MICRO_BATCHES} forwards"
    if restores_random_states(model):
        return "recomputed layers put random states back"
    return _why_not_module(model)


def _places_of(model: nn.Module) -> set[torch.device]:
    return {p.device for p in model.parameters()}


def _why_not_module(model: nn.Module) -> str | None:
    config = getattr(model, "config", None)
    if any(getattr(config, name, None) for name in _EXPERT_COUNTS):
        return "how many tokens each expert gets is read on the host"
    for name, module in model.named_modules():
        if isinstance(module, Router | Experts | CodedExperts):
            return f"{name}: how many tokens each expert gets is read on the host"
        recipe = getattr(module, "recipe", None)
        if isinstance(recipe, Recipe) and recipe.backend == "te":
            return f"{name} runs on Transformer Engine, which keeps state of its own"
        if isinstance(recipe, Recipe) and "stochastic" in (
            recipe.input.rounding, recipe.weight.rounding, recipe.grad_output.rounding
        ):  # fmt: skip
            return f"{name} rounds its operands with random keys from the host"
        if any(_hooks_of(module)):
            return f"{name or 'the model'} has a hook, which a replay would not call"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            return f"{name} has a gradient hook, which a replay would not call"
    return None


def _hooks_of(module: nn.Module) -> Iterator[dict]:
    yield module._forward_pre_hooks
    yield module._forward_hooks
    yield module._backward_pre_hooks
    yield module._backward_hooks


@dataclass
class _Kind:
    """One kind of window: its buffers, its graph, and whether a step of it has been taken."""

    micro: list[Buffers]
    valid: Buffers
    graph: StepGraph
    begun: bool = False
    fused: tuple | None = None  # norm, norms and found of the FusedBackward, as captured


class CapturedTraining:
    """Takes a trainer's steps. `note`: one line on what happens, which changes when it must."""

    def __init__(self, trainer: Trainer, lane: Lane | None = None) -> None:
        self._trainer = weakref.ref(trainer)  # it goes, with its memory, when its owner lets go
        self.lane = lane or Lane(trainer.device)
        fused = trainer.handle is not None
        self.clock = DeviceClock(trainer.device, counts_skips=fused)
        self.note = f"CUDA graphs, after {1 + WARMUP} steps by Python"
        self.kinds: dict[tuple, _Kind] = {}
        self._stopped = False
        self._hooks = [d for m in trainer.model.modules() for d in _hooks_of(m)]
        self._hooks += (
            trainer.optimizer._optimizer_step_pre_hooks,
            trainer.optimizer._optimizer_step_post_hooks,
        )
        self._own_hooks = 1 if fused else 0  # after accumulation, on each parameter

    @property
    def trainer(self) -> Trainer:
        return self._trainer()

    def step(self, window: list[Batch], valid: int) -> Taken:
        """Train on `window`, whose labels count `valid` in all."""
        kind = None if self._stopped else self._kind(window)
        if kind is None:
            return self._eager(window, valid)
        if not kind.begun:
            taken = self._eager(window, valid)
            kind.begun = taken.stepped
            return taken
        try:
            values = self._run(kind, window, valid)
        except CaptureError as error:
            if self.trainer.config.train.graph == "on":
                raise CaptureError(f"{error}; use train.graph=auto or off") from None
            self.note, self._stopped = f"no CUDA graphs: {error}", True
        if self._stopped:
            self.drop()
            return self._eager(window, valid)
        loss, norm, bad = values.tolist()  # the one wait for the device in a step
        if math.isfinite(loss) and not bad:
            return Taken(loss=loss, norm=norm, stepped=True)
        kind.graph.take_back()
        if self.trainer.handle is not None:
            cause = self.trainer.cause_of(loss, bool(bad))
            return Taken(loss=loss, norm=norm, cause=cause, stepped=False)
        self.drop()  # the memory is needed
        return self._eager(window, valid)

    def step_by_python(self, window: list[Batch], valid: int, look: Observation | None) -> Taken:
        """A step that someone looks into. The graphs stay, unless there is no room for both."""
        free = torch.cuda.mem_get_info(self.lane.device)[0]
        free += torch.cuda.memory_reserved(self.lane.device)
        free -= torch.cuda.memory_allocated(self.lane.device)
        if free < 1.2 * held_by_graphs(self.lane.device):
            self.drop()
        return self._eager(window, valid, look)

    def drop(self) -> None:
        """Give back what the graphs hold."""
        for kind in self.kinds.values():
            kind.fused = None
            kind.graph.drop()

    def _eager(self, window: list[Batch], valid: int, look: Observation | None = None) -> Taken:
        with self.lane.entered():
            return self.trainer.launch_step(window, valid, look)

    def _kind(self, window: list[Batch]) -> _Kind | None:
        """The kind of `window`; None where this step must be Python's."""
        trainer = self.trainer
        if any(self._hooks) or any(
            p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > self._own_hooks
            for p in trainer.parameters
        ):
            self.drop()  # who listens measures memory, or may
            return None
        tensors = [tensors_of(b, trainer.config.data.document_mask) for b in window]
        shapes = tuple(tuple((k, v.shape) for k, v in t.items()) for t in tensors)
        precision = trainer.precision_now
        key = (precision, shapes)
        if key in self.kinds:
            return self.kinds[key]
        if any(other[0] != precision for other in self.kinds):
            self.drop()
            self.kinds.clear()
        if len(self.kinds) == KINDS:
            self.note = f"CUDA graphs for {KINDS} kinds of batches; others run without"
            return None
        kind = _Kind(
            [Buffers(t, trainer.device) for t in tensors],
            Buffers(
                {"valid": torch.zeros((), dtype=torch.int64), "limits": torch.zeros(2)},
                trainer.device,
            ),
            StepGraph(trainer.optimizer, self.lane, self.clock, warmup=WARMUP),
        )
        self.kinds[key] = kind
        return kind

    def _run(self, kind: _Kind, window: list[Batch], valid: int) -> torch.Tensor:
        for buffers, batch in zip(kind.micro, window, strict=True):
            buffers.fill(batch)
        health = self.trainer.health
        limits = torch.tensor([health.loss_limit, health.norm_limit])
        kind.valid.fill({"valid": torch.tensor(max(valid, 1)), "limits": limits})
        values = kind.graph.run(lambda: self._whole(kind))
        handle = self.trainer.handle
        if handle is not None and kind.graph.captured:
            if kind.fused is None:
                kind.fused = handle.norm, handle.norms, handle.found
            handle.norm, handle.norms, handle.found = kind.fused
        return values

    def _whole(self, kind: _Kind) -> torch.Tensor:
        """The step, without a look at what it computes: FP32 [loss, gradient norm, found_inf]."""
        trainer = self.trainer
        torch.clear_autocast_cache()
        valid, limits = (kind.valid.views()[k] for k in ("valid", "limits"))

        def loss_of(buffers: Buffers) -> torch.Tensor:
            inputs = arguments_of(trainer.model, buffers.views())
            # auxiliary losses, weighted by counts of tokens, are of models with experts: none here
            return window_loss(trainer.strategy.forward, inputs, 0, 0, valid)

        total = trainer.accumulate(kind.micro, loss_of, limits[0])
        norm, found = self._update(total, limits)
        trainer.optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()
        return torch.stack([t.detach().reshape(()).to(total) for t in (total, norm, found)])

    def _update(
        self, total: torch.Tensor, limits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm before clipping, found_inf) after the update, or after what ends a fused one."""
        trainer, limit = self.trainer, self.trainer.config.optimizer.clip_norm
        norm, found = trainer.measured()
        if trainer.handle is not None:
            trainer.optimizer.step(found_inf=found)
            return norm, found
        good = norm.isfinite() & total.isfinite() & (total <= limits[0]) & (norm <= limits[1])
        found = (~good).float().reshape(1)
        scale = None
        if limit:  # a division by a tensor: one by a number would multiply by its inverse
            wide = norm.double()
            scale = (wide / torch.full_like(wide, limit)).clamp(min=1.0)
        trainer.optimizer.step(grad_scale=scale, found_inf=found)
        return norm, found


def begin(trainer: Trainer) -> tuple[CapturedTraining | None, str]:
    """What takes the trainer's steps, as train.graph asks for it, and one line about that.

    Raises ConfigError where graphs are asked for and cannot be.
    """
    wanted = trainer.config.train.graph
    if wanted == "off":
        return None, "no CUDA graphs: train.graph=off"
    why = why_not_captured(trainer.config, trainer.model)
    if why is None:
        captured = CapturedTraining(trainer)
        return captured, captured.note
    if wanted == "on":
        raise ConfigError(f"train.graph: 'on', but {why}; use train.graph=auto")
    return None, f"no CUDA graphs: {why}"
