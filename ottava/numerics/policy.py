"""Policy and plan: which module computes and is stored in what, decided before anything runs.

`resolve(model, policy)` (resolve.py) looks at every module once and gives a `Plan`: one row per module that
matters, with a recipe, or without one and the reason. The same plan is printed, applied by
convert, priced by the planner, stored in checkpoints, and names the rows of the monitoring.
Nothing here allocates or changes a module, so it works on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .display import html_table, rich_table
from .kept import stated
from .recipe import Recipe, get_recipe, recipe_from_dict, recipe_to_dict

TE_KEEPS = "what Transformer Engine keeps is its own, and its memory is not planned"
SMALLEST = 16  # FP8 matrix units take multiples of 16; below that, padding costs more than it saves


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules that say which module gets which recipe.

    `keep`: globs over module names that stay in high precision. `first_last_high`: the first and
    the last eligible linear stay high. `smallest`: least in/out features for FP8.
    """

    name: str = "default"
    recipe: Recipe = field(default_factory=lambda: get_recipe("tensor"))
    keep: tuple[str, ...] = ()
    first_last_high: bool = False
    smallest: int = SMALLEST


# `default` keeps embeddings, head, norm parameters, router and softmax high: they are kinds, so no
# glob is needed. `mimo` also keeps what Xiaomi keeps: every o_proj, and the MTP's eh_proj.
POLICIES = {
    "default": Policy(),
    "mimo": Policy(name="mimo", keep=("*.o_proj", "*.eh_proj")),
}


def get_policy(name: str | Policy, **changes) -> Policy:
    """The named policy with `changes` applied; `keep` globs are added to its own."""
    if isinstance(name, str):
        if name not in POLICIES:
            raise ValueError(f"policy: unknown {name!r}; choose one of {', '.join(POLICIES)}")
        name = POLICIES[name]
    keep = name.keep + tuple(changes.pop("keep", ()))
    return replace(name, keep=keep, **changes)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module of the plan. `recipe` is None where it stays in high precision; then `reason`
    says why. `kept` says what the module keeps for backward (kept.py). `params` counts its own
    parameters, tied ones in the first row that has them: over all rows, the model's. `flops` is multiply-adds x 2 of its forward GEMMs per token. `plain`: conversion leaves it its
    class. `earlier`: an earlier conversion gave it its recipe. `frozen`: its (first) weight takes no
    gradient, and no adapter reads its input. `reader`, `parts`: see `linked`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str = ""
    kept: str = ""
    params: int = 0
    flops: int = 0
    plain: bool = False
    earlier: bool = False
    frozen: bool = False
    reader: str = ""
    parts: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Why it stays in high precision, or what it keeps."""
        return self.reason or self.kept + ("; converted before" if self.earlier else "")


def linked(rows: Iterable[Row]) -> tuple[Row, ...]:
    """`rows` with who reads whom, by name; the one place that says so.

    `reader`: the row that reads what this one makes (of several that read the same tensor, the first
    in 8 bits), which decides how it is cast: of an attention o_proj, of a known decoder layer's norms
    q_proj and gate_proj. `parts`: the linears inside a row that may run as one, in order: of a gated
    MLP gate, up and down, of an attention q, k and v.
    """
    rows = tuple(rows)
    known = {r.name: r for r in rows}
    return tuple(replace(r, reader=_reader(r, known), parts=_parts(r, known)) for r in rows)


_BASE = ".base_layer"  # what PEFT calls the layer that an adapter wraps
_PARTS = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj"),
}
_NORM_READERS = {  # in a decoder layer of a known class
    "input_layernorm": [f"self_attn.{n}" for n in ("qkv_proj", *_PARTS["attention"])],
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj", "mlp.experts"],
}


def _inside(row: Row, known: dict[str, Row]) -> str:
    """Prefix of the names of a row's linears. Those of an attention core lie beside it."""
    own = f"{row.name}." if row.name else ""
    if row.kind != "attention" or any(f"{own}o_proj{end}" in known for end in ("", _BASE)):
        return own
    parent, dot, _ = row.name.rpartition(".")
    return parent + dot


def _reader(row: Row, known: dict[str, Row]) -> str:
    parent, dot, last = row.name.rpartition(".")
    names = []
    if row.kind == "attention":
        names = [_inside(row, known) + "o_proj"]
    elif row.kind in ("norm", "layernorm") and parent in known and known[parent].kind == "block":
        names = [parent + dot + n for n in _NORM_READERS.get(last, ())]
    found = [known[n + end] for n in names for end in ("", _BASE) if n + end in known]
    return next((r.name for r in found if r.recipe), found[0].name if found else "")


def _parts(row: Row, known: dict[str, Row]) -> tuple[str, ...]:
    names = tuple(_inside(row, known) + n for n in _PARTS.get(row.kind, ()))
    return names if all(n in known for n in names) else ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The resolved table. `emulated`: FP8 GEMMs run as dequantize-and-multiply on this device."""

    rows: tuple[Row, ...]
    policy: str = "default"
    emulated: bool = False
    recompute: str = "none"

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def num_fp8(self) -> int:
        """Modules with at least one GEMM in FP8 (or its exact emulation)."""
        return sum(bool(r.recipe and r.recipe.any_fp8 and r.flops) for r in self.rows)

    @property
    def num_kept(self) -> int:
        """Modules that keep 8-bit codes for backward."""
        return sum(bool(r.recipe and r.recipe.keeps_codes) for r in self.rows)

    def _share(self, what: str) -> float:
        total = sum(getattr(r, what) for r in self.rows)
        reads = (r for r in self.rows if r.recipe and r.recipe.any_fp8 and r.flops)
        ours = sum(getattr(r, what) for r in reads)
        return ours / total if total else 0.0

    @property
    def share_weights(self) -> float:
        """Share of all parameters that FP8 GEMMs read (their biases too, norms not), 0 to 1."""
        return self._share("params")

    @property
    def share_flops(self) -> float:
        """Share of the forward FLOPs per token of linears, experts, routers and the head that run
        in FP8, 0 to 1. What a module of kind "other" computes is not known, and not in it."""
        return self._share("flops")

    def demote(self, name: str, reason: str) -> Plan:
        """A plan in which row `name` stays in high precision, for `reason`."""
        return self.with_row(replace(self[name], recipe=None, reason=reason))

    def with_row(self, row: Row) -> Plan:
        """A plan with `row` in place of the one of its name, and what is kept then."""
        rows = tuple(row if r.name == row.name else r for r in self.rows)
        only = {row.name, *row.parts} | {r.name for r in rows if row.name in (r.reader, *r.parts)}
        return replace(self, rows=stated(rows, self.recompute, only))

    def explain(self, kind: str, reason: str) -> Plan:
        """A plan in which the rows of `kind` carry this reason."""
        rows = tuple(replace(r, reason=reason) if r.kind == kind else r for r in self.rows)
        return replace(self, rows=rows)

    def to_dict(self) -> dict:
        """Plain data (JSON); `Plan.from_dict` reads it back equal."""
        rows = []
        for r in self.rows:
            row = {**vars(r), "shape": list(r.shape), "parts": list(r.parts)}
            row["recipe"] = recipe_to_dict(r.recipe) if r.recipe else None
            rows.append(row)
        head = {k: getattr(self, k) for k in ("policy", "emulated", "recompute")}
        return {**head, "rows": rows}

    @classmethod
    def from_dict(cls, data: dict) -> Plan:
        """The plan stored by `to_dict`. One from before rows named their readers gets them here."""
        rows = tuple(
            Row(
                **{
                    **r,
                    "shape": tuple(r["shape"]),
                    "recipe": recipe_from_dict(r["recipe"]) if r["recipe"] else None,
                    "parts": tuple(r.get("parts", ())),
                }
            )
            for r in data["rows"]
        )
        if any("reader" not in r for r in data["rows"]):
            rows = linked(rows)
        return cls(rows=rows, **{k: data[k] for k in ("policy", "emulated", "recompute")})

    def difference(self, other: Plan) -> str | None:
        """The first row in which two plans differ, in words; None when they agree. Rows of kind
        "other" decide nothing, and earlier plans had none."""
        mine, theirs = ({r.name: r for r in p.rows if r.kind != "other"} for p in (self, other))
        for name in mine | theirs:
            a, b = mine.get(name), theirs.get(name)
            if a is None or b is None:
                return f"{name}: only in {'the second' if a is None else 'the first'} plan"
            if (a.kind, a.shape, a.recipe) != (b.kind, b.shape, b.recipe):
                return (
                    f"{name}: {a.kind} {a.shape} {a.recipe} against {b.kind} {b.shape} {b.recipe}"
                )
        return None

    def __str__(self) -> str:
        head, rows, _ = self._cells()
        width = max(44, *(len(row[0]) for row in rows), 0)
        lines = [
            f"{n:{width}} {k:10} {s:18} {how:30} {label}".rstrip()
            for n, k, s, how, label in [head, *rows]
        ]
        return "\n".join([*lines, self.summary()])

    def groups(self) -> list[tuple[str, list[Row]]]:
        """Rows that differ in layer numbers alone, together, in order of first appearance."""
        out: dict[tuple, tuple[str, list[Row]]] = {}
        for r in self.rows:
            name = ".".join("*" if p.isdigit() else p for p in r.name.split("."))
            key = (name, r.kind, r.shape, r.recipe, r.label)
            out.setdefault(key, (name, []))[1].append(r)
        return list(out.values())

    def summary(self) -> str:
        """One line: how many modules, and the share of weights and FLOPs, run in FP8."""
        unit = "FP8, emulated: no FP8 unit for it here" if self.emulated else "FP8"
        unknown = any(r.kind == "other" and len(r.shape) > 1 for r in self.rows)
        whose = "the linears' FLOPs" if unknown else "the GEMM FLOPs"
        again = "; each layer keeps its input alone and runs again"
        layers = again if self.recompute == "layer" else ""
        return (
            f"{self.num_fp8} modules in {unit}; {self.share_weights:.1%} of the weights, "
            f"{self.share_flops:.1%} of {whose}; {self.num_kept} keep 8-bit codes"
            f"{layers}{self._theirs}"
        )

    @property
    def _theirs(self) -> str:
        used = any(r.recipe and r.recipe.backend == "te" for r in self.rows)
        return f"; {TE_KEEPS}" if used else ""

    def _cells(self) -> tuple[list[str], list[list[str]], list[bool]]:
        """(column titles, texts of each group of rows, whether it stays in high precision)."""
        texts, high = [], []
        for name, rows in self.groups():
            r = rows[0]
            how = r.recipe.name if r.recipe else "high"
            if r.recipe and self.emulated and r.recipe.any_fp8:
                how += " (emulated)"
            label = name if len(rows) == 1 else f"{name} ({len(rows)}x)"
            texts.append([label, r.kind, "x".join(map(str, r.shape)), how, r.label])
            high.append(r.recipe is None)
        return ["module", "kind", "shape", "computes in", "kept / reason"], texts, high

    def _repr_html_(self) -> str:
        head, rows, high = self._cells()
        return html_table(head, rows, self.summary(), high)

    def __rich__(self) -> Any:
        head, rows, high = self._cells()
        return rich_table(head, rows, self.summary(), high)
