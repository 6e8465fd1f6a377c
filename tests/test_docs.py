"""What the README says is run or compared: its commands, its Python, its tree, its table's source."""

import re
import shlex

import pytest
import torch
from readme_tree import ROOT, tree
from torch import nn
from typer.testing import CliRunner

import ottava
from ottava import cli
from ottava.config import load_run

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.S)


def test_the_tree_is_the_tree():
    assert f"```\n{tree()}\n```" in README, "run: python tests/readme_tree.py"


def test_the_four_lines_of_python_run():
    code = next(text for kind, text in BLOCKS if kind == "python")
    assert len(code.strip().splitlines()) == 4
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)).bfloat16()
    names = {"model": model}
    exec(code, names)
    model, opt = names["model"], names["opt"]
    before = model(torch.ones(16, 64, dtype=torch.bfloat16)).square().mean()
    before.backward()
    opt.step()
    opt.zero_grad()
    assert model(torch.ones(16, 64, dtype=torch.bfloat16)).square().mean() != before
    assert isinstance(names["handle"], type(opt.fused)) and ottava.plan(model).num_fp8 == 1


def commands() -> list[list[str]]:
    block = next(text for _, text in BLOCKS if "ottava doctor" in text)
    return [shlex.split(line.split("#")[0])[1:] for line in block.strip().splitlines()]


def test_every_command_of_the_readme_exists():
    named = {c[0] for c in commands()}
    assert named >= {"doctor", "plan", "compare", "train", "report", "diagnose", "export"}
    for command in named:
        assert CliRunner().invoke(cli.app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_quick_commands_run_as_written(command):
    arguments = next(c for c in commands() if c[0] == command)
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output


def test_the_first_screen_has_the_measured_table_and_no_gap_is_left():
    first = "\n".join(README.splitlines()[:30])
    assert "tok/s" in first and "peak GiB" in first and "benchmarks/h200.md" in first
    assert re.findall(r"<!-- (.*?) -->", README) == ["tree", "end of tree"]
    for target in ("demo", "test"):
        assert re.search(rf"`make {target}` \d+ min", README), target


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_nothing_points_outside_the_project():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("ottava/**/*.py"), *ROOT.glob("tests/*.py")]:
        text = path.read_text()
        assert ".." + "/shared" not in text, path
        assert "/wo" + "rk/" not in text, path


def test_every_mark_is_named():
    named = set(re.findall(r"_ottava_\w+", (ROOT / "CONTRIBUTING.md").read_text()))
    code = "".join(p.read_text() for p in ROOT.glob("ottava/**/*.py"))
    assert set(re.findall(r"_ottava_\w+", code)) == named, "CONTRIBUTING.md, Marks"


def test_run_files_are_right():
    paths = sorted((ROOT / "runs").glob("*.toml"))
    assert paths
    for path in paths:
        load_run(path)
