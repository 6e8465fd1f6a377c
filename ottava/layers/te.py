"""Transformer Engine as a backend: finding it, its recipes, and its modules held outside the model's.

The only file that imports `transformer_engine`, and only when it is needed. A `Held` module is made
at its first call, has no parameters of its own (it is lent the model's for the length of a call), and
hangs on no module: names, state_dict, optimizers, checkpoints and `revert` know nothing of it. What
Transformer Engine remembers between steps (delayed scaling's histories) is read and put back here.

Delayed scaling belongs to a region, `te.autocast` around one forward: its histories move when the
region ends. `region` enters one unless the user has; modules enter their own for the other recipes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..kernels.op import calls
from ..kernels.split import SplitParameter
from ..numerics.policy import Plan
from ..numerics.recipe import Recipe
from .autocast import HIGH, autocast, recipe_in_force

WRITTEN_FOR = "2.20.2"
INSTALL = "pip install wheel packaging ninja && pip install --no-build-isolation 'ottava[te]'"
DEVICES: tuple[str, ...] = ("cuda",)
ROWS = 32  # tokens are padded to these: MXFP8 takes multiples of 32, the others of 16
_CLASSES = {
    "te:delayed": "DelayedScaling",
    "te:current": "Float8CurrentScaling",
    "te:block": "Float8BlockScaling",
    "te:mxfp8": "MXFP8BlockScaling",
}
_STATE = ("scaling_fwd", "scaling_bwd")  # the keys of a module's fp8_meta


# ---- the library ----


def library() -> ModuleType:
    """`transformer_engine.pytorch`. Raises ValueError, one line, where it is missing or broken."""
    try:
        import transformer_engine.pytorch as te
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "transformer_engine":
            raise ValueError(
                f"recipe te:*: Transformer Engine is not installed; {INSTALL}"
            ) from None
        raise _broken(error) from error
    except Exception as error:  # it loads libraries and compares versions, each in its own way
        raise _broken(error) from error
    if not hasattr(te, "autocast"):
        raise ValueError(
            f"recipe te:*: Transformer Engine {installed()} has no te.autocast; this was written for "
            f"{WRITTEN_FOR}: {INSTALL}"
        )
    return te


def _broken(error: Exception) -> ValueError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(
        f"recipe te:*: Transformer Engine {installed()} cannot be imported ({lines[0]}); `ottava "
        "doctor` compares its parts with what is here"
    )


def installed(name: str = "transformer-engine") -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- its recipes ----


@functools.lru_cache(maxsize=64)
def built(recipe: Recipe) -> Any:
    """Transformer Engine's own recipe object. Raises ValueError for an option that it has not (it
    would take it without a word), and for values that it refuses."""
    library()
    from transformer_engine.common import recipe as recipes

    cls = getattr(recipes, _CLASSES[recipe.name])
    known = [f.name for f in dataclasses.fields(cls)]
    values = dict(recipe.options)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"{recipe.name}: Transformer Engine {installed() or WRITTEN_FOR} has no option "
                f"{name!r}{hint} and would ignore it; it has {', '.join(known)}"
            )
    if "fp8_format" in values:
        formats = recipes.Format.__members__
        if values["fp8_format"] not in formats:
            raise ValueError(
                f"{recipe.name}: fp8_format={values['fp8_format']!r} is not one of "
                f"{', '.join(formats)}"
            )
        values["fp8_format"] = formats[values["fp8_format"]]
    try:
        return cls(**values)
    except (AssertionError, TypeError, ValueError) as error:
        why = re.sub(r"\s+", " ", str(error)).strip()
        raise ValueError(f"{recipe.name}: Transformer Engine refuses {values}: {why}") from error


def check(recipe: Recipe, device: torch.device | str) -> None:
    """ValueError, one line, where `recipe` cannot run on `device`: no Transformer Engine, no unit."""
    te, device = library(), torch.device(device)
    built(recipe)
    if device.type not in DEVICES:
        raise ValueError(
            f"{recipe.name}: Transformer Engine computes on CUDA devices only, and this runs on "
            f"{device.type}; use recipe tensor"
        )
    asks = {"te:block": te.is_fp8_block_scaling_available, "te:mxfp8": te.is_mxfp8_available}
    able, why = asks.get(recipe.name, te.is_fp8_available)(return_reason=True)
    if not able:
        raise ValueError(f"{recipe.name}: Transformer Engine cannot run it here: {why}")


def why_not(kind: str, module: nn.Module, recipe: Recipe) -> str:
    """Why Transformer Engine cannot take a linear or experts; empty where it can."""
    names = ("weight",) if kind == "linear" else ("gate_up_proj", "down_proj")
    multiple = 32 if recipe.name == "te:mxfp8" else 16
    for weight in (getattr(module, name) for name in names):
        odd = next((n for n in weight.shape[-2:] if n % multiple), None)
        if odd is not None:
            return f"{odd} features: Transformer Engine takes multiples of {multiple}"
        if isinstance(weight, SplitParameter) and weight.dtype is torch.float8_e4m3fn:
            return "its weight is split codes, which Transformer Engine cannot read"
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            kind = str(weight.dtype).removeprefix("torch.")
            return f"Transformer Engine takes no {kind} weights"
    return ""


def recipe_of(plan: Plan | None) -> Recipe | None:
    """The recipe of Transformer Engine's that a plan has rows of, or None."""
    rows = plan.rows if plan is not None else ()
    return next((r.recipe for r in rows if r.recipe and r.recipe.backend == "te"), None)


# ---- regions ----


def _manager():
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


def inside() -> bool:
    """Whether a `te.autocast` is open, be it one that is off."""
    return _manager().quantization_state.autocast_depth > 0


@contextmanager
def region(recipe: Recipe | None) -> Iterator[None]:
    """A forward under `recipe`; nothing where that is None or the user has opened `te.autocast`."""
    if recipe is None or inside():
        yield
        return
    with library().autocast(enabled=True, recipe=built(recipe)):
        yield


@contextmanager
def eight_bit(plan: Plan | None, enabled: bool) -> Iterator[None]:
    """`ottava.autocast(enabled)` for a step under `plan`, with Transformer Engine's beside it where
    the plan has rows of it."""
    theirs = recipe_of(plan) if enabled else None
    with autocast(enabled=enabled and plan is not None), region(theirs):
        yield


class _Open(threading.local):
    def __init__(self) -> None:
        self.regions: list[AbstractContextManager] = []


_open = _Open()


@torch.compiler.disable
def _enter(model: nn.Module, _args) -> None:
    recipe = recipe_of(model.__dict__.get("_ottava_plan"))
    entered = nullcontext() if recipe_in_force(recipe) is HIGH else region(recipe)
    entered.__enter__()
    _open.regions.append(entered)


@torch.compiler.disable
def _leave(_model: nn.Module, _args, _output) -> None:
    _open.regions.pop().__exit__(None, None, None)


def surround(model: nn.Module, plan: Plan) -> None:
    """Let every forward of `model` open a region by itself, where the plan's recipe needs one."""
    leave_alone(model)
    recipe = recipe_of(plan)
    if recipe is not None and recipe.name == "te:delayed":
        model.register_forward_pre_hook(_enter, prepend=True)
        model.register_forward_hook(_leave, always_call=True)


def leave_alone(model: nn.Module) -> None:
    """Undo `surround`."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for number in [n for n, hook in hooks.items() if hook in (_enter, _leave)]:
            del hooks[number]
            model._forward_hooks_always_called.pop(number, None)


# ---- its modules ----


class Held:
    """One module of Transformer Engine's, `kind` of `sizes`, for the parameters that it is lent.

    A copy, deep or pickled, is a new one with the same scaling state.
    """

    def __init__(self, kind: str, **sizes: Any) -> None:
        self.kind, self.sizes = kind, sizes
        self.module: nn.Module | None = None
        self._pending: dict[str, torch.Tensor] = {}

    def __call__(
        self, parameters: Mapping[str, torch.Tensor], recipe: Recipe, x: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        """The module's output on x [tokens, K], under `te.autocast` as it is open, or its own."""
        module = self.module
        if module is None:
            module = self.module = self._make(next(iter(parameters.values())).dtype, x.device)
        own: AbstractContextManager = nullcontext()
        if not inside():
            if recipe.name == "te:delayed":
                raise ValueError(
                    "te:delayed: its histories move when a te.autocast ends, and none is open here; "
                    "call the converted model itself, or open one around its forward (layers that "
                    "run again in backward are not supported: use te:current)"
                )
            own = region(recipe)
        with own:
            if _manager().is_fp8_enabled():
                calls["transformer_engine"] += 1
                if self._pending:
                    self._restore(module)
            module._parameters.update(parameters)
            try:
                return module(x, *rest)
            finally:
                module._parameters.update(dict.fromkeys(parameters))

    def _make(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Without memory for weights that it will never use."""
        cls = getattr(library(), self.kind)
        module = cls(**self.sizes, params_dtype=dtype, device="meta")
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:  # stands for "no bias"
                setattr(module, name, torch.empty(0, dtype=dtype, device=device))
        module._parameters.update(dict.fromkeys(module._parameters))
        return module

    # ---- what delayed scaling remembers ----

    def scaling(self) -> dict[str, torch.Tensor]:
        """Scales and amax histories, the module's own tensors, by name; empty where it keeps none."""
        if self.module is None or self._pending:
            return self._pending
        out = {}
        for key in _STATE:
            state = self.module.fp8_meta.get(key)
            if getattr(state, "amax_history", None) is not None:
                out |= {f"{key}.scale": state.scale, f"{key}.amax_history": state.amax_history}
        return out

    def load(self, scaling: Mapping[str, torch.Tensor]) -> None:
        """Have these at the next call in 8 bits."""
        self._pending = {k: v.detach().clone() for k, v in scaling.items()}

    def _restore(self, module: nn.Module) -> None:
        module.init_fp8_metadata(num_gemms=self.sizes.get("num_gemms", 1))
        pending, self._pending = self._pending, {}
        for name, own in self.scaling().items():
            rows = min(len(own), len(pending[name]))  # histories may have another length now
            own[:rows].copy_(pending[name][:rows])

    def __deepcopy__(self, memo: dict) -> Held:
        return _held(*self.__reduce__()[1])

    def __reduce__(self):
        scaling = {k: v.detach().clone() for k, v in self.scaling().items()}
        return _held, (self.kind, self.sizes, scaling)


def _held(kind: str, sizes: dict[str, Any], scaling: dict[str, torch.Tensor]) -> Held:
    held = Held(kind, **sizes)
    held._pending = scaling
    return held


def _all_held(model: nn.Module) -> Iterator[tuple[str, Held]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Held):
                yield f"{name}.{key}".lstrip("."), value


def scaling_state(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """What delayed scaling remembers of every module, by name, for a checkpoint."""
    return {name: dict(s) for name, held in _all_held(model) if (s := held.scaling())}


def load_scaling_state(model: nn.Module, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Put back what `scaling_state` gave, before the next step."""
    for name, scaling in state.items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if hasattr(module, "held"):
            module.held(key).load(scaling)


class Scaling:
    """What delayed scaling remembers at this moment, to be put back: Transformer Engine's histories
    move with steps that are then not taken, and with evaluations."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.then = {
            name: [t.clone() for t in held.scaling().values()]
            for name, held in _all_held(model)
            if held.module is not None
        }

    def put_back(self) -> None:
        """As it was, in the same tensors; of modules made since, as it is at first."""
        own, then = [], []
        for name, held in _all_held(self.model):
            now = held.scaling() if held.module is not None else {}
            first = [torch.full_like(t, k.endswith("scale")) for k, t in now.items()]
            own += now.values()
            then += self.then.get(name) or first
        if own:
            torch._foreach_copy_(own, then)

    def __enter__(self) -> Scaling:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()
