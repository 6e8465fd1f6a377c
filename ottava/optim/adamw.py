"""AdamW whose masters and moments take 16 to 4 bytes a parameter.

    opt = AdamW(params, master="split16", states="8bit")

master: what the weight is kept in. "fp32"; "bf16" with stochastic rounding; "split16" / "split24":
an FP8 GEMM weight (marked `_ottava_cast` by convert) becomes its own e4m3 codes plus an 8- / 16-bit
residual, any other weight BF16 plus such a residual (kernels/split.py). Parameters change in place,
when the optimizer is built. states: "fp32", "bf16" (stochastic rounding), "8bit" (moments.py).
moments_on: "device", or "host": moments live in the host's memory and visit the GPU for each update
(host.py); with a fused backward that goes on beside it. All are options of a parameter group too.

Small parameters (`is_small`: norms, biases, short vectors) always have FP32 moments, and an FP32 or
(BF16 parameter) BF16 + 16-bit residual master, which is as exact. A parameter marked `_ottava_fp32`
(a router) keeps an FP32 master.

Steps are counted on the host, per parameter. Random bits come from (seed, step, parameter number,
element). Nothing here waits for the device. While `clock` (clock.py) is set, kernels read learning
rate, step and random key from the device, so that their launches can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch

from ..kernels.adamw import adamw_step
from ..kernels.moments import init_moments
from ..kernels.random import make_key
from ..kernels.split import Split, SplitParameter, adopt_split, split_parameter
from ..numerics.preset import MASTERS, STATES
from ..numerics.recipe import Cast
from .clock import DeviceClock
from .host import MOMENTS, HostMoments, to_host

SMALL = 4096
SMALL_VECTOR = 1 << 18
_SPLIT_KEYS = ("codes", "residual", "scale", "amax")
_STREAM = 1 << 20  # parameter numbers start here, away from the streams of activations


def is_small(p: torch.Tensor) -> bool:
    """Whether moments stay FP32: under 4096 elements, or a vector under 2**18 (a bias, a norm).

    Longer vectors are flat shards of matrices (ZeRO), and are treated as matrices.
    """
    return p.numel() < SMALL or (p.dim() < 2 and p.numel() < SMALL_VECTOR)


def splits_codes(cast: Cast | None) -> bool:
    """Whether a weight with this cast can be its own codes: e4m3, one power-of-two scale."""
    return isinstance(cast, Cast) and cast.splits


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, a SplitParameter where it is a split master's; any other
    tensor as it is."""
    own = getattr(t, "local_split", None)
    return getattr(t, "_local_tensor", t) if own is None else own


class AdamW(torch.optim.Optimizer):
    """See the module docstring. lr may be a float or a tensor (on the device: never read back).

    ValueError: an unknown master or states, or a parameter that cannot have the master asked for.
    `fused`: the FusedBackward handle while the step runs inside backward, else None. `clock`: the
    DeviceClock while the step is one that can be replayed, else None.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        master: str = "fp32",
        states: str = "fp32",
        moments_on: str = "device",
        seed: int = 0,
    ) -> None:
        self.fused = None
        self.host = HostMoments()
        self.clock: DeviceClock | None = None
        self._numbers: dict[torch.Tensor, int] = {}
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "master": master,
            "states": states,
            "moments_on": moments_on,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy steps by itself: plainly, not inside backward."""
        super().__setstate__(state)
        self.fused, self.clock, self.host = None, None, HostMoments()
        params = chain.from_iterable(g["params"] for g in self.param_groups)
        self._numbers = {p: number for number, p in enumerate(params)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(group)
        for p in group["params"]:
            self._numbers[p] = len(self._numbers)
            if p.requires_grad:
                prepare_master(p, group["master"])

    # Not traced by torch.compile: it would compile the host's step count in, anew every step.
    @torch.compiler.disable
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float | torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ):
        """Update every parameter that has a gradient. Returns the closure's value.

        grad_scale: gradients are divided by it. found_inf: a tensor on the device; where it is > 0
        weights, residuals, scales and moments stay bit for bit, and the step does not count.
        With a fused backward the parameters are updated already: this ends that step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scalars = _Scalars(grad_scale, found_inf)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, *scalars.on(p.grad.device))
        if self.fused is not None:
            self.fused.finish()
        self.host.finish()
        return loss

    @torch.no_grad()
    def update(
        self,
        p: torch.Tensor,
        group: dict[str, Any],
        grad_mul: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Update one parameter from its gradient. grad_mul, found_inf: fp32 (1,) on its device."""
        if p.grad.is_sparse:
            raise ValueError("AdamW: a gradient is sparse; use nn.Embedding(sparse=False)")
        state = self.state[p]
        if not state:
            _init_state(state, p, group)
        counted = found_inf is not None and (self.clock is None or self.clock.counts_skips)
        if counted and "skipped" not in state:
            state["skipped"] = torch.zeros(1, dtype=torch.int32, device=p.grad.device)
        state["step"] += 1
        if not local(p).numel():  # a shard without rows
            return
        # partitions that stand for parameters (ZeRO) are numbered as they come
        row, key = None, _STREAM + self._numbers.setdefault(p, len(self._numbers))
        if self.clock is not None:
            row = self.clock.row(group, state)
        else:
            key = make_key(group["seed"], state["step"], key)
        lr, lr_tensor = group["lr"], None
        if isinstance(lr, torch.Tensor):
            lr, lr_tensor = (float(lr), None) if lr.device.type == "cpu" else (0.0, lr.reshape(1))
        beta1, beta2 = group["betas"]
        master = state.get("master")
        own = local(p if master is None else master)
        split = isinstance(own, SplitParameter)
        with self._moments(p, group) as moments:
            adamw_step(
                own,
                own.residual if split else None,
                own.scale if split else None,
                own.amax if split else None,
                own.work if split else None,
                local(p.grad).contiguous(),
                moments["m"],
                moments["v"],
                moments.get("m_scale"),
                moments.get("v_range"),
                None if master is None else local(p),
                lr_tensor,
                grad_mul,
                found_inf,
                state["skipped"] if counted else None,
                lr,
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                own.cast.margin if split and own.cast is not None else 0,
                state["step"],
                key,
                row,
            )
        torch.autograd.graph.increment_version(p)

    def _moments(self, p: torch.Tensor, group: dict[str, Any]) -> AbstractContextManager[dict]:
        """`p`'s moments on its device, for the time of an update."""
        if not _on_host(p, group):
            return nullcontext(self.state[p])
        return self.host.visiting(p, self.state, p.grad.device)

    # ---- state ----

    def state_dict(self, *, weights: bool = True) -> dict[str, Any]:
        """Plain tensors and numbers only: `torch.load(weights_only=True)` reads it back.

        weights: include the split masters (codes, residual, scale, amax), so that loading restores
        every bit of them; False where a checkpoint keeps them with the model.
        """
        self.host.synchronize()
        out = super().state_dict()
        out["state"] = {k: dict(v) for k, v in out["state"].items()}
        if weights:
            params = chain.from_iterable(g["params"] for g in self.param_groups)
            for number, p in enumerate(params):
                if isinstance(own := local(p), SplitParameter):
                    values = (own.detach(), own.residual, own.scale, own.amax)
                    kept = {k: v for k, v in zip(_SPLIT_KEYS, values, strict=True) if v is not None}
                    out["state"].setdefault(number, {}).update(kept)
        if self.fused is not None:
            out["fused"] = self.fused.state_dict()
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict` with every dtype and bit as saved, split masters included.

        ValueError when groups, shapes or the kind of master differ.
        """
        saved_groups = state_dict["param_groups"]
        there, here = (
            [g["params"] for g in groups] for groups in (saved_groups, self.param_groups)
        )
        if [len(g) for g in there] != [len(g) for g in here]:
            raise ValueError("AdamW.load_state_dict: the parameter groups differ from the saved")
        params, ids = list(chain.from_iterable(here)), chain.from_iterable(there)
        state, owners = {}, {p: g for g in self.param_groups for p in g["params"]}
        for number, (p, saved_id) in enumerate(zip(params, ids, strict=True)):
            saved = dict(state_dict["state"].get(saved_id, {}))
            _restore_split(p, number, {k: saved.pop(k) for k in _SPLIT_KEYS if k in saved})
            if "m" in saved and saved["m"].shape != local(p).shape:
                raise ValueError(
                    f"AdamW.load_state_dict: moments of parameter {number} are "
                    f"{list(saved['m'].shape)}, the parameter is {list(p.shape)}"
                )
            if saved:
                state[p] = {k: _copied(v, p.device) for k, v in saved.items()}
                if _on_host(p, owners[p]):
                    state[p].update(to_host({k: saved[k] for k in MOMENTS if k in saved}))
        self.state.clear()
        self.state.update(state)
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            # where moments live belongs to this process, not to what it had saved
            group.update({k: v for k, v in saved.items() if k not in ("params", "moments_on")})
            group["betas"] = tuple(group["betas"])
        if self.fused is not None and "fused" in state_dict:
            self.fused.load_state_dict(state_dict["fused"])


class _Scalars:
    """grad_scale and found_inf as fp32 (1,) tensors, once on each device."""

    def __init__(self, grad_scale, found_inf) -> None:
        self.grad_scale, self.found_inf = grad_scale, found_inf
        self.made: dict[torch.device, tuple] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(1 / grad_scale, found_inf) on `device`."""
        if self.grad_scale is None and self.found_inf is None:
            return None, None
        if device not in self.made:
            scale, found = (
                None if x is None else torch.as_tensor(x, dtype=torch.float32).to(device).reshape(1)
                for x in (self.grad_scale, self.found_inf)
            )
            self.made[device] = (None if scale is None else scale.reciprocal(), found)
        return self.made[device]


def _check(group: dict[str, Any]) -> None:
    places = ("device", "host")
    for name, choices in (("master", MASTERS), ("states", STATES), ("moments_on", places)):
        if group[name] not in choices:
            raise ValueError(f"AdamW: {name} {group[name]!r} is not one of {', '.join(choices)}")
    beta1, beta2 = group["betas"]
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"AdamW: betas {group['betas']} must lie in [0, 1)")
    lr = group["lr"]
    numbers = {"eps": group["eps"], "weight_decay": group["weight_decay"]}
    if not isinstance(lr, torch.Tensor):
        numbers["lr"] = lr
    for name, value in numbers.items():
        if not value >= 0.0:
            raise ValueError(f"AdamW: {name} {value} must be at least 0")


def prepare_master(p: torch.Tensor, master: str) -> None:
    """Give a parameter the master that the module docstring promises, in place. Raises ValueError."""
    if not local(p).is_contiguous():
        raise ValueError(f"AdamW: a parameter of shape {list(p.shape)} is not contiguous")
    if getattr(p, "_ottava_fp32", False) or master == "fp32" or isinstance(p, SplitParameter):
        return
    if p.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"AdamW: master {master!r} needs FP32 or BF16 parameters, not {p.dtype}")
    if master != "bf16" and local(p) is not p:
        raise ValueError(f"AdamW: master {master!r} needs whole parameters; this one is sharded")
    if is_small(p):
        if p.dtype == torch.bfloat16 and local(p) is p:
            split_parameter(p, 16, None)
    elif master == "bf16":
        if p.dtype != torch.bfloat16:
            p.grad, p.data = None, p.data.bfloat16()
    else:
        cast = getattr(p, "_ottava_cast", None)
        bits = 8 if master == "split16" else 16
        split_parameter(p, bits, cast if splits_codes(cast) else None)


def _init_state(state: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
    weight = local(p.detach())
    whole_master = isinstance(p, SplitParameter) or p.dtype == torch.float32
    bf16_master = p.dtype == torch.bfloat16 and group["master"] == "bf16"
    if getattr(p, "_ottava_fp32", False):
        bf16_master = False
    state["step"] = 0
    if not whole_master and not bf16_master:
        state["master"] = weight.float()
    moments = init_moments(weight, "fp32" if is_small(p) else group["states"])
    state.update(to_host(moments) if _on_host(p, group) else moments)


def _on_host(p: torch.Tensor, group: dict[str, Any]) -> bool:
    return group["moments_on"] == "host" and not is_small(p)


def _restore_split(p: torch.Tensor, number: int, saved: dict[str, torch.Tensor]) -> None:
    """Put saved codes, residual, scale and amax into `p`, which becomes a SplitParameter."""
    if not saved:
        return
    if saved["codes"].shape != p.shape:
        raise ValueError(
            f"AdamW.load_state_dict: the master of parameter {number} is "
            f"{list(saved['codes'].shape)}, the parameter is {list(p.shape)}"
        )
    coded = "scale" in saved
    if coded and not splits_codes(getattr(p, "_ottava_cast", None)):
        raise ValueError(
            f"AdamW.load_state_dict: parameter {number} was saved as FP8 codes; convert the model "
            "as it was then, before building the optimizer"
        )
    saved = {k: _copied(v, p.device) for k, v in saved.items()}
    split = Split(saved["codes"], saved["residual"], saved.get("scale"))
    cast = p._ottava_cast if coded else None
    adopt_split(p, split, saved.get("amax"), cast)


def _copied(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
