"""A weight as the GEMMs read it: its values or its codes, also where the parameter is a split master.

Shapes: weight_NK, N out_features, K in_features.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import cast as cast_kernels
from ..kernels.cast import Quantized
from ..kernels.frozen import FrozenParameter
from ..kernels.split import SplitParameter
from ..numerics.recipe import Cast


def grad_dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which autograd stores this parameter's gradient."""
    if isinstance(parameter, SplitParameter):
        return torch.bfloat16
    if torch.compiler.is_compiling():  # grad_dtype cannot be traced; autograd casts afterwards
        return parameter.dtype
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype


def weight_values(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`, to be read only, also where the parameter is a split master.

    BF16 of a master in BF16 and a residual is its BF16 part: the nearest, and nothing is made.
    """
    if isinstance(weight, FrozenParameter):
        return weight.dequantize(dtype)
    if not isinstance(weight, SplitParameter):
        return weight.to(dtype)
    if weight.scale is None and weight.dtype == dtype:
        return weight.data
    return weight.dequantize(dtype)


def _stored_codes(weight: torch.Tensor, cast: Cast) -> Quantized | None:
    """The codes that the parameter already is (split master, frozen), where they are of this cast.

    Frozen ones may have more rows than the weight: see kernels/frozen.py."""
    if isinstance(weight, FrozenParameter):
        return weight.padded() if weight.reads_as(cast) else None
    if not isinstance(weight, SplitParameter) or weight.cast != cast:
        return None
    if weight.dtype is not torch.float8_e4m3fn or weight.residual.device != weight.device:
        weight.dequantize()  # says what tore them apart
    return Quantized(weight.data, weight.scale, "tensor")


def weight_rows(weight: torch.Tensor, cast: Cast) -> Quantized:
    """Codes of weight_NK with scales along K: what the output GEMM reads."""
    stored = _stored_codes(weight, cast)
    if stored is not None:
        return stored
    return cast_kernels.quantize(weight_values(weight, wide_dtype(weight)), cast)


def weight_cols(weight: torch.Tensor, cast: Cast) -> Quantized:
    """Codes of weight^T [K, N] with scales along N: what the grad_input GEMM reads."""
    stored = _stored_codes(weight, cast)
    if stored is not None:
        return cast_kernels.transpose(stored)
    return cast_kernels.quantize(weight_values(weight, wide_dtype(weight)).t(), cast)


def wide_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype that holds the weight's values, before a cast."""
    coded = isinstance(weight, SplitParameter | FrozenParameter)
    return torch.float32 if coded else weight.dtype


def traceable(*weights: torch.Tensor) -> bool:
    """Whether torch.compile may trace what reads `weights`. It gives a parameter's gradient the
    parameter's dtype, so the gradients of codes would be rounded to E4M3."""
    compiling = torch.compiler.is_compiling()
    return not (compiling and any(w.dtype is torch.float8_e4m3fn for w in weights))


@torch.compiler.disable
def untraced(forward, *args):
    """forward(*args), between two graphs."""
    return forward(*args)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the high-precision parts: autocast's where it is on, else the input's."""
    if x.is_meta:  # knows no autocast
        return x.dtype
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Stored:
    """Mixed in before a module with weights. In state dicts split masters are plain FP32 values:
    model checkpoints hold no scales and no residuals. They lie on the CPU: FP32 copies of all
    weights would not fit beside the run. What `mark` says of the parameters is said
    again of those that take their place (a copy, a materialised or an assigned one)."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self.named_parameters(recurse=False):
            if isinstance(parameter, SplitParameter) and prefix + name in destination:
                destination[prefix + name] = parameter.dequantize(torch.float32).cpu()

    def __setstate__(self, state):
        super().__setstate__(state)
        _mark(self)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        _mark(self)
        return self

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        _mark(self)


def set_on(module: nn.Module, **settings: object) -> None:
    """Set a converted module's settings, which `revert` takes away again. A module among them does
    not become a submodule."""
    module.__dict__.update(settings)
    known = module.__dict__.get("_ottava_settings", ())
    module.__dict__["_ottava_settings"] = tuple({*known, *settings})


def mark(module: nn.Module, marks: dict[str, dict[str, object]]) -> None:
    """Set attributes of a module's own parameters, by name: what the optimizer is to know."""
    module.__dict__["_ottava_marks"] = marks
    _mark(module)


def _mark(module: nn.Module) -> None:
    for name, attributes in module.__dict__.get("_ottava_marks", {}).items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameter.__dict__.update(attributes)


def unmark(module: nn.Module) -> None:
    """Undo `mark`."""
    for name, attributes in module.__dict__.pop("_ottava_marks", {}).items():
        for attribute in attributes:
            module._parameters[name].__dict__.pop(attribute, None)
