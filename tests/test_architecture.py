"""The import levels, counted from the source: a file imports only from lower levels or beside it."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "ottava"
LEVELS = {
    "numerics": 0, "schema": 1, "kernels": 1, "lifetimes": 1, "presets": 1.5, "allocator": 1.5,
    "stretch": 1.5, "sections": 1.6, "config": 1.7,
    "layers": 2, "optim": 2, "models": 2, "recompute": 2.5, "amp": 3, "quantize": 3,
    "convert": 3, "prepare": 3.2, "rehearsal": 3.4, "memory": 3.6, "distributed": 4, "monitor": 4,
    "train": 5, "integrations": 5, "bench": 6, "doctor": 6.5, "cli": 7, "__main__": 8,
    "__init__": 9,
}  # fmt: skip
ONLY = {  # a library and the places that may import it
    "triton": ("kernels/",),
    "transformer_engine": ("layers/te.py", "bench/peers"),
    "deepspeed": ("distributed/deepspeed.py",),
    "transformers": ("models/", "layers/attention.py", "layers/hf_attention.py", "layers/head.py",
                     "train/", "integrations/"),
    "torchao": ("bench/peers",),
}  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: pathlib.Path):
    """(level-1 package within ottava or an outside top-level name, is_inside) of every import."""
    package = ("ottava", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            full = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*full, a.name] for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".") for a in node.names]
        else:
            continue
        for name in names:
            yield (name[1], True) if name[0] == "ottava" and len(name) > 1 else (name[0], False)


def level_of(path: pathlib.Path) -> tuple[str, int]:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return part, LEVELS[part]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path):
    part, level = level_of(path)
    for name, inside in imports(path):
        relative = str(path.relative_to(ROOT))
        if inside and name in LEVELS:
            assert LEVELS[name] < level or name == part, f"{relative} imports {name}"
        elif name in ONLY:
            assert relative.startswith(ONLY[name]), f"{relative} imports {name}"


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
