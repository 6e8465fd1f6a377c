"""The process-wide state of regions and of delayed scaling."""

from dataclasses import dataclass, field

import torch

from ..common.recipe import DelayedScaling, Format

REFUSALS = {}  # "fp8", "block", "mxfp8" -> why this device cannot


@dataclass
class FP8GlobalState:
    fp8_enabled: bool = False
    fp8_recipe: object = None
    is_first_fp8_module: bool = False
    autocast_depth: int = 0
    delayed: list = field(default_factory=list)  # every module's states, (forward, state)


class FP8GlobalStateManager:
    quantization_state = FP8GlobalState()
    entered = 0  # of the fake: outermost regions that were on

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def get_fp8_recipe(cls):
        return cls.quantization_state.fp8_recipe or DelayedScaling()

    @classmethod
    def is_first_fp8_module(cls):
        state = cls.quantization_state
        first, state.is_first_fp8_module = state.is_first_fp8_module, False
        return first

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        for is_forward, state in cls.quantization_state.delayed:
            if is_forward == forward:
                state.move()

    @classmethod
    def reset(cls):
        cls.quantization_state, cls.entered = FP8GlobalState(), 0


class autocast:
    def __init__(
        self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False
    ):
        self._enabled, self._recipe, self._before = enabled, recipe, None

    def __enter__(self):
        if self._before is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once")
        state = FP8GlobalStateManager.quantization_state
        self._before = (state.fp8_enabled, state.fp8_recipe, state.is_first_fp8_module)
        state.fp8_enabled, state.fp8_recipe = self._enabled, self._recipe or DelayedScaling()
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
            FP8GlobalStateManager.entered += self._enabled
        state.autocast_depth += 1
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        state = FP8GlobalStateManager.quantization_state
        state.fp8_enabled, state.fp8_recipe, state.is_first_fp8_module = self._before
        self._before = None
        state.autocast_depth -= 1
        if self._enabled and state.autocast_depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


class DelayedScalingRecipeState:
    """scale (multiplies values) and amax history of `num_quantizers` operands; row 0 is running."""

    def __init__(self, recipe, *, mode, num_quantizers=1, device=None, roles=None):
        self.scale = torch.ones(num_quantizers, device=device)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, device=device)
        hybrid = recipe.fp8_format == Format.HYBRID and mode == "backward"
        self.top = 57344.0 if hybrid else 448.0

    def move(self):
        top = self.amax_history.amax(0)
        good = (top > 0) & top.isfinite()
        self.scale.copy_(torch.where(good, self.top / top, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = 0


class StatelessRecipeState:
    """Of the other recipes."""


def _available(name, return_reason):
    why = REFUSALS.get(name, "")
    return (not why, why) if return_reason else not why


def is_fp8_available(return_reason=False):
    return _available("fp8", return_reason)


def is_mxfp8_available(return_reason=False):
    return _available("mxfp8", return_reason)


def is_fp8_block_scaling_available(return_reason=False):
    return _available("block", return_reason)
