"""Apply a plan to a model, in place, by swapping classes; and take it back.

A converted module keeps its parameters (the same objects), names, hooks and state_dict keys: only
`module.__class__` and the settings of its row change. So tying, optimizers made before, wrappers
and `save_pretrained` all keep working, and `revert` gives the plain model back.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .kernels.frozen import FrozenParameter, thaw
from .kernels.gemm import gemm_path
from .kernels.norm import hides_columns
from .kernels.split import SplitParameter, join_split
from .layers import attention as attention_layer
from .layers import te, te_modules
from .layers.adapters import adapt_experts
from .layers.decoder import Block, block_class, link_blocks
from .layers.embedding import Embedding
from .layers.experts import Experts
from .layers.head import ChunkedCausalLM, chunk_head, why_whole
from .layers.linear import Linear, run_together
from .layers.mixed import mixed_class
from .layers.mlp import GatedMLP
from .layers.norm import LayerNorm, RMSNorm
from .layers.weights import mark, set_on, unmark, weight_values
from .numerics.policy import Plan, Policy, Row, get_policy
from .numerics.preset import RECOMPUTES
from .numerics.recipe import Recipe, get_recipe
from .recompute import targets_of, unwrap_recompute, wrap_recompute
from .resolve import original_class, resolve

_CLASSES = {
    "linear": Linear,
    "head": Linear,
    "norm": RMSNorm,
    "layernorm": LayerNorm,
    "mlp": GatedMLP,
    "experts": Experts,
    "attention": attention_layer.Attention,
    "embedding": Embedding,
}


def plan(
    model: nn.Module,
    recipe: str | Recipe = "tensor",
    keep: Iterable[str] = (),
    *,
    policy: str | Policy = "default",
    first_last_high: bool = False,
    recompute: str = "none",
    device: torch.device | str | None = None,
) -> Plan:
    """The plan for `model`: a row per module, with a recipe, or the reason why it stays high.

    keep: globs over module names ("*lm_head") that stay in high precision, added to the policy's.
    recompute: "none", "mlp", or "layer": what `convert` makes run again in backward (recompute.py).
    device: where it will run (default: where it is); decides whether FP8 GEMMs are real or emulated.
    Raises ValueError for unknown names, when FP8 was asked for and nothing is eligible, and when
    there is nothing of what is to run again.
    """
    if isinstance(keep, str):
        raise ValueError(f"keep: give a list of globs, not the string {keep!r}")
    if recompute not in RECOMPUTES:
        raise ValueError(f"recompute: {recompute!r} is not one of {', '.join(RECOMPUTES)}")
    chosen = get_policy(
        policy, recipe=get_recipe(recipe), keep=tuple(keep), first_last_high=first_last_high
    )
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if chosen.recipe.backend == "te":
        te.check(chosen.recipe, device)
    native = gemm_path(device, chosen.recipe.input.granularity) == "native"
    emulated = chosen.recipe.any_fp8 and not native and chosen.recipe.backend == "native"
    made = resolve(model, chosen, emulated=emulated, recompute=recompute)
    targets_of(model, recompute, made)
    for row in made.rows:
        if row.kind in ("norm", "layernorm") and row.recipe and _hides(model, row):
            made = made.with_row(replace(row, recipe=None, reason=_HIDDEN, plain=True))
    why = why_whole(model)
    return made if why is None else made.explain("causal_lm", f"head not in chunks: {why}")


_HIDDEN = "weights too small beside its largest: its input cannot be told from its output"


def _hides(model: nn.Module, row: Row) -> bool:
    """Whether our norm's backward, which reads the input off the output, would lose columns of this
    one; False where the weights have no values yet, or the norm is ours already."""
    module = model.get_submodule(row.name)
    weight = module.weight
    if weight is None or weight.is_meta or isinstance(weight, FakeTensor):
        return False
    if "_ottava_class" in module.__dict__:
        return False
    return hides_columns(weight_values(weight, torch.float32).detach())


def convert(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    recipe: str | Recipe = "tensor",
    keep: Iterable[str] = (),
    policy: str | Policy = "default",
    activations: torch.dtype | None = None,
) -> nn.Module:
    """Apply `plan` (or plan with `recipe`, `keep`, `policy`, and apply) in place; returns `model`.

    activations: dtype of the embedding's output, so of the residual stream (None: as it is).
    No conversion undoes another. A call that would change nothing changes nothing, and warns. Raises ValueError when the plan does not fit
    the model, before anything is changed.
    """
    if plan is None:
        plan = _plan(model, recipe, keep, policy=policy)
    modules = dict(model.named_modules())
    for row in plan.rows:
        if row.name not in modules:
            raise ValueError(f"convert: the plan has a row {row.name!r} that the model has not")
        weight = getattr(modules[row.name], "weight", None)
        if isinstance(weight, nn.Parameter) and row.shape and tuple(weight.shape) != row.shape:
            raise ValueError(
                f"convert: {row.name} is {tuple(weight.shape)} here and {row.shape} in the plan; "
                "convert before sharding, with the plan made from this model"
            )
    targets_of(model, plan.recompute, plan)
    _warn_of_earlier(plan)
    if _is_done(model, plan, modules, activations):
        return model
    _warn_of_experts(plan)
    known = [row for row in plan.rows if row.kind != "other"]  # the rest stays untouched
    for number, row in enumerate(known):
        _apply(modules[row.name], row, plan, number, activations)
    link_blocks(modules)
    adapt_experts(modules)
    for row in plan.rows:
        _connect(row, modules)
    model._ottava_plan = plan
    te.surround(model, plan)
    wrap_recompute(model, plan.recompute, plan)
    return model


_plan = plan


def _warn_of_earlier(plan: Plan) -> None:
    """No conversion undoes another; where this one was to keep what another converted, say so."""
    before = [r.name for r in plan.rows if r.earlier]
    if before:
        warnings.warn(
            f"convert: {before[0]} and {len(before) - 1} more that this plan keeps are in 8 bits "
            "already and stay so; ottava.revert(model) first to keep them in high precision",
            stacklevel=3,
        )


def _is_done(model: nn.Module, plan: Plan, modules: dict[str, nn.Module], activations) -> bool:
    """Whether `model` is as `plan` says already; warns where it is, with what it is."""
    before = model.__dict__.get("_ottava_plan")
    if before is None or plan.difference(before) or plan.recompute != before.recompute:
        return False
    ours = [r for r in plan.rows if r.recipe]
    if any(modules[r.name].__dict__.get("recipe") != r.recipe for r in ours):
        return False  # reverted in part, or put into high precision
    embeddings = (modules[r.name] for r in plan.rows if r.kind == "embedding" and not r.plain)
    if activations and any(m.compute_dtype is not activations for m in embeddings):
        return False
    counts = Counter(r.kind for r in ours)
    said = ", ".join(f"{n} x {kind}" for kind, n in counts.items())
    warnings.warn(
        f"convert: nothing to do, the model is converted as this plan says already ({said}; first "
        f"{ours[0].name or 'the model'}); ottava.revert(model) first to convert it anew",
        stacklevel=3,
    )
    return True


def _warn_of_experts(plan: Plan) -> None:
    """Experts are nearly all of a MoE model's weights: say so where they stay as they are."""
    left = [r for r in plan.rows if r.kind == "experts" and r.recipe is None and not r.plain]
    share = sum(r.params for r in left) / max(sum(r.params for r in plan.rows), 1)
    if plan.num_fp8 and share > _UNNOTICED:
        warnings.warn(
            f"convert: {share:.0%} of the weights stay in high precision, in {len(left)} modules of "
            f"experts (first {left[0].name}: {left[0].reason})",
            stacklevel=3,
        )


_UNNOTICED = 0.2  # share of the weights that may stay as they are without a word


def _apply(module: nn.Module, row: Row, plan: Plan, number: int, activations) -> None:
    if row.plain:
        return _tag_parameters(module, row, number)
    if row.kind == "causal_lm":
        return _swap_causal_lm(module)
    if row.kind == "block":
        return _swap_block(module)
    if row.kind == "attention" and original_class(module).__module__.startswith("transformers."):
        return attention_layer.convert_hf(module, row.recipe)
    target = _CLASSES.get(row.kind)
    if row.recipe is not None and row.recipe.backend == "te":
        target = te_modules.CLASSES.get(row.kind)
    if target is None or (row.recipe is None and row.kind in ("mlp", "attention", "experts")):
        return _tag_parameters(module, row, number)
    if row.kind == "linear" and row.recipe is None and original_class(module) is not nn.Linear:
        return None
    settings: dict = {"recipe": row.recipe}
    if row.kind in ("mlp", "experts"):
        settings["recompute"] = plan.recompute == "mlp"
    elif row.kind == "embedding":
        activations = activations or module.__dict__.get("compute_dtype")
        settings = {"compute_dtype": activations}
    _swap(module, target, settings)
    return _tag_parameters(module, row, number)


def _swap(module: nn.Module, target: type, settings: dict) -> None:
    if not isinstance(module, target):
        cls = module.__dict__.setdefault("_ottava_class", type(module))  # first of several
        plain = next(c for c in target.__mro__ if c.__module__.startswith("torch.nn."))
        own = cls.__module__.startswith("torch.nn.") or not issubclass(cls, plain)
        # A user's subclass of nn.Linear keeps its attributes and methods beside our forward.
        module.__class__ = target if own else mixed_class(target, cls)
    set_on(module, **settings)


def _connect(row: Row, modules: dict[str, nn.Module]) -> None:
    """Tell what makes a tensor which linear of ours reads it, and q, k and v of each other."""
    module, reader = modules[row.name], modules.get(row.reader)
    if row.kind in ("norm", "layernorm", "attention") and "recipe" in module.__dict__:
        ours = isinstance(reader, Linear) and reader.recipe is not None
        set_on(module, reader=reader if ours else None)
    if row.kind == "attention" and row.parts:
        run_together(*(modules[name] for name in row.parts))


def _swap_causal_lm(model: nn.Module) -> None:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(type(inner), "token_loss"):  # it makes its losses itself, whatever wraps it
        model = inner
    if not isinstance(model, ChunkedCausalLM) and why_whole(model) is None:
        model.__dict__["_ottava_class"] = type(model)
        model.__dict__["_ottava_settings"] = ("logits_in_eval",)
        chunk_head(model)


def _swap_block(module: nn.Module) -> None:
    if not isinstance(module, Block):
        module.__dict__["_ottava_class"] = type(module)
        module.__dict__["_ottava_settings"] = ("next_norm",)
        module.__class__ = block_class(type(module))


def _tag_parameters(module: nn.Module, row: Row, number: int) -> None:
    """Tell the optimizer which parameters are FP8 GEMM weights, and which must stay FP32."""
    fp8 = row.recipe is not None and row.recipe.any_fp8 and row.kind in ("linear", "experts")
    fp8 = fp8 and row.recipe.backend == "native"  # Transformer Engine makes codes of its own
    marks = {
        name: {
            "_ottava_stream": 16 * number + index,
            "_ottava_cast": row.recipe.weight if fp8 and parameter.dim() > 1 else None,
            "_ottava_fp32": row.kind == "router",
        }
        for index, (name, parameter) in enumerate(module.named_parameters(recurse=False))
    }
    mark(module, marks)


def revert(model: nn.Module) -> nn.Module:
    """Swap every converted module back; parameters stay the same objects; split masters and frozen
    codes become FP32 weights of the same value. Returns `model`."""
    for module in model.modules():
        original = module.__dict__.pop("_ottava_class", None)
        if original is not None:
            module.__class__ = original
        for name in module.__dict__.pop("_ottava_settings", ()):
            module.__dict__.pop(name, None)
        unmark(module)
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, SplitParameter):
                join_split(parameter)
            elif isinstance(parameter, FrozenParameter):
                thaw(parameter)
        te.leave_alone(module)
        module.__dict__.pop("_history", None)
        module.__dict__.pop("_ottava_plan", None)
    attention_layer.revert_hf(model)
    unwrap_recompute(model)
    return model
