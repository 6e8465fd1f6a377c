"""What a checkpoint holds besides weights, and what it must agree with to be continued.

A run continued from a checkpoint gives the same bits as one that never stopped, so everything that
the next step reads is here: optimizer, loss scale, running average, schedule, data position, random
states, the amax history of delayed scaling, and the counters of stochastic rounding. The plan and
the run's configuration are stored to be compared, never to be applied.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from ..config import Run
from ..distributed.strategy import Strategy
from ..layers import te
from ..layers.delayed import AmaxHistory, clock
from ..numerics.policy import Plan
from ..numerics.recipe import Cast, Recipe
from ..optim.ema import EMA
from .checkpoint import Checkpoint, CheckpointError, latest_good, load_weights

if TYPE_CHECKING:
    from .trainer import Trainer

# Keys that decide what the weights or the moments are: another value is another model.
# (What concerns the data is guarded by the loader's own fingerprint, the plan by comparison.)
_FIXED = (
    "seed",
    "model.name",
    "model.path",
    "model.overrides",
    "train.preset",
    "optimizer.master",
    "optimizer.states",
)
# Keys that never change the numbers: not worth a word.
_SILENT = (
    "name", "out", "train.resume", "train.checkpoint_every", "train.keep_last", "train.save",
    "train.data_timeout_s", "train.graph", "log.",
)  # fmt: skip


def random_state() -> dict[str, Any]:
    """The state of every global generator: torch on CPU and GPUs, Python, numpy."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "rounding": {"seed": clock.seed, "step": clock.step},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; generators of GPUs that are not here are left out."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    clock.seed, clock.step = state["rounding"]["seed"], state["rounding"]["step"]


def _histories(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, AmaxHistory]]:
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, AmaxHistory):
                yield f"{name}.{attribute}".lstrip("."), module, attribute, value


def amax_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The amax history of every module under delayed scaling: FP32 [operands, length], and which
    operands have one already."""
    return {
        name: {"amax": history.amax, "ready": history.ready}
        for name, _, _, history in _histories(model)
    }


def load_amax_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Restore amax histories; returns what changes on the way (a history of another length).

    A module makes its history in its first forward, so here it is made for it; the module itself
    cuts or pads it to its recipe's length.
    """
    notes = []
    for name, stored in state.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        length = stored["amax"].shape[1]
        history = AmaxHistory(length, device)
        history.amax.copy_(stored["amax"])
        history.ready = list(stored["ready"])
        setattr(module, attribute, history)
        recipe = getattr(module, "recipe", None)
        if isinstance(recipe, Recipe) and recipe.history != length:
            notes.append(
                f"amax history: {length} entries stored, {recipe.history} from now on (the "
                "most recent are kept, or zeros appended)"
            )
    return list(dict.fromkeys(notes))


@dataclass
class Origin:
    """Where a run starts: `checkpoint` (None: from nothing), and what to announce about it."""

    checkpoint: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Optimizer steps already made."""
        return self.checkpoint.step if self.checkpoint else 0


def find_origin(run: Run, folder: Path) -> Origin:
    """The checkpoint that `train.resume` names, checked: "auto" takes the newest whole one.

    Raises CheckpointError when the one asked for is missing or damaged, or when every one is.
    """
    wanted = run.train.resume
    if wanted == "never":
        return Origin()
    if wanted == "auto":
        found, skipped = latest_good(folder)
        if found is None and skipped:
            raise CheckpointError(
                f"{skipped[0]}; no older one is whole: give train.resume=never to start again"
            )
        return Origin(found, [f"passed over: {reason}" for reason in skipped])
    path = Path(wanted)
    if (path / "checkpoints").is_dir():
        found, skipped = latest_good(path / "checkpoints")
        if found is None:
            raise CheckpointError(f"train.resume: {path} holds no whole checkpoint")
        return Origin(found, [f"passed over: {reason}" for reason in skipped])
    return Origin(Checkpoint.open(path))


def collect(trainer: Trainer) -> dict[str, Any]:
    """The sections of a checkpoint of `trainer`, which stands between two steps. All ranks call it."""
    trainer.strategy.settle()
    random, *random_of_others = trainer.strategy.collect(random_state())
    return {
        **({"ranks": random_of_others} if random_of_others else {}),
        # split masters are in split.safetensors, with the weights
        "optimizer": trainer.strategy.optimizer_state(),
        "scaler": trainer.scaler.state_dict(),
        **({"ema": _whole_average(trainer)} if trainer.ema is not None else {}),
        "schedule": trainer.schedule.state_dict(),
        "data": trainer.data.train.state_dict(),
        "amax": amax_state(trainer.model),
        **({"te": theirs} if (theirs := te.scaling_state(trainer.model)) else {}),
        "progress": {
            "step": trainer.step,
            "skipped": trainer.skipped,
            "tokens": trainer.tokens,
            "split": trainer.split,
        },
        "random": random,
        "health": trainer.health.state_dict(),
        "switches": trainer.switches.state_dict(),
        "plan": trainer.plan.to_dict() if trainer.plan is not None else None,
        "run": asdict(trainer.asked),
    }


def restore(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Put `trainer` where `checkpoint` left off; returns what differs from then, to be announced.

    Settings that changed (learning rate, steps, decay ...) are this run's, state is the
    checkpoint's. Raises CheckpointError when the checkpoint is of another model, plan or run, and
    DataError when the data changed; the trainer is then not to be used.
    """
    notes = _compare_runs(trainer.config, checkpoint)
    _compare_plans(trainer.plan, checkpoint)
    with trainer.strategy.loading(trainer.model):
        load_weights(trainer.model, checkpoint, trainer.strategy.share)
    _restore_optimizer(trainer.strategy, checkpoint)
    if trainer.ema is not None and "ema" in checkpoint.skeleton:
        average, here = checkpoint.section("ema", in_files=True), trainer.ema.shadow
        shadow = {
            name: trainer.strategy.share(value, here[name]) if name in here else value
            for name, value in average["shadow"].items()
        }
        trainer.ema.load_state_dict({**average, "shadow": shadow})
        trainer.ema.decay = trainer.config.ema.decay
    elif trainer.ema is not None:
        notes.append("the running average starts now: the checkpoint holds none")
        trainer.ema = EMA(trainer.model, trainer.config.ema.decay)
    trainer.scaler.load_state_dict(checkpoint.section("scaler"))
    peaks = trainer.schedule.peaks
    trainer.schedule.load_state_dict({**checkpoint.section("schedule"), "peaks": peaks})
    trainer.data.train.load_state_dict(checkpoint.section("data"))
    notes += load_amax_state(trainer.model, checkpoint.section("amax"))
    if "te" in checkpoint.skeleton:
        te.load_scaling_state(trainer.model, checkpoint.section("te"))
    progress = checkpoint.section("progress")
    trainer.step, trainer.skipped = progress["step"], progress["skipped"]
    trainer.tokens = progress["tokens"]
    health = checkpoint.section("health") if "health" in checkpoint.skeleton else {}
    if health:
        trainer.health.load_state_dict(health)
    # before there were switches, demotions were a part of health
    switches = {"asked": trainer.switches.asked, "changes": health.get("demotions", [])}
    if "switches" in checkpoint.skeleton:
        switches = checkpoint.section("switches")
    notes += trainer.switches.load_state_dict(switches, trainer.step)
    notes += _same_split(trainer, checkpoint)
    trainer.adopt_health()
    rank, others = trainer.strategy.rank, checkpoint.skeleton.get("ranks", [])
    if rank <= len(others):  # a rank that is new draws from its own seed
        set_random_state(checkpoint.section("ranks")[rank - 1] if rank else
                         checkpoint.section("random"))  # fmt: skip
    return notes


def _same_split(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Make micro-batches as small as they had to be, where the run file asks for what it did then."""
    split = checkpoint.section("progress").get("split", 1)
    then, now = checkpoint.section("run")["train"], trainer.asked.train
    same = (then["micro_batch"], then["accumulate"]) == (now.micro_batch, now.accumulate)
    if split <= trainer.split or not same:
        return []
    trainer.adopt_split(split)
    now = trainer.config.train
    return [
        f"memory ran out before: train.micro_batch={now.micro_batch} and "
        f"train.accumulate={now.accumulate} from the start"
    ]


def _whole_average(trainer: Trainer) -> dict[str, Any]:
    state = trainer.ema.state_dict()
    return {**state, "shadow": {n: trainer.strategy.whole(t) for n, t in state["shadow"].items()}}


def _restore_optimizer(strategy: Strategy, checkpoint: Checkpoint) -> None:
    optimizer = strategy.optimizer
    mine = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    try:
        state = checkpoint.section("optimizer", in_files=strategy.shares)
        strategy.load_optimizer(state)
    except ValueError as e:
        then = checkpoint.section("run").get("distributed", {}).get("strategy", "single")
        raise checkpoint.refused(
            f"was written under {then} and does not fit this run's optimizer under "
            f"{strategy.name}: {e}"
        ) from e
    for group, settings in zip(optimizer.param_groups, mine, strict=True):
        group.update(settings)


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out = {}
    for k, v in section.items():
        if isinstance(v, Mapping) and f"{prefix}{k}" != "model.overrides":
            out |= _flat(v, f"{prefix}{k}.")
        else:
            out[prefix + k] = v
    return out


def _compare_runs(run: Run, checkpoint: Checkpoint) -> list[str]:
    """Refuse another model or preset; list every other setting that changed."""
    then, now = _flat(checkpoint.section("run")), _flat(asdict(run))
    notes = []
    for key, value in now.items():
        if key not in then or then[key] == value:
            continue
        if key in _FIXED:
            raise checkpoint.refused(
                f"is from another run: {key}={then[key]} there, {value} here; set it back, or use "
                "another out folder or train.resume=never"
            )
        if not key.startswith(_SILENT):
            notes.append(f"{key}: {then[key]} until the checkpoint, {value} from now on")
    return notes


def _compare_plans(plan: Plan | None, checkpoint: Checkpoint) -> None:
    stored = checkpoint.section("plan")
    if (stored is None) != (plan is None):
        with_plan = "has no 8-bit plan" if stored is None else "has an 8-bit plan"
        raise checkpoint.refused(f"{with_plan}, this run {'has' if stored is None else 'has none'}")
    if plan is None:
        return
    difference = _any_history(Plan.from_dict(stored)).difference(_any_history(plan))
    if difference:
        raise checkpoint.refused(
            f"has another plan (its own against this run's): {difference}; set precision.* back, "
            "or start again with train.resume=never"
        )


def _any_history(plan: Plan) -> Plan:
    """The plan with every amax history at one length: a history is cut or padded on resume."""

    def same(cast: Cast) -> Cast:
        return replace(cast, history=1)

    def row(r):
        if r.recipe is None:
            return r
        recipe = r.recipe
        changed = replace(
            recipe,
            input=same(recipe.input),
            weight=same(recipe.weight),
            grad_output=same(recipe.grad_output),
        )
        return replace(r, recipe=changed)

    return replace(plan, rows=tuple(row(r) for r in plan.rows))
