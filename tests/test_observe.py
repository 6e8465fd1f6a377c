"""What the monitor sees inside a step: right numbers, all rows, and not a bit changed."""

import json
import math

import pytest
import torch
from test_trainer import weights
from tiny_run import tiny_run

from ottava.layers.delayed import AmaxHistory
from ottava.monitor.metrics import read_metrics
from ottava.monitor.observe import Observer
from ottava.monitor.operands import (
    FIELDS,
    operand_numbers,
    sample_of,
    scale_in_force,
    weight_pieces,
    zero_share,
)
from ottava.numerics.recipe import Cast
from ottava.train.trainer import Trainer


def numbers(x, cast, scale=None):
    out = dict(zip(FIELDS, (float(v) for v in operand_numbers(x, cast, scale)), strict=True))
    return out | {k: out[k] / out["count"] for k in ("saturated", "underflowed")}


def test_a_quarter_of_zeros_after_the_cast_is_seen_as_a_quarter():
    x = torch.full((400, 100), 1.0)
    x[:100] = 1e-8  # 448e8 times smaller than amax: below half of the smallest code
    x[0, 0] = 448.0
    seen = numbers(x, Cast())
    assert seen["underflowed"] == pytest.approx(0.25, abs=1e-3)
    assert seen["amax"] == 448.0 and seen["scale"] == 1.0 and seen["saturated"] == 0.0
    x[:100] = 0.0  # what is zero does not underflow
    x[0, 0] = 448.0
    assert numbers(x, Cast())["underflowed"] == 0.0


def test_an_eighth_beyond_the_largest_code_is_seen_as_an_eighth():
    x = torch.full((256, 64), 400.0)
    x[:32] = 500.0
    x[32:64] = 460.0  # rounds to 448, no clipping
    one = torch.ones(1)
    assert numbers(x, Cast(), one)["saturated"] == 0.125
    assert numbers(x, Cast())["saturated"] == 0.0  # a scale of its own clips nothing
    x = torch.tensor([[57344.0, 61000.0, 70000.0, -70000.0]])
    assert numbers(x, Cast(format="e5m2"), one)["saturated"] == 0.5


@pytest.mark.parametrize("grain", ["tensor", "row", "group", "block"])
def test_the_error_of_good_casts_is_that_of_the_format(grain):
    x = torch.randn(300, 200)  # in several pieces for a small PIECE, and no whole blocks
    seen = numbers(x, Cast(granularity=grain))
    db = 10 * math.log10(seen["signal"] / seen["noise"])
    assert 31.0 < db < 33.0 and seen["amax"] == float(x.abs().max())


def test_pieces_change_nothing(monkeypatch):
    x, w = torch.randn(700, 50), torch.nn.Parameter(torch.randn(33, 7))
    whole, sample = numbers(x, Cast(granularity="block")), sample_of(w, 50)
    monkeypatch.setattr("ottava.monitor.operands.PIECE", 64)
    assert numbers(x, Cast(granularity="block")) == pytest.approx(whole, rel=1e-12)
    assert torch.equal(torch.cat(list(weight_pieces(w))), w.detach())
    assert torch.equal(sample_of(w, 50), sample) and len(sample) == 58
    assert torch.equal(sample, w.detach().flatten()[::4])


def test_zeros_of_moments_are_counted_in_any_format():
    m = torch.tensor([0.0, -0.0, 1.0, 2.0])
    assert float(zero_share(m)) == 0.5
    assert float(zero_share(m.to(torch.float8_e4m3fn))) == 0.5
    assert float(zero_share(torch.tensor([0, 128, 3, 4], dtype=torch.uint8))) == 0.25


def test_a_delayed_scale_is_that_of_its_history():
    cast, history = Cast(scaling="delayed", history=4), AmaxHistory(4, torch.device("cpu"))
    assert scale_in_force(history, "input", cast) is None
    history.amax[0, 1], history.ready[0] = 448.0, True
    assert float(scale_in_force(history, "input", cast)) == 1.0
    assert (
        scale_in_force(history, "grad_output", cast) is None
        and scale_in_force(history, "input", Cast()) is None
    )


PRESETS = {
    "fp8": ("fp8", {}),
    "delayed": ("fp8", {"precision": {"recipe": "delayed"}}),
    "block": ("fp8", {"precision": {"recipe": "block"}}),
    "lean": ("fp8-lean", {}),
    "accumulated": ("fp8-lean", {"train": {"accumulate": 2, "recompute": "layer"}}),
    "storage": ("storage", {}),
    "amp": ("amp", {}),
}


@pytest.mark.parametrize("case", PRESETS)
def test_looking_changes_no_bit_and_sees_every_row(tmp_path, case):
    preset, sections = PRESETS[case]
    runs = []
    for every in (0, 2):
        t = Trainer(tiny_run(tmp_path, preset, monitor={"every": every}, **sections))
        runs.append((t, [t.step_once() for _ in range(3)]))
    (plain, a), (looked, b) = runs
    assert [r.loss for r in a] == [r.loss for r in b]
    assert all(torch.equal(x, y) for x, y in zip(weights(plain).values(), weights(looked).values(),
                                                 strict=True))  # fmt: skip
    assert [r.observed is None for r in b] == [True, False, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in looked.model.modules())
    seen = b[1].observed
    json.dumps(seen, allow_nan=False)
    assert seen["unseen"] == []
    assert set(seen["parameters"]) == {n for n, _ in looked.model.named_parameters()}
    for values in seen["parameters"].values():
        assert values["grad_norm"] > 0 and 0 < values["update"] < 1 and values["weight_amax"] > 0
        assert 0.0 <= values["v_zero"] <= values["m_zero"] + 0.01 < 1.01
    assert all(1 <= e["busiest"] <= 4 and e["idle"] < 1 for e in seen["experts"].values())
    assert len(seen["experts"]) == 2
    least = 10 if case == "delayed" else 20  # gradients grew since the step before, and clip
    gemms = [r for r in looked.plan.rows if r.recipe and r.flops] if looked.plan else []
    assert set(seen["rows"]) >= {r.name for r in gemms}
    for row in gemms:
        operands = seen["rows"][row.name]
        wanted = {"input"} | ({"grad_output"} if row.recipe.any_fp8 else set())
        assert set(operands) >= wanted
        for name, values in operands.items():
            assert values["error_db"] > least and values.get("saturated", 0.0) < 0.05, (
                row.name,
                name,
            )
            if name != "output":
                assert 0 < values["amax"] < 10 and values["scale"] > 0


def test_inside_a_fused_mlp_the_numbers_are_those_of_the_plain_one(tmp_path):
    def seen(fused):
        t = Trainer(tiny_run(tmp_path, "fp8", monitor={"every": 1}))
        if not fused:
            t.model.model.layers[0].mlp.recipe = None  # its three linears run one by one
        return t.step_once().observed["rows"]

    one, two = seen(True), seen(False)
    for name in ("gate_proj", "up_proj", "down_proj"):
        for operand in ("input", "grad_output", "weight"):
            a, b = (r[f"model.layers.0.mlp.{name}"][operand] for r in (one, two))
            assert a["amax"] == pytest.approx(b["amax"], rel=0.1), (name, operand)
            assert a["error_db"] == pytest.approx(b["error_db"], abs=1.5)
    assert "output" in one["model.layers.0.mlp"] and "model.layers.0.mlp" not in two


def test_the_run_writes_what_was_seen_every_so_many_steps(tmp_path):
    run = tiny_run(tmp_path, "fp8", steps=4, monitor={"every": 2}, train={"eval_batches": 0})
    Trainer(run).run(quiet=True)
    lines = read_metrics(run.out).of("observe")
    assert [x["step"] for x in lines] == [2, 4] and lines[0]["rows"] and lines[0]["parameters"]
    assert all(x["data_ms"] >= 0 for x in read_metrics(run.out).of("step"))


def test_off_hooks_nothing(tmp_path):
    t = Trainer(tiny_run(tmp_path, "fp8", monitor={"every": 0}))
    assert isinstance(t.observer, Observer)
    assert all(t.observer.begin(step) is None for step in range(200))


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean"])
def test_the_first_tensor_that_is_not_finite_is_named(tmp_path, preset):
    """In forward, backward and among the weights; and nothing is left behind."""
    t = Trainer(tiny_run(tmp_path, preset))
    t.step_once()
    layer = t.model.model.layers[1]
    places = {
        "model.layers.1.self_attn.o_proj": (layer.self_attn.o_proj, "output"),
        "model.layers.2.input_layernorm": (t.model.model.layers[2].input_layernorm, "output"),
        "model.layers.1.mlp.experts": (layer.mlp.experts, "grad_output"),
    }
    for name, (module, operand) in places.items():
        hook = module.register_forward_hook(
            lambda m, x, y: y * math.nan if operand == "output" else y  # noqa: B023
        )
        if operand == "grad_output":
            hook.remove()
            hook = module.register_forward_hook(
                lambda m, x, y: y.register_hook(lambda g: g * math.inf) and None
            )
        before, position = weights(t), t.data.train.position
        result = t.step_once()
        hook.remove()
        assert result.first_bad == (name, operand) and not result.stepped
        assert t.data.train.position == position + 2
        if operand == "output" or preset == "fp8":  # a fused step may have begun to update
            after = weights(t).values()
            assert all(torch.equal(a, b) for a, b in zip(before.values(), after, strict=True))
    if preset == "fp8-lean":
        return
    with torch.no_grad():
        layer.input_layernorm.weight[0] = math.nan
    assert t.step_once().first_bad == (
        "model.layers.1.input_layernorm.weight", "weight",
    )  # fmt: skip
