"""Runs whose recipe is Transformer Engine's, with the stand-in for it."""

import copy
import json
import sys

import pytest
import te_stand_in
import torch
from tiny_run import tiny_run, write_text

import ottava
from ottava import doctor, prepare
from ottava.bench.contest import choose
from ottava.cli import main
from ottava.config import ConfigError
from ottava.layers import te
from ottava.layers.te_modules import TEGatedMLP
from ottava.train.trainer import Trainer


@pytest.fixture
def fake(monkeypatch):
    with te_stand_in.in_place(monkeypatch) as found:
        yield found


def te_run(folder, preset="fp8", recipe="te:delayed", **sections):
    precision = {"recipe": recipe, **sections.pop("precision", {})}
    return tiny_run(folder, preset, precision=precision, **sections)


def test_the_trainer_enters_one_region_a_step(fake, tmp_path):
    trainer = Trainer(te_run(tmp_path, steps=4))
    manager = fake.FP8GlobalStateManager
    for step in range(3):
        assert trainer.step_once().stepped
        assert manager.entered == step + 1
    before = copy.deepcopy(te.scaling_state(trainer.model))
    trainer.evaluate()
    for name, s in te.scaling_state(trainer.model).items():
        assert all(torch.equal(v, before[name][k]) for k, v in s.items())
    assert "DelayedScaling" in fake.products and trainer.captured is None


@pytest.mark.parametrize("preset", ["fp8", "fp8-lean"])
def test_a_run_continued_is_a_run_that_never_stopped(fake, tmp_path, preset):
    options = {"te": {"amax_history_len": 8}}
    whole = Trainer(te_run(tmp_path, preset, precision=options, out="whole"))
    losses = [whole.step_once().loss for _ in range(4)]
    assert losses[-1] < losses[0]
    first = Trainer(te_run(tmp_path, preset, precision=options, out="parts"))
    [first.step_once() for _ in range(2)]
    saved = te.scaling_state(first.model)
    first.save()
    again = Trainer(te_run(tmp_path, preset, precision=options, out="parts"))
    loaded = te.scaling_state(again.model)
    assert loaded.keys() == saved.keys() and len(saved) > 8
    assert [again.step_once().loss for _ in range(2)] == losses[2:]


def test_requests_that_do_not_go_together_are_one_line(fake, tmp_path):
    cases = {
        "te:delayed would move its histories again": {"train": {"recompute": "layer"}},
        "under fsdp2 Transformer Engine's copies": {"distributed": {"strategy": "fsdp2"}},
        "precision.te: options for Transformer Engine, and precision.recipe is tensor": {
            "precision": {"te": {"margin": 1}}, "recipe": "tensor",
        },
    }  # fmt: skip
    for message, sections in cases.items():
        run = te_run(tmp_path, **sections)
        with pytest.raises(ConfigError, match=message):
            prepare.convert_for(run, prepare.build_model(run, "meta"), "cpu")
    with pytest.raises(ValueError, match=r"memory: under precision.recipe=te:delayed what"):
        ottava.estimate_memory(te_run(tmp_path), device="cpu")


def test_recomputed_layers_give_the_same_losses(fake, tmp_path):
    runs = [
        Trainer(te_run(tmp_path, recipe="te:current", train={"recompute": which}, out=which))
        for which in ("none", "mlp", "layer")
    ]
    for trainer in runs:
        fake.products.clear()
        trainer.losses = [trainer.step_once().loss]
        trainer.products = len(fake.products)
    assert runs[0].losses[0] == runs[1].losses[0] == runs[2].losses[0]
    assert runs[0].products < runs[1].products < runs[2].products
    dense = runs[1].model.model.layers[0].mlp
    assert isinstance(dense, TEGatedMLP) and "forward" in dense.__dict__


def test_the_command_line_refuses_with_the_install_command(tmp_path, monkeypatch, capsys):
    te_stand_in.forget()
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    write_text(tmp_path)
    arguments = ["train", "runs/demo.toml", "precision.recipe=te:current", "device=cpu",
                 f"data.source={tmp_path / 'text.txt'}", f"out={tmp_path / 'run'}"]  # fmt: skip
    assert main(arguments) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"Transformer Engine is not installed; {te.INSTALL}" in said
    assert not (tmp_path / "run").exists()
    te_stand_in.forget()


def test_the_plan_command_shows_the_table_and_no_memory(fake, capsys):
    arguments = ["plan", "runs/demo.toml", "precision.recipe=te:current", "device=cpu"]
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "te:current" in said and "its memory is not planned" in said and "GiB" not in said
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] is None


def test_doctor_names_each_part_that_does_not_fit():
    names = [f"transformer-engine{end}" for end in ("", "-torch", "-cu12", "-cu13")]

    def found(*versions, cuda="13.0", cudnn=(9, 19, 0)):
        return doctor.te_problems(dict(zip(names, versions, strict=True)), cuda, cudnn)

    assert found(None, None, None, None) == []
    assert found("2.20.2", "2.20.2", None, "2.20.2") == []
    assert found("2.20.2", "2.20.2", "2.20.2", None, cuda="12.9") == []
    (line,) = found("2.20.2", None, None, "2.20.2")
    assert te.INSTALL in line and "no PyTorch part" in line
    (line,) = found("2.20.2", "2.19.0", None, "2.20.2")
    assert "transformer-engine-torch 2.19.0" in line and "pip install" in line
    (line,) = found("2.20.2", "2.20.2", "2.20.2", None)
    assert "core_cu13" in line and "CUDA 13.0" in line and "cu12" in line
    (line,) = found("2.20.2", "2.20.2", None, "2.20.2", cudnn=(9, 8, 1))
    assert "needs cuDNN 9.12.0 and finds 9.8.1" in line and "nvidia-cudnn-cu13" in line
    (line,) = found("2.20.2", "2.20.2", None, "2.20.2", cuda=None)
    assert "needs a PyTorch built for CUDA" in line
    facts = doctor.examine()
    assert facts["optional"]["transformer-engine"]["install"] == te.INSTALL


def test_the_comparison_has_variants_of_ours_on_it():
    chosen = {v.name: v for v in choose(True, ["te:", "TE"])}
    for name in ("fp8, te:current", "fp8, te:delayed", "fp8-lean, te:current", "TE current"):
        assert chosen[name].needs == (("transformer-engine", "2.20.2"),)
        assert not chosen[name].preset  # its memory is measured, not planned
