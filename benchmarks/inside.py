"""Ottava inside X: the same small model, batches and steps in X alone and in X with Ottava, on the CPU.

    python benchmarks/inside.py                  every X that is installed, into docs/inside.json
    python benchmarks/inside.py --case trainer   one X, both ways, as JSON lines

Each way runs in a process of its own. Memory is the exact peak of bytes alive in tensors from the second
step on. X alone is X as its own documentation has it for mixed precision: BF16 autocast, FP32 weights,
torch's AdamW.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STEPS, BATCH, LENGTH, RATE = 20, 4, 128, 2e-3
MODEL = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
LEAN = {"master": "split16", "states": "8bit"}


def model():
    """A Llama of about a million FP32 parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL)).train()


def rows():
    """One sequence of real text (bytes of Python's standard library) after the other."""
    import torch

    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    size = STEPS * BATCH
    ids = torch.tensor(list(text[: size * LENGTH])).view(size, LENGTH)
    return [{"input_ids": x, "labels": x} for x in ids]


def loader():
    import torch

    return torch.utils.data.DataLoader(rows(), batch_size=BATCH)


class Watch:
    """What a way of training did: its losses and its peak, read off the model itself."""

    def __init__(self, watched) -> None:
        import torch

        from ottava.planner.lifetimes import MemoryTracker

        torch.set_num_threads(1)
        self.losses: list[float] = []
        self.tracker = MemoryTracker()
        self.model, self._calls = watched, 0
        watched.register_forward_pre_hook(self._before)
        watched.register_forward_hook(self._after)

    def _before(self, *_) -> None:
        self._calls += 1
        if self._calls == 2:
            self.tracker.start_span()

    def _after(self, module, args, out) -> None:
        self.losses.append(float(out["loss"].detach()))

    def __enter__(self) -> Watch:
        self.tracker.__enter__()
        self.tracker.register("weights", [*self.model.parameters(), *self.model.buffers()])
        return self

    def __exit__(self, *exc) -> None:
        self.tracker.__exit__(*exc)

    @property
    def peak_mib(self) -> float:
        from ottava.planner.lifetimes import replay

        return replay(self.tracker.timeline).bytes / 2**20


def adamw(parameters, ours: bool):
    import torch

    import ottava

    kind = ottava.AdamW if ours else torch.optim.AdamW
    return kind(parameters, lr=RATE, **(LEAN if ours else {}))


def _loop(watched, opt, ours: bool, autocast: bool = True) -> Watch:
    import torch

    with Watch(watched) as watch:
        for batch in loader():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = watched(**batch).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
    return watch


def converted(made, ours: bool):
    import torch

    import ottava

    return ottava.convert(made, activations=torch.bfloat16) if ours else made


def plain(ours: bool) -> Watch:
    made = converted(model(), ours)
    return _loop(made, adamw(made.parameters(), ours), ours)


def trainer(ours: bool) -> Watch:
    from transformers import Trainer, TrainingArguments

    from ottava.integrations.hf_trainer import OttavaCallback

    made = model()
    callbacks = [OttavaCallback(optimizer="adamw-lean", report=lambda text: None)] if ours else []
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE, bf16=True,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
            lr_scheduler_type="constant",
        )  # fmt: skip
        made_trainer = Trainer(made, args, train_dataset=rows(), callbacks=callbacks)
        with Watch(made) as watch:
            made_trainer.train()
    return watch


def accelerate(ours: bool) -> Watch:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    made = converted(model(), ours)
    inner = made
    made, opt, data = accelerator.prepare(made, adamw(made.parameters(), ours), loader())
    with Watch(inner) as watch:
        for batch in data:
            accelerator.backward(made(**batch).loss)
            opt.step()
            opt.zero_grad()
    return watch


def lightning(ours: bool) -> Watch:
    import pytorch_lightning

    inner = converted(model(), ours)

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = inner

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return adamw(self.parameters(), ours)

    with tempfile.TemporaryDirectory() as folder:
        made = pytorch_lightning.Trainer(
            max_steps=STEPS, precision="bf16-mixed", accelerator="cpu", default_root_dir=folder,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        with Watch(inner) as watch:
            made.fit(Module(), loader())
    return watch


def peft(ours: bool) -> Watch:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    made = converted(get_peft_model(model(), config), ours)
    trained = [p for p in made.parameters() if p.requires_grad]
    return _loop(made, adamw(trained, ours), ours)


def deepspeed(ours: bool) -> Watch:
    import deepspeed as ds

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost",
                      MASTER_PORT="29591")  # fmt: skip
    inner = converted(model(), ours)
    engine, *_ = ds.initialize(
        model=inner, optimizer=adamw(inner.parameters(), False) if not ours else None,
        model_parameters=inner.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        } if ours else {
            "train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        },
    )  # fmt: skip
    with Watch(inner) as watch:
        for batch in loader():
            engine.backward(engine(**batch).loss)
            engine.step()
    return watch


CASES: dict[str, tuple[str, str, Callable[[bool], Watch]]] = {  # name -> (title, package, runs it)
    "plain": ("your own loop", "torch", plain),
    "trainer": ("Hugging Face Trainer", "accelerate", trainer),
    "accelerate": ("accelerate", "accelerate", accelerate),
    "lightning": ("Lightning", "pytorch_lightning", lightning),
    "peft": ("PEFT, LoRA of rank 16", "peft", peft),
    "deepspeed": ("DeepSpeed, ZeRO-1", "deepspeed", deepspeed),
}


def run_case(name: str, ours: bool) -> dict[str, object]:
    """One way of one X: losses (nats a token), peak MiB, converted modules, FP8 products a step."""
    from ottava.kernels.gemm import fp8_gemms

    with contextlib.redirect_stdout(io.StringIO()):
        watch = CASES[name][2](ours)
    plan = next((m._ottava_plan for m in watch.model.modules() if hasattr(m, "_ottava_plan")), None)
    return {
        "case": name, "ottava": ours, "first": watch.losses[0], "last": watch.losses[-1],
        "steps": len(watch.losses), "peak_mib": round(watch.peak_mib, 2),
        "planned": plan.num_fp8 if plan else 0, "products": fp8_gemms() / len(watch.losses),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Of the libraries that were measured."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "accelerate", "pytorch-lightning", "peft", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name).split("+")[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--way", choices=("alone", "ottava"))
    given = parser.parse_args()
    if given.way:
        print(json.dumps(run_case(given.case, given.way == "ottava")))
        return 0
    found = []
    for name, (_, package, _) in CASES.items():
        if (given.case and name != given.case) or importlib.util.find_spec(package) is None:
            continue
        for way in ("alone", "ottava"):
            command = [sys.executable, __file__, "--case", name, "--way", way]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name}, {way}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(json.dumps(found[-1]), flush=True)
    if not given.case:
        whole = {"versions": versions(), "steps": STEPS, "rows": found}
        (ROOT / "docs" / "inside.json").write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
