"""The optimizer step inside backward: each gradient is used and freed as soon as it is complete.

    handle = fuse_backward(model, opt)
    loss.backward(); opt.step()        # step() only ends the step; the weights have moved already

Given up: accumulation over micro-batches (a second backward before `opt.step()` is an error), and
exact clipping by the global norm, which is known only when every gradient has been used. Instead
clip="previous" clips by the norm of the step before (the first step is not clipped), and
clip="tensor" clips each gradient by its own norm. Both also skip a parameter whose gradient is not
finite, and all that follow in that backward; so does measure=True, which clips nothing and costs one
more pass over each gradient. `handle.guard(loss)` before backward skips the whole step on the device
when the loss is not finite.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..kernels.gradient import measure_gradient
from .adamw import AdamW, local
from .clip import clip_factor

CLIPS = (None, "previous", "tensor")


def fuse_backward(
    model: nn.Module,
    opt: AdamW,
    *,
    clip: str | None = None,
    max_norm: float = 1.0,
    measure: bool = False,
    ranks: Any = None,
) -> FusedBackward:
    """Run `opt` inside backward. Returns the handle, also `opt.fused`; `.remove()` undoes it.

    measure: test every gradient before it is used and keep the norms, as clipping does. ranks: what
    reduces over the ranks of a sharded model, in place (`all_max`, `all_sum` of a tensor on the
    device); whoever shards it calls `handle.look` with each group's gradients, before the hooks.

    ValueError, before anything is changed: opt is fused already, a trainable parameter is not in
    opt, is sharded (without `ranks`), or carries a post-accumulate hook of something else, or clip
    is unknown.
    """
    if clip not in CLIPS:
        raise ValueError(f"fuse_backward: clip {clip!r} is not one of None, 'previous', 'tensor'")
    if opt.fused is not None:
        raise ValueError(
            "fuse_backward: this optimizer is fused already; remove() the handle first"
        )
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
        sharded = local(p) is not p and ranks is None
        if sharded or isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"fuse_backward: gradients of {name} are reduced over ranks after backward; "
                "use the optimizer without it"
            )
    return FusedBackward(opt, clip, max_norm, measure or clip is not None, ranks)


def _weakly(hook: weakref.WeakMethod):
    def run(p: torch.Tensor) -> None:
        method = hook()
        if method is None:
            raise RuntimeError("fuse_backward: the optimizer is gone, but its model trains on")
        method(p)

    return run


class FusedBackward:
    """The hooks of one optimizer. `found_inf`: fp32 (1,) or None, the running step's guard.

    Of the last finished step, where gradients are measured: `norms`, parameter -> 0-dim norm in the
    order of backward, `norm` of all (FP32, inf above 1.8e19, where squares overflow), and `found`,
    its `found_inf` at the end.
    """

    def __init__(
        self, opt: AdamW, clip: str | None, max_norm: float, measure: bool, ranks: Any = None
    ) -> None:
        self.opt, self.clip, self.max_norm, self.measure = opt, clip, max_norm, measure
        self.ranks = ranks
        self.found_inf: torch.Tensor | None = None
        self.found: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        self._factor: torch.Tensor | None = None
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        device = opt.param_groups[0]["params"][0].device
        self._zero = torch.zeros(1, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._done: set[torch.Tensor] = set()
        self._looked = False  # at gradients of shards, in the running step
        self._groups = {p: g for g in opt.param_groups for p in g["params"] if p.requires_grad}
        # Autograd holds hooks where Python's collector does not look: a strong one would keep the
        # parameters, and with them the whole model and its moments, alive for ever.
        hook = weakref.WeakMethod(self._hook)
        self._hooks = [p.register_post_accumulate_grad_hook(_weakly(hook)) for p in self._groups]
        opt.fused = self

    @torch.no_grad()
    def guard(self, loss: torch.Tensor) -> None:
        """Nothing changes in the coming backward if `loss` is not finite; decided on the device."""
        self.found_inf = (~loss.detach().isfinite().all()).float().reshape(1)

    @torch.no_grad()
    def look(self, reduced: torch.Tensor) -> None:
        """At the reduced gradients of a group, on each rank some: where one is not finite on any,
        no rank updates the group, or one that follows."""
        if self.found_inf is None:
            self.found_inf = torch.zeros_like(self._zero)
        if reduced.is_cuda:  # made on another stream, and freed when it is used up
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        measure_gradient(reduced, self.found_inf, self._counter)
        self.ranks.all_max(self.found_inf)
        self._looked = True

    def finish(self) -> None:
        """End of a step; `opt.step()` calls it. RuntimeError where gradients of shards came and no
        hook did: a torch that does not run them would train nothing."""
        if self._looked and not self._done:
            raise RuntimeError(
                f"fuse_backward: torch {torch.__version__} runs no hooks on sharded parameters; use "
                "optimizer.fused=off"
            )
        if self._norms:
            self.norm = torch.linalg.vector_norm(torch.stack(list(self._norms.values())))
            if self.ranks is not None:
                square = self.norm.square()
                self.ranks.all_sum(square)
                self.norm = square.sqrt()
            self.norms = self._norms
            if self.clip == "previous":
                self._clip_by(self.norm)
            self.found = self.found_inf
        self.give_up()

    def give_up(self) -> None:
        """Forget the running step: its backward did not come to an end."""
        self._norms, self.found_inf, self._looked = {}, None, False
        self._done.clear()

    def remove(self) -> None:
        """Back to an ordinary backward and step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.opt.fused = None

    def state_dict(self) -> dict[str, Any]:
        """The previous step's norm, so that a resumed run clips as an unbroken one."""
        if self.norm is None or self.clip != "previous":
            return {}
        return {"previous_norm": self.norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "previous_norm" in state:
            device = next(iter(self._groups)).device
            self.norm = state["previous_norm"].to(device)
            self._clip_by(self.norm)

    def _clip_by(self, norm: torch.Tensor) -> None:
        factor = clip_factor(norm, self.max_norm).float().reshape(1)
        # In place: a captured step reads the tensor that it read when it was captured.
        self._factor = factor if self._factor is None else self._factor.copy_(factor)

    @torch.no_grad()
    def _hook(self, p: torch.Tensor) -> None:
        if p in self._done:
            raise RuntimeError(
                "fuse_backward: a second backward reached a parameter before opt.step(): gradients "
                "cannot be accumulated with a fused backward"
            )
        self._done.add(p)
        factor = None
        if self.measure:
            if self.found_inf is None:
                self.found_inf = torch.zeros_like(self._zero)
            norm = measure_gradient(local(p.grad), self.found_inf, self._counter)
            self._norms[p] = norm
            factor = self._factor
            if self.clip == "tensor":
                factor = clip_factor(norm, self.max_norm).float().reshape(1)
        self.opt.update(p, self._groups[p], factor, self.found_inf)
        p.grad = None
