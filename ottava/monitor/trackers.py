"""Where a run's numbers go besides run.jsonl: TensorBoard, trackio, Weights & Biases.

A tracker takes numbers by name at a step, nothing else. Steps may come again (a run that continued,
or went back by itself), so none of them is asked to count. What a tracker keeps lies in the run's
folder, except what its own settings send elsewhere (WANDB_MODE, TRACKIO_SPACE_ID and the like).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """What a run asks of a tracker. Anything with these three can be given to `MetricsWriter`."""

    name: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers, which may be NaN or infinite, of a step."""
        ...

    def close(self) -> None:
        """Write what is not yet written; nothing is logged after it."""
        ...


class TensorBoard:
    """Event files in `<folder>/tensorboard`; what lies beyond `after_step` there is hidden."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, after_step: int | None, **_: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if after_step is None else after_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """A run of trackio's project; `trackio show` draws it."""

    name = "trackio"

    def __init__(
        self, folder: Path, *, project: str, run: str, config: Mapping[str, Any],
        after_step: int | None,
    ) -> None:  # fmt: skip
        import trackio

        self._run = trackio.init(
            project=project, name=run, config=dict(config), embed=False,
            resume="never" if after_step is None else "allow",
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        import trackio

        trackio.finish()


class WandB:
    """A run of Weights & Biases in `<folder>/wandb`, with steps of its own so that they may repeat."""

    name = "wandb"

    def __init__(
        self, folder: Path, *, project: str, run: str, config: Mapping[str, Any],
        after_step: int | None,
    ) -> None:  # fmt: skip
        import wandb

        mark = folder / "wandb-id.txt"
        known = mark.read_text().strip() if after_step is not None and mark.exists() else None
        self._run = wandb.init(
            project=project, name=run, config=dict(config), dir=str(folder), id=known,
            resume="allow" if known else None, reinit="create_new",
        )  # fmt: skip
        mark.write_text(self._run.id + "\n")
        self._run.define_metric("*", step_metric="steps")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "steps": step})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, tuple[Any, str]] = {  # name -> (class, what installs it)
    "tensorboard": (TensorBoard, "tensorboard"),
    "trackio": (Trackio, "trackio"),
    "wandb": (WandB, "wandb"),
}


def check_installed(names: Iterable[str]) -> None:
    """Raises ImportError naming the first tracker that is not installed, and what installs it."""
    for name in names:
        package = TRACKERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"log.trackers: {name} is not installed; run: pip install {package}, or take it out "
                "of log.trackers",
                name=package,
            )


def open_trackers(
    names: Sequence[str], folder: str | Path, *, project: str, run: str, config: Mapping[str, Any],
    after_step: int | None = None,
) -> list[Tracker]:  # fmt: skip
    """The trackers by these names, begun. after_step: None for a run from nothing, else where it goes on.

    Raises ImportError naming what is missing, RuntimeError where one does not start; those before it
    are then closed.
    """
    check_installed(names)
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(TRACKERS[name][0](Path(folder), project=project, run=run, config=config,
                                            after_step=after_step))  # fmt: skip
        except Exception as error:  # each library has its own kinds
            for tracker in opened:
                tracker.close()
            why = " ".join(str(error).split())[:200]
            raise RuntimeError(
                f"log.trackers: {name} did not start: {why}; take it out of log.trackers, or see its "
                "own settings (offline: WANDB_MODE=offline)"
            ) from error
    return opened
