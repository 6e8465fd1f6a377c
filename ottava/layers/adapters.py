"""LoRA on experts as two thin products beside the base's, where PEFT would make the whole weight anew.

PEFT wraps a module once for each 3-D parameter that `target_parameters` names, and adds scaling * B @ A
to the weight before every forward: on frozen codes impossible, elsewhere a copy of all experts. Its
wrapper is left as it is, with its names, files and options; only what it does around a forward is
ours: it hands the factors to the experts below.

T tokens, P rows in expert order, E experts, r rank (rounded up to a multiple of 8), K in, N out.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import grouped
from .mixed import mixed_class

_ALIGN = 8  # 16 bytes of BF16: the least that a grouped product takes of a rank


class ExpertWrapper:
    """Mixed in before PEFT's wrapper of a parameter of our experts."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]):
        """While a forward runs, its experts have the factors of every active adapter."""
        experts, name = self.get_base_layer(), self.parameter_name
        active = [self._factors(a) for a in active_adapters if a in self.lora_A]
        if active:
            a, b = (
                torch.cat(parts, dim)
                for parts, dim in zip(zip(*active, strict=True), (1, 2), strict=True)
            )
            experts.adapters = {**experts.adapters, name: (a, b)}
        try:
            yield
        finally:
            experts.adapters = {k: v for k, v in experts.adapters.items() if k != name}

    def _factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """(A [E, r, K], B [E, N, r] times the scaling), views of PEFT's parameters."""
        a = self.lora_A[adapter].weight.unflatten(0, (self.num_experts, -1))
        b = self.lora_B[adapter].weight.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        b = b * self.scaling[adapter]
        missing = -a.shape[1] % _ALIGN
        return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)


def adapt_experts(modules: dict[str, nn.Module]) -> None:
    """Take over PEFT's wrappers of parameters of our experts; `revert` gives them back."""
    for module in modules.values():
        if isinstance(module, ExpertWrapper) or not hasattr(module, "_activate_lora"):
            continue
        if isinstance(getattr(module.get_base_layer(), "adapters", None), dict):
            cls = module.__dict__["_ottava_class"] = type(module)
            module.__class__ = mixed_class(ExpertWrapper, cls)


def thin(x_PK: Tensor, a_ErK: Tensor, b_ENr: Tensor, ends: Tensor) -> Tensor:
    """B (A x) of each row's expert, [P, N], in the dtype of x."""
    u = grouped.grouped_matmul(x_PK, a_ErK.to(x_PK.dtype).contiguous(), ends)
    return grouped.grouped_matmul(u, b_ENr.to(x_PK.dtype).contiguous(), ends)


def thin_grads(
    grad_PN: Tensor, x_PK: Tensor, a_ErK: Tensor, b_ENr: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of A and B in their own dtypes; x's is `thin` with both transposed and exchanged."""
    dtype = grad_PN.dtype
    x, a, b = x_PK.to(dtype), a_ErK.to(dtype), b_ENr.to(dtype)
    u = grouped.grouped_matmul(x, a.contiguous(), ends)
    grad_u = grouped.grouped_matmul(grad_PN, b.transpose(1, 2).contiguous(), ends)
    grad_a = grouped.grouped_outer(grad_u, x, ends).to(a_ErK.dtype)
    return grad_a, grouped.grouped_outer(grad_PN, u, ends).to(b_ENr.dtype)
