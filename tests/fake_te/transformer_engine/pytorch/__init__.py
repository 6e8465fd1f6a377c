"""`import transformer_engine.pytorch as te`."""

from .module import GroupedLinear, Linear
from .quantization import (
    autocast,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
)

__all__ = [
    "GroupedLinear", "Linear", "autocast", "is_fp8_available", "is_fp8_block_scaling_available",
    "is_mxfp8_available",
]  # fmt: skip
