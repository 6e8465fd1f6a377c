"""On a machine without Triton the package imports, trains on the CPU, and says what is missing."""

import subprocess
import sys

CODE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
import torch
import ottava
import ottava.cli
from ottava.kernels import op
from ottava.kernels.codes import encode
assert not op.HAS_TRITON
model = ottava.convert(torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64)))
opt = ottava.AdamW(model.parameters(), lr=1e-3, master="split16", states="8bit")
model(torch.randn(16, 64)).square().mean().backward()
opt.step()
try:
    encode[(1,)]()
except RuntimeError as error:
    print(error)
"""


def test_the_package_works_and_a_kernel_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout
