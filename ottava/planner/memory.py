"""The planner: how many bytes a training step takes, by category, before anything is allocated.

It builds the model on fake tensors, prepares it exactly as a run does (prepare.py), and runs real
steps (the first one makes the optimizer's state) under the tracker of lifetimes.py. What no operator
of ours shows is modelled: what cuBLAS and library attention hold for themselves (rehearsal.py), and
what is sent between ranks (ranks.py). The rehearsed step repeats the trainer's order of calls, so a
test holds plans to measured steps. For CUDA, sizes are the caching allocator's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ..config import PRESETS, ConfigError, Data, Model, Run
from ..models import load
from ..numerics.policy import TE_KEEPS
from ..numerics.preset import RECOMPUTES
from .allocator import AllocatorRecorder, TraceError
from .bars import html_of
from .lifetimes import CATEGORIES, MemoryTracker, Peak, follow, replay
from .rehearsal import Rehearsal, Share

GIB = float(1 << 30)
MIB = float(1 << 20)
AGREEMENT = 0.001  # of the traced peak with the allocator's own number
NOT_PLANNED = (
    "memory: the shape of a tensor in this model depends on data ({}), so it cannot be planned; "
    "measure a short run instead"
)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What one training step takes at its peak. `by_category` adds up to `peak_bytes`.

    `phase`: where the peak is. `largest`: what took most there, by operator (category, operator,
    tensors, bytes). `reserved_bytes`: what the CUDA allocator holds (0 on the CPU).
    `batch`: (sequences, tokens each) of one micro-batch.
    """

    name: str
    preset: str
    recompute: str
    device: str
    batch: tuple[int, int]
    accumulate: int
    num_parameters: int
    peak_bytes: int
    phase: str
    by_category: dict[str, int]
    reserved_bytes: int
    largest: tuple[tuple[str, str, int, int], ...]
    _run: Run = field(repr=False, compare=False)
    _model: nn.Module | None = field(repr=False, compare=False, default=None)

    @property
    def peak_gib(self) -> float:
        """The peak in GiB (2^30 bytes)."""
        return self.peak_bytes / GIB

    def fits(self, gib: float) -> bool:
        """Whether the peak is within `gib` GiB."""
        return self.peak_bytes <= gib * GIB

    def advice(self, gib: float) -> list[MemoryReport]:
        """Other settings that fit into `gib` GiB, re-estimated, the least intrusive first.

        Empty when this one fits already, or when nothing that was tried does. Three at most.
        """
        if self.fits(gib):
            return []
        found = []
        for run in _alternatives(self._run):
            other = estimate_memory(self._model or run, run=run, device=self.device)
            if other.fits(gib):
                found.append(other)
            if len(found) == 3:
                break
        return found

    @property
    def settings(self) -> str:
        """The settings as overrides of a run file."""
        return (
            f"train.preset={self.preset} train.recompute={self.recompute} "
            f"train.micro_batch={self.batch[0]} train.accumulate={self.accumulate}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data: every field, bytes as integers."""
        out = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return {**out, "batch": list(self.batch), "by_category": dict(self.by_category)}

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        title = f"{self.name}: {self.num_parameters:,} parameters, planned"
        return html_of(title, self.by_category, f"{self.settings}\npeak in {self.phase}")

    def __rich__(self) -> Group:
        unit, size = ("GiB", GIB) if self.peak_bytes >= GIB else ("MiB", MIB)
        kind = "allocator blocks" if self.device == "cuda" else "bytes in tensors"
        table = Table(
            "category",
            f"{unit} at the peak",
            "share",
            box=None,
            pad_edge=False,
        )
        table.columns[1].justify = table.columns[2].justify = "right"
        for category in CATEGORIES:
            nbytes = self.by_category[category]
            share = nbytes / max(self.peak_bytes, 1)
            table.add_row(_TITLES[category], f"{nbytes / size:,.2f}", f"{share:.0%}")
        table.add_row("all", f"{self.peak_bytes / size:,.2f}", "100%", style="bold")
        where = f"{self.settings}\npeak in {self.phase}; {kind} on {self.device}"
        if self.reserved_bytes:
            where += f"; the allocator reserves {self.reserved_bytes / size:,.2f} {unit}"
        return Group(f"{self.name}: {self.num_parameters:,} parameters, planned", table, where)

    def __str__(self) -> str:
        console = Console(width=100, record=False, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(self, markup=False)
        return captured.get()


@dataclass(frozen=True)
class Measured:
    """A measured peak. `source`: "tensors" (CPU) or "allocator" (CUDA). `problem`: why there is no
    split by category; empty where there is."""

    peak: Peak
    source: str
    reserved_bytes: int
    problem: str = ""


_TITLES = {
    "weights": "weights",
    "master": "master",
    "gradients": "gradients",
    "moments": "moments",
    "activations": "kept activations",
    "temporary": "temporary",
}


def estimate_memory(
    model,
    preset: str = "fp8-lean",
    batch: tuple[int, int] = (8, 2048),
    recompute: str = "none",
    device: str = "cuda",
    *,
    run: Run | None = None,
) -> MemoryReport:
    """Plan a training step of `model` under `preset` with `batch` = (sequences, tokens each).

    `model`: an nn.Module (a causal LM; it is not touched, and may be on meta), a configuration, the
    name of a model preset, or a Run, whose own preset, batch and recompute then count. `run` gives
    all settings beside a module. `device`: "cuda" counts allocator blocks, "cpu" bytes in tensors.
    Raises ValueError for unknown names, and where shapes depend on data.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device: {device!r} is not one of cuda, cpu")
    if isinstance(model, Run):
        run, model = model, None
    elif run is None:
        run = _run_for(model, preset, batch, recompute)
    if isinstance(model, str):
        model = None
    elif model is not None and not isinstance(model, nn.Module):
        model = _from_config(model)
    return _estimate(run, model, device)


def parameters_per_rank(model: nn.Module, expert_parallel: int = 1) -> int:
    """Parameters that one rank holds when only the experts are spread over `expert_parallel` ranks.

    Routers, norms and everything dense are on every rank; tied weights count once. `model` may be
    on meta. Raises ValueError when a layer's experts do not divide.
    """
    spread = {}
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        if count is None or not stacked:
            continue
        if count % expert_parallel:
            raise ValueError(f"{name}: {count} experts do not divide over {expert_parallel} ranks")
        spread |= {id(p): p for p in stacked}
    everything = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for p in spread.values())
    return everything - experts + experts // expert_parallel


def measure_memory(
    step: Callable[[], object], model: nn.Module, optimizer=None, average=None
) -> Measured:
    """The peak of the second of two calls of `step`, a whole training step of `model`.

    `average`: the EMA that the step updates, if any.

    On the CPU the exact sum of bytes alive in tensors; on CUDA `torch.cuda.max_memory_allocated`,
    split by category from the allocator's trace. Where that trace does not lead to the allocator's
    own number there is no split, and `problem` says why.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        with MemoryTracker() as tracker, follow(tracker, model, optimizer, average):
            _second_of_two(step, tracker)
        return Measured(peak=replay(tracker.timeline), source="tensors", reserved_bytes=0)
    recorder, problem, allocated, reserved = AllocatorRecorder(device), "", 0, 0
    try:
        with recorder, follow(recorder, model, optimizer, average):
            _second_of_two(step, recorder)
            allocated = torch.cuda.max_memory_allocated(device)
            reserved = torch.cuda.max_memory_reserved(device)
    except TraceError as error:
        problem = str(error)
    peak = replay(recorder.timeline)
    if not problem and abs(allocated - peak.bytes) > AGREEMENT * allocated:
        problem = f"memory trace: its peak is {peak.bytes:,} bytes, the allocator's {allocated:,}"
    split = {} if problem else peak.by_category
    peak = replace(peak, bytes=allocated, by_category=split)
    return Measured(peak=peak, source="allocator", reserved_bytes=reserved, problem=problem)


def _second_of_two(step: Callable[[], object], recorder) -> None:
    step()
    recorder.start_span()
    step()


def _from_config(config) -> nn.Module:
    if config.model_type in load.CONFIGS:
        with torch.device("meta"):
            return load.MODELS[config.model_type](config)
    with torch.device("meta"):
        return load._foreign(config)


def _run_for(model, preset: str, batch: tuple[int, int], recompute: str) -> Run:
    name = model if isinstance(model, str) else type(model).__name__
    run = Run(
        name=name,
        model=Model(name=name),
        data=Data(source="random", sequence_length=batch[1], document_mask=False),
    )
    try:
        run = run.with_preset(preset)
        train = replace(run.train, micro_batch=batch[0], recompute=recompute)
        return replace(run, train=train).check()
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _estimate(run: Run, model: nn.Module | None, device: str) -> MemoryReport:
    if str(run.settings.recipe).startswith("te:"):
        raise ValueError(
            f"memory: under precision.recipe={run.settings.recipe} {TE_KEEPS}; measure a short run, "
            "or plan with precision.recipe=tensor"
        )
    rehearsal = Rehearsal(run, model, device, Share(lora=run.lora.rank))
    try:
        peak, reserved = rehearsal.measure()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(NOT_PLANNED.format(error)) from error
    parameters = sum(p.numel() for p in rehearsal.model.parameters())
    return reported(run, peak, reserved, device, parameters, model)


def reported(
    run: Run, peak: Peak, reserved: int, device: str, parameters: int, model=None
) -> MemoryReport:
    """The report of a peak of `run`; `model`: what `advice` rehearses with other settings."""
    return MemoryReport(
        name=run.name,
        preset=run.train.preset,
        recompute=run.train.recompute,
        device=device,
        batch=(run.train.micro_batch, run.data.sequence_length),
        accumulate=run.train.accumulate,
        num_parameters=parameters,
        peak_bytes=peak.bytes,
        phase=peak.phase,
        by_category=peak.by_category,
        reserved_bytes=reserved,
        largest=peak.largest,
        _run=run,
        _model=model,
    )


def _alternatives(run: Run) -> Iterator[Run]:
    """Runs that need less memory: more recompute, fp8-lean, then smaller micro-batches."""
    own, lean = run.train.preset, "fp8-lean"
    more = RECOMPUTES[RECOMPUTES.index(run.train.recompute) + 1 :]
    tries = [(own, r) for r in more]
    if PRESETS[own].compute in ("fp8", "autocast-bf16", "bf16", "fp32") and own != lean:
        tries += [(lean, run.train.recompute), *((lean, r) for r in more)]
    yield from (_changed(run, *t, run.train.micro_batch) for t in tries)
    last = tries[-1] if tries else (own, run.train.recompute)
    size = run.train.micro_batch
    while size > 1:
        size = -(-size // 2)
        for preset, recompute in dict.fromkeys([(own, run.train.recompute), last]):
            yield _changed(run, preset, recompute, size)


def _changed(run: Run, preset: str, recompute: str, micro_batch: int) -> Run:
    """The run with these settings and about the same tokens in a step."""
    run = run.with_preset(preset)
    sequences = run.train.micro_batch * run.train.accumulate
    train = replace(
        run.train,
        recompute=recompute,
        micro_batch=micro_batch,
        accumulate=-(-sequences // micro_batch),
    )
    return replace(run, train=train)
