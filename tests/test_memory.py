"""The tracker, the allocator's model, and the planner: exact on what is known, then against a run."""

import pytest
import torch
from tiny_run import tiny_run
from torch import nn

from ottava.layers.delayed import clock
from ottava.models.load import load_model
from ottava.models.presets import preset_config
from ottava.monitor.metrics import read_metrics
from ottava.optim.adamw import AdamW
from ottava.planner.allocator import (
    AllocatorRecorder,
    CachingAllocator,
    TraceError,
    block_sizes,
    round_size,
)
from ottava.planner.lifetimes import CATEGORIES, MemoryTracker, Timeline, follow, replay
from ottava.planner.memory import estimate_memory, measure_memory, parameters_per_rank
from ottava.train.trainer import Trainer

MIB = 1 << 20
SMALL = {"num_hidden_layers": 2, "vocab_size": 320}


# ---- lifetimes ----


def test_replay_of_a_written_timeline():
    timeline = Timeline(
        events=[(0, 100), (1, 50), (2, 30), (2, -30), (3, 20), (1, -50), (4, 500), (4, -500)],
        marks=[(1, "forward"), (4, "backward"), (8, "idle")],
        labels={0: "weights"},
    )
    peak = replay(timeline)
    assert (peak.bytes, peak.event, peak.phase) == (620, 6, "backward")
    assert peak.by_category == {
        **dict.fromkeys(CATEGORIES, 0), "weights": 100, "temporary": 520
    }  # fmt: skip
    timeline.events = timeline.events[:6]
    timeline.marks[-1] = (6, "idle")
    peak = replay(timeline)  # storage 1 was born in forward and alive at its end: kept
    assert peak.bytes == 180 and peak.by_category["activations"] == 50
    assert peak.by_category["temporary"] == 30
    timeline.since = 5
    assert replay(timeline).bytes == 170


def test_tracker_is_exact_on_a_known_sequence():
    weight = torch.zeros(100)
    with MemoryTracker() as tracker:
        tracker.register("weights", [weight])
        tracker.mark("forward")
        a = weight * 2
        b = (a + 1).view(10, 10)[2:]
        b.mul_(3)  # in place: nothing new
        del a
        tracker.mark("backward")
        c = b.double()
        del c
        tracker.mark("idle")
    peak = replay(tracker.timeline)
    assert peak.bytes == 400 + 400 + 640 and peak.phase == "backward"
    assert peak.by_category["activations"] == 400 and peak.by_category["temporary"] == 640
    before = len(tracker.timeline.events)
    del b
    assert len(tracker.timeline.events) == before  # a finished timeline stays as it is


def test_tracker_sees_resizes_and_ignores_empty_tensors():
    with MemoryTracker() as tracker:
        a = torch.zeros(10)
        torch.zeros(0).sum()
        a.resize_(1000)
        del a
    assert replay(tracker.timeline).bytes == 4000
    assert sum(nbytes for _, nbytes in tracker.timeline.events) == 0


def test_tracker_names_an_unknown_phase():
    with MemoryTracker() as tracker, pytest.raises(ValueError, match="'fwd' is not one of"):
        tracker.mark("fwd")


def test_follow_marks_a_step_from_outside_and_labels_gradients():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    optimizer = AdamW(model.parameters())
    backward = torch.Tensor.backward
    with MemoryTracker() as tracker, follow(tracker, model, optimizer):
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.Tensor.backward is backward
    phases = [name for _, name in tracker.timeline.marks]
    assert phases == ["forward", "backward", "step", "idle"] * 2
    peak = replay(tracker.timeline)
    assert peak.by_category["weights"] == peak.by_category["gradients"] == 512
    assert peak.by_category["moments"] == 1024


def test_peak_names_what_took_most():
    with MemoryTracker() as tracker:
        kept = torch.ones(1000).double()
        peak = replay(tracker.timeline)
    assert peak.largest[0] == ("temporary", "aten::_to_copy", 1, 8000)
    del kept


# ---- the allocator ----


def test_sizes_round_to_512():
    assert [round_size(n) for n in (1, 512, 513, MIB)] == [512, 512, 1024, MIB]


def test_allocator_splits_small_blocks_and_keeps_small_rests_of_large_ones():
    allocator = CachingAllocator()
    a = allocator.alloc(1000)
    assert (allocator.allocated, allocator.reserved) == (1024, 2 * MIB)
    b = allocator.alloc(30 * MIB)  # a segment of its own, nothing left over
    allocator.free(b)
    c = allocator.alloc(29 * MIB + 1)  # the rest is under 1 MiB: handed out whole
    assert c == b and allocator.used[c] == 30 * MIB
    allocator.free(c)
    d = allocator.alloc(20 * MIB)  # the rest is large: split, and used again
    assert allocator.alloc(10 * MIB) == d + 20 * MIB
    assert allocator.reserved == 32 * MIB
    allocator.free(a)
    assert allocator.allocated == 30 * MIB


def test_freed_neighbours_merge():
    allocator = CachingAllocator()
    addresses = [allocator.alloc(4 * MIB) for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    for i in (1, 3, 2):
        allocator.free(addresses[i])
    assert allocator.alloc(12 * MIB) == addresses[1] and allocator.reserved == 20 * MIB


def test_block_sizes_of_a_timeline():
    timeline = Timeline(events=[(0, 1), (1, 3 * MIB), (0, -1), (1, -3 * MIB)])
    sizes, reserved = block_sizes(timeline)
    assert sizes == {0: 512, 1: 3 * MIB} and reserved == 22 * MIB
    assert replay(timeline, sizes).bytes == 512 + 3 * MIB


def entry(action, addr, size):
    return {"action": action, "addr": addr, "size": size}


def test_a_cuda_trace_is_replayed_by_address():
    recorder = AllocatorRecorder.__new__(AllocatorRecorder)
    base, big = 0x1000000, 0x8000000
    recorder.device, recorder._since = 0, 3
    recorder._before = {
        "segments": [
            {
                "device": 0, "address": base, "total_size": 2 * MIB, "segment_type": "small",
                "blocks": [
                    {"address": base, "size": 1024, "state": "active_allocated"},
                    {"address": base + 1024, "size": 2 * MIB - 1024, "state": "inactive"},
                ],
            }
        ],
        "device_traces": [[entry("snapshot", 0, 0)]],
    }  # fmt: skip
    trace = [
        entry("snapshot", 0, 0),
        entry("alloc", base + 1024, 700),  # forward: kept
        entry("segment_alloc", big, 30 * MIB),
        entry("alloc", big, 29 * MIB + 5),  # backward: takes the segment whole
        entry("free_requested", big, 29 * MIB + 5),
        entry("free_completed", big, 29 * MIB + 5),
        entry("free_requested", base + 1024, 700),
        entry("free_completed", base + 1024, 700),
    ]
    recorder._marks = [(1, "forward"), (2, "backward"), (8, "idle")]
    recorder._known = [(1, {base: "weights"})]
    timeline = recorder._build(trace)
    peak = replay(timeline)
    assert peak.bytes == 1024 + 1024 + 30 * MIB and peak.phase == "backward"
    assert peak.by_category["weights"] == peak.by_category["activations"] == 1024
    assert timeline.since == 2


def test_expandable_segments_are_refused():
    recorder = AllocatorRecorder.__new__(AllocatorRecorder)
    recorder.device, recorder._since, recorder._marks, recorder._known = 0, 0, [], []
    recorder._before = {"segments": [], "device_traces": [[]]}
    with pytest.raises(RuntimeError, match="expandable"):
        recorder._build([entry("segment_map", 0, 2 * MIB)])
    with pytest.raises(TraceError, match="block 0x40 was not known"):
        recorder._build([entry("alloc", 64, 512)])


# ---- the planner ----


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("preset", ["fp32", "amp", "bf16", "fp8", "fp8-lean", "storage"])
def test_planned_is_measured(preset, recompute, tmp_path):
    run = tiny_run(tmp_path, preset, train={"recompute": recompute}, data={"document_mask": False})
    trainer = Trainer(run)
    measured = measure_memory(trainer.step_once, trainer.model, trainer.optimizer)
    planned = estimate_memory(run, device="cpu")
    assert measured.source == "tensors"
    assert planned.peak_bytes == pytest.approx(measured.peak.bytes, rel=0.01)
    for category in ("weights", "master", "gradients", "moments"):
        assert planned.by_category[category] == measured.peak.by_category[category], category
    assert sum(planned.by_category.values()) == planned.peak_bytes


def test_planned_is_measured_with_everything_on(tmp_path):
    run = tiny_run(
        tmp_path, "fp8", ema={"decay": 0.9}, optimizer={"clip_norm": 1.0},
        train={"accumulate": 2, "recompute": "mlp"},
    )  # fmt: skip
    trainer = Trainer(run)
    measured = measure_memory(trainer.step_once, trainer.model, trainer.optimizer, trainer.ema)
    planned = estimate_memory(run, device="cpu")
    assert planned.peak_bytes == pytest.approx(measured.peak.bytes, rel=0.01)
    assert planned.by_category["moments"] == measured.peak.by_category["moments"]


@pytest.mark.parametrize("preset", ["fp32", "amp", "fp8", "fp8-lean", "storage"])
def test_what_a_run_says_it_holds_is_what_was_planned(preset, tmp_path):
    run = tiny_run(tmp_path, preset, steps=2, ema={"decay": 0.9}, train={"eval_every": 0})
    Trainer(run).run(quiet=True)
    held = dict(read_metrics(run.out).of("memory")[0]["gib"])
    assert held.pop("peak") > sum(held.values())
    planned = estimate_memory(run, device="cpu").by_category
    states = {c: planned[c] for c in ("weights", "master", "moments") if planned[c]}
    assert {name: gib * 2**30 for name, gib in held.items()} == states


def test_planning_leaves_no_trace():
    event, before = torch.cuda.Event, (clock.seed, clock.step)
    model = load_model("demo", overrides=SMALL)
    values = {k: v.clone() for k, v in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    random = torch.get_rng_state()
    estimate_memory(model, "fp8-lean", (1, 16), device="cuda")
    assert torch.cuda.Event is event and (clock.seed, clock.step) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())


def dense(**overrides):
    keys = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512,
            "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    return preset_config("dense-w1", keys | overrides)


def test_bytes_per_parameter_are_those_of_the_choices():
    """BF16 weights, FP32 master, gradients and moments: 2 + 4 + 4 + 8; BF16 gradients: 2 less."""
    from dataclasses import replace

    from ottava.config import Data, Model, Optimizer, Run, Train

    model = load_model("demo", overrides=SMALL, device="meta")
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    run = Run(
        model=Model(name="demo"), data=Data(sequence_length=8, document_mask=False),
        train=Train(preset="bf16", micro_batch=1),
        optimizer=Optimizer(master="fp32", states="fp32", grads="fp32"),
    )  # fmt: skip

    def per_parameter(run):
        report = estimate_memory(model, run=run, device="cpu")
        return {k: v / matrices for k, v in report.by_category.items()}

    split = per_parameter(run)
    assert split["weights"] == pytest.approx(2, rel=0.02)
    assert split["master"] == pytest.approx(4, rel=0.02)
    assert split["gradients"] == pytest.approx(4, rel=0.02)
    assert split["moments"] == pytest.approx(8, rel=0.02)
    half = per_parameter(replace(run, optimizer=replace(run.optimizer, grads="bf16")))
    assert half["gradients"] == pytest.approx(2, rel=0.02)
    eight = per_parameter(replace(run, optimizer=replace(run.optimizer, states="8bit")))
    assert eight["moments"] < 2.2  # small tensors keep FP32 moments


def test_tied_weights_count_once_and_frozen_ones_have_no_state():
    own = estimate_memory(dense(), "bf16", (1, 16), device="cpu")
    tied = estimate_memory(dense(tie_word_embeddings=True), "bf16", (1, 16), device="cpu")
    assert own.num_parameters - tied.num_parameters == 512 * 256
    assert own.by_category["weights"] - tied.by_category["weights"] == 2 * 512 * 256
    model = load_model("demo", overrides=SMALL, device="meta")
    free = estimate_memory(model, "bf16", (1, 16), device="cpu")
    frozen = model.model.layers[1].mlp.experts.down_proj
    frozen.requires_grad_(False)
    held = estimate_memory(model, "bf16", (1, 16), device="cpu")
    assert free.by_category["weights"] == held.by_category["weights"]
    assert free.by_category["moments"] - held.by_category["moments"] == 4 * frozen.numel()


def test_expert_parallel_spreads_experts_only():
    model = load_model("demo", device="meta")
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert parameters_per_rank(model) == total
    assert parameters_per_rank(model, 8) == total - experts + experts // 8
    with pytest.raises(ValueError, match="8 experts do not divide over 3"):
        parameters_per_rank(model, 3)


def test_less_memory_comes_out_of_the_presets_and_advice_fits():
    config = dense()
    reports = {p: estimate_memory(config, p, (8, 128)) for p in ("fp32", "amp", "fp8", "fp8-lean")}
    peaks = [reports[p].peak_bytes for p in ("fp8-lean", "fp8", "amp", "fp32")]
    assert peaks == sorted(peaks)
    amp = reports["amp"]
    room = (amp.peak_bytes + reports["fp8-lean"].peak_bytes) / 2 / 2**30
    assert not amp.fits(room) and amp.fits(amp.peak_gib)
    advice = amp.advice(room)
    assert advice and all(other.fits(room) for other in advice)
    assert amp.advice(amp.peak_gib) == []
    text = str(amp)
    assert "kept activations" in text and "allocator blocks on cuda" in text
    assert set(amp.to_dict()["by_category"]) == set(CATEGORIES)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"model": "demo", "device": "tpu"}, "'tpu' is not one of cuda, cpu"),
        ({"model": "dem0"}, "unknown name 'dem0'.*did you mean 'demo'"),
        ({"model": "demo", "preset": "fp9"}, "unknown 'fp9'"),
        ({"model": "demo", "recompute": "all"}, "recompute"),
    ],
)
def test_a_wrong_request_is_named(arguments, what):
    with pytest.raises(ValueError, match=what):
        estimate_memory(**arguments)
