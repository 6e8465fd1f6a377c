"""What a layer keeps for backward, decided in one place: which codes, in which order, shared by whom.

A tensor that several linears read is cast once: its codes travel with the tensor object
(`carry`, `codes_of`), and every reader keeps the same storage. Which order is kept follows from
the granularity: one scale per tensor (or per 128 x 128 block) transposes exactly, so the rows that
the forward GEMM read are kept and transposed when needed; a scale per row or per 1 x 128 group
does not, so the columns that `grad_weight` will read are kept instead, cast from the original.

Shapes: M tokens, K features. `rows` are codes of x_MK (scales along K), `cols` of x_KM (along M).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels import cast as cast_kernels
from ..kernels.cast import Quantized
from ..numerics.recipe import Cast

_SLOT = "_ottava_carried"


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


def cast_operand(
    x_MK: torch.Tensor, cast: Cast, *, scale: torch.Tensor | None = None, key: int = 0
) -> tuple[Quantized, Kept]:
    """Codes of x for a GEMM over K, and the form of them kept for grad_weight.

    x_MK: any float dtype, 2-D. One pass over x where both orders are needed.
    """
    if transposes(cast):
        rows = cast_kernels.quantize(x_MK, cast, scale=scale, key=key)
        return rows, Kept(rows, is_cols=False)
    rows, cols = cast_kernels.quantize_both(x_MK, cast, scale=scale, key=key)
    return rows, Kept(cols, is_cols=True)


def carried_by(x: torch.Tensor, cast: Cast) -> Carried | None:
    """The codes that travel with `x`, if they are of this cast and x has not changed since."""
    carried = getattr(x, _SLOT, None)
    if carried is not None and carried.cast == cast and carried.version == x._version:
        return carried
    return None


def carry(x: torch.Tensor, cast: Cast, rows: Quantized, kept: Kept) -> None:
    """Let codes travel with `x` (any leading dims; rows cover x.reshape(-1, K))."""
    setattr(x, _SLOT, Carried(cast, rows, kept, x._version))


def codes_of(x: torch.Tensor, cast: Cast, how) -> tuple[Quantized, Kept]:
    """(rows, kept) of `x` under `cast`: those it carries, or new ones that it carries from now on.

    `how` gives the scale (delayed scaling) and the random key. Under torch.compile nothing is
    attached: the compiler merges equal casts by itself.
    """
    found = carried_by(x, cast)
    if found is not None:
        return found.rows, found.kept
    x_MK = x.detach().reshape(-1, x.shape[-1])
    rows, kept = cast_operand(x_MK, cast, scale=how.scale(0, x_MK), key=how.key(0))
    if not torch.compiler.is_compiling():
        carry(x, cast, rows, kept)
    return rows, kept


class AmaxHistory:
    """Delayed scaling's memory of one module: amax per operand over the last steps, on device.

    `pending` collects the maximum over all calls of the running step; `commit` (after a real
    optimizer step) moves it into the history. A step that was skipped commits nothing, so it
    leaves no trace; the next training forward starts a fresh pending row.
    """

    OPERANDS = ("input", "weight", "grad_output")

    def __init__(self, history: int, device: torch.device) -> None:
        self.amax = torch.zeros(3, history, device=device)
        self.pending = torch.zeros(3, device=device)
        self._backward_seen = False

    @classmethod
    def of(cls, known: AmaxHistory | None, history: int, parameter: torch.Tensor) -> AmaxHistory:
        """`known` with length `history` on the parameter's device, or a new one; committed
        whenever an optimizer that holds `parameter` has really stepped."""
        out = cls(history, parameter.device) if known is None else known
        if out.amax.shape[1] != history:
            out = out.resized(history)
        if out.amax.device != parameter.device:
            out.amax, out.pending = out.amax.to(parameter.device), out.pending.to(parameter.device)
        _histories.setdefault(parameter, weakref.WeakSet()).add(out)
        return out

    def scale(self, operand: int, x: torch.Tensor, cast: Cast, record: bool) -> torch.Tensor:
        """The scale for x from earlier steps (from x itself where there is none yet), and
        `record` x's own amax for later steps. `operand` indexes OPERANDS."""
        now = cast_kernels.amax(x)
        row = self.amax[operand]
        past = row.max() if cast.amax_from == "max" else row[0]
        amax = torch.where(past > 0, past, now)
        if record:
            if operand == 0 and self._backward_seen:
                self.pending = torch.zeros_like(self.pending)
                self._backward_seen = False
            self._backward_seen |= operand == 2
            self.pending[operand] = torch.maximum(self.pending[operand], now[0])
        return cast_kernels.scale_from_amax(amax.reshape(1), cast)

    def commit(self) -> None:
        """End of a real step: the newest entry is this step's amax. Non-finite ones are dropped."""
        good = torch.isfinite(self.pending) & (self.pending > 0)
        rolled = torch.cat([self.pending[:, None], self.amax[:, :-1]], dim=1)
        self.amax = torch.where(good[:, None], rolled, self.amax)
        self.pending = torch.zeros_like(self.pending)
        self._backward_seen = False

    def resized(self, history: int) -> AmaxHistory:
        """The same memory with another length: the most recent entries kept, zeros appended."""
        out = AmaxHistory(history, self.amax.device)
        n = min(history, self.amax.shape[1])
        out.amax[:, :n] = self.amax[:, :n]
        return out


# parameter -> histories of the modules that read it; weak, so that dead models vanish.
_histories = WeakIdKeyDictionary()


def commit_amax(parameters) -> None:
    """End of a real step over `parameters`: commit the delayed scaling of the modules they feed."""
    if len(_histories) == 0:
        return
    for parameter in parameters:
        for history in _histories.get(parameter, ()):
            history.commit()


def _after_step(optimizer: torch.optim.Optimizer, _args, _kwargs) -> None:
    clock.step += 1
    commit_amax(p for group in optimizer.param_groups for p in group["params"])


class Clock:
    """Seed and step for stochastic rounding of operands. The trainer sets both on resume."""

    def __init__(self) -> None:
        self.seed, self.step = 0, 0


clock = Clock()
torch.optim.optimizer.register_optimizer_step_post_hook(_after_step)
