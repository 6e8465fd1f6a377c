"""lm-evaluation-harness on a model in memory, through its API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..train.tokenizer import Tokenizer


class Harness:
    """The tasks that were asked for, checked before any model is loaded.

    limit: examples of each task, 0 for all. folder: of more task files. Raises ImportError where the
    harness is not installed, ValueError for an unknown task and for a tokenizer that it cannot use.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        tokenizer: Tokenizer,
        *,
        limit: int = 0,
        batch: int = 4,
        folder: str | Path = "",
    ) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ImportError(
                "--tasks: lm-evaluation-harness is not installed; run: pip install 'ottava[eval]'",
                name="lm_eval",
            ) from error
        if tokenizer.hf is None:
            raise ValueError(
                f"--tasks: lm-evaluation-harness needs a Hugging Face tokenizer, not "
                f"{tokenizer.name!r}; leave --tasks out, or give --tokenizer"
            )
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.manager = TaskManager(include_path=str(folder) if folder else None)
        for task in tasks:
            if not self.manager.match_tasks([task]):
                raise ValueError(
                    f"--tasks: lm-evaluation-harness knows no task {task!r}; `lm_eval ls tasks` "
                    "lists them"
                )
        self.tasks, self.tokenizer = self.manager.match_tasks(list(tasks)), tokenizer
        self.limit, self.batch = limit, batch

    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """task -> metric -> value, as lm-evaluation-harness reports them for `model`."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        found = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=self.tokenizer.hf, batch_size=self.batch),
            tasks=self.tasks,
            limit=self.limit or None,
            task_manager=self.manager,
            log_samples=False,
            bootstrap_iters=0,
        )
        return {task: _numbers(values) for task, values in (found or {}).get("results", {}).items()}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The metrics of a task without its name, texts and standard errors."""
    return {
        name.split(",")[0]: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "_stderr" not in name and name != "sample_len"
    }
