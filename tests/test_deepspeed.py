"""DeepSpeed: its JSON understood (always), and ZeRO itself (where deepspeed is installed)."""

import importlib.util
import json
import math
import os

import pytest
from kept_codes import kept_after_forward, shapes_of
from ranks import run_ranks
from test_distributed import steps
from tiny_run import tiny_run

from ottava.config import ConfigError
from ottava.distributed.ds_config import KNOWN, REFUSED, apply, read
from ottava.train.trainer import Trainer

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
# The founding article's own file, its comments included.
ARTICLE = """{
  "train_batch_size": 32,
  "fp16": { "enabled": false },
  "bf16": { "enabled": false },
  "fp8": { "enabled": true, "backend": "transformer_engine" },
  "zero_optimization": {
    "stage": 2, // 或 3 用于更大模型
    "offload_optimizer": {
      "device": "cpu" // 可选的CPU卸载\uff0c进一步省显存
    }
  },
  "gradient_accumulation_steps": 4
}
"""


def written(folder, text):
    path = folder / "ds_config.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return path


def ds_run(folder, preset="fp8", content=None, **sections):
    path = written(folder, content if content is not None else {"zero_optimization": {"stage": 2}})
    distributed = {"strategy": "deepspeed", "deepspeed": str(path)}
    return tiny_run(folder, preset, distributed=distributed, **sections)


def test_the_articles_file_is_applied_as_written(tmp_path):
    applied = apply(read(written(tmp_path, ARTICLE)), ds_run(tmp_path), 4)
    assert "fp8" not in applied.engine and "fp16" not in applied.engine
    assert applied.engine == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    run = applied.run
    assert (run.train.micro_batch, run.train.accumulate) == (2, 4)
    assert run.settings.compute == "fp8" and run.settings.grad_dtype == "fp32"
    assert applied.stage == 2 and len(applied.notes) == 2
    assert "fp8 applied" in applied.notes[0] and "FP8 runs natively" in applied.notes[0]
    assert "32 sequences a step" in applied.notes[1]


def test_comments_are_left_out_and_strings_are_not(tmp_path):
    text = '{"tensorboard": {"path": "http://x/*y*/"}, /* two\nlines */ "dump_state": true // z\n}'
    assert read(written(tmp_path, text)) == {
        "tensorboard": {"path": "http://x/*y*/"}, "dump_state": True
    }  # fmt: skip


REFUSALS = {
    "nearest": ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
    "unknown": ({"zzz": 1}, "'zzz' is no key that DeepSpeed reads"),
    "optimizer": ({"optimizer": {"type": "AdamW"}}, "remove 'optimizer'"),
    "autocast": ({"torch_autocast": {"enabled": True}}, "remove 'torch_autocast'"),
    "fp16": ({"fp16": {"enabled": True}}, 'remove "fp16"'),
    "bf16": ({"bf16": {"enabled": True}}, 'remove "bf16", or use train.preset=bf16'),
    "fp8-off": ({"fp8": {"enabled": False}}, 'remove "fp8"'),
    "fp8-key": ({"fp8": {"enabled": True, "recipe": "x"}}, "fp8.recipe is unknown"),
    "fp8-backend": ({"fp8": {"enabled": True, "backend": "nativ"}}, "did you mean 'native'"),
    "fp8-bare": ({"fp8": True}, 'must say "enabled"'),
    "batch": ({"train_batch_size": 5}, "is not 2 sequences x 1 forwards x 2 ranks = 4"),
    "batch-text": ({"train_batch_size": "many"}, "must be a whole number"),
    "stage-0": ({"zero_optimization": {"stage": 0}}, "use distributed.strategy=ddp"),
    "stage-4": ({"zero_optimization": {"stage": 4}}, "is not 1, 2 or 3"),
    "nvme": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "nvme"),
    "params": ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
               "offload_param"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_do_nothing_or_conflict_is_refused(tmp_path, case):
    content, message = REFUSALS[case]
    content = {"zero_optimization": {"stage": 2}} | content
    with pytest.raises(ConfigError) as error:
        apply(read(written(tmp_path, content)), ds_run(tmp_path), 2)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_other_presets_and_files_that_are_not_json(tmp_path):
    on = {"fp8": {"enabled": True}, "zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="computes nothing in FP8"):
        apply(on, ds_run(tmp_path, "bf16"), 2)
    both = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert apply(both, ds_run(tmp_path, "bf16"), 2).engine["bf16"] == {"enabled": True}
    clipped = ds_run(tmp_path, optimizer={"clip_norm": 1.0})
    with pytest.raises(ConfigError, match='remove "gradient_clipping"'):
        apply(both | {"gradient_clipping": 0.5, "bf16": {"enabled": False}}, clipped, 2)
    assert apply({"zero_optimization": {"stage": 1}}, clipped, 2).engine["gradient_clipping"] == 1.0
    with pytest.raises(ConfigError, match="no running average under DeepSpeed"):
        apply({"zero_optimization": {"stage": 1}}, ds_run(tmp_path, ema={"decay": 0.9}), 2)
    lean = apply({"zero_optimization": {"stage": 3}}, ds_run(tmp_path, "fp8-lean"), 2)
    assert lean.engine["bf16"] == {"enabled": True} and "FP32 masters" in lean.notes[0]
    for text, message in (("{", "not JSON"), ("[]", "must be an object"),
                          ('{"bf16": 1, "bf16": 2}', "twice")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            read(written(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.json")
    assert not KNOWN & REFUSED.keys()


def test_without_deepspeed_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="deepspeed is not installed; pip install deepspeed"):
        Trainer(ds_run(tmp_path))


@needs_deepspeed
@pytest.mark.parametrize("preset, stage", [("fp32", 1), ("fp8", 2), ("fp8", 3), ("fp8-lean", 3)])
def test_zero_gives_the_losses_of_one_rank_and_resumes(tmp_path, preset, stage):
    os.environ["DS_ACCELERATOR"] = "cpu"
    content = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    train = {"micro_batch": 1, "accumulate": 2}
    curve = steps(Trainer(tiny_run(tmp_path, preset, train=train)), 4)

    run = ds_run(tmp_path, preset, content, out="zero")

    def first(rank):
        t = Trainer(run)
        got = steps(t, 2)
        t.save()
        return got + steps(t, 2)

    def again(rank):
        return steps(Trainer(run), 2)

    got = run_ranks(2, first, tmp_path, seconds=600)  # it may compile something first
    assert got[0] == got[1]
    assert run_ranks(2, again, tmp_path) == [g[2:] for g in got]
    bound = {"fp32": 1e-6, "fp8": 2e-3, "fp8-lean": 5e-3}[preset]
    for (loss, norm, stepped), (loss1, norm1, _) in zip(got[0], curve, strict=True):
        assert stepped and loss == pytest.approx(loss1, rel=bound)
        assert norm == pytest.approx(norm1, rel=10 * bound)
    # lean differs from the start: ZeRO has no split masters
    why = "optimizer.master=bf16 there" if preset == "fp8-lean" else rf"ZeRO-{stage} on 2 rank"
    with pytest.raises(Exception, match=why):
        Trainer(tiny_run(tmp_path, preset, out="zero", train=train))


@needs_deepspeed
def test_zero_skips_a_bad_step_on_all_ranks(tmp_path):
    os.environ["DS_ACCELERATOR"] = "cpu"
    run = ds_run(tmp_path, "fp8", train={"micro_batch": 1})

    def work(rank):
        t = Trainer(run)
        before = [p.detach().clone() for p in t.model.parameters()]
        forward = t.strategy.forward

        def poisoned(**inputs):
            out = forward(**inputs)
            out.loss = out.loss * (math.inf if rank == 0 else 1.0)
            return out

        t.strategy.forward = poisoned
        bad = t.step_once()
        kept = all(bool((a == b).all()) for a, b in zip(before, t.model.parameters(), strict=True))
        t.strategy.forward = forward
        return bad.stepped, kept, t.step_once().stepped

    assert run_ranks(2, work, tmp_path, seconds=600) == [(False, True, True)] * 2


@needs_deepspeed
def test_zero3_layers_keep_no_cast_of_a_gathered_weight(tmp_path):
    """A byte a parameter of every layer between forward and backward would be more than a share."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    run = ds_run(tmp_path, "fp8", {"zero_optimization": {"stage": 3}}, train={"micro_batch": 1})

    def work(rank):
        t = Trainer(run)
        return kept_after_forward(t, shapes_of(t.model))

    for made, kept in run_ranks(2, work, tmp_path, seconds=600):
        assert made >= 8 and not kept
