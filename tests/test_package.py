"""The wheel: what is in it, that it works where nothing else of the repository is, and its extras."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, so that nothing is left in the repository."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ottava", folder / "source" / "ottava", ignore=ignored)
    shutil.copytree(ROOT / "tests", folder / "source" / "tests", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    # what `python -m build --no-isolation` asks of the backend
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    version = PROJECT["version"]
    ours = {n for n in names if not n.startswith(f"ottava-{version}.dist-info/")}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "ottava").rglob("*.py")}
    assert ours == sources | {"ottava/py.typed"}
    assert f"ottava-{version}.dist-info/licenses/LICENSE" in names
    assert wheel.name == f"ottava-{version}-py3-none-any.whl"


def test_its_metadata_names_the_command_and_the_extras(wheel):
    with zipfile.ZipFile(wheel) as files:
        info = f"ottava-{PROJECT['version']}.dist-info"
        entry = files.read(f"{info}/entry_points.txt").decode()
        metadata = files.read(f"{info}/METADATA").decode()
    assert re.search(r"^ottava = ottava\.cli:main$", entry, re.M)
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.M))
    assert extras >= {"te", "deepspeed", "data", "track", "eval", "hf", "docs", "dev", "test"}
    assert extras == set(PROJECT["optional-dependencies"])
    assert "Description-Content-Type: text/markdown" in metadata


def test_the_installed_wheel_works_away_from_the_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "import ottava, torch; from ottava.cli import main\n"
        "assert ottava.__file__.startswith(sys.argv[1]), ottava.__file__\n"
        "print(ottava.plan(torch.nn.Sequential(torch.nn.Linear(64, 64))).num_fp8)\n"
        "sys.exit(main(['--version']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "site")], cwd=tmp_path,
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"1\nottava {PROJECT['version']}\n"


def test_the_version_stands_in_one_place_more_and_agrees():
    import ottava

    assert ottava.__version__ == PROJECT["version"]


def test_every_install_line_of_the_code_names_an_extra_that_exists():
    known = set(PROJECT["optional-dependencies"])
    for path in [*ROOT.glob("ottava/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]:
        for extras in re.findall(r"ottava\[([\w,]+)\]", path.read_text()):
            assert set(extras.split(",")) <= known, f"{path}: {extras}"


def test_what_the_makefile_installs_is_what_the_extras_say():
    assert 'pip install -q -e ".[test]"' in (ROOT / "Makefile").read_text()
    assert "ottava[docs]" in PROJECT["optional-dependencies"]["dev"]
