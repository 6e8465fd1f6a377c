"""Captured steps against launched ones on this GPU: whether they give the same bits, and how fast.

    python benchmarks/check_graph.py exact [CASE ...]      # 4 layers of dense-w1, every bit compared
    python benchmarks/check_graph.py speed [PRESET ...]    # dense-w1, 8 x 2048 and 1 x 2048 tokens
    python benchmarks/check_graph.py all [--json FILE]

Exit code: 0 all is well, 1 a bit differs or 1 x 2048 tokens in fp8-lean are slower than in bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from ottava import prepare
from ottava.bench.workloads import WORKLOADS
from ottava.kernels.split import SplitParameter
from ottava.train.graph import CapturedStep, CaptureError, held_by_graphs
from ottava.train.trainer import Trainer

LAYERS, STEPS = 4, 8
GB = 1e9
DOCUMENTS = {"source": "stdlib", "max_bytes": 4_000_000, "document_mask": True}
CASES = {
    "fp8-lean": ("fp8-lean", {}),
    "fp8-lean clipped": ("fp8-lean", {"optimizer": {"clip_norm": 0.05}}),
    "fp8-lean layers recomputed": ("fp8-lean", {"train": {"recompute": "layer"}}),
    "fp8-lean documents": ("fp8-lean", {"data": DOCUMENTS}),
    "fp8": ("fp8", {}),
    "fp8 delayed": ("fp8", {"precision": {"recipe": "delayed"}}),
    "fp8 block": ("fp8", {"precision": {"recipe": "block"}}),
    "fp8 accumulated": ("fp8", {"train": {"accumulate": 2}}),
    "bf16": ("bf16", {}),
    "amp": ("amp", {}),
}
OWN_LOOP = "own loop"


def run_of(preset: str, *, graph: str, batch: int = 8, layers: int | None = None, **sections):
    """W1's run with other settings; a changing learning rate, so that a frozen one would show."""
    run = WORKLOADS["W1"].run(preset, steps=10_000)
    sections = {"train": {}, "optimizer": {}, **sections}
    sections["train"] = {"micro_batch": batch, "graph": graph, **sections["train"]}
    sections["optimizer"] = {"lr": 3e-4, "warmup_steps": 100, **sections["optimizer"]}
    if layers:
        sections["model"] = {"overrides": {"num_hidden_layers": layers}}
    for name, changes in sections.items():
        run = replace(run, **{name: replace(getattr(run, name), **changes)})
    return run.check()


# ---- the same bits ----


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    """Every tensor that training changes, by name."""
    out = {}
    for name, p in model.named_parameters():
        out[name] = p.detach()
        if isinstance(p, SplitParameter):
            parts = {"residual": p.residual, "scale": p.scale, "amax": p.amax}
            out |= {f"{name}.{k}": t for k, t in parts.items() if t is not None}
        state = optimizer.state.get(p, {})
        out |= {f"{name}.{k}": t for k, t in state.items() if isinstance(t, torch.Tensor)}
        out[f"{name}.step"] = torch.tensor(state.get("step", -1))
    return out


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str:
    """The first tensors that differ, and in how many bytes; "" where none does."""
    found = []
    for name, x in a.items():
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, b[name]))
        if not torch.equal(left, right):
            found.append(f"{name}: {int((left != right).sum())} of {left.numel()} bytes")
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def trained(preset: str, graph: str, sections: dict):
    """(losses, norms, tensors, trainer) after STEPS steps."""
    trainer = Trainer(run_of(preset, graph=graph, layers=LAYERS, **sections), device="cuda")
    results = [trainer.step_once() for _ in range(STEPS)]
    numbers = [(r.loss, r.grad_norm, r.stepped) for r in results]
    return numbers, everything(trainer.model, trainer.optimizer), trainer


def own_loop(captured: bool):
    """The same for CapturedStep, beside a loop as one writes it."""
    run = run_of("fp8-lean", graph="off", layers=LAYERS)
    torch.manual_seed(0)
    model = prepare.build_model(run, "cuda")
    prepare.convert_for(run, model, "cuda")
    optimizer = prepare.make_optimizer(run, model)
    prepare.fuse(run, model, optimizer)
    generator = torch.Generator().manual_seed(1)
    shape = (8, 2048)
    batches = [torch.randint(0, 32_000, shape, generator=generator) for _ in range(STEPS)]

    def forward(batch):
        return model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss

    step = CapturedStep(forward, optimizer, {"ids": batches[0]}) if captured else None
    losses = []
    for i, ids in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 / (1 + i)
        if step is not None:
            losses.append(step({"ids": ids}))
            continue
        loss = forward({"ids": ids.cuda()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [x.item() for x in losses], everything(model, optimizer), (model, step)


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def exact(names: list[str]) -> bool:
    """Compare every case; whether all are the same."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as deterministic cuBLAS asks
    torch.use_deterministic_algorithms(True)  # with warn_only flash attention stays as it is
    torch.utils.deterministic.fill_uninitialized_memory = False
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("ottava").setLevel(logging.DEBUG)  # the trace of a capture that fails
    good = True
    for name in names:
        begun = time.perf_counter()
        if name == OWN_LOOP:
            runs = [lambda: own_loop(False), lambda: own_loop(True)]
        else:
            preset, sections = CASES[name]
            runs = [
                lambda p=preset, s=sections: trained(p, "off", s),
                lambda p=preset, s=sections: trained(p, "on", s),
            ]
        try:
            numbers, tensors, _launched = runs[0]()
            others, copies, _captured = runs[1]()
        except (CaptureError, RuntimeError) as error:
            print(f"{name:28} FAILED: {error}", flush=True)
            good = False
            release()
            continue
        said = difference(tensors, copies)
        if numbers != others:
            said = f"numbers {numbers} against {others}; {said}"
        verdict = f"same bits after {STEPS} steps, loss {numbers[-1]}"
        if said:
            good = False
            copies = _captured = None
            again, repeat, _again = runs[0]()
            repeats = again == numbers and not difference(tensors, repeat)
            verdict = f"DIFFERS (launched steps {'do' if repeats else 'do not'} repeat): {said}"
            repeat = _again = None
        print(f"{name:28} {verdict}  [{time.perf_counter() - begun:.0f} s]", flush=True)
        tensors = copies = _launched = _captured = None
        release()
    return good


# ---- how fast ----


def timed(trainer: Trainer, steps: int) -> float:
    """Median seconds of a step."""
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        trainer.step_once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def measure(trainer: Trainer, warmup: int, steps: int, tokens: int) -> dict[str, float]:
    """Speed, and the peak of allocated and of reserved memory, in GB."""
    torch._C._cuda_clearCublasWorkspaces()
    release()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(warmup):
        trainer.step_once()
    seconds = timed(trainer, steps)
    replayed = torch.cuda.memory_allocated() + held_by_graphs()
    return {
        "tok_per_s": tokens / seconds,
        "step_ms": 1e3 * seconds,
        "peak_gb": torch.cuda.max_memory_allocated() / GB,  # a capture allocates as a step does
        "replay_gb": replayed / GB,
        "reserved_gb": torch.cuda.max_memory_reserved() / GB,
    }


def speed(presets: list[str]) -> tuple[bool, list[dict]]:
    """Print and return a row for each preset and batch, launched and captured."""
    rows = []
    print(
        f"{'dense-w1':22}{'launches':12}{'tok/s':>9}{'ms':>8}{'peak GB':>9}{'replay':>8}{'reserved':>9}"
    )
    for batch in (8, 1):
        for preset in presets:
            trainer = Trainer(run_of(preset, graph="auto", batch=batch), device="cuda")
            captured, trainer.captured = trainer.captured, None
            for how in ("launched", "captured"):
                if how == "captured":
                    trainer.captured = captured
                    if captured is None:
                        print(f"{batch} x 2048 {preset:12} {trainer.graph_note}")
                        break
                row = measure(trainer, 5, 10, batch * 2048)
                rows.append({"batch": batch, "preset": preset, "how": how, **row})
                print(
                    f"{batch} x 2048 {preset:13}{how:12}{row['tok_per_s']:9,.0f}{row['step_ms']:8.1f}"
                    f"{row['peak_gb']:9.2f}{row['replay_gb']:8.2f}{row['reserved_gb']:9.2f}",
                    flush=True,
                )
            if captured is not None and not captured.note.startswith("CUDA graphs, after"):
                print(f"  {captured.note}")
            trainer = captured = None
            release()
    rates = {(r["batch"], r["preset"], r["how"]): r["tok_per_s"] for r in rows}
    ours, theirs = rates.get((1, "fp8-lean", "captured")), rates.get((1, "bf16", "launched"))
    good = True
    if ours and theirs:
        good = ours >= theirs
        print(
            f"1 x 2048 tokens, fp8-lean captured against bf16 launched: {ours / theirs:.2f} x "
            f"({'ok' if good else 'SLOWER'})"
        )
    return good, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("exact", "speed", "all"))
    parser.add_argument("names", nargs="*", help="cases or presets; all of them if none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    if options.part == "all":  # deterministic algorithms must not touch the times
        here = str(Path(__file__))
        more = ["--json", str(options.json)] if options.json else []
        codes = [
            subprocess.run([sys.executable, here, part, *extra], check=False).returncode
            for part, extra in (("exact", []), ("speed", more))
        ]
        return max(codes)
    if options.part == "exact":
        return 0 if exact(options.names or [*CASES, OWN_LOOP]) else 1
    good, rows = speed(options.names or ["fp8-lean", "fp8", "bf16"])
    if options.json:
        facts = {"torch": torch.__version__, "card": torch.cuda.get_device_name()}
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
