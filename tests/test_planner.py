"""Plans for several GPUs, one layer of each kind for all, counted work, predicted times."""

from dataclasses import replace

import pytest

from ottava.bench.contest import VARIANTS, planned_for
from ottava.bench.workloads import Workload
from ottava.cli import main
from ottava.config import Data, Distributed, Model, Optimizer, Precision, Run, Train
from ottava.planner.allocator import priced
from ottava.planner.cards import CARDS, card_of
from ottava.planner.lifetimes import Span, Timeline, replay
from ottava.planner.memory import estimate_memory
from ottava.planner.ranks import Layout, on_rank, one_step
from ottava.planner.rehearsal import Rehearsal, Share
from ottava.planner.repeat import NotAlike, kinds_of, repeat, shallow, shortest
from ottava.planner.search import largest_batch, longest
from ottava.planner.several import Several, rehearsed
from ottava.planner.speed import Links, _Queue
from ottava.planner.units import Fact
from ottava.planner.work import Counter, Work

DEEP = {"num_hidden_layers": 6, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0]}
DENSE = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
H200 = CARDS["h200"]
LINKS = Links(intra=450, inter=50)


def a_run(name, preset, overrides, strategy="single", recompute="none", batch=(1, 64), **sections):
    return Run(
        name=name, model=Model(name=name, overrides=overrides),
        data=Data(source="random", sequence_length=batch[1], document_mask=False),
        train=Train(preset=preset, micro_batch=batch[0], recompute=recompute,
                    accumulate=sections.pop("accumulate", 1)),
        distributed=Distributed(strategy=strategy), **sections,
    )  # fmt: skip


# ---- one layer of each kind, repeated ----

CASES = {
    "lean-again": ("demo", "fp8-lean", DEEP, {"recompute": "layer"}),
    "fp8-sharded": ("demo", "fp8", DEEP, {"strategy": "fsdp2"}),
    "delayed": ("dense-w1", "fp8-lean", DENSE, {"precision": Precision(recipe="delayed")}),
}


@pytest.mark.parametrize("case", CASES)
def test_repeated_layers_give_the_numbers_of_all(case):
    name, preset, overrides, how = CASES[case]
    run = a_run(name, preset, overrides, **how)
    sharded = run.distributed.strategy == "fsdp2"
    share = Share(gathers=sharded)
    kinds = kinds_of(run)
    kept = shortest(kinds)
    assert len(kept) < len(kinds)
    rehearsal = Rehearsal(run, None, "cuda", share)
    whole, facts = one_step(rehearsal.rehearse()), rehearsal.facts
    few = Rehearsal(shallow(run, kept), None, "cuda", share)
    deep = repeat(one_step(few.rehearse()), few.facts, kinds, kept)
    assert sorted(map(str, deep.facts)) == sorted(map(str, facts))
    assert [(s.unit, s.phase, s.stop - s.start) for s in deep.step.spans] == [
        (s.unit, s.phase, s.stop - s.start) for s in whole.spans
    ]
    layout = Layout(strategy="fsdp2", gpus=4) if sharded else Layout()
    for device in ("cpu", "cuda"):
        one = priced(on_rank(whole, facts, layout), device)
        two = priced(on_rank(deep.step, deep.facts, layout), device)
        assert one[0].bytes == two[0].bytes and one[1] == two[1], device
        assert one[0].by_category == two[0].by_category and one[0].phase == two[0].phase


def test_layers_are_told_apart_by_their_neighbours():
    assert len(shortest(["a"] * 30)) == 5
    assert len(shortest(["a", "b"])) == 2
    pattern = [0, *[1] * 6] + [0, *[1] * 7] * 6 + [0, *[1] * 6] * 2 + [0]
    kept = shortest(["dense", *pattern[1:]])
    assert len(kept) < 16 and kept[0] == 0 and kept[-1] == 69


def test_what_is_not_alike_is_refused():
    facts = [Fact(f"layers.{i}.w", i, 1, 4, 4, 0, False, False) for i in range(5)]
    events = [(9, 64), (0, 4), (0, -4), (1, 4), (9, -64), (1, -4), (2, 4), (2, -4)]
    spans = [Span(i, "forward", 1 + 2 * min(i, 3), 3 + 2 * min(i, 2)) for i in range(5)]
    step = Timeline(events=events, marks=[(0, "forward")], spans=spans)
    with pytest.raises(NotAlike):  # a middle layer frees what was there before: the next cannot
        repeat(step, facts, ["a"] * 9, [0, 1, 2, 3, 4])


# ---- one rank ----


def written_step():
    """Two layers of one weight of 1000 bytes, and 400 in the rest; gradients of as many bytes."""
    facts = [
        Fact("0", 0, 10, 1000, 1000, 1000, False, False),
        Fact("1", 1, 10, 1000, 1000, 1000, False, False),
        Fact("rest", 2, 4, 400, 400, 400, False, False),
    ]
    events = [(0, 1000), (1, 1000), (2, 400)]  # weights
    events += [(3, 50), (4, 50), (8, 10)]  # forward, a layer each, the head
    events += [(5, 1000), (4, -50), (6, 1000), (3, -50), (7, 400)]  # backward
    events += [(5, -1000), (6, -1000), (7, -400)]
    owners = {0: 0, 1: 1, 2: 2, 5: 1, 6: 0, 7: 2}
    labels = dict.fromkeys(range(3), "weights") | dict.fromkeys((5, 6, 7), "gradients")
    spans = [
        Span(0, "forward", 3, 4), Span(1, "forward", 4, 5), Span(1, "backward", 6, 8),
        Span(0, "backward", 8, 10),
    ]  # fmt: skip
    marks = [(0, "idle"), (3, "forward"), (6, "backward"), (11, "step"), (11, "idle")]
    return Timeline(events, marks, labels, owners=owners, spans=spans, since=3), facts


def at_phases(timeline):
    """Bytes alive when each phase begins."""
    total, out = 0, []
    for i, (_, nbytes) in enumerate([*timeline.events, (0, 0)]):
        out += [(phase, total) for at, phase in timeline.marks if at == i]
        total += nbytes
    return dict(out), total


def test_a_rank_holds_its_share_and_one_layer():
    step, facts = written_step()
    alone = on_rank(step, facts, Layout())
    assert alone.events == step.events and replay(alone).bytes == 2400 + 2400 + 10
    rank = on_rank(step, facts, Layout(strategy="fsdp2", gpus=2))
    begun, left = at_phases(rank)
    assert begun["forward"] == 1200  # half of the weights
    assert begun["backward"] == 1200 + 400 + 110  # the rest stays whole, the layers do not
    assert begun["step"] == 1200 + 1200 + 10  # and half of the gradients
    assert left == 1200 + 10
    fused = on_rank(step, facts, Layout(strategy="fsdp2", gpus=2), fused=True)
    assert at_phases(fused)[0]["step"] == 1200 + 10
    # the first layer whole, with its gradient, beside the last one's reduction in its buffer
    assert replay(rank).bytes == 1200 + 400 + 2 * 1000 + 1000 + 500 + 60
    assert replay(rank).phase == "backward"


def test_what_each_strategy_divides():
    step, facts = written_step()
    weights = {
        s: at_phases(on_rank(step, facts, Layout(strategy=s, gpus=2)))[0]["forward"]
        for s in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    }
    masters = 4 * 2400 // 2
    assert weights["ddp"] == 2400 and weights["fsdp2"] == 1200
    assert weights["zero1"] == 2400 + masters
    assert weights["zero2"] == 2400 + masters + 2400  # and a bucket of all that there is
    assert weights["zero3"] == 1200 + masters + 2400
    layout = Layout(strategy="hsdp", gpus=8, nodes=4)
    assert layout.shards == 2 and layout.share(facts[0]) == 0.5
    # rows are shared as torch.chunk does, and a gather brings the padding too
    odd = Layout(strategy="fsdp2", gpus=3)
    assert odd.share(facts[0]) == 0.4 and odd.whole(facts[0]) == 1200
    buffer = replace(facts[0], divided=False)
    assert odd.share(buffer) == 1 and odd.whole(buffer) == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"strategy": "fsdp3"}, "'fsdp3' is not one of single, ddp"),
        ({"strategy": "fsdp2", "gpus": 9, "nodes": 2}, "9 GPUs do not divide over --nodes 2"),
        ({"gpus": 4}, "4 GPUs need a --strategy"),
        ({"strategy": "expert-parallel", "gpus": 8, "experts_over": 3}, "groups of 3"),
        ({"strategy": "fsdp2", "gpus": 0}, "must be 1 or more"),
    ],
)
def test_wrong_layouts_are_named(arguments, what):
    with pytest.raises(ValueError, match=what):
        Layout(**arguments)


def test_fewest_gpus_and_experts():
    small = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 6,
             "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0]}  # fmt: skip
    several = Several(a_run("demo", "fp8-lean", small))
    alone = several.memory(Layout())
    like = Layout(strategy="fsdp2")
    assert several.smallest(like, alone.peak_gib).gpus == 1
    two = several.memory(several.sized(like, 2))
    sharded = several.memory(several.sized(like, 8))
    assert alone.by_category["moments"] / sharded.by_category["moments"] > 4
    found = several.smallest(like, (sharded.peak_bytes + 1) / 2**30)
    assert found.gpus <= 8 and several.memory(found).fits((sharded.peak_bytes + 1) / 2**30)
    assert several.smallest(like, 1e-4) is None
    assert several.smallest(Layout(strategy="ddp"), two.peak_gib / 2) is None
    assert several.experts == 8
    parallel = several.sized(Layout(strategy="expert-parallel"), 12)
    assert (
        parallel.experts_over == 4
        and several.memory(parallel).num_parameters == alone.num_parameters
    )
    with pytest.raises(ValueError, match="has no experts"):
        Several(a_run("dense-w1", "bf16", DENSE)).sized(Layout(strategy="expert-parallel"), 8)


def test_frozen_codes_take_a_byte():
    big = {**DENSE, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4}
    run = a_run("dense-w1", "fp8-lean", big)
    run = replace(run, lora=replace(run.lora, rank=4))
    report = estimate_memory(run, device="cpu")
    trained = estimate_memory(a_run("dense-w1", "fp8-lean", big), device="cpu")
    in_bf16 = 2 * 512 * 512  # embedding and head
    rest = trained.num_parameters - in_bf16
    assert report.by_category["weights"] == pytest.approx(rest + 2 * in_bf16, rel=0.05)
    assert report.by_category["moments"] < 0.2 * trained.by_category["moments"]
    assert report.by_category["master"] == 0


# ---- what fits ----


def test_longest_and_largest_are_the_last_that_fit():
    run = a_run("dense-w1", "fp8-lean", DENSE, recompute="layer")
    room = estimate_memory(replace(run, data=replace(run.data, sequence_length=1536))).peak_gib
    found = longest(run, room)
    assert found.batch == (1, 1536) and found.fits(room)
    one = estimate_memory(replace(run, train=replace(run.train, micro_batch=5))).peak_gib
    assert largest_batch(run, one).batch == (5, 64)
    assert longest(run, 1e-3) is None


# ---- time ----


def test_work_is_counted_by_format():
    run = a_run("dense-w1", "fp8-lean", DENSE, batch=(2, 64))
    r = rehearsed(run, None, "cuda", Share())
    total = Work()
    for work in (*r.works, *r.outside.values()):
        total.add(work)
    tokens, layers = 128, 6
    linear = layers * (4 * 256 * 256 + 3 * 256 * 512)
    assert total.amounts["fp8"] == 6 * tokens * linear
    assert total.amounts["bf16"] == pytest.approx(6 * tokens * 256 * 512, rel=1e-6)
    pairs = 2 * 2 * 64 * 65 / 2  # sequences, heads, pairs of tokens
    assert total.amounts["attention"] == 3.5 * layers * 2 * pairs * (128 + 128)
    counter = Counter()
    whole = Rehearsal(run, None, "cuda").rehearse(counter)
    all_of_it = Work()
    for span, work in zip(whole.spans, counter.by_span(whole)[0], strict=True):
        if span.start >= whole.since:
            all_of_it.add(work)
    for work in counter.by_span(whole)[1].values():
        all_of_it.add(work)
    for kind, amount in all_of_it.amounts.items():
        assert total.amounts[kind] == pytest.approx(amount, rel=0.01), kind


def test_links_and_overlap():
    gb = 1e9
    assert LINKS.ring(45 * gb, 1, 1) == 0
    assert LINKS.ring(450 * gb, 8, 1) == pytest.approx(7 / 8)
    # eight links leave each of two nodes: half of the bytes over 8 x 50 GB/s
    assert LINKS.ring(450 * gb, 16, 2) == pytest.approx(max(15 / 16, 450 / 2 / 400))
    assert LINKS.exchange(50 * gb, 16, 2) == pytest.approx(8 / 16)
    assert LINKS.ring(50 * gb, 2, 2) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="is not intra,inter"):
        Links.of("450", H200)
    queue = _Queue()
    queue.fetch(1.0)
    queue.begin()
    assert queue.now == 1.0
    queue.fetch(2.0)  # beside 3 seconds of work
    queue.now += 3.0
    queue.begin()
    assert queue.now == 4.0
    queue.send(5.0)
    queue.drain()
    assert queue.now == 9.0


def test_what_is_sent_follows_from_the_strategy():
    several = Several(a_run("dense-w1", "fp8-lean", DENSE))
    weights = {}
    for strategy in ("fsdp2", "zero3", "ddp", "zero2"):
        time = several.plan(Layout(strategy=strategy, gpus=2), H200, LINKS).time
        weights[strategy] = time.sent.nbytes
        assert time.compute <= time.seconds <= time.apart + 1e-12
    layers = 6 * (4 * 256 * 256 + 3 * 256 * 512)
    ends = 2 * 512 * 256 * 2  # embedding and head in BF16, once
    assert weights["fsdp2"]["weight all-gather"] == pytest.approx(layers + ends / 2, rel=0.02)
    assert weights["zero3"]["weight all-gather"] == pytest.approx(2 * layers + ends / 2, rel=0.02)
    gradients = 2 * layers + ends
    assert weights["fsdp2"]["gradient reduce-scatter"] == pytest.approx(gradients / 2, rel=0.02)
    assert weights["ddp"]["gradient all-reduce"] == pytest.approx(gradients, rel=0.02)
    assert weights["zero2"]["weight all-gather"] == pytest.approx(gradients / 2, rel=0.02)


def test_cards():
    assert card_of("H200").measured and not card_of("h100").measured
    assert card_of("24").room_gib == pytest.approx(24) and card_of("a100").fp8 == 0
    with pytest.raises(ValueError, match="'b300' is neither one of h200"):
        card_of("b300")
    work = Work()
    work.amounts["fp8"] = 1e15
    assert work.seconds(card_of("a100")) == pytest.approx(1e15 / card_of("a100").bf16)


# ---- the contest's and the command line's use ----


def test_a_variant_is_planned_with_its_own_recipe():
    workload = Workload("T", "dense-100m", 1, 256, "")
    plain = planned_for(VARIANTS["fp8-lean"], workload)
    delayed = planned_for(VARIANTS["fp8-lean, delayed"], workload)
    assert delayed.peak_bytes != plain.peak_bytes
    run = workload.run("fp8-lean", steps=1, recipe="delayed")
    assert delayed.peak_bytes == estimate_memory(run).peak_bytes


SMALL = ["plan", "--model", "dense-w1", *(f"model.overrides.{k}={v}" for k, v in DENSE.items()),
         "data.sequence_length=64", "train.micro_batch=1", "--preset", "fp8-lean"]  # fmt: skip


def test_plan_for_several_gpus(capsys):
    import json

    assert main([*SMALL, "--strategy", "fsdp2", "--gpus", "4", "--card", "24", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"]["gpus"] == 4 and plan["fits"] and plan["fewest_gpus"] == 1
    assert plan["predicted"]["sent_bytes"]["weight all-gather"] > 0
    assert sum(plan["memory"]["by_category"].values()) == plan["memory"]["peak_bytes"]
    assert main([*SMALL, "--strategy", "hsdp", "--gpus", "4", "--nodes", "2", "--card", "24"]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED" in text and "gradient all-reduce" in text and "on paper" in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--strategy", "fsdp3"], "'fsdp3' is not one of"),
        (["--strategy", "fsdp2", "--gpus", "9", "--nodes", "2"], "do not divide"),
        (["--strategy", "fsdp2", "--link", "fast"], "is not intra,inter"),
        (["--longest"], "say what to fit into"),
        (["--card", "24", "--gib", "3"], "give one of them"),
        (["--strategy", "expert-parallel", "--gpus", "2"], "has no experts"),
    ],
)
def test_wrong_requests_are_one_line_and_exit_2(capsys, arguments, what):
    assert main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


def test_a_report_shows_in_a_notebook():
    report = estimate_memory(a_run("dense-w1", "fp8-lean", DENSE, optimizer=Optimizer()))
    html = report._repr_html_()
    assert "kept" not in html and html.count("<tr>") == 6 and "GiB" in html
