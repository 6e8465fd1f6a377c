"""The causal language-model loss from the head's input, in chunks: the logits never exist whole.

`ChunkedCausalLM` is mixed into the class of a Hugging Face `*ForCausalLM` (or of a model written
like one). Given labels, its forward runs the model's own forward without them, and the head, in
place of logits, returns the loss. Everything else in that forward stays as it is: hooks (so that a
sharded head weight is there when it is read), extra outputs, a router's auxiliary loss. The output
has `loss` and no `logits`. Without labels nothing changes.

Kept for backward: the gradients themselves (of the head's input, and of its weight), already made
in forward; backward scales them by grad_output. So backward runs once per forward.

Shapes: M tokens (all leading dims), H features, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..kernels.loss import linear_cross_entropy
from ..kernels.split import SplitParameter
from .weights import compute_dtype, grad_dtype_of, weight_values

IGNORE_INDEX = -100


class HeadLoss(torch.autograd.Function):
    """sum over valid targets of cross entropy(x @ weight^T) / num_valid, FP32, 0-dim."""

    @staticmethod
    def forward(ctx, x_MH, weight_VH, targets_M, num_valid, ignore_index, z_loss, training):
        dtype = compute_dtype(x_MH)
        needs_x, needs_w = (training and needed for needed in ctx.needs_input_grad[:2])
        ctx.x_dtype, ctx.grad_dtype = x_MH.dtype, grad_dtype_of(weight_VH)
        with torch.autocast(x_MH.device.type, enabled=False):
            loss_sum, found, grad_x, grad_w = linear_cross_entropy(
                x_MH.to(dtype),
                weight_values(weight_VH, dtype),
                targets_M,
                ignore_index=ignore_index,
                z_loss=z_loss,
                needs_grad_x=needs_x,
                needs_grad_weight=needs_w,
                grad_weight_dtype=ctx.grad_dtype,
            )
        if num_valid is None:
            num_valid = found
        if not isinstance(num_valid, torch.Tensor):
            # Filled by a kernel: a copy from the host would wait for all that runs before it.
            num_valid = torch.full((1,), num_valid, dtype=torch.int64, device=x_MH.device)
        num_valid = num_valid.to(x_MH.device).reshape(1).clamp(min=1)
        ctx.grads, ctx.per_token = (grad_x, grad_w), num_valid.float().reciprocal()
        # Not a view of (1,): callers scale the loss in place.
        return (loss_sum * ctx.per_token).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        if ctx.grads is None:
            raise RuntimeError(
                "the chunked loss gives its gradients away in backward: run forward again before "
                "a second backward (retain_graph is not supported)"
            )
        grad_x, grad_w = ctx.grads
        ctx.grads = None
        factor = (grad_loss * ctx.per_token).float()  # (1,), not 0-dim: multiplies in FP32
        if grad_x is not None:
            grad_x = grad_x.mul_(factor).to(ctx.x_dtype)
        if grad_w is not None:
            grad_w = grad_w.mul_(factor)
        return grad_x, grad_w, None, None, None, None, None


def shifted(labels: torch.Tensor, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """Targets [..., T] from labels [..., T]: position t predicts label t + 1, the last nothing."""
    return nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


def head_loss(
    hidden, weight, targets, num_valid=None, *, ignore_index=IGNORE_INDEX, z_loss=0.0
) -> torch.Tensor:
    """Mean loss (0-dim FP32) over the targets other than `ignore_index`; 0 where there are none.

    hidden [..., H]; weight [V, H], also a split master; targets [...] int64, already shifted.
    num_valid: divide by this count instead (int or tensor), as gradient accumulation needs: then
    the losses of all micro-batches add up to the mean over all their tokens.
    Raises ValueError where hidden and targets differ in length.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"head: {tuple(hidden.shape[:-1])} positions but {tuple(targets.shape)} targets; "
            "labels and logits_to_keep do not go together"
        )
    targets_M = targets.reshape(-1).to(hidden.device)
    x_MH = hidden.reshape(-1, hidden.shape[-1])
    training = torch.is_grad_enabled()
    return HeadLoss.apply(x_MH, weight, targets_M, num_valid, ignore_index, z_loss, training)


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits: `get_output_embeddings()`, else `lm_head`, else None."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else getattr(model, "lm_head", None)


# What models do to logits after the head, by the config key that asks for it and its idle value.
_LOGIT_CHANGES = {"final_logit_softcapping": None, "logits_scaling": 1, "logit_scale": 1}


def why_whole(model: nn.Module) -> str | None:
    """Why this model's loss cannot come from its head in chunks; None where it can."""
    head = output_head(model)
    if head is None:
        return "the model has no output head"
    if not isinstance(head, nn.Linear):
        return f"the head is a {type(head).__name__}, not a linear layer"
    if head.bias is not None:
        return "the head has a bias"
    recipe = getattr(head, "recipe", None)
    if recipe is not None and recipe.any_fp8:
        return "the head computes in FP8"
    for key, idle in _LOGIT_CHANGES.items():
        value = getattr(getattr(model, "config", None), key, idle)
        if value is not None and value != idle:
            return f"the model changes its logits after the head ({key}={value})"
    return None


@contextmanager
def _head_returns_loss(model: nn.Module, targets, num_valid, ignore_index) -> Iterator[list]:
    """Inside, the head's forward returns the loss; it is appended to the yielded list as well."""
    reason = why_whole(model)
    if reason is not None:
        raise ValueError(f"chunked loss: {reason}")
    head, losses = output_head(model), []

    def forward(hidden):
        loss = head_loss(hidden, head.weight, targets, num_valid, ignore_index=ignore_index)
        losses.append(loss)
        return loss

    own = head.__dict__.get("forward")  # set on the instance by others, as offloading hooks do
    head.forward = forward
    try:
        yield losses
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def _only(losses: list, logits) -> torch.Tensor:
    """The loss, once it is sure that the head ran once and nobody changed what it returned."""
    if len(losses) != 1:
        raise RuntimeError(f"chunked loss: the model called its head {len(losses)} times, not once")
    # Wrappers (ZeRO-3) may return a view of it; a changed value lies in other memory.
    same = isinstance(logits, torch.Tensor) and (
        logits.untyped_storage()._cdata == losses[0].untyped_storage()._cdata
    )
    if not same:
        raise RuntimeError("chunked loss: the model changes its logits after the head")
    return logits if logits.dim() == 0 else logits.view(())


class ChunkedCausalLM:
    """Mixed in before a causal LM's class: forward with labels gives the loss without logits.

    Accepts what the model's own forward accepts, and with labels also: `num_items_in_batch` (the
    count to divide by, int or tensor), `shift_labels` (targets already shifted), `ignore_index`.
    A model that calls `self.token_loss` for its losses keeps its forward; only that is replaced.
    logits_in_eval: in eval mode without gradients, compute as the plain class does, logits and all.
    """

    _ottava_plain_class: type
    logits_in_eval: bool = False

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        plain = cls.__mro__[cls.__mro__.index(ChunkedCausalLM) + 1]
        cls._ottava_plain_class = plain

        # The model's own signature: trainers read it to find which columns of a batch to pass.
        @functools.wraps(plain.forward)
        def forward(self, *args, **kwargs):
            return ChunkedCausalLM.forward(self, *args, **kwargs)

        cls.forward = forward

    # The head's forward is set and taken back around each call: not to be traced, unlike the model.
    @torch.compiler.disable(recursive=False)
    def forward(self, *args, **kwargs):
        plain = self._ottava_plain_class
        if hasattr(plain, "token_loss") or self._wants_logits():
            return super().forward(*args, **kwargs)
        call = _signature(plain).bind(self, *args, **kwargs)
        named = "labels" in call.arguments  # else it came among **kwargs, if at all
        labels = call.arguments["labels"] if named else call.kwargs.get("labels")
        targets = call.kwargs.get("shift_labels")
        if labels is None and targets is None:
            return super().forward(*args, **kwargs)
        if named:
            call.arguments["labels"] = None
        given = call.kwargs | {"labels": None} if not named else call.kwargs
        num_valid, ignore_index = _take_loss_arguments(given)
        as_tuple = given.get("return_dict") is False
        if as_tuple:
            given["return_dict"] = True
        if targets is None:
            targets = shifted(labels, ignore_index)
        with _head_returns_loss(self, targets, num_valid, ignore_index) as losses:
            out = super().forward(*call.args[1:], **given)
        out = _with_loss(self, out, losses)
        return out.to_tuple() if as_tuple else out

    def token_loss(self, hidden, targets, num_valid=None) -> tuple[None, torch.Tensor]:
        """(logits, loss) of the head on hidden [..., H] and shifted targets [...]; no logits."""
        if self._wants_logits():
            return super().token_loss(hidden, targets, num_valid)
        with _head_returns_loss(self, targets, num_valid, IGNORE_INDEX) as losses:
            out = output_head(self)(hidden)
        return None, _only(losses, out)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weights are saved: FP32 where they are split masters, whose own
        dtype (of the codes) would be taken for the model's."""
        first = next(p for p in self.parameters() if p.is_floating_point())
        return torch.float32 if isinstance(first, SplitParameter) else first.dtype

    def _wants_logits(self) -> bool:
        return self.logits_in_eval and not self.training and not torch.is_grad_enabled()

    def __reduce_ex__(self, protocol):
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_chunked, (self._ottava_plain_class,), *state


def _take_loss_arguments(given: dict):
    """Take out of a forward's keywords what belongs to the loss: (num_valid, ignore_index)."""
    given.pop("shift_labels", None)
    return given.pop("num_items_in_batch", None), given.pop("ignore_index", IGNORE_INDEX)


def _with_loss(model, out, losses):
    if isinstance(out, tuple):
        raise TypeError("chunked loss: the model returned a tuple; set config.return_dict = True")
    loss = _only(losses, out["logits"])
    aux = out.get("aux_loss")
    if aux is not None and getattr(model, "router_aux_loss_coef", None) is not None:
        loss = loss + model.router_aux_loss_coef * aux.to(loss.device)
    return type(out)(**{**out, "loss": loss, "logits": None})


@functools.cache
def _signature(cls: type) -> inspect.Signature:
    signature = inspect.signature(cls.forward)
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return signature
    # So that num_items_in_batch and the like bind; they are taken out before the model sees them.
    extra = inspect.Parameter("loss_kwargs", inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*parameters, extra])


@functools.cache
def chunked_class(cls: type) -> type:
    """`cls` with ChunkedCausalLM mixed in: same name and module, so that saving names the model."""
    names = {k: getattr(cls, k) for k in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (ChunkedCausalLM, cls), names)


def _new_chunked(plain: type):
    cls = chunked_class(plain)
    return cls.__new__(cls)


def chunk_head(model: nn.Module) -> nn.Module:
    """Make `model` compute its loss from the head in chunks, in place. Raises ValueError with the
    reason where that cannot be."""
    reason = why_whole(model)
    if reason is not None:
        raise ValueError(f"chunked loss: {reason}")
    if not isinstance(model, ChunkedCausalLM):
        model.__class__ = chunked_class(type(model))
    return model
