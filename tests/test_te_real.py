"""The stand-in for Transformer Engine against the real one, read from its source where it is installed.

Nothing is imported, so that this works on machines without a GPU too.
"""

import ast
import importlib.metadata
import importlib.util
import pathlib

import pytest

FAKE = pathlib.Path(__file__).parent / "fake_te" / "transformer_engine"
WHERE = {
    "Linear": "pytorch/module/linear.py",
    "GroupedLinear": "pytorch/module/grouped_linear.py",
    "autocast": "pytorch/quantization.py",
    "is_fp8_available": "pytorch/quantization.py",
    "is_mxfp8_available": "pytorch/quantization.py",
    "is_fp8_block_scaling_available": "pytorch/quantization.py",
    "DelayedScalingRecipeState": "pytorch/quantization.py",
    "DelayedScaling": "common/recipe/__init__.py",
    "Float8CurrentScaling": "common/recipe/__init__.py",
    "Float8BlockScaling": "common/recipe/__init__.py",
    "MXFP8BlockScaling": "common/recipe/__init__.py",
}


def real() -> pathlib.Path:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None or "fake_te" in spec.origin:
        pytest.skip("transformer-engine is not installed")
    return pathlib.Path(spec.origin).parent


def definitions(folder: pathlib.Path) -> dict[str, ast.AST]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name] = node
    return found


def arguments(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """(name, default as written) of every argument, self aside."""
    a = function.args
    ordered = [*a.posonlyargs, *a.args]
    defaults = [""] * (len(ordered) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
    out = list(zip((x.arg for x in ordered), defaults, strict=True))
    keywords = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    out += [(x.arg, "" if d is None else ast.unparse(d)) for x, d in keywords]
    return [pair for pair in out if pair[0] not in ("self", "cls")]


def shape(node: ast.AST) -> dict[str, list]:
    """Signatures of a function, or of a class's __init__ and forward, and a dataclass' fields."""
    if isinstance(node, ast.FunctionDef):
        return {"": arguments(node)}
    methods = {n.name: arguments(n) for n in node.body if isinstance(n, ast.FunctionDef)}
    out = {name: methods[name] for name in ("__init__", "forward") if name in methods}
    fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
    return {**out, "fields": fields} if "__init__" not in out else out


@pytest.mark.parametrize("name", WHERE)
def test_signatures_of_the_stand_in_are_the_real_ones(name):
    source = ast.parse((real() / WHERE[name]).read_text())
    theirs = next(n for n in source.body if getattr(n, "name", None) == name)
    ours = definitions(FAKE)[name]
    for what, expected in shape(theirs).items():
        assert shape(ours)[what] == expected, what


def test_what_is_reached_into_is_there():
    """Names inside Transformer Engine that layers/te.py relies on."""
    base = (real() / "pytorch/module/base.py").read_text()
    state = (real() / "pytorch/quantization.py").read_text()
    for needed in ("self.fp8_meta = {}", "def init_fp8_metadata(self, num_gemms: int = 1)"):
        assert needed in base
    assert '"scaling_fwd"' in base and '"scaling_bwd"' in base
    for needed in (
        "autocast_depth: int = 0", "quantization_state = FP8GlobalState()",
        "self.scale = torch.ones(", "self.amax_history = torch.zeros(",
        "def is_fp8_enabled(cls)",
    ):  # fmt: skip
        assert needed in state
    linear = (real() / "pytorch/module/linear.py").read_text()
    assert 'self.weight_names = ["weight"]' in linear and 'device == "meta"' in linear


def test_the_version_is_the_one_that_this_was_written_for():
    real()
    from ottava.layers.te import WRITTEN_FOR

    try:
        assert importlib.metadata.version("transformer-engine") == WRITTEN_FOR
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("a source tree, not an installation")
