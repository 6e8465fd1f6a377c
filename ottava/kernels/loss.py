"""Cross entropy straight from the head's input: logits exist one chunk of rows at a time.

Per chunk: one GEMM makes the logits in the dtype of x; one kernel turns them in place into their
gradient (softmax - one_hot, statistics in FP32) and gives each row's loss; two GEMMs add that
chunk's grad_x and grad_weight. Gradients are of the *sum* of the losses, so that the division by a
count of tokens (of this batch or of a whole accumulation) is left to the caller.

grad_weight adds up over chunks in its own dtype: FP32 for an FP32 weight, BF16 for a BF16 one.
The chunk loop is plain PyTorch around one operator: a planner on fake tensors sees every buffer.

Shapes: x_MH, weight_VH, targets_M int64; logits_CV, one chunk. M tokens, H features, V vocabulary.
"""

from __future__ import annotations

import torch

from .op import operator, tl, triton

CHUNK_BYTES = 256 * 2**20  # of logits at a time: large enough that the GEMMs run at full speed


# ---- reference: the specification and the CPU path ----


def ref_softmax_loss_(logits, targets, ignore_index, z_loss, gradient):
    valid = targets != ignore_index
    in_range = (targets >= 0) & (targets < logits.shape[1])
    at = torch.where(in_range, targets, 0).unsqueeze(1)
    wide = logits.float()
    lse = torch.logsumexp(wide, 1)
    picked = torch.where(in_range, wide.gather(1, at).squeeze(1), torch.nan)
    loss = torch.where(valid, lse - picked + z_loss * lse.square(), 0.0)
    if gradient:
        gain = torch.where(in_range, 1.0 + 2.0 * z_loss * lse, torch.nan)
        p = (wide - lse.unsqueeze(1)).exp_() * gain.unsqueeze(1)
        p.scatter_add_(1, at, p.new_full(at.shape, -1.0))
        logits.copy_(torch.where(valid.unsqueeze(1), p, 0.0))
    return loss


# ---- Triton ----


@triton.jit
def _softmax_loss_kernel(
    logits, targets, loss, V, stride, ignore_index, z_loss,
    GRADIENT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row a program: a pass for maximum and sum, and one that writes the gradient in place."""
    m = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + m)
    row = logits + m * stride
    if target == ignore_index:
        tl.store(loss + m, 0.0)
        if GRADIENT:
            for start in range(0, V, WIDE):
                k = start + tl.arange(0, WIDE)
                tl.store(row + k, tl.zeros([WIDE], logits.dtype.element_ty), mask=k < V)
    else:
        in_range = (target >= 0) & (target < V)
        picked = tl.load(row + target, mask=in_range, other=float("nan")).to(tl.float32)
        top = float("-inf")
        total = tl.zeros([WIDE], tl.float32)
        for start in range(0, V, WIDE):
            k = start + tl.arange(0, WIDE)
            v = tl.load(row + k, mask=k < V, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(v, 0))
            # Nothing but -inf so far: subtract 0, so that exp gives 0 and not NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - base) + tl.exp(v - base)
            top = new_top
        lse = top + tl.log(tl.sum(total, 0))
        tl.store(loss + m, lse - picked + z_loss * lse * lse)
        if GRADIENT:
            # Every thread has read `picked` before any writes over it.
            tl.debug_barrier()
            gain = tl.where(in_range, 1.0 + 2.0 * z_loss * lse, float("nan"))
            for start in range(0, V, WIDE):
                k = start + tl.arange(0, WIDE)
                v = tl.load(row + k, mask=k < V, other=float("-inf")).to(tl.float32)
                p = tl.exp(v - lse) * gain - tl.where(k == target, 1.0, 0.0)
                tl.store(row + k, p.to(logits.dtype.element_ty), mask=k < V)


def triton_softmax_loss_(logits, targets, ignore_index, z_loss, gradient):
    rows, vocabulary = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        wide = min(max(triton.next_power_of_2(vocabulary), 16), 4096)
        _softmax_loss_kernel[(rows,)](
            logits, targets.contiguous(), loss, vocabulary, logits.stride(0), ignore_index, z_loss,
            GRADIENT=gradient, WIDE=wide, num_warps=min(max(wide // 512, 1), 8),
        )  # fmt: skip
    return loss


# ---- operator ----


def _fake_softmax_loss_(logits, targets, ignore_index, z_loss, gradient):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


softmax_loss_ = operator(
    "softmax_loss_(Tensor(a!) logits, Tensor targets, int ignore_index, float z_loss, "
    "bool gradient) -> Tensor",
    reference=ref_softmax_loss_,
    fake=_fake_softmax_loss_,
    cuda=triton_softmax_loss_,
)


def auto_chunk_rows(num_rows: int, vocabulary: int, itemsize: int) -> int:
    """Rows per chunk: equal chunks of at most CHUNK_BYTES of logits, in multiples of 128 rows."""
    rows = max(CHUNK_BYTES // max(vocabulary * itemsize, 1), 128)
    chunks = max(-(-num_rows // rows), 1)
    return max(-(-num_rows // (128 * chunks)) * 128, 128)


def linear_cross_entropy(
    x,
    weight,
    targets,
    *,
    ignore_index=-100,
    chunk_rows=None,
    z_loss=0.0,
    needs_grad_x=True,
    needs_grad_weight=True,
    grad_weight_dtype=None,
):
    """(loss_sum FP32 (1,), num_valid int64 (1,), grad_x_MH, grad_weight_VH) of x @ weight^T.

    loss of a row = lse - logit[target] + z_loss * lse^2; rows with `ignore_index` count for nothing
    (none left: loss 0, gradients 0). Any other target outside [0, V) makes the loss NaN.
    Gradients are of loss_sum: grad_x in the dtype of x, grad_weight in `grad_weight_dtype`
    (default: the dtype of weight); None where not needed. The GEMMs run in the dtype of x.
    """
    rows, vocabulary = x.shape[0], weight.shape[0]
    w = weight.to(x.dtype)
    gradient = needs_grad_x or needs_grad_weight
    loss_sum = x.new_zeros(1, dtype=torch.float32)
    num_valid = (targets != ignore_index).sum().view(1)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_grad_x else None
    grad_weight = None
    if needs_grad_weight:
        grad_weight = torch.zeros(
            weight.shape, dtype=grad_weight_dtype or weight.dtype, device=weight.device
        )
    chunk = chunk_rows or auto_chunk_rows(rows, vocabulary, x.element_size())
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        logits = x[part] @ w.t()
        loss = softmax_loss_(logits, targets[part], ignore_index, z_loss, gradient)
        loss_sum += loss.sum()
        if needs_grad_x:
            torch.mm(logits, w, out=grad_x[part])
        if needs_grad_weight:
            _accumulate(grad_weight, logits, x[part])
        del logits
    return loss_sum, num_valid, grad_x, grad_weight


def _accumulate(grad_weight_VH, grad_CV, x_CH) -> None:
    """grad_weight += grad^T @ x."""
    if grad_weight_VH.dtype == grad_CV.dtype:
        grad_weight_VH.addmm_(grad_CV.t(), x_CH)
    elif grad_CV.dtype == torch.float16:
        # A sum over tokens can pass 65504, the largest FP16: make the product in FP32.
        grad_weight_VH += grad_CV.t().float() @ x_CH.float()
    else:
        grad_weight_VH += grad_CV.t() @ x_CH
