"""`Linear` and `GroupedLinear` in casts and plain products."""

import torch

from ..common.recipe import Format
from .quantization import (
    DelayedScalingRecipeState,
    FP8GlobalStateManager,
    StatelessRecipeState,
)

PRODUCTS = []  # the recipe's class name of each forward product in FP8


def assert_dim_for_fp8_exec(*tensors):
    for t in tensors:
        if t.shape[:-1].numel() % 8 or t.shape[-1] % 16:
            raise ValueError(f"FP8 execution requires multiples of 8 and 16, got {list(t.shape)}")


def cast(x, form, state=None, index=0):
    """x as codes would give it back, FP32."""
    top = 57344.0 if form is torch.float8_e5m2 else 448.0
    x = x.float()
    amax = x.detach().abs().amax()
    if state is None:
        scale = top / amax.clamp_min(1e-12)
    else:
        scale = state.scale[index]
        state.amax_history[0, index] = torch.maximum(state.amax_history[0, index], amax)
    return (x * scale).clamp(-top, top).to(form).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, weight, bias, owner, first):
        fwd, bwd = (owner.fp8_meta.get(k) for k in ("scaling_fwd", "scaling_bwd"))
        delayed = isinstance(fwd, DelayedScalingRecipeState)
        ctx.states = (fwd, bwd) if delayed else (None, None)
        ctx.fp8, ctx.dtype, ctx.first = owner.fp8, owner.activation_dtype, first
        ctx.hybrid = owner.fp8 and owner.fp8_meta["recipe"].fp8_format == Format.HYBRID
        ctx.bias = bias is not None
        x, w = inp.to(ctx.dtype), weight.to(ctx.dtype)
        if ctx.fp8:
            assert_dim_for_fp8_exec(inp, weight)
            PRODUCTS.append(type(owner.fp8_meta["recipe"]).__name__)
            x = cast(x, torch.float8_e4m3fn, ctx.states[0], 0)
            w = cast(weight, torch.float8_e4m3fn, ctx.states[0], 1)
        ctx.save_for_backward(x, w, weight)
        y = x.float() @ w.float().t()
        if bias is not None:
            y = y + bias.float()
        return y.to(ctx.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, w, _ = ctx.saved_tensors  # all three, so that a weight changed since is found
        g = grad.float()
        if ctx.fp8:
            form = torch.float8_e5m2 if ctx.hybrid else torch.float8_e4m3fn
            g = cast(g, form, ctx.states[1], 0)
            if ctx.first:
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        grad_bias = grad.sum(0).to(ctx.dtype) if ctx.bias else None
        grad_w = (g.t() @ x.float()).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        grad_x = (g @ w.float()).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, grad_w, grad_bias, None, None


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self, name=None):
        super().__init__()
        self.fp8, self.fp8_meta, self.activation_dtype = False, {}, None
        self.fp8_meta_tensors_initialized = False

    def set_activation_dtype(self, inp):
        kind = inp.device.type
        if torch.is_autocast_enabled(kind):
            self.activation_dtype = torch.get_autocast_dtype(kind)
            return
        for name, p in self.named_parameters():
            if p.dtype != inp.dtype:
                raise TypeError(f"Found input dtype: {inp.dtype} and {name!r} dtype: {p.dtype}")
        self.activation_dtype = inp.dtype

    def init_fp8_metadata(self, num_gemms=1):
        manager = FP8GlobalStateManager
        self.fp8 = manager.is_fp8_enabled()
        recipe = manager.get_fp8_recipe()
        if not self.fp8 or self.fp8_meta.get("recipe") == recipe:
            return
        self.fp8_meta["recipe"] = recipe
        for key, each in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            if not recipe.delayed():
                self.fp8_meta[key] = StatelessRecipeState()
                continue
            mode = "forward" if key == "scaling_fwd" else "backward"
            state = DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=each * num_gemms)
            self.fp8_meta[key] = state
            manager.quantization_state.delayed.append((mode == "forward", state))

    def prepare_forward(self, inp, num_gemms=1):
        self.set_activation_dtype(inp)
        self.init_fp8_metadata(num_gemms)
        return self.fp8 and FP8GlobalStateManager.is_first_fp8_module()


class Linear(TransformerEngineBaseModule):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None,
        init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None,
        parameters_split=None, device="cuda", ub_overlap_ag=False, ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        super().__init__(name)
        where = {"device": device, "dtype": params_dtype}
        self.use_bias = bias
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, **where))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_features, **where))
        else:
            self.bias = torch.Tensor().to(**where)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        first = self.prepare_forward(inp)
        bias = self.bias if self.use_bias else None
        return Product.apply(inp, self.weight, bias, self, first)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self, num_gemms, in_features, out_features, sequence_parallel=False,
        fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None,
        rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None,
        parallel_mode=None, device="cuda", ub_overlap_rs=False, ub_overlap_ag=False, ub_name=None,
        delay_wgrad_compute=False, save_original_input=False, single_grouped_weight=False,
        single_grouped_bias=False, name=None, use_grouped_tensor=None,
    ):  # fmt: skip
        super().__init__(name)
        self.num_gemms = num_gemms
        where = {"device": device, "dtype": params_dtype}
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, **where)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))
            setattr(self, f"bias{i}", torch.Tensor().to(**where))

    def forward(self, inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None):
        first = self.prepare_forward(inp, num_gemms=self.num_gemms)
        assert all(not getattr(self, f"bias{i}").is_meta for i in range(self.num_gemms))
        assert sum(m_splits.tolist()) == len(inp)
        parts = []
        for i, x in enumerate(inp.split(m_splits.tolist())):
            if len(x):
                parts.append(Product.apply(x, getattr(self, f"weight{i}"), None, self, first))
                first = False
        return torch.cat(parts)
