"""DeepSpeed's ZeRO-1, -2 and -3 under the trainer's loop. The only file that imports deepspeed.

Our AdamW runs on ZeRO's flat FP32 partitions; its 8-bit moments are in groups along them. Layers
compute as their plan says, DeepSpeed decides nothing about precision (ds_config.py). A loss that is
not finite makes every gradient NaN, and ZeRO then skips the step on all ranks. A checkpoint holds the
whole weights, and of each rank its partitions: it continues on as many ranks as before.
"""

from __future__ import annotations

import importlib.util
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import prepare
from ..config import ConfigError, Run
from ..layers.delayed import agree_amax, commit_amax
from ..optim.adamw import AdamW
from ..optim.loss_scaler import GradScaler
from .ds_config import apply, read
from .ranks import Ranks, all_max


class PartitionedAdamW(AdamW):
    """AdamW on ZeRO's partitions, whose gradients are ZeRO's own: it reuses the memory of some."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: ZeRO clears them after its step."""


class DeepSpeed(Ranks):
    """See the module docstring."""

    name = "deepspeed"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.applied = apply(read(run.distributed.deepspeed), run, self.world)
        self.config = self.applied.run
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                "distributed.strategy: deepspeed is not installed; pip install deepspeed"
            )

    def prepare(self, model: nn.Module) -> AdamW:
        import deepspeed

        self.part_ways(model)
        self.model = model
        optimizer = self._optimizer(model)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # ZeRO makes a first step to have all states; it must change nothing
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.applied.engine, dist_init_required=False
        )
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.zero = self.engine.optimizer
        self.zero.check_grad_overflow = True  # also where ZeRO takes FP32 for safe
        self.forward = self.engine
        self.optimizer = optimizer
        return optimizer

    def _optimizer(self, model: nn.Module) -> AdamW:
        o, settings = self.config.optimizer, self.config.settings
        return PartitionedAdamW(
            prepare.parameter_groups(model, o.weight_decay),
            lr=self.config.peak_lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay,
            master="fp32", states=settings.states, seed=self.config.seed + (self.rank << 16),
        )  # fmt: skip

    # ---- a step ----

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        ok = torch.where(loss.detach().isfinite(), 1.0, math.nan)
        with self.connected():
            self.engine.set_gradient_accumulation_boundary(last)
            # ZeRO takes means over ranks; the loss is divided by the tokens of all ranks already
            self.engine.backward(loss * ok * self.world, scale_wrt_gas=False)
            if not last:
                self.engine.step()

    def norm(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """ZeRO measures, clips, decides and updates at once: the step is made here."""
        own = list(self.model.parameters())
        agree_amax(own, all_max)
        with self.connected():
            self.engine.step()
        if self.engine.was_step_applied():
            commit_amax(own)
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(math.inf if norm is None else norm, dtype=torch.float32)

    def exact_norm(self, parameters: list[torch.Tensor]) -> float:
        return math.inf

    def step(self, scaler: GradScaler, grad_scale: float | None) -> bool:
        return self.engine.was_step_applied()

    # ---- state ----

    @property
    def _partitions(self) -> list[torch.Tensor]:
        """This rank's flat FP32 masters."""
        if self.applied.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return list(self.zero.single_partition_of_fp32_groups)

    def whole(self, t: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(t, "ds_id"):
            return t
        import deepspeed

        with deepspeed.zero.GatheredParameters([t]):
            return t.detach().cpu().clone() if self.is_main else None

    def loading(self, model: nn.Module) -> AbstractContextManager:
        if self.applied.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)

    def optimizer_state(self) -> dict[str, Any]:
        mine = [
            {"partition": p.detach().cpu(),
             "state": {k: v.cpu() if isinstance(v, torch.Tensor) else v
                       for k, v in self.optimizer.state[p].items()}}
            for p in self._partitions
        ]  # fmt: skip
        all_of_them: list[Any] | None = [None] * self.world if self.is_main else None
        with self.connected():
            dist.gather_object(mine, all_of_them, dst=0)
        return {"ranks": all_of_them, "stage": self.applied.stage}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        there, stage = state.get("ranks"), self.applied.stage
        if there is None or (len(there), state["stage"]) != (self.world, stage):
            kind = "another strategy" if there is None else (
                f"ZeRO-{state['stage']} on {len(there)} rank(s)")  # fmt: skip
            raise ValueError(
                f"it was written by {kind}, and ZeRO's partitions continue only as they were cut "
                f"(here: ZeRO-{stage} on {self.world}); export it and start from its weights"
            )
        for p, saved in zip(self._partitions, there[self.rank], strict=True):
            p.data.copy_(saved["partition"])
            self.optimizer.state[p] = {
                k: v.to(p.device, copy=True) if isinstance(v, torch.Tensor) else v
                for k, v in saved["state"].items()
            }

    def notes(self) -> list[str]:
        return [f"{self.world} ranks, DeepSpeed ZeRO-{self.applied.stage}", *self.applied.notes]
