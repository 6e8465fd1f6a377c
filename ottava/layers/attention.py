"""Attention of one layer: rope, the kernels, and 8-bit codes of everything it keeps.

Kept for backward: q and k after rope and v, in int8 with one scale per head row (or E4M3, or as
they are), the log-sum-exp, and the output's codes. Those codes are the ones that its reader, o_proj,
would make: they are made here with the reader's own scale (its amax history, its random stream) and
travel with the output tensor, so they exist once. Where the reader takes no codes, the output itself
is kept, which is then the tensor that the reader keeps.

Shapes: B batch, T tokens, H query heads, G key/value heads, D query/key dims, V value dims.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels import cast as cast_kernels
from ..kernels.attention import attention, attention_backward
from ..kernels.cast import Quantized
from ..kernels.rope import rope, rope_back, rope_int8
from ..numerics.recipe import Cast, Recipe
from .autocast import HIGH, recipe_in_force
from .gemms import LinearGemms, carry_flat, flat
from .saved import note_amax, save, saved
from .weights import compute_dtype, grad_dtype_of, set_on, weight_values

_log = logging.getLogger("ottava")
_HEAD_ROW = Cast(granularity="row")  # e4m3, one scale per row of head dim


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """What one attention computes and keeps. `keep`: "int8", "e4m3", or "high" (q, k, v as they
    are). `reader`: how the linear that reads the output runs on it, which makes the output's codes;
    None keeps the output itself."""

    scale: float
    dtype: torch.dtype
    window: int | None = None
    value_scale: float = 1.0
    keep: str = "int8"
    reader: LinearGemms | None = None

    def __post_init__(self) -> None:
        if self.keep not in ("int8", "e4m3", "high"):
            raise ValueError(f"attention: keep={self.keep!r} is not one of int8, e4m3, high")

    def scores(self, sinks: Tensor | None) -> Tensor | None:
        """The sinks' values [H], FP32 at least, also where the parameter is a split master."""
        if sinks is None:
            return None
        return weight_values(sinks, torch.promote_types(self.dtype, torch.float32))

    def turn(self, x: Tensor, cos: Tensor | None, sin: Tensor | None):
        """(x after rope, codes, scale): what attention reads, and what `store` makes of it."""
        if cos is None:
            return x, *self.store(x)
        if self.keep == "int8":
            return rope_int8(x, cos, sin)
        x = rope(x, cos, sin)
        return x, *self.store(x)

    def store(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(codes [M * H, D], scale a row) of x [B, T, H, D]; (x, None) where kept as it is."""
        if self.keep == "high":
            return x, None
        rows = x.reshape(-1, x.shape[-1])
        if self.keep == "int8":
            return cast_kernels.quantize_int8(rows, rows.shape[-1])
        q = cast_kernels.quantize(rows, _HEAD_ROW)
        return q.codes, q.scale

    def restore(self, codes: Tensor, scale: Tensor | None, batch: int, heads: int) -> Tensor:
        """x [B, T, H, D] from what `store` returned."""
        if scale is None:
            return codes
        if self.keep == "int8":
            rows = cast_kernels.dequantize_int8(codes, scale, codes.shape[-1], self.dtype)
        else:
            rows = Quantized(codes, scale, "row").dequantize(self.dtype)
        return rows.view(batch, -1, heads, rows.shape[-1])

    def output(self, saved: Tensor, scale: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """out [B, T, H, V] from its kept form."""
        if scale is None:
            return saved
        return self.reader.kept(saved, scale).values(self.dtype).reshape(shape)


class AttentionFunction(torch.autograd.Function):
    """(out [B, T, H, V], rows, rows_scale, kept, kept_scale): the codes as `flat` gives them, None
    without a reader.
    q, k [B, T, H or G, D] not yet rotated where cos, sin are given; v [B, T, G, V]."""

    @staticmethod
    def forward(ctx, q, k, v, cos, sin, sinks, documents, how: AttentionSettings):
        ctx.how, ctx.heads = how, (q.shape[2], k.shape[2])
        ctx.set_materialize_grads(False)  # the codes get no gradient: no zeros in their place
        ctx.dtypes = (q.dtype, k.dtype, v.dtype)
        q, k, v = (x.to(how.dtype) for x in (q, k, v))
        q, *kept_q = how.turn(q, cos, sin)
        k, *kept_k = how.turn(k, cos, sin)
        if how.value_scale != 1.0:
            v = v * how.value_scale
        ctx.sinks_dtype = None if sinks is None else grad_dtype_of(sinks)
        out, lse = attention(
            q, k, v, scale=how.scale, window=how.window, sinks=how.scores(sinks),
            documents=documents,
        )  # fmt: skip
        ctx.shape = tuple(out.shape)
        qkv, rest = (*kept_q, *kept_k, *how.store(v)), (lse, cos, sin, documents)
        if how.reader is None:
            save(ctx, *qkv, out, None, *rest, parameters=(sinks,))
            return out, None, None, None, None
        rows, kept = how.reader.cast_input(out.flatten(2).flatten(0, 1))
        codes = flat(rows, kept)
        ctx.mark_non_differentiable(*(c for c in codes if c is not None))
        save(ctx, *qkv, kept.q.codes, kept.q.scale, *rest, parameters=(sinks,))
        return out, *codes

    @staticmethod
    def backward(ctx, grad_out, *_):
        if grad_out is None:
            return (None,) * 8
        how, batch, (heads, groups) = ctx.how, ctx.shape[0], ctx.heads
        *qkv, out, out_scale, lse, cos, sin, documents, sinks = saved(ctx)
        q = how.restore(*qkv[:2], batch, heads)
        k = how.restore(*qkv[2:4], batch, groups)
        v = how.restore(*qkv[4:], batch, groups)
        dq, dk, dv, dsinks = attention_backward(
            grad_out.to(how.dtype), q, k, v, how.output(out, out_scale, ctx.shape), lse,
            scale=how.scale, window=how.window, documents=documents,
            sinks=how.scores(sinks),
        )  # fmt: skip
        del q, k, v
        if cos is not None:
            (dq, top_q), (dk, top_k) = rope_back(dq, cos, sin), rope_back(dk, cos, sin)
            note_amax(dq, top_q)
            note_amax(dk, top_k)
        if how.value_scale != 1.0:
            dv = dv * how.value_scale
        grads = (x.to(dtype) for x, dtype in zip((dq, dk, dv), ctx.dtypes, strict=True))
        return *grads, None, None, None if sinks is None else dsinks.to(ctx.sinks_dtype), None, None


def attend(q, k, v, cos, sin, sinks, documents, how: AttentionSettings) -> Tensor:
    """[B, T, H, V], causal, carrying its codes where `how.reader` takes them."""
    out, *codes = AttentionFunction.apply(q, k, v, cos, sin, sinks, documents, how)
    if how.reader is not None:
        carry_flat(out, how.reader, *codes)
    return out


def _kept(
    own: Recipe | None, reader: nn.Module | None, q: Tensor
) -> tuple[str, LinearGemms | None]:
    """(keep, how the reader runs on the output) under the recipes in force now. q: any tensor of the
    output's device and dtype. Nothing is kept without gradients, so the reader makes its own codes.
    """
    mine = recipe_in_force(own)
    if not (torch.is_grad_enabled() and mine.keeps_codes):
        return "high", None
    recipe = HIGH if reader is None else recipe_in_force(reader.recipe)
    if recipe.input.scaling == "delayed" and torch.compiler.is_compiling():
        return (
            mine.attention,
            None,
        )  # nothing travels there, and casts that note an amax are not merged
    return mine.attention, reader.how(recipe, q) if recipe.keeps_codes else None


class Attention(nn.Module):
    """Swapped in for a parameterless attention core (models/attention_core.py), whose attributes it
    reads: softmax_scale, value_scale, window. `attend` (cached generation) stays the core's own.
    `reader`: the linear of ours that reads the output (not a submodule); None where there is none."""

    recipe: Recipe | None = None
    reader: nn.Module | None = None

    def forward(self, q, k, v, cos, sin, sinks=None, documents=None) -> Tensor:
        """[B, T, H, V] from q, k, v before rope. documents: int [B, T], runs of equal ids."""
        keep, reader = _kept(self.recipe, self.reader, q)
        how = AttentionSettings(
            scale=self.softmax_scale,
            dtype=compute_dtype(q),
            window=self.window,
            value_scale=self.value_scale,
            keep=keep,
            reader=reader,
        )
        return attend(q, k, v, cos, sin, sinks, documents, how)

    def attend(self, *args, **kwargs) -> Tensor:
        """As the core's `attend`, on k already rotated."""
        core = object.__new__(self.__dict__["_ottava_class"])
        core.__dict__ = self.__dict__  # the plain class over the same attributes
        return core.attend(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"window={self.window}, {self.recipe}"


# ----------------------------------------------------------------- transformers' attention interface

_NAME = "ottava"


@functools.cache
def _say(reason: str) -> None:
    _log.warning("attention: runs in PyTorch's sdpa instead of ottava's kernels: %s", reason)


def _why_not(module, query, key, mask, dropout, is_causal, kwargs) -> str | None:
    """Why this call is not plain causal training or prefill, or None."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is not None:
        return "there is an attention mask (padding, packing or custom)"
    if query.shape[2] != key.shape[2]:
        return "there is a cache (fewer queries than keys)"
    if dropout:
        return f"attention dropout is {dropout}"
    if not causal:
        return "the module is not causal"
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            return f"the module uses {name}"
    return None


def hf_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs
) -> tuple[Tensor, None]:
    """transformers' attention function "ottava": query, key, value [B, heads, T, D] after rope;
    (out [B, T, H, V], None). Plain causal calls (also with `sliding_window`, and sinks in `s_aux`)
    run here; any other runs in sdpa, and the reason is logged once."""
    window, sinks = kwargs.get("sliding_window"), kwargs.get("s_aux")
    reason = _why_not(module, query, key, attention_mask, dropout, is_causal, kwargs)
    if reason is not None:
        return _sdpa(
            module, query, key, value, attention_mask, reason,
            scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs,
        )  # fmt: skip
    recipe, reader = (module.__dict__.get(name) for name in ("recipe", "reader"))
    keep, reader = _kept(recipe, reader, query)
    how = AttentionSettings(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dtype=compute_dtype(query),
        window=window,
        keep=keep,
        reader=reader,
    )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, None, None, sinks, None, how), None


def _sdpa(module, query, key, value, mask, reason: str, **kwargs):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if kwargs.get("s_aux") is not None:
        raise ValueError(f"attention: sdpa has no sinks, and ottava's kernels cannot run: {reason}")
    if not torch.compiler.is_compiling():
        _say(reason)
    window, length = kwargs.get("sliding_window"), key.shape[2]
    if mask is None and window is not None and query.shape[2] == length > window:
        i = torch.arange(length, device=query.device)  # `_hf_mask` left the window to us
        mask = ((i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - window))[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _hf_mask(*args, **kwargs):
    """transformers' mask function: None where the kernels mask by themselves, else sdpa's mask.

    Padding at the end of rows needs no mask: no token before it sees it, and what comes out at the
    padding itself nobody reads. Its values are read as transformers itself reads them, once."""
    from transformers.masking_utils import sdpa_mask

    padding = kwargs.get("attention_mask")
    length, offsets = kwargs.get("q_length"), (kwargs.get("q_offset"), kwargs.get("kv_offset"))
    whole = length is not None and length == kwargs.get("kv_length") and offsets == (0, 0)
    if kwargs.get("allow_is_causal_skip", False) and whole:
        if padding is None:
            return None  # also where sdpa_mask would not say so, as under torch.compile
        if not torch.compiler.is_compiling() and bool((padding[:, 1:] <= padding[:, :-1]).all()):
            return None
    return sdpa_mask(*args, **kwargs)


def register_hf_attention() -> str:
    """Make "ottava" an attention implementation of transformers; returns that name."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_NAME, hf_attention)
    AttentionMaskInterface.register(_NAME, _hf_mask)
    return _NAME


def convert_hf(module: nn.Module, recipe: Recipe | None) -> None:
    """Let one transformers attention module call `hf_attention` and keep 8-bit codes under
    `recipe`; its setting `reader` is as in `Attention`. The implementation is chosen by the config
    it shares with its model; the one before is remembered for `revert_hf`. Does nothing without a
    recipe."""
    if recipe is None:
        return
    name = register_hf_attention()
    set_on(module, recipe=recipe)
    before = module.config._attn_implementation
    if before != name:
        module.__dict__["_ottava_attention_before"] = before
        module.config._attn_implementation = name


def revert_hf(model: nn.Module) -> None:
    """Undo `convert_hf` on every module of `model`."""
    for module in model.modules():
        if "_ottava_attention_before" in module.__dict__:
            module.config._attn_implementation = module.__dict__.pop("_ottava_attention_before")
