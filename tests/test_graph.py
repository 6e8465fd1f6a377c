"""Captured steps against launched ones, bit for bit, with a tape in place of CUDA graphs."""

import math
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from tape import TapeLane
from test_trainer import assert_same, everything, poison_gradient
from tiny_run import tiny_run
from torch import nn

from ottava.config import ConfigError, Model
from ottava.layers.delayed import clock as rounding
from ottava.optim.adamw import AdamW
from ottava.optim.fused_backward import fuse_backward
from ottava.train import captured
from ottava.train.captured import CapturedTraining, why_not_captured
from ottava.train.graph import WARMUP, Buffers, CapturedStep, CaptureError, Lane
from ottava.train.trainer import Trainer

DENSE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 64, "vocab_size": 272,
}  # fmt: skip


def dense_run(folder, preset="fp32", *, steps=20, **sections):
    model = Model(name="dense-w1", overrides=DENSE)
    return tiny_run(folder, preset, steps=steps, model=model, **sections)


def on_tape(run):
    """A trainer whose steps are captured, and its lane."""
    trainer = Trainer(run)
    lane = TapeLane()
    trainer.captured = CapturedTraining(trainer, lane)
    return trainer, lane


def both(folder, preset="fp32", **sections):
    """(launched, captured, lane): two trainers of the same run."""
    run = dense_run(folder, preset, **sections)
    launched = Trainer(run)
    state = rounding.step
    trainer, lane = on_tape(run)
    assert state == rounding.step == 0
    return launched, trainer, lane


Taken = namedtuple("Taken", "step loss grad_norm tokens lr stepped cause")


def take(trainer, count):
    """What `count` steps gave, apart from times. The rounding clock is each trainer's own."""
    rounding.step = getattr(trainer, "rounds", 0)
    out = [trainer.step_once() for _ in range(count)]
    trainer.rounds = rounding.step
    return [Taken(*(getattr(r, name) for name in Taken._fields)) for r in out]


RUNS = {
    "fp32": ("fp32", {}),
    "amp": ("amp", {"ema": {"decay": 0.9}}),
    "bf16": ("bf16", {}),
    "fp8": ("fp8", {}),
    "fp8-clipped": ("fp8", {"optimizer": {"clip_norm": 0.5}}),
    "delayed": ("fp8", {"precision": {"recipe": "delayed"}}),
    "delayed-lean-layer": (
        "fp8-lean",
        {"precision": {"recipe": "delayed"}, "train": {"recompute": "layer"}},
    ),
    "block": ("fp8", {"precision": {"recipe": "block"}}),
    "lean": ("fp8-lean", {}),
    "lean-layer": ("fp8-lean", {"train": {"recompute": "layer"}}),
    "lean-mlp": ("fp8-lean", {"train": {"recompute": "mlp"}}),
    "lean-clipped": ("fp8-lean", {"optimizer": {"clip_norm": 0.5}}),
    "accumulate": ("fp8", {"train": {"accumulate": 3}}),
    "storage": ("storage", {}),
}


@pytest.mark.parametrize("case", RUNS)
def test_replays_are_launched_steps(tmp_path, case):
    preset, sections = RUNS[case]
    launched, trainer, lane = both(tmp_path, preset, **sections)
    steps = 3 + captured.WARMUP
    assert take(trainer, steps) == take(launched, steps)
    assert lane.captures == 1 and next(iter(trainer.captured.kinds.values())).graph.captured
    left, right = everything(launched, "random"), everything(trainer, "random")
    assert_same(left, right)
    assert launched.rounds == trainer.rounds == steps
    a, b = launched.optimizer.state_dict(), trainer.optimizer.state_dict()
    assert [s["step"] for s in a["state"].values()] == [s["step"] for s in b["state"].values()]
    assert launched.evaluate() == trainer.evaluate()
    assert take(trainer, 1) == take(launched, 1)


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean"])
def test_launched_captured_and_located_steps_are_one_function(tmp_path, monkeypatch, preset):
    """So that none of them can drift from the others."""
    calls, accumulate = [], Trainer.accumulate
    monkeypatch.setattr(Trainer, "accumulate", lambda *a: calls.append(a[0]) or accumulate(*a))
    launched, trainer, lane = both(tmp_path, preset)
    take(launched, 1)
    assert len(calls) == 1
    take(trainer, 1 + captured.WARMUP + 3)  # Python, a graph being made, its tape
    assert lane.captures == 1 and calls.count(trainer) == 1 + captured.WARMUP + 1
    bad = poison_gradient(launched, "model.layers.1.self_attn.o_proj.weight")
    take(launched, 1)
    bad.remove()
    assert calls.count(launched) == 3  # once to take the step, once to see where it broke


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean"])
def test_an_exploding_loss_is_held_back_inside_a_graph(tmp_path, preset):
    launched, trainer, lane = both(tmp_path, preset, heal={"loss_rise": 2.0})
    taken = 1 + captured.WARMUP + 2
    assert take(launched, taken) == take(trainer, taken) and lane.captures == 1
    before = everything(trainer, "random")["weights"]
    for t in (launched, trainer):
        t.health.losses.extend([-100.0] * t.health.losses.maxlen)  # any loss is now far above
    left, right = take(launched, 1), take(trainer, 1)
    assert left == right and not right[0].stepped and "is usual" in right[0].cause
    assert_same(before, everything(trainer, "random")["weights"])


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean"])
def test_a_bad_batch_is_skipped_as_without_a_graph(tmp_path, preset):
    """The loss of one batch is not finite: a weight that only some tokens read is infinite."""
    launched, trainer, lane = both(tmp_path, preset, optimizer={"weight_decay": 0.0})
    take(launched, 4), take(trainer, 4)
    results = []
    for t in (launched, trainer):
        loader, plain = t.data.train, t.data.train.batch_at
        embedding = t.model.model.embed_tokens.weight
        kept = embedding.detach()[271].clone()
        with torch.no_grad():
            embedding.data[271] = math.inf

        def batch_at(position, size=None, loader=loader, plain=plain):
            batch = plain(position, size)
            if position == 5 * loader.batch:
                batch["input_ids"][0, 3] = 271
            return batch

        loader.batch_at = batch_at
        results.append(take(t, 4))
        with torch.no_grad():
            embedding.data[271] = kept
    assert [r.stepped for r in results[0]] == [True, False, True, True]
    for a, b in zip(*results, strict=True):
        assert (a.stepped, a.cause, a.lr) == (b.stepped, b.cause, b.lr)
        assert a.loss == b.loss or (math.isnan(a.loss) and math.isnan(b.loss))
    assert_same(everything(launched, "random"), everything(trainer, "random"))
    assert launched.rounds == trainer.rounds == 7 and trainer.skipped == 1
    # where the optimizer is not inside backward, Python took the bad step again
    assert lane.captures == (1 if preset == "fp8-lean" else 2)


def test_who_listens_gets_launched_steps(tmp_path):
    launched, trainer, lane = both(tmp_path)
    assert take(trainer, 5) == take(launched, 5)
    seen = []
    handle = trainer.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    assert take(trainer, 2) == take(launched, 2)
    assert len(seen) == 2
    handle.remove()
    assert take(trainer, 2) == take(launched, 2)
    assert len(seen) == 2 and lane.captures == 2 and lane.renewed
    bad = poison_gradient(trainer, "lm_head.weight")
    assert not take(trainer, 1)[0].stepped
    bad.remove()


def test_kinds_of_windows_have_their_own_graphs(tmp_path):
    sections = {"precision": {"start_fp8_at": 0.5}}
    launched, trainer, lane = both(tmp_path, "fp8", steps=10, **sections)
    assert take(trainer, 10) == take(launched, 10)
    assert lane.captures == 2 and len(trainer.captured.kinds) == 1
    launched, trainer, lane = both(tmp_path)
    for t in (launched, trainer):
        plain = t.data.train.batch_at

        def some_with_two_documents(position, size=None, plain=plain):
            batch = plain(position, size)
            if position % 4:
                batch["document_ids"][:, 3 + position % 9 :] = 1
            batch["num_valid"] -= position % 5
            return batch

        t.data.train.batch_at = some_with_two_documents
    assert take(trainer, 13) == take(launched, 13)
    assert lane.captures == 2 and len(trainer.captured.kinds) == 2


def test_weights_that_moved_are_captured_again(tmp_path):
    launched, trainer, lane = both(tmp_path, "fp8")
    take(launched, 5), take(trainer, 5)
    for t in (launched, trainer):
        t.optimizer.load_state_dict(t.optimizer.state_dict())
        t.optimizer.param_groups[0]["weight_decay"] = 0.3
    assert take(trainer, 4) == take(launched, 4)
    assert lane.captures == 2
    assert_same(everything(launched, "random"), everything(trainer, "random"))


def test_a_capture_that_fails_is_announced_and_changes_nothing(tmp_path):
    for preset in ("fp8", "fp8-lean"):
        launched, trainer, lane = both(tmp_path, preset)
        lane.fail = True
        assert take(trainer, 6) == take(launched, 6)
        assert trainer.graph_note == (
            "no CUDA graphs: the step cannot be captured: RuntimeError: operation not permitted "
            "when stream is capturing"
        )
        assert_same(everything(launched, "random"), everything(trainer, "random"))
    run = dense_run(tmp_path)
    trainer, lane = on_tape(run)
    trainer.config = replace(run, train=replace(run.train, graph="on"))
    lane.fail = True
    with pytest.raises(CaptureError, match=r"use train\.graph=auto or off"):
        take(trainer, 6)


def test_looking_at_a_value_is_an_error_while_capturing():
    with pytest.raises(RuntimeError, match="capturing"):
        TapeLane().capture(lambda: torch.ones(1) * float(torch.ones(1)))
    with pytest.raises(RuntimeError, match="capturing"):
        TapeLane().capture(lambda: torch.tensor(3))


# ---- what cannot be captured ----


def reasons(tmp_path, monkeypatch, preset="fp32", run=dense_run, **sections):
    """A trainer, and what would be said of it on a GPU."""
    made = run(tmp_path, preset, **sections)
    trainer = Trainer(made)

    def why():
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(captured, "_places_of", lambda model: {torch.device("cuda", 0)})
            return why_not_captured(made, trainer.model)

    return trainer, why


def test_reasons(tmp_path, monkeypatch):
    t = Trainer(dense_run(tmp_path))
    assert t.captured is None and t.graph_note == "no CUDA graphs: the model is on the CPU"
    trainer, why = reasons(tmp_path, monkeypatch)
    assert why() is None
    handle = trainer.model.model.norm.register_forward_hook(lambda *_: None)
    assert why() == "model.norm has a hook, which a replay would not call"
    handle.remove()
    handle = poison_gradient(trainer, "lm_head.weight")
    assert why() == "lm_head.weight has a gradient hook, which a replay would not call"
    handle.remove()
    for preset, sections, reason in (
        ("amp-fp16", {}, "the loss scale of train.preset=amp-fp16 changes on the host"),
        ("fp32", {"train": {"accumulate": 9}}, "train.accumulate=9 is more than 8 forwards"),
        ("fp8-lean", {"train": {"recompute": "layer"}}, None),
    ):
        assert reasons(tmp_path, monkeypatch, preset, **sections)[1]() == reason
    _, why = reasons(tmp_path, monkeypatch, run=tiny_run)
    assert why() == "how many tokens each expert gets is read on the host"
    trainer, why = reasons(tmp_path, monkeypatch, "fp8")
    linear = trainer.model.model.layers[0].self_attn.q_proj
    cast = replace(linear.recipe.grad_output, rounding="stochastic")
    linear.recipe = replace(linear.recipe, grad_output=cast)
    assert why() == (
        "model.layers.0.self_attn.q_proj rounds its operands with random keys from the host"
    )


def test_train_graph_on_off_auto(tmp_path):
    off = Trainer(dense_run(tmp_path, train={"graph": "off"}))
    assert off.captured is None and off.graph_note == "no CUDA graphs: train.graph=off"
    with pytest.raises(ConfigError, match=r"the model is on the CPU; use train\.graph=auto"):
        Trainer(dense_run(tmp_path, train={"graph": "on"}))
    with pytest.raises(ConfigError, match=r"train\.graph: 'yes' is not one of auto, on, off"):
        dense_run(tmp_path, train={"graph": "yes"})
    with pytest.raises(ValueError, match="need a GPU; the model is on cpu"):
        Lane("cpu")


# ---- a step for one's own loop ----


@pytest.mark.parametrize(
    "fused,clip", [(False, None), (True, None), (True, "previous"), (True, "tensor")]
)
def test_captured_step_of_ones_own_loop(fused, clip):
    batches = [
        {"ids": torch.randint(0, 32, (2, 8)), "labels": torch.randint(0, 32, (2, 8))}
        for _ in range(WARMUP + 4)
    ]
    results = []
    for lane in (None, TapeLane()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
        optimizer = AdamW(model.parameters(), lr=1e-2, master="fp32", states="8bit", seed=4)
        if fused:
            fuse_backward(model, optimizer, clip=clip, max_norm=0.5)

        def forward(batch, model=model):
            logits = model(batch["ids"]).flatten(0, 1)
            return nn.functional.cross_entropy(logits, batch["labels"].flatten())

        step = CapturedStep(forward, optimizer, batches[0], lane=lane) if lane else None
        losses = []
        for batch in batches:
            optimizer.param_groups[0]["lr"] *= 0.9
            if step:
                losses.append(step(batch))
                continue
            loss = forward(batch)
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((torch.stack(losses), [p.detach() for p in model.parameters()]))
    assert lane.captures == 1
    (a, v), (b, w) = results
    assert torch.equal(a, b) and all(map(torch.equal, v, w))
    with pytest.raises(ValueError, match=r"ids was torch.int64 \(2, 8\) and is"):
        step({"ids": torch.zeros(3, 8, dtype=torch.int64), "labels": batches[0]["labels"]})


def test_buffers_are_new_objects_over_the_same_memory():
    buffers = Buffers({"x": torch.zeros(2, 3).t()}, "cpu")
    a, b = buffers.views()["x"], buffers.views()["x"]
    a._rides = 1
    buffers.fill({"x": torch.ones(3, 2), "more": torch.zeros(1)})
    assert a is not b and torch.equal(a, torch.ones(3, 2)) and a.data_ptr() == b.data_ptr()
    assert not hasattr(b, "_rides") and a.is_contiguous()


def test_a_first_gradient_during_capture_is_refused():
    used, late = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = AdamW([used, late], lr=1e-2)
    lane, calls = TapeLane(), []

    def forward(batch):
        calls.append(1)
        out = (used * batch["x"]).sum()
        return out + (late * batch["x"]).sum() if len(calls) > WARMUP else out

    batch = {"x": torch.ones(4)}
    step = CapturedStep(forward, optimizer, batch, lane=lane)
    for _ in range(WARMUP):
        step(batch)
    with pytest.raises(CaptureError, match="never had a gradient"):
        step(batch)
