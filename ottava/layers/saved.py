"""What a layer keeps for backward, decided in one place: which codes, in which order, shared by whom.

A tensor that several linears read is cast once: its codes travel with the tensor object
(`carry`, `codes_of`), and every reader keeps the same storage. Which order is kept follows from
the granularity: one scale per tensor (or per 128 x 128 block) transposes exactly, so the rows that
the forward GEMM read are kept and transposed when needed; a scale per row or per 1 x 128 group
does not, so the columns that `grad_weight` will read are kept instead, cast from the original.

Shapes: M tokens, K features. `rows` are codes of x_MK (scales along K), `cols` of x_KM (along M).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels import cast as cast_kernels
from ..kernels.cast import Quantized
from ..kernels.split import SplitParameter
from ..numerics.recipe import Cast
from ..stretch import end_with

_SLOT = "_ottava_carried"
_AMAX = "_ottava_amax"


@dataclass(slots=True)
class Kept:
    """8-bit codes of x_MK as kept for backward: `q` holds rows [M, K], or columns [K, M]."""

    q: Quantized
    is_cols: bool

    def cols(self) -> Quantized:
        """Codes of x^T [K, M], scales along M: what the grad_weight GEMM reads."""
        return self.q if self.is_cols else cast_kernels.transpose(self.q)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """x_MK in `dtype`."""
        return self.q.dequantize(dtype).t() if self.is_cols else self.q.dequantize(dtype)


@dataclass(slots=True)
class Carried:
    """Codes that travel with a tensor. `version` is the tensor's at the time of the cast, so
    that an in-place change is seen and the codes are not used."""

    cast: Cast
    rows: Quantized
    kept: Kept
    version: int


def transposes(cast: Cast) -> bool:
    """Whether codes of this cast transpose exactly (one scale per tensor or square block)."""
    return cast.granularity in ("tensor", "block")


def cast_input(x_MK: torch.Tensor, how, amax: torch.Tensor | None = None):
    """(rows, kept): codes of x for the output GEMM, and the form of them kept for grad_weight.

    x_MK: any float dtype, 2-D; `how` is the reader's (layers/linear.py). One pass over x where
    both orders are needed. amax: fp32 (1,) where the kernel that made x found it.
    """
    if transposes(how.recipe.input):
        rows = how.cast(0, x_MK, "rows", amax)
        return rows, Kept(rows, is_cols=False)
    rows, cols = how.cast(0, x_MK, "both", amax)
    return rows, Kept(cols, is_cols=True)


def carried_by(x: torch.Tensor, cast: Cast) -> Carried | None:
    """The codes that travel with `x`, if they are of this cast and x has not changed since.

    A view of all of a tensor in another shape (heads flattened for o_proj) carries what it carries.
    """
    if torch.compiler.is_compiling():  # a version cannot be traced
        return None
    carried = getattr(x, _SLOT, None)
    if carried is None and x._base is not None:
        whole = x.is_contiguous() and x.numel() == x._base.numel()
        carried = getattr(x._base, _SLOT, None) if whole else None
    if carried is None or carried.cast != cast or carried.version != x._version:
        return None
    return carried if carried.rows.codes.shape[1] == x.shape[-1] else None


def carry(x: torch.Tensor, cast: Cast, rows: Quantized, kept: Kept) -> None:
    """Let codes travel with `x` (any leading dims; rows cover x.reshape(-1, K)), unless a change of
    x could not be seen."""
    if x.is_inference():
        return
    setattr(x, _SLOT, Carried(cast, rows, kept, x._version))


def codes_of(x: torch.Tensor, cast: Cast, how) -> tuple[Quantized, Kept]:
    """(rows, kept) of `x` under `cast`: those it carries, or new ones that it carries from now on.

    Under torch.compile nothing is attached: the compiler merges equal casts by itself.
    """
    found = carried_by(x, cast)
    if found is not None:
        return found.rows, found.kept
    rows, kept = cast_input(x.detach().reshape(-1, x.shape[-1]), how)
    if not torch.compiler.is_compiling():
        carry(x, cast, rows, kept)
    return rows, kept


def save(ctx, *tensors: torch.Tensor | None, parameters: tuple = ()) -> None:
    """Save `tensors`, then `parameters`, for backward. A split master is also held as it is: from a
    stretch that runs again, autograd gives back a bare copy of its codes, without scale or class."""
    if not torch.compiler.is_compiling():
        end_with(ctx, tensors)
    ctx.masters = tuple(p if isinstance(p, SplitParameter) else None for p in parameters)
    ctx.save_for_backward(*tensors, *parameters)


def saved(ctx) -> tuple:
    """What `save` was given."""
    out, masters = ctx.saved_tensors, ctx.masters
    first = len(out) - len(masters)
    found = (s if m is None else m for s, m in zip(out[first:], masters, strict=True))
    return *out[:first], *found


def note_amax(grad: torch.Tensor, amax: torch.Tensor) -> None:
    """Let the amax of a gradient (fp32, (1,)), found by the kernel that made it, travel with it."""
    if torch.compiler.is_compiling():
        return
    setattr(grad, _AMAX, (amax, grad._version))


def noted_amax(grad: torch.Tensor) -> torch.Tensor | None:
    """The amax that travels with this gradient, or with the whole tensor that it is a view of;
    None where there is none, or the values have changed since."""
    if torch.compiler.is_compiling():
        return None
    noted = getattr(grad, _AMAX, None)
    if noted is None and grad._base is not None and grad.numel() == grad._base.numel():
        noted = getattr(grad._base, _AMAX, None)
    return noted[0] if noted is not None and noted[1] == grad._version else None


class AmaxHistory:
    """Delayed scaling's memory of one module: amax per operand over the last steps, on device.

    `pending` collects the maximum over all calls of the running step (every micro-batch), put there
    by the casts themselves; `commit_histories`, after a real optimizer step, moves it into the
    history; `discard` drops it. `top`: the largest amax of each operand's history.
    """

    OPERANDS = ("input", "weight", "grad_output")

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
    def of(cls, known: AmaxHistory | None, history: int, parameter: torch.Tensor) -> AmaxHistory:
        """`known` with length `history` on the parameter's device, or a new one; committed
        whenever an optimizer that holds `parameter` has really stepped."""
        out = cls(history, parameter.device) if known is None else known
        if out.amax.shape[1] != history:
            out = out.resized(history)
        if out.amax.is_meta and not parameter.is_meta:
            out = cls(history, parameter.device)
        if out.amax.device != parameter.device:
            for name in ("amax", "pending", "top"):
                setattr(out, name, getattr(out, name).to(parameter.device))
            out._top_version = None
        # of a weight gathered from shards, the shard is what the optimizer holds
        owner = getattr(parameter, "_ottava_shard", parameter)
        _histories.setdefault(owner, weakref.WeakSet()).add(out)
        return out

    def known(self, operand: int, cast: Cast, x: torch.Tensor, record: bool) -> dict:
        """Arguments for the cast of x: the amax that scales it, and with `record` where its own
        amax goes (the same pass)."""
        past = self.past(operand, cast, x)
        return {"amax": past, "amax_out": self.note(operand) if record else None}

    def past(self, operand: int, cast: Cast, x: torch.Tensor) -> torch.Tensor:
        """The amax (1,) of earlier steps that scales the cast of x; before the first, x's own."""
        if not self.ready[operand]:
            return cast_kernels.amax(x)
        if cast.amax_from == "most_recent":
            return self.amax[operand, :1]
        if self._top_version != self.amax._version:  # written by others than a commit
            self.top.copy_(self.amax.amax(1))
            self._top_version = self.amax._version
        return self.top[operand : operand + 1]

    def note(self, operand: int) -> torch.Tensor:
        """Where a kernel raises the amax (1,) of one call of the running step."""
        self._seen[operand] = True
        return self.pending[operand : operand + 1]

    def record(self, operand: int, amax: torch.Tensor) -> None:
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
    """Seed and step for stochastic rounding of operands. The trainer sets both on resume."""

    def __init__(self) -> None:
        self.seed, self.step = 0, 0


clock = Clock()
register_optimizer_step_post_hook(_after_step)
