"""Parameters, gradients and a look at every bit that an optimizer holds, for the optimizer tests."""

import torch
from torch import nn

from ottava.kernels.split import SplitParameter
from ottava.numerics.preset import MASTERS as MASTERS
from ottava.numerics.preset import STATES as STATES
from ottava.numerics.recipe import Cast

POW2 = Cast(scale_kind="pow2")


def parameter(w, gemm=True, dtype=torch.float32):
    p = nn.Parameter(w.clone().to(dtype))
    if gemm:
        p._ottava_cast = POW2
    return p


def value(p):
    return p.dequantize() if isinstance(p, SplitParameter) else p.detach().float()


def set_grad(p, g):
    p.grad = g.to(p.grad_dtype or p.dtype)


def bits(t):
    return t.view(torch.uint8) if t.element_size() == 1 else t


def everything(opt):
    """Every tensor of parameters, masters and moments, as bytes."""
    out = []
    for group in opt.param_groups:
        for p in group["params"]:
            out.append(p.detach())
            if isinstance(p, SplitParameter):
                out += [t for t in (p.residual, p.scale, p.amax) if t is not None]
            state = opt.state.get(p, {})
            out += [t for k, t in sorted(state.items()) if isinstance(t, torch.Tensor)]
    return [bits(t).clone() for t in out]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
