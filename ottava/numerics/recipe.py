"""A recipe: how one module computes and what it keeps for backward.

A linear layer has three GEMMs (`output`, `grad_input`, `grad_weight`) over three operands
(`input`, `weight`, `grad_output`). A recipe says how each operand is cast and how each GEMM runs;
there is nothing else to know about an FP8 linear, and `str(recipe)` prints all of it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from .formats import FORMATS

Granularity = Literal["tensor", "row", "group", "block"]
ScaleKind = Literal["fp32", "pow2"]
Scaling = Literal["current", "delayed"]
Rounding = Literal["nearest", "stochastic"]
AmaxFrom = Literal["max", "most_recent"]
Keep = Literal["auto", "codes", "high"]
AttentionKeep = Literal["int8", "e4m3", "high"]
ATTENTION_KEEPS = get_args(AttentionKeep)
Backend = Literal["native", "te"]
TE_NAMES = ("te:delayed", "te:current", "te:block", "te:mxfp8")


def _choose(owner: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{owner}.{name}: {value!r} is not one of {', '.join(choices)}{hint}")


@dataclass(frozen=True, kw_only=True)
class Cast:
    """How one operand becomes codes. Granularity is along the GEMM's inner dimension K:

    "tensor" one scale; "row" one per row; "group" one per 1 x 128; "block" one per 128 x 128.
    scale = amax / format.max * 2**margin, rounded up to a power of two for scale_kind "pow2",
    so that nothing clips. "delayed" takes amax from the last `history` steps ("max" or
    "most_recent" of them) and is per tensor only.
    """

    format: str = "e4m3"
    granularity: Granularity = "tensor"
    scale_kind: ScaleKind = "fp32"
    scaling: Scaling = "current"
    rounding: Rounding = "nearest"
    margin: int = 0
    history: int = 16
    amax_from: AmaxFrom = "max"

    def __post_init__(self) -> None:
        _choose("Cast", "format", self.format, tuple(FORMATS))
        for name, kind in (
            ("granularity", Granularity),
            ("scale_kind", ScaleKind),
            ("scaling", Scaling),
            ("rounding", Rounding),
            ("amax_from", AmaxFrom),
        ):
            _choose("Cast", name, getattr(self, name), get_args(kind))
        if self.scaling == "delayed" and self.granularity != "tensor":
            raise ValueError(
                f"Cast.scaling: 'delayed' keeps one amax per tensor; granularity is "
                f"{self.granularity!r}: use granularity='tensor' or scaling='current'"
            )
        if self.history < 1:
            raise ValueError(f"Cast.history: {self.history} must be at least 1")

    @property
    def splits(self) -> bool:
        """Whether a weight cast so can be its own codes: e4m3, one power-of-two scale."""
        return (self.format, self.granularity, self.scale_kind) == ("e4m3", "tensor", "pow2") and (
            self.scaling,
            self.rounding,
        ) == ("current", "nearest")

    def __str__(self) -> str:
        parts = [self.format, self.granularity]
        parts += [p for p in (self.scale_kind, self.scaling, self.rounding) if p not in _SILENT]
        return "/".join(parts)


_SILENT = ("fp32", "current", "nearest")


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """How one GEMM runs. `fp8=False` leaves it in high precision (BF16 or the module's dtype).

    `fast_accum` lets the tensor core keep its short accumulator (about 14 bits of a product sum on
    Hopper) for all of K; False promotes to FP32 along the way.
    """

    fp8: bool = True
    fast_accum: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one linear-like module computes and what it keeps.

    `keep`: what is kept of the input for `grad_weight`. "auto" keeps codes when that GEMM runs in
    FP8 and the high-precision input when it does not; "codes" always keeps codes (8-bit storage
    under high-precision compute: the `storage` preset); "high" always keeps high precision.
    `attention`: what an attention keeps q, k and v as, where the recipe keeps codes: "int8" or "e4m3"
    with one scale per head row, or "high" as they are.
    `backend`: "native", or "te" for Transformer Engine, whose recipe the name says (te:current ...);
    casts and GEMMs are then its own (those here name the formats), and so is what a linear keeps.
    `options`: (name, value) of its recipe's own options, checked where it is used.
    """

    name: str = "custom"
    input: Cast = field(default_factory=Cast)
    weight: Cast = field(default_factory=Cast)
    grad_output: Cast = field(default_factory=lambda: Cast(format="e5m2"))
    output: Gemm = field(default_factory=lambda: Gemm(fast_accum=True))
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)
    keep: Keep = "auto"
    attention: AttentionKeep = "int8"
    backend: Backend = "native"
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _choose("Recipe", "keep", self.keep, get_args(Keep))
        _choose("Recipe", "attention", self.attention, ATTENTION_KEEPS)
        _choose("Recipe", "backend", self.backend, get_args(Backend))
        if self.options and self.backend == "native":
            raise ValueError(
                f"Recipe.options: {self.options[0][0]!r} is for a recipe of Transformer Engine's "
                f"({', '.join(TE_NAMES)}), and this is {self.name!r}"
            )
        if self.backend == "te":
            _choose("Recipe", "name", self.name, TE_NAMES)
        if self.weight.scaling == "delayed":
            raise ValueError(
                "Recipe.weight: scaling 'delayed' would be a guess; a weight's own amax is known: use "
                "scaling='current'"
            )
        lengths = {c.history for c in (self.input, self.grad_output) if c.scaling == "delayed"}
        if len(lengths) > 1:
            raise ValueError(
                f"Recipe: history {self.input.history} for input and {self.grad_output.history} for "
                "grad_output; a module keeps one length: give both the same"
            )
        if self.input.granularity == "block" or self.grad_output.granularity == "block":
            raise ValueError(
                "Recipe: 128 x 128 blocks are for the weight; use granularity='group' "
                "(1 x 128) for input and grad_output"
            )
        if "e5m2" == self.input.format == self.weight.format and self.output.fp8:
            raise ValueError(
                "Recipe: e5m2 x e5m2 is refused by FP8 matrix units; use e4m3 for input or weight"
            )
        if "e5m2" == self.grad_output.format == self.weight.format and self.grad_input.fp8:
            raise ValueError("Recipe: grad_output and weight are both e5m2; use e4m3 for one")
        if "e5m2" == self.grad_output.format == self.input.format and self.grad_weight.fp8:
            raise ValueError("Recipe: grad_output and input are both e5m2; use e4m3 for one")
        if "group" in (self.input.granularity, self.grad_output.granularity):
            casts = {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}
            wide = [n for n, c in casts.items() if c.format != "e4m3"]
            if wide and self.any_fp8:
                raise ValueError(
                    f"Recipe: {wide[0]} is e5m2, and FP8 units take e4m3 only under 1 x 128 scales"
                )
        grains = {"tensor", "row"} & {c.granularity for c in (self.input, self.grad_output)}
        blocks = {"group", "block"} & {
            c.granularity for c in (self.input, self.grad_output, self.weight)
        }
        if self.weight.granularity in ("tensor", "row"):
            grains |= {self.weight.granularity}
        if (grains and blocks) or len(grains) > 1:
            raise ValueError(
                "Recipe: operands mix granularities "
                f"(input {self.input.granularity}, weight {self.weight.granularity}, grad_output "
                f"{self.grad_output.granularity}); use 'tensor' for all, 'row' for all, or "
                "'group' for input and grad_output with 'block' for weight"
            )

    @property
    def any_fp8(self) -> bool:
        """Whether at least one GEMM runs in FP8."""
        return self.output.fp8 or self.grad_input.fp8 or self.grad_weight.fp8

    @property
    def keeps_codes(self) -> bool:
        """Whether the input is kept for backward as 8-bit codes."""
        return self.keep == "codes" or (self.keep == "auto" and self.grad_weight.fp8)

    @property
    def delayed(self) -> bool:
        """Whether any operand uses delayed scaling (and so needs an amax history)."""
        return "delayed" in (self.input.scaling, self.grad_output.scaling)

    @property
    def history(self) -> int:
        """Steps of amax that a module under this recipe remembers."""
        return (self.grad_output if self.input.scaling == "current" else self.input).history

    def __str__(self) -> str:
        if self.backend == "te":
            options = "".join(f", {name}={value!r}" for name, value in self.options)
            return f"{self.name}(Transformer Engine{options})"
        gemms = "".join(
            ("F" if g.fast_accum else "8") if g.fp8 else "-"
            for g in (self.output, self.grad_input, self.grad_weight)
        )
        qkv = "" if self.attention == "int8" else f" qkv={self.attention}"
        return (
            f"{self.name}(x={self.input} w={self.weight} dy={self.grad_output} gemm={gemms}{qkv})"
        )


def _grained(name: str, *, input: str, weight: str, format: str = "e5m2", kind: str = "fp32"):
    return Recipe(
        name=name,
        input=Cast(granularity=input, scale_kind=kind),
        weight=Cast(granularity=weight, scale_kind=kind),
        grad_output=Cast(format=format, granularity=input, scale_kind=kind),
    )


# One scale per tensor, from the tensor itself: the fast path on Hopper.
TENSOR = replace(
    _grained("tensor", input="tensor", weight="tensor"),
    weight=Cast(scale_kind="pow2"),  # pow2: the split master's codes are these codes
)
# One scale per row of each GEMM's operands; e4m3 throughout, since a row's range is narrow.
ROW = _grained("row", input="row", weight="row", format="e4m3")
# DeepSeek-V3 / MiMo: 1 x 128 for input and grad_output, 128 x 128 for weight, e4m3 throughout.
BLOCK128 = _grained("block", input="group", weight="block", format="e4m3")
# One scale per tensor, from the amax of earlier steps (no extra pass over the data).
DELAYED = Recipe(
    name="delayed",
    input=Cast(scaling="delayed"),
    weight=Cast(scale_kind="pow2"),
    grad_output=Cast(format="e5m2", scaling="delayed"),
)
# Everything kept is 8-bit, everything computed is high precision: any GPU, A100 too.
STORAGE = Recipe(
    name="storage",
    output=Gemm(fp8=False),
    grad_input=Gemm(fp8=False),
    grad_weight=Gemm(fp8=False),
    keep="codes",
)
RECIPES = {r.name: r for r in (TENSOR, ROW, BLOCK128, DELAYED, STORAGE)}
# Transformer Engine's: e4m3, and e5m2 for gradients under one scale per tensor.
TE_RECIPES = {
    name: Recipe(
        name=name,
        backend="te",
        grad_output=Cast(format="e5m2" if name in ("te:delayed", "te:current") else "e4m3"),
        keep="high",
    )
    for name in TE_NAMES
}
RECIPE_NAMES = (*RECIPES, *TE_NAMES)


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A named recipe, or the recipe itself. Raises ValueError with the nearest name."""
    if isinstance(recipe, Recipe):
        return recipe
    _choose("recipe", "name", recipe, RECIPE_NAMES)
    return {**RECIPES, **TE_RECIPES}[recipe]


def native_recipe(recipe: str | Recipe) -> Recipe:
    """The same, of Ottava's own kernels. Raises ValueError for one of Transformer Engine's."""
    found = get_recipe(recipe)
    if found.backend != "native":
        raise ValueError(
            f"{found.name}: for converted models only (ottava.convert(model, recipe={found.name!r})); "
            "around a forward enter Transformer Engine's own te.autocast"
        )
    return found


def te_recipe(name: str, **options: Any) -> Recipe:
    """A recipe of Transformer Engine's (te:delayed, te:current, te:block, te:mxfp8) with options of
    its own class, such as amax_history_len=16 or fp8_format="E4M3".

    Raises ValueError for another name, and in `plan` for an option that it has not.
    """
    _choose("recipe", "name", name, TE_NAMES)
    return replace(TE_RECIPES[name], options=tuple(sorted(options.items())))


def recipe_to_dict(recipe: Recipe) -> dict:
    """Plain data for checkpoints and JSON; `recipe_from_dict` reads it back equal."""
    out = {}
    for f in fields(recipe):
        value = getattr(recipe, f.name)
        if isinstance(value, Cast | Gemm):
            value = {g.name: getattr(value, g.name) for g in fields(value)}
        out[f.name] = dict(value) if f.name == "options" else value
    return out


def recipe_from_dict(data: dict) -> Recipe:
    """The recipe stored by `recipe_to_dict`. Raises ValueError on an unknown field."""
    known = {f.name for f in fields(Recipe)}
    if unknown := set(data) - known:
        raise ValueError(f"recipe: unknown field {sorted(unknown)[0]!r}")
    types = {"input": Cast, "weight": Cast, "grad_output": Cast}
    types |= {"output": Gemm, "grad_input": Gemm, "grad_weight": Gemm}
    values = {k: types[k](**v) if k in types else v for k, v in data.items()}
    values["options"] = tuple(dict(values.get("options", ())).items())
    return Recipe(**values)
