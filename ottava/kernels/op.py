"""How a kernel becomes an operator: one schema, a reference for the CPU, Triton for CUDA, a fake for planning.

Every kernel file registers its functions here, so that autograd, torch.compile and the planner
(which runs the real step on fake tensors) all see one opaque operator with known outputs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections import Counter
from collections.abc import Callable

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

if HAS_TRITON:
    import triton
    import triton.language as tl
else:  # a machine without Triton (no GPU): kernels stay definable, and say so when launched

    class _NoTriton:
        """Stands in for triton where it is not installed; only launching a kernel is an error."""

        constexpr = staticmethod(lambda value=None: value)

        def jit(self, fn: Callable | None = None, **_options) -> Callable:
            if fn is None:
                return self.jit

            def launch(*_args, **_kwargs):
                raise RuntimeError(f"{fn.__name__}: Triton is not installed; `pip install triton`")

            return type("Kernel", (), {"__getitem__": lambda self, grid: launch})()

        def __getattr__(self, name: str):
            return self.jit if name == "jit" else object

    triton = tl = _NoTriton()

_library = torch.library.Library("ottava", "FRAGMENT")
# How often each operator registered with `counted` has run, fake tensors and replayed graphs aside.
calls: Counter[str] = Counter()


def _outside_autocast(fn: Callable) -> Callable:
    """References compute in the dtypes they name, also when called inside torch.autocast."""

    @functools.wraps(fn)
    def run(*args):
        if not torch.is_autocast_enabled("cpu"):
            return fn(*args)
        with torch.autocast("cpu", enabled=False):
            return fn(*args)

    return run


def _counting(name: str, fn: Callable) -> Callable:
    @functools.wraps(fn)
    def run(*args):
        calls[name] += 1
        return fn(*args)

    return run


def operator(
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    cuda: Callable | None = None,
    counted: bool = False,
) -> Callable:
    """Register `ottava::<schema>` and return the callable operator.

    `reference` runs on the CPU (and on CUDA where `cuda` is None); `fake` allocates outputs of the
    right shape, dtype and strides from input metadata alone. `cuda` takes the same arguments.
    `counted`: each call adds one to `calls`, under eager, autograd and torch.compile alike.
    """
    name = schema.split("(", 1)[0].strip()
    _library.define(schema)
    cpu, cuda = _outside_autocast(reference), cuda or reference
    if counted:
        cpu, cuda = _counting(name, cpu), _counting(name, cuda)
    _library.impl(name, cpu, "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"ottava::{name}", fake, lib=_library)
    return getattr(torch.ops.ottava, name).default
