"""One training step on fake tensors: the real modules, autograd and optimizer, and no memory.

Fake tensors live on the CPU whatever the target is, since a PyTorch without CUDA cannot run
autograd on fake CUDA ones. What differs on CUDA is said here, in one place: the branches that plain
models take there, the library's attention, and what an operator holds while it runs. Tokens per expert stay
unknown: no shape of ours depends on them.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .. import prepare
from ..config import Run
from ..convert import revert
from ..kernels.split import SplitParameter
from ..layers.delayed import clock
from ..models.mimo import MiMoPreTrainedModel
from ..models.moe import Router, update_router_bias
from ..numerics.policy import Plan
from ..optim.adamw import splits_codes
from ..optim.clip import fast_norm
from ..optim.ema import EMA
from ..recompute import wrap_recompute
from .allocator import priced
from .forms import freeze_as_codes, gathered, restore_split_class, share_experts
from .lifetimes import GATHERED, MemoryTracker, Peak, Timeline, follow, leave_out
from .lora import add_lora, released_policy
from .units import facts_of, separate, spans_of
from .work import Counter

# Measured: cuBLAS keeps a workspace for each thread that multiplies (forward's and backward's).
CUBLAS_WORKSPACE = 2 * (32 << 20)
BLOCK = 128  # rows that attention kernels pad their FP32 buffers to


def fake_mode() -> FakeTensorMode:
    """A fake mode that also takes the few real tensors that a module keeps as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def on_fakes(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of `model` (real, or on meta) whose parameters and buffers are fake, uninitialised.

    dtype: that of floating-point parameters (None: as they are); routers stay FP32. Tied parameters
    stay tied. Conversions are taken back, so that another plan can be applied.
    """
    high = {id(p) for m in model.modules() if isinstance(m, Router) for p in m.parameters()}
    memo: dict[int, object] = {}
    with mode:
        for tensor in (*model.parameters(), *model.buffers()):
            like = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                if dtype and id(tensor) not in high and tensor.is_floating_point():
                    like = like.to(dtype)
                like = nn.Parameter(like, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = like
    return revert(copy.deepcopy(model, memo))


@contextlib.contextmanager
def target(kind: str, documents: bool = False) -> Iterator[None]:
    """Let Python code see what it would on `kind` ("cpu" or "cuda"), in backward too.

    `documents`: whether sequences hold several. A mode for functions would be off inside
    `Tensor.backward`, where layers are recomputed, so names are replaced for the time being.
    """
    changes: list[tuple[Any, str, Any]] = []
    if kind == "cuda":
        changes.append((FakeTensor, "is_cuda", property(lambda _: True)))
        changes.append((F, "scaled_dot_product_attention", _attend))
        changes.append((torch.cuda, "Event", _Event))
    masks = sys.modules.get("transformers.masking_utils")
    if masks is not None and not documents:
        # It would ask position ids for document boundaries, which fake ones do not show.
        changes.append((masks, "find_packed_sequence_indices", lambda *_, **__: None))
    plain = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in plain:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class _Event:
    """A CUDA event where nothing runs."""

    def __init__(self, **_options) -> None:
        self.record = self.synchronize = lambda *_: None


def _attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
            enable_gqa=False):  # fmt: skip
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    return _FusedAttention.apply(query, key, value)


class _FusedAttention(torch.autograd.Function):
    """The library's fused attention, in memory only: q, k, v, output and one FP32 a row are kept.

    [B, H, T, D] query, [B, G, S, D] key, [B, G, S, V] value -> [B, H, T, V]. `counter`: who counts.
    """

    counter: Counter | None = None

    @staticmethod
    def forward(ctx, query, key, value):
        if _FusedAttention.counter is not None:
            _FusedAttention.counter.attention(query, value, backward=False)
        batch, heads, length, _ = query.shape
        # The kernels write [B, T, H, V], seen through a transpose.
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        if _FusedAttention.counter is not None:
            _FusedAttention.counter.attention(query, value, backward=True)
        wide = query.new_empty(attention_backward_bytes(query.transpose(1, 2)), dtype=torch.uint8)
        grads = [torch.empty_like(query)]
        shared = query.shape[1] // key.shape[1]
        for x in (key, value):
            grad_x = x.new_empty(x.shape[0], x.shape[1] * shared, *x.shape[2:])
            grads.append(grad_x.unflatten(1, (-1, shared)).sum(2) if shared > 1 else grad_x)
        del wide
        return tuple(grads)


def attention_backward_bytes(q_BTHD: torch.Tensor) -> int:
    """What the attention kernels hold in backward: the query's gradient and one row sum in FP32."""
    batch, length, heads, width = q_BTHD.shape
    rows = -(-length // BLOCK) * BLOCK
    return 4 * batch * heads * rows * (-(-width // 32) * 32 + 1)


# Bytes that an operator's CUDA form holds beyond its outputs, by its arguments.
_HELD: dict[str, Callable[..., int]] = {
    "ottava::attention_backward": lambda grad_out, q, *_, **__: attention_backward_bytes(q),
    # a reduction in FP64 first makes an FP64 copy
    "aten::linalg_vector_norm": lambda x, *_, **how: (
        8 * x.numel() if how.get("dtype") == torch.float64 else 0
    ),
}


def held_on_cuda(func, args: Iterable, kwargs: dict, out) -> int:
    """Bytes that `func` allocates and frees inside itself on CUDA (see `MemoryTracker`)."""
    held = _HELD.get(func._schema.name)
    return held(*args, **kwargs) if held else 0


@dataclass(frozen=True, kw_only=True)
class Share:
    """What of a run one of several ranks does otherwise than a process alone.

    `gathers`: layers run with weights gathered for them. `experts_over`: ranks that share a layer's
    experts. `lora`: rank of adapters on a frozen model in FP8 codes; 0: the whole model trains.
    """

    gathers: bool = False
    experts_over: int = 1
    lora: int = 0


ALONE = Share()


class Rehearsal:
    """A run prepared on fake tensors, and its step. `facts`: its parameters, in order."""

    def __init__(
        self, run: Run, model: nn.Module | None, device: str, share: Share = ALONE
    ) -> None:
        self.share = share
        self.mode, self._clock = fake_mode(), (clock.seed, clock.step)
        where = device if device == "cpu" or torch.cuda.is_available() else "cpu"
        plain = prepare.build_model(run, "meta") if model is None else model
        if share.lora and run.precision.policy == "default":
            run = replace(run, precision=replace(run.precision, policy=released_policy(plain)))
        self.run, self.device, self.settings = run, device, run.settings
        # what a frozen model holds besides codes is BF16, as released
        dtype = torch.bfloat16 if share.lora else prepare.DTYPES[self.settings.param_dtype]
        self.model = on_fakes(plain, self.mode, dtype).train()
        with self._inside():
            if share.experts_over > 1:
                share_experts(self.model, share.experts_over)
            if share.lora:
                add_lora(self.model, share.lora)
            plan = prepare.convert_for(run, self.model, where)
            if share.lora:
                freeze_as_codes(self.model)
            if share.gathers:
                separate(self.model)
            wrap_recompute(self.model, run.train.recompute, plan, contextlib.nullcontext)
            self.optimizer = prepare.make_optimizer(run, self.model)
            restore_split_class(self.model)
            self.handle = prepare.fuse(run, self.model, self.optimizer)
            self.ema = EMA(self.model, run.ema.decay) if run.ema.decay else None
        self.coded = self._coded(plan) if share.gathers else []
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def _coded(self, plan: Plan | None) -> list[torch.Tensor]:
        """Weights kept in high precision that travel as codes: those that layers read as codes."""
        p = self.run.precision
        always = p.start_fp8_at == 0.0 and p.finish_bf16_at == 1.0
        wanted = self.run.distributed.gather == "fp8" and self.settings.grad_dtype == "bf16"
        if plan is None or not (always and wanted):
            return []
        recipes = {row.name: row.recipe for row in plan.rows}
        out = []
        for name, module in self.model.named_modules():
            recipe = recipes.get(name)
            if recipe is None or not (recipe.output.fp8 and recipe.grad_input.fp8):
                continue
            for p in module.parameters(recurse=False):
                cast = getattr(p, "_ottava_cast", None)
                own_codes = isinstance(p, SplitParameter)
                if p.requires_grad and splits_codes(cast) and not own_codes:
                    out.append(p)
        return out

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with self.mode, target(self.device, self.run.data.document_mask):
            yield

    def measure(self) -> tuple[Peak, int]:
        """The peak of the second step, and the bytes that the CUDA allocator would reserve."""
        return priced(self.rehearse(), self.device)

    def rehearse(self, counter: Counter | None = None) -> Timeline:
        """Two steps, of which the second counts. `counter`: counts their operators."""
        cuda = self.device == "cuda"

        def inside(func, args, kwargs, out) -> int:
            if counter is not None:
                counter(func, args, kwargs, out)
            return held_on_cuda(func, args, kwargs, out) if cuda else 0

        tracker = MemoryTracker(inside)
        if counter is not None:
            counter.now = lambda: tracker.now
        _FusedAttention.counter = counter
        try:
            with self._inside(), tracker, self._spans(tracker):
                # the name keeps it alive until both steps are over
                workspace = torch.empty(CUBLAS_WORKSPACE if cuda else 0, dtype=torch.uint8)
                with follow(tracker, self.model, self.optimizer, self.ema):
                    self._step(tracker)
                    tracker.start_span()
                    self._step(tracker)
                del workspace
        finally:
            clock.seed, clock.step = self._clock
            _FusedAttention.counter = None
        if cuda and self.run.optimizer.moments_on == "host":
            leave_out(tracker.timeline, "moments")
        return tracker.timeline

    @property
    def exchanged(self) -> int:
        """Elements of the tokens that go to experts in one forward of one layer; 0 without any."""
        routers = [m for m in self.model.modules() if isinstance(m, Router)]
        tokens = self.run.train.micro_batch * self.run.data.sequence_length
        return max((tokens * r.top_k * r.weight.shape[1] for r in routers), default=0)

    def _spans(self, tracker: MemoryTracker) -> contextlib.AbstractContextManager[None]:
        try:
            self.facts = facts_of(self.model, {id(p) for p in self.coded})
        except ValueError:  # no list of layers: nothing to shard by
            self.facts = []
            return contextlib.nullcontext()
        return spans_of(tracker, self.model)

    def _step(self, tracker: MemoryTracker) -> None:
        """What `Trainer.step_once` does, in its order."""
        run, total = self.run, torch.zeros(())
        inputs = self._inputs()
        with gathered(self.coded) as codes:
            tracker.register(GATHERED, codes)
            del codes
            for _ in range(run.train.accumulate):
                with self._precision():
                    loss = self.model(**inputs, num_items_in_batch=1).loss
                total += loss.detach()
                if self.handle is not None:
                    self.handle.guard(loss)
                loss.backward()
        if self.handle is not None:
            self.handle.finish()
        else:
            fast_norm(self.parameters)
        self.optimizer.step(grad_scale=1.0 if run.optimizer.clip_norm else None)
        if self.ema is not None:
            self.ema.update()
        update_router_bias(self.model, 1e-3)
        self.optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()

    def _inputs(self) -> dict[str, Any]:
        shape = (self.run.train.micro_batch, self.run.data.sequence_length)
        inputs = {k: torch.empty(shape, dtype=torch.int64) for k in ("input_ids", "labels")}
        if self.run.data.document_mask:
            ours = isinstance(self.model, MiMoPreTrainedModel)
            name, dtype = ("documents", torch.int32) if ours else ("position_ids", torch.int64)
            inputs[name] = torch.empty(shape, dtype=dtype)
        return {**inputs, "use_cache": False}

    def _precision(self) -> torch.autocast:
        dtype = self.settings.autocast_dtype
        return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
