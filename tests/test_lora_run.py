"""Runs with [lora]: adapters on a folder of FP8 files, their checkpoints, and what is exported."""

import sys
from dataclasses import replace

import pytest
import torch
from released_files import Files, read_all, same, small_config
from test_fp8_training import run_of
from test_frozen import SIZES
from tiny_run import tiny_run, write_text

import ottava
from ottava import prepare
from ottava.cli import main
from ottava.config import ConfigError
from ottava.kernels.frozen import FrozenParameter
from ottava.layers.adapters import ExpertWrapper
from ottava.models.load import load_model, skeleton
from ottava.train.trainer import Trainer

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `released` files and `text.txt`, read only."""
    folder = tmp_path_factory.mktemp("lora-run")
    Files(small_config(**SIZES | {"vocab_size": 272, "hidden_size": 128})).write(
        folder / "released"
    )
    write_text(folder)
    return folder


def lora_run(home, out, preset="fp8", *, experts=True, **sections):
    """A run with adapters of rank 4 that writes to `out`."""
    defaults = {
        "lora": {"rank": 4, "alpha": 8.0, "experts": experts},
        "optimizer": {"lr": 4e-2},
        "monitor": {"every": 2},
    }
    layout = sections.pop("layout", "released")
    merged = {name: values | sections.pop(name, {}) for name, values in defaults.items()}
    return replace(run_of(home, preset, layout, **merged, **sections), out=str(out)).check()


@pytest.mark.parametrize("preset", ["fp8-lean", "amp"])
def test_adapters_train_and_the_base_stays(home, tmp_path, preset):
    policy = {"policy": "mimo" if preset != "amp" else "default"}
    trainer = Trainer(lora_run(home, tmp_path / "run", preset, precision=policy))
    model = trainer.model
    held = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    codes = [p for p in model.parameters() if isinstance(p, FrozenParameter)]
    assert len(codes) > 10 and all(p.element_size() == 1 for p in codes)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    begun = [p.detach() for n, p in model.named_parameters() if "lora_A" in n]
    assert all((p.to(torch.float8_e4m3fn).float() != p).float().mean() > 0.8 for p in begun)
    assert sum(isinstance(m, ExpertWrapper) for m in model.modules()) == 2
    first = trainer.step_once().loss
    losses = [trainer.step_once().loss for _ in range(7)]
    assert sum(losses[-3:]) / 3 < first - 0.15, losses
    for name, before in held.items():
        p = model.get_parameter(name).detach()
        assert same(p, before) if p.dtype == before.dtype else False, name


def test_a_checkpoint_holds_adapters_alone_and_continues(home, tmp_path):
    def run(steps, out):
        changes = {
            "train": {"steps": steps, "checkpoint_every": 2},
            "optimizer": {"schedule": "constant"},
        }
        return lora_run(home, tmp_path / out, **changes)

    whole = Trainer(run(4, "whole")).run(quiet=True)
    Trainer(run(2, "part")).run(quiet=True)
    again = Trainer(run(4, "part"))
    assert again.step == 2
    assert again.run(quiet=True).loss == whole.loss
    stored = read_all(tmp_path / "part/checkpoints/step-00000004")
    weights = [n for n in stored if n.endswith(".weight")]
    assert weights and all("lora_" in n for n in weights)
    size = (tmp_path / "part/checkpoints/step-00000004/model.safetensors").stat().st_size
    adapters = sum(p.numel() for p in again.model.parameters() if p.requires_grad)
    assert size < 4 * adapters + 10_000


def test_exported_as_peft_reads_it_and_merged(home, tmp_path, capsys):
    trainer = Trainer(lora_run(home, tmp_path / "run", train={"steps": 3}))
    trainer.run(quiet=True)

    def export(out, *options):
        capsys.readouterr()
        code = main(["export", str(tmp_path / "run"), str(tmp_path / out), *options])
        assert code == 0, capsys.readouterr().err

    export("adapter", "--format", "adapter")
    overrides = {"num_nextn_predict_layers": 1}
    base = skeleton(str(home / "released"), overrides=overrides)
    base = ottava.load_fp8(home / "released", base, "released")
    ours = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    own = dict(trainer.model.named_parameters())
    theirs = {
        n.removeprefix("base_model.model."): p for n, p in ours.named_parameters() if "lora_" in n
    }
    assert theirs.keys() == {n for n in own if "lora_" in n}
    assert all(torch.equal(p, own[n]) for n, p in theirs.items())
    assert any(p.abs().max() > 0 for n, p in theirs.items() if "lora_B" in n)
    wanted = ours.merge_and_unload().state_dict()
    export("fp32", "--dtype", "fp32")
    got = load_model(str(tmp_path / "fp32")).state_dict()
    assert got.keys() == wanted.keys() and all(torch.equal(got[n], wanted[n]) for n in wanted)
    export("released", "--format", "released")
    again = skeleton(str(tmp_path / "released"), overrides=overrides)
    again = ottava.load_fp8(tmp_path / "released", again, "released").state_dict()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert 0 < (again[name] - wanted[name]).norm() < 0.04 * wanted[name].norm()


def test_a_base_in_bf16(home, tmp_path):
    base = skeleton(str(home / "released"), overrides={"num_nextn_predict_layers": 1})
    base = ottava.load_fp8(home / "released", base, "released").to(torch.bfloat16)
    base.save_pretrained(tmp_path / "plain")
    trainer = Trainer(
        lora_run(home, tmp_path / "run", layout="auto", model={"path": str(tmp_path / "plain")})
    )
    assert trainer.step_once().stepped
    frozen = {p.dtype for n, p in trainer.model.named_parameters() if "lora_" not in n}
    assert frozen == {torch.bfloat16, torch.float32}  # the router


def test_wrong_requests_are_one_line(home, tmp_path, capsys, monkeypatch):
    for changes, says in (
        ({"lora": {"rank": 0}}, "does nothing with lora.rank=0"),
        ({"lora": {"dropout": 0.1}}, "adapters of experts take none"),
    ):
        with pytest.raises(ConfigError, match=says):
            lora_run(home, tmp_path, **changes)
    for changes, says in (  # what can be planned, but not trained
        ({"model": {"random_init": True}, "layout": "auto"}, "give it as model.path"),
        ({"distributed": {"strategy": "ddp"}}, "one process as yet"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepare.ready_model(lora_run(home, tmp_path, **changes), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"lora.targets: .*q_projj") as error:
        Trainer(lora_run(home, tmp_path, experts=False, lora={"targets": ["q_projj"]}))
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="pip install peft"):
        Trainer(lora_run(home, tmp_path))
    monkeypatch.undo()
    Trainer(tiny_run(tmp_path, "amp", steps=3)).run(quiet=True)
    code = main(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--format", "adapter"])
    assert code == 2 and "is no run with [lora]" in capsys.readouterr().err
