"""What a measurement was made on and with: machine, clocks, versions, commit, command."""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("ottava", "torch", "triton", "transformers", "torchao", "liger-kernel", "flashoptim",
            "transformer-engine")  # fmt: skip


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_machine() -> dict[str, Any]:
    """Device, memory, clocks and driver, as plain data."""
    facts: dict[str, Any] = {"system": platform.platform(), "python": platform.python_version()}
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        facts |= {
            "device": props.name,
            "memory_gib": round(props.total_memory / 2**30, 1),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
        }
        facts |= _nvidia_smi()
    else:
        facts |= {"device": _cpu_name(), "cores": torch.get_num_threads()}
    return facts


def describe_how() -> dict[str, Any]:
    """Versions, commit, command and time, as plain data."""
    versions = {name: v for name in PACKAGES if (v := version_of(name)) is not None}
    return {
        "command": " ".join(["ottava" if "ottava" in sys.argv[0] else sys.argv[0], *sys.argv[1:]]),
        "commit": _commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
    }


def _nvidia_smi() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit",
              "temperature.gpu", "persistence_mode")  # fmt: skip
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    values = [value.strip() for value in done.stdout.split(",")]
    return dict(zip(fields, values, strict=False)) if done.returncode == 0 else {}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the working copy that holds this package, "+" where it has changes."""
    here = Path(__file__).resolve().parent
    if shutil.which("git") is None:
        return "unknown (no git)"

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown (not a working copy)"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
