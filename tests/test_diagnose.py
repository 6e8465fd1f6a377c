"""Each rule of diagnose sees the run made to have its fault, no other rule does, and a good run has
no findings."""

import json
import math
from dataclasses import asdict

import pytest

from ottava.config import Run as RunConfig
from ottava.config import run_from_dict
from ottava.monitor.diagnose import RULES, diagnose
from ottava.monitor.metrics import MetricsWriter
from ottava.schema import apply_override

NAN = math.nan


class Run:
    """A run to spoil: lines as the trainer writes them; a healthy FP8 run unless changed."""

    def __init__(self, preset="fp8", steps=100):
        self.config = {
            "out": "out/toy",
            "model": {"path": "", "random_init": False},
            "data": {"shuffle": True},
            "train": {"preset": preset, "steps": steps, "micro_batch": 8, "accumulate": 1,
                      "keep_last": 2},
            "optimizer": {"lr": 1e-3, "warmup_steps": 5, "weight_decay": 0.1, "clip_norm": 0.0},
            "precision": {"recipe": "preset", "keep": [], "lr_scale": 1.0},
            "scaler": {"min_scale": 1.0, "init_scale": 65536.0, "growth_interval": 1000},
            "ema": {"decay": 0.0},
        }  # fmt: skip
        self.start = {"device": "cpu", "fp8_modules": 9, "fp8_share": 0.9, "vocab": 257}
        scale = 65536.0 if preset == "amp-fp16" else None
        self.steps = [
            {
                "loss": 2.0 + 3.0 * math.exp(-i / 30), "grad_norm": 1.0 + 0.1 * (i % 3), "lr": 1e-3,
                "stepped": True, "cause": "", "first_bad": None, "scale": scale, "step_ms": 100.0,
                "data_ms": 1.0, "percent": 50.0, "memory_gib": 60.0,
            }
            for i in range(steps)
        ]  # fmt: skip
        self.evals = [(50, {"loss": 3.0}), (100, {"loss": 2.5})]
        self.looks = {n: self.look() for n in (20, 40, 60, 80, 100)}
        self.more = []  # (kind, step, values)
        self.end = {"status": "done", "reason": "", "seconds": 1.0}
        self.tail = ""

    def look(self):
        good = {"amax": 1.0, "scale": 0.002, "saturated": 0.0, "underflowed": 0.01}
        rows = {
            f"layers.{i}.{n}": {
                "input": good | {"error_db": 31.0},
                "weight": good | {"error_db": 31.5},
                "grad_output": good | {"error_db": 25.3},
                "output": {"error_db": 24.9},
            }
            for i in range(2)
            for n in ("qkv_proj", "o_proj")
        }
        one = {"grad_norm": 0.5, "weight_norm": 9.0, "weight_amax": 0.1, "update": 1e-3,
               "m_zero": 0.02, "v_zero": 0.01}  # fmt: skip
        parameters = {f"{row}.weight": dict(one) for row in rows}
        experts = {"layers.1.mlp.experts": {"busiest": 1.8, "idle": 0.1}}
        return {"rows": rows, "parameters": parameters, "experts": experts, "unseen": []}

    def bad(self, *numbers, first_bad=None, cause="the gradient of x is not finite", **values):
        for n in numbers:
            change = {"stepped": False, "cause": cause, "first_bad": first_bad, **values}
            self.steps[n - 1] |= change

    def flat(self):
        for i, x in enumerate(self.steps):
            x["loss"] = 5.5 + 0.01 * (i % 3)

    def every_row(self, operand, **values):
        for look in self.looks.values():
            for row in look["rows"].values():
                row[operand] |= values

    def write(self, folder):
        writer = MetricsWriter(folder)
        writer.write("start", 0, version=1, config=self.config, **self.start)
        for number, values in enumerate(self.steps, 1):
            writer.write("step", number, **values)
            if number in self.looks:
                writer.write("observe", number, **self.looks[number])
            for step, line in self.evals:
                if step == number:
                    writer.write("eval", step, **line)
            for kind, step, line in self.more:
                if step == number:
                    writer.write(kind, step, **line)
        if self.end:
            writer.write("end", len(self.steps), **self.end)
        writer.close()
        with (folder / "run.jsonl").open("a") as f:
            f.write(self.tail)
        return folder


CASES = {}


def case(rule, *, preset="fp8", says="", setting, steps=100):
    """Register a function that gives a good run the fault of `rule`."""

    def add(spoil):
        CASES[f"{rule}:{spoil.__name__.strip('_')}"] = (rule, preset, steps, says, setting, spoil)
        return spoil

    return add


# ---- table 6.1 ----


@case(
    "loss-scale-too-high", preset="amp-fp16", says="first 8 steps", setting="scaler.init_scale=256"
)
def _overflow_at_first(run):
    run.bad(*range(1, 9))
    for i, x in enumerate(run.steps):
        x["scale"] = max(65536.0 / 2**i, 256.0)


@case("loss-scale-grows-too-fast", preset="amp-fp16", says="4 overflows after step 20",
      setting="scaler.growth_interval=20 scaler.max_scale=16384")  # fmt: skip
def _overflow_in_the_middle(run):
    run.config["scaler"]["growth_interval"] = 10
    run.bad(31, 52, 73, 94)


@case("loss-scale-at-floor", preset="amp-fp16", says="scale 1 ", setting="train.preset=amp")
def _floor(run):
    for x in run.steps[50:]:
        x["scale"] = 1.0


@case("broken-weights", says="layers.1.o_proj.weight holds",
      setting="train.resume=out/toy/checkpoints/step-00000060")  # fmt: skip
def _weights(run):
    run.more = [("save", n, {"path": f"step-{n:08d}"}) for n in (30, 60, 90)]
    run.bad(*range(71, 81), first_bad=["layers.1.o_proj.weight", "weight"], loss=NAN)


@case("one-row-non-finite", says="output of layers.1.mlp, in 4 of 4",
      setting="precision.keep=layers.1.mlp")  # fmt: skip
def _same_row(run):
    run.bad(50, 61, 72, 83, first_bad=["layers.1.mlp", "output"], loss=NAN)


@case("one-row-non-finite", says="gradient of layers.0.o_proj",
      setting="precision.keep=layers.0.o_proj")  # fmt: skip
def _same_row_in_backward_from_the_start(run):
    run.bad(1, 2, 3, 4, first_bad=["layers.0.o_proj.weight", "gradient"])


@case("non-finite-from-the-start-in-fp8", says="the first is step 2",
      setting="precision.start_fp8_at=0.1")  # fmt: skip
def _early_in_fp8(run):
    run.bad(2, 3, 4, 6, loss=NAN, cause="the loss is nan")


@case(
    "non-finite-from-the-start", preset="amp", says="4 of 100", setting="optimizer.warmup_steps=100"
)
def _early(run):
    run.bad(2, 3, 4, 6, loss=NAN, cause="the loss is nan")


@case(
    "bad-steps",
    says="3 of 100 steps (steps 40, 41, 77; 2 in a row",
    setting="optimizer.clip_norm=2",
)
def _now_and_then(run):
    for n, row in ((40, "a"), (41, "b"), (77, "c")):
        run.bad(n, first_bad=[row, "output"])


@case("bad-steps", preset="bf16", says="the loss is nan", setting="optimizer.clip_norm=2")
def _poisoned_data(run):
    run.bad(50, loss=NAN, grad_norm=NAN, cause="the loss is nan", first_bad=["", "loss"])


@case("weight-outlier", says="layers.1.o_proj.weight grew 40", setting="optimizer.weight_decay=0.2")
def _one_weight(run):
    for n, look in run.looks.items():
        look["parameters"]["layers.1.o_proj.weight"]["weight_amax"] = 0.1 * 40 ** ((n - 20) / 80)


@case("loss-explodes", says="2.2", setting="optimizer.clip_norm=2")
def _rises_again(run):
    for x in run.steps[80:]:
        x |= {"loss": 6.0, "grad_norm": 30.0}


@case("loss-explodes", says="6.000 over the last", setting="optimizer.lr=0.0005")
def _rises_though_clipped(run):
    run.config["optimizer"]["clip_norm"] = 1.0
    for x in run.steps[80:]:
        x["loss"] = 6.0


@case("gradient-peaks", says="50 at step 71; the median is 1.1", setting="optimizer.clip_norm=2")
def _peak(run):
    run.steps[1]["grad_norm"] = 500.0  # the beginning is allowed to be wild
    run.steps[70]["grad_norm"] = 50.0


@case("gradients-underflow", says="80% of layers.0.o_proj", setting="precision.recipe=tensor")
def _flat_in_e4m3(run):
    run.config["precision"]["recipe"] = "row"
    run.flat()
    run.looks[40]["rows"]["layers.0.o_proj"]["grad_output"]["underflowed"] = 0.8


@case(
    "gradients-underflow", says="median gradient norm is 1.0e-09", setting="precision.recipe=block"
)
def _flat_without_gradient(run):
    run.flat()
    for x in run.steps:
        x["grad_norm"] = 1e-9


@case("learning-rate-too-low", says="1.0e-07 of itself", setting="optimizer.lr=0.01")
def _too_slow(run):
    run.flat()
    for look in run.looks.values():
        for p in look["parameters"].values():
            p["update"] = 1e-7


@case("learning-rate-too-high", says="loss 5.5", setting="optimizer.lr=0.0001")
def _too_fast(run):
    run.flat()


# ---- inside a step ----


@case("saturation-of-late-scales", says="20.0% of layers.0.qkv_proj's input",
      setting="precision.recipe=tensor")  # fmt: skip
def _clipped_late(run):
    run.config["precision"]["recipe"] = "delayed"
    run.looks[40]["rows"]["layers.0.qkv_proj"]["input"]["saturated"] = 0.02
    run.looks[60]["rows"]["layers.0.qkv_proj"]["input"] |= {"saturated": 0.2, "error_db": 9.0}


@case(
    "saturation", says="5.0% of layers.1.o_proj's weight", setting="precision.keep=layers.1.o_proj"
)
def _clipped(run):
    run.looks[20]["rows"]["layers.1.o_proj"]["weight"]["saturated"] = 0.03
    run.looks[60]["rows"]["layers.1.o_proj"]["weight"]["saturated"] = 0.05


@case("underflow", says="60.0% of layers.1.o_proj's input", setting="precision.recipe=block")
def _lost(run):
    run.looks[60]["rows"]["layers.1.o_proj"]["input"] |= {"underflowed": 0.6, "error_db": 8.0}


@case("underflow", says="at step 60", setting="precision.keep=layers.1.o_proj")
def _lost_in_blocks(run):
    run.config["precision"]["recipe"] = "row"
    run.config["train"]["preset"] = "fp8"
    run.config["precision"]["recipe"] = "block"
    run.looks[60]["rows"]["layers.1.o_proj"]["input"]["underflowed"] = 0.6


@case("noisy-cast", says="has 6.0 dB", setting="precision.keep=layers.0.o_proj")
def _noise(run):
    run.looks[60]["rows"]["layers.0.o_proj"]["output"]["error_db"] = 8.0
    run.looks[80]["rows"]["layers.0.o_proj"]["output"]["error_db"] = 6.0


@case("updates-lost", says="4 of 4", setting="optimizer.master=fp32")
def _still(run):
    run.flat()
    for look in run.looks.values():
        for p in look["parameters"].values():
            p["update"] = 0.0


@case(
    "moments-lost",
    says="layers.0.o_proj.weight's first moment are zero and 60%",
    setting="optimizer.states=fp32",
)
def _moments(run):
    run.looks[100]["parameters"]["layers.0.o_proj.weight"]["v_zero"] = 0.6


@case("experts-idle", says="75% of the experts",
      setting="model.overrides.sequence_loss_weight=0.0001")  # fmt: skip
def _collapsed(run):
    run.looks[100]["experts"]["layers.1.mlp.experts"] = {"busiest": 20.0, "idle": 0.75}


@case("average-behind", says="over 10,000 steps", setting="ema.decay=0.9")
def _average(run):
    run.config["ema"]["decay"] = 0.9999
    run.evals = [(50, {"loss": 3.0, "ema_loss": 5.0}), (100, {"loss": 2.5, "ema_loss": 4.8})]


@case("not-loaded", says="guessing among 152,000", setting="data.tokenizer=/models/seven")
def _noise_for_weights(run):
    run.config["model"]["path"] = "/models/seven"
    run.start["vocab"] = 152_000
    for i, x in enumerate(run.steps):
        x["loss"] = 11.9 - 0.05 * i


# ---- the end, table 6.2 ----


@case("out-of-memory", says="needs 90", setting="train.recompute=mlp")
def _memory(run):
    run.end = {"status": "failed", "reason": "OutOfMemory: out of memory in step 3: a step needs 90 "
               "GiB; would fit: train.recompute=mlp (70.00 GiB); or train.micro_batch=4 (60 GiB)"}  # fmt: skip


@case("disk", says="No space left", setting="train.keep_last=1")
def _disk(run):
    run.end = {"status": "failed", "reason": "CheckpointError: cannot save step 9: No space left"}


@case("failed", says="worker died", setting="train.resume=auto")
def _other_failure(run):
    run.end = {"status": "failed", "reason": "RuntimeError: worker died"}


@case("unfinished", says="step 100", setting="train.resume=auto")
def _killed(run):
    run.end = None


@case("went-back", says="went back to step 20", setting="precision.keep=layers.0.o_proj")
def _healed(run):
    text = "step 32: went back to step 20; layers.0.o_proj in high precision"
    run.more = [("heal", 32, {"text": text, "row": "layers.0.o_proj"})]


@case("damaged-checkpoint", says="checksum", setting="train.keep_last=3")
def _damaged(run):
    note = "passed over: checkpoint x is damaged: the checksum of model.safetensors does not match"
    run.more = [("resume", 30, {"from": "step-00000030", "notes": [note]})]


@case("unreadable-lines", says="half-written", setting="train.resume=auto")
def _half_a_line(run):
    run.tail = '{"kind": "step", "st'


@case("waits-for-data", says="45% of a step", setting="data.shuffle=false")
def _slow_data(run):
    for x in run.steps:
        x["data_ms"] = 45.0


@case("waits-for-ranks", says="30% of a step", setting="train.accumulate=2")
def _slow_ranks(run):
    for x in run.steps:
        x["comm_ms"] = 30.0


@case("small-batch", says="9 % of the measured GEMM rate", setting="train.micro_batch=16")
def _small(run):
    run.start |= {"device": "NVIDIA H200", "device_gib": 140.0}
    for x in run.steps:
        x |= {"percent": 9.0, "memory_gib": 20.0}


@case("emulated", says="A100", setting="train.preset=storage")
def _no_unit(run):
    run.start |= {"device": "NVIDIA A100", "emulated": True, "device_gib": 80.0}


@case("little-in-fp8", says="3 modules with 20%", setting="precision.keep=")
def _kept(run):
    run.config["precision"]["keep"] = ["*mlp*"]
    run.start |= {"fp8_modules": 3, "fp8_share": 0.2}


@case("overfitting", says="2.500 at step 60, 2.900 at the end", setting="train.steps=60")
def _overfits(run):
    run.evals = [(20, {"loss": 3.0}), (60, {"loss": 2.5}), (100, {"loss": 2.9})]


# ---- table 6.3: against a run in high precision (the good run, in BF16) ----


@case("gap-closes", says="it closes", setting="train.steps=300", steps=200)
def _closes(run):
    for i, x in enumerate(run.steps):
        x["loss"] *= 1.10 - 0.08 * i / 200


@case("gap-from-noise", says="15.0 dB", setting="train.preset=storage", steps=200)
def _gap_and_noise(run):
    run.every_row("weight", error_db=15.0)
    run.every_row("grad_output", error_db=15.0)
    for i, x in enumerate(run.steps):
        x["loss"] *= 1.0 + 0.05 * i / 200


@case("gap-from-the-start", says="opens at once", setting="precision.start_fp8_at=0.1", steps=200)
def _gap_at_once(run):
    for x in run.steps:
        x["loss"] *= 1.05


@case("gap-grows", says="it grows", setting="precision.lr_scale=0.5", steps=200)
def _gap_grows(run):
    for i, x in enumerate(run.steps):
        x["loss"] *= 1.0 + 0.05 * i / 200


@pytest.mark.parametrize("name", CASES)
def test_a_fault_triggers_its_rule_and_no_other(tmp_path, name):
    rule, preset, steps, says, setting, spoil = CASES[name]
    run = Run(preset, steps)
    spoil(run)
    against = Run("bf16", steps).write(tmp_path / "other") if rule.startswith("gap") else None
    found = diagnose(run.write(tmp_path / "run"), against)
    assert [f.rule for f in found] == [rule]
    assert says in found[0].evidence and found[0].setting == setting
    for override in found[0].setting.split():
        if not override.startswith("model.overrides"):
            data = {}
            apply_override(RunConfig, data, override)
            run_from_dict(data)  # a key that exists, and a value of its type


def test_every_rule_has_a_fault_and_says_all_that_it_must():
    assert {c[0] for c in CASES.values()} == set(RULES)
    for rule in RULES.values():
        assert rule.level in ("error", "warning", "note") and rule.source and rule.cause
        assert "=" in rule.setting or rule.setting == "{change}"
        assert set(rule.unless) <= set(RULES) - {rule.name}


@pytest.mark.parametrize(
    "preset", ["fp32", "amp", "amp-fp16", "bf16", "fp8", "fp8-lean", "storage"]
)
def test_a_good_run_has_no_findings(tmp_path, preset):
    other = Run("bf16").write(tmp_path / "other")
    assert diagnose(Run(preset).write(tmp_path / "run")) == []
    assert diagnose(tmp_path / "run", other) == []


def test_a_real_run_that_is_short_and_good_has_no_findings(tmp_path):
    from tiny_run import tiny_run

    from ottava.train.trainer import Trainer

    run = tiny_run(tmp_path, "fp8", steps=8, monitor={"every": 2}, ema={"decay": 0.5},
                   train={"eval_every": 4, "checkpoint_every": 4})  # fmt: skip
    Trainer(run).run(quiet=True)
    assert diagnose(run.out) == []


def test_a_few_overflows_clipping_once_and_a_short_run_are_nothing(tmp_path):
    run = Run()
    run.config["precision"]["recipe"] = "delayed"
    run.looks[20]["rows"]["layers.1.o_proj"]["input"]["saturated"] = 0.05
    assert diagnose(run.write(tmp_path / "c")) == []
    run = Run("amp-fp16")
    run.bad(1, 2, 3)
    assert diagnose(run.write(tmp_path / "a")) == []
    run = Run(steps=12)
    run.flat()
    run.looks = {}
    assert diagnose(run.write(tmp_path / "b")) == []


def test_a_run_without_any_of_the_newer_fields_is_read_as_it_is(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("start", 0, version=1)
    for number in range(1, 41):
        writer.write("step", number, loss=3.0 - number / 40)
    writer.write("observe", 40)
    writer.write("end", 40)
    writer.close()
    assert diagnose(tmp_path) == []


def test_findings_come_worst_first_and_are_plain_data(tmp_path):
    run = Run()
    run.bad(50, 61, 72, first_bad=["layers.1.mlp", "output"])
    run.end = None
    for n in (60, 80):
        run.looks[n]["rows"]["layers.1.o_proj"]["weight"]["saturated"] = 0.05
    found = diagnose(run.write(tmp_path))
    assert [f.level for f in found] == ["error", "warning", "note"]
    json.dumps([asdict(f) for f in found])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run\.jsonl"):
        diagnose(tmp_path)
    (tmp_path / "run.jsonl").write_text("\nnot json\n")
    with pytest.raises(ValueError, match="no line of a run"):
        diagnose(tmp_path)
