"""Router and experts of a MoE layer in plain PyTorch, and the bias that balances them.

T tokens, k experts a token, E experts, h hidden, f expert width, P = T * k rows in expert order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..stretch import decided


def in_backward() -> bool:
    """Whether autograd is running a backward pass here: a forward then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _Logits(torch.autograd.Function):
    """x @ weight^T in FP32, keeping x in its own dtype for backward and no FP32 copy."""

    @staticmethod
    def forward(ctx, x_Th, weight_Eh):
        ctx.save_for_backward(x_Th, weight_Eh)
        return F.linear(x_Th.float(), weight_Eh.float())

    @staticmethod
    def backward(ctx, grad_TE):
        x, weight = ctx.saved_tensors
        grad_x = (grad_TE @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_w = (grad_TE.mT @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


class Router(nn.Module):
    """Sigmoid router with a correction bias that only selects. FP32 throughout, autocast or not.

    `tokens_per_expert` counts selections since the last bias update: int64 [E], None before the
    first; each token once, whether its layer is recomputed or not.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.n_routed_experts
        self.norm_topk_prob = config.norm_topk_prob
        scale = config.routed_scaling_factor
        self.routed_scaling_factor = 1.0 if scale is None else scale
        self.sequence_loss_weight = config.sequence_loss_weight
        self.frozen = False
        self.weight = nn.Parameter(
            torch.empty(self.num_experts, config.hidden_size, dtype=torch.float32)
        )
        bias = torch.zeros(self.num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.tokens_per_expert: Tensor | None = None
        self.sequence_loss: Tensor | None = None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Every weight this module ever has stays FP32 in the optimizer too."""
        super().register_parameter(name, param)
        if param is not None:
            param._ottava_fp32 = True

    def __setstate__(self, state):
        """A copy's weight must stay FP32 in the optimizer too; as must one that is assigned."""
        super().__setstate__(state)
        self.weight._ottava_fp32 = True

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.weight._ottava_fp32 = True

    def _apply(self, fn, recurse=True):
        """Follow every move but no change of dtype: `model.to(bfloat16)` leaves the router FP32."""

        def keep_fp32(t: Tensor) -> Tensor:
            moved = fn(t)
            if t.dtype == torch.float32 and moved.dtype in (torch.bfloat16, torch.float16):
                return t.to(moved.device)
            return moved

        super()._apply(keep_fp32, recurse)
        self.weight._ottava_fp32 = True  # a move may make another parameter
        if self.tokens_per_expert is not None:
            self.tokens_per_expert = self.tokens_per_expert.to(self.weight.device)
        return self

    def forward(self, x_BTh: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., T, h] -> expert numbers [tokens, k] int64 and their weights [tokens, k] FP32."""
        tokens = x_BTh.reshape(-1, x_BTh.shape[-1])
        with torch.autocast(x_BTh.device.type, enabled=False):
            score = _Logits.apply(tokens, self.weight).sigmoid()
            index = decided(lambda: self._select(score))
            weight = score.gather(1, index)
            if self.norm_topk_prob:
                weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
            weight = weight * self.routed_scaling_factor
            if self.training:
                self._observe(score, index, x_BTh.shape[-2])
        return index, weight

    @torch.no_grad()
    def _select(self, score: Tensor) -> Tensor:
        return (score + self.e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False)[1]

    def _observe(self, score: Tensor, index: Tensor, length: int) -> None:
        """Count the selections and, if weighted, form the sequence loss."""
        count = torch.zeros(
            index.shape[0] // length, self.num_experts, dtype=torch.int64, device=index.device
        )
        sequence = index.view(-1, length * self.top_k)
        count.scatter_add_(1, sequence, torch.ones_like(sequence))
        loss = None
        if self.sequence_loss_weight:
            share = (score / score.sum(-1, keepdim=True)).view(-1, length, self.num_experts).mean(1)
            load = count.float() * (self.num_experts / (self.top_k * length))
            loss = self.sequence_loss_weight * (load * share).sum(-1).mean()
        if in_backward():
            return
        self.sequence_loss = loss
        count = count.sum(0)
        past = self.tokens_per_expert
        self.tokens_per_expert = count if past is None else past + count


def take_loads(model: nn.Module, group=None) -> dict[str, Tensor]:
    """Per router name the selections since the last call, int64 [E]; the counters begin anew.

    Summed over `group` (the default process group where one exists), all of which call this.
    """
    loads = {}
    for name, router in model.named_modules():
        if not isinstance(router, Router) or router.tokens_per_expert is None:
            continue
        load, router.tokens_per_expert = router.tokens_per_expert, None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(load, group=group)
        loads[name] = load
    return loads


@torch.no_grad()
def balance(model: nn.Module, loads: dict[str, Tensor], rate: float) -> None:
    """Push the bias of each router that is not frozen towards even load.

    bias += rate * (sign(mean - load), centred); selection does not see a common shift.
    """
    for name, load in loads.items():
        router = model.get_submodule(name)
        if not router.frozen and rate:
            load = load.to(torch.float32)
            step = (load.mean() - load).sign() * rate
            router.e_score_correction_bias += step - step.mean()


def update_router_bias(model: nn.Module, rate: float, group=None) -> dict[str, Tensor]:
    """After an optimizer step: `take_loads`, `balance`; returns the loads."""
    loads = take_loads(model, group)
    balance(model, loads, rate)
    return loads


def load_statistics(loads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per router: coefficient of variation, peak over mean, share of experts with no token."""
    out = {}
    for name, load in loads.items():
        load = load.float()
        mean = load.mean().clamp_min(1e-9)
        cold = (load == 0).float().mean()
        out[name] = torch.stack([load.std(correction=0) / mean, load.max() / mean, cold])
    return out


def worst_load(loads: dict[str, Tensor]) -> list[Tensor]:
    """Of a step's loads: coefficient of variation and peak over mean, each of the worst layer, and
    the share of all experts without a token. Nothing for no loads."""
    if not loads:
        return []
    each = torch.stack(list(load_statistics(loads).values()))
    return [each[:, 0].amax(), each[:, 1].amax(), each[:, 2].mean()]


def freeze_router(model: nn.Module, frozen: bool = True) -> None:
    """Stop (or resume) training of every router's weight and of its bias."""
    for router in model.modules():
        if isinstance(router, Router):
            router.frozen = frozen
            router.weight.requires_grad_(not frozen)


class _Gather(torch.autograd.Function):
    """x_Th -> its rows in expert order, [P, h]; backward sums a token's k rows in a fixed order."""

    @staticmethod
    def forward(ctx, x_Th, order_P, inverse_P, top_k):
        ctx.save_for_backward(inverse_P)
        ctx.top_k = top_k
        return x_Th[order_P // top_k]

    @staticmethod
    def backward(ctx, grad_Ph):
        (inverse,) = ctx.saved_tensors
        return grad_Ph[inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Rows in expert order -> tokens: each token's k rows summed, [T, h]."""

    @staticmethod
    def forward(ctx, y_Ph, order_P, inverse_P, top_k):
        ctx.save_for_backward(order_P)
        ctx.top_k = top_k
        return y_Ph[inverse_P].unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def backward(ctx, grad_Th):
        (order,) = ctx.saved_tensors
        return grad_Th[order // ctx.top_k], None, None, None


def _expert_slices(ends_E: Tensor) -> list[slice]:
    stops = ends_E.tolist()
    return [slice(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]


@torch.library.custom_op("ottava_models::expert_linear", mutates_args=())
def expert_linear(x_PK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Rows in expert order times their expert's weight: [P, N]. ends: int32, past each last row."""
    if x_PK.is_cuda and x_PK.dtype == torch.bfloat16:
        return F.grouped_mm(x_PK, w_ENK.mT, offs=ends_E)
    return torch.cat(
        [F.linear(x_PK[rows], w_ENK[e]) for e, rows in enumerate(_expert_slices(ends_E))]
    )


@torch.library.custom_op("ottava_models::expert_linear_grad_weight", mutates_args=())
def expert_linear_grad_weight(grad_PN: Tensor, x_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's grad^T @ x over its own rows, [E, N, K]; exactly zero where it has none."""
    if x_PK.is_cuda and x_PK.dtype == torch.bfloat16:
        grad_w = F.grouped_mm(grad_PN.mT, x_PK, offs=ends_E)
        empty = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        return grad_w.masked_fill_(empty[:, None, None], 0.0)
    return torch.stack([grad_PN[rows].mT @ x_PK[rows] for rows in _expert_slices(ends_E)])


@expert_linear.register_fake
def _(x_PK, w_ENK, ends_E):
    return x_PK.new_empty(x_PK.shape[0], w_ENK.shape[1])


@expert_linear_grad_weight.register_fake
def _(grad_PN, x_PK, ends_E):
    return x_PK.new_empty(ends_E.shape[0], grad_PN.shape[1], x_PK.shape[1])


def _expert_linear_backward(ctx, grad_PN):
    x, w, ends = ctx.saved_tensors
    grad = grad_PN.contiguous()
    grad_x = expert_linear(grad, w.mT, ends) if ctx.needs_input_grad[0] else None
    grad_w = expert_linear_grad_weight(grad, x, ends) if ctx.needs_input_grad[1] else None
    return grad_x, grad_w, None


expert_linear.register_autograd(
    _expert_linear_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Experts(nn.Module):
    """E gated MLPs as two 3-D parameters; a token's weight multiplies the inner activation."""

    def __init__(self, config) -> None:
        super().__init__()
        self.num_experts = config.n_routed_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, width, inner))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_Th: Tensor, topk_index: Tensor, topk_weight: Tensor) -> Tensor:
        """[T, h] from tokens, their expert numbers [T, k] and weights [T, k] (FP32)."""
        top_k, device = topk_index.shape[1], x_Th.device
        expert, order = topk_index.flatten().sort(stable=True)
        inverse = order.argsort()
        numbers = torch.arange(self.num_experts, device=device)
        ends = torch.searchsorted(expert, numbers, right=True).to(torch.int32)
        if torch.is_autocast_enabled(device.type):
            x_Th = x_Th.to(torch.get_autocast_dtype(device.type))
        dtype = x_Th.dtype
        x_Ph = _Gather.apply(x_Th, order, inverse, top_k)
        gate, up = expert_linear(x_Ph, self.gate_up_proj.to(dtype), ends).chunk(2, dim=-1)
        inner = self.act_fn(gate) * up * topk_weight.flatten()[order].unsqueeze(-1)
        y_Ph = expert_linear(inner.to(dtype), self.down_proj.to(dtype), ends)
        return _Combine.apply(y_Ph, order, inverse, top_k)


class MoE(nn.Module):
    """A router and its experts, in place of a layer's MLP."""

    def __init__(self, config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BTh: Tensor) -> Tensor:
        """[B, T, h] -> [B, T, h]."""
        index, weight = self.gate(x_BTh)
        y = self.experts(x_BTh.reshape(-1, x_BTh.shape[-1]), index, weight)
        return y.view(x_BTh.shape).to(x_BTh.dtype)
