"""Delayed scaling's memory: amax per module and operand, committed after every real optimizer step.

A step that is skipped commits nothing, so it leaves no trace. The same hook counts steps for
stochastic rounding.

The hook is one for the process, set when this file is imported, and so is the clock: any optimizer
is to work, and an optimizer knows its parameters and nothing of the modules that read them. Owned by
a model or a trainer, both would have to be handed to every optimizer that someone builds, and one
that was not would train with scales that never move, without a word. What is owned is: a history
belongs to its module, and goes with it (parameters know theirs weakly). An optimizer of parameters
that no history hangs on costs a dictionary look-up a step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels import cast as cast_kernels
from ..numerics.recipe import Cast

OPERANDS = ("input", "weight", "grad_output")  # their order is in checkpoints
_ROW = {name: row for row, name in enumerate(OPERANDS)}


class AmaxHistory:
    """Delayed scaling's memory of one module: amax per operand over the last steps, on device.

    `pending` collects the maximum over all calls of the running step (every micro-batch), put there
    by the casts themselves; `commit_histories`, after a real optimizer step, moves it into the
    history; `discard` drops it. `top`: the largest amax of each operand's history. Rows of all of
    them are OPERANDS; methods take an operand's name.
    """

    def __init__(self, history: int, device: torch.device) -> None:
        # A first call in inference mode must not make what training cannot use.
        with torch.inference_mode(False):
            self.amax = torch.zeros(3, history, device=device)
            self.pending, self.top = (torch.zeros(3, device=device) for _ in range(2))
        self._top_version = self.amax._version
        self.ready = [False] * 3  # operands whose history holds at least one real step
        self._seen = [False] * 3
        self.number = next(_numbers)  # modules first run in the same order on every rank

    @classmethod
    def of(
        cls, known: AmaxHistory | None, history: int, parameter: torch.Tensor, x: torch.Tensor
    ) -> AmaxHistory:
        """`known` with length `history` on x's device, or a new one, committed with `parameter`,
        which itself need not be here yet (sharded, offloaded): what is cast is x."""
        out = cls(history, x.device) if known is None else known
        if out.amax.shape[1] != history:
            out = out.resized(history)
        if out.amax.is_meta and not x.is_meta:
            out = cls(history, x.device)
        if out.amax.device != x.device:
            for name in ("amax", "pending", "top"):
                setattr(out, name, getattr(out, name).to(x.device))
            out._top_version = None
        out.commit_with(parameter)
        return out

    def commit_with(self, parameter: torch.Tensor | None) -> None:
        """Have this history committed whenever an optimizer that holds `parameter` has really
        stepped. Without one nothing commits it, and every scale is the tensor's own."""
        if parameter is not None:
            # of a weight gathered from shards, the shard is what the optimizer holds
            owner = getattr(parameter, "_ottava_shard", parameter)
            _histories.setdefault(owner, weakref.WeakSet()).add(self)

    def knows(self, operand: str) -> bool:
        """Whether an earlier step's amax of the operand is known."""
        return self.ready[_ROW[operand]]

    def known(self, operand: str, cast: Cast, x: torch.Tensor, record: bool) -> dict:
        """Arguments for the cast of x: the amax that scales it, and with `record` where its own
        amax goes (the same pass)."""
        past = self.past(operand, cast, x)
        return {"amax": past, "amax_out": self.note(operand) if record else None}

    def past(self, operand: str, cast: Cast, x: torch.Tensor) -> torch.Tensor:
        """The amax (1,) of earlier steps that scales the cast of x; before the first, x's own."""
        if not self.knows(operand):
            return cast_kernels.amax(x)
        row = _ROW[operand]
        if cast.amax_from == "most_recent":
            return self.amax[row, :1]
        if self._top_version != self.amax._version:  # written by others than a commit
            self.top.copy_(self.amax.amax(1))
            self._top_version = self.amax._version
        return self.top[row : row + 1]

    def note(self, operand: str) -> torch.Tensor:
        """Where a kernel raises the amax (1,) of one call of the running step."""
        row = _ROW[operand]
        self._seen[row] = True
        return self.pending[row : row + 1]

    def record(self, operand: str, amax: torch.Tensor) -> None:
        """Note the amax of one call of the running step."""
        pending = self.note(operand)
        torch.maximum(pending, amax, out=pending)

    def discard(self) -> None:
        """The running step was skipped: it leaves no trace."""
        self.pending.zero_()

    def resized(self, history: int) -> AmaxHistory:
        """The same memory with another length: the most recent entries kept, zeros appended."""
        out = AmaxHistory(history, self.amax.device)
        n = min(history, self.amax.shape[1])
        out.amax[:, :n] = self.amax[:, :n]
        out.ready = list(self.ready)
        return out


_numbers = itertools.count()
# parameter -> histories of the modules that read it; weak, so that dead models vanish.
_histories = WeakIdKeyDictionary()


def commit_amax(parameters, found_inf: torch.Tensor | None = None) -> None:
    """End of a real step over `parameters`: commit the delayed scaling of the modules they feed,
    or, where found_inf is > 0 on the device, drop what it noted."""
    if len(_histories) == 0:
        return
    groups: dict[tuple, dict[int, AmaxHistory]] = {}
    for parameter in parameters:
        for history in _histories.get(parameter, ()):
            alike = groups.setdefault((history.amax.device, history.amax.shape), {})
            alike[id(history)] = history
    for alike in groups.values():
        commit_histories(list(alike.values()), found_inf)


def commit_histories(histories: list[AmaxHistory], found_inf: torch.Tensor | None = None) -> None:
    """End of a real step for histories of one length and device, in a few launches for all: the
    newest entry is this step's amax. Non-finite ones are dropped, and all where found_inf, (1,) on
    the device, is > 0. In place, so that it can be replayed."""
    amax, pending = (torch.stack([getattr(h, k) for h in histories]) for k in ("amax", "pending"))
    good = torch.isfinite(pending) & (pending > 0)
    if found_inf is not None:
        good &= ~(torch.as_tensor(found_inf, device=good.device) > 0)
    rolled = torch.cat([pending[..., None], amax[..., :-1]], dim=-1)
    amax = torch.where(good[..., None], rolled, amax)
    torch._foreach_copy_([h.amax for h in histories], list(amax))
    torch._foreach_copy_([h.top for h in histories], list(amax.amax(-1)))
    torch._foreach_zero_([h.pending for h in histories])
    for h in histories:
        h.ready = [a or b for a, b in zip(h.ready, h._seen, strict=True)]
        h._top_version = h.amax._version


def discard_amax(parameters) -> None:
    """A step over `parameters` was skipped: drop what delayed scaling noted of it."""
    for parameter in parameters if len(_histories) else ():
        for history in _histories.get(parameter, ()):
            history.discard()


def agree_amax(parameters, all_max: Callable[[torch.Tensor], None]) -> None:
    """Before a real step over `parameters` on several ranks: what the running step noted becomes the
    maximum over all of them, by `all_max` (in place, fp32), so that every rank scales alike."""
    if len(_histories) == 0:
        return
    found = {h.number: h for p in parameters for h in _histories.get(p, ())}
    histories = [found[number] for number in sorted(found)]
    if histories:
        pending = torch.stack([h.pending for h in histories])
        all_max(pending)
        for history, values in zip(histories, pending, strict=True):
            history.pending.copy_(values)


def _after_step(optimizer: torch.optim.Optimizer, _args, kwargs) -> None:
    clock.step += 1
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    commit_amax(parameters, kwargs.get("found_inf"))


class Clock:
    """Seed and step for stochastic rounding of operands. The trainer sets both on resume. Steps are
    those of all optimizers of the process (see above): what counts is that no two steps share one.
    """

    def __init__(self) -> None:
        self.seed, self.step = 0, 0


clock = Clock()
register_optimizer_step_post_hook(_after_step)
