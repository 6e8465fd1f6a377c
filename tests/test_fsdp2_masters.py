"""Split masters in shards: the bits of one process, the step inside backward, no rank disagrees."""

import math
from dataclasses import replace

import pytest
import torch
from gathered import whole
from ranks import run_ranks
from test_distributed import steps
from tiny_run import MODEL, tiny_run

import ottava.kernels.adamw as adamw
from ottava.config import ConfigError, Model
from ottava.distributed.shards import shared
from ottava.kernels.split import SplitParameter, split_parameter
from ottava.optim.adamw import local
from ottava.train.heal import at_fault
from ottava.train.trainer import Trainer

FSDP2 = {"strategy": "fsdp2"}
# large enough that linears and experts are codes, and three ranks cut 8-bit moments into groups
WIDE = Model(
    name="demo", overrides=MODEL | {"hidden_size": 128, "num_hidden_layers": 2,
                                    "hybrid_layer_pattern": [0, 1], "head_dim": 64,
                                    "v_head_dim": 64, "intermediate_size": 128},
)  # fmt: skip


def lean(folder, *, distributed=FSDP2, train=None, **sections):
    sections = {"model": WIDE} | sections
    train = {"micro_batch": 1} | (train or {})
    return Trainer(tiny_run(folder, "fp8-lean", distributed=distributed, train=train, **sections))


def alone(folder, accumulate=2, **sections):
    train = {"accumulate": accumulate} | sections.pop("train", {})
    return lean(folder, distributed={}, train=train, **sections)


def bits(t):
    """Every tensor of the weights, whole: of split masters codes, residual, scale and amax."""
    t.strategy.settle()
    out = {}
    for name, p in t.model.named_parameters():
        p, names = whole(p), ("residual", "scale", "amax")
        parts = [p, *(getattr(p, k) for k in names if isinstance(p, SplitParameter))]
        out[name] = [t.detach().clone() for t in parts if t is not None]
    return out


def same_bits(a, b):
    flat = [(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))
            for n in a for x, y in zip(a[n], b[n], strict=True)]  # fmt: skip
    return a.keys() == b.keys() and all(torch.equal(x, y) for x, y in flat)


def one_draw(monkeypatch):
    """All roundings draw the same number: then nothing depends on which rank rounds."""
    draw = lambda shape, leads, key, device: torch.full(  # noqa: E731
        shape, 0x6789ABCD, dtype=torch.int64, device=device
    )
    monkeypatch.setattr(adamw, "ref_draw", draw)


EXACT = {
    "fused": {},
    "averaged": {"optimizer": {"fused": "off"}, "ema": {"decay": 0.5}},
    "split24": {"optimizer": {"master": "split24", "states": "fp32"}},
    "late-fp8": {"precision": {"start_fp8_at": 0.4}},
}


def test_two_ranks_give_the_bits_of_one(tmp_path, monkeypatch):
    one_draw(monkeypatch)
    expected = {}
    for case, sections in EXACT.items():
        t = alone(tmp_path, **sections)
        curve = steps(t, 4)
        held_out = t.evaluate(averaged=t.ema is not None)
        expected[case] = curve, held_out, bits(t)

    def work(rank):
        for case, sections in EXACT.items():
            t = lean(tmp_path, **sections)
            assert t.strategy.can_demote("model.layers.0.mlp") == (case == "late-fp8")
            assert t.settings.fused == (t.handle is not None) == (case != "averaged")
            got = steps(t, 4)
            curve, held_out, weights = expected[case]
            assert [g[0] for g in got] == [c[0] for c in curve], case
            # the norms of shares are added in another order
            assert [g[1] for g in got] == pytest.approx([c[1] for c in curve], rel=1e-6), case
            assert t.evaluate(averaged=t.ema is not None) == held_out, case
            assert same_bits(bits(t), weights), case
            if case == "fused":
                assert all(p.grad is None for p in t.model.parameters())

    run_ranks(2, work, tmp_path)


def test_what_a_rank_holds_and_sends(tmp_path):
    def work(rank):
        t = lean(tmp_path)
        result = replace([t.step_once() for _ in range(2)][-1], first_bad=None)
        row = "model.layers.0.self_attn.qkv_proj"
        t.health.look_at({"rows": {row: {"input": {"saturated": 0.9, "underflowed": 0.0}}}})
        # its weight comes as FP8 codes alone: in BF16 it would compute with those
        assert not t.strategy.can_demote(row) and at_fault(t, result) is None
        coded = [p for p in t.model.parameters() if getattr(p, "cast", None) is not None]
        assert len(coded) >= 8
        for p in coded:
            codes, residual = p.local_split.data, p.local_split.residual
            carrier = p._local_tensor.untyped_storage()
            # codes and residual are the carrier, whose elements have two bytes
            assert carrier.nbytes() == 2 * codes.numel() == 2 * residual.numel()
            assert {codes.untyped_storage().data_ptr(), residual.untyped_storage().data_ptr()} == {
                carrier.data_ptr()
            }
        moments = sum(v.numel() * v.element_size() for s in t.optimizer.state.values()
                      for k, v in s.items() if k in ("m", "v"))  # fmt: skip
        held = sum(local(p).numel() for p in t.model.parameters())
        return held, moments

    held, moments = run_ranks(2, work, tmp_path)[0]
    one = alone(tmp_path)
    steps(one, 1)
    whole_moments = sum(v.numel() * v.element_size() for s in one.optimizer.state.values()
                        for k, v in s.items() if k in ("m", "v"))  # fmt: skip
    assert held == pytest.approx(sum(p.numel() for p in one.model.parameters()) / 2, rel=0.01)
    assert moments == pytest.approx(whole_moments / 2, rel=0.01)


def test_three_ranks_stay_within_the_noise_of_rounding(tmp_path):
    """Rounding draws other bits on each rank; sums over three are made in another order."""
    curve = steps(alone(tmp_path, accumulate=3), 4)
    results = run_ranks(3, lambda rank: steps(lean(tmp_path), 4), tmp_path)
    assert results[0] == results[1] == results[2]
    for (loss, norm, stepped), (loss1, norm1, _) in zip(results[0], curve, strict=True):
        assert stepped and loss == pytest.approx(loss1, rel=1e-3)
        assert norm == pytest.approx(norm1, rel=2e-2)


def test_a_bad_number_on_one_rank_updates_nothing_on_any(tmp_path):
    def work(rank):
        t = lean(tmp_path)
        steps(t, 1)
        before, forward = bits(t), t.strategy.forward

        def poisoned(**inputs):
            out = forward(**inputs)
            out.loss = out.loss * (math.nan if rank == 0 else 1.0)
            return out

        t.strategy.forward = poisoned
        bad = t.step_once()
        kept = same_bits(bits(t), before)
        t.strategy.forward = forward

        guard = t.handle.guard  # a loss that one rank holds back, with gradients in order
        t.handle.guard = lambda loss: guard(loss * (math.nan if rank == 0 else 1.0))
        t.step_once()
        kept &= same_bits(bits(t), before)
        t.handle.guard = guard

        look, seen = t.handle.look, []

        def spoiled(reduced):  # the third group's gradients, on one rank alone
            seen.append(1)
            if len(seen) == 3 and rank == 1:
                reduced[0] = math.inf
            look(reduced)

        for unit in t.strategy.units:
            unit.module.set_all_reduce_hook(spoiled)
        worse = t.step_once()
        moved = [n for n, parts in bits(t).items() if not same_bits({n: parts}, {n: before[n]})]
        found = float(t.handle.found)
        t.handle.look(torch.ones(4))
        with pytest.raises(RuntimeError, match="runs no hooks on sharded parameters"):
            t.handle.finish()
        return bad.stepped, kept, worse.stepped, "finite" in worse.cause, found, moved

    one, other = run_ranks(2, work, tmp_path)
    assert one == other
    stepped, kept, worse, said, found, moved = one
    assert not stepped and kept and not worse and said and found == 1.0
    # what came before the third group has moved, and nothing else, on both
    assert 0 < len(moved) < 25 and not any(".layers.0." in n or "embed" in n for n in moved)


def test_codes_that_are_not_finite_are_so_on_all_ranks(tmp_path):
    def work(rank):
        t = lean(tmp_path)
        p = t.model.get_parameter("model.layers.0.mlp.down_proj.weight")
        o = t.model.get_parameter("model.layers.0.self_attn.o_proj.weight")
        if rank == 1:
            p.local_split.amax.fill_(math.nan)
            o.local_split.amax.fill_(math.inf)
        t.strategy.agreed.agree()
        return float(p.local_split.amax), float(o.local_split.amax)

    assert run_ranks(2, work, tmp_path) == [(math.inf, math.inf)] * 2


def test_written_weights_get_one_scale(tmp_path):
    def work(rank):
        t = lean(tmp_path)
        checked = 0
        for name, p in t.model.named_parameters():
            if getattr(p, "local_split", None) is None or p.cast is None:
                continue
            g = torch.Generator().manual_seed(len(name))
            value = torch.randn(p.shape, generator=g) * (1 + torch.arange(p.shape[0])).view(
                -1, *[1] * (p.dim() - 1))  # fmt: skip
            p.write(shared(value, p))
            expected = split_parameter(torch.nn.Parameter(value.clone()), 8, p.cast)
            got = whole(p)
            pairs = [(got.data.view(torch.uint8), expected.data.view(torch.uint8))]
            pairs += [
                (getattr(got, k), getattr(expected, k)) for k in ("residual", "scale", "amax")
            ]
            assert all(torch.equal(a, b) for a, b in pairs), name
            checked += 1
        return checked

    assert run_ranks(3, work, tmp_path)[0] >= 8


def test_shares_that_cut_groups_are_refused(tmp_path):
    odd = Model(name="demo", overrides=MODEL | {"hidden_size": 36, "intermediate_size": 162})

    def work(rank):
        with pytest.raises(ConfigError, match="does not fall into 2 shares of whole groups"):
            lean(tmp_path, model=odd)

    run_ranks(2, work, tmp_path)
