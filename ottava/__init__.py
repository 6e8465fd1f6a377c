"""Ottava: train large language models in 8 bits.

>>> plan = ottava.plan(model, recipe="tensor")
>>> model = ottava.convert(model, plan)
>>> opt = ottava.AdamW(model.parameters(), lr=1e-3, master="split16", states="8bit")
"""

from . import amp
from .convert import convert, plan, revert
from .frozen import load_frozen
from .kernels.cast import Quantized
from .layers.autocast import autocast
from .layers.blocks import LayerNormLinear, LayerNormMLP
from .layers.linear import Linear
from .layers.norm import LayerNorm, RMSNorm
from .models.fp8_checkpoint import load_fp8
from .models.fp8_save import save_fp8
from .numerics.policy import Plan, Policy
from .numerics.recipe import Cast, Gemm, Recipe
from .optim.adamw import AdamW
from .optim.clip import clip_grad_norm_
from .optim.ema import EMA
from .optim.fused_backward import fuse_backward
from .optim.loss_scaler import GradScaler
from .planner.memory import estimate_memory
from .quantize import quantize

__version__ = "0.1.0"
fp8_autocast = autocast

__all__ = [
    "EMA", "AdamW", "Cast", "Gemm", "GradScaler", "LayerNorm", "LayerNormLinear", "LayerNormMLP",
    "Linear", "Plan", "Policy", "Quantized", "RMSNorm", "Recipe", "amp", "autocast",
    "clip_grad_norm_", "convert", "estimate_memory", "fp8_autocast", "fuse_backward", "load_fp8",
    "load_frozen", "plan", "quantize", "revert", "save_fp8",
]  # fmt: skip
