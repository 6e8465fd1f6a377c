"""Fully sharded ranks: the numbers of one process, FP8 on the wire, state whole in checkpoints."""

import math

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
from gathered import whole
from kept_codes import kept_after_forward, shapes_of
from ranks import run_ranks
from test_checkpoint import same
from test_distributed import steps
from tiny_run import MODEL, tiny_run

from ottava.config import ConfigError, Model
from ottava.distributed.gather import Gathered
from ottava.optim.adamw import local
from ottava.train.checkpoint import Checkpoint
from ottava.train.export import export
from ottava.train.trainer import Trainer

FSDP2 = {"strategy": "fsdp2"}


def sharded(folder, preset, distributed=FSDP2, **sections):
    train = {"micro_batch": 1} | sections.pop("train", {})
    return Trainer(tiny_run(folder, preset, distributed=distributed, train=train, **sections))


def alone(folder, preset, accumulate=2, **sections):
    train = {"micro_batch": 1, "accumulate": accumulate} | sections.pop("train", {})
    return Trainer(tiny_run(folder, preset, train=train, **sections))


def whole_weights(t):
    return {n: whole(p.detach()) for n, p in t.model.named_parameters()}


CURVES = {
    "fp32": ("fp32", {}),
    "amp-clipped": ("amp", {"optimizer": {"clip_norm": 0.5}}),
    "fp8": ("fp8", {}),
    "fp8-full": ("fp8", {"distributed": FSDP2 | {"gather": "full"}}),
    "layers-again": ("fp8", {"train": {"recompute": "layer"}}),
    "by-rows": ("fp8", {"precision": {"recipe": "row"}}),
    "delayed": ("fp8", {"precision": {"recipe": "delayed"}}),
}


@pytest.mark.parametrize("case", CURVES)
def test_two_ranks_give_the_losses_of_one_that_accumulates(tmp_path, case):
    preset, sections = CURVES[case]
    one = alone(tmp_path, preset, **{k: v for k, v in sections.items() if k != "distributed"})
    curve = steps(one, 3)

    def work(rank):
        t = sharded(tmp_path, preset, **sections)
        return steps(t, 3), whole_weights(t), len(t.strategy.casts)

    for got, weights, coded in run_ranks(2, work, tmp_path):
        assert bool(coded) == (case in ("fp8", "layers-again", "delayed"))
        for (loss, norm, stepped), (loss1, norm1, _) in zip(got, curve, strict=True):
            # partial norms are added in another order, and clipping divides by the norm
            assert stepped and norm == pytest.approx(norm1, rel=1e-6)
            assert loss == loss1 if not sections else loss == pytest.approx(loss1, rel=1e-6)
        if not sections:
            assert all(same(weights[n], p.detach()) for n, p in one.model.named_parameters())


def test_rounded_masters_and_moments_stay_within_their_noise(tmp_path):
    master = {"optimizer": {"master": "bf16"}}
    curve = steps(alone(tmp_path, "bf16", **master), 4)
    both = run_ranks(2, lambda rank: steps(sharded(tmp_path, "bf16", **master), 4), tmp_path)
    assert both[0] == both[1]
    for (loss, norm, _), (loss1, norm1, _) in zip(both[0], curve, strict=True):
        assert loss == pytest.approx(loss1, rel=1e-3) and norm == pytest.approx(norm1, rel=2e-2)


def test_shares_of_unequal_size_and_none(tmp_path):
    """Three ranks: 4 experts, 2 heads' rows, biases of 1; some ranks hold nothing of some."""
    curve = steps(alone(tmp_path, "fp8", accumulate=3), 3)

    def work(rank):
        t = sharded(tmp_path, "fp8")
        rows = [len(local(p)) if p.dim() else 1 for p in t.model.parameters()]
        return steps(t, 3), min(rows), len({len(local(p)) for p in t.model.parameters()})

    results = run_ranks(3, work, tmp_path)
    assert results[2][1] == 0 and results[0][1] > 0
    for got, *_ in results:
        assert got == results[0][0]
        for (loss, norm, _), (loss1, norm1, _) in zip(got, curve, strict=True):
            assert loss == pytest.approx(loss1, rel=1e-4) and norm == pytest.approx(norm1, rel=1e-2)


def test_fp8_weights_travel_as_bytes_with_one_scale(tmp_path):
    def work(rank):
        t = sharded(tmp_path, "fp8")
        t.step_once()
        sent, seen = [], {}
        gather = collectives.DefaultAllGather.__call__

        def counted(self, output_tensor, input_tensor, group, async_op=False):
            sent.append((input_tensor.dtype, input_tensor.numel() * input_tensor.element_size()))
            return gather(self, output_tensor, input_tensor, group, async_op)

        def look(module, _args):
            p = module._parameters["weight"]
            if isinstance(p, Gathered):
                seen[module] = p.dequantize(), p.scale.clone()

        collectives.DefaultAllGather.__call__ = counted
        for module, _ in t.strategy.casts:
            if "weight" in module._parameters:
                module.register_forward_pre_hook(look)
        before = {m: whole(m._parameters["weight"].detach())
                  for m, _ in t.strategy.casts if "weight" in m._parameters}  # fmt: skip
        with torch.no_grad(), t.precision():
            t.model(torch.zeros(1, 16, dtype=torch.int64))
        collectives.DefaultAllGather.__call__ = gather
        checks = []
        for module, (values, scale) in seen.items():
            w = before[module]
            expected = 2.0 ** math.ceil(math.log2(float(w.abs().max()) / 448.0))
            checks.append((float(scale) == expected, float((values - w).norm() / w.norm())))
        held = sum(local(p).numel() for p in t.model.parameters())
        coded = sum(m._parameters[n].numel() for m, n in t.strategy.casts)
        rest = sum(p.numel() for p in t.model.parameters()) - coded
        # padding of shares apart: a byte for each coded weight, four for each other one
        assert len(sent) == len(t.strategy.units)
        assert sum(n for _, n in sent) == pytest.approx((coded + 4 * rest) / 2, rel=0.01)
        assert {d for d, _ in sent} <= {torch.uint8, torch.float32}
        return checks, held, coded + rest, len(before)

    for checks, held, total, linears in run_ranks(2, work, tmp_path):
        assert len(checks) >= 3 and linears >= len(checks)
        assert all(ok and error < 0.04 for ok, error in checks)
        assert held <= 0.52 * total


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_no_layer_keeps_a_cast_of_a_gathered_weight(tmp_path, recipe):
    sections = {"distributed": FSDP2 | {"gather": "full"}, "precision": {"recipe": recipe}}

    def work(rank):
        t = sharded(tmp_path, "fp8", **sections)
        return kept_after_forward(t, shapes_of(t.model))

    for made, kept in run_ranks(2, work, tmp_path):
        assert made >= 8 and not kept


def test_one_rank_overflows_and_all_skip(tmp_path):
    def work(rank):
        t = sharded(tmp_path, "amp-fp16", ema={"decay": 0.9})
        first, before = t.step_once(), whole_weights(t)
        forward = t.strategy.forward

        def poisoned(**inputs):
            out = forward(**inputs)
            out.loss = out.loss * (math.inf if rank == 0 else 1.0)
            return out

        t.strategy.forward = poisoned
        bad = t.step_once()
        t.strategy.forward = forward
        kept = same(whole_weights(t), before)
        return first.stepped, bad.stepped, kept, t.step_once().stepped, t.scaler.get_scale()

    assert run_ranks(2, work, tmp_path) == [(True, False, True, True, 32768.0)] * 2


def test_a_bad_gradient_is_named_on_all_ranks(tmp_path):
    name = "model.layers.1.self_attn.qkv_proj.weight"

    def work(rank):
        t = sharded(tmp_path, "fp8")
        t.step_once()
        p = t.model.get_parameter(name)
        if rank == 1:
            p.register_hook(lambda g: g)  # none: gradients of shards come without hooks
            t.strategy.backward = lambda loss, last: (
                loss.backward(), local(p.grad).fill_(math.nan))  # fmt: skip
        before = whole_weights(t)
        result = t.step_once()
        return result.stepped, name in result.cause, same(whole_weights(t), before)

    assert run_ranks(2, work, tmp_path) == [(False, True, True)] * 2


def test_resumed_on_two_one_and_three_ranks(tmp_path):
    """2 -> 1 -> 3: checkpoints are whole, so any number of ranks and any strategy continues."""
    settings = {"ema": {"decay": 0.9}, "steps": 6, "out": "moved"}
    curve = steps(alone(tmp_path, "fp8", accumulate=6, **settings | {"out": "alone"}), 4)

    def part(accumulate, number, distributed=FSDP2):
        def work(rank):
            t = sharded(tmp_path, "fp8", distributed, train={"accumulate": accumulate}, **settings)
            begun = t.step, t.ema.updates
            got = steps(t, number)
            t.save()
            return begun, got, {n: whole(s) for n, s in t.ema.shadow.items()}

        return work

    begun, got, _ = run_ranks(2, part(3, 1), tmp_path)[0]
    assert begun == (0, 0)
    one = alone(tmp_path, "fp8", accumulate=6, **settings)
    assert one.step == 1
    got += steps(one, 1)
    one.save()
    begun, last, shadow = run_ranks(3, part(2, 1), tmp_path)[2]
    assert begun == (2, 2)
    got += last
    begun, last, _ = run_ranks(2, part(3, 1, {"strategy": "ddp"}), tmp_path)[1]
    assert begun == (3, 3)
    got += last
    for (loss, norm, _), (loss1, norm1, _) in zip(got, curve, strict=True):
        assert loss == pytest.approx(loss1, rel=1e-4) and norm == pytest.approx(norm1, rel=1e-2)
    c = Checkpoint.open(tmp_path / "moved" / "checkpoints" / "step-00000003")
    assert same(c.section("ema")["shadow"], shadow)
    export(c.path, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_stopped_and_continued_gives_the_same_bits(tmp_path):
    def run(out, number, save=False):
        def work(rank):
            t = sharded(tmp_path, "fp8", out=out)
            got = steps(t, number)
            if save:
                t.save()
            return got

        return run_ranks(2, work, tmp_path)

    expected = run("straight", 3)
    got = [a + b for a, b in zip(run("stopped", 1, save=True), run("stopped", 2), strict=True)]
    assert got == expected


def test_a_whole_run_with_evaluation(tmp_path):
    def work(rank):
        t = sharded(tmp_path, "fp8", steps=3, train={"eval_every": 2}, ema={"decay": 0.5},
                    monitor={"every": 2})  # fmt: skip
        result = t.run(quiet=True)
        return result.step, result.eval_loss, t.evaluate(averaged=True)

    one, other = run_ranks(2, work, tmp_path)
    assert one == other and one[0] == 3 and math.isfinite(one[1]) and math.isfinite(one[2])


def test_what_fsdp2_cannot_do_is_refused(tmp_path):
    odd = Model(name="demo", overrides=MODEL | {"hidden_size": 36, "intermediate_size": 62})

    def work(rank):
        with pytest.raises(ConfigError, match="does not fall into 2 shares of whole groups"):
            sharded(tmp_path, "fp32", optimizer={"states": "8bit"}, model=odd)

    run_ranks(2, work, tmp_path)
