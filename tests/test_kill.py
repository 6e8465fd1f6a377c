"""A run killed at random moments and started again gives the same bits as one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ottava.monitor.metrics import read_metrics
from ottava.train.checkpoint import Checkpoint

HERE = Path(__file__).parent
TIMES = ("tok_per_s", "step_ms", "percent", "memory_gib")


def python(*arguments, **kwargs):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=env, text=True, **kwargs)


@pytest.mark.parametrize("preset, kills, seed", [("fp32", 4, 1), ("fp8-lean", 10, 2)])
def test_killed_at_random_moments_gives_the_same_bits(tmp_path, preset, kills, seed):
    process = python(
        HERE / "killed_run.py", tmp_path, preset, kills, seed,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["status"] == 0, err
    # each kill must have hit a working run, at different steps
    assert all(killed for _, killed in result["reached"]) and len(result["reached"]) == kills
    assert len({step for step, _ in result["reached"]}) >= kills - 2, result
    runs = [tmp_path / name for name in ("undisturbed", "killed")]
    paths = [Checkpoint.open(r / "checkpoints" / "step-00000032").path for r in runs]
    files = sorted(p.name for p in paths[0].glob("*.safetensors"))
    assert {"model.safetensors", "optimizer.safetensors", "ema.safetensors"} <= set(files)
    for name in files:
        a, b = ((p / name).read_bytes() for p in paths)
        assert a == b, name
    lines = [
        [
            {k: v for k, v in x.items() if k not in TIMES and not k.endswith("_ms")}
            for x in read_metrics(r).lines
            if x["kind"] in ("step", "eval", "save")
        ]
        for r in runs
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 32 + 4 + 32
    assert not [n for n in os.listdir(paths[1].parent) if not n.startswith("step-")]


INTERRUPTED = """
import pathlib, signal, sys, time
from tiny_run import tiny_run
from ottava.train.trainer import Trainer
run = tiny_run(pathlib.Path(sys.argv[1]), steps=1000)
t = Trainer(run)
step = t.step_once
def slow():
    print("step", flush=True)
    time.sleep(float(sys.argv[2]))
    return step()
t.step_once = slow
sys.exit(t.run(quiet=True).exit_code)
"""


@pytest.mark.parametrize(
    "seconds, signals, code, saves",
    [
        (0.2, [signal.SIGTERM], 143, True),
        (60.0, [signal.SIGINT, signal.SIGINT], 130, False),
    ],
)
def test_told_to_stop(tmp_path, seconds, signals, code, saves):
    process = python(
        "-c", INTERRUPTED, tmp_path, seconds, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == "step\n", process.stderr.read()
    begun = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert time.monotonic() - begun < 20
    folder = tmp_path / "run" / "checkpoints"
    assert folder.exists() == saves
    if saves:
        assert "finishing this step" in err
        assert Checkpoint.open(next(folder.glob("step-*"))).step >= 1
