"""Faults from outside a run's process: functions of a Case, which start it, harm it, start it again.

Nothing here says what should come out; faults.py measures that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..train.checkpoint import checkpoints
from .fault_inside import small_files
from .fault_runs import Case, Inject, free_port, until, write_data

Act = Callable[[Case], None]

# ---- from outside -----------------------------------------------------------------------------


def once(inject: Inject) -> Act:
    """Disturb the first attempt; start again, undisturbed, if it did not get to the end."""

    def act(case: Case) -> None:
        if case.attempt(inject):
            case.attempt()

    return act


def with_settings(act: Act, **sections: dict[str, Any]) -> Act:
    """The same under other settings."""

    def changed(case: Case) -> None:
        case.change(**sections)
        act(case)

    return changed


def spoiled_line(instead: bytes) -> Act:
    """A line of the data is not what it should be; then it is put right."""

    def act(case: Case) -> None:
        path = Path(case.run.data.source)
        write_data(path, line=150, instead=instead)
        case.attempt()
        write_data(path)
        case.attempt()

    return act


def changed_data(case: Case) -> None:
    """The data changes between two attempts; then it is put right."""
    path = Path(case.run.data.source)
    killed_at(case, case.run.train.steps // 2)
    write_data(path, line=150, instead=b'{"text": "another line"}')
    case.attempt()
    write_data(path)
    case.attempt()


def killed_at(case: Case, step: int, number: int = signal.SIGKILL) -> None:
    """One attempt that gets a signal as soon as it has saved `step` or a later one."""
    pid = case.start()
    until(lambda: case.newest() >= step, pid)
    os.kill(pid, number)
    case.ended([pid])


def told_to_stop(number: int) -> Act:
    """A signal that a run answers by saving."""

    def act(case: Case) -> None:
        killed_at(case, case.run.train.steps // 2, number)
        case.attempt()

    return act


def harmed(harm: Callable[[Path], None]) -> Act:
    """The newest checkpoint is damaged while the run does not run."""

    def act(case: Case) -> None:
        killed_at(case, case.run.train.steps // 2)
        harm(next(path for _, path in checkpoints(case.checkpoints)))
        case.attempt()

    return act


def flip_a_bit(path: Path) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(path: Path) -> None:
    file = path / "optimizer.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def lose_a_file(path: Path) -> None:
    (path / "state.json").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def killed_at_random(kills: int) -> Act:
    """SIGKILL `kills` times, each at a random moment of an attempt; then one to the end."""

    def act(case: Case) -> None:
        begun = time.monotonic()
        for _ in range(kills):
            pid, before = case.start(), case.newest()
            # of an attempt that stands still nothing could be lost: let most of them get further
            if case.random.random() < 0.8:
                until(lambda before=before: case.newest() > before, pid)
            time.sleep(case.random.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
            case.ended([pid])
            assert time.monotonic() - begun < 600.0
        case.attempt()

    return act


def killed_while_saving(kills: int) -> Act:
    """SIGKILL `kills` times while a checkpoint is being written; then one attempt to the end."""

    def saving(case: Case) -> bool:
        return case.checkpoints.is_dir() and any(
            name.startswith(".partial-step") and "discarded" not in name
            for name in os.listdir(case.checkpoints)
        )

    def act(case: Case) -> None:
        for _ in range(kills):
            shutil_partials(case.checkpoints)
            pid = case.start()
            until(lambda: saving(case), pid)
            time.sleep(case.random.uniform(0.0, 0.004))
            os.kill(pid, signal.SIGKILL)
            case.interrupted += saving(case)
            case.ended([pid])
        case.attempt()

    return act


def shutil_partials(folder: Path) -> None:
    """Clear what the last kill left, so that the next save can be seen to begin."""
    for path in folder.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def full_disk(case: Case) -> None:
    """The checkpoints lie on a disk that fills up; then there is room again. A quota on the size
    of files, where no small disk can be mounted."""
    case.checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2200k", "tmpfs", str(case.checkpoints)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        case.attempt(small_files(13, 100_000))
        case.attempt()
        return
    try:
        case.attempt()
        grow = ["mount", "-o", "remount,size=64m", str(case.checkpoints)]
        subprocess.run(grow, check=True)
        case.attempt()
        kept = case.folder / "kept"
        shutil.copytree(case.checkpoints, kept)
    finally:
        subprocess.run(["umount", str(case.checkpoints)], check=True)
    case.checkpoints.rmdir()
    shutil.move(kept, case.checkpoints)


def disk_full_once(case: Case) -> None:
    """No room for the checkpoint of one step, and room again for the next."""
    at = case.run.train.steps // 2
    case.attempt(small_files(at, 100_000, until=at + 3))


def all_damaged(case: Case) -> None:
    """No checkpoint is whole: the run is refused, and started again from nothing when told to."""
    killed_at(case, case.run.train.steps // 2)
    for _, path in checkpoints(case.checkpoints):
        flip_a_bit(path)
    case.attempt()
    case.change(train={"resume": "never"})
    case.attempt()


# ---- two ranks --------------------------------------------------------------------------------


def two_ranks(case: Case, inject: Inject | None = None) -> list[int]:
    """Start the run as two ranks that sum their gradients; their process ids."""
    case.change(distributed={"strategy": "ddp", "timeout_s": 5.0}, train={"micro_batch": 1})
    port = free_port()
    return [case.start(inject, rank=rank, world=2, port=port) for rank in (0, 1)]


def undisturbed_ranks(case: Case) -> None:
    case.ended(two_ranks(case))


def lost_rank(number: int) -> Act:
    """A signal ends (SIGKILL) or stops (SIGSTOP) rank 1 in the middle; then both start again."""

    def act(case: Case) -> None:
        pids = two_ranks(case)
        until(lambda: case.newest() >= case.run.train.steps // 2, pids[0])
        time.sleep(case.random.uniform(0.0, 0.2))
        os.kill(pids[1], number)
        if number == signal.SIGSTOP:
            case.ended(pids[:1], 40.0)
            os.kill(pids[1], signal.SIGKILL)
            case.ended(pids[1:])
        else:
            case.ended(pids, 40.0)
        case.ended(two_ranks(case))

    return act
