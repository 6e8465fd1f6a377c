"""The pages under docs/: every command and every snippet runs as it stands, in the page's order.

docs/integrations.md has its own test. Blocks: `python` is run, with one set of names for a page;
`bash` is run line by line. What installs, needs several GPUs or takes long (compare, sweep, plan
of a whole model; they run with OTTAVA_ALL=1) is checked as far as it can be: files, keys, options, targets. `toml`
with a title becomes that file, without one its keys are checked; `text` is shown only.
"""

import json
import os
import pathlib
import re
import shlex
import sys
import tomllib

import pytest
import torch
from small_tokenizer import CHATML, build
from typer.main import get_command

from ottava import cli, sections
from ottava.cli import main
from ottava.config import Run, load_run, run_of_model
from ottava.distributed.ds_config import apply, read
from ottava.numerics.recipe import RECIPES
from ottava.schema import build as build_section
from ottava.sections import TRACKERS

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402  (docs/generate.py)

PAGES = sorted(p.name for p in DOCS.glob("*.md") if p.name != "integrations.md")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SMALL = """
[model]
name = "dense-100m"
[model.overrides]
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
num_hidden_layers = 1
intermediate_size = 64
vocab_size = 272
[data]
source = "notes.md"
sequence_length = 16
[train]
preset = "fp8"
steps = 3
micro_batch = 2
"""


def blocks(page):
    """(language, title, text) of each fenced block, in order."""
    text = (DOCS / page).read_text()
    for head, body in re.findall(r"^```([^\n]*)\n(.*?)^```", text, flags=re.M | re.S):
        language, _, rest = head.partition(" ")
        yield language, "".join(re.findall(r'title="([^"]+)"', rest)), body


def command(line):
    """Run one line of a shell, or check what cannot be run here."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["pip", "install"]:
        for word in words[2:]:
            extras = re.fullmatch(r"ottava\[(.*)\]", word)
            assert extras is None or set(extras[1].split(",")) <= EXTRAS.keys(), line
        return
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{w}:", makefile, re.M) for w in words[1:] if "=" not in w), line
        return
    if words[0] in ("torchrun", "deepspeed", "accelerate"):
        at = words.index("ottava")
        assert words[at + 1] == "train", line
        given = [w for w in words[at + 3 :] if re.match(r"\w+\.\w+=", w)]
        if "--deepspeed" in words:
            path = words[words.index("--deepspeed") + 1]
            given += ["distributed.strategy=deepspeed", f"distributed.deepspeed={path}"]
            apply(read(path), load_run(words[at + 2], given), world=8)
        assert load_run(words[at + 2], given)
        return
    if words[0] == "python":
        assert (ROOT / words[1]).is_file(), line
        return
    assert words[0] == "ottava", line
    known = get_command(cli.app).commands[words[1]]
    options = {o for p in known.params for o in (*p.opts, *p.secondary_opts)}
    assert {w for w in words if w.startswith("--")} <= options, line
    if any("path/to" in w for w in words):  # the reader's own
        return
    if words[1] == "plan" and "--model" in words and "OTTAVA_ALL" not in os.environ:
        run = run_of_model(
            words[words.index("--model") + 1], [w for w in words if re.match(r"\w+\.\w+=", w)]
        )
        run.with_preset(words[words.index("--preset") + 1]).check()
        return
    if words[1] in ("compare", "sweep") and "OTTAVA_ALL" not in os.environ:
        run = load_run(words[2], [w for w in words[3:] if re.match(r"\w+\.", w)])
        for preset in (
            words[words.index("--presets") + 1].split(",") if "--presets" in words else ()
        ):
            run.with_preset(preset).check()
        return
    assert main(words[1:]) == 0, line


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_as_it_stands(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "chat-tokenizer", CHATML)
    (tmp_path / "run.toml").write_text(SMALL)
    (tmp_path / "notes.md").write_text("An octave is eight notes, eight bits are a byte. " * 40)
    (tmp_path / "runs").symlink_to(ROOT / "runs")
    names = {"__name__": "page"}
    for _, title, text in blocks(page):
        if title:
            (tmp_path / title).write_text(text)
    for language, title, text in blocks(page):
        if language == "python":
            exec(compile(text, f"{page}: {text.splitlines()[0]}", "exec"), names)
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    command(line)
        elif language == "toml" and not title:
            build_section(Run, tomllib.loads(text))
        else:
            assert title or language == "text", f"{page}: {language}"
    assert torch.is_grad_enabled()


def test_every_page_is_in_the_site_and_links_lead_somewhere():
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert re.search(rf": {page.name}$", nav, re.M), page.name
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert "://" in target or (DOCS / target).exists(), f"{page.name}: {target}"


def test_what_is_made_from_the_code_is_what_the_code_says():
    for name, text in generate.pages().items():
        assert (DOCS / name).read_text() == text, f"docs/{name}: run python docs/generate.py"


def test_the_table_of_memory_is_what_the_planner_says():
    """One cell of it, the quickest; `python docs/generate.py --plan` plans all of them."""
    said = json.loads((DOCS / "gpu.json").read_text())["dense-100m"]["fp8-lean"]
    assert generate.planned("dense-100m", 2048, "fp8-lean") == pytest.approx(said, abs=0.02), (
        "the planner says otherwise now: run python docs/generate.py --plan"
    )


def test_recipes_and_trackers_that_exist_are_explained():
    text = (DOCS / "recipes.md").read_text()
    assert [r for r in RECIPES if f"| `{r}` |" not in text] == []
    assert set(re.findall(r"^\| `(\w+)` \|", (DOCS / "evaluation.md").read_text(), re.M)) == {
        *TRACKERS
    }


def test_the_wrong_answer_would_be_noticed(tmp_path, monkeypatch):
    """The checks above fail where they should."""
    (tmp_path / "run.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    for line in (
        "pip install 'ottava[nothing]'", "make nothing", "ottava nothing", "ottava train none.toml",
        "torchrun -m ottava train run.toml train.stepz=1", "python nothing.py",
        "ottava eval path/to/x --nothing", "ottava compare run.toml --presets fp9",
    ):  # fmt: skip
        with pytest.raises((AssertionError, KeyError, ValueError)):
            command(line)


def test_keys_and_presets_that_pages_name_exist():
    known = {name: cls for name, cls in vars(sections).items() if isinstance(cls, type)}
    tables = {n.lower(): set(c.__dataclass_fields__) for n, c in known.items()
              if hasattr(c, "__dataclass_fields__")}  # fmt: skip
    for page in DOCS.glob("*.md"):
        for section, name in re.findall(r"`(\w+)\.(\w+)(?:\s?=[^`]*)?`", page.read_text()):
            if section in tables:
                assert name in tables[section], f"{page.name}: {section}.{name}"
