"""What an 8-bit number format is: its range, its spacing, and the error that belongs to it.

A format is a fact, not a choice, so everything that depends on one (clamping bounds, test limits,
the planner's bytes) reads it here. Error limits are signal-to-noise ratios in dB and belong to the
format: tests take them from this table and never loosen them to pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Format:
    """An 8-bit format.

    `max`, `smallest_normal`, `smallest_subnormal` are in code units (value = code * scale).
    `cast_db`: least SQNR of one round trip of unit-normal data under a good scale.
    `gemm_db`: least SQNR of a GEMM of unit-normal operands when this format is the coarser one.
    """

    name: str
    dtype: torch.dtype
    max: float
    smallest_normal: float
    smallest_subnormal: float
    mantissa_bits: int
    has_inf: bool
    cast_db: float
    gemm_db: float


# Measured on unit-normal data: e4m3 31.6 dB a cast, 28.6 dB a GEMM (two casts add 3 dB);
# e5m2 25.5 and 24.5 (its partner is e4m3). The limits leave half a dB for small samples.
E4M3 = Format(
    name="e4m3",
    dtype=torch.float8_e4m3fn,
    max=448.0,
    smallest_normal=2.0**-6,
    smallest_subnormal=2.0**-9,
    mantissa_bits=3,
    has_inf=False,
    cast_db=31.0,
    gemm_db=28.0,
)
E5M2 = Format(
    name="e5m2",
    dtype=torch.float8_e5m2,
    max=57344.0,
    smallest_normal=2.0**-14,
    smallest_subnormal=2.0**-16,
    mantissa_bits=2,
    has_inf=True,
    cast_db=25.0,
    gemm_db=24.0,
)
FORMATS = {f.name: f for f in (E4M3, E5M2)}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}

# Storage-only code: int8 per group; never a GEMM operand. Measured 40-44 dB on unit-normal data.
INT8_MAX = 127
INT8_CAST_DB = 39.0

BLOCK = 128  # elements a side of a scale block, and elements in a scale group


def format_of(dtype: torch.dtype) -> Format:
    """The format stored in a torch float8 dtype. Raises ValueError for any other dtype."""
    if dtype not in _BY_DTYPE:
        raise ValueError(f"{dtype} is not an 8-bit float format of this library")
    return _BY_DTYPE[dtype]


def error_db(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB: 10 log10(sum ref^2 / sum (ref - value)^2), in FP64.

    Higher is better; inf when equal (also when both are zero); nan if either holds a NaN.
    """
    reference, value = reference.double(), value.double()
    noise = (reference - value).square().sum().item()
    signal = reference.square().sum().item()
    if math.isnan(noise) or math.isnan(signal):
        return math.nan
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf
