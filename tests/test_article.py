"""The founding article's own code (sections 3.2, 3.3, 4.2) with nothing changed but its import.

Its fragments are run as they stand, line breaks restored. What it leaves out ("...") is filled in
around them: the forward of the attention, the MLP, the constructor, data and criterion.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ottava
from ottava.kernels.gemm import fp8_gemms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, HEADS = 64, 4

MODULES = """
import torch.nn as nn
import ottava as te

class MimoAttentionFP8(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.qkv = te.Linear(dim, dim * 3)
        self.proj = te.Linear(dim, dim)
        self.norm = te.LayerNorm(dim)
"""

MODEL = """
import ottava as te

class MimoModelFP8(nn.Module):
    def forward(self, x):
        with te.fp8_autocast(enabled=True):
            x = self.attention(x)
            x = self.mlp(x)
        return x
"""

STEP = """
import ottava as te
import torch.optim as optim

model = MimoModelFP8(...).cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-4)
scaler = te.amp.GradScaler(init_scale=2**16, growth_interval=1000)

def train_step(data, target):
    optimizer.zero_grad()
    with te.fp8_autocast(enabled=True):
        output = model(data)
        loss = criterion(output, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

LAYERED = """
class Layered(nn.Module):
    def forward(self, x):
        with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            x = self.fp8_layers(x)
            with te.fp8_autocast(enabled=False):
                x = self.sensitive_layer(x)
            x = self.more_fp8_layers(x)
        return x
"""


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


@pytest.fixture
def article(monkeypatch):
    """The names that the article's fragments define, and those they read."""
    monkeypatch.setattr(nn.Module, "cuda", lambda self: self.to(DEVICE))
    names = {"criterion": nn.functional.mse_loss, "fp8_recipe": "row"}
    exec(MODULES, names)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        out = F.scaled_dot_product_attention(*(t.transpose(-3, -2) for t in (q, k, v)))
        return x + self.proj(out.transpose(-3, -2).flatten(-2))

    names["MimoAttentionFP8"].forward = attend
    exec(MODEL, names)

    def build(self, _config):
        nn.Module.__init__(self)
        self.attention = names["MimoAttentionFP8"](DIM, HEADS)
        self.mlp = Residual(ottava.LayerNormMLP(DIM, 2 * DIM))

    names["MimoModelFP8"].__init__ = build
    return names


def batch():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 16, DIM, generator=g)
    return x.to(DEVICE), torch.roll(x, 1, -1).to(DEVICE)


def test_the_training_step_runs_and_the_loss_falls(article):
    exec(STEP, article)
    model, data = article["model"], batch()
    before = {n: p.clone() for n, p in model.named_parameters()}
    first = F.mse_loss(model(data[0]), data[1]).item()
    for group in article["optimizer"].param_groups:
        group["lr"] = 3e-3  # the article's 1e-4 is for a long run
    for _ in range(25):
        article["train_step"](*data)
    assert F.mse_loss(model(data[0]), data[1]).item() < 0.7 * first
    assert article["scaler"].get_scale() == 2.0**16
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_step_runs_all_three_gemms_of_every_linear_in_fp8(article):
    exec(STEP, article)
    start = fp8_gemms()
    article["train_step"](*batch())
    # qkv, proj and the two of the MLP: output, grad_input and grad_weight each
    assert fp8_gemms() - start == 3 * 4


def test_the_loss_is_that_of_high_precision_within_fp8_error(article):
    exec(STEP, article)
    x, y = batch()
    model = article["model"]
    got = F.mse_loss(model(x), y)
    plain = {"autocast": article["te"].fp8_autocast}
    article["te"].fp8_autocast = lambda enabled: plain["autocast"](enabled=False)
    try:
        start = fp8_gemms()
        want = F.mse_loss(model(x), y)
        assert fp8_gemms() == start
    finally:
        article["te"].fp8_autocast = plain["autocast"]
    assert got.item() != want.item() and abs(got - want) < 0.02 * want


def test_layers_switched_back_compute_in_high_precision(article):
    exec(LAYERED, article)
    model = article["Layered"]()
    for name in ("fp8_layers", "sensitive_layer", "more_fp8_layers"):
        setattr(model, name, ottava.Linear(DIM, DIM).to(DEVICE))
    seen = {}

    def watch(name, module):
        module.register_forward_pre_hook(lambda *_: seen.update({name: fp8_gemms()}))
        module.register_forward_hook(
            lambda _, args, out: seen.update({name: (fp8_gemms() - seen[name], args[0], out)})
        )

    for name, module in model.named_children():
        watch(name, module)
    out = model(batch()[0])
    assert {k: v[0] for k, v in seen.items()} == {
        "fp8_layers": 1, "sensitive_layer": 0, "more_fp8_layers": 1,
    }  # fmt: skip
    for name, module in model.named_children():
        _, x, y = seen[name]
        high = F.linear(x, module.weight, module.bias)
        assert torch.equal(y, high) == (name == "sensitive_layer")
    start = fp8_gemms()
    out.sum().backward()  # backward is outside the contexts: each layer does as its forward did
    assert fp8_gemms() - start == 1 + 2  # grad_weight of the first; both of the last
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_both_spellings_are_the_same():
    assert ottava.fp8_autocast is ottava.autocast and ottava.amp.GradScaler is ottava.GradScaler
