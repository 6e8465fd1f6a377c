"""Runs a tiny training run in processes that get killed; a script for test_kill.py.

    python killed_run.py FOLDER PRESET KILLS SEED      prints one JSON object

Each attempt is a forked process of its own, so the imports are paid once. SIGKILL comes at a random
moment: two during start-up, the others up to a step and a half after one or two more checkpoints,
so about as often while saving as while computing. The next attempt continues. Last, one attempt runs
to its end. Another run, never disturbed, is made in the folder beside it.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_run import tiny_run

from ottava.train.trainer import Trainer

STEPS = 32


def start(folder, preset, out):
    """Fork a process that runs (or continues) the run in `out`; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        train = {"checkpoint_every": 1, "eval_every": 8, "keep_last": 2}
        run = tiny_run(folder, preset, steps=STEPS, out=out, train=train, ema={"decay": 0.9})
        code = Trainer(run).run(quiet=True).exit_code
    finally:
        os._exit(code)


def newest(folder):
    """The step of the newest checkpoint of the killed run; 0 without."""
    whole = (folder / "killed" / "checkpoints").glob("step-*")
    return max((int(p.name[5:]) for p in whole), default=0)


def main(folder, preset, kills, seed):
    rng = random.Random(seed)
    torch.set_num_threads(1)
    begun = time.monotonic()
    _, status = os.waitpid(start(folder, preset, "undisturbed"), 0)
    assert status == 0, f"the undisturbed run ended with {status}"
    seconds = time.monotonic() - begun
    reached = []
    for attempt in range(kills):
        pid, before = start(folder, preset, "killed"), newest(folder)
        more = 0 if attempt in (0, kills // 2) else rng.randint(1, 2)
        while newest(folder) < before + more:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 1.5) * seconds / STEPS)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        reached.append([newest(folder), os.WIFSIGNALED(status)])
    _, status = os.waitpid(start(folder, preset, "killed"), 0)
    print(json.dumps({"status": status, "reached": reached, "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
