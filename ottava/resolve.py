"""From a policy and a model to a plan: what each module is, and what follows from its neighbours.

Modules are recognised by exact class or by structure, never by a part of a class name.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from .kernels.frozen import FrozenParameter
from .layers import te
from .numerics.kept import stated
from .numerics.policy import Plan, Policy, Row, linked
from .numerics.recipe import BLOCK128, STORAGE

# Norm classes whose forward is exactly x / rms(x) * weight (no 1 + weight, no second output).
# Matched by full class name: a look-alike with other maths must not be swapped.
_RMS_CLASSES = {"torch.nn.modules.normalization.RMSNorm"} | {
    f"transformers.models.{m}.modeling_{m}.{c}RMSNorm"
    for m, c in {
        "llama": "Llama",
        "mistral": "Mistral",
        "mixtral": "Mixtral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "mimo_v2_flash": "MiMoV2Flash",
    }.items()
}
_MODELS, _LAYERS = "ottava.models.", "ottava.layers."
# Fused 3-D experts whose forward is down(silu(gate) * up) per expert, without bias.
_EXPERTS = {
    f"transformers.models.{m}.modeling_{m}.{c}Experts"
    for m, c in {
        "mixtral": "Mixtral",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "mimo_v2_flash": "MiMoV2Flash",
    }.items()
}
# Attention modules that call transformers' attention interface between q/k/v_proj and o_proj.
_HF_ATTENTION = {
    f"transformers.models.{m}.modeling_{m}.{c}Attention"
    for m, c in {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}.items()
}
# Decoder layers that are x + attention(norm(x)), then h + mlp(norm(h)), with nothing between.
_BLOCKS = {f"{_MODELS}blocks.DecoderLayer"} | {
    p.removesuffix("Attention") + "DecoderLayer" for p in _HF_ATTENTION
}


def original_class(module: nn.Module) -> type:
    """The module's class before conversion."""
    return module.__dict__.get("_ottava_class", type(module))


def kind_of(module: nn.Module, name: str, parent: nn.Module | None) -> str | None:
    """What a module is to the plan, or None where it holds nothing that the plan decides.

    Kinds: linear, norm, layernorm, mlp, attention, block, experts, router, embedding, head,
    causal_lm. (`resolve` adds "other": a module with parameters of its own that is none of these.)
    By exact class or by structure, never by a part of a class name.
    """
    cls = original_class(module)
    path = f"{cls.__module__}.{cls.__qualname__}"
    ours = path.startswith(_MODELS)
    if isinstance(module, nn.Linear):
        siblings = dict(parent.named_children()) if parent is not None else {}
        if name.rpartition(".")[2] in ("gate", "router") and "experts" in siblings:
            return "router"
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if path in _RMS_CLASSES or (ours and cls.__name__ == "RMSNorm"):
        return "norm"
    if cls is nn.LayerNorm and len(module.normalized_shape) == 1:
        return "layernorm"
    if ours and cls.__name__ in ("AttentionCore", "Experts", "Router"):
        return {"AttentionCore": "attention"}.get(cls.__name__, cls.__name__.lower())
    if path in _HF_ATTENTION:
        return "attention"
    if path in _BLOCKS:
        return "block"
    parameters = dict(module.named_parameters(recurse=False))
    if {"gate_up_proj", "down_proj"} <= set(parameters) and parameters["down_proj"].dim() == 3:
        return "experts"
    if is_gated_mlp(module):
        return "mlp"
    return None


def is_gated_mlp(module: nn.Module) -> bool:
    """A module whose forward is down_proj(silu(gate_proj(x)) * up_proj(x)), by structure."""
    children = dict(module.named_children())
    names = {"gate_proj", "up_proj", "down_proj"}
    if not names <= set(children) or len(set(children) - names - {"act_fn"}) > 0:
        return False
    activation = getattr(module, "act_fn", None)
    silu = isinstance(activation, nn.SiLU) or activation is nn.functional.silu
    silu = silu or type(activation).__name__ == "SiLUActivation"
    return silu and all(isinstance(children[n], nn.Linear) for n in names)


def resolve(
    model: nn.Module, policy: Policy, *, emulated: bool = False, recompute: str = "none"
) -> Plan:
    """The plan of `policy` for `model`. Works on meta tensors; changes nothing.

    Raises ValueError when FP8 was asked for and no module is eligible, with the reasons.
    """
    named = list(model.named_modules(remove_duplicate=True))
    modules = dict(named)
    head = _output_head(model)
    tied = _tied_to_embedding(model)
    rows: list[Row] = []
    counted: set[int] = set()  # parameters; a tied one belongs to the first row that has it
    for name, module in named:
        parent = modules.get(name.rpartition(".")[0]) if name else None
        kind = kind_of(module, name, parent)
        if kind == "linear" and (module is head or name.rpartition(".")[2] == "lm_head"):
            kind = "head"
        own = {id(p): p.numel() for p in module.parameters(recurse=False)}
        params = sum(numel for key, numel in own.items() if key not in counted)
        if kind is None and own:
            rows.append(_other(name, module, params))
        if kind is not None:
            frozen = _keeps_no_input(name, kind, modules)
            row = replace(_row(name, kind, module, policy, tied), params=params, frozen=frozen)
            if kind == "linear" and _is_adapter(name, modules):
                row = replace(row, recipe=None, reason="adapter of a base layer")
            rows.append(row)
        counted.update(own)
    rows = _first_last(rows, policy)
    if head is not None and callable(getattr(model, "get_decoder", None)):
        own = sum(r.params for r in rows if not r.name)  # one row for the model itself
        whole = Row(name="", kind="causal_lm", shape=(), recipe=None, reason="head in chunks")
        rows = [*(r for r in rows if r.name), replace(whole, params=own)]
    rows = stated(_second_pass(linked(rows), modules), recompute)
    plan = Plan(rows=tuple(rows), policy=policy.name, emulated=emulated, recompute=recompute)
    if policy.recipe.any_fp8 and plan.num_fp8 == 0:
        raise ValueError(_nothing_eligible(rows))
    return plan


def _is_adapter(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a linear belongs to an adapter (LoRA): to a module with a `base_layer` that it is
    not part of. Adapters are small, are what trains, and start at zero."""
    parts = name.split(".")
    return any(
        parts[i] != _BASE and hasattr(modules[".".join(parts[:i])], _BASE)
        for i in range(len(parts))
    )


def _nothing_eligible(rows: Iterable[Row]) -> str:
    reasons = [f"{r.name or 'the model'}: {r.reason}" for r in rows if r.kind in _GEMM_KINDS]
    why = "; ".join(reasons[:3]) or "the model has no nn.Linear and no fused experts"
    return f"plan: FP8 was asked for and no module is eligible ({why}); change keep or the policy"


_GEMM_KINDS = ("linear", "experts", "head", "router")


def _output_head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def _tied_to_embedding(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _other(name: str, module: nn.Module, params: int) -> Row:
    """The row of a module that holds parameters and of which nothing is known but those."""
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, nn.Parameter) else ()
    why = f"{original_class(module).__name__}: no 8-bit form"
    return Row(
        name=name, kind="other", shape=shape, recipe=None, reason=why, params=params, plain=True
    )


def _row(name: str, kind: str, module: nn.Module, policy: Policy, tied: set[int]) -> Row:
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
    flops = 0
    if kind in ("linear", "head", "router"):
        flops = 2 * math.prod(shape)
    elif kind == "experts":
        shape = tuple(module.gate_up_proj.shape)
        used = getattr(module, "top_k", None) or getattr(module, "num_experts_per_tok", 1)
        numel = sum(p.numel() for p in module.parameters(recurse=False))
        flops = 2 * numel * int(used) // max(shape[0], 1)
    row = Row(name=name, kind=kind, shape=shape, recipe=None, flops=flops)
    glob = next((g for g in policy.keep if fnmatch.fnmatchcase(name, g)), None)
    if glob is not None:
        recipe = module.__dict__.get("recipe") if "_ottava_class" in module.__dict__ else None
        if recipe is not None:  # no conversion undoes another
            return replace(row, recipe=recipe, earlier=True)
        return replace(row, reason=f"kept by {glob!r}", plain=True)
    if kind in ("embedding", "router"):
        return replace(row, reason=f"{kind}: high by policy {policy.name!r}")
    if kind == "block":
        return replace(row, reason="residual sums inside its norms")
    if kind == "head":
        return replace(row, reason=f"output head: high by policy {policy.name!r}")
    if kind == "linear":
        cls = original_class(module)
        if cls.forward is not nn.Linear.forward and not cls.__module__.startswith(_LAYERS):
            return replace(row, reason=f"{cls.__name__} has its own forward")
        if cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
            return replace(row, reason="the attention around it reads the weight itself")
        if "weight" not in module._parameters:
            return replace(row, reason="its weight is computed (a parametrization), not stored")
        if id(weight) in tied:
            return replace(row, reason="weight tied to an embedding")
        if min(shape) < policy.smallest:
            return replace(row, reason=f"{min(shape)} features < {policy.smallest}")
    if isinstance(weight, FrozenParameter) or _frozen_experts(module):
        if not policy.recipe.any_fp8:
            return replace(row, reason="frozen codes, dequantized to compute")
        return replace(row, recipe=BLOCK128)
    theirs = policy.recipe.backend == "te" and kind in ("linear", "experts")
    if theirs and (why := te.why_not(kind, module, policy.recipe)):
        return replace(row, reason=why)
    if kind == "experts":
        cls = original_class(module)
        path = f"{cls.__module__}.{cls.__qualname__}"
        if path not in _EXPERTS and not path.startswith((_MODELS, _LAYERS)):
            why = f"fused experts of a class without a known forward ({cls.__name__}): high"
            return replace(row, reason=why)
    return replace(row, recipe=policy.recipe) if kind in ("linear", "experts") else row


def _frozen_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "gate_up_proj", None), FrozenParameter)


def _keeps_no_input(name: str, kind: str, modules: dict[str, nn.Module]) -> bool:
    """Whether backward needs nothing of a module's input: its (first) weight takes no gradient, and
    no adapter of that weight, run in the same layer, reads the input."""
    which = {"linear": "weight", "experts": "gate_up_proj"}.get(kind)
    weight = getattr(modules[name], which, None) if which else None
    if weight is None or weight.requires_grad:
        return False
    while kind == "experts" and name.endswith(f".{_BASE}"):
        name = name.removesuffix(f".{_BASE}")
        if getattr(modules[name], "parameter_name", "") == which:
            return False
    return True


def _first_last(rows: list[Row], policy: Policy) -> list[Row]:
    if not policy.first_last_high:
        return rows
    eligible = [r.name for r in rows if r.kind == "linear" and r.recipe]
    ends = {eligible[0], eligible[-1]} if eligible else set()
    return [
        replace(r, recipe=None, reason="first or last linear") if r.name in ends else r
        for r in rows
    ]


def _second_pass(rows: Iterable[Row], modules: dict[str, nn.Module]) -> list[Row]:
    """Kinds that depend on other rows: norms carry codes where a linear reads them, a gated MLP
    fuses where its three linears agree, attention keeps 8 bits where its linears do."""
    planned = {r.name: r for r in rows}
    return [_dependent(r, modules, planned) for r in rows]


def _dependent(row: Row, modules: dict[str, nn.Module], planned: dict[str, Row]) -> Row:
    parent = row.name.rpartition(".")[0]
    near = [r for r in planned.values() if _within(r.name, parent, 2) and r.recipe]
    if row.plain:
        return row
    if row.kind in ("norm", "layernorm"):
        width = row.shape[0] if row.shape else 0
        readers = [r for r in near if r.kind in ("linear", "experts") and r.shape[-1] == width]
        if row.reader:  # known, and not only by its width
            readers = [planned[row.reader]] if planned[row.reader].recipe else []
        if readers and readers[0].recipe.keeps_codes:
            return replace(row, recipe=readers[0].recipe)
        if readers and readers[0].recipe.backend == "te":  # whose fused norms fit one reader only
            return replace(row, recipe=STORAGE)
        return replace(row, reason="no 8-bit linear reads it")
    if row.kind == "mlp":
        recipes = {planned[name].recipe for name in row.parts}
        biased = any(modules[name].bias is not None for name in row.parts)
        if len(recipes) == 1 and None not in recipes and not biased:
            return replace(row, recipe=recipes.pop())
        why = "its linears have a bias" if biased else "its three linears differ in recipe"
        return replace(row, reason=f"not fused: {why}")
    if row.kind == "attention":
        theirs = bool(near) and near[0].recipe.backend == "te"
        if near and (near[0].recipe.keeps_codes or theirs):
            recipe = near[0].recipe
            if theirs:
                recipe = replace(STORAGE, attention=recipe.attention)
            return replace(row, recipe=recipe)
        return replace(row, reason="no 8-bit linear beside it")
    return row


_BASE = "base_layer"  # what PEFT calls the layer that an adapter wraps


def _within(name: str, parent: str, depth: int) -> bool:
    name = name.removesuffix(f".{_BASE}")
    if parent and not name.startswith(parent + "."):
        return False
    rest = name[len(parent) + 1 :] if parent else name
    return rest != "" and rest.count(".") < depth
