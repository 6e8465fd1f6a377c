"""From a linear's forward to an operator: how many of our functions and files lie between, counted
from the frames of a real call."""

import sys
from pathlib import Path

import pytest
import torch

import ottava
from ottava.layers.linear import Linear
from ottava.numerics.recipe import RECIPES

ROOT = Path(ottava.__file__).parent
FRAMES, FILES = 5, 4  # at most, the module itself included


def chains(call) -> list[tuple[str, list[str]]]:
    """(operator, our functions that led to it, as "file:function") of every operator that runs."""
    found = []

    def look(frame, event, _):
        operator = frame.f_locals.get("self") if event == "call" else None
        if isinstance(operator, torch._ops.OpOverload) and operator.namespace == "ottava":
            found.append((operator._opname, _ours(frame)))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def _ours(frame) -> list[str]:
    out = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            out.append(f"{path.relative_to(ROOT).with_suffix('')}:{frame.f_code.co_name}")
        frame = frame.f_back
    return out[::-1]


def test_the_cast_of_an_input_and_a_gemm_are_as_near_as_they_can_be():
    layer, x = Linear(32, 16), torch.randn(8, 32, requires_grad=True)
    seen = chains(lambda: layer(x))
    casts, gemms = ([c for name, c in seen if name == which] for which in ("quantize", "gemm"))
    assert casts[0] == [
        "layers/linear:forward", "layers/gemms:codes_of", "layers/gemms:cast_input",
        "layers/gemms:cast", "kernels/cast:quantize",
    ]  # fmt: skip
    assert gemms == [
        [
            "layers/linear:forward", "layers/linear:forward", "layers/gemms:output",
            "kernels/gemm:gemm",
        ]
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_no_operator_is_further_from_its_linear(recipe):
    layer, x = Linear(128, 128, recipe=recipe), torch.randn(128, 128, requires_grad=True)
    layer(x).sum().backward()
    torch.optim.SGD(layer.parameters(), 0.0).step()  # delayed scaling knows an amax from here on
    out = []
    seen = chains(lambda: out.append(layer(x)))
    back = chains(lambda: out[0].sum().backward())
    assert RECIPES[recipe].output.fp8 == ("gemm" in dict(seen)) and back
    for name, chain in seen + back:
        assert 2 <= len(chain) <= FRAMES, (name, chain)
        assert len({c.partition(":")[0] for c in chain}) <= FILES, (name, chain)
