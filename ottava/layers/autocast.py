"""`ottava.autocast`: which recipe is in force, as a stack that nests and always unwinds.

Converted modules run their own recipe. Inside `autocast(enabled=False)` they compute in high
precision; inside `autocast(recipe=...)` they use that recipe instead. The stack is per thread, and
the backward pass uses what its forward used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ..numerics.recipe import Gemm, Recipe, native_recipe

_HIGH = Gemm(fp8=False)
# Every GEMM and everything kept in high precision; needed where a weight is stored as codes.
HIGH = Recipe(name="high", output=_HIGH, grad_input=_HIGH, grad_weight=_HIGH, keep="high")


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[Recipe | None] = []


_stack = _Stack()


@contextmanager
def autocast(
    enabled: bool = True,
    recipe: str | Recipe | None = None,
    *,
    fp8_recipe: str | Recipe | None = None,
) -> Iterator[None]:
    """Run the converted modules inside in 8 bits (`enabled`), or in high precision.

    `recipe` overrides the modules' own (a name or a Recipe); None leaves each its own.
    `fp8_recipe` is the older spelling of `recipe`. Contexts nest; the innermost wins.
    Raises ValueError for an unknown recipe name, or one of Transformer Engine's, before anything runs.
    """
    chosen = recipe if recipe is not None else fp8_recipe
    entry = HIGH if not enabled else (native_recipe(chosen) if chosen is not None else None)
    _stack.entries.append(entry)
    try:
        yield
    finally:
        _stack.entries.pop()


def as_now() -> Callable[[], AbstractContextManager[None]]:
    """What makes a context in which the same is in force as now, in any thread."""
    top = _stack.entries[-1] if _stack.entries else None

    @contextmanager
    def again() -> Iterator[None]:
        _stack.entries.append(top)
        try:
            yield
        finally:
            _stack.entries.pop()

    return again


def recipe_in_force(own: Recipe | None) -> Recipe:
    """The recipe a module with its `own` recipe uses now (HIGH where it has none)."""
    if _stack.entries:
        top = _stack.entries[-1]
        if top is HIGH:
            return HIGH
        if top is not None and own is not None:
            return top
    return own if own is not None else HIGH
