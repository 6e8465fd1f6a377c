"""Ranges named by the plan's rows, for torch.profiler and for Nsight Systems (NVTX).

A module's forward is a range "row:<name>". Its backward is marked too, for NVTX: from where the
gradient of its output arrives until that of the next row does. The profiler's own events say which
operator of forward an operator of backward belongs to, so they need no such mark.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ..numerics.policy import Plan

ROW = "row:"
PART = "part:"  # of a step: data, forward, backward, update


class RowRanges:
    """Hooks on the modules of a plan's rows, until `remove`. `nvtx`: NVTX ranges as well."""

    def __init__(self, model: nn.Module, plan: Plan | None, *, nvtx: bool) -> None:
        self.nvtx = nvtx
        self._hooks: list[Any] = []
        self._open: dict[str, list[Any]] = {}
        self._backward: int | None = None
        names = [row.name for row in plan.rows] if plan else []
        if not names:  # a preset that is plain PyTorch has no plan: every module that computes
            names = [n for n, m in model.named_modules() if n and not any(m.children())]
        for name in names:
            if name:
                self._hook(name, model.get_submodule(name))

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(_module: nn.Module, _args: Any) -> None:
            mark = record_function(ROW + name)
            mark.__enter__()
            nvtx = torch.cuda.nvtx.range_start(name) if self.nvtx else None
            self._open.setdefault(name, []).append((mark, nvtx))

        def after(_module: nn.Module, _args: Any, y: Any) -> None:
            if not self._open.get(name):  # its forward began before the hooks were there
                return
            mark, nvtx = self._open[name].pop()
            mark.__exit__(None, None, None)
            if not self.nvtx:
                return
            torch.cuda.nvtx.range_end(nvtx)
            first = y[0] if isinstance(y, tuple | list) and y else y
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(lambda _g: self._next(f"{name} backward"))

        # a gated MLP's linears still run as one function
        before.only_looks = after.only_looks = True  # type: ignore[attr-defined]
        self._hooks.append(module.register_forward_pre_hook(before))
        self._hooks.append(module.register_forward_hook(after))

    def _next(self, name: str | None) -> None:
        if self._backward is not None:
            torch.cuda.nvtx.range_end(self._backward)
        self._backward = torch.cuda.nvtx.range_start(name) if name else None

    def end_backward(self) -> None:
        """After a backward: its last row has ended."""
        self._next(None)

    def remove(self) -> None:
        """Let go of every module."""
        self._next(None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
