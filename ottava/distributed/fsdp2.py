"""Fully sharded: every rank keeps its rows of every parameter, gradient and moment.

PyTorch's `fully_shard`, one group for each decoder layer and one for the rest. A weight is whole only
while its layer runs, and where the layer computes in FP8 it travels as codes (gather.py). Gradients
are summed (each rank's loss is divided by the valid tokens of all), in their own dtype. Two ranks
add in the order of one that accumulates, so the numbers are one rank's; but rounding to masters and
moments of few bits draws other random bits on each rank.

Split masters are shared out too (masters.py). Where the step runs inside backward, a shard is
updated as soon as its gradient is there, and only the gradients of one group exist at a time.

Given up as yet: building a model that no rank can hold whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .. import prepare
from ..config import ConfigError
from ..kernels.split import SplitParameter
from ..layers.decoder import Block
from ..layers.weights import grad_dtype_of
from ..numerics.recipe import Cast
from ..optim.adamw import AdamW, is_small, local, prepare_master, splits_codes
from ..optim.clip import norm_of
from ..optim.fused_backward import FusedBackward, fuse_backward
from ..recompute import decoder_layers
from .gather import Coded, Scales
from .masters import Master, Masters, precise_master
from .ranks import Ranks, all_max
from .shards import (
    Rows,
    groups_end_with_shares,
    rows_of,
    rows_of_state,
    shared,
    shared_state,
)
from .strategy import refuse_partitions

Place = tuple[nn.Module, str]  # a parameter: the module that owns it, and its name there


class FSDP2(Ranks):
    """See the module docstring. `places`: every parameter; `coded`: those that travel as codes."""

    name = "fsdp2"
    shares = True

    def prepare(self, model: nn.Module) -> AdamW:
        self.part_ways(model)
        self.forward = model
        mesh = self._mesh(next(model.parameters()).device)
        masters = self._masters(model)
        self.casts = self._casts(model)
        self._in_codes = {n for n, m in model.named_modules() if any(m is c for c, _ in self.casts)}
        self.units = _shard(model, mesh, masters)
        self.agreed = self._travel_as_codes(model, masters)
        model.register_forward_hook(_share_again)
        self.optimizer = prepare.make_optimizer(self.config, model)
        for group in self.optimizer.param_groups:
            # other rows are rounded with other random bits
            group["seed"] += mesh.get_local_rank(mesh.ndim - 1) << 16
        self._check_moments(model)
        return self.optimizer

    def _mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks in a row, or in rows of which each shares out the whole model."""
        replicas = self.config.distributed.replicas
        self.sharers, rest = divmod(self.world, replicas)
        if rest or self.sharers < 2:
            raise ConfigError(
                f"distributed.replicas: {self.world} rank(s) are not {replicas} group(s) of 2 or "
                "more that share a model out; start more, or use strategy=ddp or single"
            )
        if replicas == 1:
            mesh = init_device_mesh(device.type, (self.world,))
        else:
            names = ("replicate", "shard")
            mesh = init_device_mesh(device.type, (replicas, self.sharers), mesh_dim_names=names)
        self.group = mesh.get_group(mesh.ndim - 1)
        return mesh

    # ---- which weights travel as codes ----

    def _masters(self, model: nn.Module) -> dict[Place, Master]:
        """The split masters of the run's settings, whole as yet; their parameters are carriers."""
        kind, found = self.config.settings.master, {}
        if kind not in ("split16", "split24"):
            return found
        for place in _places(model):
            p = place[0]._parameters[place[1]]
            if p.requires_grad:
                prepare_master(p, kind)
            if isinstance(p, SplitParameter):
                found[place] = Master(p)
        return found

    def _casts(self, model: nn.Module) -> dict[Place, Cast]:
        """Weights whose codes are all that their layer reads, whenever it runs."""
        settings, precision = self.config.settings, self.config.precision
        always = precision.start_fp8_at == 0.0 and precision.finish_bf16_at == 1.0
        plan = getattr(model, "_ottava_plan", None)
        wanted = self.config.distributed.gather == "fp8" and settings.grad_dtype == "bf16"
        if plan is None or not (wanted and always):
            return {}
        found = {}
        recipes = {row.name: row.recipe for row in plan.rows}
        for name, module in model.named_modules():
            recipe = recipes.get(name)
            if recipe is None or not (recipe.output.fp8 and recipe.grad_input.fp8):
                continue
            for own, p in module.named_parameters(recurse=False):
                cast = getattr(p, "_ottava_cast", None)
                if p.requires_grad and splits_codes(cast):
                    found[module, own] = cast
        return found

    def _travel_as_codes(
        self, model: nn.Module, masters: dict[Place, Master]
    ) -> Scales | Masters | None:
        """Have codes gathered; what all ranks agree on about them before each forward."""
        agreed, coded = None, {}
        if masters:
            places = [place for place, master in masters.items() if master.coded]
            small = [p for p in masters if p not in places and is_small(_at(p))]
            coded = {place: precise_master(_at(place)) for place in small}
            if places:
                agreed = Masters([(_at(p), p not in self.casts) for p in places], all_max)
        elif self.casts:
            places = list(self.casts)
            agreed = Scales([(_at(p), cast) for p, cast in self.casts.items()], all_max)
        if agreed is not None:
            coded |= zip(places, agreed.weights, strict=True)
            model.register_forward_pre_hook(lambda *_: agreed.agree(), prepend=True)
        for unit in self.units:
            unit.coded = coded
        return agreed

    def _check_moments(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            eight_bit = self.config.settings.states == "8bit" and not is_small(p)
            if p.requires_grad and eight_bit and not groups_end_with_shares(p):
                raise ConfigError(
                    f"optimizer.states: 8bit keeps groups of 128, and {name} {list(p.shape)} does "
                    f"not fall into {self.sharers} shares of whole groups; use optimizer.states=bf16"
                )

    def can_demote(self, row: str) -> bool:
        return not any(n == row or n.startswith(f"{row}.") for n in self._in_codes)

    # ---- a step ----

    def fuse(self, model: nn.Module) -> FusedBackward | None:
        if not self.config.settings.fused:
            return None
        handle = fuse_backward(model, self.optimizer, measure=True, ranks=_Reduced(self.group))
        for unit in self.units:
            # before any of the unit's shards is updated, all ranks know whether one will be
            unit.module.set_all_reduce_hook(handle.look)
        return handle

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with self.connected():
            loss.backward()

    def norm(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        square = norm_of([local(p.grad) for p in parameters if p.grad is not None]).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def exact_norm(self, parameters: list[torch.Tensor]) -> float:
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in grads]
        replicas = self.config.distributed.replicas
        return math.sqrt(self.sum(math.fsum(n * n for n in norms))[0] / replicas)

    # ---- state ----

    def settle(self) -> None:
        if self.agreed is not None:
            self.agreed.agree()

    def whole(self, t: torch.Tensor) -> torch.Tensor | Rows | dict[str, Rows]:
        if getattr(t, "local_split", None) is not None:
            return {name: rows_of(part) for name, part in t.parts().items()}
        return rows_of(t) if t.dim() else t  # (what is no DTensor lies with the rows, on rank 0)

    def share(self, value: Any, like: torch.Tensor) -> torch.Tensor:
        return shared(value, like)

    def optimizer_state(self) -> dict[str, Any]:
        state = super().optimizer_state()
        params = dict(enumerate(self.parameters))
        state["state"] = {
            i: {k: rows_of_state(k, params[i], v) for k, v in sorted(values.items())}
            for i, values in sorted(state["state"].items())
        }
        return state

    def load_optimizer(self, state: dict[str, Any]) -> None:
        refuse_partitions(state)
        params = dict(enumerate(self.parameters))
        shares = {
            i: {k: shared_state(k, params[i], v) for k, v in values.items()}
            for i, values in state["state"].items()
        }
        super().load_optimizer({**state, "state": shares})

    def notes(self) -> list[str]:
        coded = rest = 0
        for unit in self.units:
            for place, p in zip(unit.places, unit.parameters(), strict=True):
                own = unit.coded.get(place)
                for sent in [p] if own is None else own.parts():
                    as_codes = own is not None and sent.element_size() == 1
                    coded += p.numel() if as_codes else 0
                    rest += 0 if as_codes else p.numel() * sent.element_size()
        replicas = self.world // self.sharers
        each = f" ({replicas} groups of {self.sharers})" if replicas > 1 else ""
        return [
            f"{self.world} ranks{each}, fsdp2 in {len(self.units)} groups: a gather of all weights moves "
            f"{coded / 2**20:,.1f} MiB of FP8 codes and {rest / 2**20:,.1f} MiB in full"
        ] + self._kept_in_eight_bits()

    def _kept_in_eight_bits(self) -> list[str]:
        if not (self._in_codes and self.config.heal.demote):
            return []
        return [
            f"{len(self._in_codes)} modules are sent their weights as FP8 codes alone, so healing "
            "cannot demote them: distributed.gather=full would let it"
        ]


class Unit:
    """Parameters that are gathered together, when `module` runs. What convert said of each is said
    again of its shard, and of the whole weight once there is one."""

    def __init__(
        self,
        module: nn.Module,
        places: list[Place],
        mesh: DeviceMesh,
        masters: dict[Place, Master],
    ) -> None:
        self.module, self.places = module, places
        self.coded: dict[Place, Coded] = {}
        self._tags = [_tags(m._parameters[n]) for m, n in places]
        self._grad_dtypes = [grad_dtype_of(m._parameters[n]) for m, n in places]
        self._known: torch.Tensor | None = None
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        self._shards = self.parameters()
        for place, p, tags in zip(places, self._shards, self._tags, strict=True):
            p.__dict__.update(tags)
            if place in masters:
                masters[place].share(p, all_max)
        module.register_forward_pre_hook(self._gathered)

    def parameters(self) -> list[torch.Tensor]:
        return [m._parameters[n] for m, n in self.places]

    def _gathered(self, *_: Any) -> None:
        """Before the module runs, its weights being whole: the same tensors every time."""
        weights = self.parameters()
        if weights[0] is self._known:
            return
        self._known = weights[0]
        facts = zip(self.places, weights, self._shards, self._tags, self._grad_dtypes, strict=True)
        for place, p, shard, tags, dtype in facts:
            if place in self.coded:
                self.coded[place].adopt(p)
            elif p.requires_grad:
                p.grad_dtype = dtype
            p.__dict__.update(tags)
            p._ottava_shard = shard


def _at(place: Place) -> torch.Tensor:
    module, name = place
    return module._parameters[name]


def _share_again(model: nn.Module, *_: Any) -> None:
    """After a forward that no backward follows: no whole weight stays, to be read when it is old."""
    if not torch.is_grad_enabled():
        model.reshard()


def _tags(p: torch.Tensor) -> dict[str, Any]:
    return {k: v for k, v in vars(p).items() if k.startswith("_ottava_")}


class _Reduced:
    """What a step inside backward asks of the ranks: nothing here waits for a device."""

    all_max = staticmethod(all_max)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_sum(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, group=self.group)


def _shard(model: nn.Module, mesh: DeviceMesh, masters: dict[Place, Master]) -> list[Unit]:
    """Shard each decoder layer, then the rest, in place."""
    try:
        layers = list(decoder_layers(model))
    except ValueError:
        raise ConfigError(
            f"distributed.strategy: fsdp2 shards layer by layer, and {type(model).__name__} has no "
            "list of layers (model.model.layers); use ddp"
        ) from None
    units = []
    for module in (*layers, model):
        if isinstance(module, Block):
            module.__dict__["next_norm"] = None  # another layer's weight, which is not whole then
        units += _shard_unit(module, mesh, masters)
    return units


def _shard_unit(
    module: nn.Module, mesh: DeviceMesh, masters: dict[Place, Master]
) -> Iterator[Unit]:
    """The groups of one module: parameters of another dtype (a router's) need one of their own."""
    places = list(_places(module))
    sizes: dict[tuple, int] = {}
    for m, n in places:
        kind = _kind(m._parameters[n])
        sizes[kind] = sizes.get(kind, 0) + m._parameters[n].numel()
    if not places:
        return
    main = max(sizes, key=sizes.__getitem__)
    odd = list(dict.fromkeys(m for m, n in places if _kind(m._parameters[n]) != main))
    for owner in odd:
        own = [(m, n) for m, n in places if m is owner]
        if len({_kind(m._parameters[n]) for m, n in own}) > 1:
            raise ConfigError(
                f"distributed.strategy: fsdp2 needs one dtype in a {type(owner).__name__}; use ddp"
            )
        yield Unit(owner, own, mesh, masters)
    yield Unit(module, [(m, n) for m, n in places if m not in odd], mesh, masters)


def _kind(p: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    return p.dtype, grad_dtype_of(p)


def _places(module: nn.Module) -> Iterator[Place]:
    """Parameters of `module` that are not sharded yet, tied ones once."""
    seen: set[int] = set()
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and id(p) not in seen and not isinstance(p, DTensor):
                seen.add(id(p))
                yield owner, name
