"""What a model's tensor is kept in, and reading and writing its values there an expert at a time.

Either a plain tensor, or the codes, residual and scale of a split master (kernels/split.py). Values
are FP32 in between, for one part of one tensor; the model never exists in high precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.frozen import FrozenParameter
from ..kernels.scale import scale_from_amax
from ..kernels.split import (
    Split,
    SplitParameter,
    adopt_split,
    pack_split,
    shape_scale,
    unpack_split,
    weight_amax,
)
from ..numerics.recipe import Cast

RESIDUAL_BITS = {"split16": 8, "split24": 16}
_RESIDUALS = {8: torch.int8, 16: torch.int16}
_CHUNK = 1 << 24  # elements packed at once: packing takes 24 bytes for each


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor is kept. bits: of the residual, 0 for a plain tensor of `dtype`. cast: of codes."""

    dtype: torch.dtype
    bits: int = 0
    cast: Cast | None = None

    @classmethod
    def of(cls, tensor: Tensor, master: str | None = None, coded: bool = False) -> Form:
        """As the tensor is now; under `master`, as AdamW would keep a weight that FP8 GEMMs read, or
        one in BF16 that the files hold as codes (`coded`), whose values BF16 alone would round."""
        if isinstance(tensor, SplitParameter):
            return cls(tensor.dtype, 8 * tensor.residual.element_size(), tensor.cast)
        cast = getattr(tensor, "_ottava_cast", None)
        if master is not None and isinstance(cast, Cast) and cast.splits:
            return cls(torch.float8_e4m3fn, RESIDUAL_BITS[master], cast)
        if master is not None and coded and tensor.dtype == torch.bfloat16 and tensor.requires_grad:
            return cls(torch.bfloat16, RESIDUAL_BITS[master])
        return cls(tensor.dtype)


@dataclass(slots=True)
class Storage:
    """The tensors that keep one model tensor. residual, scale, amax: of a split master, else None."""

    form: Form
    data: Tensor
    residual: Tensor | None = None
    scale: Tensor | None = None
    amax: Tensor | None = None

    @classmethod
    def empty(cls, form: Form, shape: tuple[int, ...], device) -> Storage:
        """Unset memory for a tensor of `shape`."""
        data = torch.empty(shape, dtype=form.dtype, device=device)
        if not form.bits:
            return cls(form, data)
        residual = torch.empty(shape, dtype=_RESIDUALS[form.bits], device=device)
        if form.cast is None:
            return cls(form, data, residual)
        amax = torch.empty(shape[0] if len(shape) == 3 else 1, device=device)
        return cls(form, data, residual, shape_scale(torch.empty_like(amax), data), amax)

    @classmethod
    def of(cls, tensor: Tensor) -> Storage:
        """The memory of a model's tensor itself; of a frozen one, its values."""
        if isinstance(tensor, SplitParameter):
            parts = tensor.data, tensor.residual, tensor.scale, tensor.amax
            return cls(Form.of(tensor), *parts)
        if isinstance(tensor, FrozenParameter):
            return cls(Form(torch.float32), tensor.dequantize())
        return cls(Form.of(tensor), tensor.detach())

    def part(self, index: int | None) -> Storage:
        """The memory of expert `index`; all of it for None."""
        if index is None:
            return self
        scale = None if self.scale is None else self.scale[index].view(1)
        amax = None if self.amax is None else self.amax[index : index + 1]
        residual = None if self.residual is None else self.residual[index]
        return Storage(self.form, self.data[index], residual, scale, amax)

    def values(self) -> Tensor:
        """FP32 values, or those of a plain tensor as they are."""
        if self.residual is None:
            return self.data
        return unpack_split(self.data, self.residual, self.scale)

    def write(self, values: Tensor) -> None:
        """Round `values` into this memory: to the plain dtype, or to codes and residual."""
        if self.residual is None:
            self.data.copy_(values)
            return
        if self.scale is not None:
            self.amax.copy_(weight_amax(values))
            self.scale.copy_(shape_scale(scale_from_amax(self.amax, self.form.cast), values))
        rows = max(1, _CHUNK * values.shape[0] // max(1, values.numel())) if values.dim() else 1
        if values.dim() == 3:
            rows = 1
        pieces = (t.split(rows) if t.dim() else (t,) for t in (values, self.data, self.residual))
        for number, (value, codes, residual) in enumerate(zip(*pieces, strict=True)):
            scale = self.scale
            if scale is not None and scale.dim() == 3:
                scale = scale[number : number + 1]
            packed = pack_split(value.float(), scale, self.form.bits)
            codes.copy_(packed.codes)
            residual.copy_(packed.residual)

    def holds(self, values: Tensor) -> bool:
        """Whether writing `values` would leave this memory as it is, bit for bit (amax aside)."""
        other = Storage.empty(self.form, tuple(self.data.shape), self.data.device)
        other.write(values)
        for name in ("data", "residual", "scale"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine is not None and not torch.equal(_bits(mine), _bits(its)):
                return False
        return True

    def put_into(self, model: nn.Module, names: list[str]) -> None:
        """Make this the memory of the model's tensor called `names` (all of one, where tied).

        A tensor that has memory is written in place and stays the same object; one on meta gives
        way to a new parameter with its marks.
        """
        owner, key = _owner(model, names[0])
        old = getattr(owner, key)
        if isinstance(old, SplitParameter) and not old.is_meta:
            for mine, its in zip(
                (old.data, old.residual, old.scale, old.amax),
                (self.data, self.residual, self.scale, self.amax),
                strict=True,
            ):
                if mine is not None:
                    mine.copy_(its)
        elif not old.is_meta and not self.form.bits:
            old.detach().copy_(self.data)
        elif not old.is_meta:
            self._adopt(old)
        else:
            new = self.data
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(self.data, requires_grad=old.requires_grad)
                new.__dict__.update(
                    (k, v) for k, v in old.__dict__.items() if k.startswith("_ottava_")
                )
                if self.form.bits:
                    self._adopt(new)
                elif getattr(old, "grad_dtype", None) not in (None, old.dtype):
                    new.grad_dtype = old.grad_dtype
            for name in names:
                owner, key = _owner(model, name)
                setattr(owner, key, new)

    def _adopt(self, parameter: nn.Parameter) -> None:
        split = Split(self.data, self.residual, self.scale)
        parameter.grad = None
        adopt_split(parameter, split, self.amax, self.form.cast)


def _bits(x: Tensor) -> Tensor:
    """Values as integers: NaN equals NaN, and -0 is not 0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, key = name.rpartition(".")
    return model.get_submodule(prefix), key
