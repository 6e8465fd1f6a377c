"""The loss from the head in chunks: kernel, chunk loop, and whole models, against FP64 autograd."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from ottava.kernels import loss as loss_kernels
from ottava.kernels.loss import auto_chunk_rows, linear_cross_entropy
from ottava.kernels.split import split_parameter
from ottava.layers import head
from ottava.models.mimo import MiMoV2ForCausalLM
from ottava.models.presets import preset_config
from ottava.numerics.formats import error_db

KERNELS = {
    "reference": loss_kernels.ref_softmax_loss_,
    "triton": loss_kernels.triton_softmax_loss_,
}
# The gradient is rounded once to the dtype; Triton's interpreter truncates to BF16 (6 dB worse).
LEAST_DB = {torch.float32: 110.0, torch.float16: 60.0, torch.bfloat16: 42.0}


def cross_entropy(logits, targets, z_loss=0.0, ignore_index=-100):
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    kept = logits[targets != ignore_index]
    return loss + z_loss * torch.logsumexp(kept, 1).square().sum()


# ---- the kernel ----


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", LEAST_DB, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (9, 129), (4, 5000)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernel(kernel, shape, dtype, z_loss, device):
    rows, vocabulary = shape
    logits = (3 * torch.randn(shape)).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,))
    if rows > 1:
        targets[1], logits[2] = -100, 0.0
    exact = logits.double().requires_grad_()
    cross_entropy(exact, targets, z_loss).backward()
    here, there = logits.clone().to(device), targets.to(device)
    only_loss = kernel(here, there, -100, z_loss, False)
    assert torch.equal(here.cpu(), logits), "no gradient wanted: the logits stay"
    loss = kernel(here, there, -100, z_loss, True)
    assert loss.dtype == torch.float32 and torch.equal(loss, only_loss)
    expected = cross_entropy(logits.double(), targets, z_loss)
    torch.testing.assert_close(loss.double().sum().cpu(), expected, rtol=2e-6, atol=2e-6)
    if vocabulary > 1:
        assert error_db(exact.grad, here.cpu()) >= LEAST_DB[dtype]
    if rows > 1:
        assert loss[1] == 0 and (here[1] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernel_corners(kernel, device):
    """A masked start of the vocabulary is no NaN; a wrong target or a bad logit is one."""
    logits = torch.randn(6, 9000, device=device)
    logits[0, :4096] = -torch.inf
    logits[3, 77], logits[4, 8999] = torch.nan, torch.inf
    targets = torch.tensor([5000, 9000, -1, 5, 5, 6], device=device)
    expected = logits[[0, 5]].double().cpu().requires_grad_()
    cross_entropy(expected, targets[[0, 5]].cpu()).backward()
    loss = kernel(logits, targets, -100, 0.0, True)
    assert loss[[0, 5]].isfinite().all() and not loss[1:5].isfinite().any()
    assert error_db(expected.grad, logits[[0, 5]].cpu()) >= 110
    assert all(row.isnan().any() for row in logits[1:5])
    assert kernel(logits[:0], targets[:0], -100, 0.0, True).shape == (0,)


def test_registered_operator(device):
    args = (torch.randn(3, 7, device=device), torch.tensor([1, -100, 6], device=device))
    torch.library.opcheck(
        loss_kernels.softmax_loss_, (*args, -100, 0.1, True), test_utils=("test_faketensor",)
    )


# ---- the chunk loop ----


@pytest.mark.parametrize("chunk_rows", [None, 1, 3, 1000])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 7, 5), (130, 129, 33), (3, 2048, 11)], ids=str)
def test_chunks_against_fp64(shape, chunk_rows):
    M, H, V = shape
    if M > 100 and chunk_rows == 1:
        chunk_rows = 64
    x, w, targets = torch.randn(M, H), torch.randn(V, H) / H**0.5, torch.randint(0, V, (M,))
    if M > 2:
        targets[1], x[2] = 7777, 0.0
    exact = [x.double().requires_grad_(), w.double().requires_grad_()]
    expected = cross_entropy(exact[0] @ exact[1].t(), targets, 1e-3, 7777)
    expected.backward()
    loss, count, grad_x, grad_w = linear_cross_entropy(
        x, w, targets, ignore_index=7777, chunk_rows=chunk_rows, z_loss=1e-3
    )
    assert loss.shape == count.shape == (1,) and count.dtype == torch.int64
    assert count.item() == (targets != 7777).sum().item()
    torch.testing.assert_close(loss[0].double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert error_db(exact[0].grad, grad_x) >= 105 and error_db(exact[1].grad, grad_w) >= 105
    assert grad_x[targets == 7777].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["fp32_weight", "same"])
def test_low_precision(dtype, weight_dtype):
    """GEMMs in the dtype of x; grad_weight in that of the weight, over any number of chunks."""
    x = torch.randn(96, 40).to(dtype)
    w = (torch.randn(50, 40) / 6).to(weight_dtype or dtype)
    targets = torch.randint(0, 50, (96,))
    exact = [x.double().requires_grad_(), w.to(dtype).double().requires_grad_()]
    cross_entropy(exact[0] @ exact[1].t(), targets).backward()
    _, _, grad_x, grad_w = linear_cross_entropy(x, w, targets, chunk_rows=20)
    assert grad_x.dtype == dtype and grad_w.dtype == w.dtype
    # Logits rounded to 8 bits of mantissa move every probability by up to 2^-8 of its logit.
    least = 38 if dtype == torch.bfloat16 else 55
    assert error_db(exact[0].grad, grad_x) >= least and error_db(exact[1].grad, grad_w) >= least
    kept = linear_cross_entropy(x, w, targets, grad_weight_dtype=torch.bfloat16)[3]
    assert kept.dtype == torch.bfloat16


def test_only_what_is_needed():
    x, w, targets = torch.randn(6, 4), torch.randn(5, 4), torch.randint(0, 5, (6,))
    full = linear_cross_entropy(x, w, targets)
    for needs_x, needs_w in ((True, False), (False, True), (False, False)):
        loss, _, grad_x, grad_w = linear_cross_entropy(
            x, w, targets, needs_grad_x=needs_x, needs_grad_weight=needs_w
        )
        assert torch.equal(loss, full[0])
        assert torch.equal(grad_x, full[2]) if needs_x else grad_x is None
        assert torch.equal(grad_w, full[3]) if needs_w else grad_w is None


def test_no_valid_target_and_no_rows():
    x, w = torch.randn(6, 4), torch.randn(5, 4)
    loss, count, grad_x, grad_w = linear_cross_entropy(x, w, torch.full((6,), -100))
    assert loss.item() == 0 and count.item() == 0
    assert (grad_x == 0).all() and (grad_w == 0).all()
    loss, count, grad_x, grad_w = linear_cross_entropy(x[:0], w, torch.zeros(0, dtype=torch.long))
    assert loss.item() == 0 and grad_x.shape == (0, 4) and (grad_w == 0).all()


def test_chunk_size():
    assert auto_chunk_rows(16384, 32000, 2) == 4096  # 262 MB of BF16 logits
    for rows, vocabulary, itemsize in (
        (16384, 151936, 2),
        (5, 32000, 4),
        (8193, 32000, 2),
        (1, 1, 2),
    ):
        chunk = auto_chunk_rows(rows, vocabulary, itemsize)
        assert chunk % 128 == 0 and chunk * vocabulary * itemsize <= 300e6


class _Largest(TorchDispatchMode):
    """The largest tensor that has the vocabulary as its last dim."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[1] == self.vocabulary:
                self.rows = max(self.rows, t.shape[0])
        return out


def test_logits_never_exist_whole(monkeypatch):
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 128 * 4 * 97)
    x, w = torch.randn(400, 8, requires_grad=True), torch.randn(97, 8, requires_grad=True)
    with _Largest(97) as largest:
        head.head_loss(x, w, torch.randint(0, 97, (400,))).backward()
    assert largest.rows == 128


# ---- the autograd function ----


def plain_loss(x, w, targets):
    return F.cross_entropy(x.flatten(0, -2) @ w.t(), targets.flatten())


@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight", "both"])
def test_frozen_parts(frozen):
    x, w = torch.randn(2, 9, 6), torch.randn(11, 6)
    targets = torch.randint(0, 11, (2, 9))
    x.requires_grad_(frozen not in ("hidden", "both"))
    w.requires_grad_(frozen not in ("weight", "both"))
    loss, expected = head.head_loss(x, w, targets), plain_loss(x, w, targets)
    torch.testing.assert_close(loss, expected)
    assert loss.shape == () and loss.requires_grad == (frozen != "both")
    leaves = [t for t in (x, w) if t.requires_grad]
    if leaves:
        got = torch.autograd.grad(3.0 * loss, leaves)
        for g, e in zip(got, torch.autograd.grad(3.0 * expected, leaves), strict=True):
            torch.testing.assert_close(g, e)
    with torch.no_grad():
        torch.testing.assert_close(head.head_loss(x, w, targets), expected)


def test_gradients_are_given_once_and_kept_alone():
    x, w = torch.randn(9, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    loss = head.head_loss(x, w, torch.randint(0, 11, (9,)))
    assert all(t is not x and t is not w for t in loss.grad_fn.grads)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_autocast_and_gradient_dtype():
    x, w = torch.randn(64, 32, requires_grad=True), nn.Parameter(torch.randn(50, 32) / 6)
    targets = torch.randint(0, 50, (64,))
    expected = torch.autograd.grad(plain_loss(x, w, targets), (x, w))
    with torch.autocast("cpu", torch.bfloat16):
        head.head_loss(x, w, targets).backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert error_db(expected[0], x.grad) > 38 and error_db(expected[1], w.grad) > 38
    w.grad, w.grad_dtype = None, torch.bfloat16
    head.head_loss(x, w, targets).backward()
    assert w.grad.dtype == torch.bfloat16


def test_split_master_weight():
    x, w = torch.randn(16, 32, requires_grad=True), nn.Parameter(torch.randn(50, 32) / 6)
    targets, values = torch.randint(0, 50, (16,)), w.detach().clone().requires_grad_()
    split_parameter(w, 16, None)
    loss, expected = head.head_loss(x, w, targets), plain_loss(x, values, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    loss.backward()
    expected.backward()
    assert w.grad.dtype == torch.bfloat16 and error_db(values.grad, w.grad) > 45


def test_micro_batches_weigh_by_tokens():
    """3 and 1 valid tokens: the losses and gradients add up to those of one batch."""
    x, w = torch.randn(2, 4, 6), torch.randn(11, 6, requires_grad=True)
    targets = torch.randint(0, 11, (2, 4))
    targets[0, 0] = targets[1, 1:] = -100
    whole = head.head_loss(x, w, targets)
    (expected,) = torch.autograd.grad(whole, w)
    for count in (4, torch.tensor(4), torch.tensor([4])):
        parts = [head.head_loss(x[i], w, targets[i], count) for i in range(2)]
        torch.testing.assert_close(parts[0] + parts[1], whole)
        torch.testing.assert_close(torch.autograd.grad(sum(parts), w)[0], expected)
    empty = head.head_loss(x[0], w, torch.full((4,), -100))
    assert empty.item() == 0 and (torch.autograd.grad(empty, w)[0] == 0).all()
    assert head.head_loss(x[0], w, torch.full((4,), -100), 0).item() == 0


# ---- whole models ----

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True)
    )


def batch():
    ids = torch.randint(0, 50, (2, 9))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def loss_and_grads(model, **inputs):
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    loss = out[0] if isinstance(out, tuple) else out.loss
    loss.backward()
    return out, loss.detach(), {n: p.grad for n, p in model.named_parameters()}


MODELS = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": mixtral,  # adds its router's loss
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)),
}


@pytest.mark.parametrize("count", [None, 20, torch.tensor(20)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_give_the_same_loss_and_gradients(make, count):
    model = make().eval()  # without dropout
    ids, labels = batch()
    inputs = {"input_ids": ids, "labels": labels, "num_items_in_batch": count}
    _, expected, grads = loss_and_grads(model, **inputs)
    names = list(model.state_dict())
    out, loss, got = loss_and_grads(head.chunk_head(model), **inputs)
    torch.testing.assert_close(loss, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6)
    assert out.logits is None and "logits" not in out and list(model.state_dict()) == names
    out, loss, _ = loss_and_grads(model, **inputs, return_dict=False)
    assert isinstance(out, tuple) and torch.equal(loss, out[0].detach())
    torch.testing.assert_close(loss, expected)
    assert model(ids).logits.shape == (2, 9, 50)
    assert "forward" not in head.output_head(model).__dict__


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("count", [None, 20])
def test_mimo(count, blocks):
    """Its multi-token prediction blocks share the head, and their losses are chunked as well."""
    config = preset_config("demo", {
        "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "n_routed_experts": 4,
        "num_nextn_predict_layers": blocks,
    })  # fmt: skip
    model = MiMoV2ForCausalLM(config)
    ids, labels = batch()
    inputs = {"input_ids": ids, "labels": labels, "num_items_in_batch": count}
    out, expected, grads = loss_and_grads(model, **inputs)
    assert out.logits is not None and (out.mtp_loss is not None) == (blocks > 0)
    out, loss, got = loss_and_grads(head.chunk_head(model), **inputs)
    torch.testing.assert_close(loss, expected)
    assert out.logits is None and model.eval()(ids).logits is not None
    for name, grad in grads.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6)


def test_swapped_class_keeps_its_face(tmp_path):
    """Trainers read the signature, save_pretrained the name, pickle and deepcopy the class."""
    plain, ids = llama(), batch()[0]
    model = head.chunk_head(copy.deepcopy(plain))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert type(model).__name__ == "LlamaForCausalLM" and isinstance(model, LlamaForCausalLM)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(again, head.ChunkedCausalLM)
        assert torch.equal(again(ids, labels=ids).loss, model(ids, labels=ids).loss)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits)
    by_hand = type("LlamaForCausalLM", (head.ChunkedCausalLM, LlamaForCausalLM), {})
    plain.__class__ = by_hand
    assert torch.equal(plain(ids, labels=ids).loss, model(ids, labels=ids).loss)


def test_shift_labels_and_ignore_index():
    model = head.chunk_head(llama())
    ids, labels = batch()
    expected = model(ids, labels=labels).loss
    torch.testing.assert_close(model(ids, shift_labels=head.shifted(labels)).loss, expected)
    other = torch.where(labels == -100, 1, labels)
    kept = model(ids, labels=torch.where(labels == 1, 2, other), ignore_index=1).loss
    assert kept.isfinite()
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, labels=labels, logits_to_keep=1)


def test_hooks_on_the_head_still_run():
    """Sharding gathers a head's weight in such hooks, and may hand on a view of the output."""
    model = head.chunk_head(llama())
    ids, labels = batch()
    expected, seen = model(ids, labels=labels).loss, []
    model.lm_head.register_forward_pre_hook(lambda m, args: seen.append("before"))
    model.lm_head.register_forward_hook(lambda m, args, out: out.view_as(out))
    model.lm_head.register_full_backward_hook(lambda m, grads, outs: seen.append("backward"))
    loss = model(ids, labels=labels).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert seen == ["before", "backward"]


class _Rescaled(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out


def test_refuses_what_it_cannot_do():
    ids, labels = batch()
    model = llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        head.chunk_head(model)
    model.config.final_logit_softcapping = None
    model.lm_head = nn.Linear(16, 50, bias=True)
    with pytest.raises(ValueError, match="bias"):
        head.chunk_head(model)
    model.lm_head = nn.Sequential(nn.Linear(16, 50, bias=False))
    assert "not a linear layer" in head.why_whole(model)
    assert "no output head" in head.why_whole(nn.Linear(2, 2))
    rescaled = head.chunk_head(_Rescaled(LlamaConfig(**SIZES)))
    with pytest.raises(RuntimeError, match="changes its logits"):
        rescaled(ids, labels=labels)
    assert "forward" not in rescaled.lm_head.__dict__
