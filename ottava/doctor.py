"""What this machine can do, and what is missing: plain facts for `ottava doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from .bench.machine import version_of
from .config import PRESETS, Preset
from .layers import te

# distribution, what it is for, the line that installs it
OPTIONAL = {
    "transformer-engine": ("precision.recipe=te:*, and compare --peers", te.INSTALL),
    "deepspeed": ("several GPUs with ZeRO", "pip install 'ottava[deepspeed]'"),
    "datasets": ("Hugging Face data sets", "pip install 'ottava[data]'"),
    "pyarrow": (".parquet files", "pip install 'ottava[data]'"),
    "tensorboard": ("log.trackers=tensorboard", "pip install 'ottava[track]'"),
    "trackio": ("log.trackers=trackio", "pip install 'ottava[track]'"),
    "wandb": ("log.trackers=wandb", "pip install 'ottava[track]'"),
    "lm-eval": ("tasks of ottava eval", "pip install 'ottava[eval]'"),
}

_TE_PARTS = ("", "-torch", "-cu12", "-cu13")
LEAST_CUDNN = (9, 12, 0)  # of Transformer Engine


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device. `capability`: (major, minor); FP8 matrix units need (8, 9), BF16 (8, 0)."""

    name: str
    capability: tuple[int, int]
    memory_gib: float

    @property
    def fp8_unit(self) -> bool:
        """Whether it multiplies FP8 natively (Ada, Hopper, Blackwell)."""
        return self.capability >= (8, 9)

    @property
    def bf16_unit(self) -> bool:
        """Whether it multiplies BF16 natively (Ampere and newer)."""
        return self.capability >= (8, 0)


def find_gpus() -> list[Gpu]:
    """The CUDA devices that torch sees."""
    if not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gib = round(p.total_memory / 2**30, 1)
        found.append(Gpu(name=p.name, capability=(p.major, p.minor), memory_gib=gib))
    return found


def preset_support(preset: Preset, gpu: Gpu | None) -> tuple[str, str]:
    """("native" | "emulated", why) for a preset on a GPU, or on the CPU where `gpu` is None.

    "emulated": right results and the preset's memory, without the speed.
    """
    if gpu is None:
        if preset.compute in ("fp8", "storage"):
            return "emulated", "no GPU: every 8-bit kernel runs as its PyTorch reference"
        if preset.compute == "fp32":
            return "native", ""
        return "emulated", "no GPU: half precision is slow on most CPUs"
    capability = ".".join(map(str, gpu.capability))
    if preset.compute == "fp8" and not gpu.fp8_unit:
        why = f"no FP8 unit (capability {capability}; 8.9 is needed)"
        if gpu.bf16_unit:
            return "emulated", f"{why}: computes in BF16 from the codes; use storage"
        return "emulated", f"{why} and no BF16 unit"
    if preset.compute in ("autocast-bf16", "bf16", "storage", "fp8") and not gpu.bf16_unit:
        return "emulated", f"no BF16 unit (capability {capability}; 8.0 is needed): use amp-fp16"
    if preset.compute == "storage":
        return "native", "BF16 compute, everything kept for backward in 8 bits: needs no FP8 unit"
    return "native", ""


def examine() -> dict[str, Any]:
    """Everything that `ottava doctor` says, as plain data (JSON).

    Keys: versions, cpu, gpus, presets (name -> support, why), optional (name -> version, for,
    install), problems (what to repair, one line each).
    """
    gpus = find_gpus()
    worst = min(gpus, key=lambda g: g.capability, default=None)
    support = {name: preset_support(preset, worst) for name, preset in PRESETS.items()}
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("ottava", "torch", "triton", "transformers", "numpy", "safetensors"):
        versions[package] = version_of(package)
    return {
        "versions": versions | {"cuda": torch.version.cuda},
        "cpu": {"name": platform.machine(), "cores": os.cpu_count(), "memory_gib": _memory_gib()},
        "gpus": [asdict(g) | {"fp8_unit": g.fp8_unit, "bf16_unit": g.bf16_unit} for g in gpus],
        "presets": {n: {"support": how, "why": why} for n, (how, why) in support.items()},
        "optional": {
            name: {"version": version_of(name), "for": purpose, "install": line}
            for name, (purpose, line) in OPTIONAL.items()
        },
        "problems": [*_problems(gpus, versions), *_te_problems()],
    }


def page(facts: dict[str, Any]) -> Group:
    """What `examine` found, for a terminal."""
    cpu = facts["cpu"]
    lines = [
        "  ".join(f"{k} {v}" for k, v in facts["versions"].items() if v),
        f"CPU  {cpu['name']}, {cpu['cores']} cores, {cpu['memory_gib']} GiB",
    ]
    for gpu in facts["gpus"]:
        capability = ".".join(map(str, gpu["capability"]))
        unit = "has an" if gpu["fp8_unit"] else "has no"
        lines.append(
            f"GPU  {gpu['name']}, {gpu['memory_gib']} GiB, capability {capability}: {unit} FP8 unit"
        )
    if not facts["gpus"]:
        lines.append("GPU  none that torch can use")
    table = Table("preset", "here", "why", box=None, pad_edge=False)
    for name, row in facts["presets"].items():
        table.add_row(name, row["support"], row["why"])
    more = [
        f"{name}: {row['version'] or 'not installed (' + row['for'] + '): ' + row['install']}"
        for name, row in facts["optional"].items()
    ]
    more += [f"PROBLEM  {problem}" for problem in facts["problems"]]
    return Group(*lines, table, *more)


def _problems(gpus: list[Gpu], versions: dict[str, str | None]) -> list[str]:
    problems = []
    if not gpus and shutil.which("nvidia-smi"):
        build = "is a CPU build" if torch.version.cuda is None else "cannot reach the driver"
        problems.append(
            f"an NVIDIA driver is installed but torch {torch.__version__} {build}; install a torch "
            "that matches the driver's CUDA version (nvidia-smi shows it)"
        )
    if gpus and versions["triton"] is None:
        problems.append("triton is not installed, so no GPU kernel can run; pip install triton")
    return problems


def te_problems(
    parts: Mapping[str, str | None], cuda: str | None, cudnn: tuple[int, ...] | None
) -> list[str]:
    """What is wrong with an installed Transformer Engine, a line each; empty where it is absent.

    parts: versions of transformer-engine, transformer-engine-torch, -cu12 and -cu13. cuda, cudnn: of
    torch, None on a build for the CPU.
    """
    own, glue = parts.get("transformer-engine"), parts.get("transformer-engine-torch")
    if own is None:
        return []
    found = []
    cores = {k[-4:]: parts[k] for k in parts if k.endswith(("cu12", "cu13")) and parts[k]}
    if glue is None:
        found.append(f"transformer-engine {own} has no PyTorch part; {te.INSTALL}")
    for name, other in {"transformer-engine-torch": glue, **cores}.items():
        if other not in (None, own):
            found.append(
                f"transformer-engine is {own} and {name} {other}, which must be the same; pip "
                f"install --no-build-isolation 'transformer-engine[pytorch]=={own}'"
            )
    if cuda is None:
        found.append(f"transformer-engine {own} needs a PyTorch built for CUDA; this one is not")
    elif f"cu{cuda.partition('.')[0]}" not in cores:
        core = f"core_cu{cuda.partition('.')[0]}"
        found.append(
            f"PyTorch is built for CUDA {cuda} and transformer-engine's core for "
            f"{' and '.join(cores) or 'nothing'}; pip install 'transformer-engine[{core}]=={own}'"
        )
    if cudnn is not None and cudnn < LEAST_CUDNN:
        have, need = (".".join(map(str, v)) for v in (cudnn, LEAST_CUDNN))
        found.append(
            f"transformer-engine {own} needs cuDNN {need} and finds {have}; pip install -U "
            f"nvidia-cudnn-cu{(cuda or '13').partition('.')[0]}, and put its lib folder on "
            "LD_LIBRARY_PATH"
        )
    return found


def _te_problems() -> list[str]:
    parts = {n: te.installed(n) for n in (f"transformer-engine{e}" for e in _TE_PARTS)}
    raw = torch.backends.cudnn.version() if torch.version.cuda else None
    cudnn = None if raw is None else (raw // 10000, raw // 100 % 100, raw % 100)
    found = te_problems(parts, torch.version.cuda, cudnn)
    if parts["transformer-engine"] and not found and torch.cuda.is_available():
        try:
            te.library()
        except ValueError as error:
            found.append(str(error))
    return found


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
