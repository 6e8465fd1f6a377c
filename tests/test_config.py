"""Runs are read, refused and written back as they should be."""

import dataclasses

import pytest

from ottava.config import PRESETS, ConfigError, Run, load_run, run_from_dict, run_to_dict
from ottava.numerics.recipe import get_recipe

RUN = """
seed = 3
[model]
name = "demo"
[model.overrides]
num_hidden_layers = 2
[train]
preset = "fp8-lean"
[optimizer]
betas = [0.9, 0.99]
lr = 1
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(RUN)
    return path


def refusal(file, *overrides) -> str:
    """The one line with which these overrides are refused."""
    with pytest.raises(ConfigError) as error:
        load_run(file, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_is_read_with_its_types_and_defaults(file):
    run = load_run(file)
    assert (run.name, run.out, run.seed, run.device) == ("toy", "out/toy", 3, "auto")
    assert run.model.overrides == {"num_hidden_layers": 2}
    assert run.optimizer.betas == (0.9, 0.99)
    assert run.optimizer.lr == 1.0 and type(run.optimizer.lr) is float
    assert run.train.steps == 1000  # a default


def test_overrides_take_the_type_of_their_key(file):
    run = load_run(
        file,
        [
            "data.source=1e5",
            "model.overrides.vocab_size=300",
            "model.overrides.tie=true",
            "precision.keep=*gate,*head",
            "optimizer.betas=0.8,0.9",
            "log.trackers=tensorboard,wandb",
            "name=other",
        ],
    )
    assert run.data.source == "1e5"
    assert run.model.overrides == {"num_hidden_layers": 2, "vocab_size": 300, "tie": True}
    assert run.precision.keep == ("*gate", "*head")
    assert run.optimizer.betas == (0.8, 0.9)
    assert run.log.trackers == ("tensorboard", "wandb")
    assert run.out == "out/other"


def test_a_run_reads_back_equal_from_plain_data(file):
    run = load_run(file, ["precision.keep=a,b", "optimizer.clip_norm=1"])
    data = run_to_dict(run)
    assert type(data["precision"]["keep"]) is list and type(data["model"]) is dict
    assert run_from_dict(data) == run


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.prest=fp8", "train.prest: unknown key; did you mean train.preset?"),
        ("trian.steps=1", "trian: unknown section; did you mean train?"),
        ("lr=3", "lr: unknown key; did you mean optimizer.lr?"),
        ("train.lr=3", "train.lr: unknown key; did you mean optimizer.lr?"),
        ("ema.zzz=3", "ema.zzz: unknown key; choose one of decay"),
        ("train.preset=fp9", "(did you mean 'fp8'?)"),
        ("precision.recipe=blok", "(did you mean 'block'?)"),
        ("train.steps=1.5", "train.steps: 1.5 must be a whole number"),
        ("train.steps=true", "train.steps: True must be a whole number"),
        ("train.steps=many", "train.steps: 'many' must be a whole number"),
        ("log.trackers=wandbb", "log.trackers: 'wandbb' is not one of tensorboard, trackio, wandb (did"),
        ("data.pack=1", "data.pack: 1 must be true or false"),
        ("optimizer.lr=fast", "optimizer.lr: 'fast' must be a number"),
        ("optimizer.betas=[0.9]", "must be a list of 2 numbers"),
        ("precision.keep=[1]", "precision.keep: 1 must be text"),
        ("model.overrides=3", "must be a table"),
        ("train=3", "train: is a section, not a value"),
        ("seed.x=3", "seed is a value, not a section"),
        ("train.steps", "an override is written section.key=value"),
        ("=3", "an override is written section.key=value"),
        ("train.steps=0", "train.steps: 0 is out of range; use a number at least 1"),
        ("ema.decay=1", "ema.decay: 1.0 is out of range; use a number at least 0 and below 1"),
        ("ema.decay=nan", "ema.decay: nan is out of range"),
        ("optimizer.lr=inf", "optimizer.lr: inf is out of range"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas: 1.0 is out of range"),
        ("seed=-1", "seed: -1 is out of range"),
        ("scaler.backoff_factor=2", "scaler.backoff_factor: 2.0 is out of range"),
    ],
)
def test_a_wrong_key_type_or_range_is_named(file, override, says):
    assert says in refusal(file, override)


IMPOSSIBLE = [
    (["optimizer.fused=on", "optimizer.clip_norm=1"], "optimizer.fused", "optimizer.clip_norm=0"),
    (["optimizer.fused=on", "train.accumulate=4"], "optimizer.fused", "train.accumulate=1"),
    (["optimizer.fused=on", "train.preset=amp-fp16"], "optimizer.fused", "train.preset=amp"),
    (["train.preset=amp-fp16", "scaler.init_scale=0"], "scaler.init_scale", "train.preset=amp"),
    (["train.preset=amp-fp16", "scaler.max_scale=1", "scaler.min_scale=2"], "scaler.max_scale",
     "raise it"),
    (["train.preset=amp-fp16", "scaler.max_scale=9"], "scaler.init_scale", "max_scale=9"),
    (["train.preset=amp", "precision.recipe=row"], "precision.recipe", "train.preset=fp8"),
    (["train.preset=storage", "precision.recipe=row"], "precision.recipe", "remove the key"),
    (["precision.recipe=storage"], "precision.recipe", "train.preset=storage"),
    (["train.preset=bf16", "precision.start_fp8_at=0.1"], "precision.start_fp8_at",
     "start_fp8_at=0"),
    (["train.preset=storage", "precision.finish_bf16_at=0.9"], "precision.finish_bf16_at",
     "finish_bf16_at=1"),
    (["precision.start_fp8_at=0.5", "precision.finish_bf16_at=0.5"], "precision.start_fp8_at",
     "train.preset=bf16"),
    (["train.preset=amp", "optimizer.master=split16"], "optimizer.master", "train.preset=bf16"),
    (["model.path=x"], "model.name and model.path", "exactly one"),
    (["model.name="], "model.name and model.path", "exactly one"),
    (["model.name=", "model.path=/nowhere"], "model.path", "is not a folder"),
    (["model.random_init=true"], "model.random_init", "remove the key"),
    (["data.source="], "data.source", "use stdlib"),
    (["optimizer.warmup_steps=2000"], "optimizer.warmup_steps", "lower it"),
    (["train.eval_every=5", "train.eval_batches=0"], "train.eval_every", "eval_every=0"),
    (["train.eval_every=5", "data.validation_fraction=0"], "train.eval_every",
     "validation_fraction"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "names", "fix"), IMPOSSIBLE)
def test_an_impossible_combination_is_refused_with_its_fix(file, overrides, names, fix):
    message = refusal(file, *overrides)
    assert message.startswith(names) and fix in message


def test_a_missing_or_broken_file_is_refused(tmp_path, file):
    assert "did you mean 'toy.toml'?" in refusal(tmp_path / "toi.toml")
    file.write_text("[model\n")
    assert "not a TOML file" in refusal(file)
    file.write_bytes(b"name = '\xff'")
    assert "not a TOML file" in refusal(file)


def test_explicit_choices_reach_the_settings(file):
    lean = load_run(file).settings
    assert lean == PRESETS["fp8-lean"] and lean.fused
    mixed = load_run(
        file, ["optimizer.master=fp32", "optimizer.states=bf16", "precision.recipe=block"]
    ).settings
    assert (mixed.master, mixed.param_dtype, mixed.states) == ("fp32", "fp32", "bf16")
    assert mixed.recipe == "block"
    split = load_run(file, ["train.preset=fp8", "optimizer.master=split24"]).settings
    assert (split.master, split.param_dtype) == ("split24", "bf16")


@pytest.mark.parametrize("why", ["optimizer.clip_norm=1", "train.accumulate=2"])
def test_the_preset_gives_up_the_fused_step_and_says_so(file, why):
    run = load_run(file, [why])
    assert not run.settings.fused
    assert len(run.notes) == 1 and why in run.notes[0] and "BF16" in run.notes[0]
    assert load_run(file).notes == ()


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_is_valid_under_every_preset(file, name):
    start = load_run(file, ["precision.start_fp8_at=0.1", "precision.recipe=row"])
    other = start.with_preset(name).check()
    assert other.train.preset == name
    assert dataclasses.replace(other.train, preset="fp8-lean") == start.train
    assert (other == start) is (name == "fp8-lean")


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'fp8-lean'"):
        Run().with_preset("fp8-leen")


def test_presets_are_consistent():
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert (preset.recipe is None) is (preset.compute not in ("fp8", "storage"))
        if preset.recipe:
            assert get_recipe(preset.recipe).keeps_codes
            assert get_recipe(preset.recipe).any_fp8 is (preset.compute == "fp8")


def test_the_fp8_learning_rate_is_scaled_only_where_there_is_fp8(file):
    assert load_run(file, ["precision.lr_scale=0.5"]).peak_lr == 0.5
    assert load_run(file, ["precision.lr_scale=0.5", "train.preset=amp"]).peak_lr == 1.0


def test_every_key_has_a_meaning():
    def sections(cls):
        for f in dataclasses.fields(cls):
            if dataclasses.is_dataclass(f.default_factory):
                yield from sections(f.default_factory)
            else:
                yield f

    assert all(f.metadata["doc"] for f in sections(Run))
