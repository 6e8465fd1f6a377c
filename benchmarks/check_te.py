"""Transformer Engine inside Ottava, on a GPU: recipes beside native and BF16, and the article's code.

    python benchmarks/check_te.py [--steps 20] [--out FILE.json]

First every recipe trains a two-layer dense-w1 on the same tokens; printed are the losses, the peak
memory, how many of a step's kernels were FP8 products, and their names. Then the code of the
founding article (its modules, its fp8_autocast, its step) runs with `transformer_engine.pytorch` as
`te` and with `ottava` as `te`, from the same weights on the same data. The scaler is torch's for
the former, which has none. Exit code 1 where a recipe did not run in FP8, where losses part by more
than LIMIT from autocast's, or where they do not fall.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from collections import Counter
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ottava.bench.machine import describe_how, describe_machine
from ottava.config import Data, Model, Monitor, Optimizer, Precision, Run, Train
from ottava.layers import te as backend
from ottava.train.trainer import Trainer

BASELINE = "amp preset"  # BF16 autocast over FP32 weights
LIMIT = 0.05  # of its loss, at the last step
# cuBLAS writes an operand of 8 bits as q: nvjet_qqtst is FP8 x FP8 -> BF16, nvjet_tst is BF16's
FP8_KERNEL = re.compile(r"e4m3|e5m2|fp8|qmma|qgmma|nvjet_(sm\d+_)?[a-z]*q", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma", re.IGNORECASE)
ROWS = (
    ("amp", "preset"),
    ("bf16", "preset"),
    ("fp8", "tensor"),
    ("fp8", "delayed"),
    ("fp8", "te:delayed"),
    ("fp8", "te:current"),
    ("fp8", "te:block"),
    ("fp8", "te:mxfp8"),
    ("fp8-lean", "tensor"),
    ("fp8-lean", "te:current"),
)


def run_of(preset: str, recipe: str, steps: int) -> Run:
    return Run(
        name=f"check-te-{preset}",
        device="cuda",
        model=Model(name="dense-w1", overrides={"num_hidden_layers": 2}),
        data=Data(source="random", sequence_length=1024, document_mask=False),
        train=Train(preset=preset, steps=steps + 1, micro_batch=4, eval_batches=0, resume="never"),
        optimizer=Optimizer(lr=3e-4, schedule="constant"),
        precision=Precision(recipe=recipe),
        monitor=Monitor(every=0),
    ).check()


def train(preset: str, recipe: str, steps: int) -> dict[str, Any]:
    """Losses of `steps` steps over one batch, memory, and the kernels of one more."""
    trainer = Trainer(run_of(preset, recipe, steps))
    losses, start = [], trainer.data.train.position
    for _ in range(steps):
        trainer.data.train.position = start  # random tokens can only be learnt by heart
        losses.append(trainer.step_once().loss)
        if len(losses) == 2:
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated()
    kernels = kernels_of(trainer.step_once)
    return {
        "losses": losses, "peak_gib": peak / 2**30, **kernels,
        "planned": trainer.plan.summary() if trainer.plan else "",
    }  # fmt: skip


def kernels_of(step) -> dict[str, Any]:
    """Products of one call of `step`, by whether their kernel's name says FP8."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and PRODUCT.search(event.name):
            found[event.name] += 1
    fp8 = {name: n for name, n in found.items() if FP8_KERNEL.search(name)}
    return {"fp8_products": sum(fp8.values()), "products": sum(found.values()), "kernels": fp8}


# ---- the article's own code ----

MODULES = """
class MimoAttentionFP8(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.qkv = te.Linear(dim, dim * 3)
        self.proj = te.Linear(dim, dim)
        self.norm = te.LayerNorm(dim)

class MimoModelFP8(nn.Module):
    def forward(self, x):
        with te.fp8_autocast(enabled=True):
            x = self.attention(x)
            x = self.mlp(x)
        return x

def train_step(data, target):
    optimizer.zero_grad()
    with te.fp8_autocast(enabled=True):
        output = model(data)
        loss = criterion(output, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss
"""
DIM, HEADS = 512, 8


def article(te: ModuleType, scaler, state: dict | None, steps: int) -> dict[str, Any]:
    """The article's model and step with `te`, in BF16 weights; `state`: weights to start from."""
    names: dict[str, Any] = {"te": te, "nn": nn, "criterion": F.mse_loss, "scaler": scaler}
    exec(MODULES, names)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        out = F.scaled_dot_product_attention(*(t.transpose(-3, -2) for t in (q, k, v)))
        return x + self.proj(out.transpose(-3, -2).flatten(-2))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc1 = te.LayerNorm(DIM), te.Linear(DIM, 2 * DIM)
            self.fc2 = te.Linear(2 * DIM, DIM)

        def forward(self, x):
            return x + self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh"))

    names["MimoAttentionFP8"].forward = attend
    model = names["MimoModelFP8"]()
    model.attention, model.mlp = names["MimoAttentionFP8"](DIM, HEADS), Mlp()
    model = names["model"] = model.cuda()
    if state is not None:
        missing = model.load_state_dict(state, strict=False).missing_keys
        if missing:  # the two would start apart
            raise RuntimeError(f"transformer_engine's model has no {missing[0]}")
    start = {k: v.detach().clone() for k, v in model.state_dict().items() if torch.is_tensor(v)}
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 128, DIM, generator=generator).cuda()
    target = torch.roll(x, 1, -1)
    losses = [names["train_step"](x, target).item() for _ in range(steps)]
    kernels = kernels_of(lambda: names["train_step"](x, target))
    return {"losses": losses, "start": start, **kernels}


def both_articles(steps: int) -> dict[str, Any]:
    import ottava

    te = backend.library()
    theirs = article(te, torch.amp.GradScaler("cuda", init_scale=2.0**16), None, steps)
    weights = {k: v for k, v in theirs.pop("start").items() if "_extra_state" not in k}
    ours = article(ottava, ottava.amp.GradScaler(init_scale=2.0**16), weights, steps)
    ours.pop("start")
    return {"transformer_engine": theirs, "ottava": ours}


# ---- what is printed ----


def attempt(work, *arguments) -> dict[str, Any]:
    try:
        return work(*arguments)
    except ValueError as error:  # a recipe that this device has not
        return {"refused": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def line(name: str, row: dict[str, Any]) -> str:
    if "losses" not in row:
        return f"{name:24} {row.get('refused') or row.get('failed')}"
    losses = row["losses"]
    shown = " ".join(f"{losses[i]:8.4f}" for i in (0, 1, 4, 9, -1) if i < len(losses))
    peak = f"{row['peak_gib']:6.2f} GiB" if "peak_gib" in row else " " * 10
    return f"{name:24} {shown} {peak}  {row['fp8_products']:4} of {row['products']} products in FP8"


def faults(rows: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong, a line each. A refusal is not."""
    found, plain = [], rows[BASELINE].get("losses")
    for name, row in rows.items():
        if "failed" in row:
            found.append(f"{name}: {row['failed']}")
        elif "losses" in row:
            last = row["losses"][-1]
            if not last < row["losses"][0]:
                found.append(f"{name}: the loss did not fall")
            if name.startswith(("fp8", "article")) and not row["fp8_products"]:
                found.append(f"{name}: no product ran in FP8")
            if "article" not in name and plain and abs(last - plain[-1]) > LIMIT * plain[-1]:
                found.append(f"{name}: loss {last:.4f}, and autocast's is {plain[-1]:.4f}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("check_te: it is for a GPU, and torch finds none here", file=sys.stderr)
        return 2
    try:
        backend.library()
    except ValueError as error:
        print(f"check_te: {error}", file=sys.stderr)
        return 2
    print(f"Transformer Engine {backend.installed()}, torch {torch.__version__}")
    print(f"{'':24} {'step 1':>8} {'2':>8} {'5':>8} {'10':>8} {options.steps:8}")
    rows: dict[str, dict[str, Any]] = {}
    for preset, recipe in ROWS:
        name = f"{preset} {recipe}"
        rows[name] = attempt(train, preset, recipe, options.steps)
        print(line(name, rows[name]), flush=True)
        for kernel, count in sorted(rows[name].get("kernels", {}).items(), key=lambda k: -k[1])[:6]:
            print(f"    {count:4} x {kernel[:110]}")
        torch.cuda.empty_cache()
    pair = attempt(both_articles, options.steps)
    for name, row in pair.items() if "ottava" in pair else [("both", pair)]:
        rows[f"article {name}"] = row
        print(line(f"article {name}", row), flush=True)
    wrong = faults(rows)
    for fault in wrong:
        print(f"FAULT  {fault}")
    if options.out:
        facts = {"machine": describe_machine(), "how": describe_how(), "rows": rows}
        with open(options.out, "w", encoding="utf-8") as f:
            json.dump(facts, f, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
