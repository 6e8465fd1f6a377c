"""What each kind of module keeps for backward, from its recipe and those around it: the one place
that says so. The layers do it; tests/test_kept.py holds the two against each other.

Small things go unsaid: scales, the log-sum-exp and rstd (one number a row), orders of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .formats import BLOCK
from .recipe import Recipe

if TYPE_CHECKING:
    from .policy import Row

_GRAINS = {"q, k, v": "per head row", "gate and up": f"(groups of {BLOCK})"}


@dataclass(frozen=True)
class Held:
    """One thing that is kept. `what`: "input", "output", "q, k, v", "gate and up", or "gate, its
    SiLU and up". `form`: a format of codes, "int8", "high" (as it is), or "te" (as Transformer Engine
    keeps it)."""

    what: str
    form: str

    def __str__(self) -> str:
        if self.form == "high":
            return f"{self.what}, high precision"
        if self.form == "te":
            return f"{self.what}, as Transformer Engine keeps it"
        if self.what in ("input", "output"):
            return f"{self.what} codes ({self.form})"
        return f"{self.what} in {self.form} {_GRAINS[self.what]}"


def kept_of(
    kind: str,
    recipe: Recipe | None,
    *,
    reader: Recipe | None = None,
    recompute: str = "none",
    frozen: bool = False,
) -> tuple[Held, ...]:
    """What a module of `kind` keeps under `recipe`, being run by itself.

    reader: the recipe of the linear that reads an attention's output; None where it is high.
    recompute: of "none" and "mlp". frozen: nothing needs the gradient of the (first) weight.
    Raises ValueError for a kind that keeps nothing of its own.
    """
    codes = recipe is not None and recipe.keeps_codes
    theirs = recipe is not None and recipe.backend == "te"
    made = recipe.input.format if recipe is not None and codes else "te" if theirs else "high"
    if kind == "linear":
        return () if frozen else (Held("input", made),)
    if kind in ("norm", "layernorm"):
        return (Held("output", made),)
    if kind == "attention":
        out = reader.input.format if codes and reader and reader.keeps_codes else "high"
        qkv = recipe.attention if recipe is not None and codes else "high"
        return Held("q, k, v", qkv), Held("output", out)
    if kind == "mlp" and theirs:  # whose linears keep their inputs
        return (Held("gate and up", "int8"),)
    if kind == "mlp":
        if not codes:  # its linears run one by one, and keep their own
            return (Held("gate, its SiLU and up", "high"),)
        inner = () if recompute == "mlp" else (Held("gate and up", "int8"),)
        return Held("input", made), *inner
    if kind == "experts":
        form = "high" if made == "high" else "int8"
        again = recompute == "mlp" and not theirs
        inner = () if again else (Held("gate and up", form),)
        own = Held("input", "e4m3" if codes else made)  # no grouped GEMM takes e5m2
        return inner if frozen and inner else (own, *inner)
    raise ValueError(f"kept_of: {kind!r} keeps nothing of its own")


def stated(rows: Iterable[Row], recompute: str, only: Collection[str] | None = None):
    """`rows` (all of a plan's) with what each keeps in words; `only`: of the rows so named.

    recompute: "none", "mlp", or "layer". Under "layer" a row keeps what it says from its layer's
    second run on.
    """
    rows = tuple(rows)
    known = {r.name: r for r in rows}
    fused = {
        r.name: r for r in rows if r.kind == "mlp" and r.recipe and r.recipe.backend == "native"
    }
    inside = {part for r in fused.values() if r.recipe.keeps_codes for part in r.parts}

    def text(row: Row) -> str:
        norm = row.kind in ("norm", "layernorm")
        if row.plain or row.kind in _SILENT or (row.recipe is None and not norm):
            return ""
        if row.name in inside:
            return "in its MLP"
        if recompute == "mlp" and _runs_again(row.name, fused):
            return "nothing: its MLP runs again"
        reader = known.get(row.reader)
        held = kept_of(
            row.kind, row.recipe, reader=reader.recipe if reader else None, recompute=recompute,
            frozen=row.frozen,
        )  # fmt: skip
        said = [str(h) for h in held]
        if row.frozen and not any(h.what == "input" for h in held):
            said.append("no input: its weight is frozen")
        return "; ".join(said)

    return tuple(
        r if only is not None and r.name not in only else replace(r, kept=text(r)) for r in rows
    )


_SILENT = ("block", "causal_lm", "embedding", "head", "router", "other")


def _runs_again(name: str, fused: Collection[str]) -> bool:
    """Whether a row lies in an MLP that recompute.py runs again as a whole: one not fused."""
    parts = name.split(".")
    ends = (i + 1 for i, part in enumerate(parts) if part == "mlp")
    return any(".".join(parts[:end]) not in fused for end in ends)
