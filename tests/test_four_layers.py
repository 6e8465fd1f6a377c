"""A model of four layers under every recipe against FP64: output and every gradient, in dB.

Errors of GEMMs in a chain add up in power: after n of them the limit is the format's own, less
10 log10(n). A gradient here has at most eight behind it: four forward and four backward.
"""

import copy
import math

import pytest
import torch
from torch import nn

import ottava
from ottava.numerics.formats import E4M3, E5M2, error_db
from ottava.numerics.recipe import RECIPES

LAYERS = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for _ in range(LAYERS) for m in (nn.RMSNorm(192, eps=1e-6), nn.Linear(192, 192))]
    return nn.Sequential(*parts)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_output_and_every_gradient(name):
    plain = model()
    exact = copy.deepcopy(plain).double()
    converted = ottava.convert(plain, recipe=name)
    x, grad = torch.randn(160, 192), torch.randn(160, 192)
    y, want = converted(x), exact(x.double())
    y.backward(grad)
    want.backward(grad.double())
    recipe = RECIPES[name]
    coarse = E5M2 if recipe.grad_output.format == "e5m2" else E4M3
    assert error_db(want, y) >= E4M3.gemm_db - 10 * math.log10(LAYERS)
    for (label, p), q in zip(converted.named_parameters(), exact.parameters(), strict=True):
        limit = coarse.gemm_db - 10 * math.log10(2 * LAYERS)
        assert error_db(q.grad, p.grad) >= limit, label
    if recipe.any_fp8:
        assert error_db(want, y) < 40  # FP8 indeed
