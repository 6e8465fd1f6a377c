"""How fast a run is against the machine it runs on.

percent = 100 * FLOPs that the model needs per token * tokens per second / measured GEMM rate

The numerator counts every forward and backward GEMM and attention once (3 x forward), whatever is
recomputed. The denominator is one large square GEMM, measured on this machine when the run starts,
in the format of the run's compute: FP8 per tensor where there is an FP8 unit and the preset uses it,
else BF16 or FP16; FP32 on a CPU, where every preset computes in FP32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from ..kernels.cast import Quantized
from ..kernels.gemm import gemm, has_fp8_unit
from ..layers.autocast import HIGH
from ..numerics.policy import get_policy
from ..resolve import resolve

_SIDE = {"cuda": 8192, "cpu": 768}
_REPEATS = 5


@dataclass(frozen=True)
class Speed:
    """A machine's measured GEMM rate: the denominator of `percent`."""

    flops: float  # per second
    name: str  # such as "FP8 GEMM 8192^3"

    def percent(self, flops_per_token: float, tok_per_s: float) -> float:
        """Share of this rate that a run reaches, in percent."""
        return 100.0 * flops_per_token * tok_per_s / self.flops

    def __str__(self) -> str:
        return f"{self.name}: {self.flops / 1e12:.4g} TFLOP/s"


@lru_cache(maxsize=8)
def machine_speed(device: str, compute: str) -> Speed:
    """Measure the GEMM rate of `device` ("cpu", "cuda") for a preset's `compute`, once a process.

    Takes under 0.2 s, and on a GPU 0.3 GB that are given back.
    """
    n = _SIDE[device]
    if device == "cpu":
        kind, dtype = "FP32", torch.float32
    elif compute == "fp8" and has_fp8_unit(torch.device(device)):
        kind, dtype = "FP8", torch.float8_e4m3fn
    else:
        kind, dtype = {
            "fp32": ("FP32", torch.float32),
            "autocast-fp16": ("FP16", torch.float16),
        }.get(compute, ("BF16", torch.bfloat16))
    seconds = _gemm_seconds(n, kind == "FP8", dtype, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    return Speed(2.0 * n**3 / seconds, f"{kind} GEMM {n}^3")


def _gemm_seconds(n: int, fp8: bool, dtype: torch.dtype, device: str) -> float:
    # drawn from a generator of its own: measuring leaves no trace in the run's random numbers
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(n, n, device=device, generator=generator).to(dtype)
    if fp8:
        q = Quantized(a, torch.ones(1, device=device), "tensor")
        return _fastest(lambda: gemm(q, q, out_dtype=torch.bfloat16, fast_accum=True), device)
    return _fastest(lambda: a @ a, device)


def _fastest(call: Callable[[], object], device: str) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """FLOPs of forward and backward per token: 3 x (2 x weights used + attention).

    Attention counts the keys that a query sees on average: causal, and at most its window.
    """
    plan = resolve(model, get_policy("default", recipe=HIGH))
    total = float(sum(row.flops for row in plan.rows))
    for row in plan.rows:
        if row.kind == "attention":
            heads, dims, window = _attention_sizes(model.get_submodule(row.name))
            total += 2.0 * heads * dims * _mean_keys(sequence_length, window)
    return 3.0 * total


def _attention_sizes(module: nn.Module) -> tuple[int, int, int | None]:
    """(heads, q/k dims + v dims of a head, window) of our attention or a Hugging Face one."""
    config = getattr(module, "config", None)
    if config is None:
        return module.num_heads, module.qk_dim + module.v_dim, module.window
    return config.num_attention_heads, 2 * module.head_dim, getattr(module, "sliding_window", None)


def _mean_keys(length: int, window: int | None) -> float:
    if not window or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length
