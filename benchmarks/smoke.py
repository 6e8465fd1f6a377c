"""Every fused path on one GPU, small, in under a minute: run it before anything long.

    python benchmarks/smoke.py      # exit code 1 if a path fails or strays from amp by 0.03 nats
"""

import sys
import traceback
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ottava.bench.workloads import WORKLOADS
from ottava.train.trainer import Trainer

PATHS = (  # preset, recipe, CUDA graph, recompute
    ("fp8-lean", "preset", "off", "none"),
    ("fp8", "preset", "off", "none"),
    ("fp8-lean", "delayed", "off", "none"),
    ("fp8-lean", "row", "off", "none"),
    ("fp8-lean", "block", "off", "none"),
    ("fp8-lean", "preset", "on", "none"),
    ("fp8-lean", "delayed", "on", "none"),
    ("fp8-lean", "preset", "off", "mlp"),
    ("fp8-lean", "preset", "off", "layer"),
    ("fp8-lean", "preset", "on", "layer"),
    ("storage", "preset", "off", "none"),
)


def losses(preset: str, recipe: str = "preset", graph: str = "off", recompute: str = "none"):
    """Four training losses of two layers of W1's model, 2 x 2048 tokens a step."""
    run = WORKLOADS["W1"].run(preset, steps=100, graph=graph, recipe=recipe, recompute=recompute)
    small = replace(run.model, overrides={"num_hidden_layers": 2})
    run = replace(run, model=small, train=replace(run.train, micro_batch=2)).check()
    trainer = Trainer(run, device="cuda")
    return [trainer.step_once().loss for _ in range(4)]


def main() -> int:
    """Run every path; the exit code."""
    want, bad = losses("amp"), 0
    print("amp", want, flush=True)
    for path in PATHS:
        try:
            got = losses(*path)
        except Exception:
            traceback.print_exc()
            print(*path, "FAILED", flush=True)
            bad += 1
            continue
        near = all(abs(a - b) < 0.03 for a, b in zip(want, got, strict=True))
        print(*path, got, "ok" if near else "FAR", flush=True)
        bad += not near
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
