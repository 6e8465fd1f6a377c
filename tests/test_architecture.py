"""The import levels, counted from the source: a file imports only from lower levels or beside it.

Imports inside functions count, those for type checkers alone do not.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "ottava"
LEVELS = {
    "numerics": 0, "schema": 1, "kernels": 1,
    "stretch": 1.5, "sections": 1.6, "config": 1.7,
    "layers": 2, "optim": 2, "models": 2, "recompute": 2.5, "resolve": 2.8, "amp": 3, "quantize": 3,
    "convert": 3, "frozen": 3, "lora": 3.1, "prepare": 3.2, "distributed": 4, "monitor": 4, "planner": 4.5,
    "train": 5, "integrations": 5.5, "bench": 6, "doctor": 6.5, "terminal": 6.8, "commands": 6.9, "plan_command": 6.9, "cli": 7, "__main__": 8,
    "__init__": 9,
}  # fmt: skip
ONLY = {  # a library and the places that may import it
    "triton": ("kernels/op.py",),
    "transformer_engine": ("layers/te.py", "bench/peers"),
    "deepspeed": ("distributed/deepspeed.py",),
    "transformers": ("models/", "layers/attention.py", "train/", "integrations/"),
    "torchao": ("bench/peers",),
}  # fmt: skip
# Models hold no 8-bit code; beside them lie the checkpoints that do.
PLAIN = ("mimo", "blocks", "moe", "mtp", "attention_core", "config", "presets")
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    """The module in a file, without the package's own name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {name_of(path) for path in FILES}


def imported(path: pathlib.Path):
    """The dotted parts of every name that a file imports, from "ottava" on where it is our own."""
    tree = ast.parse(path.read_text())
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    package = ("ottava", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            full = [*base, *(node.module.split(".") if node.module else [])]
            yield from ([*full, a.name] for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".") for a in node.names)


def imports(path: pathlib.Path):
    """(level-1 package within ottava or an outside top-level name, is_inside) of every import."""
    for name in imported(path):
        yield (name[1], True) if name[0] == "ottava" and len(name) > 1 else (name[0], False)


def neighbours(path: pathlib.Path) -> set[str]:
    """The modules of ours that a file imports."""
    own = (".".join(n[1:]) for n in imported(path) if n[0] == "ottava")
    return {n if n in MODULES else n.rpartition(".")[0] for n in own} & MODULES


def level_of(path: pathlib.Path) -> tuple[str, int]:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return part, LEVELS[part]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path):
    part, level = level_of(path)
    for name, inside in imports(path):
        relative = str(path.relative_to(ROOT))
        if inside:
            assert LEVELS[name] < level or name == part, f"{relative} imports {name}"
        elif name in ONLY:
            assert relative.startswith(ONLY[name]), f"{relative} imports {name}"


def test_no_file_imports_itself_through_others():
    below = {name_of(p): neighbours(p) - {name_of(p)} for p in FILES}
    while True:  # take away what imports nothing that is left, and what nothing left imports
        needed = set().union(*below.values())
        loose = [n for n in below if n not in needed or not below[n] & below.keys()]
        if not loose:
            break
        for name in loose:
            del below[name]
    assert not below, {name: sorted(needs & below.keys()) for name, needs in below.items()}


def test_models_hold_no_8_bit_code():
    for stem in PLAIN:
        own = neighbours(ROOT / "models" / f"{stem}.py")
        assert not [n for n in own if n.startswith(("kernels.", "layers.", "numerics."))], stem


def test_every_mark_on_an_object_of_others_is_named_in_contributing():
    found = [set(re.findall(r"_ottava_[a-z0-9_]*[a-z0-9]", p.read_text())) for p in FILES]
    named = re.findall(r"_ottava_[a-z0-9_]*[a-z0-9]", (ROOT.parent / "CONTRIBUTING.md").read_text())
    assert set().union(*found) == set(named)


def test_a_kernel_is_one_file_but_for_those_that_contributing_names():
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    exceptions = text[text.index("Exceptions: ") : text.index("**Hops.**")]
    named = set(re.findall(r"`(\w+\.py)`", exceptions)) - {"norm.py"}
    sources = {p.name: p.read_text() for p in FILES if p.parent.name == "kernels"}
    halves = {n for n, s in sources.items() if ("@triton.jit" in s) != ("= operator(" in s)}
    assert halves == named | {"attention.py"}


def test_no_file_is_called_utils():
    banned = {"utils", "common", "helpers", "core", "misc"}
    assert not [p for p in FILES if p.stem in banned or p.stem.endswith(("_v2", "_utils"))]


def test_files_and_functions_stay_readable():
    long_files = [p.name for p in FILES if "kernels" not in p.parts and
                  len(p.read_text().splitlines()) > 400]  # fmt: skip
    long_functions = [
        f"{p.name}:{node.name}"
        for p in FILES
        if "kernels" not in p.parts
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 65
    ]
    assert not long_files and not long_functions
