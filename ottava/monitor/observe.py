"""Looking inside a step: what casts, weights, gradients, moments and experts do, row by row.

An `Observer` hooks the modules of the plan's rows for the first micro-batch of a step that is
looked at, and lets go again: steps in between cost nothing, and no kernel or layer knows of it. It
reads the tensors that pass by and repeats the casts, so the step's numbers stay bit for bit what
they are. Everything is collected on the device and read once, at the step's end.

Inside a gated MLP that runs as one function, down_proj's input and the gradients of gate and up do
not pass by a module: they are computed again from SAMPLE tokens, in high precision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.split import SplitParameter
from ..layers.experts import Casts
from ..layers.saved import carried_by
from ..numerics.policy import Plan, Row
from ..numerics.recipe import Cast
from .operands import FIELDS, operand_numbers, sample_of, scale_in_force, weight_pieces, zero_share

SAMPLE = 256  # tokens that the inside of a fused MLP and the output's error are looked at on
_VALUES = 4096  # elements of a weight whose change is followed


class Observer:
    """Decides when to look. `every`: one step of so many, 0: never. `last`: what was seen last."""

    def __init__(
        self, model: nn.Module, plan: Plan | None, optimizer: torch.optim.Optimizer, *, every: int
    ) -> None:
        self.model, self.plan, self.optimizer, self.every = model, plan, optimizer, every
        self.last: dict[str, Any] | None = None

    def begin(self, step: int) -> Observation | None:
        """Look at the step after `step` steps, or not (None). Reads the weights as they are now."""
        return Observation(self) if self.due(step) else None

    def due(self, step: int) -> bool:
        """Whether the step after `step` steps is looked at."""
        return bool(self.every) and (step + 1) % self.every == 0


class Observation:
    """One step that is looked at: `forward()` around the first forward, `gradients` before they go,
    `finish` after the update."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.rows = [r for r in (observer.plan.rows if observer.plan else ()) if r.recipe]
        self._where: list[tuple[str, ...]] = []
        self._values: list[Tensor] = []
        self._passed: set[tuple[str, str]] = set()
        self._named = [(n, p) for n, p in observer.model.named_parameters() if p.requires_grad]
        self._before = {name: self._weight(name, p) for name, p in self._named}

    # ---- the three moments ----

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Hooks the rows' modules for the forward inside; its backward is looked at too."""
        hooks = []
        try:
            for row in self.rows:
                module = self.observer.model.get_submodule(row.name)
                if getattr(module, "recipe", None) is not None and row.kind in _LOOKS:
                    hooks += _LOOKS[row.kind](self, row, module)
            for name, module in self.observer.model.named_modules():
                if _is_experts(module):
                    look = functools.partial(self._load, name)
                    hooks.append(module.register_forward_pre_hook(look))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def gradients(self, norms: Mapping[Tensor, Tensor] | None) -> None:
        """Note each parameter's gradient norm: of `norms` (a fused backward's), else of `.grad`."""
        if norms is None:
            norms = {
                p: torch.linalg.vector_norm(getattr(p.grad, "_local_tensor", p.grad).float())
                for _, p in self._named
                if p.grad is not None
            }
        for name, p in self._named:
            if p in norms:
                self._add(("parameters", name, "grad_norm"), norms[p])

    def finish(self) -> dict[str, Any]:
        """What was seen, as plain data (see metrics.py). The one wait for the device, and before it
        one for moments that live on the host."""
        if (host := getattr(self.observer.optimizer, "host", None)) is not None:
            host.synchronize()
        for name, p in self._named:
            change = torch.linalg.vector_norm(sample_of(p, _VALUES) - self._before[name])
            self._add(("parameters", name, "change"), change)
            state = self.observer.optimizer.state.get(p, {})
            for moment in ("m", "v"):
                if moment in state:
                    share = zero_share(state[moment]).to(change.device)
                    self._add(("parameters", name, f"{moment}_zero"), share)
        self._weights_as_operands()
        flat = torch.stack([v.detach().reshape(()).double() for v in self._values]).tolist()
        out: dict[str, Any] = {"rows": {}, "parameters": {}, "experts": {}}
        for where, value in zip(self._where, flat, strict=True):
            place = out
            for part in where[:-1]:
                place = place.setdefault(part, {})
            place[where[-1]] = value
        _settle(out)
        out["unseen"] = [
            r.name
            for r in self.rows
            if r.kind == "linear" and (r.name, "input") not in self._passed
        ]
        self.observer.last = out
        return out

    # ---- collecting ----

    def _add(self, where: tuple[str, ...], value: Tensor) -> None:
        self._where.append(where)
        self._values.append(value)

    def _weight(self, name: str, p: Tensor) -> Tensor:
        """Note norm and extremes of a weight; returns the sample whose change is followed."""
        total = torch.zeros((), dtype=torch.float64, device=p.device)
        most = torch.zeros((), device=p.device)
        for piece in weight_pieces(p):
            total += piece.square().sum(dtype=torch.float64)
            most = torch.maximum(most, piece.abs().max() if piece.numel() else most)
        sample = sample_of(p, _VALUES)
        self._add(("parameters", name, "weight_norm"), total.sqrt())
        self._add(("parameters", name, "weight_amax"), most)
        self._add(("parameters", name, "sample_norm"), torch.linalg.vector_norm(sample))
        return sample

    def _operand(self, row: str, operand: str, x: Tensor, cast: Cast, scale=None) -> None:
        """Note an operand [..., K], once a step (the first call, and not a recomputed one)."""
        if (row, operand) in self._passed or not x.numel():
            return
        self._passed.add((row, operand))
        numbers = operand_numbers(x.reshape(-1, x.shape[-1]), cast, scale)
        for field, value in zip(FIELDS, numbers, strict=True):
            self._add(("rows", row, operand, field), value)

    def _output_error(self, row: str, y: Tensor, reference: Callable[[], Tensor]) -> None:
        """Note the error of some tokens of a row's output against high precision."""
        if (row, "output") in self._passed:
            return
        self._passed.add((row, "output"))
        with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
            exact = reference().double()
            noise = (exact - _tokens(y).double()).square().sum()
        for field, value in (("noise", noise), ("signal", exact.square().sum())):
            self._add(("rows", row, "output", field), value)

    def _load(self, name: str, _module: nn.Module, args: tuple) -> None:
        """Note how tokens spread over experts: the busiest over the mean, and the share idle."""
        if (name, "load") in self._passed or len(args) < 2 or args[1].is_floating_point():
            return
        self._passed.add((name, "load"))
        index = args[1].detach().flatten()
        load = torch.zeros(_module.gate_up_proj.shape[0], device=index.device)
        load.scatter_add_(0, index.long(), torch.ones_like(index, dtype=load.dtype))
        self._add(("experts", name, "busiest"), load.max() / load.mean())
        self._add(("experts", name, "idle"), (load == 0).float().mean())

    def _weights_as_operands(self) -> None:
        """Weights after the update, as the next forward casts them; of experts the first."""
        for row in self.rows:
            module = self.observer.model.get_submodule(row.name)
            if getattr(module, "recipe", None) is None or not row.recipe.any_fp8:
                continue
            if row.kind == "linear":
                self._weight_operand(row.name, "weight", module.weight, row.recipe.weight)
            elif row.kind == "experts":
                for name in ("gate_up_proj", "down_proj"):
                    cast = Casts.of(row.recipe).weight
                    self._weight_operand(row.name, f"{name}.weight", getattr(module, name), cast)

    def _weight_operand(self, row: str, operand: str, p: Tensor, cast: Cast) -> None:
        scale = None
        if isinstance(p, SplitParameter) and p.cast == cast:
            scale = p.scale.flatten()[:1]
        if p.dim() == 3:
            values = next(weight_pieces(p, rows=1))[0]
        else:
            values = torch.cat(list(weight_pieces(p)))
        self._operand(row, operand, values, cast, scale)


# ---- what is hooked on a row's module, by its kind ----


def _look_at_linear(seen: Observation, row: Row, module: nn.Module) -> list:
    """input, grad_output and the output's error of one linear."""

    def before(module, args):
        scale = _input_scale(module, args[0])
        seen._operand(row.name, "input", args[0].detach(), module.recipe.input, scale)

    def after(module, args, y):
        x, recipe = args[0].detach(), module.recipe
        if recipe.output.fp8:
            seen._output_error(
                row.name, y.detach(), lambda: _linear(_tokens(x), module.weight, module.bias)
            )
        if y.requires_grad and recipe.any_fp8:
            scale = scale_in_force(module._history, "grad_output", recipe.grad_output)
            y.register_hook(
                lambda g: seen._operand(row.name, "grad_output", g, recipe.grad_output, scale)
            )

    before.only_looks = after.only_looks = True  # a gated MLP's linears still run as one function
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _look_at_mlp(seen: Observation, row: Row, module: nn.Module) -> list:
    """The same for the three linears of a gated MLP that runs as one function."""
    three = [seen.observer.model.get_submodule(name) for name in row.parts]

    def after(module, args, y):
        recipes = [m.recipe for m in three]
        if (row.parts[0], "input") in seen._passed or None in recipes:
            return  # its linears were called one by one
        x = args[0].detach()
        for name, m in list(zip(row.parts, three, strict=True))[:2]:
            seen._operand(name, "input", x, m.recipe.input, _input_scale(m, args[0]))
        *pair, down = three
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            x_s = _tokens(x)
            gate, up = (_linear(x_s, m.weight) for m in pair)
            inner = F.silu(gate) * up
        cast = down.recipe.input
        scale = scale_in_force(down._history, "input", cast)
        seen._operand(row.parts[2], "input", inner, cast, scale)
        if down.recipe.output.fp8:
            seen._output_error(row.name, y.detach(), lambda: _linear(inner, down.weight))
        if y.requires_grad and down.recipe.any_fp8:
            y.register_hook(lambda g: backward(g.detach(), gate, up))

    def backward(g, gate, up):
        with torch.autocast(g.device.type, enabled=False):
            gate, up = (t.requires_grad_() for t in (gate, up))
            grad_h = _tokens(g) @ _values_of(three[2].weight)
            with torch.enable_grad():
                inner = F.silu(gate) * up
            inner_grads = torch.autograd.grad(inner, (gate, up), grad_h)
        for name, m, grad in zip(row.parts, three, (*inner_grads, g), strict=True):
            cast = m.recipe.grad_output
            scale = scale_in_force(m._history, "grad_output", cast)
            seen._operand(name, "grad_output", grad, cast, scale)

    return [module.register_forward_hook(after)]


def _look_at_experts(seen: Observation, row: Row, module: nn.Module) -> list:
    """What goes into all experts of a layer, and the gradient of what comes out."""

    def after(module, args, y):
        casts = Casts.of(module.recipe)
        seen._operand(row.name, "input", args[0].detach(), casts.input)
        if y.requires_grad and module.recipe.any_fp8:
            y.register_hook(lambda g: seen._operand(row.name, "grad_output", g, casts.grad_output))

    return [module.register_forward_hook(after)]


_LOOKS: dict[str, Callable[[Observation, Row, nn.Module], list]] = {
    "linear": _look_at_linear,
    "mlp": _look_at_mlp,
    "experts": _look_at_experts,
}


def _input_scale(linear: nn.Module, x: Tensor) -> Tensor | None:
    """The scale that is known before x is cast for `linear`; of codes that x carries already (made
    for another reader of it), theirs."""
    cast = linear.recipe.input
    carried = carried_by(x, cast) if cast.scaling == "delayed" else None
    if carried is not None:
        return carried.rows.scale
    return scale_in_force(linear._history, "input", cast)


def _is_experts(module: nn.Module) -> bool:
    weight = module._parameters.get("gate_up_proj")
    return weight is not None and weight.dim() == 3


def _tokens(x: Tensor) -> Tensor:
    """SAMPLE evenly spaced rows of [..., K], FP32."""
    x_MK = x.reshape(-1, x.shape[-1])
    return x_MK[:: max(x_MK.shape[0] // SAMPLE, 1)][:SAMPLE].float()


def _values_of(weight: Tensor) -> Tensor:
    return torch.cat(list(weight_pieces(weight)))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, _values_of(weight), None if bias is None else _values_of(bias))


def _settle(out: dict[str, Any]) -> None:
    """From sums to what is written: shares, dB and ratios, in four digits."""
    for operands in out["rows"].values():
        for numbers in operands.values():
            noise, signal = numbers.pop("noise"), numbers.pop("signal")
            if "count" in numbers:
                count = numbers.pop("count")
                numbers["saturated"] /= count
                numbers["underflowed"] /= count
            numbers["error_db"] = _db(noise, signal)
    for numbers in out["parameters"].values():
        change, size = numbers.pop("change"), numbers.pop("sample_norm")
        numbers["update"] = change / size if size else 0.0
    for group in (out["parameters"], out["experts"], *out["rows"].values()):
        for numbers in group.values():
            numbers |= {k: float(f"{v:.4g}") for k, v in numbers.items() if v is not None}


def _db(noise: float, signal: float) -> float | None:
    """Signal over noise in dB; None where there is no noise, or no number."""
    if not (noise > 0.0 and signal > 0.0 and math.isfinite(noise) and math.isfinite(signal)):
        return None
    return 10.0 * math.log10(signal / noise)
