"""The experts of a MoE layer, three grouped GEMMs each way in 8 bits, no scale shared by two experts.

Whatever granularity a recipe names, the experts take the nearest that an expert keeps to itself:
"group" x "block" stays; everything else becomes one power-of-two scale per token row for input and
grad_output, and the recipe's own per expert for the weight. For grad_weight a row is shifted to a
scale of its expert's tokens (kernels/grouped.py). Scaling is always current.

Kept for backward: the input once, as codes of the T tokens (not of the T * k rows, which are
gathered again), gate and up in int8 per group of 128, and the order of the rows. The router's
weight multiplies the inner activation, so no expert's output is kept. Recompute "mlp" keeps the
input codes alone.

T tokens, k experts a token, P = T * k rows in expert order, E experts, H hidden, F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..kernels import cast as cast_kernels
from ..kernels import grouped
from ..kernels import swiglu as swiglu_kernels
from ..kernels.cast import Quantized
from ..kernels.frozen import FrozenParameter
from ..kernels.random import make_key
from ..kernels.split import SplitParameter
from ..numerics.recipe import Cast, Recipe
from .adapters import thin, thin_grads
from .autocast import HIGH, recipe_in_force
from .delayed import clock
from .saved import save, saved
from .weights import (
    Stored,
    compute_dtype,
    grad_dtype_of,
    traceable,
    untraced,
    weight_values,
    wide_dtype,
)


@dataclass(frozen=True, slots=True)
class Casts:
    """What the experts cast their operands with."""

    input: Cast
    weight: Cast
    grad_output: Cast

    @classmethod
    def of(cls, recipe: Recipe) -> Casts:
        """The casts in place of the recipe's own (see the module docstring)."""
        blocks = recipe.weight.granularity == "block"
        grain = "group" if blocks else "row"
        line = Cast(granularity=grain, scale_kind="pow2", rounding=recipe.input.rounding)
        grad = replace(line, rounding=recipe.grad_output.rounding)
        # No grouped GEMM takes e5m2.
        return cls(line, replace(recipe.weight, format="e4m3", scaling="current"), grad)


@dataclass(slots=True)
class Groups:
    """Which row is whose: rows in expert order, a token's ties in token order."""

    position: Tensor  # int32 [T, k]: the row of a token's j-th expert
    token: Tensor  # int32 [P]: the token of row p
    ends: Tensor  # int32 [E], past each expert's last row, on the device
    host_ends: Tensor  # the same on the host, once `event` has happened
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, topk_index: Tensor, num_experts: int) -> Groups:
        """Sort the choices [T, k]. The group sizes travel to the host without a wait."""
        expert, order = topk_index.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, device=expert.device)
        ends = torch.searchsorted(expert, numbers, right=True).to(torch.int32)
        host_ends, event = ends.to("cpu", non_blocking=True), None
        if ends.is_cuda:
            event = torch.cuda.Event()
            event.record()
        position = _inverse(order).view(topk_index.shape)
        return cls(position, (order // topk_index.shape[1]).int(), ends, host_ends, event)

    @classmethod
    def again(cls, position: Tensor, ends: Tensor, host_ends: Tensor, event) -> Groups:
        """The same from what backward has."""
        token = _inverse(position.flatten().long()) // position.shape[1]
        return cls(position, token, ends, host_ends, event)

    def arrived(self) -> Tensor:
        """The ends on the host. By the time of backward they have been there for long."""
        if self.event is not None:
            self.event.synchronize()
        return self.host_ends

    def largest(self, amax_P: Tensor) -> Tensor:
        """Per expert the largest of its rows' amax: FP32 [E], 0 where it has none."""
        row = torch.arange(amax_P.shape[0], dtype=torch.int32, device=amax_P.device)
        expert = torch.searchsorted(self.ends, row, right=True)
        zero = amax_P.new_zeros(self.ends.shape[0])
        return zero.scatter_reduce(0, expert, amax_P, "amax")


def _inverse(permutation: Tensor) -> Tensor:
    """The inverse of an int64 permutation, int32."""
    size = permutation.shape[0]
    out = torch.empty(size, dtype=torch.int32, device=permutation.device)
    out[permutation] = torch.arange(size, dtype=torch.int32, device=permutation.device)
    return out


@dataclass(slots=True)
class Operand:
    """Rows of a grouped GEMM, as codes or values or both. `index`: int32 [P], the row to take for
    each row in expert order; None where they are in that order. amax: FP32 per row."""

    values: Tensor | None
    codes: Quantized | None
    amax: Tensor | None
    index: Tensor | None

    def rows(self) -> Quantized:
        """Codes in expert order."""
        q = self.codes
        if self.index is None:
            return q
        codes = q.codes.view(torch.uint8)[self.index].view(q.codes.dtype)
        return Quantized(codes, q.scale[self.index], q.granularity)

    def high(self, dtype: torch.dtype) -> Tensor:
        """Values in expert order."""
        values = self.codes.dequantize(dtype) if self.values is None else self.values.to(dtype)
        return values if self.index is None else values[self.index]

    def cols(self, groups: Groups, cast: Cast) -> tuple[Tensor, Tensor]:
        """Each expert's columns under one scale, and those scales [E]."""
        amax = self.amax if self.index is None else self.amax[self.index]
        scale = cast_kernels.scale_from_amax(groups.largest(amax), cast)
        return grouped.grouped_cols(self.codes, groups.ends, scale, self.index), scale


class ExpertGemms:
    """The three grouped GEMMs of one expert layer under a recipe, and the casts before them."""

    __slots__ = ("casts", "dtype", "recipe", "stream")

    def __init__(self, recipe: Recipe, dtype: torch.dtype, stream: int) -> None:
        self.recipe, self.casts, self.dtype, self.stream = recipe, Casts.of(recipe), dtype, stream

    def input(self, x: Tensor, index: Tensor | None = None) -> Operand:
        """x [rows, K] for `output` and `grad_weight`."""
        recipe = self.recipe
        wanted = recipe.output.fp8 or recipe.grad_weight.fp8 or recipe.keeps_codes
        return self._operand(x, self.casts.input, wanted, index, 0)

    def grad(self, grad: Tensor, index: Tensor | None = None) -> Operand:
        """grad_output [rows, N] for `grad_input` and `grad_weight`."""
        recipe = self.recipe
        wanted = recipe.grad_input.fp8 or recipe.grad_weight.fp8
        return self._operand(grad, self.casts.grad_output, wanted, index, 1)

    def _operand(self, x: Tensor, cast: Cast, wanted: bool, index, number: int) -> Operand:
        if not wanted:
            return Operand(x, None, None, index)
        key = 0
        if cast.rounding == "stochastic":
            key = make_key(clock.seed, clock.step, 3 * self.stream + number)
        if cast.granularity != "row":
            return Operand(x, cast_kernels.quantize(x, cast, key=key), None, index)
        amax = torch.linalg.vector_norm(x, torch.inf, dim=1).float()
        scale = cast_kernels.scale_from_amax(amax, cast)[:, None]
        return Operand(x, cast_kernels.quantize(x, cast, scale=scale, key=key), amax, index)

    def output(self, x: Operand, groups: Groups, weight: Tensor) -> Tensor:
        """input @ weight[expert]^T, [P, N]."""
        settings = self.recipe.output
        if not settings.fp8:
            w = weight_values(weight, self.dtype)
            return grouped.grouped_matmul(x.high(self.dtype), w, groups.ends)
        w = weight_codes(weight, self.casts.weight)
        return self._gemm(x, w, groups, settings)

    def grad_input(self, grad: Operand, groups: Groups, weight: Tensor) -> Tensor:
        """grad_output @ weight[expert], [P, K]."""
        settings = self.recipe.grad_input
        if not settings.fp8:
            w = weight_values(weight, self.dtype).transpose(1, 2)
            return grouped.grouped_matmul(grad.high(self.dtype), w, groups.ends)
        w = weight_codes(weight, self.casts.weight, transposed=True)
        return self._gemm(grad, w, groups, settings)

    def _gemm(self, a: Operand, w: Quantized, groups: Groups, settings) -> Tensor:
        return grouped.grouped_gemm(
            a.rows(), w, groups.ends, out_dtype=self.dtype, fast_accum=settings.fast_accum
        )

    def grad_weight(self, grad: Operand, x: Operand, groups: Groups, weight: Tensor) -> Tensor:
        """grad_output^T @ input over each expert's rows, [E, N, K], in the gradient's dtype."""
        settings, casts, dtype = self.recipe.grad_weight, self.casts, grad_dtype_of(weight)
        if not settings.fp8:
            values = grad.high(self.dtype), x.high(self.dtype)
            return grouped.grouped_outer(*values, groups.ends).to(dtype)
        accumulate = {"out_dtype": dtype, "fast_accum": settings.fast_accum}
        if casts.input.granularity == "row":
            left, right = grad.cols(groups, casts.grad_output), x.cols(groups, casts.input)
            return grouped.grouped_grad_weight(
                *left, *right, groups.ends, groups.arrived(), shape=weight.shape[1:], **accumulate
            )
        return grouped.grouped_block_grad_weight(
            grad.high(self.dtype), x.high(self.dtype), groups.arrived(),
            grad_format=casts.grad_output.format, x_format=casts.input.format, **accumulate,
        )  # fmt: skip


def weight_codes(weight: Tensor, cast: Cast, transposed: bool = False) -> Quantized:
    """Codes of weight_ENK (of each expert's transpose, [E, K, N]); scales as `grouped_gemm` reads
    them: [E, rows] "row", or [E, n, k] "block"."""
    experts, rows, inner = weight.shape
    if transposed:
        rows, inner = inner, rows
    if isinstance(weight, FrozenParameter) and weight.reads_as(cast):
        codes, scale = weight.data, weight.scale
        if transposed:
            codes = codes.view(torch.uint8).transpose(1, 2).contiguous().view(codes.dtype)
            scale = scale.transpose(1, 2).contiguous()
        return Quantized(codes, scale, "block")
    if cast.granularity == "tensor":
        codes, scale = _tensor_codes(weight, cast)
        if transposed:
            codes = cast_kernels.transpose(Quantized(codes, scale, "tensor")).codes
        return Quantized(codes, scale[:, None].expand(experts, rows).contiguous(), "row")
    w = weight_values(weight, wide_dtype(weight))
    w = w.transpose(1, 2) if transposed else w
    if cast.granularity == "row":
        q = cast_kernels.quantize(w.reshape(experts * rows, inner), cast)
        return Quantized(q.codes.view(w.shape), q.scale.view(experts, rows), "row")
    each = [cast_kernels.quantize(one, cast) for one in w]
    codes = torch.stack([q.codes.view(torch.uint8) for q in each]).view(each[0].codes.dtype)
    return Quantized(codes, torch.stack([q.scale for q in each]), "block")


def _tensor_codes(weight: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Codes [E, N, K] and one scale per expert, [E]; those of the split master where it has them."""
    if isinstance(weight, SplitParameter) and weight.cast == cast:
        return weight.data, weight.scale.view(-1)
    w = weight_values(weight, wide_dtype(weight)).contiguous()
    experts, rows, inner = w.shape
    amax = torch.linalg.vector_norm(w, torch.inf, dim=(1, 2)).float()
    scale = cast_kernels.scale_from_amax(amax, cast)
    lines = w.view(experts * rows, inner)
    per_row = scale.repeat_interleave(rows)[:, None]
    codes = cast_kernels.quantize(lines, replace(cast, granularity="row"), scale=per_row).codes
    return codes.view(w.shape), scale


class ExpertsFunction(torch.autograd.Function):
    """sum over a token's experts of down(silu(gate(x)) * up(x) * weight). a, b: factors of adapters
    of the two weights, or None (adapters.py)."""

    @staticmethod
    def forward(ctx, x_TH, weight_Tk, w_gate_up, w_down, groups, how, recompute, a1, b1, a2, b2):
        ctx.how, ctx.recompute, ctx.dtypes = how, recompute, (x_TH.dtype, weight_Tk.dtype)
        ctx.host = groups.host_ends, groups.event
        row_weight = _scatter(weight_Tk.float(), groups)
        x = how.input(x_TH, groups.token)
        kept = (None, None, None)
        if recompute or w_gate_up.requires_grad or a1 is not None:
            kept = x_TH, None, None
            if how.recipe.keeps_codes:
                kept = x.codes.codes, x.codes.scale, x.amax
        h, gate_up = _inner(how, x, groups, w_gate_up, row_weight, (a1, b1))
        gate_up = [None] * 4 if recompute else gate_up
        order = row_weight, groups.position, groups.ends
        save(ctx, *kept, *gate_up, *order, parameters=(w_gate_up, w_down, a1, b1, a2, b2))
        y_PH = how.output(how.input(h), groups, w_down)
        if a2 is not None:
            y_PH = y_PH + thin(h.to(y_PH.dtype), a2, b2, groups.ends)
        return grouped.sum_rows(y_PH, groups.position)

    @staticmethod
    def backward(ctx, grad_TH):
        how = ctx.how
        values, scale, amax, *gate_up, row_weight, position, ends = (kept := saved(ctx))[:10]
        w_gate_up, w_down, a1, b1, a2, b2 = kept[10:]
        wants_x, wants_weight, wants_gate_up, wants_down = ctx.needs_input_grad[:4]
        groups = Groups.again(position, ends, *ctx.host)
        x = _kept(how, values, scale, amax, groups.token)
        if ctx.recompute:
            gate_up = _inner(how, x, groups, w_gate_up, row_weight, (a1, b1))[1]
        grad = how.grad(grad_TH.contiguous(), groups.token)
        grad_h = how.grad_input(grad, groups, w_down)
        grad_y = None if a2 is None else grad.high(how.dtype)
        if a2 is not None:
            grad_h = grad_h + thin(grad_y, b2.transpose(1, 2), a2.transpose(1, 2), ends)
        grads = swiglu_kernels.swiglu_backward(grad_h, *gate_up, row_weight, joined=True)
        del grad_h, gate_up
        grad_x = grad_weight = grad_gate_up = grad_down = None
        factors = [None] * 4
        if a2 is not None:
            factors[2:] = thin_grads(grad_y, grads.h, a2, b2, ends)
        if wants_down:
            grad_down = how.grad_weight(grad, how.input(grads.h), groups, w_down)
        if wants_weight:
            grad_weight = grads.grad_row_weight[position].to(ctx.dtypes[1])
        inner = grads.grad_gate
        grad = how.grad(inner)
        del grads, grad_y
        if a1 is not None:
            factors[:2] = thin_grads(inner, x.high(how.dtype), a1, b1, ends)
        if wants_gate_up:
            grad_gate_up = how.grad_weight(grad, x, groups, w_gate_up)
        if wants_x:
            grad_x = how.grad_input(grad, groups, w_gate_up)
            if a1 is not None:
                grad_x = grad_x + thin(inner, b1.transpose(1, 2), a1.transpose(1, 2), ends)
            grad_x = grouped.sum_rows(grad_x, position).to(ctx.dtypes[0])
        return grad_x, grad_weight, grad_gate_up, grad_down, None, None, None, *factors


def _scatter(weight_Tk: Tensor, groups: Groups) -> Tensor:
    """The weights [T, k] in expert order, [P]."""
    out = torch.empty_like(weight_Tk).flatten()
    out[groups.position.flatten()] = weight_Tk.flatten()
    return out


def _inner(
    how: ExpertGemms, x: Operand, groups: Groups, w_gate_up: Tensor, row_weight: Tensor, factors
):
    """The weighted inner activation [P, F], and gate and up as backward takes them."""
    both = how.output(x, groups, w_gate_up)
    if factors[0] is not None:
        both = both + thin(x.high(both.dtype), *factors, groups.ends)
    gate, up = both.chunk(2, dim=1)
    keeps = how.recipe.keeps_codes
    h, _, *codes = swiglu_kernels.swiglu(gate, up, row_weight, keep_codes=keeps)
    return h, codes if keeps else [gate, None, up, None]


def _kept(
    how: ExpertGemms, values: Tensor | None, scale: Tensor | None, amax, index
) -> Operand | None:
    """The saved input as an operand again, if it was saved."""
    if values is None:
        return None
    if scale is None:
        return how.input(values, index)
    return Operand(None, Quantized(values, scale, how.casts.input.granularity), amax, index)


class Experts(Stored, nn.Module):
    """Swapped in for a module with 3-D parameters gate_up_proj [E, 2F, H] and down_proj [E, H, F].

    `recompute`: keep the input's codes alone and run gate and up again in backward. `adapters`:
    parameter -> its factors (A, B), while a forward with adapters runs (adapters.py).
    """

    recipe: Recipe | None = None
    recompute: bool = False
    adapters: dict[str, tuple[Tensor, Tensor]] = {}  # noqa: RUF012 (replaced, never changed)

    def forward(self, x_Th: Tensor, topk_index: Tensor, topk_weight: Tensor) -> Tensor:
        """[T, H] in the compute dtype from tokens, their experts' numbers and weights [T, k]."""
        if not traceable(self.gate_up_proj, self.down_proj):
            return untraced(self.forward, x_Th, topk_index, topk_weight)
        recipe = recipe_in_force(self.recipe)
        coded = isinstance(self.gate_up_proj, SplitParameter | FrozenParameter)
        if recipe is HIGH and not coded and not self.adapters:
            return self._ottava_class.forward(self, x_Th, topk_index, topk_weight)
        stream = getattr(self.gate_up_proj, "_ottava_stream", 0)
        how = ExpertGemms(recipe, compute_dtype(x_Th), stream)
        groups = Groups.of(topk_index, self.gate_up_proj.shape[0])
        with torch.autocast(x_Th.device.type, enabled=False):  # `how` has its dtype already
            return ExpertsFunction.apply(
                x_Th, topk_weight, self.gate_up_proj, self.down_proj, groups, how, self.recompute,
                *self.adapters.get("gate_up_proj", (None, None)),
                *self.adapters.get("down_proj", (None, None)),
            )  # fmt: skip

    def extra_repr(self) -> str:
        experts, rows, inner = self.gate_up_proj.shape
        return f"experts={experts}, hidden={inner}, inner={rows // 2}, {self.recipe}"
