"""The runs that faults are injected into, each attempt in a process of its own, and what it did.

A `Case` is one run in a folder: started, disturbed, started again, until it is done. Everything that
is said about it is read from what it left on the disk: run.jsonl, checkpoints, exit codes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..config import Run, run_from_dict
from ..monitor.diagnose import findings
from ..monitor.facts import Facts
from ..monitor.metrics import read_metrics
from ..train.checkpoint import Checkpoint, CheckpointError, checkpoints
from ..train.trainer import Trainer

SAVE_EVERY = 5
_MODEL = {
    "hidden_size": 32, "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 0],
    "num_attention_heads": 2, "head_dim": 16, "v_head_dim": 16, "swa_num_key_value_heads": 1,
    "num_key_value_heads": 1, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "intermediate_size": 64, "sliding_window": 8,
}  # fmt: skip
Inject = Callable[[Trainer], None]


def write_data(path: Path, *, line: int | None = None, instead: bytes = b"") -> None:
    """300 documents as JSONL; `line` (from 1) is written as `instead`."""
    rows = [
        b'{"text": "line %d: %d is the square of %d, and %d its rest"}' % (i, i * i, i, i % 7)
        for i in range(300)
    ]
    if line is not None:
        rows[line - 1] = instead
    path.write_bytes(b"\n".join(rows) + b"\n")


def make_run(folder: Path, name: str, steps: int, **sections: dict[str, Any]) -> Run:
    """A run of `steps` steps on a MiMo-V2 of about 50 thousand parameters, in `folder`/`name`."""
    data: dict[str, dict[str, Any]] = {
        "model": {"name": "demo", "overrides": _MODEL},
        "data": {
            "source": str(folder / "data.jsonl"), "sequence_length": 16, "validation_fraction": 0.1,
        },
        "train": {
            "preset": "fp8", "steps": steps, "micro_batch": 2, "eval_batches": 8,
            "checkpoint_every": SAVE_EVERY, "keep_last": 3,
        },
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "monitor": {"every": 5},
        "heal": {"after": 3},
    }  # fmt: skip
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    own = {"name": name, "out": str(folder / name), "device": "cpu"}
    return run_from_dict({**own, **data}).check()


@dataclass
class Case:
    """One run and all that happened to it. `executed`: steps computed, over all attempts."""

    folder: Path
    run: Run
    random: random.Random
    executed: int = 0
    interrupted: int = 0  # kills that hit a checkpoint being written
    codes: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # the last line of each attempt that failed
    _starts: int = 0

    @property
    def out(self) -> Path:
        return Path(self.run.out)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def change(self, **sections: dict[str, Any]) -> None:
        """Change keys of the run for the attempts to come."""
        for name, values in sections.items():
            section = replace(getattr(self.run, name), **values)
            self.run = replace(self.run, **{name: section}).check()

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return next((step for step, _ in checkpoints(self.checkpoints)), 0)

    # ---- attempts ----

    def start(self, inject: Inject | None = None, *, rank: int = 0, world: int = 1, port: int = 0):
        """Fork a process that runs, or continues, the run; its process id."""
        pid = os.fork()
        if not pid:
            _child(self, inject, rank, world, port)
        return pid

    def attempt(self, inject: Inject | None = None, *, seconds: float = 600.0) -> int:
        """One attempt to its end; its exit code (negative: the signal that ended it)."""
        return self.ended([self.start(inject)], seconds)[0]

    def ended(self, pids: list[int], seconds: float = 600.0) -> list[int]:
        """Wait for processes, note what they did, and return their exit codes."""
        codes = _wait(pids, seconds)
        self.codes += codes
        for rank, code in enumerate(codes):
            lines = self._said(rank).read_text(errors="replace").strip().splitlines()
            if code > 0 and lines:
                self.said.append(lines[-1])
        self._note()
        return codes

    def _said(self, rank: int) -> Path:
        return self.folder / f"{self.run.name}-rank{rank}.txt"

    def _note(self) -> None:
        """Count the steps that an attempt computed, and ask diagnose what it sees now."""
        metrics = read_metrics(self.out)
        begins = [i for i, x in enumerate(metrics.lines) if x["kind"] in ("start", "resume")]
        if not begins:
            return
        computed = sum(x["kind"] == "step" for x in metrics.lines[begins[-1] :])
        # killed before it could say that it continues, an attempt has computed nothing
        stamp = hash((len(begins), str(metrics.lines[begins[-1]]), computed))
        if stamp != self._starts:
            self.executed += computed
        self._starts = stamp
        for found in findings(Facts(metrics)):
            if found.rule not in self.rules:
                self.rules.append(found.rule)

    # ---- what is left on the disk ----

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind in run.jsonl."""
        return read_metrics(self.out).of(kind)

    @property
    def lost(self) -> int:
        """Steps that were computed and are not part of the finished run."""
        taken = {x["step"]: x for x in self.lines("step")}
        return self.executed - sum(bool(x.get("stepped")) for x in taken.values())

    @property
    def loss(self) -> float | None:
        """Validation loss after the last step; None where the run did not get there."""
        found = [x for x in self.lines("eval") if x["step"] == self.run.train.steps]
        return float(found[-1]["loss"]) if found else None

    def weights(self) -> bytes | None:
        """The weights of the last step, as bytes; None where they were not saved."""
        path = self.checkpoints / f"step-{self.run.train.steps:08d}"
        try:
            return (Checkpoint.open(path).path / "model.safetensors").read_bytes()
        except CheckpointError:
            return None


def _child(case: Case, inject: Inject | None, rank: int, world: int, port: int) -> None:
    """The forked process: exit code 2 where the request was wrong, 1 where the run failed."""
    code = 1
    try:
        out = os.open(case._said(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        if world > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        torch.set_num_threads(1)
        try:
            trainer = Trainer(case.run)
        except (ValueError, OSError, CheckpointError):
            code = 2
            raise
        if inject is not None:
            inject(trainer)
        code = trainer.run(quiet=True).exit_code
    except BaseException as error:
        traceback.print_exception(error)
        text = " ".join(str(error).split())
        os.write(2, f"{type(error).__name__}: {text}\n".encode())
    finally:
        os._exit(code)


def _wait(pids: list[int], seconds: float) -> list[int]:
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def until(condition: Callable[[], bool], pid: int, seconds: float = 60.0) -> bool:
    """Wait for `condition` while process `pid` lives; whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        with contextlib.suppress(ChildProcessError):
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None or time.monotonic() > end:
                return condition()
        time.sleep(0.0005)
    return True


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
