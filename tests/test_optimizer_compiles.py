"""The optimizer's kernels compile for GPUs, on a machine without one, to what their speed needs."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ottava.kernels import adamw, gradient, split

POINTERS = dict(scale="*fp32", amax="*fp32", work="*i32", grad="*bf16", m_scale="*bf16",
                v_range="*i16", low="*fp32", grad_mul="*fp32", found_inf="*fp32", skipped="*i32",
                clock="*i32", parts="*fp32", counter="*i32", norm="*fp32", out="*fp32", codes="*u8")
WHOLE = ("step", "key", "n", "groups", "leads", "per_scale")

def compile(kernel, target, constants, **pointers):
    types, values, attributes = {}, {}, {}
    pointers = POINTERS | pointers
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], values[(i,)] = "constexpr", constants[name]
            continue
        types[name] = pointers.get(name, "i32" if name in WHOLE else "fp32")
        if name in pointers or name == "n":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    ptx = triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]
    # Codes are decoded and encoded as FP32 subnormals: flushing them would lose small weights.
    assert not re.search(r"(mul|fma)\\S*\\.ftz", ptx), kernel.__name__
    assert "global.v4" in ptx, f"{kernel.__name__}: no 16-byte access"
    return ptx

def step(master, bits, states, full, clock=False):
    return dict(MASTER=master, BITS=bits, STATES=states, LOW="none", LR_TENSOR=full, MUL=full,
                GUARD=full or clock, COUNTED=full, CLOCK=clock, MARGIN=0, LEADS=4 if full else 1, TILE=16, DRAWS=True, FAST=True)

h100, a100 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
lean = dict(param="*u8", residual="*i8", m="*u8", v="*u8")
ptx = compile(adamw._adamw_kernel, h100, step("codes", 8, "8bit", False), **lean)
# All of a group's row lies in one warp's registers: tiles never pass through shared memory.
assert len(re.findall(r"st\\.shared", ptx)) <= 8
compile(adamw._adamw_kernel, h100, step("codes", 8, "8bit", False, clock=True), **lean)
compile(adamw._adamw_kernel, a100, step("codes", 8, "8bit", True), lr="*fp32", **lean)
compile(adamw._adamw_kernel, h100, step("split", 16, "bf16", True), lr="*fp32",
        param="*i16", residual="*i16", m="*i16", v="*i16")
compile(gradient._measure_kernel, h100, dict(BLOCK=4096, PROGRAMS=1024))
compile(split._unpack_kernel, h100, dict(BITS=8, CODES=True, BLOCK=2048), residual="*i8")
print("compiled")
"""


def test_kernels_compile_for_gpus_without_one(tmp_path):
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
