"""The README's file tree, from the first line of every module: `python tests/readme_tree.py` prints it."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = {
    "numerics": "what a number format, a recipe, a plan is", "kernels": "contract, reference, Triton, dispatch",
    "layers": "modules that compute and keep in 8 bits", "optim": "AdamW on split masters, scaling, EMA",
    "models": "plain PyTorch, no FP8 inside; FP8 checkpoints", "distributed": "how ranks work together",
    "monitor": "what a run says of itself", "train": "data, checkpoints, the loop",
    "planner": "bytes and times of a step, before anything is allocated",
    "integrations": "inside other libraries", "bench": "comparisons and reports",
}  # fmt: skip


def purpose(path: pathlib.Path) -> str:
    """The first sentence of a module's docstring, cut at 92 characters."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = re.split(r"(?<=[.:;])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".:;")
    return line if len(line) <= 92 else line[:89].rsplit(" ", 1)[0] + " ..."


def tree() -> str:
    """The package as an indented list, a line a file."""
    out = ["ottava/"]
    package = ROOT / "ottava"
    for path in sorted(package.glob("*.py")):
        if not path.name.startswith("__"):
            out.append(f"  {path.name:22}{purpose(path)}")
    for folder in _FOLDERS:
        files = [p for p in sorted((package / folder).glob("*.py")) if p.name != "__init__.py"]
        if files:
            out.append(f"  {folder + '/':22}{_FOLDERS[folder]}")
            out += [f"    {p.name:20}{purpose(p)}" for p in files]
    out.append("runs/*.toml   benchmarks/   tests/   LOG.md   CONTRIBUTING.md   Makefile")
    return "\n".join(out)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    block = f"<!-- tree -->\n```\n{tree()}\n```\n<!-- end of tree -->"
    text = readme.read_text()
    pattern = r"<!-- tree -->(.*<!-- end of tree -->)?"
    readme.write_text(re.sub(pattern, lambda _: block, text, count=1, flags=re.S))
