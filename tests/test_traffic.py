"""What ranks send each other: counted from the calls made, in run.jsonl, in the report; and HSDP."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_distributed import steps
from test_fsdp2_masters import alone, bits, lean, one_draw, same_bits
from tiny_run import tiny_run

from ottava.bench.run_page import _sent
from ottava.config import ConfigError
from ottava.distributed.traffic import Traffic
from ottava.monitor.facts import Facts
from ottava.monitor.metrics import read_metrics
from ottava.train.checkpoint import checkpoints
from ottava.train.trainer import Trainer

HSDP = {"strategy": "fsdp2", "replicas": 2}


def test_calls_are_counted_by_kind_and_given_back(tmp_path):
    def work(rank):
        dist.init_process_group("gloo")
        before, traffic = dist.all_reduce, Traffic()
        traffic.install(), Traffic().install()
        x = torch.ones(10)
        dist.all_reduce(x)
        dist.all_reduce(tensor=x.half(), async_op=True).wait()
        dist.all_gather([torch.empty(10), torch.empty(10)], x)
        dist.broadcast(x, 0)
        again = Traffic()
        again.install()
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        assert again.nbytes == {"all_to_all": 16} and again.seconds > 0
        again.reset()
        assert not again.nbytes and not again.seconds
        again.remove()
        return dist.all_reduce is before

    assert run_ranks(2, work, tmp_path) == [True, True]


def test_a_run_says_what_its_ranks_send(tmp_path):
    def work(rank):
        t = lean(tmp_path, steps=3)
        t.run(quiet=True)
        strategy = t.strategy
        root = strategy.units[-1]
        gathers = reduces = codes = 0
        for unit in strategy.units:
            for place, p in zip(unit.places, unit.parameters(), strict=True):
                coded, share = unit.coded.get(place), -(-p.shape[0] // 2) * math.prod(p.shape[1:])
                sent = [p] if coded is None else coded.parts()
                # the root's weights stay whole from forward to backward
                times = 1 if unit is root else 2
                size = sum(s.element_size() for s in sent)
                gathers += times * 2 * share * size
                codes += times * 2 * share if size == 1 else 0
                reduces += 2 * share * (4 if p.dtype == torch.float32 else 2)
        held = read_metrics(strategy.folder(t.config.out)).of("memory")[0]["gib"]
        rows = [(p, getattr(p, "local_split", p)) for p in t.parameters]
        residuals = sum(own.residual.nbytes for _, own in rows if hasattr(own, "residual"))
        codes_too = sum(p._local_tensor.nbytes for p, _ in rows) + sum(
            own.residual.nbytes for _, own in rows if hasattr(own, "residual") and not own.cast
        )  # a carrier holds codes and residuals
        assert held["master"] * 2**30 == residuals
        facts = [v for p, _ in rows for k, v in vars(p).items() if k in ("scale", "amax")]
        rest = {f.data_ptr(): f.nbytes for f in [*facts, *t.model.buffers()] if f is not None}
        assert (held["weights"] + held["master"]) * 2**30 == codes_too + sum(rest.values())
        lines = list(read_metrics(strategy.folder(t.config.out)).of("step"))
        return (
            gathers,
            codes,
            reduces,
            [{k: v for k, v in x.items() if k.endswith("_mib") or k == "comm_ms"} for x in lines],
        )

    for gathers, codes, reduces, lines in run_ranks(2, work, tmp_path):
        assert codes > gathers / 2
        for line in lines:
            assert line["all_gather_mib"] * 2**20 == gathers
            assert line["reduce_scatter_mib"] * 2**20 == reduces
            assert 0 < line["all_reduce_mib"] < 0.1 and line["comm_ms"] > 0
    page = _sent(Facts(read_metrics(tmp_path / "run")))
    assert "all-gather" in page and "reduce-scatter" in page and "MiB" in page

    one = Trainer(tiny_run(tmp_path, out="alone"))
    result = one.step_once()
    assert result.sent == {} and result.waited is None


def test_groups_of_ranks_share_out_a_model_each(tmp_path, monkeypatch):
    """HSDP, 2 x 2: both groups hold the same; the bits of a checkpoint are those that one has."""
    one_draw(monkeypatch)
    curve = steps(alone(tmp_path, accumulate=4, out="alone"), 2)

    def work(rank):
        t = lean(tmp_path, distributed=HSDP)
        got = steps(t, 2)
        t.save()
        carried = t.step_once().sent
        weights = bits(t)
        plain = lean(tmp_path, distributed=HSDP, out="none", optimizer={"fused": "off"})
        assert plain.step_once().grad_norm == pytest.approx(curve[0][1], rel=1e-2)
        with pytest.raises(ConfigError, match=r"4 rank\(s\) are not 3 group\(s\) of 2 or more"):
            lean(tmp_path, distributed=HSDP | {"replicas": 3}, out="none")
        return got, weights, carried, t.strategy.notes()[0]

    results = run_ranks(4, work, tmp_path, seconds=120)
    first = results[0]
    for got, weights, carried, note in results:
        assert got == first[0] and same_bits(weights, first[1]) and carried == first[2]
        assert "4 ranks (2 groups of 2), fsdp2" in note
    for (loss, norm, stepped), (loss1, norm1, _) in zip(first[0], curve, strict=True):
        assert stepped and loss == pytest.approx(loss1, rel=1e-4)
        assert norm == pytest.approx(norm1, rel=1e-2)
    # gradients are summed over the groups as well: as many bytes as a rank is left with
    assert first[2]["all_reduce"] == pytest.approx(first[2]["reduce_scatter"] / 2, rel=0.01)
    # one of the groups writes
    path = checkpoints(tmp_path / "run" / "checkpoints")[0][1]
    sizes = [(path / f"shard-{r + 1:05d}-of-00004.safetensors").stat().st_size for r in range(4)]
    assert min(sizes[:2]) > 50 * max(sizes[2:])
    assert alone(tmp_path, accumulate=4).step == 2


def test_replicas_need_fsdp2(tmp_path):
    with pytest.raises(ConfigError, match=r"distributed.replicas: does nothing under .*=ddp"):
        tiny_run(tmp_path, distributed={"strategy": "ddp", "replicas": 2})
