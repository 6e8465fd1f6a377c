"""The command line: exit codes, one line per error, JSON where a program reads it."""

import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from ottava.cli import DONE, FAILED, REFUSED, main
from ottava.monitor.metrics import MetricsWriter

SMALL = {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]}


@pytest.fixture
def file(tmp_path):
    """A tiny run on random tokens, in its own folder."""
    path = tmp_path / "toy.toml"
    path.write_text(f"""
out = "{tmp_path}/out"
[model]
name = "dense-100m"
[model.overrides]
hidden_size = 64
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 32
num_hidden_layers = 1
intermediate_size = 128
vocab_size = 272
[data]
source = "random"
sequence_length = 32
[train]
preset = "fp8"
steps = 2
micro_batch = 2
eval_batches = 1
""")
    return path


def run(capsys, *arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command."""
    code = main([str(a) for a in arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


def refused(capsys, *arguments, code=REFUSED) -> str:
    """The one line on stderr with which this is refused."""
    got, out, err = run(capsys, *arguments)
    assert got == code and out == ""
    assert err.startswith("ottava: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


COMMANDS = ("doctor", "plan", "compare", "train", "report", "diagnose", "export")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == DONE and "--json" in out and command in out


def test_it_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "ottava"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == DONE and all(name in done.stdout for name in COMMANDS)
    done = subprocess.run(
        [*command, "train", str(tmp_path / "no.toml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == REFUSED and done.stdout == ""
    assert done.stderr == f"ottava: {tmp_path / 'no.toml'}: no such run file\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train"], "Missing argument"),
        (["train", "a.toml", "--fast"], "No such option"),
        (["export", "a"], "Missing argument"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, arguments, says):
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.prest=fp8", "train.prest: unknown key; did you mean train.preset?"),
        ("trian.steps=1", "did you mean train?"),
        ("train.steps=many", "train.steps: 'many' must be a whole number"),
        ("train.preset=fp7", "(did you mean 'fp8'?)"),
        ("precision.start_fp8_at=2", "out of range"),
        ("precision.recipe=storage", "use train.preset=storage"),
    ],
)
def test_a_wrong_run_is_refused_before_anything_else(capsys, file, command, override, says):
    assert says in refused(capsys, command, file, override)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.name=mimo-v2-nanno", "did you mean 'mimo-v2-nano'"),
        ("model.overrides.hidden_sise=3", "did you mean 'hidden_size'"),
        ("data.source=/nowhere/a.txt", "no such file or folder"),
        ("data.source=stdlb", "did you mean 'stdlib'?"),
        ("precision.keep=*", "FP8"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(capsys, file, override, says):
    assert says in refused(capsys, "train", file, override)


def test_bad_data_is_refused_in_one_line(capsys, file, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    message = refused(capsys, "train", file, f"data.source={bad}")
    assert f"{bad}:2: broken JSON" in message


def test_debug_adds_the_traceback(capsys, file):
    code, _, err = run(capsys, "--debug", "train", file, "train.steps=0")
    assert code == REFUSED
    assert "Traceback" in err and err.splitlines()[-1].startswith("ottava: train.steps: 0")


def test_an_error_inside_is_a_failed_run(capsys, monkeypatch):
    from ottava import doctor

    def broken():
        raise KeyError("gone")

    monkeypatch.setattr(doctor, "examine", broken)
    assert "KeyError: 'gone'" in refused(capsys, "doctor", code=FAILED)


# ---- train, plan, compare -------------------------------------------------------------------


def test_train_runs_continues_and_says_so_in_json(capsys, file):
    code, out, err = run(capsys, "train", file, "--json")
    first = json.loads(out)
    assert code == DONE and err == ""
    assert first["step"] == 2 and first["stopped_by"] is None and math.isfinite(first["loss"])
    code, out, _ = run(capsys, "train", file, "train.steps=3", "--json")
    assert code == DONE and json.loads(out)["step"] == 3
    code, out, _ = run(capsys, "train", file, "train.steps=4")
    assert code == DONE and "continues after step 3" in out
    assert "is from another run" in refused(capsys, "train", file, "train.preset=amp")


def test_plan_shows_the_table_the_bytes_and_what_fits(capsys, file):
    code, out, _ = run(capsys, "plan", file, "--json")
    planned = json.loads(out)
    assert code == DONE and planned["fits"] is True and planned["advice"] == []
    recipes = {r["name"]: r["recipe"] for r in planned["plan"]["rows"]}
    assert recipes["lm_head"] is None and recipes["model.layers.0.mlp.up_proj"]["name"] == "tensor"
    assert sum(planned["memory"]["by_category"].values()) == planned["memory"]["peak_bytes"]
    code, out, _ = run(capsys, "plan", file, "--preset", "amp", "--gib", "0.06")
    assert code == DONE and "plain PyTorch" in out and "on cuda" in out
    assert "does not fit into 0.1 GiB" in out


def test_plan_takes_a_model_by_its_name(capsys):
    small = "model.overrides.num_hidden_layers=1"
    code, out, _ = run(capsys, "plan", "--model", "dense-100m", small, "--gib", "0.001", "--json")
    planned = json.loads(out)
    assert code == DONE and planned["memory"]["name"] == "dense-100m" and not planned["fits"]
    assert planned["advice"] == []  # the states alone are more
    assert "give a run file" in refused(capsys, "plan")
    assert "unknown name 'demmo'" in refused(capsys, "plan", "--model", "demmo", "--gib", "1")


def test_compare_prints_a_table_in_80_columns_and_writes_it(capsys, file, tmp_path):
    code, out, _ = run(capsys, "compare", file, "train.steps=4", "--presets", "amp,fp8")
    assert code == DONE and max(map(len, out.splitlines()[:5])) <= 80
    assert {line.split()[0] for line in out.splitlines()[3:5]} == {"amp", "fp8"}
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["status"] for row in result["rows"]] == ["ok", "ok"]
    assert (tmp_path / "out" / "report.html").exists()


def test_compare_refuses_before_it_trains(capsys, file):
    assert "did you mean 'fp8'" in refused(capsys, "compare", file, "--presets", "amp,fp7")
    assert "train.steps: 2 is too few" in refused(capsys, "compare", file)
    assert "no such file" in refused(capsys, "compare", file, "data.source=/nowhere/a.txt")


# ---- doctor ---------------------------------------------------------------------------------


def test_doctor_says_what_the_machine_can_do(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == DONE
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(facts["presets"]) >= {"fp32", "amp", "bf16", "fp8", "fp8-lean", "storage"}
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    code, out, _ = run(capsys, "doctor")
    assert code == DONE and "fp8-lean" in out
    assert "FP8 unit" in out or "none that torch can use" in out


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((7, 5), {"fp32", "amp-fp16"}),
        ((8, 0), {"fp32", "amp", "amp-fp16", "bf16", "storage"}),
        ((8, 6), {"fp32", "amp", "amp-fp16", "bf16", "storage"}),
        ((8, 9), {"fp32", "amp", "amp-fp16", "bf16", "fp8", "fp8-lean", "storage"}),
        ((9, 0), {"fp32", "amp", "amp-fp16", "bf16", "fp8", "fp8-lean", "storage"}),
        ((12, 0), {"fp32", "amp", "amp-fp16", "bf16", "fp8", "fp8-lean", "storage"}),
    ],
)
def test_presets_by_compute_capability(capability, native):
    from ottava.config import PRESETS
    from ottava.doctor import Gpu, preset_support

    gpu = Gpu(name="x", capability=capability, memory_gib=40.0)
    support = {name: preset_support(preset, gpu) for name, preset in PRESETS.items()}
    assert {name for name, (how, _) in support.items() if how == "native"} == native
    assert all(why for how, why in support.values() if how == "emulated")


def test_an_a100_is_sent_to_storage():
    from ottava.config import PRESETS
    from ottava.doctor import Gpu, preset_support

    gpu = Gpu(name="A100", capability=(8, 0), memory_gib=80.0)
    how, why = preset_support(PRESETS["fp8"], gpu)
    assert how == "emulated" and "no FP8 unit" in why and "use storage" in why


# ---- report, diagnose, export ---------------------------------------------------------------


@pytest.fixture
def finished(tmp_path):
    """The folder of a run that went wrong at step 30."""
    writer = MetricsWriter(tmp_path / "run")
    writer.write("start", 0, version=1, name="toy", preset="fp8", config={})
    for step in range(1, 41):
        loss = float("nan") if step == 30 else 5.0 - step / 20
        writer.write("step", step, loss=loss, stepped=step != 30, tokens=64, tok_per_s=1.0)
    writer.write("end", 40, status="done", reason="", seconds=1.0)
    writer.close()
    return tmp_path / "run"


def test_diagnose_prints_findings_and_json(capsys, finished):
    code, out, _ = run(capsys, "diagnose", finished, "--json")
    found = json.loads(out)
    assert code == DONE
    assert {f["rule"] for f in found["findings"]} == {"bad-steps"}
    code, out, _ = run(capsys, "diagnose", finished)
    assert code == DONE and out.startswith("WARNING") and "steps 30" in out and "optimizer.clip_norm=" in out


def test_diagnose_and_report_refuse_a_folder_without_a_run(capsys, tmp_path):
    assert "holds no run.jsonl" in refused(capsys, "diagnose", tmp_path)
    assert "run.jsonl" in refused(capsys, "report", tmp_path)


def test_report_writes_one_page(capsys, finished, tmp_path):
    code, out, _ = run(capsys, "report", finished, "--out", tmp_path / "page.html", "--json")
    assert code == DONE and json.loads(out) == {"report": str(tmp_path / "page.html")}
    assert "<html" in (tmp_path / "page.html").read_text().lower()


@pytest.fixture
def saved(tmp_path):
    """(a run's folder with one checkpoint, the model that it holds)."""
    from ottava.models.load import load_model
    from ottava.train.writing import save

    model = load_model("demo", overrides=SMALL, seed=1)
    save(tmp_path / "run" / "checkpoints", 7, model=model, sections={})
    return tmp_path / "run", model


def test_export_gives_a_plain_model_in_bf16(capsys, saved, tmp_path):
    from ottava.models.load import load_model

    folder, model = saved
    code, out, _ = run(capsys, "export", folder, tmp_path / "plain", "--json")
    assert code == DONE
    assert json.loads(out) == {"folder": str(tmp_path / "plain"), "step": 7, "dtype": "bf16"}
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as weights:
        kinds = {name: weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118
    assert {torch.bfloat16, torch.float32} == set(kinds.values())
    assert all("gate" in n for n, kind in kinds.items() if kind is torch.float32)  # the router
    again = load_model(str(tmp_path / "plain"), dtype=torch.bfloat16)
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name


def test_export_refuses_what_it_cannot_write(capsys, saved, tmp_path):
    folder, _ = saved
    assert "holds no checkpoint" in refused(capsys, "export", tmp_path, tmp_path / "x")
    assert "--dtype: 'fp4'" in refused(capsys, "export", folder, tmp_path / "x", "--dtype", "fp4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "is not empty" in refused(capsys, "export", folder, tmp_path / "full")
    weights = folder / "checkpoints" / "step-00000007" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "truncated" in refused(capsys, "export", folder, tmp_path / "x")
    assert not (tmp_path / "x").exists()
