"""The plan leaves nothing out: every parameter is in one row, and shares are of all of them."""

import pytest
import torch
from test_convert import llama
from tiny_run import MODEL
from torch import nn

import ottava
from ottava.models.load import load_model
from ottava.numerics.policy import Plan


def mixture():
    return nn.Sequential(
        nn.Linear(64, 64), nn.Conv1d(64, 64, 3), nn.GroupNorm(4, 64), nn.Bilinear(64, 64, 64)
    )


class Own(nn.Module):
    """Parameters of its own at the top, of another linear's weight, and in a parametrization."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.first, self.again = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.again.weight = self.first.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.attention = nn.MultiheadAttention(64, 2)


def gemma():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    return Gemma2ForCausalLM(Gemma2Config(**sizes))


def ours(name, sizes=MODEL):
    with torch.device("meta"):
        return load_model(name, overrides=sizes, device="meta")


MODELS = {
    "demo": lambda: ours("demo"),
    "mimo-v2-nano": lambda: ours("mimo-v2-nano"),
    "dense-w1": lambda: ours("dense-w1", {"num_hidden_layers": 2}),
    "llama": llama,
    "llama, tied": lambda: llama(tied=True),
    "gemma": gemma,
    "mixture": mixture,
    "own": Own,
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_add_up_to_the_model(name):
    model = MODELS[name]()
    want = sum(p.numel() for p in model.parameters())  # tied ones once
    for policy in ("default", "mimo"):
        plan = ottava.plan(model, policy=policy)
        assert sum(r.params for r in plan.rows) == want
        names = [r.name for r in plan.rows]
        assert len(names) == len(set(names))
        assert Plan.from_dict(plan.to_dict()) == plan


def test_shares_count_what_fp8_gemms_read_and_nothing_else():
    plan = ottava.plan(mixture())
    weights = 64 * 64 + 64
    assert plan.share_weights == weights / sum(p.numel() for p in mixture().parameters())
    assert "1.5% of the weights" in plan.summary() and "the linears' FLOPs" in plan.summary()
    model = llama()
    plan = ottava.plan(model)
    assert any(r.kind == "norm" and r.recipe for r in plan.rows)  # in 8 bits, but no GEMM's weight
    gemms = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj"))
    assert plan.share_weights == gemms / sum(p.numel() for p in model.parameters())
    assert "the GEMM FLOPs" in plan.summary()


def test_what_has_no_8_bit_form_is_said_in_groups_and_left_alone():
    model = gemma()
    before = {id(p): dict(p.__dict__) for p in model.model.norm.parameters()}
    plan = ottava.plan(model)
    norm = plan["model.layers.1.input_layernorm"]
    assert (norm.kind, norm.shape, norm.params) == ("other", (64,), 64)
    assert norm.reason == "Gemma2RMSNorm: no 8-bit form"
    lines = str(plan).splitlines()
    (said,) = [line for line in lines if ".input_layernorm" in line]
    assert said.startswith("model.layers.*.input_layernorm (2x)")
    column = lines[0].index("kind")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[:-1])
    classes = {n: type(m) for n, m in model.named_modules()}
    ottava.convert(model, plan)
    for row in plan.rows:
        if row.kind == "other":
            assert type(model.get_submodule(row.name)) is classes[row.name]
    assert {id(p): dict(p.__dict__) for p in model.model.norm.parameters()} == before


def test_rows_without_an_8_bit_form_part_no_two_plans():
    """Checkpoints from before there were such rows go on."""
    plan = ottava.plan(mixture())
    earlier = plan.to_dict()
    earlier["rows"] = [r for r in earlier["rows"] if r["kind"] != "other"]
    earlier = Plan.from_dict(earlier)
    assert len(earlier.rows) == 1 and earlier.difference(plan) is plan.difference(earlier) is None


def test_random_streams_do_not_move_with_rows_that_stay_as_they_are():
    streams = []
    for first in (nn.Conv1d(64, 64, 1), nn.Identity()):
        model = ottava.convert(nn.Sequential(first, nn.Linear(64, 64), nn.Linear(64, 64)))
        streams.append([m.weight._ottava_stream for m in model[1:]])
    assert streams[0] == streams[1] == [0, 16]
