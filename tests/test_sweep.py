"""A sweep of learning rates: same data, an honest table, the best rate, and a page."""

import json
import math

import pytest
from tiny_run import tiny_run

from ottava.bench import sweep as sweeping
from ottava.bench.sweep import sweep, sweep_cells, sweep_page, variant
from ottava.cli import main
from ottava.config import ConfigError
from ottava.schema import to_dict
from ottava.train.trainer import Trainer


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    run = tiny_run(folder, "amp", steps=14, optimizer={"warmup_steps": 0})
    return run, sweep(run, [3e-3, 1e-6, 1e30], ["amp", "fp8"], quiet=True)


def test_every_rate_sees_the_same_batches_and_the_best_one_wins(swept):
    _run, result = swept
    rows = {(r["preset"], r["lr"]): r for r in result["rows"]}
    assert list(rows) == [(p, lr) for p in ("amp", "fp8") for lr in (1e-6, 3e-3, 1e30)]
    assert rows["amp", 1e-6]["losses"][0] == rows["amp", 3e-3]["losses"][0]
    assert result["best"] == {"amp": 3e-3, "fp8": 3e-3}
    assert "fp8 wants 1 times amp's rate (within 0.5 to 1)" in result["verdict"]
    good = rows["amp", 3e-3]
    assert good["status"] == "ok" and good["validation_loss"] < rows["amp", 1e-6]["validation_loss"]
    assert len(good["losses"]) == 14 and good["skipped"] == 0
    for preset in ("amp", "fp8"):
        lost = rows[preset, 1e30]
        assert lost["status"] in ("failed", "diverged") and lost["reason"]


def test_a_rate_trains_as_it_would_alone(swept):
    run, result = swept
    alone = Trainer(variant(run, "fp8", 3e-3))
    assert [alone.step_once().loss for _ in range(3)] == result["rows"][4]["losses"][:3]


def test_the_files_hold_what_was_found_and_nothing_else_is_left(swept):
    run, result = swept
    from pathlib import Path

    folder = Path(run.out)
    stored = json.loads((folder / "sweep.json").read_text())
    assert stored["best"] == result["best"] and len(stored["rows"]) == 6
    page = (folder / "sweep.html").read_text()
    assert "lr=0.003" in page and "log10 of lr" in page and "<script" not in page
    assert not list(folder.rglob("checkpoints"))
    _head, cells = sweep_cells(result)
    assert [c[-1] for c in cells if c[1] == "0.003"] == ["best", "best"]


def test_hostile_names_stay_text_and_no_number_is_a_problem(swept):
    _, result = swept
    rows = [{**r, "validation_loss": math.nan, "final_loss": math.nan} for r in result["rows"]]
    page = sweep_page({**result, "name": "<script>alert(1)</script>", "rows": rows})
    assert "<script" not in page and "&lt;script&gt;" in page
    assert sweeping._best(rows) is None


def test_wrong_requests_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    run = tiny_run(tmp_path)
    monkeypatch.setattr(sweeping, "Trainer", None)
    with pytest.raises(ConfigError, match="at least two"):
        sweep(run, [1e-3, 1e-3])
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        sweep(run, [1e-3, -1.0])
    with pytest.raises(ConfigError, match=r"train\.preset"):
        sweep(run, [1e-3, 1e-4], ["fp9"])
    file = tmp_path / "run.toml"
    lines = []
    for section, values in to_dict(run).items():
        if section == "data":
            lines += ["[data]", f"source = {json.dumps(values['source'])}", "[model]",
                      'name = "demo"']  # fmt: skip
    file.write_text("\n".join(lines))
    assert main(["sweep", str(file), "--lr", "fast"]) == 2
    assert "--lr: 'fast' is not a list of numbers" in capsys.readouterr().err
    assert main(["sweep", str(file), "--lr", "1e-3"]) == 2
    assert "at least two learning rates" in capsys.readouterr().err


def test_the_command_prints_the_table(tmp_path, monkeypatch, capsys, swept):
    _, result = swept
    monkeypatch.setattr(sweeping, "sweep", lambda *a, **k: result)
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "demo"\n')
    assert main(["sweep", str(file), "--lr", "1e-3,3e-3"]) == 0
    out = capsys.readouterr().out
    assert "validation loss" in out and "best" in out and "fp8 wants 1 times" in out
    assert main(["sweep", str(file), "--lr", "1e-3,3e-3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["fp8"] == 3e-3
