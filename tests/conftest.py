"""Shared set-up: Triton under its interpreter where there is no GPU, poisoned memory, fixed seeds.

`torch.empty` and its kin return NaN (float), 0x7f (8-bit) or a large number (other integers) when
called from the package, so an output that a kernel forgot to write is found at once.
"""

import os
import random
import sys

import pytest
import torch
from torch.utils._device import _device_constructors

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before anything imports triton

torch.set_num_threads(1)
# `torch.device(...)` as a context knows allocators by identity, from a cache: fill it unpatched.
_device_constructors()
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _FLOAT8:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(min(torch.iinfo(tensor.dtype).max, 0x7F7F7F7F))
    return tensor


def _poisoned(original):
    def allocate(*args, **kwargs):
        tensor = original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return tensor
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith("ottava.") or tensor.is_meta or tensor.numel() == 0:
            return tensor
        with torch.no_grad():
            return _poison(tensor)

    return allocate


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Where Triton kernels run in this session: the GPU, or the CPU under the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Tokens kept between runs go where they do not outlive the session."""
    os.environ["OTTAVA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
