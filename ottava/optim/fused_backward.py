"""The optimizer step inside backward: each gradient is used and freed as soon as it is complete.

    handle = fuse_backward(model, opt)
    loss.backward(); opt.step()        # step() only ends the step; the weights have moved already

Given up: accumulation over micro-batches (a second backward before `opt.step()` is an error), and
exact clipping by the global norm, which is known only when every gradient has been used. Instead
clip="previous" clips by the norm of the step before (the first step is not clipped), and
clip="tensor" clips each gradient by its own norm. Both also skip a parameter whose gradient is not
finite, and all that follow in that backward. `handle.guard(loss)` before backward skips the whole
step on the device when the loss is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .adamw import AdamW
from .clip import clip_factor, tensor_norm

CLIPS = (None, "previous", "tensor")


def fuse_backward(
    model: nn.Module, opt: AdamW, *, clip: str | None = None, max_norm: float = 1.0
) -> FusedBackward:
    """Run `opt` inside backward. Returns the handle, also `opt.fused`; `.remove()` undoes it.

    ValueError, before anything is changed: opt is fused already, a trainable parameter is not in
    opt, is sharded, or carries a post-accumulate hook of something else, or clip is unknown.
    """
    if clip not in CLIPS:
        raise ValueError(f"fuse_backward: clip {clip!r} is not one of None, 'previous', 'tensor'")
    if opt.fused is not None:
        raise ValueError("fuse_backward: this optimizer is fused already; remove() the handle first")
    known = {p for group in opt.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p not in known:
            raise ValueError(
                f"fuse_backward: {name} trains but is not in the optimizer: its gradient would stay"
            )
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"fuse_backward: {name} has a post-accumulate gradient hook already: something "
                "else reads its gradient after backward; remove that first"
            )
        if hasattr(p, "_local_tensor") or isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"fuse_backward: gradients of {name} are reduced over ranks after backward; "
                "use the optimizer without it"
            )
    return FusedBackward(opt, clip, max_norm)


class FusedBackward:
    """The hooks of one optimizer. `found_inf`: fp32 (1,) or None, the running step's guard."""

    def __init__(self, opt: AdamW, clip: str | None, max_norm: float) -> None:
        self.opt, self.clip, self.max_norm = opt, clip, max_norm
        self.found_inf: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None  # of the last finished step, with clip; FP64 0-dim
        self._factor: torch.Tensor | None = None
        self._norms: list[torch.Tensor] = []
        self._done: set[torch.Tensor] = set()
        self._groups = {p: g for g in opt.param_groups for p in g["params"] if p.requires_grad}
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook) for p in self._groups]
        opt.fused = self

    @torch.no_grad()
    def guard(self, loss: torch.Tensor) -> None:
        """Nothing changes in the coming backward if `loss` is not finite; decided on the device."""
        self.found_inf = (~loss.detach().isfinite().all()).float().reshape(1)

    def finish(self) -> None:
        """End of a step; `opt.step()` calls it."""
        if self._norms:
            self.norm = torch.linalg.vector_norm(torch.stack(self._norms))
            self._factor = clip_factor(self.norm, self.max_norm).float().reshape(1)
        self._norms, self.found_inf = [], None
        self._done.clear()

    def remove(self) -> None:
        """Back to an ordinary backward and step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.opt.fused = None

    def state_dict(self) -> dict[str, Any]:
        """The previous step's norm, so that a resumed run clips as an unbroken one."""
        return {} if self.norm is None else {"previous_norm": self.norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "previous_norm" in state:
            device = next(iter(self._groups)).device
            self.norm = state["previous_norm"].to(device, torch.float64)
            self._factor = clip_factor(self.norm, self.max_norm).float().reshape(1)

    @torch.no_grad()
    def _hook(self, p: torch.Tensor) -> None:
        if p in self._done:
            raise RuntimeError(
                "fuse_backward: a second backward reached a parameter before opt.step(): gradients "
                "cannot be accumulated with a fused backward"
            )
        self._done.add(p)
        factor = None
        if self.clip is not None:
            norm = tensor_norm(p.grad)
            self._norms.append(norm)
            bad = (~norm.isfinite()).float().reshape(1)
            self.found_inf = bad if self.found_inf is None else torch.maximum(self.found_inf, bad)
            factor = self._factor
            if self.clip == "tensor":
                factor = clip_factor(norm, self.max_norm).float().reshape(1)
        self.opt.update(p, self._groups[p], factor, self.found_inf)
        p.grad = None
