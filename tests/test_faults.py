"""Faults injected into real runs: the short list of `make faults`, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ottava.bench.fault_list import faults
from ottava.bench.faults import main

ROOT = Path(__file__).parents[1]


def test_some_of_them_are_injected_and_survived(tmp_path):
    names = ["broken-line", "nan-before-save", "bit-flip"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ottava.bench.faults", *names, "--out", str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False,
                          timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    raw = json.loads((tmp_path / "raw" / "faults.json").read_text())
    rows = {r["fault"]: r for r in raw["rows"]}
    assert list(rows) == names and not [r for r in rows.values() if r["wrong"]]
    assert "broken JSON" in rows["broken-line"]["detected"] and rows["broken-line"]["lost"] == 0
    assert rows["broken-line"]["outcome"].startswith("refused, done; same bits")
    assert "went back from step 35 to 30" in rows["nan-before-save"]["outcome"]
    assert "an older checkpoint was taken" in rows["bit-flip"]["outcome"]
    assert "damaged-checkpoint" in rows["bit-flip"]["detected"]
    page = (tmp_path / "faults.md").read_text()
    assert page.count("\n| ") == len(rows) + 1 and "WRONG" not in page


def test_names_are_unique_and_the_short_list_is_a_part():
    names = [f.name for f in faults(20)]
    assert len(set(names)) == len(names) and 5 < sum(f.quick for f in faults(4)) < len(names)


def test_an_unknown_fault_is_refused(capsys):
    with pytest.raises(SystemExit) as e:
        main(["nonsense"])
    assert e.value.code == 2 and "there are nan-in-data" in capsys.readouterr().err
