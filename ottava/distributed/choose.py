"""Which strategy a run gets. Only the chosen one is imported."""

from __future__ import annotations

import os

from ..config import ConfigError, Run
from .strategy import Strategy


def strategy_of(run: Run) -> Strategy:
    """The strategy that `run.distributed` names, joined with the other processes.

    Raises ConfigError where the processes that were started do not fit it.
    """
    name, started = run.distributed.strategy, int(os.environ.get("WORLD_SIZE", "1"))
    if name == "single":
        if started > 1:
            raise ConfigError(
                f"distributed.strategy: 'single', but {started} processes were started; use "
                "distributed.strategy=ddp or fsdp2, or start one"
            )
        return Strategy(run)
    if "RANK" not in os.environ:
        raise ConfigError(
            f"distributed.strategy: {name!r} is started by torchrun: "
            "torchrun --nproc-per-node=2 -m ottava train run.toml"
        )
    if name == "ddp":
        from .ddp import DDP

        return DDP(run)
    if name == "fsdp2":
        from .fsdp2 import FSDP2

        return FSDP2(run)
    from .deepspeed import DeepSpeed

    return DeepSpeed(run)
